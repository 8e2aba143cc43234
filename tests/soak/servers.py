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
from pathlib import Path

from tests.schedules import jobs
from tests.soak.job import LONG_FREEZE, Fault, Host, Job

SERVER = 0


class ParameterServerJob(Job):
    """Workers that train a small model through one server."""

    kind, num_servers = "parameter-server", 1
    lost_worker = False

    def start(self) -> None:
        """Start the server, then the workers."""
        self._serve()
        for worker in range(self.ranks):
            self._work(worker)
        self.until(lambda: all("ready" in host.last for host in self.hosts.values()))

    def _serve(self) -> None:
        folder = self.folder / "state"
        self.hosts[SERVER] = Host(self, SERVER, "parameter_server", workers=self.ranks, folder=str(folder))
        self.until(lambda: "ready" in self.hosts[SERVER].last)

    def _work(self, worker: int) -> None:
        parameters = {"worker": worker, "workers": self.ranks, "steps": self.steps}
        self.hosts[worker + 1] = Host(self, worker + 1, "parameter_worker", **parameters)

    def happen(self, fault: Fault) -> None:
        """One process is lost and started again; the job goes on."""
        victim = self.hosts[fault.host]
        if any("end" in host.last for host in self.hosts.values()):
            return  # too late for this fault
        self.outcome.vitals.append(victim.vitals)
        if fault.kind == "long freeze":
            self.freeze(victim, LONG_FREEZE)
            if fault.host == SERVER:  # it comes back, and workers call it again
                return
        else:
            victim.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            self.until(lambda: victim.gone)
        if fault.host == SERVER:
            self._serve()
            return
        self.lost_worker = True
        self._work(fault.host - 1)
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
        if self.hosts[SERVER].last.get("ended") != "":
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


class AggregatorJob(Job):
    """Workers that have sums made by an aggregator, over TCP."""

    kind, num_servers = "aggregator-tcp", 1
    udp = False

    def start(self) -> None:
        """Start the server, then the workers."""
        self._serve()
        for worker in range(self.ranks):
            parameters = {"worker": worker, "workers": self.ranks, "steps": self.steps}
            self.hosts[worker + 1] = Host(self, worker + 1, "aggregator_worker", **parameters)
        self.until(lambda: all("ready" in host.last for host in self.hosts.values()))

    def _serve(self) -> None:
        self.hosts[SERVER] = Host(self, SERVER, "aggregator", workers=self.ranks, udp=self.udp)
        self.until(lambda: "ready" in self.hosts[SERVER].last)

    def happen(self, fault: Fault) -> None:
        """A lost server is started again. A lost worker ends the job, which starts again from its beginning."""
        victim = self.hosts[fault.host]
        if any("end" in host.last for host in self.hosts.values()):
            return  # too late for this fault
        if fault.kind == "long freeze":
            self.freeze(victim, LONG_FREEZE)
            if fault.host == SERVER:
                return
        else:
            victim.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            self.until(lambda: victim.gone)
        if fault.host == SERVER:
            self.outcome.vitals.append(victim.vitals)
            self._serve()
            return
        began = time.time()
        self.until(lambda: all(host.gone for host in self.hosts.values()))
        for host in self.hosts.values():
            if host not in (victim, self.hosts[SERVER]) and "error" not in host.last:
                raise self.broken(f"worker {host.host - 1} lost a peer {time.time() - began:.0f} s ago: {host.last}")
        self.outcome.vitals += [host.vitals for host in self.hosts.values()]
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
