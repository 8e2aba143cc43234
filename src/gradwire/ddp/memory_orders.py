"""Memory orders of parameters, which are those of their gradients in buckets and of their residuals.

``torch.channels_last`` is one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.core.torch_private import bucket_order
from gradwire.residuals.slices import ROLES

Orders = dict[str, list[int]]
"""Dimensions longer than 1 in the order of the memory, slowest first, by name. Without those in their own order."""


def spec_in_memory(parameter: torch.Tensor) -> TensorSpec:
    """Return what a compressor sees of a parameter: its dimensions in the order of the memory."""
    return TensorSpec(tuple(parameter.shape[dim] for dim in bucket_order(parameter)), parameter.dtype)


def memory_orders(parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> Orders:
    """Return the orders of parameters whose names are known by id."""
    orders = {}
    for each in parameters:
        order = [dim for dim in bucket_order(each) if each.shape[dim] > 1]
        if order != sorted(order) and id(each) in names:
            orders[names[id(each)]] = order
    return orders


def check_memory_orders(state: Mapping[str, Any], now: Orders) -> None:
    """Check that parameters have the orders in which the residuals of a rank's state were saved.

    Raises:
        OptionError: A parameter that has residuals is now in another memory format.
    """
    saved = state.get("orders")
    if saved is None:  # by an older gradwire
        return
    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name) and any(name in state["residuals"].get(role, ()) for role in ROLES):
            raise OptionError(
                f"The residual of {name!r} was saved when the parameter had another memory format "
                "(torch.channels_last?). Convert the model as it was converted then before DDP wraps it, or train on "
                "without this state."
            )
