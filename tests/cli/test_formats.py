"""What `--json` prints is what docs/formats.md and the schemas say: every command, with its real output."""

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.serving import serve, tiny_model

from kvarn.cache.placement import Reason, ReuseLimit
from kvarn.cli import main
from kvarn.engine.explain import Explanation, to_json, without_texts
from kvarn.loading import stored

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "src/kvarn/cli/schemas").glob("*.json")
}


@cache
def validator(name: str) -> Any:
    registry = jsonschema_rs.Registry([(schema["$id"], schema) for schema in SCHEMAS.values()])
    return jsonschema_rs.validator_for(SCHEMAS[name], registry=registry, validate_formats=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("abcdefgh" * 40)
    return path


LINES = {
    "run": ("run", "run -m M -p abc -n 4 -t 1"),
    "run on the reference": ("run", "run -m M -p abc -n 1 --backend reference --cache ring --window 16"),
    "bench": ("bench", "bench -m M -p 8 -n 2 -r 2 -t 1"),
    "bench with settings": ("bench", "bench -m M -p 0 -n 2 -r 1 -t 1 --block-size 16 --window 16 --cache ring"),
    "perplexity": ("perplexity", "perplexity -m M -f T -c 32 --chunks 2 -t 1"),
    "compare": ("compare", "compare -m M -f T -c 32 --windows 2 -n 4 -r 2 -t 1"),
    "compare with windows": ("compare", "compare -m M -f T -c 64 -n 0 -t 1 --cache sinks,auto --window 16 --pinned 2"),
    "plan": ("plan", "plan M -t 1 --depth 0,8"),
    "plan for another machine": ("plan", "plan M -t 1 -np 2 --memory 1M --cache ring --window 16"),
    "plan for a device": ("plan", "plan M --backend cuda --memory 8G"),
    "plan with the truth": ("plan", "plan M -t 1 --check -c 64"),
    "inspect": ("inspect", "inspect M"),
    "inspect with a window": ("inspect", "inspect M --window 16 -c 64"),
    "strategies": ("strategies", "strategies -n 40 -c 64 --heads 2/1"),
    "list": ("list", "list"),
    "snapshot make": ("snapshot", "snapshot make -m M -p abcdefgh -o O/a.kvs -t 1"),
    "snapshot inspect": ("snapshot", "snapshot inspect O/a.kvs"),
    "snapshot verify": ("snapshot-verify", "snapshot verify O/a.kvs -m M --tokens 3 -t 1"),
    "an answer in a snapshot": ("run", "run -m M -p abc -n 2 -t 1 --save-snapshot O/b.kvs"),
    "snapshot inspect of an answer": ("snapshot", "snapshot inspect O/b.kvs"),
    "run from a snapshot": ("run", "run -m M -p abcdefghi -n 2 -t 1 --snapshot O/a.kvs"),
    "list of all": ("list", "list --all"),
}


@pytest.mark.parametrize(("schema", "line"), LINES.values(), ids=LINES)
def test_output(model: Path, text: Path, schema: str, line: str, capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path))
    monkeypatch.setattr(stored, "scan", lambda: None)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").symlink_to(model)
    words = [{"M": str(model), "T": str(text)}.get(word, word) for word in line.split()]
    words = [word.replace("O/", f"{model.parent}/", 1) if word.startswith("O/") else word for word in words]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    validator(schema).validate(said)
    with pytest.raises(jsonschema_rs.ValidationError, match="surprise"):
        validator(schema).validate(said | {"surprise": 1})


def test_a_server(model: Path, capsys: pytest.CaptureFixture) -> None:
    with serve(model, "--cache", "paged", "--block-size", "16", "--quote-texts", "-t", "1") as served:

        def printed(*words: str) -> Any:
            assert main([*words, "--url", served.url, "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        for prompt in ("a text that begins like the other one", "a text that begins unlike", ["two", "prompts"]):
            answer = served.ask("/v1/completions", {"prompt": prompt, "max_tokens": 2}).json
            validator("explain").validate(answer["kvarn"])
        load = ("bench", "serve", "--requests", "2", "--input-len", "4", "--output-len", "1")
        validator("bench-serve").validate(printed(*load))
        validator("bench-serve").validate(printed(*load, "--goodput", "ttft:500"))
        requests = served.ask("/kvarn/requests").json
        validator("explain").validate(printed("explain", requests["data"][-1]["id"]))
    validator("requests").validate(requests)
    reasons = {each["reuse_ended"]["reason"] for each in requests["data"] if "reuse_ended" in each}
    assert "differs" in reasons


EXPLAINED = Explanation(
    prompt=9,
    reused=4,
    reached=9,
    cancelled=False,
    cut_by=None,
    limit=None,
    before=(1,),
    ours=(2, 3),
    prefill_ms=1.23456,
    preemptions=1,
    recomputed_tokens=3,
    recomputed_ms=0.5,
    sampled={"device": 3, "constraint": 1},
    queued_ms=None,
    first_token_ms=1.0,
    total_ms=None,
)


@pytest.mark.parametrize("reason", [None, *Reason])
def test_explanations_for_every_reason(reason: Reason | None) -> None:
    theirs = {"ours": 2, "theirs": 7, "onward": (7, 8)} if reason is Reason.DIFFERS else {}
    when = 1763280000.123456 if reason is Reason.EVICTED else None
    limit = None if reason is None else ReuseLimit(reason, 6, when=when, **theirs)
    explained = to_json(replace(EXPLAINED, limit=limit), lambda tokens: "text" * len(tokens))
    head = {"id": "cmpl-1", "request_id": "r1", "created": 1, "model": "m"}
    validator("explain").validate(head | explained)
    validator("explain").validate(head | {"prompts": [explained]})
    if not theirs:
        validator("explain").validate(head | without_texts(explained))
    for wrong in (head | explained | {"prompts": []}, head, head | {"prompts": [explained | {"surprise": 1}]}):
        assert not validator("explain").is_valid(wrong)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_schemas_and_their_examples_fit(name: str) -> None:
    jsonschema_rs.meta.validate(SCHEMAS[name])
    for example in SCHEMAS[name]["examples"]:
        validator(name).validate(example)


def test_the_peer_of_a_benchmark_is_described() -> None:
    example = json.loads(json.dumps(SCHEMAS["bench"]["examples"][0]))
    peer = {"engine": "llama.cpp", "setting": "as is", "tok_s": 1.5, "spread": 0.1, "samples": [1.5], "ratio": 2.0}
    example["rows"][0]["against"] = peer | {"tried": {"as is": 1.5}}
    validator("bench").validate(example)


def test_the_page_is_made_from_the_schemas() -> None:
    spec = importlib.util.spec_from_file_location("formats", ROOT / "scripts/formats.py")
    assert spec is not None
    assert spec.loader is not None
    formats = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formats)
    assert sorted(formats.ORDER) == sorted(SCHEMAS), "every schema has a section"
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    assert page == formats.document(), "run scripts/formats.py"
    for name, schema in SCHEMAS.items():
        section = page.split(f"/{name}.json)")[1].split("\n## ")[0]
        for path, _, meaning in formats.fields(schema, schema):
            assert f"| `{path}` |" in section
            assert meaning
