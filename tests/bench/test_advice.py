"""The probe's sentence, on figures made up for each case."""

from __future__ import annotations

import json

import pytest

from gradwire.bench.advice import MIN_GAIN, Measurement, ProbeFindings
from gradwire.planner.table import limit_of
from gradwire.tuning.candidates import FP32, GRADWIRE, HALF


def row(kind: str, step: float, *, name: str = "", limit: str = "link", allowed: bool = True) -> Measurement:
    names = {FP32: "DDP fp32", HALF: "DDP fp16 hook", GRADWIRE: "gradwire threelc"}
    return Measurement(
        name or names[kind], kind, step, step, 5, 1e6, 0.02, ideal=0.1, limit=limit, allowed=allowed, use="a line"
    )


def probe(*rows: Measurement, compute: float = 0.1, fidelity: str = "balanced") -> ProbeFindings:
    return ProbeFindings("a:model", 4, "gloo", 1000, 2, fidelity, compute, 0.05, 1e7, 1e-4, rows)


def test_compression_that_pays():
    found = probe(row(FP32, 3.0), row(HALF, 1.5), row(GRADWIRE, 0.125, limit="codec"), row(GRADWIRE, 0.3, name="int8"))
    assert found.sentence == (
        "Compress, with gradwire threelc: a step of 125 ms in place of 3 s, 24 times faster than DDP fp32 and 12 times "
        "faster than DDP fp16 hook. What limits it now: the codec; ideal is 100 ms, the step without communication "
        "100 ms."
    )
    assert found.as_dict()["advised"] == "gradwire threelc"
    assert json.loads(json.dumps(found.as_dict()))["rows"][0]["step"] == 3.0


def test_the_fp16_hook_is_enough_where_compression_gains_little_more():
    found = probe(row(FP32, 0.4), row(HALF, 0.2), row(GRADWIRE, 0.195))
    assert found.sentence == (
        "DDP fp16 hook is enough: a step of 200 ms in place of 400 ms, 2 times faster. gradwire threelc takes 195 ms. "
        "What limits it: the link; ideal is 100 ms, the step without communication 100 ms."
    )
    assert probe(row(FP32, 0.4), row(HALF, 0.2), row(GRADWIRE, 0.185)).advised.kind == GRADWIRE


def test_backward_that_hides_the_all_reduce():
    found = probe(row(FP32, 0.103, limit="backward"), row(HALF, 0.101), row(GRADWIRE, 0.1))
    assert found.sentence == (
        "Do not compress: backward hides the all-reduce. A step takes 103 ms by DDP fp32, 100 ms of it without "
        "communication, so that no compression can make it more than 3 % shorter. What limits it: the computation of "
        "forward and backward."
    )


def test_a_clock_that_says_a_little_less_than_the_computation_convinces_nobody():
    assert probe(row(FP32, 0.104, limit="backward"), row(GRADWIRE, 0.096)).advised.kind == FP32


@pytest.mark.parametrize("kind", [FP32, HALF, GRADWIRE])
def test_steps_that_cannot_be_are_no_ground_for_advice(kind):
    rows = {each: row(each, 0.0219) for each in (FP32, HALF, GRADWIRE)}
    rows[kind] = row(kind, 0.0135)
    found = probe(*rows.values(), compute=0.0185)
    assert found.too_noisy and found.advised is None
    assert found.sentence == (
        f"Too noisy to advise: a step by {rows[kind].name} took 13.5 ms, one without communication 18.5 ms, although "
        "none can be shorter than that. Something else has used the cores. Run the probe for longer (--seconds 10 or "
        "more), with nothing else on these machines."
    )
    assert found.as_dict()["too_noisy"] and found.as_dict()["advised"] is None
    assert not probe(*rows.values(), compute=0.0135 / 0.951).too_noisy


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("codec", "the codec costs what the link saves (20 ms a step). A step takes 150 ms by DDP fp32"),
        ("latency", "latency costs what the link saves. A step takes"),
        ("link", "it does not save enough bytes for this link. A step takes"),
        ("backward", "computation takes most of the step, so there is too little to gain. A step takes"),
    ],
)
def test_what_speaks_against_it_is_named(limit, reason):
    found = probe(row(FP32, 0.15), row(HALF, 0.16), row(GRADWIRE, 0.2, limit=limit))
    assert found.sentence.startswith(f"Do not compress: {reason}")
    assert "gradwire threelc, the fastest that was tried, takes 200 ms" in found.sentence


def test_a_level_that_allows_nothing_says_so():
    found = probe(row(FP32, 0.4), row(HALF, 0.2, allowed=False), fidelity="exact")
    assert found.advised.kind == FP32
    assert "fidelity exact allows nothing else" in found.sentence
    assert "What limits it: the link. Try --fidelity near-lossless" in found.sentence


def test_one_rank_is_told_how_to_start_more():
    assert probe().advised is None
    assert "Start as many ranks as the job will have" in probe().sentence


@pytest.mark.parametrize(
    ("step", "wire", "codec", "limit"),
    [(0.104, 0.2, 0.0, "backward"), (0.3, 0.2, 0.1, "link"), (0.3, 0.1, 0.2, "codec"), (0.5, 0.1, 0.1, "latency")],
)
def test_limits(step, wire, codec, limit):
    assert limit_of(step, 0.1, wire, codec, MIN_GAIN) == limit


def test_gradwire_without_compression_is_no_compression():
    dense = row(FP32, 0.3, name="gradwire's plan (dense)")
    found = probe(row(FP32, 0.4), dense, row(GRADWIRE, 0.35))
    assert found.advised == dense
    assert found.sentence.startswith(
        "Do not compress: it does not save enough bytes for this link. A step takes 300 ms by"
    )
    assert probe(row(FP32, 0.31), dense).advised.name == "DDP fp32"  # not worth a line of code
