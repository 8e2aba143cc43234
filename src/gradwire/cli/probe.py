"""`gradwire probe`: measures on a job's ranks whether compression pays for a model, by how much and with what."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.files import out_file
from gradwire.cli.options import Momentum, split
from gradwire.core.errors import GradwireError, SyncError, UnknownNameError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from gradwire.bench.advice import ProbeFindings
    from gradwire.bench.probe import Prober
    from gradwire.bench.probe_job import ProbeJob

_LAUNCH = "torchrun --nproc-per-node 4 -m gradwire.cli probe"
_TIMEOUT = timedelta(minutes=5)  # of DDP's own all-reduce, which takes long for a large bucket on a slow link
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("probe")(probe)


def probe(
    target: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION or path/to/file.py:FUNCTION, which returns model, batch; or text, deep, digits."
        ),
    ],
    fidelity: Annotated[
        str, typer.Option(help="How much gradients may change: exact, near-lossless, balanced or aggressive.")
    ] = "balanced",
    compressors: Annotated[
        str | None, typer.Option(help="More compressors to try, such as topk:ratio=0.01,powersgd.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of each measurement. Slow steps take longer.")] = 3.0,
    momentum: Momentum = True,
    json_file: Annotated[Path | None, out_file("--json", help="Write the figures to this file.")] = None,
    save_plan: Annotated[
        Path | None, out_file(help="Write gradwire's fastest plan to this file, as PlanTable.load reads it.")
    ] = None,
) -> None:
    """Time a model's steps on the ranks, links and cores that it will train on, and say whether compression pays.

    The function returns model, batch. The batch is a tensor, a tuple for model(*batch) or a dict for model(**batch).
    The model's output is its loss, or has it as .loss or ["loss"]. Of any other tensor the mean square is taken. The
    model itself does not change.

    Example: torchrun --nproc-per-node 4 -m gradwire.cli probe my_module:job
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise GradwireError(
            f"gradwire probe runs on every rank of a job, but {', '.join(missing)} is not set. Start it with {_LAUNCH} "
            f"{target}, or on a laptop: gradwire lab --hosts 4 --rate 100mbit -- python -m gradwire.cli probe {target}"
        )
    import torch.distributed as dist

    from gradwire.bench.probe import Prober
    from gradwire.planner.fidelity import methods

    methods(fidelity)  # refused before anything starts
    device = _join()
    try:
        job = _job(target).to(device)
        prober = Prober(job, fidelity, split(compressors or ""), seconds, momentum=momentum)
        if dist.get_rank() == 0:
            _show(prober, json_file, save_plan)
        else:
            prober.run()
    except SyncError as error:
        print(f"gradwire: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # DDP's own all-reduce may be stuck, and would hold up the end of the interpreter
    finally:
        dist.destroy_process_group()


def _join() -> torch.device:
    """Start the process group, NCCL if each rank of this machine has a GPU, else Gloo, and return the rank's device."""
    import torch
    import torch.distributed as dist

    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and ranks <= torch.cuda.device_count():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=_TIMEOUT)
        return device
    if "OMP_NUM_THREADS" not in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        torch.set_num_threads(1)  # as torchrun does
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    return torch.device("cpu")


def _job(target: str) -> ProbeJob:
    import torch.distributed as dist

    from gradwire.bench.probe_job import builtin, from_user
    from gradwire.bench.workloads import WORKLOADS
    from gradwire.cli.targets import object_of

    if ":" in target:
        return from_user(target, object_of(target))
    if target not in WORKLOADS:
        raise UnknownNameError("target (or write MODULE:FUNCTION)", target, WORKLOADS)
    return builtin(target, dist.get_rank(), dist.get_world_size())


def _show(prober: Prober, json_file: Path | None, save_plan: Path | None) -> None:
    """Run on rank 0 with progress, and print the result."""
    from rich.console import Console

    console, progress = Console(), Console(stderr=True)
    prober.say = lambda text: progress.print(f"probe: {text}", highlight=False, markup=False, soft_wrap=True)
    found = prober.run()
    # The table needs this width, and a pipe has none.
    console.width = max(console.width, 120)
    console.print(_heading(found), highlight=False, markup=False, soft_wrap=True)
    if found.rows:
        console.print(_table(found))
    if prober.job.means_squares:
        console.print(f"{found.name} returns no loss: the mean square of its output was taken.", markup=False)
    console.print(found.sentence, highlight=False, markup=False, soft_wrap=True)
    if found.advised is not None:
        console.print(f"To do it: {found.advised.use}", highlight=False, markup=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=2) + "\n")
    if save_plan is not None:
        console.print(_save(prober, found, save_plan), highlight=False, markup=False, soft_wrap=True)


def _save(prober: Prober, found: ProbeFindings, path: Path) -> str:
    """Write the fastest plan, and return what to print."""
    plans = [row for row in found.rows if row.name in prober.tables]
    best = min(plans, key=lambda row: row.step, default=None)
    if best is None:
        return f"{path} was not written: no plan was worth a trial."
    prober.tables[best.name].pin().save(path)
    how = f'gw.attach(ddp, gw.PlanTable.load("{path}").plan(), optimizer=optimizer)'
    return f"{path} contains {best.name}{'' if best == found.advised else ', which is not advised'}: {how}"


def _heading(found: ProbeFindings) -> str:
    from gradwire.planner.table import seconds

    link = ""
    if found.bytes_per_second:
        link = f" Slowest link: {8e-6 * found.bytes_per_second:,.4g} Mb/s, latency {seconds(found.latency)}."
    return (
        f"{found.name}: {found.num_parameters:,} parameters in {found.num_tensors} tensors; {found.world_size} "
        f"rank{'s' * (found.world_size > 1)}, {found.backend}; fidelity {found.fidelity}.{link}\n"
        f"A step without communication: {seconds(found.compute)}, of it {seconds(found.backward)} from the first "
        "bucket of gradients to the last."
    )


def _table(found: ProbeFindings) -> Table:
    from rich import box
    from rich.table import Table

    from gradwire.planner.table import seconds

    table = Table(box=box.SIMPLE)
    table.add_column("way")  # only this column is wrapped: a plan's name may be long
    for name in ("predicted", "step", "faster", "÷ ideal", "MB a step", "codec", "waits for", "steps"):
        table.add_column(name, justify="left" if name == "waits for" else "right", no_wrap=True)
    dense = found.rows[0].step
    for row in found.rows:
        table.add_row(
            row.name,
            "–" if row.predicted is None else seconds(row.predicted),
            seconds(row.step),
            f"{dense / row.step:.2f}",
            f"{row.step / row.ideal:.2f}",
            f"{row.nbytes / 1e6:.3g}",
            seconds(row.codec) if row.codec else "",
            row.limit,
            str(row.steps),
            style="bold" if row == found.advised else None,
        )
    for name, predicted in found.untried.items():
        table.add_row(f"gradwire {name}", seconds(predicted), "not tried", style="dim")
    return table
