"""Costs of this machine: measured once, kept, and measured again for another machine; prices of tasks and frames."""

import json

import pytest
import torch

from gradwire.compressors.base.registry import make
from gradwire.planner.costs import Costs
from gradwire.planner.curves import LinearCost
from gradwire.simulate.frames import measure_frame
from gradwire.simulate.graphs import Work
from gradwire.simulate.machine import machine_costs
from gradwire.simulate.prices import PriceList
from gradwire.wire.frame import FrameKind
from tests.simulate.costs import costs, onebit

SIZES = (1 << 10, 1 << 14)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    machine_costs(["fp16"], path, sizes=SIZES, seconds_per_codec=0.05)
    return path


def again(path, *specs):
    asked = []
    found = machine_costs(specs, path, sizes=SIZES, seconds_per_codec=0.05, on_measure=asked.append)
    return found, asked


def test_what_is_in_the_file_is_not_measured_again(measured):
    before = measured.read_text()
    found, asked = again(measured, "fp16", "none")
    assert asked == []
    assert set(found.codecs) == {"none", "fp16"}
    assert measured.read_text() == before
    assert found.task > 0
    assert found.frame(1 << 20) > found.frame(0)


def test_what_is_missing_is_added(measured, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(measured.read_text())
    found, asked = again(path, "bf16")
    assert asked == ["bf16"]
    assert set(Costs.from_json(path.read_text()).codecs) == {"none", "fp16", "bf16"} == set(found.codecs)


def test_a_file_of_another_machine_is_measured_again(measured, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(json.loads(measured.read_text()) | {"made_by": "another"}))
    _, asked = again(path, "fp16")
    assert asked == ["none", "fp16"]
    assert "another" not in path.read_text()


def test_a_frame_costs_by_its_bytes():
    frame = measure_frame((1 << 10, 1 << 20), 0.1)
    assert frame.fixed > 0
    assert frame.slope > 0


def work(call, frame=None, taken=None, payloads=0, share=1.0):
    return Work(call, frame, taken, payloads, ((1 << 20,),), "", share)


def test_frames_have_the_compressors_own_sizes():
    prices = PriceList(make("onebit"), costs(onebit=onebit()), torch.float32)
    # A size that was not measured, of a compressor whose payloads have one size only.
    assert prices.frame_bytes(work("send", FrameKind.PAYLOAD), ((5000,),)) == pytest.approx(5000 / 8 + 8, abs=120)


def test_a_merge_takes_in_each_message_and_encodes_the_sum():
    known = costs(1e-6, add=LinearCost(0.0, 1e-9), onebit=onebit(encode=2e-9, decode=5e-9))
    prices = PriceList(make("onebit"), known, torch.float32)
    seconds = prices.seconds(work("merge", FrameKind.PAYLOAD, FrameKind.PAYLOAD, 3), ((1000,),))
    assert seconds == pytest.approx(1e-6 + 3 * 5e-6 + 1e-6 + 2e-6)


@pytest.mark.parametrize(("call", "seconds"), [("start", 0), ("merge", 5 / 3 * 1e-6), ("decode", 0)])
def test_dense_gradients_that_are_added_where_they_are_cost_one_sweep(call, seconds):
    known = costs(1e-6, add=LinearCost(0.0, 1e-9))
    prices = PriceList(make("none"), known, torch.float32, in_place=True)
    found = prices.seconds(work(call, FrameKind.PAYLOAD, FrameKind.PAYLOAD, 3), ((1000,),))
    assert found == pytest.approx(1e-6 + seconds)


def test_the_processor_pays_for_a_frame_once_however_it_is_cut():
    known = costs(1e-6, frame=LinearCost(1e-5, 1e-9))
    prices = PriceList(make("none"), known, torch.float32)
    whole = prices.seconds(work("recv", FrameKind.PAYLOAD), ((1 << 20,),))
    piece = prices.seconds(work("recv", FrameKind.PAYLOAD, share=0.25), ((1 << 20,),))
    assert whole == pytest.approx(4 * piece)
    assert whole == pytest.approx(1e-6 + 1e-5 + 4e-9 * (1 << 20))


def test_a_frame_that_costs_the_same_whatever_its_size_stays_whole():
    prices = PriceList(make("none"), costs(1e-6, frame=LinearCost(1e-5, 0.0)), torch.float32)
    assert not prices.carries
    assert prices.seconds(work("send", FrameKind.PAYLOAD), ((1 << 20,),)) == pytest.approx(1.1e-5)
