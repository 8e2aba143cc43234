"""Triton device functions that generated kernels call."""
