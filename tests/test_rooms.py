"""The shape of the package: no import cycles, and a class name says which class it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"


def modules(folder: Path) -> dict[str, Path]:
    """All modules below a folder, by their dotted names."""
    paths = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """What a module imports of `known`, in functions and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & known.keys()
            if not members <= known.keys():
                found.add(str(node.module))
    return (found & known.keys()) - {name}


def cycle(known: dict[str, Path]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter({name: imports(name, path, known) for name, path in known.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycle(modules(SRC)) == []


def test_a_circle_through_a_function_and_type_checking_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def use():\n    from two import b\n")
    (tmp_path / "two.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import one\n")
    assert set(cycle(modules(tmp_path))) == {"one", "two"}


PER_FRAMEWORK = {"GradwireCallback"}
"""Names that users of different frameworks look for. A script has one framework."""


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for name, path in modules(SRC).items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in PER_FRAMEWORK:
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
