"""What the fork server of the tests imports before it forks anything; see `tests.forks`. It starts no thread."""

import gc

import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401
from numba.core.registry import cpu_target

import gradwire.ddp.attach
import gradwire.parameter_server.client  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.collect()
gc.freeze()  # a collection of all these objects keeps the interpreter busy for a third of a second
