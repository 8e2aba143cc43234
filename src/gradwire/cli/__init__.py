"""The command line: `gradwire COMMAND`, or `python -m gradwire.cli`.

Each command is a module of this package with a function `register(app)`, listed in `gradwire.cli.app`. Modules import
torch and numba inside their commands, so that `gradwire --help` answers at once.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit. Errors of gradwire are printed without a traceback."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"The command line needs the package {error.name!r}. Install it with `pip install 'gradwire[cli]'`.",
            file=sys.stderr,
        )
        sys.exit(2)
    from gradwire.cli.app import build_app
    from gradwire.core.errors import GradwireError

    try:
        build_app()()
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        sys.exit(2)
