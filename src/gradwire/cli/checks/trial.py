"""The last check: two ranks in this process average a tensor over TCP on loopback, compressed, as those of a job do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from gradwire.cli.checks.finding import OK, PROBLEM, Check, Finding

METHOD = "threelc"
_SIDE = 256
_TIMEOUT = timedelta(seconds=60)
_LIMIT = 300.0  # seconds; the first time, kernels are compiled


def two_ranks() -> Iterator[Finding]:
    """Whether two ranks find each other and average."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    started = time.perf_counter()
    pool = ThreadPoolExecutor(2)
    try:
        futures = [pool.submit(_average, store, rank) for rank in range(2)]
        ratio, first = futures[0].result(_LIMIT)
        if first != futures[1].result(_LIMIT)[1]:
            yield Finding(PROBLEM, "two ranks", "They do not have the same mean.", "Please report this.")
            return
    except Exception as error:
        yield Finding(PROBLEM, "two ranks", f"{type(error).__name__}: {error}", "A local firewall may refuse loopback.")
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    seconds = time.perf_counter() - started
    yield Finding(
        OK, "two ranks", f"averaged a tensor by {METHOD} over loopback, {ratio:.0f} times smaller, in {seconds:.1f} s"
    )


def _average(store: object, rank: int) -> tuple[float, bytes]:
    """Be a rank; return the ratio, and the bytes of the mean."""
    import torch

    from gradwire.sync.group import GroupInfo
    from gradwire.sync.options import SyncOptions
    from gradwire.sync.plan import Plan
    from gradwire.sync.submission import GradientSlice
    from gradwire.sync.synchronizer import Synchronizer

    group = GroupInfo(rank, 2, store, "doctor")
    options = SyncOptions(timeout=_TIMEOUT, stall_timeout=_TIMEOUT)
    synchronizer = Synchronizer(group, Plan(METHOD, min_elements=0), options=options)
    try:
        grad = torch.sin(torch.arange(_SIDE**2, device="cpu").float().view(_SIDE, _SIDE) + rank)  # vectors stay dense
        synchronizer.submit([GradientSlice("trial", grad)])
        synchronizer.wait()
        return synchronizer.report().total.ratio, grad.numpy().tobytes()
    finally:
        synchronizer.close()


CHECKS: tuple[Check, ...] = (two_ranks,)
