"""`python -m benchmarks`: list, run and show benchmarks."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.catalog import BENCHMARKS, README, SECTIONS, Benchmark, in_readme

app = typer.Typer(help="Benchmarks of gradwire.", no_args_is_help=True, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="Name of a benchmark; see list.", metavar="NAME")]


def _find(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"There is no benchmark {name!r}. Known: {', '.join(BENCHMARKS)}.")
    return BENCHMARKS[name]


@app.command("list")
def list_all(
    write: Annotated[bool, typer.Option("--write", help="Write the index table of benchmarks/README.md.")] = False,
) -> None:
    """List all benchmarks: the question of each, and its command."""
    if write:
        README.write_text(in_readme(README.read_text()))
        return
    for title, section in SECTIONS.items():
        print(f"\n{title.partition(']')[0].strip('[')}")
        for each in section:
            print(f"  {each.name:40}{each.question}\n  {'':40}{each.command}")
            if each.stands_for:
                print(f"  {'':40}= {each.stands_for}")


@app.command(
    "run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run(context: typer.Context, name: Name) -> None:
    """Run a benchmark, and write its record. `run NAME --help` lists its options."""
    benchmark = _find(name)
    if not benchmark.module:
        kept = "--csv" in benchmark.stands_for and not any(each.startswith("--csv") for each in context.args)
        if kept and context.args and "--help" not in context.args:
            raise typer.BadParameter(f"The record of {name} has the default options. With others, pass --csv FILE.")
        raise typer.Exit(subprocess.run([*shlex.split(benchmark.stands_for), *context.args], check=False).returncode)
    from benchmarks import runner

    runner.command(benchmark)(context.args, prog_name=f"python -m benchmarks run {name}")


@app.command("show")
def show(
    names: Annotated[
        list[str], typer.Argument(help="Benchmarks, of one kind if there are several.", metavar="NAME...")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the plots.")] = None,
    csv: Annotated[Path | None, typer.Option(help="File of the figures. Default: the records.")] = None,
) -> None:
    """Show the table of a record, and draw its plots, without running anything."""
    from benchmarks import runner
    from gradwire.bench.records import read_figures

    found = [_find(name) for name in names]
    if any(each.stands_for for each in found):
        raise typer.BadParameter("The commands of gradwire themselves print their tables, when they run.")
    if len({each.module for each in found}) > 1:
        raise typer.BadParameter("Only records of one module of benchmarks can be shown together.")
    paths = [csv] if csv else [each.record for each in found if each.record]
    runner.show(runner.module_of(found[0]), [row for path in paths for row in read_figures(path)], out)


if __name__ == "__main__":
    app()
