"""Published algorithms in plain torch operations, as a user would write them, for comparison with our compressors.

Each takes a float32 gradient and returns the tensors to send, packed as tightly as gradwire's payloads. They are
written for speed: without Python loops, and in place where that helps.
"""
# Shapes: N = elements of the gradient, a multiple of 1024

from __future__ import annotations

from collections.abc import Callable

import torch

Sent = tuple[torch.Tensor, ...]
_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack small integers, uint8[N], into bytes."""
    per = 8 // bits
    planes = levels.view(per, -1)
    packed = planes[0].clone()
    for plane in range(1, per):
        packed |= planes[plane] << (plane * bits)
    return packed


def onebit(g: torch.Tensor) -> Sent:
    negative = g < 0
    num_low = negative.sum()
    low_sum = torch.where(negative, g, 0).sum()
    high_sum = g.sum() - low_sum
    return low_sum / num_low, high_sum / (g.numel() - num_low), pack((~negative).view(torch.uint8), 1)


def signsgd(g: torch.Tensor) -> Sent:
    return g.abs().mean(), pack((g >= 0).view(torch.uint8), 1)


def tbq(g: torch.Tensor) -> Sent:
    t = g.abs().mean()
    return t, pack((g > t).to(torch.uint8) | ((g < -t).to(torch.uint8) << 1), 2)


def minmax(g: torch.Tensor) -> Sent:
    low, high = g.aminmax()
    gap = (high - low) / 3
    return low, gap, pack(((g - low) / gap).add_(torch.rand_like(g)).floor_().clamp_(0, 3).to(torch.uint8), 2)


def terngrad(g: torch.Tensor) -> Sent:
    g = g.clamp(-2.5 * g.std(), 2.5 * g.std())
    scale = g.abs().max()
    kept = torch.rand_like(g) < g.abs() / scale
    return scale, pack(torch.where(kept, g.sign(), 0).add_(1).to(torch.uint8), 2)


def int8(g: torch.Tensor) -> Sent:
    blocks = g.view(-1, 1024)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return scale, (blocks / scale).add_(torch.rand_like(blocks)).floor_().to(torch.int8)


def qsgd(g: torch.Tensor) -> Sent:
    blocks = g.view(-1, 1024)
    norm = blocks.norm(dim=1, keepdim=True)
    level = (blocks.abs() / norm * 7).add_(torch.rand_like(blocks)).floor_().to(torch.uint8)
    return norm, pack((level | ((blocks < 0).to(torch.uint8) << 3)).view(-1), 4)


def natural(g: torch.Tensor) -> Sent:
    mantissa, exponent = torch.frexp(g.abs())
    up = torch.rand_like(g) < 2 * mantissa - 1
    return (exponent + up + 126).to(torch.uint8), pack((g < 0).view(torch.uint8), 1)


def _at(g: torch.Tensor, index: torch.Tensor) -> Sent:
    return index.to(torch.int32), g[index]


def _sampled(g: torch.Tensor, ratio: float, sample: float) -> torch.Tensor:
    chosen = g.abs()[torch.randint(g.numel(), (int(sample * g.numel()),))]
    return chosen.topk(max(1, int(ratio * chosen.numel()))).values[-1]


def graddrop(g: torch.Tensor) -> Sent:
    return _at(g, (g.abs() >= _sampled(g, 0.001, 0.01)).nonzero().view(-1))


def dgc(g: torch.Tensor) -> Sent:
    index = (g.abs() >= _sampled(g, 0.001, 0.01)).nonzero().view(-1)
    k = int(0.001 * g.numel())
    if index.numel() > k:
        index = index[g[index].abs().topk(k).indices]
    return _at(g, index)


def topk(g: torch.Tensor) -> Sent:
    return _at(g, g.abs().topk(int(0.01 * g.numel()), sorted=False).indices)


def randomk(g: torch.Tensor) -> Sent:
    return _at(g, (torch.rand_like(g) < 0.01).nonzero().view(-1))


def powersgd(g: torch.Tensor) -> Sent:
    matrix = g.view(-1, 1024)
    p = torch.linalg.qr(matrix @ torch.rand(1024, 4)).Q
    return p, matrix.T @ p


RIVALS: dict[str, Callable[[torch.Tensor], Sent]] = {
    each.__name__: each
    for each in (
        onebit, signsgd, tbq, minmax, terngrad, int8, qsgd, natural, graddrop, dgc, topk, randomk,
        powersgd,
    )
}  # fmt: skip
