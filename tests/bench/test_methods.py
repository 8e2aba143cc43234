import pytest

from gradwire.bench import methods
from gradwire.core.errors import GradwireError, OptionError, UnknownNameError
from tests.bench.support import plan_text


def test_options_reach_the_compressor():
    expected = {"sparsity": 1.75, "zero_run": False, "block": 0}
    assert methods.compressor("threelc:sparsity=1.75:zero_run=False").options == expected


def test_the_default_methods_exist():
    methods.check(list(methods.DEFAULT_METHODS))


def test_an_unknown_method_lists_ddps_too():
    with pytest.raises(UnknownNameError, match="ddp-fp16, ddp-fp32"):
        methods.check(["ddp-fp64"])


@pytest.mark.parametrize("method", ["threelc:sparsity", "threelc:=2"])
def test_options_that_do_not_parse_show_how_to_write_them(method):
    with pytest.raises(OptionError, match=r"threelc:sparsity=1\.75"):
        methods.check([method])


def test_an_option_of_another_type_is_an_error_that_the_command_line_shows():
    with pytest.raises(GradwireError, match="sparsity must be a number, not 'x y'"):
        methods.check(["threelc:sparsity=x y"])


def test_an_option_out_of_range_is_refused_before_anything_starts():
    with pytest.raises(OptionError, match="sparsity"):
        methods.check(["threelc:sparsity=3.0"])


def test_the_same_method_twice_is_refused():
    with pytest.raises(OptionError, match="Give each method once"):
        methods.check(["none", "none"])


def test_torchs_powersgd_hook_gets_one_bucket_and_other_methods_those_to_try():
    (alone,) = methods.bucket_sizes("ddp-powersgd", (4.0, 25.0))
    assert alone > 25.0
    assert methods.bucket_sizes("ddp-fp16", (4.0, 25.0)) == (4.0, 25.0)
    assert methods.bucket_sizes("threelc", (4.0, 25.0)) == methods.bucket_sizes("auto", (4.0, 25.0)) == (4.0,)


def test_labels_are_for_readers():
    assert methods.label("ddp-fp16") == "DDP fp16 hook"
    assert methods.label("topk:ratio=0.01") == "gradwire topk ratio 0.01"
    assert methods.label("dgc:ratio=0.01@ring") == "gradwire dgc ratio 0.01, ring"
    assert methods.label("thc@server:mtu=1500") == "gradwire thc, server, mtu 1500"
    assert methods.label("dgc:ratio=0.01/momentum:clip=1.0") == "gradwire dgc ratio 0.01, momentum"


def test_a_strategy_may_follow_the_options():
    assert methods.compressor("topk:ratio=0.5@ring").options["ratio"] == 0.5
    assert (methods.strategy("topk@ring"), methods.strategy("topk")) == ("ring", None)
    with pytest.raises(UnknownNameError, match="allgather, hierarchical, ring, scatter_reduce"):
        methods.check(["topk@star"])


def test_a_policy_of_residuals_may_follow_last():
    method = "dgc:ratio=0.5@allgather/momentum:masking=False"
    assert methods.compressor(method).options["ratio"] == 0.5
    assert methods.strategy(method) == "allgather"
    assert not methods.feedback(method).masking
    assert methods.feedback("dgc@allgather") is None
    with pytest.raises(UnknownNameError, match="error, momentum, none"):
        methods.check(["dgc/velocity"])


def test_a_plan_is_read_from_its_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(plan_text(["0.weight"]))
    methods.check([f"plan:{path}"])
    assert methods.label(f"plan:{path}") == "gradwire plan mine"
    assert list(methods.plan_table(f"plan:{path}").entries()) == ["0.weight"]
    with pytest.raises(OptionError, match="gradwire plan --save FILE"):
        methods.check(["plan:nowhere.json"])


def test_a_server_may_have_an_mtu():
    assert methods.strategy("thc@server:mtu=1500/error") == "server"
    assert [methods.mtu(method) for method in ("thc@server:mtu=1500/error", "thc@server", "thc")] == [1500, 0, 0]
    methods.check(["thc@server:mtu=1500"])
    for method in ("thc@ring:mtu=1500", "thc@server:mtu=large", "thc@server:frames=1500"):
        with pytest.raises(OptionError, match="The only option of a strategy is NAME@server:mtu=BYTES"):
            methods.check([method])


def test_auto_may_have_a_level_and_momentum_correction():
    assert methods.is_auto("auto/momentum") and not methods.is_auto("autos")
    assert methods.fidelity("auto:fidelity=exact/momentum") == "exact"
    assert methods.fidelity("auto/momentum") == "balanced"
    assert methods.label("auto/momentum") == "gradwire auto, momentum"
    methods.check(["auto", "auto/momentum"])
    with pytest.raises(UnknownNameError, match="feedback policy"):
        methods.check(["auto/moment"])
