"""Where tests find models and vocabularies.

Test material: the folder that KVARN_TEST_MATERIAL names. The default model is pulled. The others take minutes: they are
looked for in KVARN_MODELS, or, with the material set, in the cache folder; a test that misses one is skipped and says
what brings it.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvarn.errors import PullFailed
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.paths import models_folder
from kvarn.loading.pull import resolve
from kvarn.text.tokenizer import Tokenizer

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
    if not _wanted(short):
        pytest.skip(f"{short} takes minutes: set KVARN_MODELS to the folder that holds {path.name} to run this")
    if path.exists():
        return path
    if short == "smollm2":
        try:
            return resolve("smollm2")
        except PullFailed as error:
            pytest.skip(f"the default model cannot be pulled here: {error}")
    pytest.skip(f"{path.name} is not here: `models/fetch {short}` of the test material brings it")


def _wanted(short: str) -> bool:
    return short == "smollm2" or bool(os.environ.get("KVARN_MODELS") or os.environ.get("KVARN_TEST_MATERIAL"))


@cache
def gguf_metadata(path: Path) -> dict[str, Any]:
    return dict(GGUFFile.open(path).metadata)


@cache
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata(path))
