"""`python -m tests.damage`: see `tests.damage.campaign`."""

import typer

from tests.damage.campaign import main

if __name__ == "__main__":
    typer.run(main)
