"""Benchmarks and studies. `python -m benchmarks list` lists them, `python -m benchmarks run NAME` runs one."""
