import json

import pytest

from tests.cli.test_cli import run

pytestmark = pytest.mark.root


def test_output_summary_and_exit_code(tmp_path):
    summary = tmp_path / "summary.json"
    done = run("lab", "--hosts", "2", "--json", str(summary), "--", "sh", "-c", "echo rank $RANK --hosts")
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == ["[host 0] rank 0 --hosts", "[host 1] rank 1 --hosts"]
    written = json.loads(summary.read_text())
    assert written["rate"] == "100mbit"
    assert [host["returncode"] for host in written["hosts"]] == [0, 0]


@pytest.mark.parametrize("relay", [["--quiet"], ["--only", "0"], ["--only", "1"], []])
def test_a_failing_host_is_named_and_its_code_is_ours(relay):
    script = '[ "$RANK" = 1 ] && { echo broken >&2; exit 5; }; sleep 60'
    done = run("lab", "--hosts", "2", "--grace", "0.1", *relay, "--", "sh", "-c", script)
    assert done.returncode == 5
    assert "Host 1 failed first: exit code 5" in done.stderr
    assert done.stderr.count("broken") == 1


def test_only_a_host_that_there_is_can_be_relayed():
    done = run("lab", "--hosts", "2", "--only", "2", "--", "true")
    assert done.returncode != 0 and "--only takes 0 to 1" in done.stderr


def test_the_time_limit():
    done = run("lab", "--hosts", "2", "--timeout", "0.3", "--", "sleep", "60")
    assert done.returncode == 124
    assert "time limit" in done.stderr


def test_output_of_one_host_only():
    done = run("lab", "--hosts", "3", "--only", "1", "--", "sh", "-c", "echo $RANK")
    assert done.stdout == "[host 1] 1\n"
