"""The step clock, on steps with known times."""

from __future__ import annotations

import time

import torch

from gradwire.tuning.step_clock import BucketTiming, StepClock, StepTiming


def test_figures_of_a_step() -> None:
    # One bucket is under way from 0 to 3, one from 1 to 2 beside it, one from 5 to 6 alone.
    buckets = [BucketTiming(("a",), 4, 0.0, 3.0), BucketTiming(("b",), 4, 1.0, 2.0), BucketTiming(("c",), 4, 5.0, 6.0)]
    step = StepTiming(buckets, seconds=10.0)
    assert (step.backward, step.finish, step.rest) == (5.0, 6.0, 4.0)
    assert (step.busy, step.synchronizing) == (4.0, 5.0)


def test_a_bucket_whose_end_is_not_known_counts_as_no_time() -> None:
    step = StepTiming([BucketTiming(("a",), 4, 1.0)], seconds=2.0)
    assert (step.finish, step.busy, step.synchronizing, step.rest) == (1.0, 0.0, 0.0, 1.0)


def test_an_empty_step_is_all_rest() -> None:
    assert StepTiming(seconds=2.0).rest == 2.0


def test_what_the_owner_does_at_the_beginning_is_left_out() -> None:
    clock = StepClock()
    clock.begin()
    assert clock.last is None
    time.sleep(0.2)
    bucket = clock.ready(("a",), torch.zeros(1))
    clock.done(bucket)
    clock.begin()
    assert clock.last is not None
    assert clock.last.seconds < 0.1
    assert clock.last.buckets == [bucket]
