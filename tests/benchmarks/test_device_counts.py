"""What device code does is counted from the code that ships."""

from dataclasses import fields

import pytest
from benchmarks.planning import device_counts
from benchmarks.planning.device_counts import SIZES

from gradwire.core.errors import OptionError
from gradwire.lang.targets.triton import host

pytestmark = pytest.mark.ci  # the interpreter is slow


def calls(spec: str, call: str) -> tuple[int, int, int, int]:
    found = getattr(device_counts.counts(spec), call)
    return found.launches, found.operations, found.copies, found.syncs


def test_calls_are_those_of_the_generated_code() -> None:
    """A change of generated code changes the simulator's GPU rows: correct these figures, and record the rows again."""
    assert calls("onebit", "encode_with_residual") == (4, 20, 0, 1)  # two sweeps, two sums; one flag is read
    assert calls("onebit", "decode") == (1, 21, 0, 1)
    assert calls("onebit", "merge") == (1, 26, 0, 1)  # one launch for all payloads: only their copies are added
    assert calls("dgc", "encode_with_residual") == (4, 45, 1, 2)  # waits for the length of the list, and for the flag
    # Each payload has a length, positions and their check, and the flag of all is read at the end.
    assert calls("dgc", "decode") == (2, 26, 0, 4)
    assert calls("dgc", "merge") == (8, 98, 0, 13)


def test_counting_leaves_the_code_as_it_was() -> None:
    before = host.launch
    without = device_counts.counts("dgc").encode
    assert without.launches == 3  # the residual's kernel is not launched without a residual
    assert host.launch is before


def test_bytes_grow_with_the_tensor() -> None:
    codec = device_counts.compressor_of("onebit")
    between = device_counts._tallies(codec, sum(SIZES) // 2, device_counts.NUM_MERGED)
    found = device_counts.counts("onebit")
    for tally, each in zip(between, fields(found), strict=True):
        line = getattr(found, each.name).nbytes
        assert tally.nbytes == pytest.approx(line(sum(SIZES) // 2), rel=0.01)
    # Sweep 1 takes the gradient, the old and the new residual; sweep 2 the gradient, the residual and the signs.
    assert found.encode_with_residual.nbytes.slope == pytest.approx(4 + 4 + 4 + 4 + 4 + 1 / 8, abs=0.1)
    assert found.encode.nbytes.slope == pytest.approx(4 + 4 + 1 / 8, abs=0.1)


@pytest.mark.parametrize(
    ("spec", "reason"), [("threelc", "threelc has no device code"), ("terngrad", "terngrad has a preliminary round")]
)
def test_what_has_no_counts_is_told(spec: str, reason: str) -> None:
    assert not device_counts.has_device_code(spec)
    with pytest.raises(OptionError, match=rf"{reason}.*onebit"):
        device_counts.counts(spec)


def test_the_table_has_one_line_for_each_call() -> None:
    rows = list(device_counts.run(methods="onebit"))
    assert (
        device_counts.table(rows).splitlines()[3] == "| `onebit` | encode with residual | 4 | 20 | 17 | 0 | 1 | 20.2 |"
    )
