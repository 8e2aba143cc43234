"""Workers of a parameter server and of an aggregator, all of which may be killed, stopped, frozen and restarted.

In the end, the workers of a parameter server have the same weights, bit for bit. Every push was applied exactly once:
they are the weights of a job that nothing has happened to. Only a lost worker changes them, since its residuals are
lost with it. The workers of an aggregator have the sums of a model without packets.
"""

from __future__ import annotations

import functools
import hashlib
import signal
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.schedules import jobs
from tests.soak.job import Fault, Host, Job

SERVER = 0


class ServedJob(Job):
    """Workers of one server.

    Attributes:
        server: Program of the server.
        worker: Program of a worker.
        done_before: Steps of each worker when the present server had started.
    """

    num_servers = 1
    server: str
    worker: str
    done_before: Sequence[int] = ()

    @abstractmethod
    def server_parameters(self) -> dict[str, Any]:
        """Parameters of the server's program, apart from the number of workers."""

    def start(self) -> None:
        """Start the server, then the workers."""
        self.serve()
        for worker in range(self.ranks):
            self.work(worker)
        self.until(lambda: all("ready" in host.last for host in self.hosts.values()))

    def serve(self) -> None:
        """Start the server."""
        self.hosts[SERVER] = Host(self, SERVER, self.server, workers=self.ranks, **self.server_parameters())
        self.until(lambda: "ready" in self.hosts[SERVER].last)
        self.done_before = self._done()

    def finish(self) -> None:
        """See `Job`. A server that was started after the last step is not called by anyone, and is stopped."""
        self.until(lambda: all(host.gone for host in self.workers))
        if self.is_idle:
            self.hosts[SERVER].signal(signal.SIGTERM)
        super().finish()

    @property
    def is_idle(self) -> bool:
        """Whether the present server has served no step."""
        return self._done() == self.done_before

    def _done(self) -> list[int]:
        return [int(host.last.get("step", 0)) for host in self.workers]

    def work(self, worker: int) -> None:
        """Start a worker."""
        parameters = {"worker": worker, "workers": self.ranks, "steps": self.steps}
        self.hosts[worker + 1] = Host(self, worker + 1, self.worker, **parameters)


class ParameterServerJob(ServedJob):
    """Workers that train a small model through one server."""

    kind, server, worker = "parameter-server", "parameter_server", "parameter_worker"
    lost_worker = False

    def server_parameters(self) -> dict[str, Any]:
        """See `ServedJob`."""
        return {"folder": str(self.folder / "state")}

    def happen(self, fault: Fault) -> None:
        """One process is lost and started again; the job goes on."""
        victim = self.hosts[fault.host]
        self.lose(victim, fault)
        if fault.host == SERVER:
            if fault.kind != "long freeze":  # after a freeze it comes back, and workers call it again
                self.serve()
            return
        self.lost_worker = True
        self.work(fault.host - 1)
        if fault.kind == "long freeze":
            self.until(lambda: victim.gone)
            if "error" not in victim.last:
                raise self.broken(f"the frozen worker was not fenced: {victim.last}", victim)

    def check(self) -> None:
        """See `Job`."""
        expected = self.hosts[1].last.get("end") if self.lost_worker else unbroken(self.ranks, self.steps)
        for worker in range(self.ranks):
            if self.hosts[worker + 1].last.get("end") != expected or not expected:
                raise self.broken(f"worker {worker} has other weights.", self.hosts[worker + 1])
        if self.hosts[SERVER].last.get("ended") != "" and not self.is_idle:
            raise self.broken(f"the server ended with {self.hosts[SERVER].last.get('ended')!r}.")


class UnbrokenJob(ParameterServerJob):
    """The same without faults."""

    def check(self) -> None:
        """Check that all workers have the same weights."""
        found = {self.hosts[worker + 1].last.get("end") for worker in range(self.ranks)}
        if len(found) != 1:
            raise self.broken("without faults, the workers have different weights.")


@functools.cache
def unbroken(workers: int, steps: int) -> str:
    """Digest of the weights of a job without faults."""
    with tempfile.TemporaryDirectory() as folder:
        job = UnbrokenJob(0, Path(folder))
        job.ranks, job.steps, job.faults = workers, steps, []
        job.run()
        found: str = job.hosts[1].last["end"]
        return found


class AggregatorJob(ServedJob):
    """Workers that have sums made by an aggregator, over TCP."""

    kind, server, worker = "aggregator-tcp", "aggregator", "aggregator_worker"
    udp = False

    def server_parameters(self) -> dict[str, Any]:
        """See `ServedJob`."""
        return {"udp": self.udp}

    def happen(self, fault: Fault) -> None:
        """A lost server is started again. A lost worker ends the job, which starts again from its beginning."""
        victim = self.hosts[fault.host]
        self.lose(victim, fault)
        if fault.host == SERVER:
            if fault.kind != "long freeze":
                self.serve()
            return
        began = time.time()
        self.until(lambda: all(host.gone for host in self.hosts.values()))
        for host in self.hosts.values():
            if host not in (victim, self.hosts[SERVER]) and "error" not in host.last:
                raise self.broken(f"worker {host.host - 1} lost a peer {time.time() - began:.0f} s ago: {host.last}")
        self.start()

    def check(self) -> None:
        """See `Job`."""
        expected = digest(self.ranks, self.steps)
        for worker in range(self.ranks):
            if self.hosts[worker + 1].last.get("end") != expected:
                raise self.broken(f"worker {worker} has other sums.", self.hosts[worker + 1])


class DatagramJob(AggregatorJob):
    """The same over UDP."""

    kind, udp = "aggregator-udp", True


def digest(workers: int, steps: int) -> str:
    """Digest of the sums, by a model without packets."""
    config, found = jobs.config(workers), hashlib.sha256()
    for round_ in range(steps):
        for stream in range(len(config.streams)):
            found.update(jobs.expected(config, round_, stream, slice(None), list(range(workers))).tobytes())
    return found.hexdigest()
