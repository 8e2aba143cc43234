"""gradwire: data-parallel PyTorch over slow networks, by compressing gradients, with one line.

    handle = gradwire.attach(ddp, "threelc", optimizer=optimizer)

Names are loaded when they are first used, so that ``import gradwire`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradwire import trainers as trainers
    from gradwire.aggregator.service import Aggregator as Aggregator
    from gradwire.compressors.base import Compressor as Compressor
    from gradwire.compressors.base.decorator import compressor as compressor
    from gradwire.compressors.base.registry import make as make
    from gradwire.core import errors as errors
    from gradwire.core.context import Context as Context
    from gradwire.core.spec import TensorSpec as TensorSpec
    from gradwire.ddp.attach import attach as attach
    from gradwire.ddp.handle import Handle as Handle
    from gradwire.net.client import ConnectionOptions as ConnectionOptions
    from gradwire.net.tls import TlsFiles as TlsFiles
    from gradwire.parameter_server.client import ParameterClient as ParameterClient
    from gradwire.parameter_server.options import JobOptions as JobOptions
    from gradwire.parameter_server.options import TransferOptions as TransferOptions
    from gradwire.planner.table import PlanTable as PlanTable
    from gradwire.residuals.momentum import MomentumCorrection as MomentumCorrection
    from gradwire.sync.options import SyncOptions as SyncOptions
    from gradwire.sync.plan import Plan as Plan
    from gradwire.sync.resize import resize_state as resize_state
    from gradwire.sync.submission import GradientSlice as GradientSlice
    from gradwire.sync.synchronizer import Synchronizer as Synchronizer

_HOMES = {
    "Aggregator": "gradwire.aggregator.service",
    "Compressor": "gradwire.compressors.base",
    "ConnectionOptions": "gradwire.net.client",
    "Context": "gradwire.core.context",
    "GradientSlice": "gradwire.sync.submission",
    "Handle": "gradwire.ddp.handle",
    "JobOptions": "gradwire.parameter_server.options",
    "MomentumCorrection": "gradwire.residuals.momentum",
    "ParameterClient": "gradwire.parameter_server.client",
    "Plan": "gradwire.sync.plan",
    "PlanTable": "gradwire.planner.table",
    "SyncOptions": "gradwire.sync.options",
    "Synchronizer": "gradwire.sync.synchronizer",
    "TensorSpec": "gradwire.core.spec",
    "TlsFiles": "gradwire.net.tls",
    "TransferOptions": "gradwire.parameter_server.options",
    "attach": "gradwire.ddp.attach",
    "compressor": "gradwire.compressors.base.decorator",
    "make": "gradwire.compressors.base.registry",
    "resize_state": "gradwire.sync.resize",
}

_REGISTERED = ("gradwire.aggregator.strategy",)
"""Modules that register a strategy. They are loaded before a plan can name it."""

_MODULES = {"errors": "gradwire.core.errors", "trainers": "gradwire.trainers"}

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        importlib.import_module("gradwire.core.torch_version").check_torch()
        if name in ("Plan", "Synchronizer"):
            for module in _REGISTERED:
                importlib.import_module(module)
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
