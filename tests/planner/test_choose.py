"""The planner's choices: brute force, promises, and which way they turn."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.planner import schedule
from gradwire.planner.choose import plan, uniform
from gradwire.planner.closed_forms import native_seconds, route
from gradwire.planner.costs import CodecCosts, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.fidelity import DENSE, EVERYWHERE, RankedCompressor, methods
from gradwire.planner.options import PlannedTensor, best_alone, options, partition_counts
from gradwire.planner.schedule import ScheduledTensor
from gradwire.planner.table import PlanTable
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, SimulatedModel, step
from gradwire.sync.plan import Plan
from tests.planner.machines import METHODS, any_costs, codecs, costs

models = st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 0.2)), min_size=1, max_size=5)


def gradients(*rows_and_ready):
    """Matrices of so many rows of a thousand, and when they are ready."""
    return [PlannedTensor(f"w{index}", (rows, 1000), ready=ready) for index, (rows, ready) in enumerate(rows_and_ready)]


@given(any_costs, st.integers(1, 10**8))
def test_the_best_alone_is_that_of_brute_force(job, numel):
    found = best_alone(options(PlannedTensor("w", (numel,)), job, METHODS))
    every = [
        route(method.spec, strategy, count, numel, job).seconds
        for method in (DENSE, *METHODS)
        for strategy in method.strategies
        for shares in (1 if strategy == "allgather" else job.world_size,)
        for count in {shares, *partition_counts(numel, shares)}
        if count <= job.world_size or not (strategy == "scatter_reduce" and method.spec in ("lanes", "stats"))
    ]
    assert found.route.seconds == min(every)


@given(st.integers(1, 10**8), st.integers(1, 64))
def test_partitions_are_tried_from_one_to_sixteen_for_each_rank(numel, shares):
    counts = partition_counts(numel, shares)
    blocks = -(-numel // 1024)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == min(16 * shares, blocks)
    assert blocks < shares or shares in counts


@settings(max_examples=50)
@given(any_costs, models, st.floats(0, 0.5), st.floats(0, 0.1))
def test_no_plan_is_slower_than_dense(job, drawn, rest, min_gain):
    table = plan(gradients(*drawn), job, METHODS, rest=rest, min_gain=min_gain)
    dense = min(table.dense_step, table.native_step)
    backward = max(ready for _, ready in drawn)
    assert table.step <= dense
    assert table.step >= max(table.ideal_step, rest + backward) * (1 - 1e-9)
    if table.compresses:
        assert table.step <= (1 - min_gain) * dense
        assert not table.native


@settings(max_examples=25)
@given(any_costs, st.lists(st.tuples(st.integers(20, 5000), st.floats(0, 0.2)), min_size=1, max_size=3))
def test_the_step_is_close_to_the_best_of_all_combinations(job, drawn):
    """The search is greedy; over every combination of three tensors it is at most a little behind."""
    tensors = sorted(gradients(*drawn), key=lambda tensor: tensor.ready)
    methods = [method for method in METHODS if method.spec in ("half", "bit")]
    backward = max(ready for _, ready in drawn)
    choices = [options(tensor, job, methods, (1, 4)) for tensor in tensors]
    least = min(
        schedule.run([ScheduledTensor(tensor.ready, pick.route) for tensor, pick in zip(tensors, picks)]).finish
        for picks in itertools.product(*(_thinned(found) for found in choices))
    )
    table = plan(tensors, job, methods, partitions=(1, 4), min_gain=0.0)
    assert table.step <= 1.05 * max(backward, least)


def _thinned(found):
    """Per compressor and strategy the better number of partitions."""
    groups = itertools.groupby(found, key=lambda option: option[:2])
    return [min(group, key=lambda option: option.route.seconds) for _, group in groups]


def test_a_faster_link_turns_to_dense_and_a_slower_one_to_compression():
    tensors = gradients((4000, 0.01), (4000, 0.02), (4000, 0.03))
    kinds = [plan(tensors, costs(rate=rate), METHODS).compresses for rate in (1e7, 1e8, 1e9, 1e10, 1e11, 1e12)]
    assert kinds[0]
    assert not kinds[-1]
    assert kinds == sorted(kinds, reverse=True)


def test_a_slower_codec_turns_to_dense():
    tensors = gradients((4000, 0.01), (4000, 0.02))
    assert plan(tensors, costs(rate=1e9), METHODS).compresses
    # Dense gradients pass through the codec, too: here it is only the compressors that are slow.
    slow = replace(costs(rate=1e9), codecs=costs(speed=1000).codecs | {"none": costs().codecs["none"]})
    assert not plan(tensors, slow, METHODS).compresses


def test_tensors_are_cut_into_more_ranges_than_ranks_only_where_the_step_waits_for_them():
    tensors = [PlannedTensor(f"w{index}", (1312, 1312), ready=0.05 * index) for index in range(4)]
    rows = plan(tensors, costs(4, rate=1e9), METHODS[1:2]).rows
    assert {row.spec for row in rows} == {"bit"}
    assert [row.partitions for row in rows[:3]] == [4, 4, 4] and rows[3].partitions > 4


def test_nothing_is_compressed_where_the_backward_hides_it():
    table = plan(gradients((1000, 0.0), (10, 2.0)), costs(rate=1e9), METHODS)
    assert not table.compresses
    assert table.limit == "backward"


def test_only_what_the_backward_does_not_hide_is_compressed():
    table = plan(gradients((4000, 0.0), (4000, 1.0)), costs(rate=1e9), METHODS)
    assert [row.spec == "none" for row in table.rows] == [True, False]


@pytest.mark.parametrize(("seconds", "dense"), [(0.25, False), (0.5, True)])
def test_what_the_backward_hides_only_just_is_compressed(seconds, dense):
    """The first tensor takes 0.19 s dense. It must be hidden even if that takes twice as long."""
    rows = plan(gradients((4000, 0.0), (4000, seconds)), costs(rate=1e9, latency=0), METHODS).rows
    assert (rows[0].spec == "none") == dense


def test_between_equals_the_higher_fidelity_wins():
    tensors = gradients((1000, 0.0), (1, 0.15))  # the second travels dense, whatever becomes of the first
    hidden_by_half = plan(tensors, costs(rate=2.5e8), METHODS)
    assert [row.spec for row in hidden_by_half.rows] == ["half", "none"]


def test_a_gain_that_is_too_small_is_not_taken():
    tensors = gradients((4000, 0.01))
    gain = plan(tensors, costs(), METHODS, rest=1.0, min_gain=0.0)
    assert gain.compresses
    share = 1 - gain.step / min(gain.dense_step, gain.native_step)
    assert plan(tensors, costs(), METHODS, rest=1.0, min_gain=share - 0.01).compresses
    assert not plan(tensors, costs(), METHODS, rest=1.0, min_gain=share + 0.01).compresses


def test_small_tensors_and_vectors_travel_dense_and_together():
    tensors = [PlannedTensor("bias", (100_000,)), PlannedTensor("small", (10, 10)), *gradients((1000, 0.0))]
    rows = {row.name: row for row in plan(tensors, costs(rate=1e8), METHODS).rows}
    assert rows["bias"].batched
    assert rows["small"].batched
    assert rows["bias"].spec == "none"
    assert not rows["w0"].batched
    both = route("none", rows["bias"].strategy, rows["bias"].partitions, 100_100, costs(rate=1e8)).seconds
    assert rows["bias"].total + rows["small"].total == pytest.approx(both)


def test_velocities_leave_large_dense_tensors_in_as_many_ranges_as_planned():
    """Nothing is batched then. A tensor that one rank owned whole would pass its link W - 1 times."""
    job = costs(8, rate=1e9, codecs={"none": codecs()["none"], "threelc": codecs()["bit"]})
    methods = [RankedCompressor("threelc", ("allgather",))]
    tensors = [*gradients((9000, 0.0), (9000, 10.0)), PlannedTensor("bias", (1000,))]
    table = plan(tensors, job, methods, feedback="momentum")
    without = {row.name: row for row in plan(tensors, job, methods).rows}
    assert without["w0"].spec == "none" and without["w0"].batched
    rows = {row.name: row for row in table.rows}
    assert not any(row.batched for row in table.rows)
    assert rows["w0"].spec == "none" and rows["w0"].partitions >= 8
    assert (rows["bias"].strategy, rows["bias"].partitions) == ("scatter_reduce", 1)


CAST = [RankedCompressor("fp16", EVERYWHERE), RankedCompressor("bf16", EVERYWHERE)]


def casting(**network):
    """Costs of both casts, fp16's the better."""
    job = costs(**network)
    slower = replace(job.codecs["half"], encode=LinearCost(0, 3e-10))
    return replace(job, codecs={"none": job.codecs["none"], "fp16": job.codecs["half"], "bf16": slower})


