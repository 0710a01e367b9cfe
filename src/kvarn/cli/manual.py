"""The format of help texts, and flags of commands that may run without a model. Cheap to import.

Help has a short usage line, paragraphs and examples as written, and options in two columns. An option is
shown with its short name and its main name, which is the first long one. Further long names are aliases,
and the help text ends with them.
"""

import argparse
import os
import shutil


class Manual(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns - 2, 100))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(main_names(action))
        if not names:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else self._format_args(action, action.dest.upper())
        return f"{names} {value}".rstrip()

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, also = super()._get_help_string(action), " and ".join(aliases(action))
        if not text or not also:
            return text
        return f"{text[:-1]}; also {also})" if text.endswith(")") else f"{text} (also {also})"


def main_names(action: argparse.Action) -> list[str]:
    """The names of an option that help shows: the short ones, and the first long one."""
    also = aliases(action)
    return [name for name in action.option_strings if name not in also]


def aliases(action: argparse.Action) -> list[str]:
    return [name for name in action.option_strings if name.startswith("--")][1:]


def describe(parser: argparse.ArgumentParser, description: str, examples: str, usage: str = "[OPTIONS]") -> None:
    """What the command does and how it is called. `usage` is what follows the command's name."""
    parser.usage = f"{parser.prog} {usage}"
    parser.description = description.strip()
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    parser.epilog = f"examples:\n{lines}"


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The address of a server, and the key that requests send."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    key = os.environ.get("KVARN_API_KEY", "").split(",")[0] or None  # `serve` takes several
    parser.add_argument("--api-key", metavar="KEY", default=key, help="the server's API key (or KVARN_API_KEY)")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
