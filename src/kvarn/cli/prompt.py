"""The prompt of `kvarn run`, and the meaning of the words that are given without an option.

Two words are a model and a prompt. One word is the prompt if -m is given, and the model if -p or -f is
given. Otherwise it is the model if it names one (`names_model`), else the prompt for the default model. A
model that is given twice, and a word that looks like a model and is none, are refused.
Standard input is the prompt if none is given. It follows a prompt that is a word, if it is a pipe or a file.
Non-goals: finding the model (loading/pull.py).
"""

import argparse
import os
import re
import shlex
import stat
import sys
from difflib import get_close_matches
from select import select

from kvarn.cli import flags
from kvarn.cli.parser import UsageError, did_you_mean, shown
from kvarn.loading.catalogue import MODELS, near
from kvarn.loading.names import is_known, is_repository
from kvarn.words import one_of

RULE = """\
One word without an option is the model if it is a known name or a file or folder that exists, or
if it has no spaces and begins with hf: / ./ ../ or ~ or ends in .gguf. Otherwise it is the prompt.
But a word that looks like a model and is none (llama9, org/name, name:tag) is an error. With -m the
word is the prompt, with -p or -f it is the model. A pipe or file at standard input is the prompt if
none is given, and follows a prompt that is a word, after a blank line. With -p and -f it is not
read. On a terminal, a model without a prompt opens the chat."""

WAIT = 1.0  # seconds without input before a line says so
# Letters with a digit, or parts with : or / between them.
_LIKE_A_MODEL = re.compile(r"(?=.*[a-z])(?=.*\d)[\w.-]+|[\w][\w.-]*([:/][\w.-]+)+", re.IGNORECASE | re.ASCII)
_FAMILIES = {family[0] for name in MODELS if (family := re.match("[a-z]+", name))}  # llama, qwen


def add_prompt_flags(parser: argparse.ArgumentParser, group: flags.Flags) -> None:
    """Call it after `flags.add_model_flags`: the word for the prompt follows the word for the model."""
    group.add_argument("prompt_word", metavar="PROMPT", nargs="?", help="the prompt; - reads it from standard input")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt, as an option; -p=TEXT if it begins with -")
    group.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")


def choose_model_and_prompt(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.file is not None:
        raise UsageError("give the prompt with -p TEXT, or with -f FILE, not both")
    asked = args.prompt is not None or args.file is not None
    words = [word for word in (args.model_word, args.prompt_word) if word is not None]
    args.guessed = None if asked or args.model is not None or len(words) != 1 else words[0]
    args.model_word, prompt = _meaning(words, args.model is not None, asked)
    if prompt is None or any(map(str.isspace, prompt)):
        args.guessed = None  # a word that was taken for the prompt
    if prompt is not None:
        if asked:
            option = "-p" if args.file is None else "-f"
            raise UsageError(f"the prompt is given twice, as {shown(prompt)!r} and with {option}: leave one out")
        args.prompt = prompt
    args.is_word = prompt is not None
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
    if looks_like_model(words[0]):
        meant = near(words[0], MODELS)[:5]
        known = f"did you mean {one_of(meant)}?" if meant else "`kvarn list --all` shows the names"
        raise UsageError(
            f"there is no model {shown(words[0])!r}; {known} (for a prompt of one word: {as_prompt(words[0])})"
        )
    return None, words[0]


def as_prompt(word: str) -> str:
    return shlex.join(["-p", shown(word)])


def looks_like_model(word: str) -> bool:
    """Whether a word that names no model was probably meant to be one."""
    low = word.lower()
    return (
        low in _FAMILIES
        or _LIKE_A_MODEL.fullmatch(word) is not None
        or bool(get_close_matches(low, {*MODELS, *(name.split(":")[0] for name in MODELS)}, 1, 0.75))
    )


def names_model(word: str) -> bool:
    return has_model_form(word) or (word != "" and os.path.exists(os.path.expanduser(word)))


def has_model_form(word: str) -> bool:
    """Whether a word is a model wherever it is typed: without a look at the current folder."""
    path = word.startswith(("/", "./", "../", "~")) or word.lower().endswith(".gguf")
    return not any(map(str.isspace, word)) and (path or is_known(word))


def read_prompt(args: argparse.Namespace) -> str:
    if args.file is not None:
        return flags.read_text(args.file)
    if args.prompt == "-":
        return flags.read_input()
    if args.prompt is not None:
        piped = wait_for_input() if args.is_word and is_fed() else ""
        return "\n\n".join(filter(None, (str(args.prompt), piped if piped.strip() else "")))
    if sys.stdin.isatty() or not (piped := flags.read_input()):
        model = shlex.quote(args.model)
        ways = f'give a prompt: kvarn run {model} "TEXT", or -f FILE, or through a pipe'
        raise UsageError(f"{ways}; for a conversation: kvarn chat {model}")
    return piped


def wait_for_input() -> str:
    """What a pipe or file has. A pipe that nobody closes would look like a slow model, so say what is going on."""
    if not select([sys.stdin], [], [], WAIT)[0]:
        print("reading standard input, which follows the prompt; < /dev/null skips it", file=sys.stderr)
    return flags.read_input()


def is_fed() -> bool:
    """Whether standard input is a pipe or a file: not a terminal, not /dev/null, not a socket."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # an object without a file stands in for it
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
