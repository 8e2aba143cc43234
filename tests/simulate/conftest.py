from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "simulate" in item.path.parts and item.get_closest_marker("timeout") is None:
            # The first test of each kind of network compiles the event loop, which takes minutes on a busy machine.
            item.add_marker(pytest.mark.timeout(600))
