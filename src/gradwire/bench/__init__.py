"""Benchmarks of kernels, compressors and training, behind `gradwire bench` and `gradwire demo`."""
