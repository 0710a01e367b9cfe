"""docs/requirements.md and the tests say the same: every requirement is proved, every proof exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "requirements.md"


class Requirement(NamedTuple):
    proofs: list[str]  # paths of tests and scripts, tests with ::name
    open: bool  # the document says that nothing can prove it yet


def requirements(text: str) -> dict[int, Requirement]:
    """By number, from sections `### 12. Title`."""
    found: dict[int, Requirement] = {}
    for section in re.split(r"^### ", text, flags=re.M)[1:]:
        number = int(section.split(".")[0])
        assert number not in found, f"requirement {number} stands there twice"
        proofs = re.findall(r"^- `((?:tests|bench)/[^`]+)`$", section, re.M)
        found[number] = Requirement(proofs, bool(re.search(r"^Open: ", section, re.M)))
    return found


class MarkedTest(NamedTuple):
    place: str  # path::name
    numbers: list[int]


def marked_tests(folder: Path) -> Iterator[MarkedTest]:
    """Every test function below the folder, with the numbers of its markers `pytest.mark.requirement`."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = [
                    mark
                    for mark in node.decorator_list
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement"
                ]
                numbers = [ast.literal_eval(argument) for mark in marks for argument in mark.args]
                yield MarkedTest(f"{path.relative_to(folder.parent).as_posix()}::{node.name}", numbers)


def problems(listed: dict[int, Requirement], tests: list[MarkedTest], root: Path) -> list[str]:
    places = {test.place for test in tests}
    marked = {number for test in tests for number in test.numbers}
    found = [
        f"{test.place}: requirement {number} is not in the document"
        for test in tests
        for number in test.numbers
        if number not in listed
    ]
    for number, requirement in listed.items():
        for proof in requirement.proofs:
            if proof not in places if "::" in proof else not (root / proof).is_file():
                found.append(f"requirement {number}: there is no {proof}")
        proved = number in marked or any(proof.startswith("bench/") for proof in requirement.proofs)
        if proved and requirement.open:
            found.append(f"requirement {number} is proved: the document still says that it is open")
        if not proved and not requirement.open:
            found.append(f"requirement {number} has no marked test and no script under bench/")
    return found


def test_every_requirement_is_proved_and_every_proof_exists() -> None:
    listed = requirements(DOCUMENT.read_text())
    assert list(listed) == list(range(1, 55))
    assert [number for number, requirement in listed.items() if requirement.open] == []
    assert problems(listed, list(marked_tests(ROOT / "tests")), ROOT) == []


PAGE = """
### 1. Proved by a test
- `tests/test_a.py::test_one`
### 2. Proved by a script
- `bench/speed.py`
### 3. Not yet
Open: nothing can prove it.
"""
WRONG = {
    "no proof": (("3. Not yet\nOpen: nothing can prove it.", "3. Not yet"), "requirement 3 has no marked test and no"),
    "a test that is not there": (("::test_one", "::test_two"), "there is no tests/test_a.py::test_two"),
    "a script that is not there": (("bench/speed", "bench/slow"), "requirement 2: there is no bench/slow.py"),
    "a number that is not there": (("### 1.", "### 4."), "test_one: requirement 1 is not in the document"),
    "open and proved": (("by a script\n", "by a script\nOpen: soon.\n"), "requirement 2 is proved"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "tests/test_a.py": "@pytest.mark.requirement(1)\ndef test_one(): ...",
        "bench/speed.py": "",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_page_that_agrees_with_its_tests(project: Path) -> None:
    assert problems(requirements(PAGE), list(marked_tests(project / "tests")), project) == []


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_page_that_disagrees_is_found(change: tuple[str, str], message: str, project: Path) -> None:
    found = problems(requirements(PAGE.replace(*change)), list(marked_tests(project / "tests")), project)
    assert any(message in line for line in found), found
