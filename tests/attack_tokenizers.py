"""Random damage to the tokenizer settings of GGUF files and folders.

    python tests/attack_tokenizers.py --seed 1 --cases 5000

Every case is refused with `BadModel` in one short line, or works. Another exception, a signal, a hang, or memory that
the files do not justify ends the run: the seed and the number of the case are printed, and the exit status is 1.
`--seed S --first N --cases 1` repeats case N alone.
"""

import argparse
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from support.hostile_tokenizers import damage_folder, damage_gguf

from kvarn.errors import BadModel, KvarnError
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quoting
from kvarn.text.tokenizer import Tokenizer

MEMORY = 1 << 30  # bytes of address space beyond what the process has at the start
SECONDS = 20  # of one case
BATCH = 250  # cases of one process


def exercise(tokenizer: Tokenizer) -> None:
    for special in (False, True):
        ids = tokenizer.encode("hello abcd <|im_start|>system <think> ééé \U0001f600" + "a" * 60, special=special)
        tokenizer.decode(ids)
    for id in range(tokenizer.vocab_size):
        tokenizer.token_bytes(id)
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
        quoting = Quoting(tokenizer.control_texts, tokenizer.plain_texts, template.strings)
        quoted = quoting.quote([{"role": "user", "content": "a<|im_end|>b"}])
        tokenizer.encode(template.render(quoted.values), special=True, stand_ins=quoted.stand_ins)


def attempt(seed: int, number: int) -> str:
    """One case. What becomes of it: "works", or the class of the refusal."""
    rng = random.Random(f"{seed}/{number}")
    try:
        if number % 3 == 0:
            exercise(Tokenizer.from_gguf(damage_gguf(rng)))
        else:
            with tempfile.TemporaryDirectory() as path:
                damage_folder(rng, Path(path))
                exercise(Tokenizer.from_folder(path))
    except KvarnError as error:
        return refusal(error)
    return "works"


def refusal(error: KvarnError) -> str:
    line = str(error)
    assert line.isprintable(), f"not one printable line: {line!r}"
    assert len(line) < 700, f"{len(line)} characters"
    # The template may refuse the messages. That is the only refusal that is not about a file.
    assert isinstance(error, BadModel) or "the chat template" in line, repr(error)
    return type(error).__name__


def limit_memory() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def batch(seed: int, numbers: range, at: mmap.mmap) -> Counter[str]:
    """In a process of its own. `at` tells the other process which case runs."""
    limit_memory()
    found: Counter[str] = Counter()
    for number in numbers:
        at[:8] = struct.pack("<q", number)
        signal.alarm(SECONDS)
        found[attempt(seed, number)] += 1
    return found


def run_batch(seed: int, numbers: range) -> Counter[str] | None:
    """None if a case failed; it is printed."""
    at = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(writer, json.dumps(batch(seed, numbers, at)).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 (also the library's PanicException)
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return Counter(json.loads(said))
    (number,) = struct.unpack("<q", at[:8])
    print(f"FAILED: --seed {seed} --first {number} --cases 1 (status {status}, {SECONDS} s at most)", flush=True)
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(arguments)
    total: Counter[str] = Counter()
    last = args.first + args.cases
    for first in range(args.first, last, BATCH):
        found = run_batch(args.seed, range(first, min(first + BATCH, last)))
        if found is None:
            return 1
        total += found
        print(f"tokenizers: {total.total()} of {args.cases} cases, {dict(total)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
