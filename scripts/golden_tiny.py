"""Writes golden data from llama.cpp for tiny random models of every architecture and rope scaling.

    pip install xllamacpp gguf numpy      (in a separate environment)
    python scripts/golden_tiny.py [VARIANT ...]      (without a name: all of them)

tests/golden/tiny.json has, for each variant and each of 60 random tokens, the eight most likely next tokens
and their log-probabilities. tests/support/tiny_gguf.py makes the models, always with the same bytes.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import golden_llamacpp  # noqa: E402
from support import tiny_gguf  # noqa: E402


def main() -> None:
    out = ROOT / "tests" / "golden" / "tiny.json"
    golden = json.loads(out.read_text()) if out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in sys.argv[1:] or tiny_gguf.VARIANTS:
            server = golden_llamacpp.open_server(str(tiny_gguf.write(Path(folder) / f"{variant}.gguf", variant)))
            text = tiny_gguf.tokens(variant)
            steps = []
            for end in range(1, len(text) + 1):
                step = golden_llamacpp.predict(server, text[:end], 8)
                steps.append([[top["id"], round(top["logprob"], 5)] for top in step["top_logprobs"]])
            golden[variant] = steps
            print(variant, steps[-1][:3], flush=True)
            del server
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
