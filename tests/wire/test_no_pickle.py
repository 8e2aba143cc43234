"""F6: nothing received is unpickled or evaluated, because nothing in the package can.

Checkpoints of torch are read with ``weights_only=True``, which admits tensors and plain containers alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
# torch.load and torch's object collectives unpickle.
FORBIDDEN_ATTRIBUTES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip

# Modules that read what torch.save has written, and whose file it is.
CHECKPOINTS = {
    "ddp/gathered.py": "states of the job's own ranks, by its own process group, and entries of its checkpoints",
    "trainers/huggingface.py": "a file in the trainer's checkpoint",
}


def findings(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield node.func.id
            if ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_cannot_unpickle(path: Path) -> None:
    found = list(findings(path.read_text()))
    if str(path.relative_to(SOURCE)) in CHECKPOINTS:
        assert found  # or the entry is stale
        assert [each for each in found if not (each.startswith("torch.load(") and "weights_only=True" in each)] == []
    else:
        assert found == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "eval(x)", "torch.load(f)", "dist.broadcast_object_list(x)"],
)
def test_the_scan_finds_what_it_looks_for(code: str) -> None:
    assert list(findings(code))
