"""Every kernel as a Numba loop over short vectors.

The names come from `reference`: each kernel is in the module of the same name here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradwire.kernels import reference

for _name in reference.__all__:
    _module = getattr(reference, _name).__module__.replace(reference.__name__, __name__)
    globals()[_name] = getattr(import_module(_module), _name)

if TYPE_CHECKING:  # type checkers do not run the loop

    def __getattr__(name: str) -> Any: ...
