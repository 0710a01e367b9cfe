"""The Python API and the commands on the default model."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.models import model

from kvarn import LLM, KvarnError, SamplingParams, native
from kvarn.cli import main

FOX = "The quick brown fox"


@cache
def llm() -> LLM:
    return LLM(model("smollm2"), cache="paged", context=512, max_seqs=4)


@pytest.mark.requirement(40, 43)
def test_generate_text_of_the_default_model() -> None:
    (output,) = llm().generate(FOX, SamplingParams(max_tokens=6))
    assert output.text == " with a quick brown bear."
    assert output.prompt_tokens == 4
    assert output.finish_reason == "length"
    assert len(output.tokens) == 6


def test_text_and_token_ids_are_both_prompts() -> None:
    ids = llm().tokenizer.encode(FOX)
    params = SamplingParams(max_tokens=4)
    both = llm().generate([FOX, ids], params)
    assert both[0].tokens == both[1].tokens == llm().generate(ids, params)[0].tokens


def test_stream_gives_the_same_text_in_pieces() -> None:
    pieces = list(llm().stream(FOX, SamplingParams(max_tokens=12)))
    assert len(pieces) > 5
    assert "".join(pieces) == llm().generate(FOX, SamplingParams(max_tokens=12))[0].text


def test_leaving_a_stream_frees_what_it_held() -> None:
    for _ in llm().stream(FOX, SamplingParams(max_tokens=50)):
        break
    assert llm().cache.usage().sequences == 0
    assert not llm().engine.busy


def test_a_refused_prompt_leaves_nothing_behind() -> None:
    with pytest.raises(KvarnError, match="the prompt is empty"):
        llm().generate([FOX, []])
    assert not llm().engine.busy


def test_chat_uses_the_models_template() -> None:
    """Every token of the answer leads by half a nat and more: it is the same in both orders of sums."""
    output = llm().chat([{"role": "user", "content": "What is the capital of Japan?"}], max_tokens=20, temperature=0)
    assert output.text == "The capital of Japan is Tokyo."
    assert output.finish_reason == "stop"


def test_a_second_turn_reuses_the_first() -> None:
    messages = [{"role": "user", "content": "Name three colours of the rainbow, please, in one short line."}]
    first = llm().chat(messages, max_tokens=24, temperature=0)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And one more?"}]
    second = llm().chat(messages, max_tokens=4, temperature=0)
    assert second.cached_tokens >= (first.prompt_tokens // 32) * 32 > 0


def test_stop_strings_end_the_text_before_them() -> None:
    params = SamplingParams(max_tokens=30, stop="brown")
    output = llm().generate(FOX, params)[0]
    assert output.text == " with a quick "
    assert output.finish_reason == "stop"
    assert "".join(llm().stream(FOX, params)) == " with a quick "


def test_samples_and_seeds() -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, logprobs=2)
    first, again = (llm().generate(FOX, params)[0] for _ in range(2))
    assert [c.text for c in first.completions] == [c.text for c in again.completions]
    assert len({c.text for c in first.completions}) > 1
    for completion in first.completions:
        assert [entry.token for entry in completion.logprobs] == completion.tokens
        assert all(entry.logprob <= entry.top[0][1] for entry in completion.logprobs)


@pytest.mark.requirement(34, 39)
@pytest.mark.parametrize("strategy", ["contiguous", "head-major", "repeated", "ring", "sliding", "sinks", "auto"])
def test_every_strategy_by_name(strategy: str) -> None:
    other = LLM(model("smollm2"), cache=strategy, context=256, max_seqs=1)
    assert other.generate(FOX, SamplingParams(max_tokens=6))[0].text == " with a quick brown bear."


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(KvarnError, match="was trained for 8,192 tokens"):
        LLM(model("smollm2"), context=10_000)


def run_json(capsys: pytest.CaptureFixture, *flags: str) -> dict:
    assert main(["run", "-m", str(model("smollm2")), "-p", FOX, "-n", "6", "-c", "128", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_run_json(capsys: pytest.CaptureFixture) -> None:
    facts = run_json(capsys, "--cache", "paged", "--cache-type", "f16")
    assert facts["text"] == " with a quick brown bear."
    assert len(facts["tokens"]) == 6
    assert (facts["prompt_tokens"], facts["cached_tokens"], facts["finish_reason"]) == (4, 0, "length")
    assert set(facts["timings"]) == {"load_ms", "prefill_ms", "prefill_tok_s", "decode_tok_s"}
    cache = facts["cache"]
    assert (cache["strategy"], cache["codec"], cache["blocks_used"]) == ("paged", "f16", 1)
    assert cache["bytes_written"] == 9 * 2 * 30 * 3 * 64 * 2, "prompt + generated - 1 tokens"
    assert cache["bytes_read"] == sum((4, 5, 6, 7, 8, 9)) * 2 * 30 * 3 * 64 * 2
    assert facts["kernels"] == {"prefill": 30, "decode": 5 * 30}
    native_facts = {"name": "cpu", "isa": native.isa(), "order": native.sum_order()}
    assert facts["backend"] == {**native_facts, "chosen": "auto: no NVIDIA device"}, "native, unasked"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-f", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory"),
        (["-p", "a", "-m", "/nowhere.gguf"], "/nowhere.gguf: no such file or folder"),
        (["-p", "a", "-m", "nosuchmodel"], "nosuchmodel"),
        (["-p", "a " * 200, "-c", "64"], "tokens and the context holds 64"),
        (["-p", "a", "-c", "99999"], "was trained for 8,192 tokens"),
        (["-p", "a", "--temp", "-1"], "temperature is -1.0; it must be"),
        (["-p", "a", "-t", "0"], "0 threads; it must be at least 1"),
        (["-p", "a", "--cache-bytes", "1K"], "the cache budget is 1,024 bytes"),
        (["-p", "", "-c", "64"], "the prompt is empty"),
    ],
)
def test_run_refuses_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    defaults = [] if "-m" in flags else ["-m", str(model("smollm2"))]
    assert main(["run", *defaults, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvarn run: ")
    assert message in error
    assert error.count("\n") == 1


def test_inspect(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(model("smollm2"))]) == 0
    text = capsys.readouterr().out
    assert "9 query, 3 KV, of 64" in text
    assert main(["inspect", str(model("smollm2")), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "llama"
    assert facts["layers"] == 30
    row = next(r for r in facts["kv_cache"] if (r["strategy"], r["codec"]) == ("contiguous", "bf16"))
    assert row["bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert {t["type"] for t in facts["tensors"]} == {"F32", "Q4_1", "Q8_0"}


@pytest.mark.requirement(36)
def test_perplexity_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    flags = ["-m", str(model("smollm2")), "-f", str(path), "-c", "64", "--chunks", "2", "--json"]
    assert main(["perplexity", *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["chunks"], facts["tokens"]) == (2, 2 * 31)
    assert 1 < facts["ppl"] < 3, "it repeats"
    path.write_text("short")
    assert main(["perplexity", *flags]) == 1
    assert "fewer than one window of 64" in capsys.readouterr().err


def test_a_prompt_longer_than_a_step_needs_no_logits_on_the_way() -> None:
    tokens = list(range(1000, 1100))
    whole, chunked = (LLM(model("smollm2"), context=256, max_batch_tokens=n) for n in (128, 32))
    expected = whole.generate([tokens], SamplingParams(max_tokens=4))[0].tokens
    assert chunked.generate([tokens], SamplingParams(max_tokens=4))[0].tokens == expected


def test_a_trace_has_the_steps_and_their_operations(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = ["-m", str(model("smollm2")), "-p", "The quick brown fox", "-n", "3", "-c", "64", "--trace", str(path)]
    assert main(["run", *flags]) == 0
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    steps = [e for e in events if e["name"] == "step"]
    assert [e["args"] for e in steps] == [{"tokens": 4, "rows": 1}, *[{"tokens": 1, "rows": 1}] * 2]
    for step in steps:
        inside = [e for e in events if e["tid"] == 2 and step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        assert sum(e["name"].startswith("attention") for e in inside) == 30
        assert sum(e["dur"] for e in inside) <= step["dur"]
    assert main(["run", *flags, "--backend", "reference"]) == 1


def test_chat_keeps_the_history() -> None:
    code = "import sys; from kvarn.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "chat", str(model("smollm2")), "--temp", "0", "-c", "512", "-n", "60"]
    lines = "What is the capital of Italy?\n/explain\nAnd of Spain?\n/explain\n/quit\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Rome" in done.stdout
    first, second = re.findall(r"reused (\d+) of (\d+) prompt tokens, computed", done.stdout)
    assert (int(first[0]), int(second[0]) > 32) == (0, True), "the first turn is in the cache"
    assert "what follows is new" in done.stdout or "differs at token" in done.stdout, "and says why not all of it"
