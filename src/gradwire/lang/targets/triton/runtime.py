"""Functions called by generated Triton code: device functions of `kernels.gpu`, torch functions of `host`."""

from __future__ import annotations

from gradwire.kernels import layout
from gradwire.kernels.gpu import device, packing, positions
from gradwire.lang.targets.triton import host
from gradwire.lang.targets.triton.names import RUNTIME

__all__ = sorted(RUNTIME)

for _name in RUNTIME:
    globals()[_name] = next(
        vars(module)[_name] for module in (device, packing, positions, host, layout) if _name in vars(module)
    )
