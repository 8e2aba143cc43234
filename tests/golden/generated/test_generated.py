from __future__ import annotations

import ast
import re

import pytest

from tests.golden.generated import golden

# Comments name lines of the algorithms' file, which move as that file grows.
_PLACE = re.compile(r"algorithms\.py:\d+:")


def _without_places(source: str) -> str:
    return _PLACE.sub("algorithms.py:", source)


@pytest.mark.parametrize("backend", golden.BACKENDS)
@pytest.mark.parametrize("name", golden.NAMES)
def test_generated_source_is_as_it_was(name: str, backend: str) -> None:
    source = golden.render(name, backend)
    ast.parse(source)
    kept = golden.path(name, backend).read_text()
    assert _without_places(source) == _without_places(kept), "read the difference, then run `make golden`"
