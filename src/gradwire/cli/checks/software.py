"""Checks of what is installed: versions, the compilers of kernels, and the folders in which kernels are kept."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from gradwire.cli.checks.finding import NOTE, OK, PROBLEM, Check, Finding
from gradwire.core.versions import numbers_of

OPTIONAL = {
    "matplotlib": ("report", "plots of reports"),
    "jinja2": ("report", "HTML reports"),
    "triton": ("gpu", "kernels on GPUs"),
}
"""Packages that not every job needs: the extra that installs them, and what they are for."""
_REQUIREMENT = re.compile(r"([\w.-]+?)>=([\d.]+)(?:.*\bextra == [\"'](\w+)[\"'])?")
_LOW_DISK_BYTES = 1 << 30


def versions() -> Iterator[Finding]:
    """Versions of this package, of Python and the system, and of the packages that it needs."""
    import gradwire

    yield Finding(OK, "gradwire", f"{gradwire.__version__} in {Path(gradwire.__file__).parent}")
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding(OK, "Python", python)
    yield Finding(
        OK, "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {usable_cores()} cores"
    )
    try:
        least = least_versions()
    except PackageNotFoundError:
        yield Finding(NOTE, "packages", "gradwire is not installed, so their versions are not known.", "pip install .")
        return
    for name, wanted in least[None].items():
        yield _required(name, wanted)
    for name, (extra, purpose) in OPTIONAL.items():
        yield _optional(name, least.get(extra, {}).get(name, "0"), extra, purpose)


def least_versions() -> dict[str | None, dict[str, str]]:
    """Least version of each package that gradwire's metadata names, by extra; None for what every job needs.

    Raises:
        PackageNotFoundError: gradwire is not installed: it runs from a folder of sources.
    """
    found: dict[str | None, dict[str, str]] = {None: {}}
    for requirement in requires("gradwire") or ():
        if match := _REQUIREMENT.match(requirement):
            name, wanted, extra = match.groups()
            found.setdefault(extra, {})[name] = wanted
    return found


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_distributed() -> Iterator[Finding]:
    """Whether torch can train in several processes, and on what."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(PROBLEM, "torch.distributed", "This torch has none.", "Install a build of torch that has it.")
        return
    backends = [
        name for name, found in (("Gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if found
    ]
    if backends:
        yield Finding(OK, "torch.distributed", " and ".join(backends))
    else:
        yield Finding(PROBLEM, "torch.distributed", "Neither Gloo nor NCCL.", "Install a build of torch with Gloo.")
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
        yield Finding(OK, "GPUs", f"{torch.cuda.device_count()}: {', '.join(names)}")
    else:
        yield Finding(NOTE, "GPUs", "None that torch can use: models train on the CPU.")


def checksums() -> Iterator[Finding]:
    """Whether checksums of frames are computed by the processor's instruction."""
    kind = str(import_module("google_crc32c").implementation)
    if kind == "c":
        yield Finding(OK, "checksums", "compiled")
    else:
        advice = "Install a wheel of google-crc32c for this platform: pip install --force-reinstall google-crc32c"
        yield Finding(NOTE, "checksums", f"By Python ({kind}), which takes longer than the network.", advice)


def compiler() -> Iterator[Finding]:
    """Whether Numba can compile here. Compiles a small function, and loads a kernel of the package."""
    import llvmlite.binding as llvm
    import numba

    started = time.perf_counter()

    def add_one(x: int) -> int:
        return x + 1

    advice = "Reinstall it: pip install --force-reinstall numba"
    try:
        compiled: Any = numba.njit(add_one)
        result = compiled(1)
    except Exception as error:
        yield Finding(PROBLEM, "Numba", f"It cannot compile: {error}", advice)
        return
    if result != 2:
        yield Finding(PROBLEM, "Numba", f"It compiles wrong code: 1 + 1 gives {result}.", advice)
        return
    llvm_version = ".".join(map(str, llvm.llvm_version_info))
    host = llvm.get_host_cpu_name()
    seconds = time.perf_counter() - started
    yield Finding(OK, "Numba", f"compiles for {host} by LLVM {llvm_version}; a small function took {seconds:.1f} s")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield Finding(PROBLEM, "NUMBA_DISABLE_JIT", "It is set: kernels would run as Python.", "Unset it.")


def kernel_cache() -> Iterator[Finding]:
    """Where compiled kernels are kept, and whether they can be."""
    from gradwire.kernels.cpu import reduce
    from gradwire.lang.cache import folder

    dispatcher = next(each for each in vars(reduce).values() if hasattr(each, "_cache"))
    places = {"compiled kernels": Path(dispatcher._cache.cache_path), "generated code": folder()}
    for name, place in places.items():
        size, count = _size(place)
        text = f"{count} files, {size / 1e6:.1f} MB in {place}"
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            advice = "Set NUMBA_CACHE_DIR and GRADWIRE_CACHE_DIR to folders that you can write to."
            yield Finding(NOTE, name, f"{place} cannot be written, so each process compiles.", advice)
        elif place.name.startswith("gradwire-"):
            advice = "Set GRADWIRE_CACHE_DIR to a folder that you can write to."
            yield Finding(NOTE, name, f"Kept for this process alone, in {place}.", advice)
        else:
            cold = "; kernels are compiled when they are first used" if count == 0 else ""
            yield Finding(OK, name, text + cold)
    free = shutil.disk_usage(folder()).free
    if free < _LOW_DISK_BYTES:
        yield Finding(NOTE, "disk", f"{free / 1e9:.1f} GB are free in {folder()}.", "Make room.")


CHECKS: tuple[Check, ...] = (versions, torch_distributed, checksums, compiler, kernel_cache)


def _optional(name: str, wanted: str, extra: str, purpose: str) -> Finding:
    found, install = _version(name), f"pip install 'gradwire[{extra}]'"
    if found is None:
        return Finding(NOTE, name, f"Missing: no {purpose}.", install)
    if numbers_of(found) < numbers_of(wanted):
        return Finding(NOTE, name, f"{found} is older than {wanted}: no {purpose}.", install)
    return Finding(OK, name, found)


def _required(name: str, wanted: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(PROBLEM, name, "Missing.", f"pip install '{name}>={wanted}'")
    try:
        import_module(name.replace("-", "_"))
    except Exception as error:  # a shared library that does not load, and the like
        return Finding(
            PROBLEM, name, f"{found}, which cannot be imported: {error}", f"pip install --force-reinstall {name}"
        )
    if numbers_of(found) < numbers_of(wanted):
        return Finding(PROBLEM, name, f"{found} is older than {wanted}.", f"pip install '{name}>={wanted}'")
    return Finding(OK, name, found)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _size(folder: Path) -> tuple[int, int]:
    """Bytes and number of files in a folder."""
    sizes = [each.stat().st_size for each in os.scandir(folder) if each.is_file()] if folder.exists() else []
    return sum(sizes), len(sizes)
