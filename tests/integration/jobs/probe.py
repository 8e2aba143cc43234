"""Jobs for the probe: a machine that is busy with something else just while steps without communication are timed."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from gradwire.bench.probe import Prober
from gradwire.bench.probe_job import ProbeJob

SILENT, OTHERS, BUSY = 0.01, 0.03, 0.1  # seconds of steps: without communication, with it, and while other work runs


class Model(nn.Module):
    """Steps of known seconds, of which a busy machine hides no order."""

    busy_times: int
    seen: list[Any]  # the measurements without communication, by the frames that make them

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_name != "without_communication":
            frame = frame.f_back
        if frame is not None and frame not in Model.seen:
            Model.seen.append(frame)
        silent = SILENT if len(Model.seen) > Model.busy_times else BUSY
        time.sleep(OTHERS if frame is None else silent)
        output: torch.Tensor = self.layer(x)
        return output.sum()


def other_work(rank: int, world_size: int, times: int) -> list[Any]:
    """Probe while other work runs during the first measurements without communication."""
    Model.busy_times, Model.seen = times, []
    said: list[str] = []
    prober = Prober(ProbeJob("model", Model(), (torch.ones(2, 8),)), "exact", seconds=0.01, say=said.append)
    return [prober.run().as_dict(), said]
