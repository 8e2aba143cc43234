"""The workloads by name. Each is imported when it is used, since some need data or packages of their own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from gradwire.bench.users import load_module, users_code
from gradwire.bench.workload import Workload
from gradwire.core.errors import GradwireError, UnknownNameError


def make_workload(name: str) -> Workload:
    """The workload with a name.

    Args:
        name: One of `WORKLOADS`, or ``MODULE.CLASS=PATH`` for a workload of your own: a subclass of `Workload` whose
            constructor takes the path to its data.

    Raises:
        UnknownNameError: There is no workload with this name.
    """
    if "=" in name:
        place, _, data = name.partition("=")
        module, _, kind = place.rpartition(".")
        found = getattr(load_module(module), kind, None)
        if found is None:
            raise GradwireError(f"The module {module!r} has no workload {kind!r}. Write MODULE.CLASS=PATH.")
        with users_code(f"Making the workload {name}"):
            made: Workload = found(Path(data))
            return made
    if name not in _CLASSES:
        raise UnknownNameError("workload", name, _CLASSES)
    own: Workload = getattr(import_module(f"gradwire.bench.{name}"), _CLASSES[name])()
    return own


_CLASSES = {"text": "SourceText", "small": "SmallText", "deep": "DeepText", "blocks": "Blocks", "digits": "Digits"}
WORKLOADS = tuple(_CLASSES)
"""Names for `make_workload`, which are also those of their modules."""
