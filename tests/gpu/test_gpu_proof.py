"""bench/gpu_proof.py runs without a GPU: in the interpreter, with the smallest sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_proof.py"
SECTIONS = {"selftest", "kernels", "conformance", "bits", "codes", "lasting", "memory", "speed"}


def proof(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_every_section_runs(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    done = proof("--interpret", "--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(out.read_text())
    assert {check["section"] for check in whole["checks"]} == SECTIONS
    assert whole["not_done"] == {"real": "no --model was given"}
    assert whole["failures"] == 0 < whole["cases"]
    assert all(check["cases"] for check in whole["checks"])
    assert whole["device"]["device"] == "Interpreter"
    assert whole["command"].endswith("--interpret --quick --out proof.json"), "without paths of this machine"
    lines = done.stdout.splitlines()
    assert len(lines) == len(whole["checks"]) + 2, "one line per check, one for what was not done, and a summary"


def test_a_failure_is_counted_and_the_others_go_on(tmp_path: Path) -> None:
    """A kernel that computes something else."""
    out = tmp_path / "proof.json"
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import sys; sys.path[:0] = [{str(SCRIPT.parent)!r}]\n"
        "import gpu_proof\n"
        "from gpu.support.launching import Board\n"
        "Board.add = lambda self, x, into, spare=0: x\n"
        f"sys.exit(gpu_proof.main(['--interpret', '--quick', '--only', 'kernels', '--out', {str(out)!r}]))\n"
    )
    done = subprocess.run([sys.executable, str(broken)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    whole = json.loads(out.read_text())
    failed = {check["name"]: check["failures"] for check in whole["checks"] if check["failures"]}
    assert failed == {"norm_add, add": ["add"]}
    assert "FAILED: add" in done.stdout


@pytest.mark.parametrize("words", [("--only", "nothing")])
def test_wrong_arguments(words: tuple[str, ...]) -> None:
    done = proof(*words)
    assert done.returncode == 2
    assert "unknown section 'nothing'; there are: selftest, kernels" in done.stderr
