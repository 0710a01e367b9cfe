"""Writes the token ids that scripts/golden_llamacpp.py gives to llama.cpp, from kvarn's tokenizer.

python scripts/golden_inputs.py MODEL TEXT OUT.json
"""

import json
import sys
from pathlib import Path

from kvarn.llm import tokenizer_of
from kvarn.loading.checkpoint import open_checkpoint

PROMPTS = (
    "The quick brown fox",
    "Once upon a time there was",
    "def fibonacci(n):",
    "The capital of France is",
    "In the year 2050, people will",
)
CHARACTERS = 120_000  # more than 40 windows of 512 tokens with any vocabulary


def main() -> None:
    model, text, out = sys.argv[1:]
    tokenizer = tokenizer_of(open_checkpoint(Path(model)))
    inputs = {
        "text": tokenizer.encode(Path(text).read_text(encoding="utf-8")[:CHARACTERS]),
        "prompts": {prompt: tokenizer.encode(prompt) for prompt in PROMPTS},
    }
    Path(out).write_text(json.dumps(inputs) + "\n")


if __name__ == "__main__":
    main()
