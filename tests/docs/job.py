"""Run Python blocks of the pages with their set-ups, in one process or on the ranks of a torchrun job.

    torchrun --nproc-per-node 2 -m tests.docs.job FOLDER NAME...

Rank 0 prints a line ``done NAME`` for each block.
"""

from __future__ import annotations

import ast
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from tests.docs.blocks import BLOCKS, Block
from tests.docs.setups import SETUPS, Namespace, finish, renew


def main(folder: Path, names: list[str]) -> None:
    """Run the blocks with these names, in order."""
    ranks = "RANK" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    namespace: Namespace = {}
    script = ExitStack()  # the set-up of the present script
    done: list[str] = []  # its blocks
    for block in (block for block in BLOCKS if block.name in names):
        place = folder / block.place
        place.mkdir(exist_ok=True)
        os.chdir(place)
        if "with" in block.marks:
            end(script, done)
            namespace = script.enter_context(SETUPS[block.marks["with"]]())
        run(block, namespace)
        done.append(block.name)
        if ranks:
            dist.barrier()
    end(script, done)
    if ranks:
        dist.destroy_process_group()


def end(script: ExitStack, done: list[str]) -> None:
    """End a script, and say which blocks have ended well with it."""
    script.close()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*(f"done {name}" for name in done), sep="\n", flush=True)
    done.clear()


def run(block: Block, names: Namespace) -> None:
    """Run a block. Calls of `attach` one after another are alternatives: each gets a module of its own.

    A compound statement that attaches has detached what was there before.
    """
    print(f"begin {block.name}\n", end="", flush=True)
    tree = ast.parse("\n" * block.line + block.source, block.page)
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.Expr) and "gw.attach(" in ast.unparse(statement):
            if "handle" in names:
                finish(names)
                renew(names)
            names.get("before_attach", lambda: None)()
        text = ast.unparse(statement)
        for shown, meant in names.get("replaced", {}).items():
            text = text.replace(shown, meant)
        exec(compile(text, block.name, "exec"), names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
