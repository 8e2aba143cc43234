"""The cluster simulator: the synchronizer's own operations in virtual time, with measured costs in place of data.

- `step`, `sweep`: one step, and steps over methods, numbers of ranks and rates.
- `workload`, `models`, `cluster`: gradients and compute times, the models of HiPress, ranks and links.
- `jobs`, `graphs`, `served`: the jobs of a backward pass, and their operations, made once by the real strategies; and
  those that travel through an aggregation server.
- `prices`, `machine`, `frames`: costs of tasks and frames, and their measurement on this machine.
- `fold`, `fragments`, `assemble`, `tasks`: which ranks are simulated, large frames, and all tasks as arrays.
- `events`, `loop`, `bulk`: the engine, its compiled loop, and HiPress's coordinator.
- `result`, `plots`: times, waits and a trace; plots.

The path: `step` → `jobs` → `graphs` → `assemble`, which prices → `events` → `result`.
"""

from gradwire.simulate.bulk import Bulk
from gradwire.simulate.cluster import Cluster, SimulatedLink, SimulatedServer, Straggler
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
    "SimulatedServer",
    "StepResult",
    "Straggler",
    "step",
]
