"""`python -m tests.peer`: see `tests.peer.campaign`."""

import typer

from tests.peer.campaign import main

if __name__ == "__main__":
    typer.run(main)
