from __future__ import annotations

import numpy as np

from gradwire.wire.frame import FrameKind, Header, pack
from gradwire.wire.payload import Payload


def test_nbytes_is_what_goes_on_the_wire():
    payload = Payload(np.arange(5, dtype=np.uint8))
    assert payload.nbytes == len(pack(Header(FrameKind.PAYLOAD), payload.body))
