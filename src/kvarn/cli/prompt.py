"""The prompt of `kvarn run`, and the meaning of the words that are given without an option.

Two words are a model and a prompt. One word is the prompt if -m is given, and the model if -p or -f is
given. Otherwise it is the model if it names one (`names_model`), else the prompt for the default model. A
model that is given twice, and a word that is almost a known name, are refused.
Non-goals: finding the model (loading/pull.py).
"""

import argparse
import os
import shlex
import sys
from difflib import get_close_matches
from io import TextIOWrapper

from kvarn.cli import flags
from kvarn.cli.parser import UsageError, did_you_mean, shown
from kvarn.errors import KvarnError
from kvarn.loading.catalogue import MODELS
from kvarn.loading.names import is_known, is_repository

RULE = """\
One word without an option is the model if it is a known name or a file or folder that exists, or
if it has no spaces and begins with hf: hf.co/ / ./ ../ or ~ or ends in .gguf. Otherwise it is the
prompt. With -m it is the prompt, with -p or -f it is the model."""


def add_prompt_flags(parser: argparse.ArgumentParser, group: flags.Flags) -> None:
    """Call it after `flags.add_model_flags`: the word for the prompt follows the word for the model."""
    group.add_argument("prompt_word", metavar="PROMPT", nargs="?", help="the prompt; - reads it from standard input")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt, as an option; -p=TEXT if it begins with -")
    group.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.set_defaults(settle=choose_model_and_prompt)


def choose_model_and_prompt(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.file is not None:
        raise UsageError("give the prompt with -p TEXT, or with -f FILE, not both")
    asked = args.prompt is not None or args.file is not None
    words = [word for word in (args.model_word, args.prompt_word) if word is not None]
    args.model_word, prompt = _meaning(words, args.model is not None, asked)
    if prompt is not None:
        if asked:
            option = "-p" if args.file is None else "-f"
            raise UsageError(f"the prompt is given twice, as {shown(prompt)!r} and with {option}: leave one out")
        args.prompt = prompt
    flags.choose_model(args)


def _meaning(words: list[str], has_model: bool, has_prompt: bool) -> tuple[str | None, str | None]:
    """The model and the prompt among the words."""
    if len(words) == 2:
        if not names_model(words[0]) and not is_repository(words[0]):
            nearest = did_you_mean(words[0], MODELS) or "; a prompt of several words needs quotes"
            raise UsageError(f"there is no model {shown(words[0])!r}{nearest}")
        return words[0], words[1]
    if not words:
        return None, None
    if has_model and has_model_form(words[0]):
        raise UsageError(f"the model is given twice, as {words[0]!r} and with -m (to continue this text, use -p)")
    if has_model:
        return None, words[0]
    if has_prompt or names_model(words[0]):
        return words[0], None
    if near := get_close_matches(words[0], MODELS, 1, 0.75):
        raise UsageError(f"there is no model {words[0]!r}; did you mean {near[0]}? (to continue this text, use -p)")
    return None, words[0]


def names_model(word: str) -> bool:
    return has_model_form(word) or (word != "" and os.path.exists(os.path.expanduser(word)))


def has_model_form(word: str) -> bool:
    """Whether a word is a model wherever it is typed: without a look at the current folder."""
    path = word.startswith(("/", "./", "../", "~")) or word.endswith(".gguf")
    return not any(map(str.isspace, word)) and (path or is_known(word))


def read_prompt(args: argparse.Namespace) -> str:
    if args.file is not None:
        return flags.read_text(args.file)
    if args.prompt is not None:
        return read_input() if args.prompt == "-" else str(args.prompt)
    if sys.stdin.isatty() or not (piped := read_input()):
        model = shlex.quote(args.model)
        ways = f'give a prompt: kvarn run {model} "TEXT", or -f FILE, or through a pipe'
        raise UsageError(f"{ways}; for a conversation: kvarn chat {model}")
    return piped


def read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode() if isinstance(sys.stdin, TextIOWrapper) else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise KvarnError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from None
