"""The benchmark of errors: measurements agree with the closed forms, and THC is the most accurate."""

import pytest
from benchmarks.papers.thc import nmse as thc_nmse

from gradwire.compressors import make
from gradwire.compressors.support.thc_tables import optimal


@pytest.mark.parametrize(("bits", "granularity"), [(2, 9), (3, 15), (4, 30)])
def test_the_error_of_copies_is_what_is_predicted(bits, granularity):
    grad = thc_nmse.gradient(1 << 16, 0)
    codec = make("thc", bits=bits, granularity=granularity, p=thc_nmse.P)
    there, back = thc_nmse.there_and_back(codec, [grad] * thc_nmse.RANKS, 0)
    assert there is back  # nothing is encoded anew
    found = thc_nmse.nmse(back, grad)
    assert found == pytest.approx(thc_nmse.predicted(optimal(bits, granularity, thc_nmse.P), thc_nmse.RANKS), rel=0.05)


def test_methods_are_compared_and_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(thc_nmse, "COMPARED_SIZE", 1 << 14)
    monkeypatch.setattr(thc_nmse, "GRANULARITIES", {2: range(3, 8, 2), 4: range(15, 20, 2)})
    figures = [*thc_nmse.granularity_figures(2), *thc_nmse.compared_figures(2), *thc_nmse.clamp_figures(1)]
    errors = {each["method"]: each["value"] for each in figures if each["metric"] == thc_nmse.BACK}
    assert errors["thc:granularity=30"] < errors["topk:ratio=0.1"] < errors["terngrad:clip=0"]
    assert "thc:granularity=30" in thc_nmse.table(figures)
    assert "2 bits  g=3:" in thc_nmse.table(figures)
    by_ranks = {
        (each["method"], each["ranks"]): each["value"] for each in figures if each["metric"] == thc_nmse.BY_RANKS
    }
    assert by_ranks["thc:p=None", 16] < 0.3 * 0.0076 and by_ranks["thc:p=None", 64] < 0.15 * 0.0070
    assert all(by_ranks["thc:p=None", ranks] < by_ranks["thc:p=0.03125", ranks] for ranks in thc_nmse.CLAMP_RANKS)
    pytest.importorskip("matplotlib")
    thc_nmse.plot(figures, tmp_path)
    assert "4 bits" in (tmp_path / "thc-nmse.svg").read_text()
