"""Positions of lists, packed with torch, in the format of `gradwire.kernels.reference.positions`."""
# Shapes: N = elements, K = positions

from __future__ import annotations

import torch

from gradwire.kernels.layout import ceil_div
from gradwire.kernels.reference.positions import BITMAP, low_bits, positions_bytes

__all__ = ["length_bytes", "pack_positions", "positions_bytes", "read_length", "unpack_positions"]


def length_bytes(count: int, like: torch.Tensor) -> torch.Tensor:
    """The length of a payload's lists, as bytes."""
    return torch.tensor([count], dtype=torch.int64, device="cpu").view(torch.uint8)[:4].to(like.device)


def read_length(body: torch.Tensor, at: int) -> int:
    """The length of a payload's lists, or -1 if the body is too short. Synchronizes with the device."""
    part = body[at : at + 4]
    return int.from_bytes(bytes(part.tolist()), "little") if part.numel() == 4 else -1


def pack_positions(index: torch.Tensor, size: int) -> torch.Tensor:
    """Pack positions, int32[K] with the bits of uint32, into bytes."""
    count = index.numel()
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    low, places = low_bits(size, count), index.to(torch.int64) & 0xFFFFFFFF
    if low == BITMAP:
        return _packed(_ones(places, size))
    upper = (places >> low) + torch.arange(count, device=index.device)
    lower = (places[:, None] >> torch.arange(low, device=index.device)) & 1
    return torch.cat([_packed(_ones(upper, count + ceil_div(size, 1 << low))), _packed(lower.reshape(-1))])


def unpack_positions(packed: torch.Tensor, size: int, count: int) -> torch.Tensor | None:
    """Undo `pack_positions`; None if the bytes encode no list of `count` positions. Synchronizes with the device."""
    if count == 0:
        return torch.empty(0, dtype=torch.int32, device=packed.device)
    low = low_bits(size, count)
    num_upper = packed.numel() if low == BITMAP else ceil_div(count + ceil_div(size, 1 << low), 8)
    found = torch.nonzero(_bits(packed[:num_upper])).flatten()
    if found.numel() != count:
        return None
    is_bad = torch.zeros((), dtype=torch.bool, device=packed.device)
    if low != BITMAP:
        bits = _bits(packed[num_upper:])
        is_bad = bits[count * low :].any()
        lower = (bits[: count * low].view(count, low) << torch.arange(low, device=packed.device)).sum(dim=1)
        found = ((found - torch.arange(count, device=packed.device)) << low) + lower
    if (is_bad | (found[1:] <= found[:-1]).any() | (found[-1] >= size)).item():
        return None
    return found.to(torch.int32)


def _ones(places: torch.Tensor, length: int) -> torch.Tensor:
    bits = torch.zeros(length, dtype=torch.int64, device=places.device)
    bits[places] = 1
    return bits


def _packed(bits: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, device=bits.device)).sum(dim=1).to(torch.uint8)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    return ((packed[:, None].to(torch.int64) >> torch.arange(8, device=packed.device)) & 1).reshape(-1)
