"""Chat templates that write tool calls, one for each family, written for tests: no more than what shows the format."""

_TURNS = """\
{%% if tools %%}<|im_start|>system
Tools:{%% for tool in tools %%} {{ tool | tojson }}{%% endfor %%} %s<|im_end|>
{%% endif %%}
{%% for m in messages %%}<|im_start|>{{ m.role }}
{%% if m.role == 'assistant' and m.reasoning_content %%}%s{%% endif %%}
{{- m.content or '' }}
{%%- if m.tool_calls %%}%s{%% endif %%}<|im_end|>
{%% endfor %%}
{%%- if add_generation_prompt %%}<|im_start|>assistant
{%% endif %%}"""
THINK = r"{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"


def template(calls: str, hint: str = "", reasoning: str = "") -> str:
    """`calls` writes m.tool_calls. `hint`: what the system message says about the format."""
    return _TURNS % (hint, reasoning, calls)


def each(call: str, separator: str = "") -> str:
    """`call` writes one call: f.name, f.arguments."""
    between = f"{{% if not loop.last %}}{{{{ {separator!r} }}}}{{% endif %}}" if separator else ""
    return f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{between}{{% endfor %}}"


def tags(begin: str, argument: str, end: str) -> str:
    """`argument` writes one argument: k, v."""
    value = "{% set v = v if v is string else v | tojson %}"
    return f"{begin}{{% for k, v in f.arguments.items() %}}{value}{argument}{{% endfor %}}{end}"


_OBJECT = """{{ '{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}' }}"""
HERMES = template(each(r"{{ '<tool_call>\n' }}" + _OBJECT + r"{{ '\n</tool_call>' }}", "\n"), reasoning=THINK)
QWEN3_CODER = template(
    each(
        tags(
            r"{{ '<tool_call>\n<function=' + f.name + '>\n' }}",
            r"{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}",
            r"{{ '</function>\n</tool_call>' }}",
        ),
        "\n",
    ),
    reasoning=THINK,
)
GLM = template(
    each(
        tags(
            r"{{ '<tool_call>' + f.name + '\n' }}",
            r"{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>\n' }}",
            "{{ '</tool_call>' }}",
        ),
        "\n",
    )
)
MINIMAX = template(
    r"{{ '<minimax:tool_call>\n' }}"
    + each(
        tags(
            r"""{{ '<invoke name="' + f.name + '">\n' }}""",
            r"""{{ '<parameter name="' + k + '">' + v + '</parameter>\n' }}""",
            r"{{ '</invoke>\n' }}",
        )
    )
    + "{{ '</minimax:tool_call>' }}"
)
LLAMA3 = """\
{%- if tools %}Answer with {"name": function name, "parameters": dictionary}.{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"""
MISTRAL = template(each("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"))
MISTRAL_ARRAY = template(
    "[TOOL_CALLS][" + each("""{{ {'name': f.name, 'arguments': f.arguments, 'id': c.id} | tojson }}""", ", ") + "]"
)
GEMMA4 = template(
    each("""<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments.items() -%}
{{ k }}:<|"|>{{ v }}<|"|>{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>"""),
    reasoning="<|channel>thought\n{{ m.reasoning_content }}<channel|>",
)
HARMONY = """\
{%- for m in messages %}<|start|>{{ m.role }}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|channel|>commentary to=functions.{{ f.name }} {# -#}
<|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>
{%- else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"""
LFM2 = template("", hint="<|tool_list_start|><|tool_list_end|>")
LLAMA4 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|header_start|>{{ m.content }}{% endfor %}"
)
DEEPSEEK = template(
    "<\uff5ctool▁calls▁begin\uff5c>"
    + each(
        "<\uff5ctool▁call▁begin\uff5c>{{ f.name }}<\uff5ctool▁sep\uff5c>{{ f.arguments }}<\uff5ctool▁call▁end\uff5c>"
    )
    + "<\uff5ctool▁calls▁end\uff5c>"
)
KIMI = template(
    "<|tool_calls_section_begin|>"
    + each(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
    )
    + "<|tool_calls_section_end|>"
)
# No family's: only what they write tells their format.
UNKNOWN_JSON = template(
    "<<calls>>" + each("""{{ {'tool': f.name, 'input': f.arguments} | tojson }}""", " | ") + "<</calls>>"
)
UNKNOWN_NAMED = template(each("<run:{{ f.name }}>{{ f.arguments | tojson }}</run>"))
UNKNOWN_TEXT = template(each("<run:{{ f.name }}>{{ f.arguments + '' }}</run>"))  # arguments must be text
UNKNOWN_ARRAY = template("<do>[" + each(_OBJECT, ", ") + "]</do>")
