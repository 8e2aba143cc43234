"""The studies of THC with simulated workers: cells, intervals, ratios, and all methods exist."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.keys import key_of
from benchmarks.papers.thc import ablation as thc_ablation
from benchmarks.papers.thc import loss as thc_loss
from benchmarks.papers.thc import scale as thc_scale
from benchmarks.papers.thc import study
from benchmarks.papers.thc.simulated_training import train
from benchmarks.papers.thc.simulated_workers import (
    Dense,
    DenseSums,
    IntegerSums,
    LeftOut,
    PacketLoss,
    Reencoded,
    Stragglers,
)
from benchmarks.papers.thc.tasks import SST2

from benchmarks import runner
from gradwire.bench.records import read_figures

SIZE = 5000


def figures(cell: study.Cell, value: float) -> list[dict]:
    return [{"task": cell.task, "method": cell.method, "ranks": cell.ranks, "seed": cell.seed,
             "metric": "test_accuracy", "value": value}]  # fmt: skip


def test_cells_that_are_in_the_file_are_not_trained_again(tmp_path, capsys):
    path, trained = tmp_path / "cells.csv", []
    cells = [study.Cell("task", method, 4, seed) for seed in range(3) for method in (study.DENSE, "thc")]
    values = {
        cell: 0.5 + 0.01 * cell.seed**2 + (0.001 * (1 + cell.seed) if cell.method == "thc" else 0) for cell in cells
    }

    def measure(cell: study.Cell) -> list[dict]:
        trained.append(cell)
        return figures(cell, values[cell])

    assert runner.record("test", study.run(cells[:3], measure, set()), path, study.KEY)
    done = {key_of(row, study.KEY) for row in read_figures(path)}
    assert runner.record("test", study.run(cells, measure, done), path, study.KEY)
    rows = read_figures(path)
    assert trained == cells and len(rows) == len(cells)
    assert study.by_seed(rows, "task", study.DENSE, 4, "test_accuracy") == {0: 0.5, 1: 0.51, 2: 0.54}
    mean, half = study.difference(rows, "task", "thc", 4, "test_accuracy")
    assert mean == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert "seed 2: test_accuracy 0.543" in capsys.readouterr().out


def test_top_k_and_qsgd_take_no_more_bytes_than_the_papers_setting():
    for ranks in thc_scale.RANKS:
        paper, topk, qsgd = (
            thc_scale.aggregator(study.Cell("sst2", method, ranks, 0), SIZE)
            for method in (thc_scale.THC, thc_scale.TOPK, thc_scale.QSGD)
        )
        assert isinstance(topk, Reencoded) and isinstance(qsgd, Reencoded)
        assert 0.98 * paper.bits_there < topk.bits_there <= paper.bits_there
        assert 0.98 * paper.bits_back < topk.bits_back <= paper.bits_back
        assert qsgd.bits_there < 1.02 * paper.bits_there and qsgd.bits_back < 1.02 * paper.bits_back
        assert paper.bits_back > (8 if ranks == 4 else 16)


def test_every_method_of_the_studies_gives_a_mean():
    grads = [torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) for rank in range(10)]
    mean = torch.stack(grads).mean(0)
    for module in (thc_loss, thc_ablation):
        for method in (study.DENSE, *getattr(module, "METHODS", ()), *getattr(module, "OPTIONS", ())):
            found = module.aggregator(study.Cell("", method, 10, 0), SIZE).means(grads, 0)
            assert len(found) == 10 and (found[0] - mean).norm() < 0.9 * mean.norm(), method


def test_methods_of_loss_are_what_they_are_called():
    made = {method: thc_loss.faults(study.Cell("", method, 10, 5)) for method in thc_loss.METHODS}
    assert made["loss 0.01, synchronized"] == made["loss 0.01"] == (PacketLoss(0.01, 5), LeftOut())
    assert made["2 of 10 left out, kept"] == (Stragglers(2, 5), LeftOut(keep=True))
    synchronized = [m for m in thc_loss.CONTROLS if thc_loss.sync(study.Cell("", m, 10, 5)) is not None]
    assert synchronized == ["loss 0.001, synchronized", "loss 0.01, synchronized"]


def test_every_fault_has_a_dense_control():
    for method, control in thc_loss.CONTROLS.items():
        cells = [study.Cell("", each, 10, 5) for each in (method, control)]
        compressed, dense = (thc_loss.aggregator(cell, SIZE) for cell in cells)
        assert isinstance(compressed, IntegerSums) and isinstance(dense, DenseSums)
        assert (dense.faults, dense.left_out) == (compressed.faults, compressed.left_out)
        assert (dense.num_packets, dense.packet) == (compressed.num_packets, compressed.packet)
        assert len({thc_loss.sync(cell) is None for cell in cells}) == 1


@pytest.mark.parametrize("learns_words", [True, False])
def test_a_bag_of_words_has_dense_gradients_where_its_words_stay(tmp_path, learns_words):
    lines = [
        f"a {'good' if label else 'bad'} film number {number}\t{label}" for number in range(30) for label in (0, 1)
    ]
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines))
    task = SST2(tmp_path, num_epochs=40, learns_words=learns_words)
    grad, _ = task.replica().gradient(*task.batch(torch.arange(8)))
    assert grad.numel() == task.size
    assert ((grad == 0).float().mean() > 0.5) == learns_words
    found = train(task, Dense(4), 0)
    assert found.accuracy["train"] > 0.9


def test_errors_are_those_of_the_same_gradients():
    cell = study.Cell("sst2", thc_scale.ERRORS, 4, 0)
    watched, grad = thc_scale.Errors(cell), torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(watched.means([grad] * 4, 0)[0], grad)
    watched.means([grad] * 4, 1)
    assert watched.agreement == [pytest.approx(4)]  # copies
    paper = thc_scale.aggregator(study.Cell("sst2", thc_scale.THC, 4, 0), SIZE)
    assert isinstance(paper, IntegerSums)
    assert watched.nmse[thc_scale.THC][0] == pytest.approx(paper.codec.table(4).cost / 4 + 0.0073, rel=0.1)


def test_tables_and_plots_are_drawn_of_what_there_is(tmp_path):
    for module, task, ranks, methods in (
        *((thc_scale, task, thc_scale.RANKS, thc_scale.METHODS) for task in thc_scale.TASKS),
        (thc_loss, "cifar10", [10], thc_loss.METHODS),
        (thc_ablation, "sst2", [4], thc_ablation.OPTIONS),
    ):
        rows = [
            {"task": task, "method": method, "ranks": n, "seed": seed, "metric": metric, "value": value}
            for n in ranks for seed in range(2) for metric in module.METRICS
            for method, value in [(study.DENSE, 0.75), *((each, 0.74 + seed / 1000) for each in methods)]
        ]  # fmt: skip
        assert "-0.95 ± 0.64" in module.table(rows)
        pytest.importorskip("matplotlib")
        module.plot(rows, tmp_path)
        (drawn,) = tmp_path.iterdir()
        assert "points above dense" in drawn.read_text()
        drawn.unlink()
