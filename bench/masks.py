"""The time of a mask, and what structures cost a batch.

    python bench/masks.py MODEL ... [--batch N] [--tokens N] [--json FILE]

For each model: the time to compile a structure, the time of one mask (llguidance and its application to the
scores) over the tokens of answers that follow it, and tokens per second of a batch with and without a schema.
The answers are drawn, so that every sample is at another place of the schema. Non-goal: a comparison with
other engines.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvarn import LLM, SamplingParams
from kvarn.structured import JSON_OBJECT, Structure, regex_of, schema_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
TEXTS = {
    "schema": json.dumps(
        {
            "name": "Ada Lovelace, the first programmer",
            "age": 36,
            "email": "ada@example.org",
            "tags": ["red", "blue"],
            "address": {"street": "12 St James's Square", "zip": "12345"},
        }
    ),
    "json_object": '{"title": "A note", "items": [1, 2.5, {"deep": [null, true, "a \\"quote\\""]}], "n": -3e10}',
    "regex": "2026-11-16T12:30:00 the text that follows the time may be anything",
}


def structures() -> dict[str, Structure]:
    return {
        "schema": schema_of(PERSON),
        "json_object": JSON_OBJECT,
        "regex": regex_of(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2} .*"),
    }


def masks(llm: LLM, name: str, repeats: int = 20) -> dict[str, float]:
    """Microseconds. The text is written by hand, so the tokens do not depend on the model."""
    tokenizer = llm.tokenizer
    structure, tokens = structures()[name], tokenizer.encode(TEXTS[name], bos=False)
    compiler = llm.runner.compiler
    compiler.compile(regex_of("warm"))  # builds the vocabulary
    start = time.perf_counter()
    compiled = compiler.compile(structure)
    seconds = time.perf_counter() - start
    times, first = [], 0.0
    for repeat in range(repeats):
        state = compiled.start()
        for i in range(len(tokens)):
            scores = np.zeros(tokenizer.vocab_size)
            begin = time.perf_counter()
            state.mask(scores, tokens[:i])
            state.complete(tokens[: i + 1])
            spent = time.perf_counter() - begin
            times.append(spent)
            first += spent if repeat == 0 else 0.0
    p50, p99, most = np.percentile(times, [50, 99, 100]) * 1e6
    return {
        "compile_ms": seconds * 1e3,
        "first_answer_us": first / len(tokens) * 1e6,
        "p50_us": p50,
        "p99_us": p99,
        "max_us": most,
    }


def throughput(llm: LLM, batch: int, n_tokens: int, **settings: Any) -> float:
    """Tokens per second of `batch` answers together. The ends of answers are ignored as far as a structure allows."""
    prompts = [f"Describe person number {i} as JSON:" for i in range(batch)]
    each = [SamplingParams(max_tokens=n_tokens, temperature=0.8, seed=i, **settings) for i in range(batch)]
    stats = llm.engine.stats
    llm.generate(prompts, each)  # warm
    tokens, seconds = stats.decode_tokens, stats.decode_seconds
    llm.generate(prompts, each)
    return (stats.decode_tokens - tokens) / (stats.decode_seconds - seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description="the time of masks")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for model in args.models:
        with LLM(model, cache="paged", context=512, max_seqs=args.batch) as llm:
            found: dict[str, Any] = {"vocabulary": llm.tokenizer.vocab_size}
            print(f"{Path(model).name}: {llm.tokenizer.vocab_size:,} tokens")
            for name in TEXTS:
                found[name] = masks(llm, name)
                print(f"  {name:12}" + "".join(f"  {key} {value:9.1f}" for key, value in found[name].items()))
            for top_k in (0, 40):
                settings = {"top_k": top_k}
                free = throughput(llm, args.batch, args.tokens, **settings, ignore_eos=True)
                bound = throughput(llm, args.batch, args.tokens, **settings, json_schema=PERSON)
                found[f"batch_{args.batch}_top_k_{top_k}"] = {"free_tok_s": free, "schema_tok_s": bound}
                print(f"  batch of {args.batch}, top_k {top_k}: {free:,.0f} tokens/s, with a schema {bound:,.0f}")
        results[Path(model).name] = found
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
