"""Measures the cost of serving: the delay that a long prompt causes for other answers, and the cost of HTTP.

python bench/serving.py gap        # by chunk size: the longest gap between two tokens, the prompt's time
python bench/serving.py http       # batch of 32: tokens per second offline, and through a local server
"""

import json
import statistics
import subprocess
import sys
import time

from kvarn import LLM, SamplingParams

PROMPT, ANSWER, BATCH, ROUNDS = 3000, 160, 32, 3
CODE = "import sys; from kvarn.cli import main; sys.exit(main())"


def gap() -> None:
    print("chunk  longest gap ms  median gap ms  first token of the prompt ms")
    for chunk in (32, 64, 128, 256, 511):
        settings = dict(max_seqs=2, max_batch_tokens=512, chunk_while_decoding=chunk)
        engine = LLM("smollm2", cache="paged", context=4096, backend="cpu", **settings).engine
        talking = engine.add([1] * 8, SamplingParams(max_tokens=400, ignore_eos=True), salt=b"%d" % chunk)
        for _ in range(20):
            engine.step()
        prompt = [64 + i * i % 190 for i in range(PROMPT)]
        reading = engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True), salt=b"%d" % chunk)
        gaps = []
        while not reading.done:
            gaps += [event.gap for event in engine.step() if event.sample.request is talking and event.gap]
        assert not talking.done, "the answer must last longer than the prompt"
        engine.cancel(talking)
        first = reading.timing.first_token_at - reading.timing.queued_at
        print(f"{chunk:>5}  {1e3 * max(gaps):>14.0f}  {1e3 * statistics.median(gaps):>13.0f}  {1e3 * first:>28.0f}")


def offline(llm: LLM, seed: int) -> float:
    prompts = [[64 + (i * 37 + j * j + seed) % 190 for j in range(32)] for i in range(BATCH)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
    return BATCH * ANSWER / (time.perf_counter() - start)


def served(url: str, seed: int) -> float:
    flags = ["--requests", BATCH, "--concurrency", BATCH, "--input-len", 32, "--output-len", ANSWER, "--seed", seed]
    command = [sys.executable, "-c", CODE, "bench", "serve", "--url", url, *map(str, flags), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert report["completed"] == BATCH, report["errors"]
    return float(report["output_tokens_per_second"])


def http() -> None:
    """Offline and served rounds alternate, so that other load on the machine affects both equally."""
    server = [sys.executable, "-c", CODE, "serve", "-m", "smollm2", "--port", "0", "-np", str(BATCH), "-c", "512"]
    with subprocess.Popen(server, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("address"))
        url = line.split()[1].removesuffix("/v1")
        llm = LLM("smollm2", cache="paged", context=512, max_seqs=BATCH, max_batch_tokens=512, backend="cpu")
        rates: dict[str, list[float]] = {"offline": [], "served": []}
        for seed in range(ROUNDS + 1):
            rates["offline"].append(offline(llm, seed))
            rates["served"].append(served(url, seed))
        process.terminate()
    for name, values in rates.items():
        kept = values[1:]  # the first round warms up
        print(f"{name:<8} {statistics.median(kept):7.1f} tokens/s   ({', '.join(f'{v:.1f}' for v in kept)})")


if __name__ == "__main__":
    {"gap": gap, "http": http}[sys.argv[1]]()
