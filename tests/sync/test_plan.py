from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry

MATRIX = TensorSpec((512, 512))


def test_blanket_rule_leaves_vectors_and_small_tensors_dense_in_a_batch() -> None:
    plan = Plan("threelc")
    assert plan.entry("weight", MATRIX).compressor.name == "threelc"
    for small in (TensorSpec((1 << 20,)), TensorSpec((10, 10)), TensorSpec(())):
        entry = plan.entry("weight", small)
        assert (entry.compressor.name, entry.feedback, entry.batched) == ("none", "none", True)


def test_a_rule_that_names_a_tensor_is_honored_for_every_size() -> None:
    plan = Plan({"*.bias": "onebit", "*": "threelc"})
    entry = plan.entry("fc.bias", TensorSpec((10,)))
    assert (entry.compressor.name, entry.batched) == ("onebit", False)


def test_the_first_matching_rule_counts() -> None:
    plan = Plan({"head.*": "none", "h*": gw.make("topk", ratio=0.1), "*": "fp16"}, min_elements=0)
    assert plan.entry("head.weight", MATRIX).compressor.name == "none"
    assert plan.entry("hidden.weight", MATRIX).compressor.options == {"ratio": 0.1, "warmup": 0}
    assert plan.entry("embed.weight", MATRIX).compressor.name == "fp16"


def test_names_with_brackets_are_patterns_that_match_themselves() -> None:
    plan = Plan({"d.w[0]": "topk", "d.[a-c]": "onebit", "*": "none"}, min_elements=0)
    specs = {name: TensorSpec((64, 64)) for name in ("d.w[0]", "d.v", "d.b")}
    assert [plan.entry(name, spec).compressor.name for name, spec in specs.items()] == ["topk", "none", "onebit"]
    assert plan.notes(specs) == []


def test_float64_travels_dense_under_exact_compressors() -> None:
    found = [Plan("lossless").entry("w", TensorSpec((64, 64), dtype)) for dtype in (torch.float32, torch.float64)]
    assert [(entry.compressor.name, entry.strategy) for entry in found] == [("lossless", "ring"), ("none", "ring")]


def test_options_may_be_part_of_a_name() -> None:
    plan = Plan({"head.*": "topk:ratio=0.5", "*": "threelc:sparsity=1.5"})
    assert plan.entry("head.weight", MATRIX).compressor.options["ratio"] == 0.5
    assert plan.entry("w", MATRIX).compressor.options["sparsity"] == 1.5


SPECS = {"embed.weight": MATRIX, "layers.0.weight": MATRIX, "layers.0.bias": TensorSpec((512,))}


@pytest.mark.parametrize(
    ("rules", "note"),
    [
        ({"embd.*": "topk", "*": "threelc"}, "'embd.*' matches no parameter. Did you mean 'embed.*'?"),
        ({"*.biases": "none", "*": "threelc"}, "'*.biases' matches no parameter. Did you mean '*.bias'?"),
        ({"zzz": "none", "*": "threelc"}, "'zzz' matches no parameter. A name of this model is 'embed.weight'."),
        ({"*": "threelc", "*.bias": "none"}, "'*.bias' has no effect: earlier rules match all its tensors (*)."),
    ],
)
def test_a_rule_without_effect_is_noted(rules: dict[str, str], note: str) -> None:
    (found,) = Plan(rules).notes(SPECS)
    assert note in found


def test_a_catch_all_that_has_nothing_left_and_rules_that_match_are_not_noted() -> None:
    assert Plan({"embed.*": "topk", "layers.*": "threelc", "*": "none"}).notes(SPECS) == []
    assert Plan("threelc").notes(SPECS) == []
    assert Plan("threelc").notes({}) == []


def test_a_plan_that_compresses_nothing_notes_why_and_what_to_pass() -> None:
    small = {"0.weight": TensorSpec((8, 16)), "0.bias": TensorSpec((4096,))}
    (note,) = Plan("topk").notes(small)
    assert "topk compresses nothing: all 2 tensors are vectors or smaller than min_elements=1,600" in note
    assert "The largest, '0.weight', has 128 elements" in note and "Pass min_elements=0" in note
    assert Plan("topk", min_elements=0).notes(small) == []
    assert Plan("none").notes(small) == [], "nothing was asked for"
    assert len(Plan({"zzz": "topk", "*": "none"}).notes(small)) == 1, "that a rule has nothing to do says it"


