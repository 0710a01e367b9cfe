"""Kernels that start while the one before them ends: programmatic dependent launch, from compute capability 9.0 on.

Each kernel of a step calls `wait` before it reads or writes anything but weights. Then everything that was launched
before has ended, and its writes are visible. `release` lets the next kernel start, which then waits: a kernel with
few programs calls it first, a large one when its loop has ended, because programs that wait take room from others.
EARLY is 0 for older devices, and in the interpreter (build.py). Nothing here has an effect on a bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@triton.jit
def release(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def prefetch(lines, EARLY: tl.constexpr):
    """Bring the 128 bytes at each of these addresses into the device's cache."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fence(numbers, EARLY: tl.constexpr):
    """All loads before this are under way before anything after it."""
    if EARLY:
        tl.inline_asm_elementwise(
            "fence.acq_rel.cta; mov.u32 $0, 0;", "=r,l", [numbers], dtype=tl.int32, is_pure=False, pack=1
        )
