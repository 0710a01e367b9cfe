"""The format of help texts, and flags of commands that may run without a model. Cheap to import.

Help has a short usage line, paragraphs that fit the terminal (at most 100 columns), examples as written,
and options in two columns. An option is shown with its short name and its main name, which is the first
long one. Further long names are aliases, and the help text ends with them.
"""

import argparse
import os
import shutil
import textwrap

EXAMPLES = "examples:\n"  # what follows is not wrapped


class Manual(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLES):
            return super()._fill_text(text, width, indent)
        return textwrap.indent(wrapped(text, width - len(indent)), indent)

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


def help_width() -> int:
    return max(min(shutil.get_terminal_size().columns - 2, 100), 20)


def wrapped(text: str, width: int | None = None) -> str:
    """Paragraphs in lines that fit. Options and names are not broken at a hyphen."""
    lines = [
        textwrap.fill(" ".join(part.split()), width or help_width(), break_on_hyphens=False, break_long_words=False)
        for part in text.split("\n\n")
    ]
    return "\n\n".join(lines)


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
    parser.epilog = f"{EXAMPLES}{lines}"


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The address of a server, and the key that requests send."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    key = os.environ.get("KVARN_API_KEY", "").split(",")[0] or None  # `serve` takes several
    parser.add_argument("--api-key", metavar="KEY", default=key, help="the server's API key (or KVARN_API_KEY)")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