@pytest.mark.parametrize(
    ("method", "smallest"),
    [("threelc", 1024), ("topk:ratio=0.01", 1600), ("topk:ratio=0.5", 1024), ("dgc", 16_000), ("dragonn", 16_000)],
)
def test_by_default_a_sparsifier_takes_tensors_of_which_it_keeps_sixteen_elements(method: str, smallest: int) -> None:
    """Others take those of 1,024 elements. A number of the user's and a rule that names tensors count for all."""
    fitting, small = (TensorSpec((count, 1)) for count in (smallest, smallest - 1))
    assert not Plan(method).entry("w", fitting).compressor.dense
    assert Plan(method).entry("w", small).compressor.dense
    for plan in (Plan(method, min_elements=smallest - 1), Plan({"w*": method})):
        assert not plan.entry("w", small).compressor.dense


def test_feedback_is_each_compressors_default_unless_said() -> None:
    assert Plan("threelc").entry("w", MATRIX).feedback == "error"
    assert Plan("int8").entry("w", MATRIX).feedback == "none"
    assert Plan("threelc", feedback="none").entry("w", MATRIX).feedback == "none"
    assert Plan("none", feedback="error").entry("w", MATRIX).feedback == "none", "there is nothing to feed back"


@pytest.mark.parametrize(
    ("make", "error", "advice"),
    [
        (lambda: Plan("threelcc"), UnknownNameError, "Did you mean 'threelc'?"),
        (
            lambda: Plan("threelc", strategy="tree"),
            UnknownNameError,
            "Known: allgather, hierarchical, ring, scatter_reduce",
        ),
        (lambda: Plan("threelc", feedback="momenta"), UnknownNameError, "Known: error, momentum, none"),
        (lambda: Plan("threelc", partitions=0), OptionError, "but it is 0. Pass 1 to leave tensors whole"),
        (lambda: Plan("threelc", partitions=10**12), OptionError, "at most 65,536, but it is 1000000000000"),
        (lambda: Plan("threelc", min_elements=-1), OptionError, "Pass 0 to compress all"),
        (lambda: Plan("3lc"), UnknownNameError, "Did you mean 'threelc'?"),
        (lambda: Plan("threelc", strategy="Scatter-Reduce"), UnknownNameError, "Did you mean 'scatter_reduce'?"),
        (lambda: Plan(["topk"]), OptionTypeError, "Pass 'topk'."),
        (lambda: Plan({"*": torch.float16}), OptionTypeError, "Pass 'fp16'."),
        (lambda: Plan({0: "topk"}), OptionTypeError, "a pattern of parameter names"),
        (lambda: Plan({}), OptionError, '{"*": "threelc"}'),
        (lambda: Plan("auto").entry("w", MATRIX), OptionError, "Name a compressor here."),
        (lambda: Plan({"a": "none"}).entry("b", MATRIX), OptionError, 'Add a rule "*"'),
        (lambda: TensorSpec((3,), torch.int32), UnknownNameError, "torch.float32"),
    ],
)
def test_mistakes_get_advice(make: object, error: type[Exception], advice: str) -> None:
    with pytest.raises(error) as caught:
        make()  # type: ignore[operator]
    assert advice in str(caught.value)


def test_what_is_dense_by_choice_takes_the_ring_unless_a_strategy_is_named() -> None:
    for spec in (MATRIX, TensorSpec((10,))):
        entry = Plan("none").entry("w", spec)
        assert entry.batched and entry.strategy == "ring"
    small = Plan("threelc").entry("b", TensorSpec((10,)))
    assert small.batched and small.strategy == "scatter_reduce"
    assert [Plan("lossless").entry("w", spec).strategy for spec in (MATRIX, TensorSpec((10,)))] == [
        "ring",
        "scatter_reduce",
    ]
    assert Plan("none", strategy="allgather").entry("w", MATRIX).strategy == "allgather"
    assert Plan("threelc").entry("w", MATRIX).strategy == "scatter_reduce"


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_a_batch_is_dense_or_cast_and_without_feedback(name: str) -> None:
    entry = PlanEntry(gw.make(name), batched=True)
    assert Plan.of_entries({"w": entry}).entry("w", MATRIX) == entry
    for wrong in (PlanEntry(gw.make("onebit"), batched=True), PlanEntry(gw.make(name), feedback="error", batched=True)):
        with pytest.raises(OptionError, match="batched entries must have none, fp16 or bf16 without feedback"):
            Plan.of_entries({"w": wrong})


def test_a_blanket_rule_keeps_small_tensors_dense_even_where_it_casts() -> None:
    for name in ("fp16", "bf16", "onebit"):
        entry = Plan(name).entry("bias", TensorSpec((10,)))
        assert (entry.compressor.name, entry.batched) == ("none", True)
