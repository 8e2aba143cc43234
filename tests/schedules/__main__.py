"""`python -m tests.schedules`: see `tests.schedules.campaign`."""

import typer

from tests.schedules.campaign import main

if __name__ == "__main__":
    typer.run(main)
