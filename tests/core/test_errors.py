"""Errors: their base classes, and the advice on unknown names."""

from __future__ import annotations

import pytest

from gradwire.core import errors
from gradwire.core.errors import GradwireError, PeerTimeoutError, SyncError, UnknownNameError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GradwireError)]


def test_every_error_is_a_gradwire_error_with_a_docstring() -> None:
    assert {GradwireError, SyncError, UnknownNameError} < set(KINDS)
    for kind in KINDS:
        assert kind.__doc__, kind.__name__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.UnknownNameError, ValueError),
        (errors.OptionError, ValueError),
        (errors.OptionTypeError, TypeError),
        (errors.PayloadError, ValueError),
        (errors.FrameError, errors.PayloadError),
        (errors.AttachError, RuntimeError),
        (errors.DisagreementError, RuntimeError),
        (errors.StateError, RuntimeError),
        (errors.SyncError, RuntimeError),
        (errors.PeerTimeoutError, SyncError),
        (errors.PeerLostError, SyncError),
        (errors.PeerFailedError, SyncError),
        (errors.ReplicaError, SyncError),
        (errors.ServerStoppedError, SyncError),
        (errors.RightsError, PermissionError),
    ],
)
def test_code_that_knows_nothing_of_gradwire_handles_them_as_usual(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_an_unknown_name_lists_the_known_ones_and_the_closest() -> None:
    error = UnknownNameError("strategy", "rings", ["scatter_reduce", "ring", "allgather"])
    assert str(error) == "Unknown strategy 'rings'. Did you mean 'ring'? Known: allgather, ring, scatter_reduce."


@pytest.mark.parametrize(
    ("name", "meant"),
    [("3lc", "threelc"), ("3LC", "threelc"), ("ThreeLC", "threelc"), ("1bit", "onebit"), ("INT8", "int8"),
     ("Top-K", "topk"), ("float16", "fp16"), ("terngard", "terngrad")],
)  # fmt: skip
def test_names_are_found_whatever_their_case_and_however_digits_are_spelled(name: str, meant: str) -> None:
    known = ["fp16", "int8", "onebit", "powersgd", "terngrad", "ternary", "threelc", "threshold", "topk"]
    assert f"Did you mean '{meant}'?" in str(UnknownNameError("compressor", name, known))


def test_a_name_like_none_of_the_known_gets_no_guess() -> None:
    assert str(UnknownNameError("option", "zzz", ["ratio"])) == "Unknown option 'zzz'. Known: ratio."
    assert str(UnknownNameError("option", 7, [])) == "Unknown option 7. Known: none."


def test_a_sync_error_carries_where_it_happened() -> None:
    error = PeerTimeoutError("late", rank=2, tensor="fc.weight", phase="recv scatter")
    assert (str(error), error.rank, error.tensor, error.phase, error.dump) == (
        "late", 2, "fc.weight", "recv scatter", None,
    )  # fmt: skip
    bare = SyncError("somehow")
    assert (bare.rank, bare.tensor, bare.phase) == (None, None, None)
