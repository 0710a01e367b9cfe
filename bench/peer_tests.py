"""Reads samples from the test files of other engines, without running them: literals and asserts by their syntax."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvarn.dialect import CallArguments, CallBegin, CallEnd, Dialect, Parser, Tool, joined

# From the name of a file and the source of a test class (empty: none) to what its answers are written in.
DialectOf = Callable[[str, str], Dialect | None]


@dataclass
class Sample:
    file: str
    test: str
    dialect: Dialect
    text: str
    tools: dict[str, Tool]
    n: int | None = None
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, Any] = field(default_factory=dict)
    parts: list[tuple[int, str, Any]] = field(default_factory=list)

    @property
    def asserts(self) -> bool:
        return self.n is not None or bool(self.names or self.arguments)

    def got(self) -> list[tuple[str, Any]]:
        words = re.findall(r"[A-Za-z_][\w.-]*", self.text) if self.n or not self.tools else []  # any name is a tool's
        known = {word: Tool(word) for word in (*words, *self.names.values())} | self.tools
        parser = Parser(self.dialect, list(known.values()))
        calls: dict[int, list[str]] = {}
        done = []
        for delta in joined([d for c in self.text for d in parser.push(c)] + parser.finish()):
            if isinstance(delta, CallBegin):
                calls[delta.index] = [delta.name, ""]
            elif isinstance(delta, CallArguments):
                calls[delta.index][1] += delta.text
            elif isinstance(delta, CallEnd) and delta.complete:
                done.append((calls[delta.index][0], json.loads(calls[delta.index][1])))
        return done

    def differs(self) -> str:
        calls = self.got()
        if self.n is not None and len(calls) != self.n:
            return f"{len(calls)} calls instead of {self.n}"
        for i, name in self.names.items():
            if i >= len(calls) or calls[i][0] != name:
                return f"call {i} is not {name}"
        for i, wanted in self.arguments.items():
            if i >= len(calls) or calls[i][1] != wanted:
                return f"arguments {calls[i][1] if i < len(calls) else None!r} instead of {wanted!r}"
        for i, key, wanted in self.parts:
            if i >= len(calls) or calls[i][1].get(key) != wanted:
                return f"argument {key} is {calls[i][1].get(key) if i < len(calls) else None!r} instead of {wanted!r}"
        return ""


class Unknown(Exception):
    """An expression that is not made of literals."""


class Reader:
    """Evaluates literals, and finds the samples of one test file."""

    def __init__(self, path: Path, dialect_of: DialectOf) -> None:
        self.path = path
        self._dialect_of = dialect_of
        self.tree = ast.parse(path.read_text())
        self.names: dict[str, Any] = {}
        for node in self.tree.body:
            self._assign(node)
        self.tools = {tool.name: tool for tool in self._tools()}

    def _assign(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                self.names[node.targets[0].id] = self.value(node.value)
            except Unknown:
                self.names.pop(node.targets[0].id, None)

        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in self.names:
            try:
                self.names[node.target.id] += self.value(node.value)
            except (Unknown, TypeError):
                self.names.pop(node.target.id)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.names:
                return self.names[node.id]
            case ast.JoinedStr():
                return "".join(str(self.value(part)) for part in node.values)
            case ast.FormattedValue():
                return self.value(node.value)
            case ast.List() | ast.Tuple():
                return [self.value(each) for each in node.elts]
            case ast.Dict():
                return {self.value(k): self.value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
            case ast.BinOp(op=ast.Add()):
                left, right = self.value(node.left), self.value(node.right)
                if type(left) is type(right) and isinstance(left, str | list):
                    return left + right
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.Call():
                return self._called(node)
        raise Unknown

    def _called(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func).split(".")[-1]
        given = {each.arg: each.value for each in node.keywords if each.arg}
        if name == "dumps" and node.args:
            return json.dumps(self.value(node.args[0]))
        if name == "FunctionCall":
            return ("call", self.value(given["name"]), self.value(given["arguments"]))
        if name == "ToolCall" and "function" in given:
            return self.value(given["function"])
        if name == "param":
            return [self.value(each) for each in node.args]
        raise Unknown

    def _tools(self) -> Iterator[Tool]:
        for node in ast.walk(self.tree):
            given: dict[str, ast.expr] = {}
            if isinstance(node, ast.Dict):
                given = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
            elif isinstance(node, ast.Call):
                given = {each.arg: each.value for each in node.keywords if each.arg}
            if {"name", "parameters"} <= given.keys():
                try:
                    yield Tool(self.value(given["name"]), parameters=self.value(given["parameters"]))
                except (Unknown, TypeError):
                    continue

    # -- samples -----------------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """Those of tests with parameters, of configurations, and of plain tests."""
        for scope in [self.tree, *[node for node in self.tree.body if isinstance(node, ast.ClassDef)]]:
            dialect = self._dialect_of(self.path.stem, ast.unparse(scope) if scope is not self.tree else "")
            if dialect is None:
                continue
            for node in scope.body:
                if isinstance(node, ast.FunctionDef):
                    yield from self._parametrized(node, dialect)
                    yield from self._configured(node, dialect)
                    if node.name.startswith("test"):
                        yield from self._plain(node, dialect)

    def _parametrized(self, node: ast.FunctionDef, dialect: Dialect) -> Iterator[Sample]:
        for mark in node.decorator_list:
            if not (isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize")):
                continue
            given = dict(zip(("argnames", "argvalues"), mark.args, strict=False))
            given |= {each.arg: each.value for each in mark.keywords if each.arg}
            try:
                names, rows = self.value(given["argnames"]), self.value(given["argvalues"])
            except (Unknown, KeyError):
                continue
            names = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
            if "model_output" not in names or "expected_tool_calls" not in names:
                continue
            for row in rows:
                text, calls = row[names.index("model_output")], row[names.index("expected_tool_calls")]
                sample = Sample(self.path.name, node.name, dialect, text, self.tools, len(calls))
                for i, (_, name, arguments) in enumerate(calls):
                    sample.names[i], sample.arguments[i] = name, json.loads(arguments or "{}")
                yield sample

    def _configured(self, node: ast.FunctionDef, dialect: Dialect) -> Iterator[Sample]:
        """vLLM's ToolParserTestConfig."""
        for call in ast.walk(node):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("ToolParserTestConfig")):
                continue
            given = {}
            for each in call.keywords:
                try:
                    given[each.arg] = self.value(each.value)
                except Unknown:
                    continue

            def made(key: str, given: dict[Any, Any] = given, **wanted: Any) -> Iterator[Sample]:
                if f"{key}_output" in given:
                    yield Sample(self.path.name, key, dialect, given[f"{key}_output"], self.tools, **wanted)

            name = given.get("single_tool_call_expected_name", "get_weather")
            one = given.get("single_tool_call_expected_args", {"city": "Tokyo"})
            names = given.get("parallel_tool_calls_names", ["get_weather", "get_time"])
            yield from made("no_tool_calls", n=0)
            yield from made("single_tool_call", n=1, names={0: name}, parts=[(0, k, v) for k, v in one.items()])
            count = given.get("parallel_tool_calls_count", 2)
            yield from made("parallel_tool_calls", n=count, names=dict(enumerate(names)))
            for key in ("various_data_types", "empty_arguments", "surrounding_text", "escaped_strings"):
                yield from made(key, n=1)

    def _plain(self, node: ast.FunctionDef, dialect: Dialect) -> Iterator[Sample]:
        """A text goes to a parser, then come asserts."""
        before = dict(self.names)
        current: Sample | None = None
        bound: dict[str, int] = {}  # names of a call, or of its arguments
        for statement in node.body:
            self._assign(statement)
            for call in [each for each in ast.walk(statement) if isinstance(each, ast.Call)]:
                method = ast.unparse(call.func).split(".")[-1]
                if method in ("extract_tool_calls", "detect_and_parse", "run_tool_extraction", "parse_non_stream"):
                    text = self._first_text(call)
                    if text is not None:
                        if current is not None and current.asserts:
                            yield current
                        current = Sample(self.path.name, node.name, dialect, text, self.tools)
            if current is None:
                continue
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                index = _index(statement.value, bound)
                if index is not None:
                    bound[statement.targets[0].id] = index
            self._check(statement, current, bound)
        if current is not None and current.asserts:
            yield current
        self.names = before

    def _first_text(self, call: ast.Call) -> str | None:
        for each in [*call.args, *(k.value for k in call.keywords)]:
            try:
                found = self.value(each)
            except Unknown:
                continue
            if isinstance(found, str):
                return found
        return None

    def _check(self, statement: ast.stmt, sample: Sample, bound: dict[str, int]) -> None:
        match statement:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])):
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="assertEqual"), args=[left, right, *_])):
                pass
            case _:
                return
        try:
            wanted = self.value(right)
        except Unknown:
            return
        text = ast.unparse(left)
        index = _index(left, bound)
        if text.startswith("len(") and text.rstrip(")").endswith("calls"):
            sample.n = wanted
        elif text.endswith(("tools_called",)) and wanted is False:
            sample.n = 0
        elif index is not None and text.endswith(".name"):
            sample.names[index] = wanted
        elif (
            index is not None
            and isinstance(left, ast.Subscript)
            and isinstance(left.slice, ast.Constant)
            and isinstance(left.slice.value, str)
        ):
            if isinstance(left.value, ast.Name) or "loads" in text:
                sample.parts.append((index, left.slice.value, wanted))
        elif index is not None and isinstance(wanted, dict):
            sample.arguments[index] = wanted


def _index(node: ast.expr, bound: dict[str, int]) -> int | None:
    """The number of the call that an expression is about."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Subscript)
            and isinstance(each.slice, ast.Constant)
            and isinstance(each.slice.value, int)
            and ast.unparse(each.value).endswith("calls")
        ):
            return each.slice.value
        if isinstance(each, ast.Name) and each.id in bound:
            return bound[each.id]
    return None
