"""The flags of `kvarn run` and `kvarn chat` for the structure of an answer."""

import json
from pathlib import Path

import pytest
from support import tiny_gguf

from kvarn.cli import main

SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", tiny_gguf.CHAT))


def run(model: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["run", "-m", model, "-p", "a", *flags])
    out, err = capsys.readouterr()
    return status, out.removesuffix("\n"), err


def test_a_schema_comes_from_a_file_or_as_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for given in (str(file), json.dumps(SCHEMA)):
        status, out, err = run(model, "--json-schema", given, capsys=capsys)
        assert status == 0
        assert [type(each) for each in json.loads(out)] == [bool, bool]
        assert "end of text" in err


def test_expressions_choices_and_grammars(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grammar.gbnf"
    file.write_text('root ::= "x" [yz]')
    assert run(model, "--regex", "[ab]", capsys=capsys)[1] in ("a", "b")
    assert run(model, "--choice", "one", "--choice", "two", capsys=capsys)[1] in ("one", "two")
    assert run(model, "--grammar", 'start: "no"', capsys=capsys)[1] == "no"
    assert run(model, "--grammar-file", str(file), capsys=capsys)[1] in ("xy", "xz")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json-schema", "/no/such/file"], "--json-schema cannot be read: /no/such/file: No such file"),
        (["--grammar-file", "/no/such/file"], "--grammar-file cannot be read"),
        (["--json-schema", "{"], "json_schema is not JSON"),
        (["--json-schema", '{"not": {}}'], 'the schema has "not", which cannot be enforced'),
        (["--regex", "["], "unclosed character class"),
        (["--regex", "a", "--choice", "b"], "regex and choice were given"),
        (["--grammar", "a", "--grammar-file", "/dev/null"], "--grammar and --grammar-file were given"),
    ],
)
def test_errors_are_one_line(model: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(model, *flags, capsys=capsys)
    assert status != 0
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_chat_refuses_a_bad_structure_before_the_first_question(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "-m", model, "--regex", "("]) != 0
    assert "unclosed group" in capsys.readouterr().err
