"""The job key at the level of `attach`: what a job's store has ever held of it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from tests.integration.launch import launch, results

KEY = hashlib.sha256(b"the key of this test").digest()


def forms(key: bytes) -> list[bytes]:
    """How a key may be written down."""
    return [key, key[::-1], key.hex().encode(), key.hex().upper().encode(), base64.b64encode(key), repr(key).encode()]


@pytest.mark.parametrize("given", [True, False], ids=["given", "drawn"])
def test_a_key_that_the_user_has_given_is_never_in_the_store(given: bool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    found = results(launch("secrets.attach_with_a_store_in_a_file", 2, path=str(path), key=KEY.hex() if given else ""))
    assert found == 2 * [[88 if given else 72]]  # frames had tags, or checksums
    written = path.read_bytes()
    assert b"gradwire/ranks" in written
    assert not [form for form in forms(KEY) if form in written]
    drawn = re.findall(rb'"key": "([0-9a-f]{64})"', written)
    assert bool(drawn) is not given  # so a key that was written would be found, though it has left the store
