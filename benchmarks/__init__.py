"""Benchmarks and studies: `python -m benchmarks list` names them, `python -m benchmarks run NAME` runs one."""
