from __future__ import annotations

from tests import interpreted as interpreted
