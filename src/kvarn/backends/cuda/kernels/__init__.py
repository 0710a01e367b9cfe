"""The kernels in Triton, one per file, each with the name of its file.

Rules that keep a row's bits the same whatever stands beside it (docs/gpu.md):

- A sum over a matrix's depth, or over keys, runs through one accumulator of `tl.dot`, in order.
- A sum of another kind (`tl.sum`) is computed by one program over a shape that only the model decides.
- Where two kernels must agree, they call the same function, and a multiplication followed by an addition
  is one `tl.fma`. The compiler may fuse nothing by itself (build.py).

Offsets into cells, weights and logits have 64 bits. Only build.py and tests import these modules: Triton
is not needed to run a model.
"""
