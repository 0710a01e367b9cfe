"""Golden data from llama.cpp: what it predicts over known text, and its greedy continuations.

    pip install xllamacpp gguf numpy      (in an environment of its own)
    python scripts/golden_llamacpp.py MODEL.gguf NAME --tokens TOKENS.json --out tests/golden

Writes OUT/NAME.json: the first 512 token ids of the text, at each position llama.cpp's most likely next token and its
margin in nats over the second, and greedy continuations of five prompts with their margins. The cache is f32 without
flash attention: llama.cpp at its most exact. Test data, made once and committed.
"""

import argparse
import json
from pathlib import Path

import xllamacpp

TOKENS = 512
ANSWER = 32


def open_server(path: str) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 768
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = 2
    params.cpuparams_batch.n_threads = 2
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx_checkpoints = 0
    params.swa_full = True
    params.verbosity = -1
    return xllamacpp.Server(params)


def predict(
    server: xllamacpp.Server, prompt: list[int], n: int, n_probs: int = 2, unsaid: tuple[int, ...] = ()
) -> list[dict]:
    """Greedy tokens with their alternatives, [{"id": .., "top_logprobs": [..]}]. The alternatives are the model's own;
    tokens in `unsaid` are not chosen (llama.cpp reports nothing while its text ends in half a character)."""
    request = {
        "prompt": prompt,
        "n_predict": n,
        "n_probs": n_probs,
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
        "cache_prompt": True,
        "ignore_eos": True,
        "return_tokens": True,
        "logit_bias": [[token, False] for token in unsaid],
    }
    answer = server.handle_completions(request)
    if isinstance(answer, str | bytes):
        answer = json.loads(answer)
    if "choices" not in answer:
        raise SystemExit(f"llama.cpp refused: {answer}")
    if answer["choices"][0]["logprobs"] is None:
        return predict(server, prompt, n + 3, n_probs, unsaid)
    return answer["choices"][0]["logprobs"]["content"]


def margin(step: dict) -> float:
    top = step["top_logprobs"]
    return round(top[0]["logprob"] - top[1]["logprob"], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("name")
    parser.add_argument("--tokens", required=True, help="made by scripts/golden_inputs.py")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    known = json.loads(Path(args.tokens).read_text())
    server = open_server(args.model)

    text = known["text"][:TOKENS]
    top1, margins = [], []
    for end in range(1, len(text)):
        (step,) = predict(server, text[:end], 1)[:1]
        top1.append(step["top_logprobs"][0]["id"])
        margins.append(margin(step))
    greedy = []
    for prompt, ids in known["prompts"].items():
        steps = predict(server, ids, ANSWER)
        greedy.append(
            {
                "prompt": prompt,
                "prompt_tokens": ids,
                "tokens": [step["id"] for step in steps],
                "margins": [margin(step) for step in steps],
            }
        )
    out = Path(args.out) / f"{args.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"tokens": text, "top1": top1, "margins": margins, "greedy": greedy}) + "\n")
    print(f"{out}: {len(top1)} positions, {len(greedy)} continuations")


if __name__ == "__main__":
    main()
