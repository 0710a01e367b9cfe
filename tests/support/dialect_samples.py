"""Answers of models in every dialect, and what they say.

What an answer says is a list of pairs: ("say", text), ("think", text), (NAME, arguments) for a call, and
("bad", a part of the error). A call that broke after its begin is ("bad", error).
"""

import json
from collections.abc import Iterable
from typing import Any

from kvarn.dialect import CallArguments, CallBegin, CallEnd, Content, Delta, Dialect, Malformed, Reasoning, Tool
from kvarn.dialect.families import FAMILIES

TOOLS = (
    Tool(
        "weather",
        "The weather in a city",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["C", "F"]},
                "wind": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object", "properties": {"note": {"type": "string"}}},
                "either": {"type": ["string", "null"]},
            },
            "required": ["city"],
        },
    ),
    Tool("time"),
)
DIALECTS: dict[str, Dialect] = {family.dialect.name: family.dialect for family in FAMILIES}
Said = list[tuple[str, Any]]


def said(deltas: Iterable[Delta]) -> Said:
    result: Said = []
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                result.append(("say", text))
            case Reasoning(text):
                result.append(("think", text))
            case CallBegin(index, _, name):
                assert index == len(names)
                names[index], texts[index] = name, ""
            case CallArguments(index, text):
                assert index == len(names) - 1
                texts[index] += text
            case CallEnd(index, complete):
                if complete:
                    result.append((names[index], json.loads(texts[index])))
            case Malformed(text, error):
                result.append(("bad", error))
                assert text
    return result


_HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
_CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
_OSLO = ("weather", {"city": "Oslo"})
_NO_TOOL = ("bad", "there is no tool 'wether'")
_CUT = ("bad", "the text ends inside a call")
_WIDE = "\N{FULLWIDTH VERTICAL LINE}"

