"""Random damage to whole model files: a model is refused in one line, or runs.

    python tests/attack_models.py --seed 1 --cases 1500

Bytes of the header or of the weights are changed, or the file is cut. NaN and infinite weights are among them. A model
that opens computes a few tokens with a random cache.
"""

import random
import sys
import tempfile
from functools import cache
from pathlib import Path

from support import cases, tiny_gguf
from support.cases import Limits

from kvarn import LLM, KvarnError, SamplingParams
from kvarn.cache.codec import CODECS
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import BadLogits
from kvarn.loading.gguf import GGUFFile


@cache
def whole(variant: str) -> tuple[bytes, int]:
    """The file, and the length of its header."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_gguf.write(Path(folder) / "m.gguf", variant, tiny_gguf.CHAT)
        return path.read_bytes(), min(info.offset for info in GGUFFile.open(path).tensors.values())


def damaged(rng: random.Random) -> bytes:
    content, header = whole(rng.choice(tiny_gguf.VARIANTS))
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        kind = rng.random()
        if kind < 0.6:
            changed[rng.randrange(header)] = rng.choice((0, 1, 2, 255, rng.randrange(256)))
        elif kind < 0.9:
            at = rng.randrange(header, len(changed) - 4) & ~3
            changed[at : at + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", rng.randbytes(4)))
        else:
            del changed[rng.randrange(len(changed)) :]
            break
        if len(changed) <= header + 8:
            break
    return bytes(changed)


def attempt(seed: int, number: int) -> str:
    rng = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(damaged(rng))
        try:
            run(path, rng)
        except BadLogits:
            return "damaged weights"
        except KvarnError as error:
            return "refused" if str(error).isprintable() else f"not one line: {error!r}"
    return "runs"


def run(path: Path, rng: random.Random) -> None:
    strategy, codec = rng.choice(list(STRATEGIES)), "/".join(rng.choices(list(CODECS), k=rng.choice([1, 2])))
    llm = LLM(path, cache=strategy, cache_type=codec, context=64, max_seqs=2, threads=rng.choice([1, 2]))
    params = SamplingParams(max_tokens=3, temperature=rng.choice([0, 1]), logprobs=2, seed=1)
    llm.generate(["ab", "abcd efgh"], params)
    if llm.tokenizer.chat_template:
        llm.chat([{"role": "user", "content": "ab"}], params)
    llm.cache.check()
    assert llm.cache.usage().sequences == 0


def main(arguments: list[str] | None = None) -> int:
    for variant in tiny_gguf.VARIANTS:
        whole(variant)
    return cases.main("models", attempt, Limits(batch=100, seconds=60, memory=4 << 30), 1500, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
