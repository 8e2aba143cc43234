"""Inner loops, one folder a backend, with the same function names and the same bytes in each.

`reference` is NumPy, obvious and slow: the oracle. `cpu` is Numba. A caller says
``from gradwire.kernels import active as kernels`` and gets the fastest backend for CPU memory.
"""
