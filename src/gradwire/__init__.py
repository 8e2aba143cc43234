"""gradwire: data-parallel PyTorch over slow networks, by compressing gradients, with one line.

    handle = gradwire.attach(ddp, "threelc", optimizer=optimizer)

Names are loaded when they are first used, so that ``import gradwire`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor as Compressor
    from gradwire.compressors.base.decorator import compressor as compressor
    from gradwire.compressors.base.registry import make as make
    from gradwire.core import errors as errors
    from gradwire.core.context import Context as Context
    from gradwire.core.spec import TensorSpec as TensorSpec
    from gradwire.feedback.momentum import MomentumCorrection as MomentumCorrection
    from gradwire.integrations.ddp import attach as attach
    from gradwire.integrations.handle import Handle as Handle
    from gradwire.integrations.parameters.client import ParameterClient as ParameterClient
    from gradwire.sync.aggregator import Aggregator as Aggregator
    from gradwire.sync.plan import Plan as Plan
    from gradwire.sync.planner.table import PlanTable as PlanTable
    from gradwire.sync.resize import resize_state as resize_state
    from gradwire.sync.submission import Shard as Shard
    from gradwire.sync.synchronizer import Synchronizer as Synchronizer

_HOMES = {
    "Aggregator": "gradwire.sync.aggregator",
    "Compressor": "gradwire.compressors.base",
    "Context": "gradwire.core.context",
    "Handle": "gradwire.integrations.handle",
    "ParameterClient": "gradwire.integrations.parameters.client",
    "MomentumCorrection": "gradwire.feedback.momentum",
    "Plan": "gradwire.sync.plan",
    "PlanTable": "gradwire.sync.planner.table",
    "Shard": "gradwire.sync.submission",
    "Synchronizer": "gradwire.sync.synchronizer",
    "TensorSpec": "gradwire.core.spec",
    "attach": "gradwire.integrations.ddp",
    "compressor": "gradwire.compressors.base.decorator",
    "make": "gradwire.compressors.base.registry",
    "resize_state": "gradwire.sync.resize",
}

__all__ = sorted([*_HOMES, "errors"])


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("gradwire.core.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
