"""Jobs with a compressor that is defined here, as in a user's own module."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import gradwire as gw
from gradwire.lang import concat, round_even, trit
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap


@gw.compressor
def ternary_of_the_test(g, keep: float = 0.5):
    """Trits of the elements above a part of the largest; what is lost comes later."""
    scale = abs(g).reduce(max) * keep
    return concat(scale=scale, q=g.map(lambda x: round_even(x / scale), dtype=trit))


@ternary_of_the_test.decode
def _(p):
    return p.q * p.scale


def train(
    rank: int, world_size: int, strategies: list[str], steps: int, save_at: int, folder: str, resume: bool = False
) -> dict[str, Any]:
    """Train under every strategy, by name and by instance; save on the way, or go on from there."""
    found = {}
    for strategy in strategies:
        ddp = wrap(model())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        method = "ternary_of_the_test" if strategy == "ring" else ternary_of_the_test(keep=0.4)
        handle = gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0), optimizer=optimizer)
        path, losses = f"{folder}/{strategy}-{rank}.pt", []
        if resume:
            state = torch.load(path, weights_only=True)
            ddp.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            handle.load_state_dict(state["gw"])
        for step, batch in enumerate(itertools.islice(batches(rank, world_size), steps)):
            if resume and step < save_at:
                continue
            if step == save_at and not resume:
                parts = {"model": ddp.module, "optimizer": optimizer, "gw": handle}
                torch.save({key: part.state_dict() for key, part in parts.items()}, path)
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        total = handle.report().total
        found[strategy] = {
            "hash": fingerprint(ddp.parameters()), "losses": losses, "ratio": total.ratio,
            "residual": total.residual_norm,
        }  # fmt: skip
        handle.detach()
    return found
