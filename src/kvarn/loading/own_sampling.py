"""The sampling settings that a model recommends: `generation_config.json` of a folder, or GGUF keys.

Only a recommendation: a value that is out of range is left out with a warning, and the model still loads.
Non-goals: what applies where a model recommends nothing (engine/params.py).
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from kvarn.errors import printable
from kvarn.loading.checkpoint import Checkpoint

log = logging.getLogger("kvarn")

GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
MOST_BYTES = 1 << 20  # of a generation_config.json


def own_sampling(checkpoint: Checkpoint) -> dict[str, float]:
    """The settings that the model recommends, by their names in SamplingParams."""
    if checkpoint.folder is None:
        keys = {name: GGUF_PREFIX + key for name, key in GGUF_NAMES.items()}
        return _in_range(str(checkpoint.path), checkpoint.metadata, keys)
    path = checkpoint.folder / "generation_config.json"
    try:
        values = json.loads(path.read_bytes()) if path.stat().st_size <= MOST_BYTES else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        log.warning("%s is not a JSON object: its sampling settings are not used", printable(str(path)))
        return {}
    return _in_range(str(path), values, {name: name for name in GGUF_NAMES})


def _in_range(where: str, values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, key in keys.items():
        value = values.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name == "top_k" and value == -1:  # some files switch it off like this
            value = 0
        if not is_number or not _fits(name, value):
            said = printable(repr(value), 40)
            log.warning("%s: %s is %s, which is out of range: it is not used", printable(where), key, said)
        else:
            found[name] = int(value) if name == "top_k" else float(f"{value:.6g}")  # GGUF has 32 bits
    return found


def _fits(name: str, value: float) -> bool:
    """False for what is no finite number; integers of any size can be compared."""
    return {
        "temperature": 0 <= value <= 100,
        "top_k": 0 <= value < 1 << 31 and value == int(value),
        "top_p": 0 < value <= 1,
        "min_p": 0 <= value <= 1,
        "repetition_penalty": 0.01 <= value <= 100,
    }[name]
