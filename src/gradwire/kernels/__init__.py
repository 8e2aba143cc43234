"""Inner loops, one folder a backend, with the same function names and the same bytes in each.

`reference` is NumPy, obvious and slow: the oracle. `cpu` is Numba. A caller says
``from gradwire.kernels import active as kernels`` and gets the fastest backend for CPU memory.

Conventions of every kernel:

- Arrays are contiguous and one-dimensional; results go to buffers of the caller; nothing of the size of the
  input is allocated.
- A gradient `x` is float32, float64, float16, or uint16, which stands for the bits of bfloat16. It is
  converted to float32 as it is loaded, and arithmetic is float32 with one rounding an operation, unless the
  kernel says otherwise.
- Residuals, decoded tensors and accumulators are float32.
- Non-finite values go through and show in the result; no kernel drops them. The payload bits of a NaN that
  arithmetic produced may differ between backends, nothing else may.
- A decoder given arbitrary bytes stays inside its buffers. Lengths are checked and raise `ValueError`.
"""

from gradwire.kernels import cpu, reference
from gradwire.kernels import cpu as active

__all__ = ["active", "cpu", "reference"]
