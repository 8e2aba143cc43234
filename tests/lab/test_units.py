from datetime import timedelta

import pytest

from gradwire.core.errors import OptionError
from gradwire.lab.units import format_rate, parse_delay, parse_loss, parse_queue, parse_rate, seconds


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10mbit", 10_000_000),
        ("1.5gbit", 1_500_000_000),
        (" 100 Mbit ", 100_000_000),
        ("64kibit", 65_536),
        ("9600bit", 9_600),
        ("250000", 250_000),
        (1e6, 1_000_000),
        (".5mbit", 500_000),
        (None, None),
        ("none", None),
    ],
)
def test_rates_have_the_units_of_tc(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "10", "mbit", "-1mbit", "10mb", "1e3x", "0", "200gbit", "nan", "inf", ""])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(OptionError, match="or 'none'"):
        parse_rate(text)


@pytest.mark.parametrize("rate", [None, 8_001, 64_000, 10_000_000, 2_500_000_000])
def test_a_formatted_rate_reads_back(rate):
    assert parse_rate(format_rate(rate)) == rate


def test_bytes_a_second_are_refused_with_a_rate_that_is_accepted():
    with pytest.raises(OptionError, match="Write '100mbit'"):
        parse_rate("100mbps")
    assert parse_rate("100mbit") == 100_000_000


@pytest.mark.parametrize(
    ("text", "fraction"), [("0.1%", 0.001), ("0.001", 0.001), (0.25, 0.25), (None, 0.0), (0, 0.0), ("5 %", 0.05)]
)
def test_losses(text, fraction):
    assert parse_loss(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["100%", 1, 1.5, -0.1, "nan", "some", "%"])
def test_what_is_no_loss_is_refused_with_one_that_is_accepted(text):
    with pytest.raises(OptionError, match=r"such as '0\.1%'"):
        parse_loss(text)
    assert parse_loss("0.1%") == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("5ms", 5), ("500us", 0.5), ("1s", 1000), (timedelta(milliseconds=2), 2)]
)
def test_delays(text, milliseconds):
    assert parse_delay(text) == timedelta(milliseconds=milliseconds)


@pytest.mark.parametrize("text", ["none", None, "0ms"])
def test_no_delay(text):
    assert parse_delay(text) is None


@pytest.mark.parametrize("text", ["5", "fast", "11s", timedelta(seconds=-1)])
def test_what_is_no_delay_is_refused(text):
    with pytest.raises(OptionError, match="or 'none'"):
        parse_delay(text)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64kib", 65_536), ("100kb", 100_000), (4000, 4000), ("1.5 MiB", 1_572_864), ("none", None)]
)
def test_queues(text, nbytes):
    assert parse_queue(text) == nbytes


@pytest.mark.parametrize(
    ("text", "said"), [("deep", "Write it like '64kib'"), ("1kb", "two packets"), ("64kbit", "kib")]
)
def test_what_is_no_queue_is_refused(text, said):
    with pytest.raises(OptionError, match=said):
        parse_queue(text)


def test_durations_in_seconds():
    assert (seconds(timedelta(milliseconds=1500)), seconds(2), seconds(None)) == (1.5, 2, None)