def small_ones(dtype=torch.float32):
    return [PlannedTensor(f"b{index}", (4000,), dtype, ready=index * 1e-4) for index in range(60)]


def test_batches_are_cast_where_that_makes_the_step_shorter():
    for tensors in (small_ones(), [*small_ones(), *gradients((100, 0.0))]):
        table = plan(tensors, casting(rate=1e8), CAST, native=("fp32",))
        small = [row for row in table.rows if row.batched]
        assert len(small) == 60
        assert {row.spec for row in small} == {"bf16"}
        assert table.compresses
        assert table.step < 0.8 * table.dense_step
        dense = plan(tensors, casting(rate=1e8), [DENSE])
        assert {row.spec for row in dense.rows} == {"none"}
        assert dense.dense_step == table.dense_step
        assert dense.step == min(dense.dense_step, dense.native_step)
        each = route("bf16", small[0].strategy, small[0].partitions, 4000, casting(rate=1e8)).seconds
        assert sum(row.total for row in small) == pytest.approx(60 * each)


def test_batches_stay_as_they_are_where_casting_gains_nothing():
    hidden = [*small_ones(), PlannedTensor("last", (4000,), ready=1.0)]
    for table in (
        plan(small_ones(), casting(rate=1e12), CAST),
        plan(hidden, casting(rate=1e9), CAST),
        plan(small_ones(torch.float16), casting(rate=1e8), CAST),
        plan(small_ones(), costs(rate=1e8), METHODS),  # none of them is a cast
        uniform(small_ones(), casting(rate=1e8), CAST[1]),
    ):
        assert {row.spec for row in table.rows} == {"none"}
        assert not table.compresses


