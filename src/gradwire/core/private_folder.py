"""A folder of the user's in the system's temporary directory, where other users may have made links and folders."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder() -> Path:
    """Return the folder ``gradwire-UID`` in the temporary directory, which is created.

    Raises:
        OSError: The folder cannot be created, or is not private to this user.
    """
    directory = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} is not a private folder of user {os.getuid()} ({stat.filemode(found.st_mode)})"
        )
    return directory
