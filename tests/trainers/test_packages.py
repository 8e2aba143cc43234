"""A framework that is missing or too old is an error that says what to install."""

from __future__ import annotations

import importlib
from importlib import metadata

import pytest

import gradwire as gw
from gradwire.core.errors import MissingPackageError
from gradwire.trainers.packages import OLDEST, require


@pytest.mark.parametrize("package", sorted(OLDEST))
def test_a_missing_package_is_named_with_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingPackageError, match=rf"which is not installed\. Run `pip install '{package}>=\d"):
        require(package, "gradwire.trainers")


@pytest.mark.parametrize(("version", "is_new"), [("1.14.9", False), ("1.15.0", True), ("1.15", True), ("2.0rc1", True)])
def test_an_old_version_is_refused(version: str, is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if is_new:
        require("accelerate", "This test")
        return
    with pytest.raises(MissingPackageError, match=rf"This test needs accelerate 1\.15 or newer, but version {version}"):
        require("accelerate", "This test")


def test_modules_are_found_by_name_and_accelerate_imports_without_its_package() -> None:
    assert gw.trainers.accelerate is importlib.import_module("gradwire.trainers.accelerate")
    with pytest.raises(AttributeError, match="has no attribute 'horovod'"):
        _ = gw.trainers.horovod
