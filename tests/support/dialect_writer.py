"""Writes tool calls as a model that was trained on a dialect does. The opposite of the parser, as plain as possible."""

import json
from typing import Any

from kvarn.dialect import Dialect

Calls = list[tuple[str, dict[str, Any]]]


def written(d: Dialect, calls: Calls) -> str:
    bodies = [_body(d, name, arguments, number) for number, (name, arguments) in enumerate(calls)]
    begin = "" if d.bare and d.form == "json" else d.call[0]
    if d.array:
        return f"{begin}[{d.separator.join(bodies)}]{d.call[1]}"
    each = [begin + body + d.call[1] for body in bodies]
    if d.one_per_section:
        return d.separator.join(d.section[0] + one + d.section[1] for one in each)
    if d.bare and d.form == "pythonic":
        return f"[{d.separator.join(each)}]"
    return d.section[0] + d.separator.join(each) + d.section[1]


def _body(d: Dialect, name: str, arguments: dict[str, Any], number: int) -> str:
    if d.form == "json":
        id = {d.id_key: f"abcdefg{number:02}"} if d.ids == "nine" else {}
        return json.dumps({d.name_key: name, d.arguments_key: arguments, **id}, ensure_ascii=False)
    if d.form == "named":
        full = f"functions.{name}:{number}" if d.numbered else name
        return full + d.name_end + json.dumps(arguments)
    if d.form == "tagged":
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        tags = [d.key[0] + k + d.key[1] + d.value[0] + v + d.value[1] for k, v in values.items()]
        return name + d.name_end + "".join(tags)
    if d.form == "pythonic":
        values = {k: str(v) if isinstance(v, bool) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        return f"{name}({', '.join(f'{k}={v}' for k, v in values.items())})"
    if d.form == "gemma":
        return name + _gemma(d, arguments)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"


def _gemma(d: Dialect, value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(d, v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(d, v) for v in value) + "]"
    return f"{d.quote}{value}{d.quote}" if isinstance(value, str) else json.dumps(value)
