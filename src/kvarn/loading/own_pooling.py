"""How a model makes one vector of a text: a GGUF key, or the folder that sentence-transformers writes."""

import json

from kvarn.loading.checkpoint import Checkpoint

LAST, MEAN = "last", "mean"
GGUF_TYPES = {1: MEAN, 3: LAST}
FOLDER_NAMES = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_lasttoken": LAST}
MOST_BYTES = 1 << 16  # of the folder's file


def own_pooling(checkpoint: Checkpoint) -> str:
    """`last` if the model says nothing, or something that is of no use in a model that sees only earlier tokens."""
    if checkpoint.folder is None:
        given = checkpoint.metadata.get(f"{checkpoint.metadata.get('general.architecture')}.pooling_type")
        return GGUF_TYPES.get(given, LAST) if isinstance(given, int) else LAST
    path = checkpoint.folder / "1_Pooling" / "config.json"
    try:
        values = json.loads(path.read_bytes()) if path.stat().st_size <= MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return LAST
    known = values if isinstance(values, dict) else {}
    return next((pooling for name, pooling in FOLDER_NAMES.items() if known.get(name) is True), LAST)
