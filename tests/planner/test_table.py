"""The plan table: what people read, what files keep, what a `Plan` takes."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.planner import PlannedTensor, PlanTable, plan
from gradwire.planner.fidelity import RankedCompressor
from gradwire.planner.table import seconds
from gradwire.sync.synchronizer import GradientSlice
from tests.planner.machines import METHODS, costs
from tests.sync.harness import ranks


@pytest.fixture(scope="module")
def table():
    job = costs(rate=1e8)
    job = replace(job, codecs={"none": job.codecs["none"], "threelc:sparsity=1.5": job.codecs["bit"]})
    tensors = [
        PlannedTensor("fc.weight", (1000, 1000), ready=0.01),
        PlannedTensor("fc.bias", (1000,), ready=0.01),
        PlannedTensor("conv.weight", (64, 64, 3, 3), ready=0.02),
        PlannedTensor("conv.bias", (64,), ready=0.02),
    ]
    return plan(tensors, job, [RankedCompressor("threelc:sparsity=1.5", ("scatter_reduce",))], rest=0.01)


def test_a_table_reads_as_columns_and_a_sentence(table):
    lines = str(table).splitlines()
    assert lines[0] == "Plan for 4 ranks, fidelity threelc:sparsity=1.5"
    assert lines[2].split()[:3] == ["tensor", "elements", "ready"]
    assert lines[3].split()[:5] == ["fc.weight", "1,000,000", "10", "ms", "threelc:sparsity=1.5"]
    assert lines[5].startswith("2 dense tensors")
    assert "1,064" in lines[5]
    assert len({len(line) for line in lines[3:5]}) == 1
    assert lines[-1].startswith("Compress 2 of 4 tensors (threelc:sparsity=1.5): a step of")
    assert "times faster. What limits it: link; ideal is" in lines[-1]


def test_a_dense_table_says_so():
    dense = plan([PlannedTensor("w", (1000, 1000))], costs(rate=1e12), fidelity="exact")
    assert "Do not compress: no plan promises to save enough of a step of" in str(dense)


def test_a_file_gives_back_the_table(table, tmp_path):
    table.pin().save(tmp_path / "plan.json")
    found = PlanTable.load(tmp_path / "plan.json")
    assert found == replace(table, pinned=True)
    assert ", pinned" in str(found)
    text = (tmp_path / "plan.json").read_text()
    assert sum('"name": ' in line for line in text.splitlines()) == 4  # a line a tensor
    assert json.loads(text)["version"] == 2


def test_a_plan_of_the_tables_entries_is_what_was_decided(table):
    made = table.plan()
    for row in table.rows:
        entry = made.entry(row.name, TensorSpec((row.numel,), getattr(torch, row.dtype)))
        assert (entry.strategy, entry.partitions, entry.batched) == (row.strategy, row.partitions, row.batched)
    large = made.entry("fc.weight", TensorSpec((1000, 1000)))
    assert large.describe(4)["options"]["sparsity"] == "1.5"
    assert large.feedback == "error"
    assert made.entry("fc.bias", TensorSpec((1000,))).feedback == "none"


def test_tensors_that_share_messages_are_shown_as_fused(table):
    row = next(row for row in table.rows if not row.batched)
    one = replace(row, strategy="scatter_reduce", partitions=1, numel=5000)
    cut = replace(one, partitions=2)
    rows = [replace(each, name=f"w{index}") for index, each in enumerate((one, one, replace(one, ready=9.0), cut))]
    lines = str(replace(table, rows=tuple(rows))).splitlines()[3:7]
    assert [line.split()[6] for line in lines] == ["fused", "fused", "1", "2"]


def cast(table, spec="bf16"):
    """The same with small tensors cast."""
    return replace(table, rows=tuple(replace(row, spec=spec) if row.batched else row for row in table.rows))


def test_small_tensors_that_are_cast_are_kept_in_files_and_read_as_one_row(table, tmp_path):
    cast(table).save(tmp_path / "plan.json")
    found = PlanTable.load(tmp_path / "plan.json")
    assert found == cast(table)
    line = str(found).splitlines()[5]
    assert line.startswith("2 cast tensors")
    assert "bf16" in line
    assert "Compress 4 of 4 tensors (bf16, threelc:sparsity=1.5)" in found.verdict()
    entry = found.plan().entry("conv.bias", TensorSpec((64,)))
    assert (entry.compressor.name, entry.feedback, entry.batched) == ("bf16", "none", True)
    with pytest.raises(OptionError, match="batched entries must have none, fp16 or bf16"):
        cast(table, "onebit").plan()


def test_a_file_that_is_no_plan_is_refused(table):
    document = json.loads(table.to_json())
    row = document["rows"][0]
    changes = {
        "not a gradwire plan file. Check the path": {"format": "gradwire costs"},
        "version 0, and this release of gradwire reads version 2": {"version": 0},
        "rows must be a list": {"rows": None},
        "has unknown speed (in the plan)": {"speed": 1},
        "ready, spec, strategy, total, wire (in row 0)": {"rows": [{"name": "w"}]},
        "partitions must not be 'two' (in row 0)": {"rows": [row | {"partitions": "two"}]},
        "numel must not be True (in row 0)": {"rows": [row | {"numel": True}]},
        "numel must not be -1 (in row 0)": {"rows": [row | {"numel": -1}]},
        "step must not be nan (in the plan)": {"step": math.nan},
        "ready must not be inf (in row 0)": {"rows": [row | {"ready": math.inf}]},
        "'fc.weight' has several rows": {"rows": [{**row, "name": "fc.weight"}] * 2},
    }
    for message, change in changes.items():
        with pytest.raises(OptionError) as caught:
            PlanTable.from_json(json.dumps(document | change))
        assert message in str(caught.value)
        assert re.search("Check the path|[Mm]ake (it|the file|the plan) again", str(caught.value))
    for text in ("{", "[" * 100_000, "1" * 5_000):
        with pytest.raises(OptionError, match="make it again"):
            PlanTable.from_json(text)
    with pytest.raises(OptionError, match=r"at least 1 and at most 65,536"):
        PlanTable.from_json(json.dumps(document | {"rows": [row | {"partitions": 10**12}]})).plan()
    assert "times faster" in str(PlanTable.from_json(json.dumps(document | {"step": 0.0})))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(bytes(range(128, 256)))
    with pytest.raises(OptionError, match="make it again"):
        PlanTable.load(path)


def test_a_compressor_that_does_not_exist_gets_advice(table):
    document = json.loads(table.to_json())
    row = document["rows"][0]
    with pytest.raises(UnknownNameError, match="Did you mean 'threelc'"):
        PlanTable.from_json(json.dumps(document | {"rows": [row | {"spec": "threelcs"}]}))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.5, "1.5 s"), (0.25, "250 ms"), (1234e-6, "1.23 ms"), (5e-6, "5 us"), (0.0, "0 us"), (4321.0, "4,321 s"),
     (0.9996, "1 s"), (9.996e-4, "1 ms"), (999.6, "1,000 s")],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(value, text):
    assert seconds(value) == text


def test_a_table_from_a_file_synchronizes_a_real_group(table, tmp_path):
    """Each rank loads the file; compressed, dense and batched tensors come back as the mean, the same on all ranks."""
    path = tmp_path / "plan.json"
    table.pin().save(path)
    specs = {"fc.weight": (1000, 1000), "fc.bias": (1000,), "conv.weight": (64, 64, 3, 3), "conv.bias": (64,)}

    def gradients(rank):
        generator = torch.Generator().manual_seed(rank)
        return {name: torch.randn(shape, generator=generator) for name, shape in specs.items()}

    def step(one):
        one.begin_step()
        grads = gradients(one.rank)
        one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
        one.wait()
        one.commit()
        return grads

    with ranks(2, lambda rank: PlanTable.load(path).plan()) as group:
        means = group.each(step)
        sent = group.synchronizers[0].report().tensors
    for name in specs:
        assert torch.equal(means[0][name], means[1][name])
    exact = {name: (a + b) / 2 for (name, a), b in zip(gradients(0).items(), gradients(1).values())}
    assert torch.allclose(means[0]["fc.bias"], exact["fc.bias"])
    assert torch.allclose(means[0]["conv.bias"], exact["conv.bias"])
    assert not torch.allclose(means[0]["fc.weight"], exact["fc.weight"])  # three values an element
    assert set(sent) == {"fc.weight", "conv.weight", "fc.bias and 1 more"}
    assert "sparsity=1.5" in sent["fc.weight"].method
    assert sent["fc.weight"].sent_bytes < sent["fc.weight"].dense_bytes / 10


def test_a_table_of_another_model_is_refused_before_anything_is_sent(table):
    with ranks(2, table.plan()) as group:
        found = group.outcomes(lambda one: one.register({"head.weight": TensorSpec((10, 10))}))
    for error in found:
        assert isinstance(error, OptionError)
        assert "no entry for 'head.weight'" in str(error)


def test_a_single_rank_has_nothing_to_decide():
    table = plan([PlannedTensor("w", (1000, 1000))], costs(world_size=1), METHODS)
    assert not table.compresses
    assert "a single rank exchanges no gradients" in table.verdict()
