"""Jobs whose replicas differ and become equal again."""

from __future__ import annotations

import itertools
import logging
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.packet import PacketKind, unpack
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import SessionConfig
from gradwire.core.errors import DisagreementError
from gradwire.net.client import ConnectionOptions
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap


class Mixed(nn.Module):
    """Parameters and buffers of several types and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.norm(self.conv(images)).square().mean() + self.narrow.float().sum()


def tensors_of(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that is synchronized."""
    states = [optimizer.state[each] for each in ddp.parameters() if each in optimizer.state]
    values = [torch.as_tensor(state[key]).reshape(-1) for state in states for key in sorted(state)]
    return [*ddp.parameters(), *(each.reshape(-1) for each in ddp.buffers()), *values]


def copy(rank: int, world_size: int) -> dict[str, Any]:
    """Replicas are changed on all ranks, and become that of rank 1."""
    torch.manual_seed(0)
    ddp = wrap(Mixed())
    optimizer = torch.optim.Adam([each for each in ddp.parameters() if each.requires_grad])
    handle = gw.attach(ddp, "none", optimizer=optimizer, check_every=1)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(rank))).backward()
        optimizer.step()

    step()
    with torch.no_grad():
        for tensor in tensors_of(ddp, optimizer):
            tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool and rank == 1 else tensor + rank)
    for state in optimizer.state.values():
        state["note"] = rank  # a number
    before = fingerprint(tensors_of(ddp, optimizer))
    found = handle.synchronize_replicas(source=1)
    after = fingerprint(tensors_of(ddp, optimizer))
    step()  # compares replicas
    again = handle.synchronize_replicas()
    if rank == 2:
        next(iter(optimizer.state.values()))["more"] = torch.zeros(3)
    try:
        handle.synchronize_replicas()
    except DisagreementError as error:
        said = str(error)
    handle.detach()
    return {
        "before": before, "after": after, "source": found.source, "distances": found.distances,
        "again": [again.source, *again.distances], "said": said,
        "in order": ddp.module.conv.weight.is_contiguous(memory_format=torch.channels_last),
    }  # fmt: skip


def absent(rank: int, world_size: int) -> str:
    """Rank 1 does not take part."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = gw.attach(ddp, "none", optimizer=optimizer, options=gw.SyncOptions(timeout=timedelta(seconds=2)))
    said, store = "", dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            handle.synchronize_replicas()
        except gw.errors.SyncError as error:
            said = str(error)
        store.set("done", "1")
    else:
        handle.synchronizer.exchange(np.zeros(1))  # and nothing that follows
    store.wait(["done"], timedelta(seconds=60))
    return said


class LosingClient(AggregationClient):
    """A client of a network that never brings rank 1 some of the sums, and loses other datagrams."""

    def _take(self, datagram: np.ndarray | memoryview, *, from_group: bool = False) -> list[Any]:
        packet = unpack(datagram)
        gone = (packet.key.round + packet.key.packet) % 3 == 0 and self.config.fills(packet.key.stream)
        if self.rank == 1 and packet.kind is PacketKind.RESULT and gone:
            return []
        return super()._take(datagram, from_group=from_group)


class LosingAggregator(gw.Aggregator):
    """Connects with these clients."""

    def client(self, config: SessionConfig, rank: int, session: int, connection: ConnectionOptions) -> LosingClient:
        (address,) = self.addresses
        return LosingClient(address, config, rank, session=session, connection=connection)


def fill(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks go on with zeros for sums that they have not received, and are synchronized after each epoch."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    address = [""]
    if rank == 0:
        server = AggregationServer(AggregationOptions(world_size, udp=True, drop=0.1))
        thread = threading.Thread(target=server.run)
        thread.start()
        address = [f"127.0.0.1:{server.address[1]}"]
    dist.broadcast_object_list(address)
    ddp = wrap(model())
    optimizer = torch.optim.Adam(ddp.parameters())
    aggregator = LosingAggregator(address[0], fill_after=timedelta(seconds=0.2), packet_elements=1024)
    plan, options = gw.Plan("thc", strategy="server", min_elements=0), gw.SyncOptions(server=aggregator)
    handle = gw.attach(ddp, plan, optimizer=optimizer, options=options, check_every=3)
    data, hashes, distances, filled = batches(rank, world_size), [], [], []
    for epoch in range(3):
        for batch in itertools.islice(data, 5 if epoch == 0 else 3):
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
        filled.append(handle.report(since="last").total.filled_elements)
        hashes.append(fingerprint(ddp.parameters()))
        distances.append(handle.synchronize_replicas())
        hashes.append(fingerprint(tensors_of(ddp, optimizer)))
    notes = handle.report().notes
    handle.detach()
    if rank == 0:
        thread.join(30)
    said = [each for each in warnings if "fill_after allows" in each]
    return {"hashes": hashes, "distances": distances, "filled": filled, "said": said, "notes": notes}
