"""The README's example ends with exit code 0; `readme_example` is the long form, with 200 runs."""

from __future__ import annotations

import pytest

from tests.integration.readme_example import Ending, run


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(Ending(ranks=2, detach=False, destroy=True, apart=False, evaluate=True), marks=pytest.mark.ci),
        pytest.param(Ending(ranks=2, detach=False, destroy=False, apart=True, evaluate=False), marks=pytest.mark.ci),
    ],
    ids=str,
)
@pytest.mark.timeout(200)
def test_the_example_ends_with_exit_code_0(ending: Ending) -> None:
    assert run(ending) == ""