def test_batches_of_16_bits_stay_as_they_are_while_others_are_cast():
    tensors = [*small_ones(), PlannedTensor("half", (4000,), torch.float16)]
    table = plan(tensors, casting(rate=1e8), CAST, native=("fp32",))
    assert {row.spec for row in table.rows if row.name != "half"} == {"bf16"}
    assert next(row.spec for row in table.rows if row.name == "half") == "none"


def test_the_frameworks_all_reduce_is_taken_where_it_is_faster_than_anything():
    tensors = gradients((1000, 0.0))
    fast = replace(costs(rate=1e9), native=LinkCosts(0.0, 1e-11))
    table = plan(tensors, fast, METHODS)
    assert table.native
    assert not table.compresses
    assert table.step == table.native_step == pytest.approx(native_seconds(4_000_000, fast))
    slow = replace(costs(rate=1e9), native=LinkCosts(1.0, 1e-6))
    assert not plan(tensors, slow, [DENSE]).native


def test_a_plan_must_also_beat_ddps_fp16_hook_where_it_is_allowed():
    tensors, job = gradients((1000, 0.0)), costs(rate=1e9, latency=0)
    half = plan(tensors, job, [DENSE], native=("fp32", "fp16"))
    assert half.native and half.native_kind == "fp16"
    assert half.step == half.native_step == pytest.approx(native_seconds(2_000_000, job))
    assert "by DDP's fp16 hook. Use that, and do not attach this plan, with which a step takes" in half.verdict()
    assert plan(tensors, casting(rate=1e9, latency=0), [DENSE, CAST[0]]).native_kind == "fp16"
    assert plan(tensors, casting(rate=1e9, latency=0), [DENSE, CAST[1]]).native_kind == "fp32"
    shorts = [PlannedTensor("w", (1000, 1000), torch.bfloat16)]  # of two bytes already
    assert plan(shorts, job, [DENSE], native=("fp16",)).native_step == pytest.approx(half.step)
    # Without any, gradwire's own dense step is what a plan must beat.
    alone = plan(tensors, replace(job, native=LinkCosts(0.0, 1e-12)), METHODS, native=())
    assert alone.compresses and not alone.native and alone.native_step == alone.dense_step
    assert "by gradwire, dense" in alone.verdict()
    with pytest.raises(UnknownNameError, match="fp8"):
        plan(tensors, job, [DENSE], native=("fp8",))


