"""The process that holds a lab's network namespaces, and ends what runs in them.

Run as a script (`python -I -S keeper.py LAB_PIDFD NUM_HOSTS`); it imports nothing outside the standard
library, so that it starts in milliseconds. It makes one namespace a host and holds each by a file descriptor,
and one for the bridge, in which it stays. Nothing is left on disk: the kernel destroys the namespaces, with
bridge and cables, once no process holds them.

Guarantees: however the lab's process ends, SIGKILL included, every process inside the namespaces is killed
and the keeper exits. Does not guarantee that if the keeper is killed together with the lab.

It watches the lab by a pidfd and not by PR_SET_PDEATHSIG, because the latter fires when the *thread* that
started the keeper ends. It kills by namespace and not by process group or parent, because commands daemonize.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_EMPTY_SCANS = 3
_SCAN_PAUSE_S = 0.02


class _RefusedError(Exception):
    def __init__(self, step: str, error: OSError) -> None:
        self.step, self.error = step, error


def _unshare(flags: int, step: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        code = ctypes.get_errno()
        raise _RefusedError(step, OSError(code, os.strerror(code)))


def _become_root_of_own() -> None:
    """Enters a new user namespace in which the present user is root."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWUSER, "making a user namespace")
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError as error:
        raise _RefusedError("mapping the user in a user namespace", error) from error


def _make_namespaces(num_hosts: int) -> tuple[bool, list[int]]:
    """Makes the hosts' namespaces, then the bridge's: (whether that took a user namespace, hosts' fds)."""
    own_user = False
    try:
        _unshare(_CLONE_NEWNET, "making a network namespace")
    except _RefusedError as refused:
        if not isinstance(refused.error, PermissionError):
            raise
        _become_root_of_own()
        own_user = True
        _unshare(_CLONE_NEWNET, "making a network namespace in a user namespace")
    _forbid_ipv6()
    fds = []
    for _ in range(num_hosts):
        fds.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        _unshare(_CLONE_NEWNET, "making a network namespace")
        _forbid_ipv6()
    return own_user, fds


def _forbid_ipv6() -> None:
    """Keeps IPv6 off the interfaces to come (not off the loopback), whose chatter would be counted."""
    # Where /proc/sys is read-only, as in some containers, a few hundred bytes of it are counted.
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file:
        file.write("1")


def _members(namespaces: set[str]) -> list[int]:
    """Processes in any of the namespaces, without this one. Zombies have no namespace and are not counted."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/net") in namespaces:
                found.append(int(entry))
        except OSError:
            continue
    return found


def _end_members(namespaces: set[str]) -> None:
    # Several empty scans in a row: a process may fork, or be on its way in, while one scan goes on.
    empty = 0
    while empty < _EMPTY_SCANS:
        members = _members(namespaces)
        empty = 0 if members else empty + 1
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SCAN_PAUSE_S)


def _wait_for_the_end(lab_fd: int) -> None:
    """Returns when the lab writes or closes standard input, or when its process has ended."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    if lab_fd >= 0:
        poller.register(lab_fd, select.POLLIN)
    poller.poll()


def main(lab_fd: int, num_hosts: int) -> None:
    """Makes the namespaces, reports them as one line of JSON, and holds them until the lab ends."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        own_user, fds = _make_namespaces(num_hosts)
    except _RefusedError as refused:
        print(json.dumps({"step": refused.step, "reason": refused.error.strerror}), flush=True)
        return
    namespaces = {os.readlink(f"/proc/self/fd/{fd}") for fd in fds} | {os.readlink("/proc/self/ns/net")}
    print(json.dumps({"own_user": own_user, "fds": fds, "namespaces": sorted(namespaces)}), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    _wait_for_the_end(lab_fd)
    _end_members(namespaces)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
