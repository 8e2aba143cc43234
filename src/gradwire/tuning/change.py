"""What has changed in a job since `auto` last decided, by the figures of its steps."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gradwire.planner.table import seconds
from gradwire.tuning.step_clock import Timing

STEP_BOUND = 1.3  # ratio of steps, slower or faster
SYNC_BOUND = 2.0  # ratio of the times between a bucket and its mean
LINK_BOUND = 2.0  # ratio of the times with frames under way, which show the link even where steps do not wait for it
_LINK_SHARE = 0.05  # share of a step with frames under way, below which this time says nothing


class Reason(NamedTuple):
    """Why it is time to decide.

    Attributes:
        kind: What has changed since the last decision. ``"no gain"`` if a candidate of higher fidelity was faster,
            ``"rules"`` if what is allowed has changed.
        text: The reason in words.
    """

    kind: Literal["start", "step", "synchronizing", "link", "no gain", "rules"]
    text: str


START = Reason("start", "at the start")
NO_GAIN = Reason("no gain", "steps take longer than those of a candidate of higher fidelity did")
MOMENTUM = Reason("rules", "the optimizer has momentum now")
MISFIT = Reason("rules", "gradients no longer fit fp16")
MORE_TENSORS = Reason("rules", "further parameters are trained")


def change_of(kept: Timing, now: Timing) -> Reason | None:
    """Return what has changed; None if nothing has."""
    compared: list[tuple[Reason, float, float, float]] = [
        (Reason("step", "steps take"), kept.step, now.step, STEP_BOUND),
        (Reason("synchronizing", "synchronizing takes"), kept.synchronizing, now.synchronizing, SYNC_BOUND),
    ]
    if max(kept.link, now.link) >= _LINK_SHARE * now.step:
        compared.append((Reason("link", "frames are under way for"), kept.link, now.link, LINK_BOUND))
    for reason, before, after, bound in compared:
        if not before / bound <= after <= before * bound:
            return Reason(reason.kind, f"{reason.text} {seconds(after)} after {seconds(before)}")
    return None
