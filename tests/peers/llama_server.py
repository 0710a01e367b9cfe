"""Stands in for llama-server in llama.cpp's own tests: takes its flags, and becomes `kvarn serve`.

    LLAMA_SERVER_BIN_PATH=this pytest ...

What kvarn has no flag for is noted in the file that KVARN_PEER_NOTES names, with the test that asked for it. The
models of these tests cannot be had everywhere, so stories15M takes their place (KVARN_PEER_STORIES), with the
vocabulary of Llama 2 (KVARN_PEER_VOCABULARY) and the chat template that the test asks for.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import stories

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
COMMAND_R = """\
{%- for m in messages %}{{ '<|START_OF_TURN_TOKEN|><|' + {'system': 'SYSTEM', 'user': 'USER'}.get(m.role, 'CHATBOT')
 + '_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
NAMED = {"chatml": CHATML, "llama3": "meta-llama-Llama-3.1-8B-Instruct", "command-r": COMMAND_R}
# They choose a model, or what kvarn does anyway.
WITHOUT_EFFECT = (
    *("--offline", "--jinja", "--no-jinja", "--slots", "--cont-batching", "--embedding", "--metrics"),
    *("--kv-unified", "--no-mmproj", "--swa-full"),
)
WITH_VALUE = ("--hf-repo", "--hf-file", "--model", "--model-url", "--threads", "--n-gpu-layers", "--ubatch-size", "-fa")
CONTEXT = 4096  # the text is no good after 256 tokens, but these tests do not read it
INFILL = {32000 - 3: "<|fim_prefix|>", 32000 - 2: "<|fim_suffix|>", 32000 - 1: "<|fim_middle|>"}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--host", "--alias", "--api-key", "--chat-template", "--chat-template-file", *WITH_VALUE):
        parser.add_argument(name)
    for name in ("--port", "--ctx-size", "--parallel", "--batch-size"):
        parser.add_argument(name, type=int)
    for name in WITHOUT_EFFECT:
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(arguments)


def template_of(given: argparse.Namespace) -> str:
    if given.chat_template_file:
        return Path(given.chat_template_file).read_text()
    named = NAMED.get(given.chat_template or "chatml", given.chat_template)
    if "{" in named:
        return named
    file = Path("../../../models/templates") / f"{named}.jinja"
    return file.read_text() if file.is_file() else named


def model_of(given: argparse.Namespace, folder: Path) -> Path:
    """Made once for each template."""
    template, infill = template_of(given), "infill" in (given.hf_repo or "")
    path = folder / f"stories-{hashlib.sha256(f'{template}{infill}'.encode()).hexdigest()[:16]}.gguf"
    if not path.exists():
        checkpoint, vocabulary = (Path(os.environ[f"KVARN_PEER_{name}"]) for name in ("STORIES", "VOCABULARY"))
        part = path.with_suffix(f".{os.getpid()}")
        stories.write_gguf(checkpoint, vocabulary, part, template, INFILL if infill else {}, CONTEXT)
        part.rename(path)
    return path


def main() -> None:
    given, unknown = parse(sys.argv[1:])
    with Path(os.environ["KVARN_PEER_NOTES"]).open("a") as notes:
        note = {"test": os.environ.get("PYTEST_CURRENT_TEST", ""), "unknown": unknown}
        notes.write(json.dumps(note) + "\n")
    n_slots, batch = given.parallel or 1, given.batch_size or 512
    context = min((given.ctx_size or 512) // (1 if given.kv_unified else n_slots), CONTEXT)
    command = [
        sys.executable,
        "-m",
        "kvarn",
        "serve",
        "-m",
        str(model_of(given, Path(os.environ["KVARN_PEER_MODELS"]))),
    ]
    command += ["--host", given.host or "127.0.0.1", "--port", str(given.port or 8080), "--log-format", "none"]
    command += ["-np", str(n_slots), "-c", str(context), "-b", str(max(batch, n_slots + 1)), "-t", "2"]
    command += ["--alias", given.alias] if given.alias else []
    command += ["--api-key", given.api_key] if given.api_key else []
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
