"""Gradients of all workers of a step, on the CPU or on a GPU, and accuracies.

All workers have the same parameters, those of the model on the CPU. Each has its own batch and its own statistics of
that batch; running statistics take those of all workers, one after another.

On a GPU, a step is one CUDA graph, in which the workers are branches. Products are in float32, not in TF32.
"""
# Shapes: n = workers, B = images of a batch, N = parameters of the model

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from benchmarks.data.cifar import DEVIATION, MEAN, Split

Batch = tuple[torch.Tensor, torch.Tensor]
"""uint8[B, 3, 16, 16] and int64[B]."""
WARM_UP = 3  # steps before the graph is captured
MOMENTUM = 0.1  # of running statistics


def normalized(images: torch.Tensor) -> torch.Tensor:
    """Images as the model reads them, float32[B, 3, 16, 16]."""
    mean, deviation = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return (images.float().div_(255) - mean).div_(deviation)


class OnCpu:
    """The model itself computes, for one worker after another."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.parameters())

    def step(self, batches: Sequence[Batch]) -> tuple[list[list[torch.Tensor]], list[float]]:
        """Gradients and losses of all workers."""
        found, losses = [], []
        for images, labels in batches:
            loss = functional.cross_entropy(self._model(normalized(images)), labels)
            found.append(list(torch.autograd.grad(loss, self._parameters)))
            losses.append(float(loss.detach()))
        return found, losses

    def accuracy(self, test: Split) -> float:
        """Top-1 accuracy."""
        return _accuracy(self._model, test)

    def running_statistics(self) -> list[torch.Tensor]:
        """Means and variances of all layers of batch normalization."""
        return _statistics(self._model)


class OnGpu:
    """Copies of the model compute, one a worker, and a last one has the running statistics.

    Args:
        model: The model, on the CPU. Its parameters are read in each step.
        workers: Number of workers.
        batch: Images of a batch.
        device: The GPU.
    """

    def __init__(self, model: nn.Module, workers: int, batch: int, device: torch.device) -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self._source = list(model.parameters())
        size = sum(each.numel() for each in self._source)
        self._values = torch.empty(size, device=device)
        self._judge = copy.deepcopy(model).to(device)
        for own, part in zip(self._judge.parameters(), self._parts(self._values)):
            own.data = part
        self._models = [_sharing(self._judge) for _ in range(workers)]
        self._staged = torch.empty(size, pin_memory=True)
        self._images = torch.zeros(workers, batch, 3, 16, 16, device=device)
        self._labels = torch.zeros(workers, batch, dtype=torch.int64, device=device)
        self._gradients = torch.empty(workers, size, device=device)
        self._losses = torch.empty(workers, device=device)
        self._found = torch.empty(workers, size, pin_memory=True)
        self._by_worker = [self._parts(each) for each in self._found]
        self._streams = [torch.cuda.Stream(device) for _ in range(workers)]
        self._load()
        self._graph = self._captured()

    def step(self, batches: Sequence[Batch]) -> tuple[list[list[torch.Tensor]], list[float]]:
        """Gradients and losses of all workers. The gradients are overwritten by the next step."""
        self._load()
        self._images.copy_(torch.stack([normalized(images) for images, _ in batches]))
        self._labels.copy_(torch.stack([labels for _, labels in batches]))
        self._graph.replay()
        self._found.copy_(self._gradients)
        return self._by_worker, self._losses.tolist()

    def accuracy(self, test: Split) -> float:
        """Top-1 accuracy."""
        self._load()
        return _accuracy(self._judge, test)

    def running_statistics(self) -> list[torch.Tensor]:
        """Means and variances of all layers of batch normalization."""
        return _statistics(self._judge)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a tensor with all their elements."""
        parts = flat.split([each.numel() for each in self._source])
        return [part.view_as(each) for part, each in zip(parts, self._source)]

    def _load(self) -> None:
        torch.cat([each.detach().reshape(-1) for each in self._source], out=self._staged)
        self._values.copy_(self._staged)

    def _captured(self) -> torch.cuda.CUDAGraph:
        before = [each.clone() for each in self._judge.buffers()]
        first, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            for _ in range(WARM_UP):
                self._compute()
        torch.cuda.current_stream().wait_stream(first)
        with torch.cuda.graph(graph):
            self._compute()
        for own, value in zip(self._judge.buffers(), before):
            own.copy_(value)
        return graph

    def _compute(self) -> None:
        main = torch.cuda.current_stream()
        for worker, (model, stream) in enumerate(zip(self._models, self._streams)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                loss = functional.cross_entropy(model(self._images[worker]), self._labels[worker])
                found = torch.autograd.grad(loss, list(model.parameters()))
                torch.cat([each.reshape(-1) for each in found], out=self._gradients[worker])
                self._losses[worker].copy_(loss.detach())
        for stream in self._streams:
            main.wait_stream(stream)
        running = _statistics(self._judge)
        torch._foreach_mul_(running, (1 - MOMENTUM) ** len(self._models))
        for later, model in enumerate(reversed(self._models)):
            torch._foreach_add_(running, _statistics(model), alpha=MOMENTUM * (1 - MOMENTUM) ** later)


def _sharing(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, whose running statistics are those of its last batch."""
    made = copy.deepcopy(model)
    for own, other in zip(made.modules(), model.modules(), strict=True):
        own._parameters.update(other._parameters)
        if isinstance(own, nn.BatchNorm2d):
            own.momentum = 1.0
    return made


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [each for each in model.buffers() if each.is_floating_point()]


@torch.no_grad()
def _accuracy(model: nn.Module, test: Split) -> float:
    model.eval()
    device = next(model.parameters()).device
    parts = zip(*(part.split(500) for part in test))
    right = sum(int((model(normalized(x.to(device))).argmax(1) == y.to(device)).sum()) for x, y in parts)
    model.train()
    return right / len(test[1])
