"""bench/peer_tests.py finds samples in test files, and tells when the parser differs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvarn.dialect import GENERIC

BENCH = Path(__file__).resolve().parents[2] / "bench"
FILE = """
CALL = '{"name": "go", "arguments": {"n": 1}}'
TEXT = "<tool_call>"
TEXT += f"{CALL}</tool_call>"

@pytest.mark.parametrize("model_output, expected_tool_calls", [
    pytest.param(TEXT, [ToolCall(function=FunctionCall(name="go", arguments=json.dumps({"n": 1})))], id="x"),
    pytest.param("text", []),
])
def test_many(model_output, expected_tool_calls): ...

def test_one(parser):
    result = parser.extract_tool_calls(TEXT + TEXT, None)
    assert len(result.tool_calls) == 2
    assert result.tool_calls[1].function.name == "go"
    args = json.loads(result.tool_calls[0].function.arguments)
    assert args["n"] == 1

def test_wrong(parser):
    result = parser.extract_tool_calls(TEXT, None)
    assert json.loads(result.tool_calls[0].function.arguments) == {"n": 2}

def test_computed(parser):
    result = parser.extract_tool_calls(make(3), None)
    assert len(result.tool_calls) == 3
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_tests", BENCH / "peer_tests.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peer_tests", made)  # dataclasses look for it there
    spec.loader.exec_module(made)
    return made


def test_samples_of_a_file(tmp_path: Path, module: ModuleType) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(FILE)
    samples = list(module.Reader(path, lambda file, owner: GENERIC).samples())
    assert [sample.test for sample in samples] == ["test_many", "test_many", "test_one", "test_wrong"]
    assert [sample.n for sample in samples] == [1, 0, 2, None]
    assert [sample.differs() for sample in samples] == ["", "", "", "arguments {'n': 1} instead of {'n': 2}"]
