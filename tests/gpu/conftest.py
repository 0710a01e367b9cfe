"""Tests of the CUDA backend without a GPU: kernels are compiled for every target, and run in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set before anything imports Triton. Kernels
are compiled in processes of their own, without it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
