"""EleutherAI's `lm_eval` against the server: a local task for each of its three kinds of request.

lm_eval counts tokens itself, so it needs the model's tokenizer. It gets the files that python_api.py writes. The
log-probabilities must be those of kvarn's Python API, number for number.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from rows import FOX, MODEL, QUESTION, answer, continued, refused, run, works

HERE = Path(__file__).parent
TOKENS = 20  # of a generated answer
CHOICES = {
    "The capital of France is": ["Paris", "Berlin", "a 7-day walk from here"],
    "Water freezes at zero degrees, so ice is": ["cold", "made of café au lait", "hot"],
    "One, two, three,": ["four", "eleven", "👻"],
}
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog, which is 13 years old, sleeps on.",
    "Zürich's trams leave at 07:45. Naïve travellers — there are many — wait in the rain. 🌧",
]
MATERIAL = os.environ.get("KVARN_TEST_MATERIAL")  # a folder that has data/wiki.test.raw


def paragraphs(n: int) -> list[str]:
    """Of WikiText-2, without line ends; none if it is not there."""
    path = Path(MATERIAL or "", "data", "wiki.test.raw")
    lines = path.read_text().splitlines() if MATERIAL and path.is_file() else []
    return [line.strip() for line in lines if len(line) > 300][:n]


WIKI = paragraphs(5)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{name}.jsonl}}
test_split: test
output_type: {kind}
doc_to_text: {text}
doc_to_target: {target}
{rest}
"""
CHOICE = {"kind": "multiple_choice", "text": '"{{context}}"', "target": "label", "rest": 'doc_to_choice: "{{choices}}"'}
ROLLING = {"kind": "loglikelihood_rolling", "text": '""', "target": '"{{text}}"'}
ROLLING["rest"] = "metric_list: [{metric: byte_perplexity}]"
GENERATE = {"kind": "generate_until", "text": '"{{prompt}}"', "target": '""'}
GENERATE["rest"] = f"metric_list: [{{metric: exact_match}}]\ngeneration_kwargs: {{until: [], max_gen_toks: {TOKENS}}}"


def write_tasks(folder: Path) -> None:
    choices = [{"context": context, "choices": found, "label": 0} for context, found in CHOICES.items()]
    tasks = {
        "choice": (CHOICE, choices),
        "rolling": (ROLLING, [{"text": text} for text in TEXTS]),
        "wiki": (ROLLING, [{"text": text} for text in WIKI]),
        "text": (GENERATE, [{"prompt": FOX}]),
        "chat": (GENERATE, [{"prompt": QUESTION}]),
    }
    for name, (fields, documents) in tasks.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder, **fields))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))


@cache
def scores() -> dict[tuple[str, ...], list]:
    """The arguments of lm_eval's requests, and [log-probability, is it greedy] from the Python API."""
    pairs = [(context, f" {choice}") for context, found in CHOICES.items() for choice in found]
    asked = json.dumps([*pairs, *((None, text) for text in (*TEXTS, *WIKI))])
    command = [os.environ["KVARN_PYTHON"], str(HERE / "python_api.py"), str(FOLDER)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    return dict(zip([*pairs, *((text,) for text in (*TEXTS, *WIKI))], json.loads(done.stdout), strict=True))


def lm_eval(address: str, model: str, tasks: str, *flags: str, **fields: object) -> dict[str, list[dict]]:
    """The samples of each task, as lm_eval wrote them."""
    path = "chat/completions" if "chat" in model else "completions"
    given = {"model": MODEL, "base_url": f"{address}/v1/{path}", "max_retries": 1} | fields
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", tasks, "--log_samples", *flags]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(FOLDER / "hub")}
    with tempfile.TemporaryDirectory() as out:
        command += ["--include_path", str(FOLDER), "--output_path", out]
        environment = os.environ | offline
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-300:]
        found = {task: list(Path(out).rglob(f"samples_{task}_*.jsonl")) for task in tasks.split(",")}
        return {task: [json.loads(line) for line in file.read_text().splitlines()] for task, (file,) in found.items()}


def scored(sample: dict) -> dict[tuple[str, ...], list[str]]:
    """The arguments of the requests of a sample, and their results as lm_eval wrote them."""
    arguments = [tuple(each.values()) for each in sample["arguments"].values()]
    results = [each[0] if isinstance(each[0], list) else each for each in sample["resps"]]
    return dict(zip(arguments, results, strict=True))


def completions(address: str, *flags: str, **fields: object) -> None:
    expected = scores()  # writes the tokenizer, too
    local = {"tokenizer_backend": "huggingface", "tokenizer": FOLDER}
    samples = lm_eval(address, "local-completions", "choice,rolling,text", *flags, **local, **fields)
    found = {key: value for sample in samples["choice"] + samples["rolling"] for key, value in scored(sample).items()}
    assert found.keys() == {key for key in expected if key[0] not in WIKI}
    for key, (logprob, *greedy) in found.items():
        assert math.isclose(float(logprob), expected[key][0], rel_tol=1e-12), (key, logprob, expected[key])
        assert greedy in ([], [str(expected[key][1])]), (key, greedy, expected[key])  # a rolling one has no such fact
    assert [sample["acc"] for sample in samples["choice"]] == [1, 1, 1], "the first choice is the likeliest"
    assert [sample["resps"] for sample in samples["text"]] == [[[continued(address, TOKENS)]]]


def together(address: str) -> None:
    completions(address, "--batch_size", "3", num_concurrent=2)


def chat(address: str) -> None:
    samples = lm_eval(address, "local-chat-completions", "chat", "--apply_chat_template")
    assert [sample["resps"] for sample in samples["chat"]] == [[[answer(address, TOKENS)]]]


def wikitext(address: str) -> None:
    expected = scores()
    local = {"tokenizer_backend": "huggingface", "tokenizer": FOLDER}
    samples = lm_eval(address, "local-completions", "wiki", **local)["wiki"]
    found = {key: value for sample in samples for key, value in scored(sample).items()}
    assert len(found) == len(WIKI)
    for key, (logprob, *_) in found.items():
        assert math.isclose(float(logprob), expected[key][0], rel_tol=1e-12), (key, logprob, expected[key])


def remote(address: str) -> None:
    lm_eval(address, "local-completions", "choice", tokenizer_backend="remote")


ROWS = [
    works("local-completions: loglikelihood, loglikelihood_rolling, generate_until", completions),
    works("the same, 3 prompts in a request, 2 requests at a time", together),
    works("local-chat-completions: generate_until", chat),
    *([works("WikiText-2: loglikelihood_rolling of five paragraphs", wikitext)] if WIKI else []),
    refused("tokenizer_backend=remote", remote),
]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(folder)
        write_tasks(FOLDER)
        run(("lm-eval",), ROWS)
