"""The `ollama` package: /api/chat, /api/generate, /api/tags."""

import ollama
from rows import ASKED, MODEL, refused, run

ROWS = [
    refused("chat", lambda a: ollama.Client(a).chat(MODEL, ASKED)),
    refused("generate", lambda a: ollama.Client(a).generate(MODEL, "Hi")),
    refused("list", lambda a: ollama.Client(a).list()),
]

if __name__ == "__main__":
    run(("ollama",), ROWS)
