"""`gradwire doctor`: what it finds on this machine, and what it says where something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from gradwire.cli.app import build_app
from gradwire.cli.checks import network, software
from gradwire.cli.checks.finding import NOTE, OK, PROBLEM, Finding, run_check
from gradwire.cli.doctor import page


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["doctor", *arguments])


@pytest.fixture(autouse=True)
def ordinary_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "GRADWIRE_JOB_KEY", "GRADWIRE_JOB_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_can_run_where_the_tests_run() -> None:
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["can_run"] is True
    names = {each["name"] for area in ("software", "rights", "network", "trial") for each in found[area]}
    wanted = {"gradwire", "torch", "Numba", "compiled kernels", "flight recorder", "serve --xdp", "interface lo"}
    assert wanted <= names
    (trial,) = found["trial"]
    assert trial["status"] == OK and "averaged a tensor by threelc over loopback" in trial["text"]


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0", "Known interfaces: lo"),
        ("MASTER_ADDR", "no.such.host.invalid", "Set GLOO_SOCKET_IFNAME to the interface that the ranks share."),
        ("GRADWIRE_JOB_KEY_FILE", "/no/such/file", "/no/such/file"),
    ],
)
def test_a_variable_with_which_no_job_can_run_is_a_problem(
    variable: str, value: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    result = doctor("--no-trial")
    assert result.exit_code == 1
    assert "No job can run here: 1 problem, marked ✗." in result.output
    assert advice in " ".join(result.output.split())


def test_two_variables_are_two_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo and gradwire listen at the interface, whatever the address of rank 0."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    one, other, *_ = network.addresses()
    assert (one.name, one.text) == ("GLOO_SOCKET_IFNAME", "lo: this rank would listen at 127.0.0.1")
    assert (other.name, other.text) == ("MASTER_ADDR", "127.0.0.1: its interface has 127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    one, other, *_ = network.addresses()
    assert (one.name, one.status, other.status) == ("GLOO_SOCKET_IFNAME", PROBLEM, OK)


def test_packages_that_are_missing_or_old_come_with_the_command_to_install_them() -> None:
    old = software._required("numpy", "999.0")
    assert old.status == PROBLEM and old.advice == "pip install 'numpy>=999.0'"
    missing = software._required("no-such-package", "1.2")
    assert missing == Finding(PROBLEM, "no-such-package", "Missing.", "pip install 'no-such-package>=1.2'")
    optional = software._optional("jinja2", "999.0", "report", "HTML reports")
    assert optional.status == NOTE and optional.advice == "pip install 'gradwire[report]'"


def test_least_versions_are_those_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    least = software.least_versions()
    assert {"torch", "numpy", "numba", "google-crc32c"} == least[None].keys()
    assert all(f'"{name}>={wanted}"' in project for name, wanted in least[None].items())
    assert all(name in least[extra] for name, (extra, _) in software.OPTIONAL.items())


def test_kernels_without_a_folder_are_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gradwire.lang import cache

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADWIRE_CACHE_DIR", str(tmp_path / "file"))
    cache.folder.cache_clear()
    try:
        found = {each.name: each for each in software.kernel_cache()}
    finally:
        cache.folder.cache_clear()
    assert found["generated code"].status == NOTE
    assert "Set GRADWIRE_CACHE_DIR to a folder that you can write to." in found["generated code"].advice


def test_a_check_that_fails_does_not_hide_the_others() -> None:
    def strange_thing() -> list[Finding]:
        raise ValueError("unheard of")

    (found,) = run_check(strange_thing)
    assert found.status == NOTE and found.name == "strange thing" and "ValueError: unheard of" in found.text


def test_what_the_machine_says_is_no_markup() -> None:
    console = Console(width=100, record=True)
    console.print(page({"rights": [Finding(NOTE, "[bold]name", "[red]text[/red]", "[link=x]do")]}))
    text = console.export_text()
    assert "[bold]name" in text and "[red]text[/red]" in text and "→ [link=x]do" in text
    assert "A job can run here. 1 thing that it may not need is missing: –." in text
