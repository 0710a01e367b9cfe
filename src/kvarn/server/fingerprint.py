"""`system_fingerprint`: a short string that changes if the bits of answers may change.

Clients of llama.cpp expect a `b` at its beginning.

    bits-kvarn-0.1.0-cpu-pairs-bf16-a1-3f9c2a7e
               |     |   |     |    |  the model and how it is used: files, configuration, template, windows
               |     |   |     |    version of the arithmetic (kvarn.arithmetic.VERSION)
               |     |   |     codec of the cache
               |     |   order of sums, on backends that have more than one; `inexact`, if bits may depend on the batch
               |     backend
               version of kvarn: tokenization and sampling may change with it

What cannot change an answer is not in it: threads, instruction sets, batch sizes, the number of sequences,
strategies and layouts with the same windows. Of files above 64 MiB a sample is read: 16 KiB of every MiB.
"""

from hashlib import blake2b
from pathlib import Path

from kvarn import __version__, arithmetic
from kvarn.llm import LLM

SMALL = 64 << 20  # bytes; smaller files are read whole
EVERY = 1 << 20
SAMPLE = 16 << 10


def fingerprint_of(llm: LLM) -> str:
    facts, plan = llm.backend.facts(), llm.cache.plan
    tokenizer = llm.tokenizer
    windows = [(group.layers, group.config.spec) for group in plan.groups]
    used = (llm.config, windows, tokenizer.chat_template, tokenizer.vocab_size, tokenizer.eos_ids, llm.trust_messages)
    digest = blake2b(repr(used).encode(), digest_size=4)
    for file in _files(llm.path):
        _add(digest, file)
    order = "inexact" if facts.get("exact") == "no" else facts.get("order")
    parts = [facts["name"], order, plan.codec.name, f"a{arithmetic.VERSION}", digest.hexdigest()]
    return "-".join(["bits", "kvarn", __version__, *filter(None, parts)])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix in (".safetensors", ".json", ".jinja", ".model"))


def _add(digest: "blake2b", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name if file.suffix != '.gguf' else ''} {size}".encode())
    with file.open("rb") as opened:
        for start in range(0, size, EVERY):
            opened.seek(start)
            digest.update(opened.read(EVERY if size <= SMALL else SAMPLE))
