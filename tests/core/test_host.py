"""No tensor of ours depends on torch's default element type or device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradwire"
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
ELSEWHERE = ("bench", "testing")  # run by themselves, and not within a user's script
MODULES = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))]


def depends_on_defaults(code: str) -> list[str]:
    """Calls of torch's factories without element type or device."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(code))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in FACTORIES) == ("torch", True)
        and not _needed(call.func.attr) <= {keyword.arg for keyword in call.keywords}
    ]


def _needed(name: str) -> set[str]:
    return {"device"} if name == "arange" else {"dtype", "device"}  # it takes the type of its numbers


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[0] not in ELSEWHERE], ids=str)
def test_every_tensor_names_its_type_and_device_or_is_made_on_the_host(path: Path) -> None:
    found = depends_on_defaults((SOURCE / path).read_text())
    assert not found, "Call gradwire.core.host, or name dtype and device."


def test_the_scan_finds_what_it_looks_for() -> None:
    assert depends_on_defaults("torch.empty(3)\ntorch.ones(3, dtype=torch.int8)\nhost.empty(3)") == [
        "torch.empty(3)",
        "torch.ones(3, dtype=torch.int8)",
    ]
