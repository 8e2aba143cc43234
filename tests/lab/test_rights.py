import os
import subprocess
import sys

import pytest

from gradwire.core.errors import RightsError
from gradwire.lab.rights import find_loss_tool, find_tool, refusal, tool_failure

ASK = "from gradwire.lab import available; print(available())"
NO_ADMIN = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-sys_admin,-net_admin"]


@pytest.mark.parametrize(
    ("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("bridge", "iproute2"), ("nsenter", "util-linux")]
)
def test_a_missing_tool_names_its_package(monkeypatch, tmp_path, tool, package):
    monkeypatch.setattr("gradwire.lab.rights.search_path", lambda: str(tmp_path))
    with pytest.raises(RightsError, match=f"`{tool}`.*Install {package}.*apt-get install {package}"):
        find_tool(tool)


def test_either_tool_for_losses_will_do(monkeypatch, tmp_path):
    monkeypatch.setattr("gradwire.lab.rights.search_path", lambda: str(tmp_path))
    with pytest.raises(RightsError, match="apt-get install nftables"):
        find_loss_tool()
    for name in ("iptables", "nft"):
        (tmp_path / name).touch(mode=0o755)
        assert find_loss_tool() == str(tmp_path / name)


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "max_user_namespaces=10000"),
    ],
)
def test_the_setting_that_forbids_is_named(tmp_path, setting, value, advice):
    path = tmp_path / setting
    path.parent.mkdir()
    path.write_text(value + "\n")
    message = str(refusal("making a user namespace", "Operation not permitted", sysctl=tmp_path, is_root=False))
    assert advice in message and "sudo" in message and "Operation not permitted" in message


def test_advice_depends_on_who_asks(tmp_path):
    user = str(refusal("step", "reason", sysctl=tmp_path, is_root=False))
    root = str(refusal("step", "reason", sysctl=tmp_path, is_root=True))
    assert "sudo" in user and "seccomp" in user and "--cap-add" not in user
    assert "--cap-add SYS_ADMIN --cap-add NET_ADMIN" in root and "sudo" not in root


@pytest.mark.parametrize(
    ("output", "script", "advice"),
    [
        ("Error: Specified qdisc kind is unknown.\nCommand failed -:1", "root tbf\nnetem", "modprobe sch_tbf"),
        ("Error: Specified qdisc kind is unknown.\nCommand failed -:2", "root tbf\nnetem", "modprobe sch_netem"),
        ("Error: Unknown device type.\nCommand failed -:1", "link add name port0 type veth", "modprobe veth"),
        ("RTNETLINK answers: Operation not supported\nCommand failed -:1", "type bridge", "modprobe bridge"),
        ("Segmentation fault", None, "please report"),
    ],
)
def test_a_failing_tool_says_what_the_kernel_lacks(output, script, advice):
    assert advice in str(tool_failure(["/sbin/tc", "-batch", "-"], output, script))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="without root every lab of this run is built in a user namespace")
def test_user_namespaces_will_do_without_root():
    done = subprocess.run([*NO_ADMIN, sys.executable, "-c", ASK], capture_output=True, text=True)
    assert done.stdout == "None\n", done


@pytest.mark.root
@pytest.mark.parametrize(
    ("setting", "runner", "advice"),
    [
        ("max_net_namespaces", [], "sysctl -w user.max_net_namespaces=10000"),
        ("max_user_namespaces", NO_ADMIN, "sysctl -w user.max_user_namespaces=10000"),
    ],
)
def test_where_the_system_refuses_the_advice_names_the_limit(setting, runner, advice):
    # The limit is set inside a user namespace: the machine's own settings stay as they are.
    script = f'echo 0 > /proc/sys/user/{setting} && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", script, "sh", *runner, sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert advice in done.stdout and "--cap-add SYS_ADMIN" in done.stdout, done
