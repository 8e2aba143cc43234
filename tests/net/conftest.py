from __future__ import annotations

import threading

import pytest

from .group import group
from .processes import ranks

__all__ = ["group", "ranks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "net" not in item.path.parts:
            continue
        # What a thread of a transport raises is a failure of the test, not a warning.
        item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    started = [thread.name for thread in threading.enumerate() if thread not in before]
    # The threads of large kernels are the process's, and stay.
    left = [name for name in started if name.startswith("gradwire") and not name.startswith("gradwire-kernels")]
    assert left == []
