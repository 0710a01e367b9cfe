"""What an answer must look like: tool calls in the model's own format, a structure, reasoning before them.

Reasoning is free. It may be open in the prompt (the rule begins after its end marker), be written by the model (the
rule begins at once, or after reasoning) or be closed in the prompt. Non-goals: the formats of calls (kvarn.dialect);
compiling.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvarn.chats.tools import ToolUse
from kvarn.dialect import Dialect, Tool, grammar, opens_reasoning
from kvarn.engine.constraint import Constraint
from kvarn.errors import BadStructure, KvarnError
from kvarn.structured import Compiled, Compiler, Structure, either_of

Constrain = Callable[[int], Constraint]  # makes the constraint of a sample


class Rule(NamedTuple):
    """`after`, `begin`: of Compiled.start. `calls`: for each tool by its name, the structure of its calls."""

    structure: Structure
    after: str | None = None
    begin: str | None = None
    calls: Callable[[], Iterable[tuple[str, Structure]]] = tuple

    def compile(self, compiler: Compiler) -> Compiled:
        """Raises BadStructure, which names the tool if it is the fault of one; and StructuresBusy."""
        try:
            return compiler.compile(self.structure)
        except BadStructure as error:
            raise self._named(error, compiler) from None

    def _named(self, error: BadStructure, compiler: Compiler) -> BadStructure:
        try:
            refused = compiler.first_refused(self.calls())
        except KvarnError:  # it takes too long to find out
            return error
        return BadStructure(f"the tool {refused[0]}: {refused[1]}") if refused else error

    def constrain(self, compiled: Compiled) -> Constrain:
        return lambda sample: compiled.start(self.after, self.begin)


def rule_of(dialect: Dialect, use: ToolUse, structure: Structure | None, prompt: str) -> Rule | None:
    """None: the answer is free."""
    if use.required:
        structure = None  # a call comes instead of the text
    if structure is None and not (use.required or use.strict):
        return None
    opened = opens_reasoning(dialect, prompt)
    reasons = dialect.reasoning is not None and not opened and not _closed(dialect, prompt)
    begin, end = (marker.strip() for marker in dialect.reasoning or ("", ""))
    if structure is None:
        enforced = [tool for tool in use.tools if use.required or tool.strict]
        calls = grammar(dialect, use.tools, required=use.required, parallel=use.parallel, reasoning=reasons)
        return Rule(Structure("lark", calls), end if opened else None, calls=partial(_calls, dialect, enforced))
    either = _either(dialect, use, structure) if use.tools else structure
    return Rule(
        either, end if opened or reasons else None, begin if reasons else None, partial(_calls, dialect, use.tools)
    )


def constrain(compiler: Compiler, rule: Rule | None) -> Constrain | None:
    """Raises BadStructure. None: the answer is free."""
    if rule is None:
        return None
    return rule.constrain(rule.compile(compiler))


def _either(dialect: Dialect, use: ToolUse, structure: Structure) -> Structure:
    """Calls, or the structure. White space before them is no part of it."""
    alone = replace(dialect, reasoning=None)
    calls = grammar(alone, use.tools, required=True, parallel=use.parallel)
    return either_of(structure, Structure("lark", calls))


def _calls(dialect: Dialect, tools: Sequence[Tool]) -> Iterator[tuple[str, Structure]]:
    alone = replace(dialect, reasoning=None)
    for tool in tools:
        yield tool.name, Structure("lark", grammar(alone, [tool], required=True))


def _closed(dialect: Dialect, prompt: str) -> bool:
    """Whether the prompt ends with reasoning that is already closed."""
    return dialect.reasoning is not None and prompt.rstrip().endswith(dialect.reasoning[1].strip())
