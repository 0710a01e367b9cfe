"""JSON-Schema-Test-Suite (draft 2020-12) through kvarn's structures: is an instance accepted, token by token?

    KVARN_SCHEMA_SUITE=FOLDER python bench/schema_suite.py [--json FILE] [--odd]

FOLDER is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite. Every schema is compiled for the
vocabulary of the default model. Every instance is written as compact JSON and goes through the masks that
sampling uses. A schema that is refused is refused with a reason; the table counts the reasons.

    right       accepted if valid, not accepted if not
    refused     the schema was refused by name, so no answer can be wrong
    too strict  a valid instance was not accepted: answers are valid, but some valid ones cannot be written
    wrong       an invalid instance was accepted
"""

import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.errors import BadStructure
from kvarn.llm import tokenizer_of
from kvarn.loading.catalogue import DEFAULT_MODEL
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.pull import resolve
from kvarn.structured import Compiler, schema_of
from kvarn.structured.compiler import Compiled
from kvarn.text.tokenizer import Tokenizer


def accepts(tokenizer: Tokenizer, compiled: Compiled, text: str) -> bool:
    state, output = compiled.start(), []
    for token in tokenizer.encode(text, bos=False):
        scores = np.zeros(tokenizer.vocab_size)
        state.mask(scores, output)
        if np.isneginf(scores[token]):
            return False
        output.append(token)
        if state.complete(output):
            return len(output) == len(tokenizer.encode(text, bos=False))
    scores = np.zeros(tokenizer.vocab_size)
    state.mask(scores, output)
    return bool(np.isfinite(scores[list(tokenizer.eos_ids)]).any())


def reason_of(error: BadStructure) -> str:
    """The class of a refusal: without names and values of one schema."""
    text = str(error).removeprefix("this structure cannot be enforced: ")
    return re.sub(r"'[^']*'|json-schema:\S+|: [a-z-]+$", "...", text)[:90]


def run(suite: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    compiler = Compiler(tokenizer, tokenizer.eos_ids)
    counts: dict[str, Counter[str]] = {"required": Counter(), "optional": Counter()}
    reasons: Counter[str] = Counter()
    odd: list[dict[str, Any]] = []
    for file in sorted((suite / "tests" / "draft2020-12").rglob("*.json")):
        part = "optional" if "optional" in file.parts else "required"
        for group in json.loads(file.read_text()):
            try:
                compiled = compiler.compile(schema_of(group["schema"]))
            except BadStructure as error:
                counts[part]["refused"] += len(group["tests"])
                reasons[reason_of(error)] += len(group["tests"])
                continue
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
                accepted = accepts(tokenizer, compiled, text)
                verdict = "right" if accepted == test["valid"] else "wrong" if accepted else "too strict"
                counts[part][verdict] += 1
                if verdict != "right":
                    where = f"{file.relative_to(suite / 'tests' / 'draft2020-12')}: {group['description']}"
                    odd.append({"verdict": verdict, "test": f"{where}: {test['description']}", "instance": text[:200]})
    return {"counts": counts, "refusals": dict(reasons.most_common()), "odd": odd}


def main() -> int:
    parser = argparse.ArgumentParser(description="JSON-Schema-Test-Suite through kvarn's structures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--odd", action="store_true", help="print every test that is wrong or too strict")
    args = parser.parse_args()
    folder = os.environ.get("KVARN_SCHEMA_SUITE")
    if not folder or not (Path(folder) / "tests" / "draft2020-12").is_dir():
        print("set KVARN_SCHEMA_SUITE to a checkout of JSON-Schema-Test-Suite", file=sys.stderr)
        return 2
    result = run(Path(folder), tokenizer_of(open_checkpoint(resolve(DEFAULT_MODEL))))
    verdicts = ("right", "refused", "too strict", "wrong")
    print("".join(f"{name:>12}" for name in ("part", *verdicts)))
    for part, count in result["counts"].items():
        print(f"{part:>12}" + "".join(f"{count[verdict]:12,}" for verdict in verdicts))
    print()
    for reason, n in result["refusals"].items():
        print(f"{n:6,}  {reason}")
    for each in result["odd"] if args.odd else ():
        print(f"{each['verdict']}: {each['test']}: {each['instance']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 1 if result["counts"]["required"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
