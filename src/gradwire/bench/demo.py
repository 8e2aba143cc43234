"""What `gradwire demo` runs: the main result in a minute and a half, or more methods with a larger model.

    python -m gradwire.bench.demo     # compiles what the short demo uses, for `make demo`

Compiling takes some runs of the demo itself, with a few steps each, so that nothing is left to compile.
"""

from __future__ import annotations

from dataclasses import replace

from gradwire.bench import methods
from gradwire.bench.training import TrainingOptions, run

SHORT = TrainingOptions(
    workload="small",
    methods=(methods.DDP_FP32, methods.DDP_FP16, "threelc", methods.AUTO),
    steps=150,
    timed_seconds=2.0,
    min_timed=3,
    buckets_mb=(4.0,),
)
"""Four methods with the smaller model. DDP has one bucket size, with which its all-reduce overlaps with backward."""

FULL = TrainingOptions(steps=32, timed_seconds=3.0)
"""All methods of the benchmark with the main workload, and DDP with the better of two bucket sizes."""


def compile_kernels() -> None:
    """Run the short demo with as few steps as it can have."""
    run(replace(SHORT, steps=2, timed_seconds=0.0, min_timed=1))


if __name__ == "__main__":
    compile_kernels()
