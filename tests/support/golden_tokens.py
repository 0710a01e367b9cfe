"""The form of tests/golden/tokens-*.json.gz: what llama.cpp made of the hard texts, as a short hash per text.

`plain` and `special` hold eight hexadecimal digits per text, in order; `texts` tells whether these are the same texts.
Eight hexadecimal digits make a wrong answer that goes unseen unlikely, and 20,000 of them compress to half their size.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

SEED, COUNT = 1, 10_000
FOLDER = Path(__file__).parents[1] / "golden"

# By the name of the golden file: the model it was made with, and the pre-tokenizer put in place of the model's own.
MODELS: dict[str, tuple[str, str | None]] = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", None),
    "qwen2.5": ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", None),
    "tinyllama": ("tinyllama-1.1b-chat-iq2_xxs.gguf", None),
    "gemma3": ("gemma-3-270m-q4_k_m.gguf", None),
    "as-default": ("SmolLM2-135M-Instruct.Q4_1.gguf", "default"),
    "as-gpt-2": ("SmolLM2-135M-Instruct.Q4_1.gguf", "gpt-2"),
    "as-llama-bpe": ("SmolLM2-135M-Instruct.Q4_1.gguf", "llama-bpe"),
}


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(b"".join(id.to_bytes(4, "little") for id in ids)).hexdigest()[:8]


def digest_texts(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def write(name: str, record: dict[str, str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    data = json.dumps(record).encode()
    (FOLDER / f"tokens-{name}.json.gz").write_bytes(gzip.compress(data, mtime=0))


def read(name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(gzip.decompress((FOLDER / f"tokens-{name}.json.gz").read_bytes()))
    return found
