"""Makes the examples of docs/compare.md and the picture of README.md from real runs of `kvarn compare`.

    python scripts/compare_example.py TEXT [NAME...]

TEXT is WikiText-2's test set. An example is the code block after a line `<!-- NAME -->` in docs/compare.md.
Its first paragraph is the command, and the output replaces the rest. Run it on an idle machine.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compare.md"
BLOCK = r"(<!-- {} -->\n```\n)(.*?)\n\n(.*?)(```\n)"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    text, names = sys.argv[1], sys.argv[2:]
    for name in names or re.findall(r"<!-- (\w+) -->", PAGE.read_text(encoding="utf-8")):
        said = output(name, text)
        page = re.sub(BLOCK.format(name), lambda block, said=said: replaced(block, said), page_text(), flags=re.DOTALL)
        PAGE.write_text(page, encoding="utf-8")


def page_text() -> str:
    return PAGE.read_text(encoding="utf-8")


def output(name: str, text: str) -> str:
    found = re.search(BLOCK.format(name), page_text(), re.DOTALL)
    assert found is not None, f"docs/compare.md has no example {name}"
    command = found[2].removeprefix("$ ").replace("\\\n", " ")
    print(command, flush=True)
    words = [text if word == "wiki.test.raw" else word for word in shlex.split(command)]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def replaced(block: re.Match[str], said: str) -> str:
    return f"{block[1]}{block[2]}\n\n{said}{block[4]}"


if __name__ == "__main__":
    main()
