"""`python -m tests.soak`: see `tests.soak.campaign`."""

import typer

from tests.soak.campaign import main

if __name__ == "__main__":
    typer.run(main)
