import csv
import json
import re

import pytest

from gradwire.bench import plots
from gradwire.bench.records import COLUMNS
from gradwire.bench.report import render, write_report
from gradwire.bench.table import headline
from tests.bench import support


@pytest.fixture(scope="module")
def page():
    return render(support.result(note="A note & a <tag>."))


def test_the_page_has_all_methods_and_the_headline(page):
    for entry in support.result().results:
        assert entry.label in page
    assert headline(support.result()).replace("'", "&#39;") in page


def test_the_page_needs_nothing_from_outside(page):
    assert "http" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", page)
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []


def test_the_page_has_its_five_plots(page):
    assert page.count("<svg") == page.count("</svg>") == 5


def test_plots_do_not_share_ids(page):
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', drawing)) for drawing in drawings]
    assert sum(map(len, clips)) == len(set.union(*clips))


def test_losses_are_written_out(page):
    lost = page[page.index("What was lost") : page.index("How it was measured")]
    assert "gradwire topk ratio 0.001 ends with a validation loss 20.0 % above" in lost
    assert "At 100 Mb/s, a step of gradwire none is 1.10 times slower" in lost
    assert "threelc" not in lost


def test_text_is_escaped(page):
    assert "A note &amp; a &lt;tag&gt;." in page


def test_a_page_without_loss_curves_and_baseline_can_be_made():
    result = support.result(support.method("threelc", 0.2, 1e6, None))
    page = render(result)
    assert page.count("<svg") == 3
    assert "validation loss" not in page


def test_an_unshaped_page_says_that_times_are_predicted():
    ddp = support.method("ddp-fp32", 3.0, 40e6, 2.5, measured=False)
    page = render(support.result(ddp, shaped=False, note="Links were not shaped."))
    assert "<b>predicted</b>" in page
    assert "measured on links shaped" not in page


def test_the_folder_holds_page_and_figures(tmp_path):
    result = support.result()
    path = write_report(result, tmp_path / "report")
    assert path.read_text() == render(result)
    assert json.loads((path.parent / "results.json").read_text())["ranks"] == 4
    with (path.parent / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    step = next(row for row in rows if (row["method"], row["metric"]) == ("threelc", "step"))
    assert (float(step["value"]), step["unit"], step["rate"], step["source"]) == (0.2, "s", "100mbit", "measured")
    assert all(row["value"] and row["commit"] == "abc1234" and "torch=2.13.0" in row["versions"] for row in rows)


def test_smoothing_keeps_a_constant():
    assert plots.smooth([2.0] * 5) == pytest.approx([2.0] * 5)
