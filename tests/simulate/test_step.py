"""Steps in virtual time against closed forms, and what slow links and slow ranks do to them."""

import itertools
from dataclasses import replace

import pytest

from gradwire.compressors.base.registry import make
from gradwire.core.errors import OptionError
from gradwire.planner.closed_forms import route
from gradwire.planner.costs import CodecCosts, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.simulate import (
    Cluster,
    Compute,
    SimulatedGradient,
    SimulatedLink,
    SimulatedModel,
    Straggler,
    models,
    step,
)
from gradwire.simulate.sweep import SweepMethod, sweep
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from tests.simulate.costs import costs, model, onebit

RATE = 1e9  # bits a second
SECONDS_A_BYTE = 8 / RATE
ELEMENTS = 1 << 20
NBYTES = 4 * ELEMENTS
ALPHA = 100e-6


def cluster(ranks, latency=0.0, **options):
    return Cluster(ranks, SimulatedLink(RATE, latency, header_bytes=0), **options)


def closed_form(strategy, ranks, nbytes=NBYTES, alpha=ALPHA):
    """Seconds of a dense all-reduce on links that are used as well as can be."""
    share = nbytes * SECONDS_A_BYTE * (ranks - 1)
    return {
        "ring": 2 * share / ranks + 2 * (ranks - 1) * alpha,
        "scatter_reduce": 2 * share / ranks + 2 * alpha,
        "allgather": share + alpha,
    }[strategy]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce", "allgather"])
def test_a_dense_tensor_takes_its_closed_form(strategy, ranks):
    result = step(model(ELEMENTS), Plan("none", strategy=strategy), cluster(ranks, ALPHA), costs())
    assert result.seconds == pytest.approx(closed_form(strategy, ranks), rel=0.02)
    sent = {"allgather": ranks - 1}.get(strategy, 2 * (ranks - 1) / ranks) * NBYTES
    assert result.sent_bytes == pytest.approx(sent)


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce"])
def test_many_ranks_take_the_closed_form_too(strategy):
    result = step(model(1 << 24), Plan("none", strategy=strategy), cluster(1024, 1e-6), costs())
    assert result.folded
    assert result.seconds == pytest.approx(closed_form(strategy, 1024, 4 << 24, 1e-6), rel=0.02)


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce", "allgather"])
def test_the_slowest_link_sets_the_pace(strategy):
    even = step(model(ELEMENTS), Plan("none", strategy=strategy), cluster(4), costs()).seconds
    slow = cluster(4, stragglers={2: Straggler(rate_bits=RATE / 4)})
    seconds = step(model(ELEMENTS), Plan("none", strategy=strategy), slow, costs()).seconds
    # Its bytes take four times as long; what others wait for at the ends of the path adds less than one chunk.
    assert 4 * even * 0.999 <= seconds <= 4 * even * 1.5
    fast = cluster(4, stragglers={2: Straggler(rate_bits=RATE * 4)})
    assert step(model(ELEMENTS), Plan("none", strategy=strategy), fast, costs()).seconds > 0.95 * even


def test_a_late_rank_delays_the_step_of_all():
    compute = Compute(0.01, 0.02, 0.003)
    tensors = model(ELEMENTS, ready=0.02, compute=compute)
    even = step(tensors, "none", cluster(4), costs())
    late = step(tensors, "none", cluster(4, stragglers={1: Straggler(delay_seconds=0.05)}), costs())
    assert even.seconds == pytest.approx(compute.total_seconds + closed_form("ring", 4, alpha=0), rel=0.02)
    # In a ring every chunk passes through the late rank, whose gradients are the last.
    assert late.seconds == pytest.approx(even.seconds + 0.05)


def test_a_rank_of_half_the_speed_computes_and_encodes_twice_as_long():
    known = costs(onebit=onebit(encode=50e-9))
    tensors = model(ELEMENTS, ready=0.02, compute=Compute(0.0, 0.02))
    fast = step(tensors, Plan("onebit", strategy="allgather"), cluster(2), known)
    slow_cluster = cluster(2, stragglers={0: Straggler(slowdown=2)})
    slow = step(tensors, Plan("onebit", strategy="allgather"), slow_cluster, known)
    assert slow.seconds - fast.seconds == pytest.approx(0.02 + 50e-9 * ELEMENTS, rel=0.02)


def test_communication_hides_behind_the_backward():
    tensors = [SimulatedGradient(f"{index}.weight", (1024, 1024), 0.1 * index) for index in range(4)]
    one = closed_form("ring", 4, alpha=0)
    assert one < 0.1
    result = step(SimulatedModel(tensors, Compute(0.0, 0.3)), "none", cluster(4), costs())
    assert result.seconds == pytest.approx(0.3 + one, rel=0.02)
    assert result.efficiency == pytest.approx(0.3 / result.seconds)


