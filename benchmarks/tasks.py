"""Workloads that benchmarks train: those of `gradwire bench`, and a vision model that needs a folder of images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.compared import method_of
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError

WORKLOADS = {"text": "text", "vision": "benchmarks.accuracy.vision.SmallCifar10"}
NEEDS_DATA = {"vision"}


@dataclass(frozen=True)
class Task:
    """A workload.

    Attributes:
        name: Name in the record.
        made_by: Name for `make_workload`.
        num_parameters: Number of parameters of the model.
        has_momentum: Whether its optimizer has momentum.
    """

    name: str
    made_by: str
    num_parameters: int
    has_momentum: bool

    @classmethod
    def of(cls, name: str, data: Path | None) -> Task:
        """The workload with a name, one of `WORKLOADS` or of `gradwire bench`."""
        made_by = WORKLOADS.get(name, name)
        if name in NEEDS_DATA:
            if data is None:
                raise OptionError(f"The workload {name} trains on images. Pass --data FOLDER with those of CIFAR-10.")
            made_by = f"{made_by}={data.resolve()}"
        workload = make_workload(made_by)  # decodes images once, before all ranks would
        model = workload.model()
        groups = workload.optimizer(model).param_groups
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(name, made_by, num_parameters, any(group.get("momentum") for group in groups))

    def method(self, label: str, steps: int) -> str:
        """The method of one of `METHODS`, or of `gradwire.bench.methods`, for a training of `steps` steps."""
        return method_of(label, steps, self.has_momentum)
