"""A1: no wait without a deadline. A scan finds every wait on a process, socket, thread, queue, future or selector.

Waits that are bounded in another way are listed with the reason, and so are the locks. An entry that nothing needs is
an error, so that the lists stay short.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent
OURS = "our own: fails when the engine does, or when no operation has ended for the stall timeout"
JOB = "our own: raises when a server is lost, or does not deliver within the stall timeout"
COMPUTE = "computes and waits for nobody"

WAITS = {
    ("core/threads.py", "threading.Thread(target=guarded, name=name, daemon=True)"): "the wrapper itself",
    ("sync/peers.py", "self.wait()"): OURS,
    ("sync/synchronizer.py", "self.wait()"): OURS,
    ("ddp/handle.py", "self.synchronizer.wait()"): OURS,
    ("ddp/replicas.py", "self._synchronizer.wait()"): OURS,
    ("tuning/auto.py", "self._synchronizer.wait()"): OURS,
    ("cli/checks/trial.py", "synchronizer.wait()"): OURS,
    ("cli/checks/trial.py", "ThreadPoolExecutor(2)"): "two ranks, whose calls have limits",
    ("tuning/calibration.py", "self._synchronizer.wait()"): OURS,
    ("tuning/measure_link.py", "self._synchronizer.wait()"): OURS,
    ("parameter_server/client.py", "self.wait()"): JOB,
    ("net/tcp.py", "socket.create_server((host, 0), family=family, backlog=max(BACKLOG, world_size))"): (
        "its acceptor makes it non-blocking"
    ),
    ("net/server.py", "socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)"): (
        "its acceptor makes it non-blocking"
    ),
    ("observe/exposition.py", "socket.create_server(address, family=family, backlog=BACKLOG)"): (
        "its acceptor makes it non-blocking"
    ),
    ("net/address.py", "socket.socket(family, kind, protocol)"): "connects a datagram socket, which sends nothing",
    ("net/address.py", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"): "asks the kernel for an address",
    ("lab/plain.py", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"): "sets an option of the kernel",
    ("lab/napi.py", "ThreadPoolExecutor(1)"): "attaches a program, which the kernel does in the call",
    ("aggregator/xdp/driver.py", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _GENERIC)"): (
        "asks the kernel, which answers within five seconds or counts as silent"
    ),
    ("aggregator/xdp/server.py", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"): "asks the kernel for the mtu",
    ("net/datagrams.py", "socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM)"): (
        "only asks the kernel about a path"
    ),
    (
        "net/datagrams.py",
        "socket.socket(socket.AF_INET6 if ':' in address[0] else socket.AF_INET, socket.SOCK_DGRAM)",
    ): ("the kernel limits sends (SO_SNDTIMEO), and receives do not wait"),
    ("compressors/threelc.py", "ThreadPoolExecutor(threads)"): COMPUTE,
    ("kernels/cpu/parallel.py", "ThreadPoolExecutor(MOST_THREADS, thread_name_prefix='gradwire-kernels')"): COMPUTE,
    ("kernels/cpu/parallel.py", "other.result()"): COMPUTE,
    ("kernels/cpu/compile.py", "fcntl.flock(handle, fcntl.LOCK_EX)"): "held while a file is written",
    ("sync/staging.py", "ThreadPoolExecutor(1, thread_name_prefix='gradwire-copies')"): (
        "the engine waits for its futures no longer than the stall timeout"
    ),
    ("sync/staging.py", "event.synchronize()"): "a copy from a GPU",
    ("bench/probe_steps.py", "torch.cuda.synchronize()"): COMPUTE,
    ("bench/timeline.py", "torch.cuda.synchronize()"): COMPUTE,
    ("simulate/frames.py", "ThreadPoolExecutor(2)"): "connects within the timeout of the mesh",
    ("lab/keeper.py", "poller.poll()"): "lives as long as the lab: the end of the lab's process is what it waits for",
    ("lab/namespaces.py", "process.stdout.readline()"): "after a select with a limit, and the line is one write",
}

LOCKS = {
    "aggregator/process.py": "the session: joins, goodbyes, and the watcher; no packet takes it",
    "aggregator/sharded_client.py": "how many parts of a reply are missing",
    "core/events.py": "the list of listeners",
    "net/client.py": "the state of a connection; waits have limits",
    "net/loop.py": "the send queues, and sends that do not block",
    "net/tls.py": "one call of OpenSSL, and reads and sends that do not block",
    "observe/metrics.py": "the counters",
    "observe/trace.py": "the trace's file",
    "parameter_server/connection.py": "a slot while it encodes or decodes, and the first message",
    "parameter_server/process.py": "the counters of queued bytes",
    "residuals/transaction.py": "the table of residuals",
    "simulate/frames.py": "counts frames; waits have a limit",
    "sync/codec.py": "the norm of one gradient",
    "sync/engine.py": "the tables of runs; waits have limits",
    "sync/norm_watch.py": "the norms of a step",
    "sync/run.py": "whether a run has ended",
    "sync/submission.py": "how many jobs of a submission are left",
    "tuning/step_clock.py": "the times of a step",
}

# What may block, and how many positional arguments it has if one of them is a limit.
LIMITED = {
    "wait": 1, "wait_for": 2, "join": 1, "result": 1, "exception": 1, "get": 1, "acquire": 2, "communicate": 2,
    "select": 1,
}  # fmt: skip
UNLIMITED = {"synchronize", "sendall", "create_connection", "readline", "waitpid"}
PROCESSES = {"run", "call", "check_call", "check_output"}
SOCKETS = {"socket.socket", "socket.socketpair", "socket.create_server", "socket.create_connection"}
POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor", "threading.Thread", "Thread", "threading.Timer"}
GROUPS = {"dist.init_process_group", "dist.new_group"}
WORDS = LIMITED.keys() | UNLIMITED | PROCESSES | {"poll", "flock"}
WORDS |= {name.rpartition(".")[2] for name in SOCKETS | POOLS | GROUPS}
LOCK_TYPES = {"threading.Lock", "threading.RLock", "threading.Condition", "threading.Semaphore"}


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (found for found in ast.walk(node) if isinstance(found, ast.Call))


def scopes(tree: ast.Module) -> Iterator[ast.AST]:
    """Functions with all that is in them, and the calls of the module that are in none."""
    every = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(part) for function in every for part in ast.walk(function) if part is not function}
    yield from (function for function in every if id(function) not in inside)
    yield ast.Module([ast.Expr(call) for call in calls(tree) if id(call) not in inside], [])


class Scan:
    """The waits of one module."""

    def __init__(self, code: str) -> None:
        self.tree = ast.parse(code)
        self.may_be_none = {
            node.name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef) and node.returns is not None and is_optional(node.returns)
        }

    def waits(self) -> Iterator[str]:
        for function in scopes(self.tree):
            names = set(optional_names(function))
            for call in calls(function):
                if last_name(call) in WORDS and self.may_wait_forever(call, names, function):
                    yield ast.unparse(call)

    def locks(self) -> Iterator[str]:
        return (name for call in calls(self.tree) if (name := ast.unparse(call.func)) in LOCK_TYPES)

    def may_wait_forever(self, call: ast.Call, names: set[str], function: ast.AST) -> bool:
        name = ast.unparse(call.func)
        last = last_name(call)
        options = {option.arg: option.value for option in call.keywords}
        if name in SOCKETS:
            return not makes_non_blocking(function, call)
        if name in POOLS or last in UNLIMITED:
            return True
        if name in GROUPS or (name.startswith("subprocess.") and last in PROCESSES):
            return self.is_none(options.get("timeout"), names)
        if last == "flock":
            return "LOCK_NB" not in ast.unparse(call)
        if last == "poll":
            return not call.args and "poller" in name
        if last not in LIMITED or (name == last and last != "wait"):
            return False
        if last == "wait" and name == last:  # concurrent.futures.wait
            return len(call.args) < 2 and self.is_none(options.get("timeout"), names)
        if name == "select.select":
            return len(call.args) < 4 or self.is_none(call.args[3], names)
        if last == "get" and call.args:
            return False  # of a dictionary
        if last == "acquire" and (is_false(options.get("blocking")) or (call.args and is_false(call.args[0]))):
            return False
        limit = options.get("timeout")
        if limit is None and len(call.args) >= LIMITED[last]:
            limit = call.args[LIMITED[last] - 1]
        return self.is_none(limit, names)

    def is_none(self, limit: ast.expr | None, names: set[str]) -> bool:
        """Whether a limit is, or may be, None."""
        if limit is None or (isinstance(limit, ast.Constant) and limit.value is None):
            return True
        if isinstance(limit, ast.Name):
            return limit.id in names
        return isinstance(limit, ast.Call) and ast.unparse(limit.func).rpartition(".")[2] in self.may_be_none


def last_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@functools.cache
def scans() -> dict[str, Scan]:
    return {str(path.relative_to(SOURCE)): Scan(path.read_text()) for path in SOURCE.rglob("*.py")}


def is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def is_optional(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(annotation))


def optional_names(function: ast.AST) -> Iterator[str]:
    """Names that may be None where a function uses them."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None and is_optional(node.annotation):
            yield node.arg
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.IfExp):
            parts = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            if any(isinstance(part, ast.Constant) and part.value is None for part in parts):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def makes_non_blocking(function: ast.AST, creation: ast.Call) -> bool:
    """Whether a function gives every socket that it creates with this call a limit."""
    targets = [
        ast.unparse(name)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node.value is creation
        for target in node.targets
        for name in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    limited = {ast.unparse(call.func) for call in calls(function)}
    return bool(targets) and all(
        f"{target}.setblocking" in limited or f"{target}.settimeout" in limited for target in targets
    )


def test_every_wait_has_a_deadline_or_is_listed_with_its_reason() -> None:
    found = {(where, wait) for where, scan in scans().items() for wait in scan.waits()}
    assert found - WAITS.keys() == set(), "give these a limit"
    assert WAITS.keys() - found == set(), "nothing needs these entries"


def test_every_module_with_locks_is_listed_with_what_they_guard() -> None:
    assert {where for where, scan in scans().items() if any(scan.locks())} == LOCKS.keys()


@pytest.mark.parametrize(
    "code",
    [
        "future.wait()", "future.wait(None)", "changed.wait(timeout=None)", "changed.wait_for(ready)", "thread.join()",
        "future.result()", "future.exception()", "tasks.get()", "lock.acquire()", "arrived.acquire(True)",
        "process.communicate()", "process.communicate(text)", "selector.select()", "selector.select(None)",
        "select.select([pipe], [], [])",
        "subprocess.run(command)", "subprocess.check_output(command, text=True)", "wait(futures)", "poller.poll()",
        "event.synchronize()", "socket.create_connection(address)", "fcntl.flock(handle, fcntl.LOCK_EX)",
        "threading.Thread(target=run)", "dist.init_process_group('gloo')", "ThreadPoolExecutor(2)",
        "def f():\n    sock = socket.socket()\n    sock.connect(address)",
        "def f(a, b):\n    a, b = socket.socketpair()\n    a.setblocking(False)",
        "def f(limit: float | None):\n    thread.join(limit)",
        "def f():\n    limit = None if never else 1.0\n    selector.select(limit)",
        "def limit() -> float | None: ...\nselector.select(self.limit())",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(code: str) -> None:
    assert list(Scan(code).waits())


@pytest.mark.parametrize(
    "code",
    [
        "future.wait(1.0)", "changed.wait_for(ready, 5)", "thread.join(limit)", "', '.join(names)", "known.get(name)",
        "tasks.get(timeout=1)", "lock.acquire(blocking=False)", "lock.acquire(timeout=2)", "slot.result(round_)",
        "wait([future], 3)", "subprocess.run(command, timeout=9)", "process.poll()", "selector.select(self.limit())",
        "def f():\n    sock = socket.socket()\n    sock.settimeout(1)\n    sock.connect(address)",
    ],
)  # fmt: skip
def test_the_scan_leaves_the_rest_alone(code: str) -> None:
    assert not list(Scan(code).waits())
