import pytest

from gradwire.bench.job import TimedSteps
from gradwire.bench.results import combine_times
from gradwire.bench.statistics import HEADER_BYTES
from tests.bench import support


def timed(seconds, sent, rate="100mbit", **counts):
    return TimedSteps(rate, seconds, sent, 4 * sent, 0.2, 0.1, **counts)


def test_step_times_are_means_over_ranks_and_medians_over_steps():
    time = combine_times([timed([1.0, 2.0, 3.0], 300), timed([3.0, 4.0, 5.0], 600)], 0.5, measured=True)
    assert (time.step.median, time.step.size) == (3.0, 3)
    assert time.bytes == 150
    assert time.ratio == 4
    assert time.split.encode == pytest.approx(0.2 / 3)
    assert time.interface_payload is None


def test_the_interfaces_payload_is_without_headers():
    time = combine_times(
        [timed([1.0, 1.0], 2000, interface_bytes=2000 + 4 * HEADER_BYTES, interface_packets=4)], 0.5, measured=True
    )
    assert time.interface_payload == time.bytes == 1000
    assert time.interface_difference == 0


@pytest.mark.parametrize(("num_bytes", "expected"), [(12_500_000, 1.0), (125, 0.2)])
def test_a_step_that_was_not_shaped_is_predicted(num_bytes, expected):
    time = combine_times([timed([0.2], num_bytes)], 0.1, measured=False)
    assert time.step.median == pytest.approx(expected)
    assert time.step.size == 0
    assert not time.measured


def test_the_ideal_is_of_the_bytes_of_one_rank():
    time = combine_times([timed([2.0], 12_500_000), timed([2.0], 12_500_000)], 0.1, measured=True)
    assert time.ideal == pytest.approx(1.0)
    assert time.over_ideal == pytest.approx(2.0)


def test_processor_time_is_that_of_a_rank_and_a_step():
    ranks = [timed([1.0, 1.0], 300, processor_seconds=seconds) for seconds in (0.6, 1.0)]
    assert combine_times(ranks, 0.5, measured=True).processor == pytest.approx(0.4)


def test_speedup_and_loss_are_against_ddp_fp32():
    result = support.result()
    best = result.of("threelc")
    assert result.speedup(best) == pytest.approx(15)
    assert result.loss_difference(best) == pytest.approx(0.008)


def test_without_the_baseline_there_is_nothing_to_compare_with():
    result = support.result(support.method("threelc", 0.2, 1e6, 2.5))
    assert result.speedup(result.results[0]) is None
    assert result.loss_difference(result.results[0]) is None


def test_plain_data_has_what_is_derived():
    row = support.result().as_dict()["results"][3]
    assert row["label"] == "gradwire threelc"
    assert row["times"][0]["speedup"] == pytest.approx(15)
    assert row["times"][0]["over_ideal"] == pytest.approx(0.2 / 0.08)
