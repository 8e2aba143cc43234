"""Checks of what this user may do: private files, job keys, network namespaces and programs in the kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from gradwire.cli.checks.finding import NOTE, OK, PROBLEM, Check, Finding
from gradwire.core.errors import GradwireError, RightsError


def private_files() -> Iterator[Finding]:
    """Whether there is a folder for what other users must not read."""
    from gradwire.observe.recorder import default_directory

    try:
        yield Finding(OK, "flight recorder", f"writes to {default_directory()}")
    except OSError as error:
        advice = "Set GRADWIRE_DUMP_DIR to a folder of yours, or remove the other one."
        yield Finding(NOTE, "flight recorder", str(error), advice)


def job_key() -> Iterator[Finding]:
    """Whether the job key that is given can be used."""
    from gradwire.net.keys import KEY_FILE_VARIABLE, given_key

    try:
        found = given_key()
    except GradwireError as error:
        yield Finding(PROBLEM, "job key", str(error))
        return
    if found is None:
        text = "None is given: ranks share one through their store, and servers listen on loopback only"
        yield Finding(OK, "job key", f"{text} ({KEY_FILE_VARIABLE})")
    else:
        yield Finding(OK, "job key", "given")


def lab() -> Iterator[Finding]:
    """Whether `gradwire lab` and `gradwire demo` can make their networks. Makes a small one."""
    from gradwire.lab import available
    from gradwire.lab.rights import find_loss_tool

    refused = available()
    yield (
        Finding(NOTE, "lab, demo", refused) if refused else Finding(OK, "lab, demo", "network namespaces are permitted")
    )
    try:
        find_loss_tool()
    except RightsError as error:
        yield Finding(NOTE, "lab --loss", str(error))


def kernel_programs() -> Iterator[Finding]:
    """Whether `gradwire serve --aggregate --xdp` may add up in the kernel. Loads a small program."""
    if not sys.platform.startswith("linux"):
        yield Finding(NOTE, "serve --xdp", "Needs Linux.")
        return
    from gradwire.aggregator.xdp.loader import available

    refused = available()
    yield Finding(NOTE, "serve --xdp", refused) if refused else Finding(OK, "serve --xdp", "BPF programs load")


def user() -> Iterator[Finding]:
    """Who runs this."""
    yield Finding(OK, "user", "root" if os.geteuid() == 0 else f"user {os.geteuid()}, who is not root")


CHECKS: tuple[Check, ...] = (user, private_files, job_key, lab, kernel_programs)
