"""Parses the options and words of one command. A wrong command line is refused in one line, with a suggestion.

argparse does the work; its messages are replaced and abbreviated options are off. Words and options may
be mixed. A command may set the default `settle`: a function that completes the parsed arguments, for
example with the model that was given as a word.
Non-goals: what a value means (flags.py and the commands), the choice of the command (__init__.py).
"""

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from kvarn.cli.foreign import instead_of
from kvarn.cli.manual import Manual
from kvarn.errors import KvarnError

_REQUIRED = "the following arguments are required: "  # argparse's words, followed by names
_NO_VALUE = "needs a value"


class UsageError(KvarnError):
    """The command line is wrong. The exit status is 2."""


class HelpAsked(Exception):
    """The command line has -h or --help."""


class Help(argparse.Action):
    def __call__(self, *parsed: object, **named: object) -> None:
        raise HelpAsked


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, formatter_class=Manual, allow_abbrev=False, exit_on_error=False, add_help=False)
        self.add_argument("-h", "--help", action=Help, nargs=0, default=argparse.SUPPRESS, help="show this text")
        self._positionals.title = "arguments"
        self.register("type", int, whole_number)
        self.register("type", float, number)
        self._typed: Sequence[str] = ()

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace | None:
        """None if help was asked for. It has been printed."""
        self._typed = arguments
        self._refuse_foreign()
        try:
            parsed, unknown = self.parse_known_intermixed_args(arguments)
        except HelpAsked:
            self.print_help()
            return None
        except argparse.ArgumentError as error:
            self._refuse(error)
        if extra := [word for word in unknown if word != "--"]:
            self._refuse_extra(extra)
        settle = vars(parsed).pop("settle", None)
        if settle is not None:
            settle(parsed)
        return parsed

    def error(self, message: str) -> NoReturn:
        names = message.removeprefix(_REQUIRED)
        raise UsageError(f"{names} is missing ({self._all})" if names != message else message)

    @property
    def _all(self) -> str:
        return f"{self.prog} --help lists the options"

    def _nearest(self, name: str) -> str:
        names = [each[2:] for action in self._actions for each in action.option_strings if each.startswith("--")]
        return did_you_mean(name.lstrip("-"), names, "--", 0.75)

    def _refuse_foreign(self) -> None:
        """Before parsing, because -ngl would be -n with the value gl."""
        for word in _before_dashes(self._typed):
            name = word.split("=")[0]
            if instead := instead_of(name, self._option_string_actions):
                raise UsageError(f"there is no option {name}: {instead}")

    def _refuse_extra(self, extra: Sequence[str]) -> NoReturn:
        """Words that the command does not take."""
        before = {word.split("=")[0] for word in _before_dashes(self._typed)}
        for word in extra:
            name = word.split("=")[0]
            if word.startswith("-") and name in before:
                raise UsageError(f"there is no option {shown(name)}{self._nearest(name)} ({self._all})")
        takes_text = any(action.metavar == "PROMPT" for action in self._actions)
        quotes = "put a text of several words in quotes"
        if "--" in self._typed:
            raise UsageError("everything after -- is text: put options before it" + f", and {quotes}" * takes_text)
        too_many = f"{shown(extra[0])!r} is one word too many"
        raise UsageError(f"{too_many}: {quotes}" if takes_text else f"{too_many}; usage: {self.usage}")

    def _refuse(self, error: argparse.ArgumentError) -> NoReturn:
        if error.argument_name is None:  # newer versions of argparse raise what `error` gets from older ones
            self.error(error.message)
        names = error.argument_name.split("/")
        before = [word.split("=")[0] for word in self._typed]
        name = next((each for each in before if each in names), names[0])
        action = self._option_string_actions.get(name)
        if action is not None and action.nargs == 0:
            raise UsageError(f"{name} takes no value")
        if error.message == _NO_VALUE:
            raise UsageError(f"{name} needs a value: {name} {self._sample(action)}{self._dash_value(name)}")
        raise UsageError(f"{name} {error.message}")

    def _sample(self, action: argparse.Action | None) -> str:
        """What stands for the value in the help."""
        if action is None:
            return "VALUE"
        if action.choices is not None:
            return "|".join(str(each) for each in action.choices)
        named = action.metavar or action.dest.upper()
        return named if isinstance(named, str) else " ".join(named)

    def _dash_value(self, name: str) -> str:
        after = self._typed[self._typed.index(name) + 1 :] if name in self._typed else ()
        if not after or not after[0].startswith("-") or after[0] in self._option_string_actions:
            return ""
        return f"; a value that begins with - is written {name}={shown(after[0])}"

    # -- argparse's own steps, with other messages --------------------------------------------------------------------

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            raise argparse.ArgumentError(action, _NO_VALUE) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            one_of = f"is {shown(value)!r}; it must be one of {', '.join(choices)}"
            raise argparse.ArgumentError(action, one_of + did_you_mean(str(value), choices))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """-c5 is -c 5. But -s is not -sys, and -prompt is a wrong --prompt and not -p rompt."""
        if f"-{option_string}".split("=")[0] in self._option_string_actions:
            return []
        return [each for each in super()._get_option_tuples(option_string) if option_string.startswith(each[1])]


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """The first known name that begins like this, else the most similar one."""
    names = list(known)
    longer = [name for name in names if len(word) > 1 and name.startswith(word)]
    near = longer or get_close_matches(word, names, 1, cutoff)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def shown(value: object) -> str:
    """A value in a message: not too long."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}..."


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {shown(text)!r}; it must be a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {shown(text)!r}; it must be a number") from None