def test_the_frameworks_buckets_follow_each_other():
    tensors = gradients((1000, 0.0), (1000, 0.1), (1000, 0.2))
    job = costs(rate=1e9)
    one, two = native_seconds(4_000_000, job), native_seconds(8_000_000, job)
    assert one < 0.1
    assert plan(tensors, job, [DENSE], bucket_bytes=1).native_step == pytest.approx(0.2 + one)
    assert plan(tensors, job, [DENSE], bucket_bytes=25 << 20).native_step == pytest.approx(0.2 + two), "1 MiB first"
    handed_over = gradients((1000, 0.1), (1000, 0.2), (1000, 0.2))
    for bucket_bytes in (25 << 20, None):
        found = plan(handed_over, job, [DENSE], bucket_bytes=bucket_bytes).native_step
        assert found == pytest.approx(max(0.2, 0.1 + one) + two)


def test_half_precision_gradients_are_dense_at_half_the_bytes():
    full, half = (PlannedTensor("w", (1000, 1000), dtype) for dtype in (torch.float32, torch.bfloat16))
    job = costs(rate=1e8)
    assert plan([half], job, [DENSE]).native_step == pytest.approx(plan([full], job, [DENSE]).native_step / 2, rel=0.01)
    assert plan([full], job, METHODS[:1]).compresses
    assert not plan([half], job, METHODS[:1]).compresses  # two bytes already


def test_the_same_arguments_give_the_same_plan():
    tensors = gradients((3000, 0.0), (2000, 0.01), (1000, 0.02))
    assert plan(tensors, costs(), METHODS) == plan(tensors[::-1], costs(), METHODS)


@pytest.mark.parametrize("rate", [1e8, 1e12])
def test_a_uniform_plan_compresses_whether_it_pays_or_not(rate):
    tensors = [*gradients((3000, 0.0), (2000, 0.01)), PlannedTensor("bias", (1000,), ready=0.02)]
    job = costs(rate=rate, latency=0)
    for method in METHODS:
        table = uniform(tensors, job, method, rest=0.5)
        assert [row.spec for row in table.rows] == [method.spec, method.spec, "none"]
        assert len({row.strategy for row in table.rows[:2]}) == 1
        assert table.step >= 0.52 and not table.native
        assert table.native_step == plan(tensors, job, [DENSE], rest=0.5).native_step
        assert (table.step < table.dense_step) == (rate == 1e8)


def test_hierarchical_is_an_option_where_nodes_have_several_ranks_and_a_slow_link():
    tensors = gradients((3000, 0.0), (2000, 0.01))
    within = LinkCosts(1e-6, 1e-10)
    nodes = replace(costs(world_size=8, rate=1e8), ranks_per_node=4, within=within)
    found = {row.strategy for row in plan(tensors, nodes, METHODS).rows}
    assert found == {"hierarchical"}
    for alone in (costs(world_size=8, rate=1e8), replace(nodes, ranks_per_node=8)):  # a rank a node, and one node
        assert "hierarchical" not in {row.strategy for row in plan(tensors, alone, METHODS).rows}
    slow = replace(nodes, within=LinkCosts(1e-6, 1e-7))  # as slow as the link between nodes
    assert "hierarchical" not in {row.strategy for row in plan(tensors, slow, METHODS).rows}


def test_powersgd_is_planned_by_the_bytes_of_shapes():
    square = CodecCosts(LinearCost(1e-4, 1e-9), LinearCost(1e-4, 1e-9), LinearCost(1e-4, 1e-9), LinearCost(0, 0.01),
                        LinearCost(1e-4, 1e-9), LinearCost(0, 0.01), LinearCost(1e-6, 1e-10), LinearCost(1e-4, 1e-9),
                        LinearCost(0, 0.01), squares=True)  # fmt: skip
    job = costs(rate=1e8, codecs={**codecs(), "powersgd": square})
    method = RankedCompressor("powersgd", ("scatter_reduce",))
    shapes = (100_000, 10), (1000, 1000)
    tall, wide = (uniform([PlannedTensor("w", shape)], job, method).rows[0] for shape in shapes)
    assert tall.spec == wide.spec == "powersgd" and tall.partitions == wide.partitions == 1
    # Factors of 4 (n + m) elements, each sent to and from one owner of four.
    assert tall.wire > 20 * wide.wire
    # One owner would have to send and receive more of the tall one than dense ranks do.
    chosen = [plan([PlannedTensor("w", shape)], job, [method]) for shape in shapes]
    assert [table.compresses for table in chosen] == [False, True]
    assert PlanTable.from_json(chosen[1].to_json()).plan().entries


