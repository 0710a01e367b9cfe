"""A model by any of its names, without its weights: from this machine if it is there, else from the hub.

Nothing is downloaded, and no SHA-256 is computed. Non-goals: weights (pull.py, checkpoint.py).
"""

from contextlib import suppress
from pathlib import Path

from kvarn.errors import PullFailed
from kvarn.loading.catalogue import HubModel, WheelModel
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.hub import Announce, located
from kvarn.loading.hub_headers import remote_checkpoint
from kvarn.loading.names import meaning
from kvarn.loading.paths import models_folder
from kvarn.loading.progress import Progress


def open_headers(name: str, progress: Progress, announce: Announce) -> Checkpoint:
    """`announce` is told which model is taken, if the name leaves that open."""
    meant = meaning(name)
    if meant.note:
        announce(meant.note)
    if isinstance(meant.model, Path):
        return open_checkpoint(meant.model)
    if isinstance(meant.model, WheelModel):
        path = models_folder() / meant.model.file
        if not path.is_file():
            raise PullFailed(f"{meant.name} is not on this machine, and it comes as a whole: run `kvarn pull {name}`")
        return open_checkpoint(path)
    if (path_here := _here(meant.model)) is not None:
        return open_checkpoint(path_here)
    return remote_checkpoint(meant.model, meant.name, progress)


def _here(model: HubModel) -> Path | None:
    """In the cache of the hub's library, complete enough to have a header."""
    with suppress(ImportError):
        found = located(model)
        if found is not None:
            path = found[1] / found[0].file
            return path if found[0].file or any(path.glob("*.safetensors")) else None
    return None
