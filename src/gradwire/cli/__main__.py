"""`python -m gradwire.cli`."""

from gradwire.cli import main

main()
