"""The benchmark of 100 tensors in memory: its ranks really synchronize."""

import pytest
import torch
from benchmarks.micro import hundred_tensors


@pytest.mark.parametrize("method", ["none", "onebit"])
def test_each_method_has_processor_time_and_duration(method):
    rows = list(hundred_tensors.run(method, repetitions=2, steps=2))
    assert [(row["method"], row["metric"], row["samples"]) for row in rows] == [
        (method, "processor", 2),
        (method, "step", 2),
    ]
    assert all(row["p20"] <= row["value"] <= row["p80"] and row["value"] > 0 for row in rows)
    assert method in hundred_tensors.table(rows)


def test_ranks_end_with_the_mean(monkeypatch):
    made, init = [], hundred_tensors.RankThread.__init__
    monkeypatch.setattr(
        hundred_tensors.RankThread, "__init__", lambda self, one: (init(self, one), made.append(self))[0]
    )
    with hundred_tensors.connected("none") as take:
        take(1)
        mean = torch.stack([rank._gradients for rank in made]).mean(0)
        for rank in made:
            torch.testing.assert_close(rank._bucket, mean)
