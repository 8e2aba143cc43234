"""The receiver's side of the wire contract: what ranks agreed on, and every header that does not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.compressors.base import SummableCompressor
from gradwire.compressors.base.registry import code
from gradwire.core.errors import FrameError
from gradwire.core.spec import TensorSpec
from gradwire.sync.exchange import EXCHANGE_TENSOR, PROBE_BYTES, PROBE_TENSOR
from gradwire.sync.fusion import FUSION_FLAG
from gradwire.sync.nodes import Nodes
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.tensor_registry import TensorRegistry
from gradwire.wire.frame import HEADER_BYTES, FrameFlags, FrameKind, Header

SPECS = {
    "dense": TensorSpec((64, 64)),
    "ternary": TensorSpec((64, 64)),
    "shared": TensorSpec((3000,), torch.float16),
    "bias": TensorSpec((10,)),
    "scale": TensorSpec((30,)),
}
PLAN = Plan({"ternary": "threelc", "shared": gw.make("int8shared"), "*": "none"}, min_elements=1000)
BLOCK = PLAN.rules["shared"].options["block"]
NUM_FUSED = 64 * 64 + 40  # elements of dense, bias and scale
NONE, TERNARY, INT8 = code("none"), code("threelc"), code("int8shared")


def registry(world_size: int = 3) -> TensorRegistry:
    made = TensorRegistry(PLAN, world_size)
    made.add(SPECS)
    return made


REGISTRY = registry()
DENSE = Header(FrameKind.PAYLOAD, compressor=NONE, dtype=1, tensor=0, offset=1024, count=1024, length=4096)
TERNARY_PAYLOAD = Header(FrameKind.PAYLOAD, compressor=TERNARY, dtype=1, tensor=1, count=4096, length=300)
STATS = Header(FrameKind.STATS, compressor=INT8, dtype=2, tensor=2, count=2048, length=4 * -(-2048 // BLOCK))
AGGREGATE = Header(FrameKind.AGGREGATE, compressor=INT8, dtype=2, tensor=2, offset=1024, count=1000, length=2000)
FUSED = Header(
    FrameKind.PAYLOAD, compressor=NONE, dtype=1, tensor=3 | FUSION_FLAG, count=NUM_FUSED, length=4 * NUM_FUSED
)
HASH = Header(FrameKind.STATS, tensor=EXCHANGE_TENSOR, count=1, length=8)
PROBE = Header(FrameKind.STATS, tensor=PROBE_TENSOR, count=PROBE_BYTES, length=PROBE_BYTES)
FITTING = [DENSE, TERNARY_PAYLOAD, STATS, AGGREGATE, FUSED, HASH, PROBE]


@pytest.mark.parametrize("header", FITTING, ids=lambda header: f"{header.kind.name} {header.tensor}")
def test_what_was_agreed_on_is_admitted(header: Header) -> None:
    REGISTRY.admit(header)


def test_the_agreed_order_gives_the_numbers() -> None:
    assert REGISTRY.names == list(SPECS)
    assert REGISTRY.ids == {name: number for number, name in enumerate(SPECS)}
    grown = registry()
    grown.add({"later": TensorSpec((5,))})
    assert grown.ids["later"] == len(SPECS)


@pytest.mark.parametrize(
    ("header", "changed", "said"),
    [
        (DENSE, {"tensor": len(SPECS)}, "Expected one of 5 tensors"),
        (DENSE, {"tensor": FUSION_FLAG - 1}, "Expected one of 5 tensors"),
        (FUSED, {"tensor": FUSION_FLAG | 5}, "Expected one of 5 tensors"),
        (DENSE, {"compressor": TERNARY}, "Expected none of torch.float32"),
        (DENSE, {"compressor": 0}, "Expected none of torch.float32"),
        (DENSE, {"dtype": 2}, "Expected none of torch.float32"),
        (STATS, {"dtype": 1}, "Expected int8shared of torch.float16"),
        (DENSE, {"tensor": 1}, "Expected threelc of torch.float32"),
        (DENSE, {"offset": 4096 - 1023}, "Expected a range within 4096 elements"),
        (DENSE, {"offset": 1 << 62}, "Expected a range within 4096 elements"),
        (TERNARY_PAYLOAD, {"count": 1 << 62}, "Expected a range within 4096 elements"),
        (FUSED, {"count": NUM_FUSED + 1}, f"Expected a range within {NUM_FUSED} elements"),
        (DENSE, {"length": 4097}, "Expected at most 4096 bytes, got 4097"),
        (DENSE, {"count": 1023}, "Expected at most 4092 bytes, got 4096"),
        (TERNARY_PAYLOAD, {"length": 1 << 39}, "Expected at most"),
        (AGGREGATE, {"length": 2001}, "Expected at most 2000 bytes, got 2001"),
        (AGGREGATE, {"length": 1999}, "Expected 2000 bytes, got 1999"),
        (AGGREGATE, {"length": 1}, "Expected 2000 bytes, got 1"),
        (STATS, {"length": 4}, "got 4"),
        (STATS, {"length": 1 << 20}, "Expected at most"),
        (DENSE, {"kind": FrameKind.STATS}, "Expected no STATS frames of none"),
        (DENSE, {"kind": FrameKind.AGGREGATE}, "Expected no AGGREGATE frames of none"),
        (TERNARY_PAYLOAD, {"kind": FrameKind.AGGREGATE}, "Expected no AGGREGATE frames of threelc"),
        (DENSE, {"kind": FrameKind.HELLO}, "Expected no HELLO frames"),
        (PROBE, {"length": PROBE_BYTES + 1}, "Expected a probe of 65536 bytes or none"),
        (HASH, {"length": 5}, "Expected numbers of 8 bytes, got 5"),
        (HASH, {"length": 0}, "Expected numbers of 8 bytes, got 0"),
        (HASH, {"kind": FrameKind.PAYLOAD}, "Expected numbers of 8 bytes"),
    ],
)
def test_every_other_header_is_refused_with_what_was_expected(header: Header, changed: dict, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        REGISTRY.admit(dataclasses.replace(header, **changed))


def test_the_message_names_the_frame() -> None:
    with pytest.raises(FrameError, match=r"PAYLOAD of rank 2, round 9, tensor 0, partition 4, stage 1"):
        REGISTRY.admit(dataclasses.replace(DENSE, sender=2, round=9, partition=4, stage=1, dtype=2))


def numbers(bits: int, *likely: int) -> st.SearchStrategy[int]:
    """Values that are near right, and any others."""
    return st.one_of(st.sampled_from(likely), st.integers(0, (1 << bits) - 1))


@given(
    st.builds(
        Header,
        kind=st.sampled_from(FrameKind),
        compressor=numbers(16, NONE, TERNARY, INT8),
        flags=st.sampled_from([FrameFlags(bits) for bits in range(8)]),
        sender=numbers(16, 1),
        stage=numbers(16, 0, 1),
        dtype=st.integers(0, 4),
        round=numbers(64, 0),
        tensor=numbers(32, 0, 1, 2, 3, 4, 5, 3 | FUSION_FLAG, EXCHANGE_TENSOR, PROBE_TENSOR),
        partition=numbers(32, 0),
        offset=numbers(62, 0, 1024, 4096),
        count=numbers(62, 0, 1, 1024, 4096),
        length=numbers(40, 0, 4, 2000, 4096),
    )
)
def test_any_header_is_admitted_or_a_frame_error_and_bounds_what_is_allocated(header: Header) -> None:
    try:
        REGISTRY.admit(header)
    except FrameError:
        return
    assert header.length <= max(PROBE_BYTES, *(spec.nbytes * 2 for spec in SPECS.values()))
    assert header.tensor in (EXCHANGE_TENSOR, PROBE_TENSOR) or (header.tensor & ~FUSION_FLAG) < len(SPECS)


def test_accumulators_are_as_wide_as_the_world_size_needs() -> None:
    """Above 258 ranks an element of a sum of 8-bit integers takes four bytes."""
    wide = dataclasses.replace(AGGREGATE, length=4000)
    registry(259).admit(wide)
    with pytest.raises(FrameError, match="at most 2000"):
        registry(258).admit(wide)


def test_ranks_agree_on_everything_a_header_is_checked_against() -> None:
    rows = REGISTRY.describe(SPECS)
    assert [row["name"] for row in rows] == list(SPECS)
    assert rows[2]["shape"] == [3000]
    assert rows[2]["dtype"] == "torch.float16"
    assert rows[2]["compressor"] == "int8shared"
    assert rows[2]["options"]["stochastic"] == "True"
    assert {"strategy", "partitions", "feedback", "batched"} < set(rows[0])
    assert [row["batched"] for row in rows] == [True, False, False, True, True]


def test_a_peer_may_be_two_whole_steps_ahead_by_bytes_and_by_frames() -> None:
    """Frames with little in them count by their headers: they cost memory as well."""
    slack = 1 << 20
    step = sum(REGISTRY.entries[name].compressor.max_encoded_bytes(spec) for name, spec in SPECS.items())
    limit = REGISTRY.early_bytes_limit()
    assert limit >= slack + 2 * step + 2 * HEADER_BYTES * len(SPECS)
    for name, spec in SPECS.items():  # accumulators are wider than payloads
        compressor = REGISTRY.entries[name].compressor
        if isinstance(compressor, SummableCompressor):
            accumulator_bytes = compressor.accumulator_size(spec) * compressor.accumulator_dtype(3).itemsize
            step += max(0, accumulator_bytes - compressor.max_encoded_bytes(spec))
    assert limit < slack + 4 * step + HEADER_BYTES * 6 * 3 * len(SPECS) + 1
    cut = TensorRegistry(Plan({"*": "topk"}, partitions=8 * 64), 8)
    cut.add({"w": TensorSpec((1,))})
    assert cut.early_bytes_limit() >= slack + 2 * HEADER_BYTES * 3 * 8 * 64


def test_a_peer_may_be_ahead_by_accumulators_that_are_wider_than_payloads() -> None:
    """Round a ring a neighbor sends the sums of a tensor nearly twice a step: here 16 bits each, of indices of 4."""
    made = TensorRegistry(Plan({"w": gw.make("thc", granularity=30)}, strategy="ring"), 64)
    made.add({"w": TensorSpec((1 << 24,))})
    assert made.early_bytes_limit() >= 2 * 2 * (2 << 24) * 63 // 64


def test_of_a_tensor_that_is_taken_whole_no_range_is_admitted() -> None:
    """Two rows of 40 from a matrix of 30 by 40 are no matrix of its rank."""
    made = TensorRegistry(Plan({"w": gw.make("powersgd", rank=2)}), 3)
    made.add({"w": TensorSpec((30, 40))})
    header = Header(FrameKind.AGGREGATE, compressor=code("powersgd"), dtype=1, count=1200, length=4 * 2 * 40)
    made.admit(header)
    made.admit(dataclasses.replace(header, kind=FrameKind.STATS, length=4 * 2 * 30))
    with pytest.raises(FrameError, match="Expected all 1200 elements, got a range"):
        made.admit(dataclasses.replace(header, count=80))
    with pytest.raises(FrameError, match="Expected at most 320 bytes"):
        made.admit(dataclasses.replace(header, length=324))


@pytest.mark.parametrize("stage", range(4))
def test_hierarchical_frames_are_dense_within_nodes_and_compressed_between(stage: int) -> None:
    made = TensorRegistry(Plan({"*": "threelc"}, strategy="hierarchical", min_elements=0), 3, lambda: ((0, 1), (2,)))
    made.add({"ternary": SPECS["ternary"]})
    dense = dataclasses.replace(DENSE, stage=stage)
    payload = dataclasses.replace(TERNARY_PAYLOAD, tensor=0, stage=stage)
    fitting, other = (dense, payload) if stage in (0, 3) else (payload, dense)
    made.admit(fitting)
    with pytest.raises(FrameError, match=r"Expected (none|threelc) of torch\.float32, got others"):
        made.admit(other)
    if fitting is dense:
        with pytest.raises(FrameError, match="Expected at most 4096 bytes"):
            made.admit(dataclasses.replace(dense, length=4097))
        with pytest.raises(FrameError, match="Expected no AGGREGATE frames of none"):
            made.admit(dataclasses.replace(dense, kind=FrameKind.AGGREGATE))
    assert made.early_bytes_limit() > 4 * SPECS["ternary"].nbytes


@pytest.mark.parametrize(
    ("nodes", "method", "strategy"),
    [
        (((0, 1, 2),), "none", "ring"),
        (((0,), (1,), (2,)), "threelc", "scatter_reduce"),
        (None, "threelc", "scatter_reduce"),
    ],
)
def test_hierarchical_comes_to_what_the_nodes_allow(nodes: Nodes | None, method: str, strategy: str) -> None:
    plan = Plan({"w": "threelc", "*": "none"}, strategy="hierarchical")
    made = TensorRegistry(plan, 3, None if nodes is None else lambda: nodes)
    made.add({"w": SPECS["ternary"], "b": SPECS["bias"]})
    assert (made.entries["w"].compressor.name, made.entries["w"].strategy) == (method, strategy)
    assert (made.entries["b"].batched, made.entries["b"].strategy) == (True, "scatter_reduce")


def test_fused_dense_frames_are_limited_by_the_elements_with_their_key() -> None:
    """Two tensors cast, one dense: cast tensors take two bytes per element, and no group holds both."""
    cast = PlanEntry(gw.make("bf16"), batched=True)
    plan = Plan.of_entries({"a": cast, "b": PlanEntry(gw.make("none"), batched=True), "c": cast})
    made = TensorRegistry(plan, 3)
    made.add({"a": TensorSpec((10,)), "b": TensorSpec((5,)), "c": TensorSpec((30,))})
    fitting = dataclasses.replace(FUSED, compressor=code("bf16"), tensor=FUSION_FLAG, count=40, length=80)
    made.admit(fitting)
    made.admit(dataclasses.replace(FUSED, tensor=1 | FUSION_FLAG, count=5, length=20))
    for changed, said in [
        ({"length": 81}, "Expected at most 80 bytes, got 81"),
        ({"count": 41}, "Expected a range within 40 elements"),
        ({"compressor": NONE}, r"Expected bf16 of torch\.float32"),
        ({"kind": FrameKind.STATS}, "Expected no STATS frames of bf16"),
        ({"tensor": 1 | FUSION_FLAG}, r"Expected none of torch\.float32"),
    ]:
        with pytest.raises(FrameError, match=said):
            made.admit(dataclasses.replace(fitting, **changed))
    payloads = 2 * 40 + 4 * 5
    assert made.early_bytes_limit() >= (1 << 20) + 2 * payloads + 2 * 2 * 3 * HEADER_BYTES


def test_a_group_does_not_begin_with_a_tensor_that_is_not_fused() -> None:
    with pytest.raises(FrameError, match="Expected int8shared"):
        REGISTRY.admit(dataclasses.replace(FUSED, tensor=2 | FUSION_FLAG))
