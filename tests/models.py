"""Where tests find models and vocabularies.

Test material: the folder that KVARN_TEST_MATERIAL names. Models: the default one is pulled; the others lie in
KVARN_MODELS, or in the cache folder of the user, and a test that misses one is skipped with the command that brings it.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvarn.errors import PullFailed
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.pull import models_folder, resolve
from kvarn.text import Tokenizer

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = {
    "smollm2": SMOLLM2,
    "tinyllama": "tinyllama-1.1b-chat-iq2_xxs.gguf",
    "qwen": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "gemma": "gemma-3-270m-q4_k_m.gguf",
    "stories15m": "stories15M.bin",
}


def material(name: str) -> Path:
    root = os.environ.get("KVARN_TEST_MATERIAL")
    if not root:
        pytest.skip(f"KVARN_TEST_MATERIAL is not set; it names the folder that contains {name}")
    path = Path(root) / name
    if not path.exists():
        pytest.skip(f"{name} is missing from KVARN_TEST_MATERIAL")
    return path


def model(name: str) -> Path:
    """By name, or by the name of its file."""
    short = next((short for short, file in FILES.items() if name in (short, file)), name)
    root = Path(os.environ.get("KVARN_MODELS") or models_folder())
    path = root / FILES.get(short, short)
    if path.exists():
        return path
    if short == "smollm2":
        try:
            return resolve("smollm2")
        except PullFailed as error:
            pytest.skip(f"the default model cannot be pulled here: {error}")
    pytest.skip(f"{path.name} is not here: `models/fetch {short}` of the test material brings it")


@cache
def gguf_metadata(path: Path) -> dict[str, Any]:
    return dict(GGUFFile.open(path).metadata)


@cache
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata(path))