def test_encodes_overlap_with_the_wire():
    # Encoding takes longer than sending: the step is all encodes of a rank, and the last range's way.
    known = costs(onebit=onebit(encode=50e-9))
    result = step(model(*[ELEMENTS] * 4), Plan("onebit", strategy="allgather"), cluster(2), known)
    assert result.seconds == pytest.approx(4 * 50e-9 * ELEMENTS, rel=0.02)
    # The last of four tensors waits for the processor while the others are encoded.
    assert result.split["encode"] + result.split["processor"] == pytest.approx(result.seconds, rel=0.02)
    assert sum(result.split.values()) == pytest.approx(result.seconds)


def test_frames_that_cost_the_processor_time_are_pipelined_with_the_wire():
    # A copy at each end, each as fast as the wire: fragments of a large frame pass through all three at once.
    carried = costs(frame=LinearCost(0.0, SECONDS_A_BYTE))
    result = step(model(4 * ELEMENTS), Plan("none", strategy="allgather"), cluster(2), carried)
    free = step(model(4 * ELEMENTS), Plan("none", strategy="allgather"), cluster(2), costs())
    # The transport's thread sends one frame and receives the other, so it is what sets the pace.
    assert 1.99 * free.seconds <= result.seconds <= 2.2 * free.seconds


def test_the_same_input_gives_the_same_result():
    tensors = SimulatedModel.of(models.get("resnet50"), Compute(backward_seconds=0.1))
    known = costs(1e-5, onebit=onebit(1e-10, 1e-10))
    runs = [step(tensors, "onebit", cluster(4), known) for _ in range(2)]
    assert runs[0] == runs[1]


def test_one_rank_waits_for_nobody():
    result = step(model(ELEMENTS, compute=Compute(0.1, 0.2, 0.05)), "none", cluster(1), costs())
    assert result.seconds == pytest.approx(0.35)
    assert result.sent_bytes == 0


def test_nodes_share_a_link():
    inner = SimulatedLink(None)
    flat = step(model(ELEMENTS), Plan("none", strategy="scatter_reduce"), cluster(8), costs()).seconds
    nodes = cluster(8, ranks_per_node=4, inner=inner)
    shared = step(model(ELEMENTS), Plan("none", strategy="scatter_reduce"), nodes, costs()).seconds
    # Of the 7 others 4 are behind the node's link, which 4 ranks share: 16 messages where one rank has 7.
    assert shared == pytest.approx(flat * 16 / 7, rel=0.02)


def test_gradients_out_of_order_are_refused():
    tensors = [SimulatedGradient("a.weight", (1024, 1024), 0.2), SimulatedGradient("b.weight", (1024, 1024), 0.1)]
    with pytest.raises(OptionError, match="Sort them by ready_seconds"):
        SimulatedModel(tensors, Compute(0.0, 0.3))


def test_a_trace_has_every_rank_and_what_it_did(tmp_path):
    known = costs(1e-5, onebit=onebit(1e-9, 1e-9))
    result = step(model(ELEMENTS, compute=Compute(0.0, 0.01)), "onebit", cluster(2), known)
    result.write_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    for expected in ("rank 1", "encode scatter layer0.weight", "backward", "send gather layer0.weight"):
        assert expected in text


@pytest.mark.parametrize("per_node", [2, 4])
def test_hierarchical_sends_compressed_between_nodes_and_dense_within(per_node):
    nodes = cluster(8, ranks_per_node=per_node, inner=SimulatedLink(10 * RATE, header_bytes=0))
    result = step(model(ELEMENTS), Plan("none", strategy="hierarchical"), nodes, costs())
    # Of each of 8 chunks a rank sends its gradient to the owner on its node, or as the owner the mean to the others;
    # the owners, one per node, scatter and gather.
    part, num_nodes = NBYTES / 8, 8 // per_node
    within = 2 * (per_node - 1) * part * num_nodes
    between = 2 * (num_nodes - 1) * part
    assert result.sent_bytes == pytest.approx(within + between)
    flat = step(model(ELEMENTS), Plan("none", strategy="scatter_reduce"), nodes, costs())
    assert result.seconds < 0.7 * flat.seconds


