"""An error or an interrupt at many lines of the bookkeeping, one after the other.

    python tests/attack_lines.py --seed 1 --stride 7

Nothing may be held afterwards, and no answer may be wrong. Stride 1 takes every line, in half an hour.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from support.any_line import SETTINGS, attack
from support.serving import tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first line")
    parser.add_argument("--stride", type=int, default=7)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every error is logged
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), 512)
        for name, settings in SETTINGS.items():
            for error in (MemoryError, KeyboardInterrupt):
                n = attack(model, settings, error, args.seed % args.stride, args.stride)
                print(f"lines: {error.__name__} at {n} lines, {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
