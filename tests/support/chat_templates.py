"""Chat templates in the shapes that published models have, written for tests, and templates that do odd things."""

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA2 = """\
{% for m in messages %}
{% if m.role == 'system' %}{{ bos_token + '[INST] <<SYS>>\n' + m.content + '\n<</SYS>>\n\n [/INST]' }}
{%- elif m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""
LLAMA3 = """\
{{- bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
ZEPHYR = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
PHI3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}
{% endfor %}"""
GEMMA = """\
{{ bos_token }}{% for m in messages %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
QWEN3 = """\
{% for m in messages %}{% set content = m.content %}
{%- if content.startswith('<tool_response>') and content.endswith('</tool_response>') %}
{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{% set thoughts = '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

PUBLISHED = {
    "chatml": CHATML,
    "llama 2": LLAMA2,
    "llama 3": LLAMA3,
    "zephyr": ZEPHYR,
    "phi 3": PHI3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen 3": QWEN3,
}
_EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n[BODY]<|im_end|>\n{% endfor %}"
ODD = {
    "deletes": _EACH.replace("[BODY]", "{{ m.content | replace('x', '') | replace('\\n', '') }}"),
    "lowers": _EACH.replace("[BODY]", "{{ m.content | lower }}"),
    "splits and joins": _EACH.replace("[BODY]", "{{ m.content.split('|') | join('|') }}"),
    "reverses": _EACH.replace("[BODY]", "{{ m.content | reverse }}"),
    "cuts": _EACH.replace("[BODY]", "{{ m.content[1:] }}{{ m.content[:1] }}"),
    "letter by letter": _EACH.replace("[BODY]", "{% for c in m.content %}{{ c }}{% endfor %}"),
    "half a token before": _EACH.replace("[BODY]", "<|im_{{ m.content }}"),
    "half a token after": _EACH.replace("[BODY]", "{{ m.content }}im_end|>"),
    "joined": "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>",
    "json": _EACH.replace("[BODY]", "{{ m | tojson }}"),
    "json in ASCII": _EACH.replace("[BODY]", "{{ m | tojson(ensure_ascii=true) }}"),
    "representation": "<|im_start|>{{ messages }}<|im_end|>",
}

_NAMES = """
<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|system|> <|user|> <|assistant|> <|end|>
<start_of_turn> <end_of_turn> [INST] [/INST] <|endoftext|>
"""
CONTROL = tuple(_NAMES.split())
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<b>")
