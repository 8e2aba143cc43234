import pytest

from gradwire.bench.job import (
    BenchmarkJob,
    Progress,
    RateRequest,
    Segment,
    SegmentOutcome,
    TimedSteps,
    from_line,
    to_line,
)


@pytest.mark.parametrize(
    "message",
    [
        Progress(1, "timed", 2, 5, rate="10mbit"),
        RateRequest(3, None),
        SegmentOutcome(
            0, 1, [1.0, 2.0], [0.1, 0.1], 100, 2.0, 0.5, True, [TimedSteps("1gbit", [0.1], 10, 20, 0.1, 0.2, 12, 1)]
        ),
        SegmentOutcome(0, 1, [1.0, 2.0], validations=[(1, 2.0, 0.25), (2, 1.0, 0.5)]),
    ],
)
def test_what_a_rank_says_arrives(message):
    assert from_line(to_line(message)) == message


@pytest.mark.parametrize(
    "line", ["", "hello", '{"a": 1}', '{"gradwire": "nonsense"}', '{"gradwire": "progress"}', '{"gradwire']
)
def test_other_lines_are_nobodys(line):
    assert from_line(line) is None


def test_a_job_survives_its_file(tmp_path):
    job = BenchmarkJob("digits", (Segment("none", rates=("1gbit", None)), Segment("topk")), str(tmp_path), seed=3)
    assert BenchmarkJob.load(job.save()) == job
