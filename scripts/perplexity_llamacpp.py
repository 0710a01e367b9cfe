"""Measures llama.cpp's perplexity of a text, with the windows of src/kvarn/engine/scoring.py. No BOS is added.

    python scripts/perplexity_llamacpp.py MODEL.gguf --tokens TOKENS.json --windows 40 [--widened]

The settings are those of scripts/golden_llamacpp.py: f32 cache, no flash attention, one token at a time. A
bias forces the next token of the text. The server reports the probability without the bias.
"""

import argparse
import json
import math
from pathlib import Path

import xllamacpp
from golden_llamacpp import CERTAIN, ask, ask_forced, serve

WINDOW = 512
ALL = 1 << 20


def logprob(server: xllamacpp.Server, prompt: list[int], target: int) -> float:
    step = ask(server, prompt, 1, [[target, CERTAIN]])
    if step is None:
        (step,) = (top for top in ask_forced(server, prompt, ALL)["top_logprobs"] if top["id"] == target)
    assert step["id"] == target
    return step["logprob"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", required=True, help="made by scripts/golden_inputs.py")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--widened", action="store_true", help="with all weights in f32: no rounding of activations")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tokens = json.loads(Path(args.tokens).read_text())["text"]
    losses = []
    with serve(args.model, args.widened, args.threads) as server:
        for start in range(0, args.windows * WINDOW, WINDOW):
            text = tokens[start : start + WINDOW]
            losses += [-logprob(server, text[:end], text[end]) for end in range(WINDOW // 2 + 1, WINDOW)]
            print(f"{start // WINDOW + 1}: {math.exp(sum(losses) / len(losses)):.4f}", flush=True)


if __name__ == "__main__":
    main()
