"""The benchmark of sparsifiers with a small gradient: measure, write, read back and draw."""

import pytest
import torch
from benchmarks.papers.dragonn import encode as bench

from gradwire.bench.records import read_figures, write_figures
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    found = list(bench.encoding(1, 1, (0.01,), bench.METHODS))
    path = tmp_path_factory.mktemp("sparse") / "sparse.csv"
    write_figures("sparse-encode", (row for each in found for row in each.rows()), path)
    assert bench.read(read_figures(path)) == found
    return found


def test_every_method_is_timed_with_and_without_a_residual(figures):
    found = {(each.method, each.metric) for each in figures}
    assert found == {(method, "encode") for method in bench.METHODS} | {
        (method, "encode with feedback") for method in bench.METHODS if method != "torch.topk"
    }
    assert all(each.ms > 0 and each.fraction > 0 and each.ratio == 0.01 for each in figures)


def test_both_ways_of_decoding_give_the_same():
    codec = make("dragonn", ratio=0.01)
    ctxs = [Context("w", rank=rank, spec=TensorSpec((5000,))) for rank in range(3)]
    payloads = [codec.encode(torch.randn(5000, generator=torch.Generator().manual_seed(3)), ctx) for ctx in ctxs]
    sums = {}
    out = torch.empty(5000)
    for metric, call in bench.decode_calls(codec, payloads, ctxs, out, torch.empty(5000)):
        call()
        sums[metric] = out.clone()
    assert torch.equal(sums["dense decoding"], sums["sparse decoding"])
    assert out.any()


def test_tables_and_plot_have_every_method(figures, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row for each in figures for row in each.rows()]
    table = bench.table(rows)
    assert all(f"\n{method} " in table for method in bench.METHODS)
    bench.plot(rows, tmp_path)
    assert "dragonn with feedback" in (tmp_path / "sparse-encode.svg").read_text()
