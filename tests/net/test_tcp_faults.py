"""What becomes of a group when a process of it is killed, stopped, forked or ends. Real processes, real sockets."""

from __future__ import annotations

import signal
import time

from gradwire.net.closing import LINGER_SECONDS

from .processes import TIMEOUT, Rank
from .recorder import PATIENCE

LIMIT = 2 * TIMEOUT.total_seconds() + 3  # the promise is twice the timeout; the rest is for a loaded machine


def failures(survivors: list[Rank]) -> list[dict]:
    """The failures of the survivors, all of which must come within the limit."""
    deadline = time.monotonic() + LIMIT
    return [rank.wait("failed", deadline - time.monotonic()) for rank in survivors]


def test_a_killed_process_is_named_by_all_survivors(ranks):
    group = ranks(3)
    group[1].tell("send", 2, 50_000_000)
    group[1].signal(signal.SIGKILL)
    found = failures([group[0], group[2]])
    assert all(failure["rank"] == 1 for failure in found)
    assert {failure["type"] for failure in found} <= {"PeerLostError", "PeerFailedError"}
    assert any(failure["type"] == "PeerLostError" for failure in found)


def test_a_process_that_ends_without_goodbye_is_named(ranks):
    group = ranks(2)
    group[1].tell("leave")
    [found] = failures(group[:1])
    assert (found["type"], found["rank"]) == ("PeerLostError", 1)
    assert "without a goodbye" in found["message"]


def test_a_stopped_process_times_out_and_is_fenced_when_it_goes_on(ranks):
    group = ranks(3)
    group[1].signal(signal.SIGSTOP)
    group[0].tell("send", 1, 50_000_000)  # more than the kernel buffers: the sender is stuck, too
    found = failures([group[0], group[2]])
    assert all(failure["rank"] == 1 for failure in found)
    assert any(failure["type"] == "PeerTimeoutError" for failure in found)
    group[1].signal(signal.SIGCONT)
    [zombie] = failures([group[1]])
    assert zombie["type"] in ("PeerFailedError", "PeerLostError")
    group[1].tell("send", 2, 10)  # no harm, no effect
    group[1].tell("usage")
    group[1].wait("usage")
    assert group[2].quiet()


def test_a_rank_that_was_paused_does_not_blame_its_peers(ranks):
    """A peer that spoke while this rank was stopped is not silent: its bytes are only unread."""
    impatient, patient = ranks(2, timeouts=[1.5 * TIMEOUT, 4 * TIMEOUT])
    impatient.signal(signal.SIGSTOP)
    time.sleep(1.75 * TIMEOUT.total_seconds())  # longer than its own timeout, shorter than its peer's
    impatient.signal(signal.SIGCONT)
    for sender, receiver, to in ((impatient, patient, 1), (patient, impatient, 0)):
        sender.tell("send", to, 10)
        receiver.wait("got")


def test_ranks_that_are_all_paused_at_once_go_on(ranks):
    """As on a machine that is suspended: nobody could speak while nobody could listen."""
    group = ranks(3)
    for _ in range(2):
        for rank in group:
            rank.signal(signal.SIGSTOP)
        time.sleep(1.75 * TIMEOUT.total_seconds())
        for rank in group:
            rank.signal(signal.SIGCONT)
        for index, sender in enumerate(group):
            sender.tell("send", (index + 1) % 3, 10)
        for receiver in group:
            receiver.wait("got")


def test_waiting_costs_next_to_nothing(ranks):
    group = ranks(2)
    for rank in group:
        rank.tell("usage")
    before = [rank.wait("usage")["cpu"] for rank in group]
    began = time.monotonic()
    time.sleep(1.5 * TIMEOUT.total_seconds())  # what is tested is that nothing happens meanwhile
    for rank in group:
        rank.tell("usage")
    for rank, cpu in zip(group, before, strict=True):
        assert rank.wait("usage")["cpu"] - cpu < 0.05 * (time.monotonic() - began)


def test_a_forked_child_is_refused_and_does_not_hide_the_death_of_its_parent(ranks):
    group = ranks(2)
    group[1].tell("fork")
    assert "Connect after forking" in group[1].wait("child")["error"]
    group[1].signal(signal.SIGKILL)
    [found] = failures(group[:1])
    assert found["type"] == "PeerLostError"  # the connection closed: the child holds no copy of it


def test_what_the_kernel_still_holds_arrives_after_the_goodbye(ranks):
    """A connection that is closed at one end is reset by what the other sends, and what is under way is lost."""
    leaving, slow = ranks(2, timeouts=[4 * PATIENCE, TIMEOUT])
    slow.signal(signal.SIGSTOP)
    leaving.tell("send", 1, 1_500_000)  # more than the receiver's buffer; the rest stays in the sender's
    leaving.tell("close")
    leaving.tell("leave")
    time.sleep(2 * LINGER_SECONDS)  # the slow rank then owes a heartbeat, and says it first
    slow.signal(signal.SIGCONT)
    assert slow.wait("got")["sum"] == 1_500_000
    assert slow.quiet()


def test_a_good_end_is_no_failure(ranks):
    group = ranks(3)
    for sender, receiver in ((0, 1), (1, 0), (2, 0)):
        group[sender].tell("send", receiver, 3_000_000)
    for receiver in (0, 0, 1):
        assert group[receiver].wait("got")["sum"] == 3_000_000
    for rank in group:
        rank.tell("close")
        rank.tell("usage")
    for rank in group:
        assert rank.wait("usage")["threads"] == 0
