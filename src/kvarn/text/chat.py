"""Chat templates: turn a list of messages into the prompt format that the model was trained on.

Contract: the result is what transformers renders. A template comes with a model file and is not
trusted: it runs in a sandbox without access to the interpreter. Errors are one line. Making a
`ChatTemplate` computes nothing of the template.
Non-goals: limits on the time and memory of `render`; the format of messages, which only the template
knows.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvarn.errors import BadModel, KvarnError, printable

MAX_SOURCE = 1 << 20  # characters; published templates have at most about 20,000


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for web pages. Models were trained without these escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _WithoutConstants(CodeGenerator):
    """Computes nothing while it compiles: `'a' * 10 ** 10` takes memory only when it is rendered."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Generation(Extension):
    """{% generation %} marks the model's own text for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation]
    )
    environment.code_generator_class = _WithoutConstants
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split()) or type(error).__name__)


class ChatTemplate:
    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        if not source:
            raise KvarnError("the model has no chat template: use raw completion (without --chat)")
        if len(source) > MAX_SOURCE:
            raise BadModel(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE}")
        try:
            environment = _environment()
            tree = environment.parse(source)
            names = {node.name for node in tree.find_all(nodes.Name)}
            strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModel(f"the chat template is wrong at line {error.lineno}: {_one_line(error)}") from None
        except Exception as error:  # noqa: BLE001 (the source is not trusted)
            raise BadModel(f"the chat template cannot be compiled: {_one_line(error)}") from None
        self.strings = (source, *sorted(strings))  # what it is made of: the source, and the string literals in it
        self.names = frozenset(names)  # of the variables that it uses
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """`variables` are those that the template uses: tools, documents, enable_thinking, ..."""
        arguments = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        # transformers always defines tools and documents, and templates rely on it.
        names = {"tools": None, "documents": None} | self._tokens | variables | arguments
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise KvarnError(f"the chat template refused the messages: {_one_line(error)}") from None
        except Exception as error:  # noqa: BLE001 (a template can make any operation fail)
            kind = type(error).__name__
            raise KvarnError(f"the chat template failed on the messages ({kind}: {_one_line(error)})") from None
