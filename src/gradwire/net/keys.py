"""Where the job key comes from when there is no job's store: a file or the environment, never a command line."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from gradwire.core.errors import OptionError
from gradwire.net.address import is_loopback
from gradwire.net.handshake import KEY_BYTES, JobKey

KEY_VARIABLE = "GRADWIRE_JOB_KEY"
KEY_FILE_VARIABLE = "GRADWIRE_JOB_KEY_FILE"


def job_key(host: str, job: str, *, file: str | Path | None = None, insecure: bool = False) -> JobKey:
    """The key of a job whose server is at `host`.

    Args:
        host: address that is listened at, or called.
        job: name of the job.
        file: with 64 hexadecimal digits, readable by its owner alone; default: `GRADWIRE_JOB_KEY_FILE`. Without a file
            the digits may be in `GRADWIRE_JOB_KEY`.
        insecure: whether a key that everybody can guess will do beyond loopback.

    Raises:
        OptionError: no key, though `host` can be reached from other machines; or one that is not a key, or in a file
            that others can read.
    """
    path = file or os.environ.get(KEY_FILE_VARIABLE)
    if path:
        return _from_file(Path(path))
    if digits := os.environ.get(KEY_VARIABLE):
        return _from_digits(digits, KEY_VARIABLE)
    if is_loopback(host) or insecure:
        return JobKey(hashlib.sha256(f"gradwire, no secret: {job}".encode()).digest())
    raise OptionError(
        f"Expected a job key, since other machines can reach {host}, got none. Do: write 64 hexadecimal digits to a "
        "file (head -c 32 /dev/urandom | xxd -p -c 64 > job.key; chmod 600 job.key) and name it in "
        f"{KEY_FILE_VARIABLE} on all machines; or pass insecure=True (--insecure) on a network that you trust."
    )


def job_epoch(job: str) -> int:
    """The 64-bit number in the frames of a job of this name."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8, person=b"gradwire").digest(), "little")


def _from_file(path: Path) -> JobKey:
    try:
        mode = path.stat().st_mode
        digits = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"Expected a file with the job key, got {error}. Do: name one that can be read.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"Expected a key that its owner alone can read, got mode {stat.filemode(mode)} of {path}. "
            f"Do: chmod 600 {path}."
        )
    return _from_digits(digits, str(path))


def _from_digits(digits: str, place: str) -> JobKey:
    try:
        secret = bytes.fromhex(digits.strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise OptionError(f"Expected {2 * KEY_BYTES} hexadecimal digits in {place}, got something else.")
    return JobKey(secret)
