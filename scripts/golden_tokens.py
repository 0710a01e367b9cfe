"""Writes tests/golden/tokens-NAME.json.gz: llama.cpp's tokens of the hard texts.

    python scripts/golden_tokens.py MODEL_FOLDER [NAME ...]

Needs the PyPI packages xllamacpp and gguf. Run it when tests/support/hard_texts.py changes; the tests only
read its result. Each text is tokenized twice: as plain text, and with control tokens recognized.
"""

import http.client
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import xllamacpp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support import golden_tokens
from support.hard_texts import hard_texts


class Peer:
    def __init__(self, path: Path) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = 64
        parameters.warmup = False
        parameters.port = 0
        self._server = xllamacpp.Server(parameters)
        self._connection = http.client.HTTPConnection(self._server.listening_address.removeprefix("http://"))

    def tokens(self, text: str, special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": special})
        self._connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        return json.load(self._connection.getresponse())["tokens"]


def with_pretokenizer(model: Path, pre: str | None, scratch: Path) -> Path:
    if pre is None:
        return model
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--pre-tokenizer", pre]
    subprocess.run([*command, model, scratch / model.name], check=True)
    return scratch / model.name


def main() -> None:
    folder, *names = sys.argv[1:]
    texts = list(hard_texts(golden_tokens.SEED, golden_tokens.COUNT))
    for name in names or golden_tokens.MODELS:
        file, pre = golden_tokens.MODELS[name]
        with tempfile.TemporaryDirectory() as scratch:
            peer = Peer(with_pretokenizer(Path(folder) / file, pre, Path(scratch)))
        record = {"made_by": f"xllamacpp {xllamacpp.__version__}", "texts": golden_tokens.digest_texts(texts)}
        for key, special in (("plain", False), ("special", True)):
            record[key] = "".join(golden_tokens.digest(peer.tokens(text, special)) for text in texts)
        golden_tokens.write(name, record)
        print(name, len(texts))


main()
