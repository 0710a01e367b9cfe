"""The CUDA backend: Triton kernels compiled ahead of time, launched through NVIDIA's driver. No torch."""
