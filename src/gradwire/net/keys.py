"""The job key: a secret that a user gives to all processes of a job, never on a command line.

Without one, the ranks of a mesh share a random key through their store (`gradwire.net.rendezvous`), and a server and
its workers on one machine share a random key in a file of their user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from gradwire.core.errors import OptionError
from gradwire.core.private_folder import private_folder
from gradwire.net.address import is_loopback
from gradwire.net.handshake import KEY_BYTES, JobKey

KEY_VARIABLE = "GRADWIRE_JOB_KEY"
KEY_FILE_VARIABLE = "GRADWIRE_JOB_KEY_FILE"
_MAX_FILE_CHARACTERS = 1024
MAKE_KEY_FILE = "head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > job.key; chmod 600 job.key"


def job_key(
    host: str, job: str, *, file: str | Path | None = None, insecure: bool = False, integrity: str | None = None
) -> JobKey:
    """Return the key of a job whose server is at `host`.

    Args:
        host: Address of the server.
        job: Name of the job.
        file: File with the key; see `given_key`.
        insecure: Accept a guessable key even if other machines can reach `host`.
        integrity: One of `gradwire.net.handshake.INTEGRITIES`. Default: ``"mac"`` if the user has given a key, else
            ``"crc"``.

    Raises:
        OptionError: There is no key although other machines can reach `host`; see also `given_key` and `loopback_key`.
    """
    key = given_key(file, integrity=integrity)
    if key is not None:
        return key
    if is_loopback(host):
        return loopback_key(integrity or "crc")
    if insecure:
        return JobKey(hashlib.sha256(f"gradwire, no secret: {job}".encode()).digest(), integrity or "crc")
    raise OptionError(
        f"Other machines can reach {host}, and there is no job key. Write 64 hexadecimal digits to a file "
        f"({MAKE_KEY_FILE}) and name it in {KEY_FILE_VARIABLE} on all machines; or pass insecure=True (--insecure) on "
        "a network that you trust."
    )


def given_key(file: str | Path | None = None, *, integrity: str | None = None) -> JobKey | None:
    """Return the key that the user has given, or None.

    Args:
        file: File with 64 hexadecimal digits that only its owner can read; default `GRADWIRE_JOB_KEY_FILE`. Without a
            file, the digits are taken from `GRADWIRE_JOB_KEY`.
        integrity: One of `gradwire.net.handshake.INTEGRITIES`; default ``"mac"``.

    Raises:
        OptionError: The digits are not a key, or others can read the file.
    """
    path = file or os.environ.get(KEY_FILE_VARIABLE)
    if path:
        return _from_file(Path(path), integrity or "mac")
    digits = os.environ.get(KEY_VARIABLE)
    return _from_digits(digits, KEY_VARIABLE, integrity or "mac") if digits else None


def loopback_key(integrity: str = "crc") -> JobKey:
    """Return this user's random key for servers that only this machine can reach. The first call makes its file.

    It is in the user's state folder, or if that cannot be written, in a private folder for temporary files.

    Raises:
        OptionError: The file cannot be made or read, or others can read it.
    """
    problem: OSError | None = None
    for folder in (_state_folder, private_folder):
        try:
            path = folder() / "loopback.key"
            if not path.exists():
                _make_file(path)
            return _from_file(path, integrity)
        except OSError as error:
            problem = error
    raise OptionError(
        f"The key of this machine's jobs cannot be written: {problem}. Name a file with a job key in "
        f"{KEY_FILE_VARIABLE} ({MAKE_KEY_FILE}), the same for the server and its workers."
    ) from problem


def job_epoch(job: str) -> int:
    """Return the 64-bit epoch in the frames of the job with this name."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8, person=b"gradwire").digest(), "little")


def _state_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(state) / "gradwire"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _make_file(path: Path) -> None:
    """Write a random key. Other processes never see part of it, and of two that write, the first one's key stays."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _from_file(path: Path, integrity: str) -> JobKey:
    try:
        with path.open() as file:
            found = os.fstat(file.fileno())
            digits = file.read(_MAX_FILE_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"The job key cannot be read: {error}. Name another file.") from error
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"Others than its owner can read the job key in {path} (mode {stat.filemode(found.st_mode)}). Run "
            f"chmod 600 {path}."
        )
    if found.st_uid not in (os.getuid(), 0):
        raise OptionError(
            f"The job key in {path} belongs to user {found.st_uid}, who can change it. Copy it to a file of your own."
        )
    return _from_digits(digits, str(path), integrity)


def _from_digits(digits: str, source: str, integrity: str) -> JobKey:
    try:
        secret = bytes.fromhex(digits.strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise OptionError(f"A job key has {2 * KEY_BYTES} hexadecimal digits, unlike the content of {source}.")
    return JobKey(secret, integrity)
