import json
import os
import signal
import sys

import pytest

from gradwire.core.errors import OptionError
from gradwire.lab import Lab, LabError, plain
from gradwire.lab.counters import Drops, InterfaceCounters
from gradwire.lab.results import HostResult, LabResult
from tests.lab.support import TRAFFIC, Watch, namespace, printed

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": 0}, "Pass 1 to 250"),
        ({"hosts": 251}, "Pass 1 to 250"),
        ({"rate": "quick"}, "is not a rate"),
        ({"loss": 2}, "is not a loss"),
        ({"delay": "long"}, "is not a delay"),
    ],
)
def test_options_are_checked_before_anything_is_built(options, message):
    with pytest.raises(OptionError, match=message):
        Lab(**options)


@pytest.mark.root
def test_a_command_finds_rendezvous_and_facts_in_its_environment(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Lab(3, "100mbit") as lab:
        result = lab.run([sys.executable, "-I", "-S", "-c", SHOW], env={"EXTRA": "1"}, timeout=20)
        addresses = lab.addresses
    for host in range(3):
        env = printed(result, host)
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(host), "3")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (addresses[0], "29500")
        assert (env["GRADWIRE_LAB_HOST"], env["GRADWIRE_LAB_HOSTS"]) == (str(host), "3")
        assert env["GRADWIRE_LAB_RATE"] == "100mbit"
        assert env["GRADWIRE_LAB_INTERFACE"] == env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert env["EXTRA"] == "1"


@pytest.mark.root
def test_threads_that_the_user_chose_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Lab(1) as lab:
        assert lab.environment(0)["OMP_NUM_THREADS"] == "7"


@pytest.mark.root
def test_output_is_captured_and_relayed_by_host_and_stream():
    lines = []
    with Lab(2) as lab:
        result = lab.run(
            lambda host: ["sh", "-c", f"echo out {host}; echo err {host} >&2; printf unfinished"],
            on_line=lambda *line: lines.append(line),
        ).check()
    assert [host.stdout for host in result.hosts] == ["out 0\nunfinished\n", "out 1\nunfinished\n"]
    assert [host.stderr for host in result.hosts] == ["err 0\n", "err 1\n"]
    assert {(0, "stdout", "out 0"), (1, "stderr", "err 1"), (1, "stdout", "unfinished")} <= set(lines)


@pytest.mark.root
def test_the_first_host_to_fail_is_named_and_the_others_are_ended():
    fail = "echo no disk left >&2; exit 3"
    with Lab(3) as lab:
        result = lab.run(lambda host: ["sh", "-c", fail] if host == 1 else ["sleep", "60"], grace=0.1, timeout=30)
        assert (result.first_failed, result.exit_code, result.timed_out) == (1, 3, False)
        assert [host.ended_by_lab for host in result.hosts] == [True, False, True]
        assert result.hosts[0].outcome == "signal SIGTERM"
        with pytest.raises(LabError, match=r"Host 1 failed first: exit code 3[^\n]*\n*.*no disk left"):
            result.check()


@pytest.mark.root
def test_the_others_may_finish_within_the_grace():
    with Lab(2) as lab:
        result = lab.run(lambda host: ["sh", "-c", "exit 1" if host else "echo done"], grace=30)
    assert [host.ended_by_lab for host in result.hosts] == [False, False]
    assert (result.hosts[0].returncode, result.first_failed) == (0, 1)


