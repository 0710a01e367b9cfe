"""`kvarn completion`: a script that completes commands, options and their values in a shell.

The script is made from the parsers of all commands, so it lists what they take. It is static: completing
starts no program. The scripts themselves are in shells.py.
"""

import argparse
from typing import NamedTuple

from kvarn.cli.manual import describe

SHELLS = ("bash", "zsh", "fish")
FILES = {"FILE", "PATH"}  # names of values that are files


class Value(NamedTuple):
    """What may follow an option, or be a word."""

    name: str
    words: tuple[str, ...] = ()
    files: bool = False
    several: bool = False  # words with commas between them


class Option(NamedTuple):
    names: tuple[str, ...]
    value: Value | None
    repeatable: bool
    about: str


class Command(NamedTuple):
    name: str
    about: str
    options: list[Option]
    words: list[Value]


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Print a script that completes commands, options, their values and the names of models. Write it to
the file where your shell looks for it, and open a new shell. Do it again after an update of kvarn.""",
        """
kvarn completion bash > ~/.local/share/bash-completion/completions/kvarn
kvarn completion fish > ~/.config/fish/completions/kvarn.fish
kvarn completion zsh > ~/.zfunc/_kvarn      with fpath+=~/.zfunc before compinit in ~/.zshrc
source <(kvarn completion bash)             only for this shell""",
        usage="bash|zsh|fish",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def run(args: argparse.Namespace) -> None:
    from kvarn.cli import shells

    print(getattr(shells, args.shell)(commands()), end="")


def commands() -> list[Command]:
    from kvarn.cli import COMMANDS, parser_of
    from kvarn.loading.catalogue import MODELS

    models = tuple(MODELS)
    found = [
        command_of(name, about, parser_of(name), models) if name != "help" else Command(name, about, [], [])
        for name, about in COMMANDS.items()
    ]
    found = [command._replace(words=with_second_word(command)) for command in found]
    return found + [
        Command(f"help {first}", "", [], [Value("COMMAND", (second,))])
        for first, second in (name.split() for name in COMMANDS if " " in name)
    ]


def with_second_word(command: Command) -> list[Value]:
    """The words of a command. The first one may also be the second word of a command: `bench serve`, `help run`."""
    from kvarn.cli import COMMANDS

    before = "" if command.name == "help" else f"{command.name} "
    seconds = tuple(name.removeprefix(before) for name in COMMANDS if name.startswith(before))
    if command.name == "help":
        seconds = tuple(name for name in seconds if " " not in name)
    if not seconds:
        return command.words
    first = command.words[0] if command.words else Value("COMMAND")
    return [first._replace(words=seconds + first.words), *command.words[1:]]


def command_of(name: str, about: str, parser: argparse.ArgumentParser, models: tuple[str, ...]) -> Command:
    options, words = [], []
    for action in parser._actions:
        if action.option_strings:
            options.append(option_of(parser, action, models))
        else:
            words.append(value_of(action, models))
    return Command(name, about, options, words)


def option_of(parser: argparse.ArgumentParser, action: argparse.Action, models: tuple[str, ...]) -> Option:
    help = parser._get_formatter()._expand_help(action)
    about = help.split(" (")[0].split(";")[0]
    value = None if action.nargs == 0 else value_of(action, models)
    return Option(tuple(action.option_strings), value, isinstance(action, argparse._AppendAction), about)


def value_of(action: argparse.Action, models: tuple[str, ...]) -> Value:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        return Value(name, tuple(str(each) for each in action.choices))
    if isinstance(known := getattr(action.type, "known", None), tuple):
        return Value(name, known, several=True)
    if name == "NAME" and not action.option_strings:  # `kvarn rm`: what is not on this machine is offered, too
        return Value(name, models)
    return Value(name, models if name == "MODEL" else (), name == "MODEL" or name in FILES)
