import pytest
import torch

from gradwire.bench.text import CONTEXT, VOCABULARY, SourceText, encode, source_files
from gradwire.bench.workload import evaluate
from gradwire.bench.workloads import WORKLOADS, make_workload
from gradwire.core.errors import OptionError, UnknownNameError


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request):
    return make_workload(request.param)


def test_the_same_seed_step_and_rank_give_the_same_batch(workload):
    again = make_workload(workload.name)
    for one, other in zip(workload.batch(3, 7, 1, 4), again.batch(3, 7, 1, 4), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("place", [(4, 7, 1, 4), (3, 8, 1, 4), (3, 7, 2, 4)])
def test_another_seed_step_or_rank_gives_another_batch(workload, place):
    assert not torch.equal(workload.batch(3, 7, 1, 4).inputs, workload.batch(*place).inputs)


def test_a_batch_has_the_size_that_is_stated(workload):
    inputs, targets = workload.batch(0, 0, 0, 2)
    assert len(inputs) == len(targets) == workload.batch_size


def test_validation_stays_the_same(workload):
    assert torch.equal(workload.validation().inputs, workload.validation().inputs)


def test_the_same_seed_gives_the_same_model(workload):
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(workload.model())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_of_its_optimizer_lowers_the_loss_of_its_batch(workload):
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    inputs, targets = workload.batch(0, 0, 0, 1)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_text_model_has_bytes_that_matter_and_tensors_of_both_kinds():
    parameters = list(make_workload("text").model().parameters())
    assert sum(parameter.numel() for parameter in parameters) >= 6_000_000
    assert {parameter.dim() for parameter in parameters} == {1, 2}


def test_the_schedule_warms_up_and_decays():
    factors = [SourceText.schedule(None, step, 100) for step in range(100)]
    assert factors[0] < factors[30] == 1.0 > factors[80] > factors[99] > 0
    assert SourceText.schedule(None, 110, 100) > 0


def test_evaluate_sums_over_chunks():
    workload = make_workload("digits")
    model, samples = workload.model(), workload.validation()
    whole, parts = evaluate(model, samples, chunk=10_000), evaluate(model, samples, chunk=7)
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    assert parts[1] == whole[1]


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in source_files(tmp_path)] == ["a.py", "b.py"]


def test_every_byte_is_a_character_of_the_vocabulary(tmp_path):
    path = tmp_path / "all.py"
    path.write_bytes(bytes(range(256)))
    classes = encode([path])
    assert int(classes.max()) < VOCABULARY
    assert len(classes[32:127].unique()) == 95
    assert len(classes.unique()) == VOCABULARY


def test_a_tenth_of_the_files_is_held_out(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.py").write_text(chr(ord("a") + number) * (2 * CONTEXT))
    workload = SourceText(tmp_path)
    trained = {int(value) for step in range(30) for value in workload.batch(0, step, 0, 1).targets}
    held_out = {int(value) for value in workload.validation().targets}
    assert held_out == {int(value) for value in encode([tmp_path / "00.py", tmp_path / "10.py"]).unique()}
    assert not trained & held_out


def test_without_sources_the_advice_is_another_workload(tmp_path):
    with pytest.raises(OptionError, match="--workload digits"):
        SourceText(tmp_path)


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="digits, small, text"):
        make_workload("texts")
