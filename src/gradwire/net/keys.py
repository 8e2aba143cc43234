"""The job key of jobs without a store: from a file or the environment, never from a command line."""

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
    """Return the key of a job whose server is at `host`.

    Args:
        host: Address of the server.
        job: Name of the job.
        file: File with 64 hexadecimal digits that only its owner can read; default `GRADWIRE_JOB_KEY_FILE`. Without a
            file, the digits are taken from `GRADWIRE_JOB_KEY`.
        insecure: Accept a guessable key even if other machines can reach `host`.

    Raises:
        OptionError: There is no key although other machines can reach `host`, the digits are not a key, or others can
            read the file.
    """
    path = file or os.environ.get(KEY_FILE_VARIABLE)
    if path:
        return _from_file(Path(path))
    if digits := os.environ.get(KEY_VARIABLE):
        return _from_digits(digits, KEY_VARIABLE)
    if is_loopback(host) or insecure:
        return JobKey(hashlib.sha256(f"gradwire, no secret: {job}".encode()).digest())
    raise OptionError(
        f"Other machines can reach {host}, and there is no job key. Write 64 hexadecimal digits to a file "
        "(head -c 32 /dev/urandom | xxd -p -c 64 > job.key; chmod 600 job.key) and name it in "
        f"{KEY_FILE_VARIABLE} on all machines; or pass insecure=True (--insecure) on a network that you trust."
    )


def job_epoch(job: str) -> int:
    """Return the 64-bit epoch in the frames of the job with this name."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8, person=b"gradwire").digest(), "little")


def _from_file(path: Path) -> JobKey:
    try:
        mode = path.stat().st_mode
        digits = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"The job key cannot be read: {error}. Name another file.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"Others than its owner can read the job key in {path} (mode {stat.filemode(mode)}). Run chmod 600 {path}."
        )
    return _from_digits(digits, str(path))


def _from_digits(digits: str, source: str) -> JobKey:
    try:
        secret = bytes.fromhex(digits.strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise OptionError(f"A job key has {2 * KEY_BYTES} hexadecimal digits, unlike the content of {source}.")
    return JobKey(secret)
