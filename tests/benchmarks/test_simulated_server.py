"""The simulated parameter server of 3LC's trainings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from benchmarks.data.cifar import ResNet
from benchmarks.papers.threelc import epochs
from benchmarks.papers.threelc.gradients import OnCpu, OnGpu
from benchmarks.papers.threelc.simulated_server import Exchange, SimulatedServer

WORKERS, STEPS = 3, 12


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.ReLU(), torch.nn.Linear(50, 30))


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def gradients(net: torch.nn.Module, step: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    losses = [net(torch.randn(8, 40, generator=generator)).square().mean() for _ in range(WORKERS)]
    return [list(torch.autograd.grad(loss, list(net.parameters()))) for loss in losses]


@pytest.mark.parametrize("chunk_elements", [1 << 30, 500])
def test_without_compression_a_step_is_that_of_the_optimizer_on_the_mean(chunk_elements: int) -> None:
    simulated, plain = model(), model()
    optimizer = sgd(plain)
    server = SimulatedServer(simulated, sgd(simulated), WORKERS, Exchange("none", "none", None, chunk_elements), 0)
    for step in range(STEPS):
        found = gradients(plain, step)
        server.step(gradients(simulated, step))
        for parameter, *own in zip(plain.parameters(), *found):
            parameter.grad = sum(own[1:], own[0]) / WORKERS
        optimizer.step()
    for ours, theirs in zip(simulated.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert server.residuals() == {"push": 0.0, "pull": pytest.approx(0.0, abs=1e-6)}


@pytest.mark.parametrize("method", ["threelc", "qsgd", "none"])
def test_vectors_that_travel_as_one_tensor_have_the_values_of_vectors_that_do_not(method: str) -> None:
    nets, pulled = [], []
    for join_vectors in (False, True):
        net = model()
        server = SimulatedServer(net, sgd(net), WORKERS, Exchange(method, method, join_vectors=join_vectors), 0)
        for step in range(STEPS):
            server.step(gradients(net, step))
        assert server.same()
        nets.append(net)
        pulled.append(server.pulled)
    for apart, joined in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(apart, joined)
    assert pulled[0] - pulled[1] == 1


@pytest.mark.parametrize("push", ["threelc", "none"])
@pytest.mark.parametrize("pull", ["threelc", "none"])
def test_all_workers_hold_the_same_bits_and_what_is_not_sent_is_a_residual(push: str, pull: str) -> None:
    net = model()
    server = SimulatedServer(net, sgd(net), WORKERS, Exchange(push, pull), 0)
    before = [each.detach().clone() for each in net.parameters()]
    for step in range(STEPS):
        server.step(gradients(net, step))
    assert server.same()
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    residuals = server.residuals()
    assert {way for way, norm in residuals.items() if norm > 1e-4} == {
        way for way, method in (("push", push), ("pull", pull)) if method == "threelc"
    }
    plain = 4 * sum(each.numel() for each in net.parameters())
    assert (server.pushed < plain) == (push == "threelc")
    assert (server.pulled < plain) == (pull == "threelc")


def test_crops_are_windows_of_the_padded_images_and_half_of_them_are_mirrored() -> None:
    images = torch.arange(40 * 3 * 256).reshape(40, 3, 16, 16) % 251
    found = epochs.cropped(images.to(torch.uint8), torch.Generator().manual_seed(0)).numpy()
    padded = np.pad(images.numpy().astype(np.uint8), ((0, 0), (0, 0), (2, 2), (2, 2)))
    mirrored = 0
    for crop, image in zip(found, padded, strict=True):
        windows = [image[:, y : y + 16, x : x + 16] for y in range(5) for x in range(5)]
        plain = any(np.array_equal(crop, each) for each in windows)
        flipped = any(np.array_equal(crop, each[:, :, ::-1]) for each in windows)
        assert plain or flipped
        mirrored += flipped and not plain
    assert 10 <= mirrored <= 30


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other, which takes very long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.ci
def test_a_training_reports_its_course_and_ends_with_its_accuracy() -> None:
    torch.manual_seed(1)
    split = torch.randint(0, 256, (50, 3, 16, 16), dtype=torch.uint8), torch.arange(50) % 10
    for design in (epochs.DESIGNS[0], next(each for each in epochs.DESIGNS if each.local_steps == 2)):
        rows = list(epochs.Training(design, (split, split), 20, 0.1, 0).run())
        losses = [row["value"] for row in rows if row["metric"] == "loss"]
        assert len(losses) == 20
        assert losses[-1] < losses[0]
        assert rows[-1]["metric"] == "accuracy"
        pushed = [row["value"] for row in rows if row["metric"] == "bits_pushed_at"]
        assert np.mean(pushed) == pytest.approx(32 / design.local_steps)


@pytest.mark.gpu
def test_a_gpu_has_the_gradients_losses_and_running_statistics_of_the_cpu() -> None:
    torch.manual_seed(2)
    on_cpu, on_gpu = ResNet(blocks=1, width=16, stride=1), ResNet(blocks=1, width=16, stride=1)
    on_gpu.load_state_dict(on_cpu.state_dict())
    cpu, gpu = OnCpu(on_cpu), OnGpu(on_gpu, WORKERS, 8, torch.device("cuda"))
    for _ in range(3):
        batches = [
            (torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (8,)))
            for _ in range(WORKERS)
        ]
        (ours, losses), (theirs, known) = gpu.step(batches), cpu.step(batches)
        assert losses == pytest.approx(known, rel=1e-4)
        for own, other in zip(ours, theirs, strict=True):
            for a, b in zip(own, other, strict=True):
                assert float((a - b).abs().max()) <= 1e-3 * float(b.abs().max())
        for each in (on_cpu, on_gpu):  # both are changed in the same way: the GPU reads the parameters in each step
            for parameter, change in zip(each.parameters(), theirs[0], strict=True):
                parameter.data -= 0.1 * change
    test = torch.randint(0, 256, (500, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (500,))
    assert gpu.accuracy(test) == pytest.approx(cpu.accuracy(test), abs=0.01)
    for own, other in zip(gpu.running_statistics(), cpu.running_statistics(), strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=1e-3, atol=1e-4)
