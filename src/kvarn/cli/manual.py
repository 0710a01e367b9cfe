"""The format of help texts: a short usage line, paragraphs and examples as written, options in two columns."""

import argparse
import shutil


class Manual(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns - 2, 100))


def describe(parser: argparse.ArgumentParser, description: str, examples: str, usage: str = "[OPTIONS]") -> None:
    """What the command does and how it is called. `usage` is what follows the command's name."""
    parser.usage = f"{parser.prog} {usage}"
    parser.description = description.strip()
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    parser.epilog = f"examples:\n{lines}"
