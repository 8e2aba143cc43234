"""JSON documents that the planner writes and people may correct: format, version and fields are checked."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

from gradwire.core.errors import OptionError

CORRECT = "Correct the file, or make it again."


def read_document(text: str, format: str, version: int) -> dict[str, Any]:
    """Read a JSON object that names its format and version, and return its other entries.

    Raises:
        OptionError: It is not JSON, or has another format or version.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"A {format} file is JSON, and this is not: {error}. {CORRECT}") from None
    if not isinstance(document, dict) or document.get("format") != format:
        raise OptionError(f"This is not a {format} file. Check the path.")
    if document.get("version") != version:
        raise OptionError(
            f"This {format} file has version {document.get('version')!r}, and this release of gradwire reads version "
            f"{version}. Make the file again."
        )
    return {key: value for key, value in document.items() if key not in ("format", "version")}


def expect_fields(document: Any, cls: type, where: str) -> dict[str, Any]:
    """Return the entries of a JSON object for a dataclass.

    Raises:
        OptionError: It is not an object, or entries are unknown or missing.
    """
    if not isinstance(document, dict):
        raise OptionError(f"{where} must be an object, not {document!r}. {CORRECT}")
    known = {field.name for field in fields(cls)}
    missing = {field.name for field in fields(cls) if field.default is MISSING} - document.keys()
    if missing or document.keys() - known:
        wrong = {"lacks": missing, "has unknown": document.keys() - known}
        said = " and ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in wrong.items() if names)
        raise OptionError(f"The file {said} (in {where}). {CORRECT}")
    return dict(document)