def test_a_fidelity_names_methods_that_must_be_measured():
    with pytest.raises(UnknownNameError, match="measured compressor 'fp16'"):
        plan(gradients((100, 0.0)), costs(), fidelity="near-lossless")
    assert plan(gradients((1000, 0.0)), costs(rate=1e7), fidelity="exact").compresses
    with pytest.raises(UnknownNameError, match="Known: aggressive, balanced, exact, near-lossless"):
        plan(gradients((100, 0.0)), costs(), fidelity="lossy")


@pytest.mark.parametrize(("rate", "expected"), [(1e7, {"lossless"}), (1e11, {"none"}), (1e12, {"none"})])
def test_without_loss_gradients_are_compressed_only_where_the_link_is_slow(rate, expected):
    table = plan(gradients((3000, 0.0), (2000, 0.01)), costs(rate=rate), fidelity="exact")
    assert {row.spec for row in table.rows} == expected


def test_gcomp_is_considered_where_it_was_measured():
    made = codecs()
    measured = {method.spec: made["half"] for method in methods("near-lossless")} | {"none": made["none"]}
    gcomp = replace(made["lossless"], payload_bytes=LinearCost(8, 1.5))
    for more, expected in (({}, "fp16"), ({"gcomp": gcomp}, "gcomp")):
        known = costs(rate=1e6, codecs=measured | {"lossless": made["lossless"]} | more)
        found = plan(gradients((1000, 0.0)), known, fidelity="near-lossless", native=("fp32",))
        assert found.rows[0].spec == expected


@pytest.mark.parametrize(
    ("num_tensors", "more", "advice"),
    [
        (0, {}, "Pass the gradients of a model"),
        (1, {"partitions": (0,)}, r"not \[0\]\. Pass for example \(1, 2, 4\)"),
        (1, {"min_gain": 1.0}, r"not 1\.0\. Pass for example 0\.02"),
    ],
)
def test_nonsense_is_refused(num_tensors, more, advice):
    with pytest.raises(OptionError, match=advice):
        plan(gradients((1, 0.0))[:num_tensors], costs(), METHODS, **more)


def test_dense_velocities_are_encoded_and_decoded():
    """They are not added where they are (`PlanEntry.adds_in_place`)."""
    job = costs(4, rate=4e10, codecs={"none": codecs(speed=30)["none"]})
    tensors = gradients(*((4000, 0.0) for _ in range(4)))
    without, velocities = (plan(tensors, job, [DENSE], native=(), feedback=each) for each in ("", "momentum"))
    assert velocities.dense_step > 1.05 * without.dense_step
    model = SimulatedModel([SimulatedGradient(each.name, each.shape, 0.0) for each in tensors])
    cluster = Cluster(4, SimulatedLink.measured(job.slowest))
    for table in (without, velocities):
        simulated = step(model, Plan.of_entries(table.entries()), cluster, job).seconds
        assert table.step == pytest.approx(simulated, rel=0.15)


def test_exact_compressors_send_every_byte_of_float64():
    job = costs(rate=1e8)
    for dtype, spec in ((torch.float32, "lossless"), (torch.float64, "none")):
        tensor = PlannedTensor("w", (2048, 1024), dtype)
        (row,) = plan([tensor], job, [RankedCompressor("lossless", EVERYWHERE)], min_elements=0).rows
        assert row.spec == spec


def test_what_the_link_carries_for_other_tensors_is_part_of_the_plan():
    """Backward hides a tensor alone, and not behind one that the plan must leave as it is."""
    job, tensors = costs(rate=1e9, latency=0), gradients((4000, 0.0), (10, 0.5))
    large = PlannedTensor("head", (16000, 1000), ready=0.0)
    given = [(large, route("none", "ring", 4, large.numel, job))]
    alone, crowded = (plan(tensors, job, METHODS, given=each) for each in ((), given))
    assert not alone.compresses and crowded.compresses
    assert crowded.dense_step > alone.dense_step + 0.3
    assert crowded.native_step == pytest.approx(plan([*tensors, large], job, METHODS).native_step)
    assert {row.name for row in crowded.rows} == {"w0", "w1"}
