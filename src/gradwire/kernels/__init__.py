"""Inner loops, one folder for each backend. Backends share function names and produce the same bytes.

`reference` is plain NumPy, written to be read: the oracle. `cpu` is Numba. Use
``from gradwire.kernels import active as kernels`` to get the fastest backend for CPU memory.

All kernels follow these conventions:

- Arrays are contiguous and one-dimensional. The caller provides the output buffers. A kernel of `cpu` allocates no copy
  of a gradient; `top_k` allocates space for about twice the elements that it selects.
- A gradient `x` is float32, float64, float16, or uint16 with the bits of bfloat16. Elements are converted to float32
  when they are loaded. Arithmetic is float32 and rounds after each operation, unless the kernel says otherwise.
- Residuals and decoded tensors are float32.
- Non-finite values propagate to the result. Backends may differ only in the payload bits of a NaN that arithmetic
  produced.
- A decoder never leaves its buffers, whatever bytes it reads. A buffer of the wrong length raises `ValueError`.

A kernel is written once in a module of `reference`, which documents it, and once in the module of the same name in
`cpu`. `reference/__init__.py` lists the names for both.
"""

from typing import TYPE_CHECKING

from gradwire.kernels import cpu, reference

if TYPE_CHECKING:  # the same names, with their types
    from gradwire.kernels import reference as active
else:
    from gradwire.kernels import cpu as active

__all__ = ["active", "cpu", "reference"]
