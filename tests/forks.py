"""Processes that tests start: forked from one that has imported what their first steps need.

Importing torch, its compiler (which its optimizers ask whether it runs) and what numba needs to load a kernel takes
seconds of a core. On a busy machine, a process that does so in its first step is silent for longer than the timeouts
of these tests. A process has one fork server for all tests, so there is one list of what it imports.
"""

from __future__ import annotations

import multiprocessing

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.preloaded"])
