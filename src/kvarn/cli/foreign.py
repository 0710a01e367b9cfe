"""Options of llama.cpp, Ollama and vLLM that kvarn does not have, and what to use instead.

Names that kvarn takes as aliases are not here: they are in flags.py.
"""

from collections.abc import Container
from typing import NamedTuple


class Instead(NamedTuple):
    option: str  # of kvarn; empty if none is needed
    words: str


_LAYERS = Instead("--backend", "all layers are on one device: --backend cuda or cpu selects it")
_PACKED = Instead("", "kvarn packs the weights into memory when it loads a model; leave it out")
_ATTENTION = Instead("", "there is one attention, and it needs no option; leave it out")
_CONTEXT = Instead("-c", "use -c N")
_CELLS = Instead("--cache-type", "use --cache-type TYPE, or K/V as in int8/bf16")
_DEVICE = Instead("", "the environment variable CUDA_VISIBLE_DEVICES selects the device")
_ONE = Instead("", "kvarn computes on one device; leave it out")
_THREADS = Instead("-t", "kvarn computes on one device; -t N sets the threads of the CPU")

FOREIGN = {
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), _LAYERS),
    **dict.fromkeys(("-fa", "--flash-attn"), _ATTENTION),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap"), _PACKED),
    **dict.fromkeys(("--max-model-len", "--num-ctx"), _CONTEXT),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"), _CELLS),
    **dict.fromkeys(("-tp", "--tensor-parallel-size", "--pipeline-parallel-size"), _THREADS),
    **dict.fromkeys(("--main-gpu", "--device"), _DEVICE),
    **dict.fromkeys(("--split-mode", "--tensor-split"), _ONE),
    "--gpu-memory-utilization": Instead("--cache-bytes", "use --cache-bytes N, as in 8G"),
    "--max-num-seqs": Instead("-np", "use -np N"),
    "--max-num-batched-tokens": Instead("-b", "use -b N"),
    "--served-model-name": Instead("--alias", "use --alias NAME"),
}


def instead_of(name: str, known: Container[str]) -> str | None:
    """What to use instead of this option in a command with the `known` options. None: nothing is known."""
    if name in known or name not in FOREIGN:
        return None
    found = FOREIGN[name]
    return found.words if not found.option or found.option in known else None
