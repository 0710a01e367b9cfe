"""Triton's interpreter with the arithmetic of a GPU where its own differs, with checks, and faster.

- bf16 is stored as uint16 there, and products of it are garbage. Here operands of a product are widened.
- Conversion to bf16 rounds to nearest even, as on a GPU; the interpreter truncates.
- A product adds K in steps of STEP to one f32 accumulator, each step with one rounding. So the bits of an
  element do not depend on the tile it is computed in, which is also what tensor cores do.
- Inline assembly of a few integer instructions runs, and must be elementwise.
- Every load and store must be inside of an allocation of the driver that launched the kernel.
- The language is patched once, not at every launch and every call of a function.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from gpu.support import faster
from numpy.typing import NDArray
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, interpreter_builder

STEP = 16
NUMBERS = (tl.float16, tl.bfloat16, tl.float32)


class OutsideMemory(Exception):
    """A kernel read or wrote outside of all allocations."""


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 -> f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """f32 -> bf16, to nearest even. A NaN stays one."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)


def as_doubles(handle: TensorHandle) -> NDArray[np.float64]:
    data = widen(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data
    return data.astype(np.float64)


def product(a: NDArray[np.float64], b: NDArray[np.float64], total: NDArray[np.float32]) -> NDArray[np.float32]:
    """total + a @ b, where sums of STEP products are exact but for the last bits of a double."""
    for k in range(0, a.shape[-1], STEP):
        total = (a[..., k : k + STEP] @ b[..., k : k + STEP, :] + total).astype(np.float32)
    return total


def fused(a: NDArray[np.uint32], b: NDArray[np.uint32], c: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """a * b + c of the bf16 in both halves."""
    found = np.uint32(0)
    for half in (np.uint32(0), np.uint32(16)):
        x, y, z = (widen((each >> half).astype(np.uint16)).astype(np.float64) for each in (a, b, c))
        found = found | narrow((x * y + z).astype(np.float32)).astype(np.uint32) << half
    return np.asarray(found)


OPERATIONS = {
    "mov.b32": lambda x: x,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "fma.rn.bf16x2": fused,
}


def assembled(text: str, *given: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """What instructions of PTX write to $0 if $1 and so on are given."""
    registers = {f"${i}": each for i, each in enumerate(given, 1)}
    for line in text.strip("{ }").split(";"):
        words = line.replace(",", " ").split()
        if words and words[0] != ".reg":
            name, to, *sources = words
            numbers = [registers[word] if word in registers else np.uint32(int(word, 0)) for word in sources]
            registers[to] = OPERATIONS[name](*numbers)
    return registers["$0"]


class Builder(InterpreterBuilder):
    memory: Any = None  # the driver whose kernel runs

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        have, want = src.dtype.scalar, dst_type.scalar
        if have == tl.bfloat16 and want == tl.float32:
            return TensorHandle(widen(src.data), want)
        if have == tl.float32 and want == tl.bfloat16:
            return TensorHandle(narrow(src.data), want)
        return super().cast_impl(src, dst_type)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        assert lhs.dtype.scalar != tl.bfloat16, "arithmetic on bf16: widen it to f32 first"
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_:  # a comparison; with the type of its operands it would not be a mask
            result.dtype = tl.int1
        return result

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, most: Any) -> TensorHandle:
        kinds = {a.dtype.scalar, b.dtype.scalar}
        if d.dtype.scalar != tl.float32 or not kinds <= set(NUMBERS):
            return super().create_dot(a, b, d, precision, most)
        tf32 = tl.float32 in kinds and precision == ir.INPUT_PRECISION.TF32
        assert not tf32, "a product of f32 would run in tf32 on a GPU: give tl.dot input_precision"
        return TensorHandle(product(as_doubles(a), as_doubles(b), d.data), tl.float32)

    def create_inline_asm(
        self, text: str, constraints: str, values: list[TensorHandle], types: Any, pure: bool, pack: int
    ) -> SimpleNamespace:
        """For u16 packed in pairs. Beside each element, in either half of a register, lies something else."""
        kinds = {handle.data.dtype for handle in values}
        assert (len(constraints.split(",")) - 1, kinds, pure, pack) == (len(values), {np.dtype(np.uint16)}, True, 2)
        random = np.random.default_rng(0)
        own = [handle.data.astype(np.uint32) for handle in values]
        beside = [random.integers(0, 1 << 16, x.shape).astype(np.uint32) for x in own]
        pairs = list(zip(own, beside, strict=True))
        low = assembled(text, *(x | y << np.uint32(16) for x, y in pairs)) & np.uint32(0xFFFF)
        high = assembled(text, *(y | x << np.uint32(16) for x, y in pairs)) >> np.uint32(16)
        assert (low == high).all(), f"it is not elementwise: {text}"
        return SimpleNamespace(get_result=lambda _: TensorHandle(low.astype(np.uint16), tl.uint16))

    def create_barrier(self) -> None:
        """A program has one thread."""

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, policy: Any, volatile: Any) -> TensorHandle:
        self._check(ptrs, mask, "reads")
        return super().create_masked_load(ptrs, mask, other, policy, volatile)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, policy: Any) -> None:
        self._check(ptrs, mask, "writes")
        super().create_masked_store(ptrs, value, mask, policy)

    def _check(self, ptrs: TensorHandle, mask: TensorHandle, does: str) -> None:
        used = ptrs.data if mask.data.all() else ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if not used.size:
            return
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        low, high = int(used.min()), int(used.max())
        if self.memory.holds(low, high - low + size):
            return
        for address in used.ravel():
            if not self.memory.holds(int(address), size):
                raise OutsideMemory(f"program {self.grid_idx} {does} {size} bytes at {int(address):#x}")


def _call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def install() -> Builder:
    """Change the interpreter of this process. Kernels cannot be compiled in this process any more."""
    if isinstance(interpreter_builder, Builder):
        return interpreter_builder
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    faster.install()
    InterpretedFunction.__call__ = _call
    interpreter_builder.__class__ = Builder
    # It would compute every integer operation twice; what it finds is only reported in debug mode.
    interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    return interpreter_builder
