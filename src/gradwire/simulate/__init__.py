"""The cluster simulator: the synchronizer's own task graphs in virtual time, with measured costs in place of data."""

from gradwire.simulate.bulk import Bulk
from gradwire.simulate.cluster import Cluster, SimulatedLink, Straggler
from gradwire.simulate.result import StepResult
from gradwire.simulate.step import step
from gradwire.simulate.workload import Compute, SimulatedGradient, SimulatedModel

__all__ = [
    "Bulk",
    "Cluster",
    "Compute",
    "SimulatedGradient",
    "SimulatedLink",
    "SimulatedModel",
    "StepResult",
    "Straggler",
    "step",
]
