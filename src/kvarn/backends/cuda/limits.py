"""What the cuda backend cannot do, each as one line for users, and what a model takes on a device.

This module needs neither a device nor cuda-bindings. The backend refuses with these words, and `--backend auto` chooses
by them.
"""

from math import prod

from kvarn.backends.cuda.planes import PACKED
from kvarn.backends.cuda.specs import (
    CODEC_CODES,
    CODED,
    HEAD_MULTIPLE,
    LARGEST_HEAD,
    TYPE_BYTES,
    TYPES,
    form_of,
    product_of,
)
from kvarn.cache.plan import Plan
from kvarn.errors import KvarnError
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.encodings import TensorInfo

CODECS = (*TYPES, *CODED)
LAYOUTS = ("token-major", "head-major", "repeated")  # those that store the numbers of a row side by side
MARGIN = 1 << 30  # bytes that the default cache leaves free, for tables, scratch and larger steps
VECTOR = 4  # of norms and biases: they become f32


def refusal(plan: Plan) -> str | None:
    """Why the backend cannot have this cache."""
    codec, layout = plan.codec, plan.layout.name
    if codec.name not in CODECS and not {codec.k.name, codec.v.name} <= CODEC_CODES.keys():
        has = f"{', '.join(CODECS)}, and pairs of {', '.join(CODEC_CODES)}"
        return f"the cuda backend has no {codec.name} cells (it has {has})"
    if layout not in LAYOUTS:
        return f"the cuda backend does not have the {layout} layout (it has {', '.join(LAYOUTS)})"
    for spec in (group.config.spec for group in plan.groups):
        if spec.k_dim != spec.v_dim:
            return f"keys of {spec.k_dim} and values of {spec.v_dim} numbers: the cuda backend wants them equal"
        if spec.k_dim > LARGEST_HEAD:
            return f"heads of {spec.k_dim} numbers: the cuda backend has kernels up to {LARGEST_HEAD}"
        if spec.k_dim % HEAD_MULTIPLE:
            return f"heads of {spec.k_dim} numbers: the cuda backend has kernels for multiples of {HEAD_MULTIPLE}"
    return None


def require(plan: Plan) -> None:
    """Raise, if the backend cannot have this cache."""
    if why := refusal(plan):
        raise KvarnError(f"{why}; use --backend cpu")


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all weights on a device. The rows that pad a matrix are not counted."""
    return sum(tensor_bytes(info) for info in checkpoint.infos)


def stored_as(info: TensorInfo) -> str:
    """What a tensor is on a device: `f32`, `f16`, `bf16`, or the name of its planes."""
    return "f32" if len(info.shape) == 1 else product_of(info.type)


def tensor_bytes(info: TensorInfo) -> int:
    if len(info.shape) == 1:
        return VECTOR * info.shape[0]
    if info.type in PACKED:
        return prod(info.shape[:-1]) * PACKED[info.type].row_bytes(info.shape[-1])
    return prod(info.shape) * TYPE_BYTES[form_of(info.type)]
