"""Makes the example of docs/compare.md and the picture of README.md from real runs of `kvarn compare`.

    python scripts/compare_example.py TEXT [NAME...]

TEXT is WikiText-2's test set. An example is the code block after a line `<!-- NAME -->` in docs/compare.md;
its first line is the command. The output replaces the rest of the block. Run it on an idle machine.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compare.md"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    text, names = sys.argv[1], sys.argv[2:]
    page = PAGE.read_text(encoding="utf-8")
    for name in names or re.findall(r"<!-- (\w+) -->", page):
        page = with_output(page, name, text)
        PAGE.write_text(page, encoding="utf-8")


def with_output(page: str, name: str, text: str) -> str:
    start = page.index("$ kvarn", page.index(f"<!-- {name} -->"))
    end = page.index("```", start)
    command, *rest = page[start:end].splitlines()
    while command.endswith("\\"):
        command = command[:-1] + rest.pop(0).strip()
    words = [text if word == "wiki.test.raw" else word for word in shlex.split(command.removeprefix("$ "))]
    print(command, flush=True)
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    shown = page[start : page.index("\n\n", start)] if "\\\n" in page[start:end] else command
    return page[:start] + f"{shown}\n\n{done.stdout}" + page[end:]


if __name__ == "__main__":
    main()
