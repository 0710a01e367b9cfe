"""`kvarn plan --check`, the other half: a process that loads a model, measures it and prints what it found.

It is a process of its own, so that what it holds is what the model needs, and nothing of the plan. Settings come as
JSON on standard input; the result goes to standard output.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from kvarn.cli.interrupt import Failed
from kvarn.cli.progress import ProgressLine
from kvarn.errors import KvarnError, printable
from kvarn.forecast.truth import Measured, held_bytes, measured_speed
from kvarn.llm import LLM


class Truth(NamedTuple):
    held: int | None  # bytes
    weights: int  # bytes
    speed: list[Measured]


def truth_of(model: str, settings: Mapping[str, Any], depths: Sequence[int]) -> Truth:
    """`settings`: arguments of `LLM`."""
    asked = json.dumps({"model": model, "settings": dict(settings), "depths": list(depths)})
    done = subprocess.run([sys.executable, "-m", __name__], input=asked, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed  # it has said why
    found = json.loads(done.stdout)
    return Truth(found["held"], found["weights"], [Measured(**each) for each in found["speed"]])


def main() -> int:
    asked = json.load(sys.stdin)
    try:
        with ProgressLine() as line:
            llm = LLM(asked["model"], **asked["settings"], progress=line)
            speed = measured_speed(llm, asked["depths"], line)
    except KvarnError as error:
        print(f"kvarn plan --check: {printable(str(error), 2000)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    sizes = {"held": held_bytes(llm.memory), "weights": llm.program.nbytes}
    print(json.dumps(sizes | {"speed": [asdict(each) for each in speed]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