@pytest.mark.root
def test_the_time_limit_ends_even_what_ignores_the_polite_signal(monkeypatch):
    monkeypatch.setattr("gradwire.lab.runner.KILL_AFTER_S", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    with Lab(2) as lab:
        result = lab.run([sys.executable, "-I", "-S", "-c", stubborn], timeout=0.5)
    assert (result.timed_out, result.first_failed, result.exit_code) == (True, None, 124)
    assert {host.outcome for host in result.hosts} <= {"signal SIGKILL", "signal SIGTERM"}
    assert "time limit" in result.message


def test_a_run_that_reached_its_time_limit_has_failed_whatever_its_commands_say():
    host = HostResult(0, 0, 1.0, "", "", InterfaceCounters(0, 0, 0, 0), Drops(0, 0, 0), ended_by_lab=True)
    result = LabResult((host,), 1.0, first_failed=None, timed_out=True)
    assert (result.ok, result.exit_code) == (False, 124) and "time limit" in result.message
    with pytest.raises(LabError, match="time limit"):
        result.check()


def test_filters_that_may_not_be_switched_off_are_left_on(tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "_FILTERS", tmp_path)
    (tmp_path / "bridge-nf-call-iptables").mkdir()  # so that it cannot be written, whoever asks
    (tmp_path / "bridge-nf-call-arptables").write_text("1")
    plain.filter_nothing()
    assert (tmp_path / "bridge-nf-call-arptables").read_text() == "0"


@pytest.mark.root
def test_a_command_that_does_not_exist():
    with Lab(2) as lab:
        result = lab.run(["no-such-command-anywhere"])
    assert result.exit_code == 127
    assert "no-such-command-anywhere" in result.hosts[0].stderr


@pytest.mark.root
def test_a_started_process_is_the_command_itself_and_can_be_killed():
    with Lab(2) as lab:
        process = lab.popen(["sleep", "60"], host=1)
        other = lab.popen(["sleep", "60"], host=0)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=20) == -signal.SIGKILL
        assert other.poll() is None
        with pytest.raises(OptionError, match="Hosts are 0 to 1"):
            lab.popen(["true"], host=2)
    assert other.returncode == -signal.SIGKILL


@pytest.mark.root
def test_two_labs_side_by_side_do_not_see_each_other():
    with Lab(2, "100mbit") as one, Lab(2, "100mbit") as two:
        assert one.addresses == two.addresses
        # Both listen on the same address and port at once.
        server = two.popen([*TRAFFIC, "bytes", "1000"], host=0)
        result = one.run([*TRAFFIC, "bytes", "1000"], timeout=20).check()
        assert result.hosts[1].counters.bytes_sent > 1000
        assert two.counters()[1].packets_sent == 0
        server.kill()


@pytest.mark.root
def test_the_machines_own_network_is_neither_used_nor_visible():
    before = set(os.listdir("/sys/class/net"))
    show = "import os, socket; print(os.readlink('/proc/self/ns/net')); print(socket.if_nameindex())"
    with Lab(1) as lab:
        assert set(os.listdir("/sys/class/net")) == before
        own, interfaces = lab.run([sys.executable, "-I", "-S", "-c", show]).check().hosts[0].stdout.splitlines()
    assert own != namespace(os.getpid())
    assert [name for _, name in eval(interfaces)] == ["lo", "eth0"]


@pytest.mark.root
def test_a_closed_lab_says_so():
    with Lab(1) as lab:
        pass
    lab.close()
    for use in (lab.counters, lab.drops, lambda: lab.run(["true"]), lambda: lab.set_rate("1mbit")):
        with pytest.raises(LabError, match="Make a new one"):
            use()


@pytest.mark.root
def test_closing_ends_what_left_its_process_group():
    with Lab(1) as lab:
        result = lab.run(["sh", "-c", "setsid sleep 60 > /dev/null 2>&1 & echo $!"]).check()
        hidden = Watch([int(result.hosts[0].stdout)])
    hidden.assert_all_ended()


@pytest.mark.root
def test_a_summary_is_plain_json():
    with Lab(2, "10mbit") as lab:
        result = lab.run(["true"])
    summary = json.loads(json.dumps(result.to_dict()))
    assert summary["ok"] is True
    assert summary["hosts"][1]["host"] == 1
    assert summary["hosts"][1]["drops"] == {"uplink": 0, "downlink": 0, "loss": 0}
    assert summary["hosts"][1]["bytes_sent"] == 0