SAMPLES: list[tuple[str, str, Said]] = [
    ("hermes", "Only text.\n", [("say", "Only text.\n")]),
    ("hermes", "", []),
    ("hermes", " \n", [("say", " \n")]),
    ("hermes", _HERMES, [_OSLO]),
    ("hermes", f"I look.\n\n{_HERMES}\n{_HERMES}\nDone. ", [("say", "I look."), _OSLO, _OSLO, ("say", "Done. ")]),
    ("hermes", '<tool_call>{"name":"time"}</tool_call>', [("time", {})]),
    ("hermes", '<tool_call>{"name":"time","arguments":null}</tool_call>', [("time", {})]),
    ("hermes", '<tool_call> {"arguments": {"city": "Oslo"}, "name": "weather"}', [_OSLO]),
    ("hermes", '<tool_call>{"name":"weather","parameters":{"city":"Oslo"}}</tool_call>', [_OSLO]),
    ("hermes", '<tool_call>{"name":"weather","arguments":"{\\"city\\": \\"Oslo\\"}"}</tool_call>', [_OSLO]),
    ("hermes", '<tool_call>[{"name": "time"}, {"name": "time"}]</tool_call>', [("time", {}), ("time", {})]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}</tool_call>',
        [_OSLO],
    ),
    (
        "hermes",
        '<tool_call>{"name":"weather","arguments":{"city":"</tool_call> {\\"x\\": [1}] \\u00e5 \\\\ å 🎉",'
        '"days":-1.5e3}}</tool_call>',
        [("weather", {"city": '</tool_call> {"x": [1}] å \\ å 🎉', "days": -1500.0})],
    ),
    (
        "hermes",
        '<tool_call>{"name":"weather","arguments":{"city":"two\nlines\tand \\\'quotes\\\'"}}</tool_call>',
        [("weather", {"city": "two\nlines\tand 'quotes'"})],
    ),
    (
        "hermes",
        '<tool_call>{"name":"weather","arguments":{"city":"a","city":"b"}}</tool_call>',
        [("weather", {"city": "b"})],
    ),
    ("hermes", '<tool_call>{"name":"wether","arguments":{}}</tool_call> ok', [_NO_TOOL, ("say", "ok")]),
    ("hermes", "<tool_call>not JSON</tool_call>", [("bad", "'{' is missing")]),
    ("hermes", '<tool_call>{"arguments":{}}</tool_call>', [("bad", "the call has no name")]),
    ("hermes", '<tool_call>{"name":"time","name":"time"}</tool_call>', [("bad", "the call has two names")]),
    ("hermes", '<tool_call>{"name":"time","arguments":[1]}</tool_call>', [("bad", "the arguments are not an object")]),
    ("hermes", '<tool_call>{"name":"time","arguments":{"a":01}}</tool_call>', [("bad", "'01' is not JSON")]),
    ("hermes", '<tool_call>{"name":"time","arguments":{"a":1,}}</tool_call>', [("bad", "'\"' is missing")]),
    (
        "hermes",
        '<tool_call>{"name":"time","arguments":{}}}</tool_call>',
        [("bad", "'</tool_call>' does not follow the call")],
    ),
    ("hermes", '<tool_call>{"name":"weather","arguments":{"city":"Os', [_CUT]),
    ("hermes", '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}\n</tool_', [_OSLO]),
    ("hermes", "<tool_call>", [_CUT]),
    ("hermes", "a <tool_ b", [("say", "a <tool_ b")]),
    ("hermes", "a <tool_cal", [("say", "a "), ("bad", "the text ends inside the marker of a call")]),
    (
        "hermes",
        f'<tool_call>{{"name": "time", "arguments": {{"a" <tool_call>{_HERMES}',
        [("bad", "':' is missing"), ("bad", "'{' is missing"), _OSLO],
    ),
    ("hermes", '```json\n{\n  "name": "weather",\n  "arguments": {"city": "Oslo"}\n}\n```\n', [_OSLO]),
    ("hermes", '{"name": "weather", "arguments": {"city": "Oslo"}}', [_OSLO]),
    ("hermes", '{"name": "Bob", "arguments": {}}', [("say", '{"name": "Bob", "arguments": {}}')]),
    ("hermes", '```json\n{"a": 1}\n``` is', [("say", '```json\n{"a": 1}\n``` is')]),
    ("hermes", "```python\nx = {}\n```", [("say", "```python\nx = {}\n```")]),
    ("hermes", "``", [("say", "``")]),
    ("hermes", 'So: {"name": "time"}', [("say", 'So: {"name": "time"}')]),
    ("hermes", '{"name": "weather", "arguments": {"city": "Os', [_CUT]),
    ("qwen3-coder", _CODER, [_OSLO]),
    ("qwen3-coder", f"Hm.\n{_CODER}\n{_CODER}", [("say", "Hm."), _OSLO, _OSLO]),
    ("qwen3-coder", "<function=weather><parameter=city>Oslo</parameter></function></tool_call>", [_OSLO]),
    ("qwen3-coder", "<tool_call>\n<function=time>\n</function>\n</tool_call>", [("time", {})]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n\nline\n</parameter>\n<b>\n</parameter>\n\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=wind>\nTrue\n</parameter>\n<parameter=units>\nC\n</parameter>\n"
        '<parameter=places>\n["a", "b"]\n</parameter>\n<parameter=either>\n12\n</parameter>\n'
        "<parameter=more>\nnot JSON\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "weather",
                {
                    "city": "\nline\n</parameter>\n<b>",
                    "days": 3,
                    "wind": True,
                    "units": "C",
                    "places": ["a", "b"],
                    "either": "12",
                    "more": "not JSON",
                },
            )
        ],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=either>\nnull\n</parameter>\n<parameter=new>\n[1]\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"either": None, "new": [1]})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=wether>\n</function>\n</tool_call>", [_NO_TOOL]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n",
        [_CUT],
    ),
    (
        "qwen3-coder",
        "<function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function>",
        [("bad", "the argument 'city' comes twice")],
    ),
    (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nOslo\n</arg_value>\n</tool_call>",
        [("weather", {"city": "\nOslo\n"})],
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        [("weather", {"days": 3})],
    ),
    ("glm", "<tool_call>time</tool_call> ok", [("time", {}), ("say", "ok")]),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        '<invoke name="time">\n</invoke>\n</minimax:tool_call>',
        [_OSLO, ("time", {})],
    ),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', [_OSLO]),
    ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', [_OSLO]),
    ("llama3", ' {"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', [("time", {}), ("time", {})]),
    ("llama3", '{"answer": {"name": 3}} is JSON', [("say", '{"answer": {"name": 3}} is JSON')]),
    ("llama3", "[1, 2] {", [("say", "[1, 2] {")]),
    ("llama3", 'Text {"name": "time"}', [("say", 'Text {"name": "time"}')]),
    ("llama3", '{"name": "wether", "parameters": {}}', [_NO_TOOL]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Os', [_CUT]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]time[ARGS]{}', [_OSLO, ("time", {})]),
    ("mistral", 'I look. [TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "Oslo"}', [("say", "I look."), _OSLO]),
    ("mistral", "[TOOL_CALLS]weather", [_CUT]),
    ("mistral", "[TOOL_CALLS]weather[ARGS][1]", [("bad", "the arguments are not an object")]),
    (
        "mistral-array",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abc123XYZ"}, {"name": "time"}]',
        [_OSLO, ("time", {})],
    ),
    ("mistral-array", '[TOOL_CALLS][{"name": "time"}, {"name": "wether"}]', [("time", {}), _NO_TOOL]),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a "b", {c}\n<|"|>,days:3,wind:true,places:[<|"|>x<|"|>,<|"|>y<|"|>],'
        'more:{note:<|"|>n<|"|>}}<tool_call|>',
        [("weather", {"city": 'a "b", {c}\n', "days": 3, "wind": True, "places": ["x", "y"], "more": {"note": "n"}})],
    ),
    (
        "gemma4",
        "<|tool_call>call:time{}<tool_call|><|tool_call>call:weather{city:Oslo}<tool_call|>",
        [("time", {}), _OSLO],
    ),
    ("gemma4", "<|tool_call>call:weather{city:}<tool_call|>", [("bad", "an argument without a value")]),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>", [_OSLO]),
    (
        "lfm2",
        '<|tool_call_start|>[weather(city="Oslo"), time()]<|tool_call_end|>Wait.',
        [_OSLO, ("time", {}), ("say", "Wait.")],
    ),
    (
        "llama4",
        "[weather(city='it\\'s \\u00e5\\x41 \"x\"\\n', days=-2, "
        "wind=False, places=['a', \"b\",], more={'note': None, 'n': (1, 2.5)})]",
        [
            (
                "weather",
                {
                    "city": 'it\'s åA "x"\n',
                    "days": -2,
                    "wind": False,
                    "places": ["a", "b"],
                    "more": {"note": None, "n": [1, 2.5]},
                },
            )
        ],
    ),
    ("llama4", "[a link](x) and weather(city=1)", [("say", "[a link](x) and weather(city=1)")]),
    ("llama4", "[weather(city='Oslo', time())]", [("bad", "an argument without a name")]),
    ("llama4", "[weather(city='Oslo'", [_CUT]),
    ("llama4", "Hm. <|python_start|>[weather(city='Oslo')]<|python_end|> ok", [("say", "Hm."), _OSLO, ("say", "ok")]),
    ("lfm2", "<|tool_call_start|> [time( )\n]\n<|tool_call_end|>", [("time", {})]),
    ("lfm2", '<|tool_call_start|>[{"name": "time", "arguments": {}}]<|tool_call_end|>', [("time", {})]),
    ("llama3", '<|python_tag|>{"name": "time"};{"name": "time"}', [("time", {}), ("time", {})]),
    ("llama3", '<|python_tag|>{"name": "time"}; and text', [("time", {}), ("say", "and text")]),
    ("olmo3", '<function_calls>\nweather(city="Oslo")\ntime()\n</function_calls>', [_OSLO, ("time", {})]),
    (
        "harmony",
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [("think", "I think."), _OSLO],
    ),
    ("harmony", "<|channel|>final<|message|>a < b<|return|>", [("say", "a < b")]),
    ("harmony", "plain < text", [("say", "plain < text")]),
    ("harmony", " to=functions.time<|channel|>commentary<|message|>{}", [("time", {})]),
    ("harmony", '<|channel|>commentary to=functions.wether<|message|>{"a": 1}<|call|>', [_NO_TOOL]),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "Os', [_CUT]),
    ("harmony", "<|channel|>analysis", [("bad", "a message without <|message|>")]),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [_OSLO, ("time", {})],
    ),
    (
        "deepseek-v3",
        f"<{_WIDE}tool▁calls▁begin{_WIDE}><{_WIDE}tool▁call▁begin{_WIDE}>function<{_WIDE}tool▁sep{_WIDE}>weather\n"
        f'```json\n{{"city": "Oslo"}}\n```<{_WIDE}tool▁call▁end{_WIDE}><{_WIDE}tool▁calls▁end{_WIDE}>',
        [_OSLO],
    ),
    (
        "command",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}]<|END_ACTION|>',
        [_OSLO],
    ),
]
