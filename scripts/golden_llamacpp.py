"""Writes golden data from llama.cpp: its predictions over a text, and its greedy continuations of prompts.

    pip install xllamacpp gguf numpy      (in a separate environment)
    python scripts/golden_llamacpp.py MODEL.gguf NAME --tokens TOKENS.json --out tests/golden
    python scripts/golden_llamacpp.py MODEL.gguf NAME-f32 --widened --tokens TOKENS.json --out tests/golden

OUT/NAME.json has the first 512 token ids of the text. For each position it has llama.cpp's most likely
next token, and the margin in nats to the second. It also has greedy continuations of five prompts with
their margins. llama.cpp is most exact with an f32 cache and without flash attention, so these are set.
The result is committed as test data.

--widened    use a copy of the model with f32 weights, so that activations are not rounded to 8 bits
--batched    compute the text in one batch; this should not change the predictions
--against    compare the predictions with an earlier result
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import xllamacpp
from widen_gguf import widen

TOKENS = 512
ANSWER = 32
CERTAIN = 1000.0  # a bias in nats that forces a token


def open_server(path: str, threads: int = 2) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 768
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx_checkpoints = 0
    params.swa_full = True
    params.verbosity = -1
    return xllamacpp.Server(params)


@contextmanager
def serve(path: str, widened: bool, threads: int) -> Iterator[xllamacpp.Server]:
    """llama.cpp with the model, or with a temporary widened copy."""
    if not widened:
        yield open_server(path, threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        widen(Path(path), wide)
        yield open_server(str(wide), threads)


def ask(server: xllamacpp.Server, prompt: list[int], n_probs: int, bias: list[list]) -> dict | None:
    """The next token and its alternatives, {"id": .., "logprob": .., "top_logprobs": [..]}.

    The bias changes the choice, but not the reported probabilities. None if the token is an incomplete
    character, because llama.cpp then reports nothing."""
    request = {
        "prompt": prompt,
        "n_predict": 1,
        "n_probs": n_probs,
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
        "cache_prompt": True,
        "ignore_eos": True,
        "return_tokens": True,
        "logit_bias": bias,
    }
    answer = server.handle_completions(request)
    if isinstance(answer, str | bytes):
        answer = json.loads(answer)
    if "choices" not in answer:
        raise SystemExit(f"llama.cpp refused: {answer}")
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs and logprobs["content"][0]


def ask_forced(server: xllamacpp.Server, prompt: list[int], n_probs: int) -> dict:
    """Like `ask`, for prompts where it returns None: force another token, the first for which llama.cpp reports."""
    steps = (ask(server, prompt, n_probs, [[token, CERTAIN]]) for token in count())
    return next(step for step in steps if step)


def predict(server: xllamacpp.Server, prompt: list[int], n_probs: int = 2) -> dict:
    step = ask(server, prompt, n_probs, [])
    if step is None:
        step = ask_forced(server, prompt, n_probs)
        step["id"] = step["top_logprobs"][0]["id"]
    return step


def margin(step: dict) -> float:
    top = step["top_logprobs"]
    return round(top[0]["logprob"] - top[1]["logprob"], 4)


def read(server: xllamacpp.Server, text: list[int], batched: bool) -> dict:
    """The most likely token after each prefix of the text.

    By default prefixes grow, and each computes one more token. If `batched`, the longest prefix comes
    first and computes all tokens in one batch. Each shorter prefix then recomputes only its last token."""
    ends = range(1, len(text))
    steps = {end: predict(server, text[:end]) for end in (reversed(ends) if batched else ends)}
    return {
        "tokens": text,
        "top1": [steps[end]["top_logprobs"][0]["id"] for end in ends],
        "margins": [margin(steps[end]) for end in ends],
    }


def continuation(server: xllamacpp.Server, prompt: str, ids: list[int]) -> dict:
    steps: list[dict] = []
    while len(steps) < ANSWER:
        steps.append(predict(server, ids + [step["id"] for step in steps]))
    return {
        "prompt": prompt,
        "prompt_tokens": ids,
        "tokens": [step["id"] for step in steps],
        "margins": [margin(step) for step in steps],
    }


def compare(ours: dict, theirs: dict) -> str:
    sure = [i for i, lead in enumerate(theirs["margins"]) if lead > 0.1]
    same = sum(ours["top1"][i] == theirs["top1"][i] for i in sure)
    return f"the same token at {same} of {len(sure)} positions with a margin above 0.1: {same / len(sure):.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("name")
    parser.add_argument("--tokens", required=True, help="made by scripts/golden_inputs.py")
    parser.add_argument("--out", required=True)
    parser.add_argument("--widened", action="store_true", help="with all weights in f32: no rounding of activations")
    parser.add_argument("--batched", action="store_true", help="read the text in one batch")
    parser.add_argument("--against", help="an earlier result to compare with")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    inputs = json.loads(Path(args.tokens).read_text())
    with serve(args.model, args.widened, args.threads) as server:
        result = read(server, inputs["text"][:TOKENS], args.batched)
        result["greedy"] = [continuation(server, prompt, ids) for prompt, ids in inputs["prompts"].items()]
    out = Path(args.out) / f"{args.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    print(f"{out}: {len(result['top1'])} positions, {len(result['greedy'])} continuations")
    if args.against:
        print(compare(result, json.loads(Path(args.against).read_text())))


if __name__ == "__main__":
    main()
