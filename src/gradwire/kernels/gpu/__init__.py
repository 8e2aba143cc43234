"""Kernels in Triton, the device code that generated kernels call."""
