"""The cluster simulator: the synchronizer's own task graphs in virtual time, with measured costs in place of data."""

from gradwire.simulate.bulk import Bulk
from gradwire.simulate.cluster import Cluster, Compute, SimulatedLink, Straggler
from gradwire.simulate.items import SimulatedGradient
from gradwire.simulate.result import StepResult
from gradwire.simulate.step import gradients_of, step

__all__ = [
    "Bulk",
    "Cluster",
    "Compute",
    "SimulatedGradient",
    "SimulatedLink",
    "StepResult",
    "Straggler",
    "gradients_of",
    "step",
]
