"""The attacks of `make attack`, a few seconds of each. (HTTP and tokenizers have theirs in server/ and text/.)"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("attack", "cases"), [("schedules", 12), ("models", 200)])
def test_a_part_of_each_attack(attack: str, cases: int) -> None:
    program = Path(__file__).parent / f"attack_{attack}.py"
    command = [sys.executable, str(program), "--seed", "7", "--cases", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} of {cases} cases" in done.stdout
