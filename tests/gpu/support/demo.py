"""Small kernels to test the machinery with: their specialisations, and the folder of their files."""

from pathlib import Path

from kvarn.backends.cuda.specs import Kernel

DEMOS = Path(__file__).parent / "kernels"

SCALE = Kernel(
    "demo_scale",
    (("x", "*fp32"), ("out", "*fp32"), ("n", "i32"), ("stride", "i64"), ("factor", "fp32")),
    (("BLOCK", 16),),
    (("stride", 8),),
)
PRODUCT = {
    kind: Kernel(
        "demo_product", (("a", f"*{kind}"), ("b", f"*{kind}"), ("out", "*fp32")), (("ROWS", 16), ("DEPTH", 32))
    )
    for kind in ("bf16", "fp16", "fp32")
}