def test_an_ideal_step_has_time_for_the_links_within_nodes():
    nodes = cluster(8, ranks_per_node=4, inner=SimulatedLink(RATE / 10, header_bytes=0))
    (row,) = sweep(model(ELEMENTS), [SweepMethod("none", "hierarchical")], [nodes], costs())
    # Of each of 8 chunks, a rank sends its gradient to the owner on its node, or as the owner the mean to 3 others.
    within = 2 * 3 * 2 * NBYTES / 8
    assert row.ideal_seconds == pytest.approx(within * 10 * SECONDS_A_BYTE)
    assert row.ideal_seconds <= row.step_seconds


@pytest.mark.parametrize("inner_rate", [None, 1e10])
@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10])
@pytest.mark.parametrize("per_node", [2, 4])
@pytest.mark.parametrize(("strategy", "partitions"), [
    ("allgather", 1), *itertools.product(("hierarchical", "scatter_reduce", "ring"), (1, 2, 4, 8)),
])  # fmt: skip
def test_the_planners_forms_hold_on_nodes_of_several_ranks(strategy, partitions, per_node, rate, inner_rate):
    ranks, known = 8, costs(onebit=onebit(1e-9, 1e-9))
    gradients = model(ELEMENTS)
    plan = Plan({gradient.name: "onebit" for gradient in gradients.gradients}, strategy=strategy, partitions=partitions)
    inner = SimulatedLink(None) if inner_rate is None else SimulatedLink(inner_rate, ALPHA, header_bytes=0)
    within = LinkCosts(0.0, 0.0) if inner_rate is None else LinkCosts(ALPHA, 8 / inner_rate)
    cluster = Cluster(ranks, SimulatedLink(rate, ALPHA, header_bytes=0), ranks_per_node=per_node, inner=inner)
    simulated = step(gradients, plan, cluster, known).seconds
    shared = LinkCosts(ALPHA, per_node * 8 / rate)  # as it is measured: all ranks of a node send
    nodes = replace(known, world_size=ranks, links=(shared,), ranks_per_node=per_node, within=within)
    assert 0.8 <= route("onebit", strategy, partitions, ELEMENTS, nodes).seconds / simulated <= 1.3


@pytest.mark.parametrize("rate", [2e7, 1e8])
@pytest.mark.parametrize("per_node", [2, 4])
def test_so_they_do_for_tensors_that_are_fused(per_node, rate):
    """A group has all ranks for owners, so that none of them has the link of its node to itself."""
    tensors, numel, known = 32, 1 << 16, costs(onebit=onebit(1e-9, 1e-9))
    gradients = SimulatedModel([SimulatedGradient(f"w{index}", (numel,)) for index in range(tensors)])
    plan = Plan({"w*": "onebit"}, strategy="scatter_reduce", partitions=1)
    cluster = Cluster(8, SimulatedLink(rate, ALPHA, header_bytes=0), ranks_per_node=per_node)
    simulated = step(gradients, plan, cluster, known).seconds
    shared = LinkCosts(ALPHA, per_node * 8 / rate)
    nodes = replace(known, world_size=8, links=(shared,), ranks_per_node=per_node, within=LinkCosts(0.0, 0.0))
    each = route("onebit", "scatter_reduce", 1, numel, nodes, fused=tensors).seconds
    assert 0.8 <= each * tensors / 8 / simulated <= 1.3


def test_hierarchical_with_a_rank_a_node_is_scatter_reduce():
    known = costs(1e-5, onebit=onebit(1e-9, 1e-9))
    flat, nodes = (
        step(model(ELEMENTS), Plan("onebit", strategy=strategy), cluster(4), known)
        for strategy in ("scatter_reduce", "hierarchical")
    )
    assert nodes == flat


def test_small_tensors_travel_together_by_kind_and_cast_ones_at_half_the_bytes():
    known = costs(bf16=CodecCosts(LinearCost(0, 0), LinearCost(0, 0), LinearCost(0, 0), LinearCost(0, 2)))
    tensors = [SimulatedGradient(f"b{index}", (4096,)) for index in range(4)]
    cast, dense = (PlanEntry(make(name), batched=True) for name in ("bf16", "none"))
    for entries, num_bytes in (([dense] * 4, 16), ([cast] * 4, 8), ([cast, dense, cast, dense], 12)):
        plan = Plan.of_entries({tensor.name: entry for tensor, entry in zip(tensors, entries)})
        result = step(SimulatedModel(tensors), plan, cluster(4), known)
        assert result.sent_bytes == pytest.approx(2 * 3 / 4 * 4096 * num_bytes)


def test_hierarchical_on_one_node_is_dense():
    known = costs(onebit=onebit())
    result = step(model(ELEMENTS), Plan("onebit", strategy="hierarchical"), cluster(4, ranks_per_node=4), known)
    assert result.sent_bytes == pytest.approx(2 * 3 / 4 * NBYTES)
