"""The random models of a proof, each written once."""

from dataclasses import replace
from pathlib import Path

from gpu.support import models
from support.tiny_models import ARCHITECTURES, GOLDEN, Size

from proof.site import Site

MEDIUM = replace(GOLDEN, n_layers=6, n_heads=8, n_kv_heads=2, hidden=512, feed_forward=1536, context=2048, window=200)
SMALL = replace(MEDIUM, n_layers=2, context=1024)
TINY = replace(GOLDEN, n_layers=1, context=256, window=24)
HEAD_DIMS = dict(zip(ARCHITECTURES, (64, 128, 128, 256, 96), strict=True))
TYPES = ("BF16", "F16", "F32")
PACKED = (("llama", "Q4_K"), ("qwen2", "Q6_K"), ("qwen3", "Q5_K"), ("gemma3", "Q8_0"), ("phi3", "Q4_0"))


def size_of(site: Site, architecture: str) -> Size:
    size = site.pick(MEDIUM, SMALL, TINY)
    return size if site.interpreted else replace(size, head_dim=HEAD_DIMS[architecture])


def write(site: Site, architecture: str, type_name: str) -> Path:
    path = Path(site.folder.name) / f"{architecture}-{type_name}.gguf"
    return path if path.exists() else models.write(path, architecture, type_name, size_of(site, architecture))
