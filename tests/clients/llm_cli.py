"""The `llm` command, with the server as an extra OpenAI model."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import FOX, MODEL, QUESTION, answer, continued, run, works

MODELS = """
- model_id: local
  model_name: {model}
  api_base: {address}/v1
  supports_tools: true
  supports_schema: true
- model_id: local-text
  model_name: {model}
  api_base: {address}/v1
  completion: true
"""


def llm(address: str, *arguments: str) -> tuple[str, str]:
    (FOLDER / "extra-openai-models.yaml").write_text(MODELS.format(address=address, model=MODEL))
    command = [sys.executable, "-m", "llm", *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout, done.stderr


def chat(address: str, *arguments: str) -> str:
    return llm(address, "-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "20", *arguments)[0]


def conversation(address: str) -> None:
    chat(address, QUESTION)
    assert chat(address, "-c", "And of Spain?")


def completion(address: str) -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "5")
    assert llm(address, "-m", "local-text", *options, FOX)[0].strip() == continued(address).strip()


def usage(address: str) -> None:
    assert "Token usage" in llm(address, "-m", "local", "-o", "max_tokens", "5", "-u", QUESTION)[1]


def asked(address: str, *arguments: str) -> None:
    assert chat(address, *arguments, QUESTION).strip() == answer(address).strip()


def schema(address: str) -> None:
    """Of two numbers, so that the answer is short."""
    options = ("-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "200")
    given = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    found = llm(address, *options, "--schema", json.dumps(given), "A dog")[0]
    assert json.loads(found)["legs"] in (2, 4)


ROWS = [
    works("stream", asked),
    works("--no-stream", lambda a: asked(a, "--no-stream")),
    works("-s (system)", lambda a: chat(a, "-s", "Answer in French.", QUESTION)),
    works("-c (conversation)", conversation),
    works("completion model", completion),
    works("-u (usage)", usage),
    works("--schema", schema),
    works("-T (tools): the request is accepted", lambda a: chat(a, "-T", "llm_version", QUESTION)),
]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(folder)
        run(("llm",), ROWS)
