from __future__ import annotations

import threading

import pytest


def pytest_collection_modifyitems(items):
    # What a thread of a transport raises is a failure of the test, not a warning.
    for item in items:
        if "transport" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire")]
    assert left == []
