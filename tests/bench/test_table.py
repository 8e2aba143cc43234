import io

import pytest
from rich.console import Console

from gradwire.bench import table
from tests.bench import support


def rendered(result):
    console = Console(file=io.StringIO(), width=110)
    for made in table.tables(result):
        console.print(made)
    return console.file.getvalue()


def test_the_tables_fit_and_hold_all_methods():
    text = rendered(support.result())
    assert "…" not in text
    for entry in support.result().results:
        assert text.count(table.short_label(entry)) >= 2
    assert "15.0×" in text
    assert "measured" in text


def test_predicted_step_times_say_so():
    ddp = support.method("ddp-fp32", 3.0, 40e6, 2.5, measured=False)
    result = support.result(ddp, support.method("threelc", 0.2, 1e6, 2.5, measured=False), shaped=False)
    assert rendered(result).count("predicted") == 3
    assert "predicted, not measured" in table.headline(result)


def test_the_headline_is_of_the_fastest_that_learned_as_much():
    headline = table.headline(support.result())
    assert "4 ranks at 100 Mb/s" in headline
    assert "gradwire threelc takes 200 ms a step, 15.0 times faster than DDP fp32 (3.00 s)" in headline
    assert "0.8 % above DDP's" in headline


def test_the_headline_admits_that_nothing_learned_as_much():
    result = support.result(support.method("ddp-fp32", 3.0, 40e6, 2.5), support.method("topk", 0.1, 1e6, 3.0))
    assert "no method of gradwire came within 3 %" in table.headline(result)


def test_the_headline_admits_a_slower_step():
    result = support.result(support.method("ddp-fp32", 3.0, 40e6, 2.5), support.method("none", 6.0, 40e6, 2.5))
    assert "2.00 times slower than DDP fp32" in table.headline(result)


def test_the_headline_does_not_vouch_for_what_was_not_learned():
    result = support.result(support.method("ddp-fp32", 3.0, 40e6, None), support.method("topk", 0.1, 1e6, None))
    assert table.headline(result).endswith("(3.00 s); what it learns was not measured.")


def test_without_a_baseline_the_headline_compares_nothing():
    assert table.headline(support.result(support.method("none", 6.0, 40e6, 2.5))).endswith("takes 6.00 s a step.")


@pytest.mark.parametrize(
    ("rate", "text"), [("100mbit", "100 Mb/s"), ("1gbit", "1 Gb/s"), ("1500kbit", "1500 kb/s"), (None, "unshaped")]
)
def test_rates_are_written_as_people_write_them(rate, text):
    assert table.rate_text(rate) == text


def test_agreement_tells_payload_from_headers():
    assert "within 1.00 %, and up to 6.0 % more" in table.agreement(support.result())
    ddp = support.method("ddp-fp32", 3.0, 40e6, 2.5, measured=False)
    assert table.agreement(support.result(ddp, shaped=False)) == ""


def test_there_is_no_negative_zero():
    assert table.percent(-0.00001) == "+0.0 %"
