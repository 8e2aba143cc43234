"""The process that holds a lab's network namespaces and kills what runs in them at the end.

Run as a script (`python -I -S keeper.py LAB_PIDFD NUM_HOSTS`). It imports only the standard library, so that it starts
in milliseconds. It creates one namespace per host, each held by a file descriptor, and one for the bridge, in which it
stays. Nothing is left on disk: the kernel destroys the namespaces, with bridge and cables, once no process holds them.

Guarantees: however the lab's process ends, even by SIGKILL, every process in the namespaces is killed and the keeper
exits. This does not hold if the keeper is killed together with the lab.

It watches the lab by a pidfd instead of PR_SET_PDEATHSIG, which fires when the *thread* that started the keeper ends.
It kills by namespace instead of process group or parent, because commands daemonize.
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
    """Enter a new user namespace in which the current user is root."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWUSER, "making a user namespace")
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError as error:
        raise _RefusedError("mapping the user in a user namespace", error) from error


def _make_namespaces(num_hosts: int) -> tuple[bool, list[int]]:
    """Create the namespaces. Returns whether that took a user namespace, and the file descriptors of the hosts."""
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
    """Disable IPv6 on new interfaces (except loopback), because its traffic would be counted."""
    # If /proc/sys is read-only, as in some containers, a few hundred bytes of IPv6 are counted.
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file:
        file.write("1")


def _members(namespaces: set[str]) -> list[int]:
    """Other processes in the namespaces. Zombies have no namespace and are not counted."""
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
    # Several empty scans in a row: a process may fork or enter during a scan.
    empty = 0
    while empty < _EMPTY_SCANS:
        members = _members(namespaces)
        empty = 0 if members else empty + 1
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SCAN_PAUSE_S)


def _wait_for_the_end(lab_fd: int) -> None:
    """Wait until the lab writes to or closes standard input, or its process ends."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    if lab_fd >= 0:
        poller.register(lab_fd, select.POLLIN)
    poller.poll()


def main(lab_fd: int, num_hosts: int) -> None:
    """Create the namespaces, report them as one line of JSON, and hold them until the lab ends."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        own_user, fds = _make_namespaces(num_hosts)
    except _RefusedError as refused:
        print(json.dumps({"step": refused.step, "reason": refused.error.strerror}), flush=True)
        return
    namespaces = {os.readlink(f"/proc/self/fd/{fd}") for fd in fds} | {os.readlink("/proc/self/ns/net")}
    print(json.dumps({"own_user": own_user, "fds": fds}), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    _wait_for_the_end(lab_fd)
    _end_members(namespaces)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
