"""The formats of known families, recognized by markers in the template's source.

`fixed` formats are taken as they are here, because rendering a template cannot show all of them. For the others, what
derive.py finds comes first, because templates differ in details; the table has the name, and a fallback.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.dialect.dialect import Dialect


@dataclass(frozen=True)
class Family:
    dialect: Dialect
    marks: tuple[str, ...]  # all of them are in the source
    never: tuple[str, ...] = ()  # none of them is
    fixed: bool = False


def _deep(name: str) -> str:
    """DeepSeek's tokens have a wide bar."""
    return f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>"


def _tagged(name: str, section: str, call: str, key: str, end: str = ">\n") -> Dialect:
    """<section> <call NAME> <key KEY> value </key> ... </call> </section>."""
    call_tag, key_tag = call[1:].split("=")[0].split(" ")[0], key[1:].split("=")[0].split(" ")[0]
    quote, line = '"' if call.endswith('"') else "", end[1:]
    return Dialect(
        name,
        form="tagged",
        section=(f"<{section}>\n", f"\n</{section}>"),
        call=(call, f"</{call_tag}>"),
        separator="\n",
        one_per_section=True,
        name_end=f"{quote}>\n",
        key=(key, quote + end),
        value=("", f"{line}</{key_tag}>\n"),
    )


HARMONY = Dialect(
    "harmony", form="harmony", reasoning=("<|channel|>analysis<|message|>", "<|end|>"), parallel=False, ids="call"
)
LFM2 = Dialect("lfm2", form="pythonic", section=("<|tool_call_start|>[", "]<|tool_call_end|>"), separator=", ")
FAMILIES: Sequence[Family] = (
    Family(HARMONY, ("<|channel|>", "<|message|>"), fixed=True),
    Family(
        Dialect("gemma4", form="gemma", call=("<|tool_call>call:", "<tool_call|>"), quote='<|"|>'),
        ("<|tool_call>",),
        fixed=True,
    ),
    Family(
        Dialect(
            "functiongemma",
            form="gemma",
            call=("<start_function_call>call:", "<end_function_call>"),
            quote="<escape>",
        ),
        ("<start_function_call>",),
        fixed=True,
    ),
    Family(
        Dialect("mistral", form="named", call=("[TOOL_CALLS]", ""), name_end="[ARGS]", id_key="[CALL_ID]", ids="nine"),
        ("[TOOL_CALLS]", "[ARGS]"),
        fixed=True,
    ),
    Family(
        Dialect("mistral-array", call=("[TOOL_CALLS]", ""), separator=", ", array=True, id_key="id", ids="nine"),
        ("[TOOL_CALLS]",),
        fixed=True,
    ),
    Family(
        Dialect(
            "kimi",
            form="named",
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=("<|tool_call_begin|>", "<|tool_call_end|>"),
            name_end="<|tool_call_argument_begin|>",
            numbered=True,
        ),
        ("<|tool_calls_section_begin|>",),
        fixed=True,
    ),
    Family(
        Dialect(
            "deepseek-v3",
            form="named",
            section=(_deep("tool▁calls▁begin"), _deep("tool▁calls▁end")),
            call=(f"{_deep('tool▁call▁begin')}function{_deep('tool▁sep')}", f"\n```{_deep('tool▁call▁end')}"),
            separator="\n",
            name_end="\n```json\n",
        ),
        (_deep("tool▁calls▁begin"), "```json"),
        fixed=True,
    ),
    Family(
        Dialect(
            "deepseek-v3.1",
            form="named",
            section=(_deep("tool▁calls▁begin"), _deep("tool▁calls▁end")),
            call=(_deep("tool▁call▁begin"), _deep("tool▁call▁end")),
            name_end=_deep("tool▁sep"),
        ),
        (_deep("tool▁calls▁begin"),),
        fixed=True,
    ),
    Family(LFM2, ("<|tool_call_start|>",), fixed=True),
    Family(LFM2, ("<|tool_list_start|>",), fixed=True),
    Family(
        Dialect("olmo3", form="pythonic", section=("<function_calls>\n", "\n</function_calls>"), separator="\n"),
        ("<function_calls>",),
        ("<invoke",),
        fixed=True,
    ),
    Family(
        Dialect("llama4", form="pythonic", section=("<|python_start|>[", "]<|python_end|>"), separator=", ", bare=True),
        ("<|header_start|>", "tools"),
        fixed=True,
    ),
    Family(
        Dialect(
            "llama3",
            call=("<|python_tag|>", ""),
            separator="; ",
            bare=True,
            arguments_key="parameters",
            parallel=False,
        ),
        ("<|start_header_id|>", '"parameters"'),
        ("<tool_call>",),
        fixed=True,
    ),
    Family(
        Dialect(
            "command",
            call=("<|START_ACTION|>", "<|END_ACTION|>"),
            separator=", ",
            array=True,
            name_key="tool_name",
            arguments_key="parameters",
            id_key="tool_call_id",
        ),
        ("<|START_ACTION|>",),
        fixed=True,
    ),
    Family(
        _tagged("minimax", "minimax:tool_call", '<invoke name="', '<parameter name="', ">"), ("<minimax:tool_call>",)
    ),
    Family(_tagged("seed", "seed:tool_call", "<function=", "<parameter=", ">"), ("<seed:tool_call>",)),
    Family(
        _tagged("qwen3-coder", "tool_call", "<function=", "<parameter="), ("<tool_call>", "<function=", "<parameter=")
    ),
    Family(
        Dialect(
            "glm",
            form="tagged",
            call=("<tool_call>", "</tool_call>"),
            separator="\n",
            name_end="\n",
            key=("<arg_key>", "</arg_key>\n"),
            value=("<arg_value>", "</arg_value>\n"),
        ),
        ("<tool_call>", "<arg_key>"),
    ),
    Family(
        Dialect("hermes", call=("<tool_call>\n", "\n</tool_call>"), separator="\n"),
        ("<tool_call>",),
    ),
    Family(
        Dialect("granite", call=("<|tool_call|>", ""), separator=", ", array=True),
        ("<|tool_call|>",),
        ("<|/tool_call|>",),
    ),
    Family(Dialect("phi4", call=("<|tool_call|>", "<|/tool_call|>"), separator=", ", array=True), ("<|/tool_call|>",)),
    Family(
        Dialect("longcat", call=("<longcat_tool_call>\n", "\n</longcat_tool_call>"), separator="\n"),
        ("<longcat_tool_call>",),
    ),
    Family(
        Dialect("tool-calls", call=("<tool_calls>", "</tool_calls>"), separator=", ", array=True), ("<tool_calls>",)
    ),
    Family(
        Dialect("internlm", call=("<|action_start|><|plugin|>", "<|action_end|>"), arguments_key="parameters"),
        ("<|action_start|>", "<|plugin|>"),
    ),
)

# In order: the first pair that is in the template's source, or in what it writes, is the model's.
REASONING: Sequence[tuple[str, str]] = (
    ("<|channel>thought", "<channel|>"),
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
)


def family_of(source: str) -> Family | None:
    for family in FAMILIES:
        if all(mark in source for mark in family.marks) and not any(mark in source for mark in family.never):
            return family
    return None


def family_named(name: str) -> Dialect:
    return next(family.dialect for family in FAMILIES if family.dialect.name == name)
