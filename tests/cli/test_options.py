"""Options in groups, and lists as users write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from gradwire.cli.options import grouped, numbers
from gradwire.core.errors import OptionError


@dataclass(frozen=True)
class Links:
    """Links of the test."""

    rate: Annotated[str, typer.Argument(help="A rate.")]
    delay: Annotated[float, typer.Option("--one-way", help="A delay.")] = 0.5


def test_fields_of_groups_are_options_under_the_groups_title() -> None:
    app, given = typer.Typer(), []

    def command(links: Links) -> None:
        """Help of the command."""
        given.append(links)

    app.command()(grouped(command))
    assert CliRunner().invoke(app, ["1gbit"]).exit_code == 0
    assert CliRunner().invoke(app, ["10gbit", "--one-way", "2"]).exit_code == 0
    assert given == [Links("1gbit"), Links("10gbit", 2.0)]
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Help of the command." in shown
    assert "Links of the test" in shown


def test_what_is_no_list_of_numbers_is_refused() -> None:
    assert numbers("25, 4,") == [25.0, 4.0]
    with pytest.raises(OptionError, match="Write it like 25,4"):
        numbers("25,four")
