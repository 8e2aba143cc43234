"""An engine whose peers leave, are killed, or live and do not send: who is blamed, and when."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from gradwire.core.errors import PeerLostError, PeerTimeoutError
from gradwire.sync import waits
from tests.net.recorder import until
from tests.sync.engine_harness import PATIENCE, asking, computing, failure_of, key, receiving, setup


def test_a_peer_that_closed_before_sending_its_frame_is_an_error_at_once() -> None:
    with setup(stall=600.0) as made:
        run, _ = receiving(key())
        made.engine.run(run)
        made.network.transports[1].close()
        start_time = time.monotonic()
        error = failure_of(made.engine)
        assert time.monotonic() - start_time < PATIENCE, "not the stall timeout"
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.tensor, error.phase) == (1, "w", "recv stage 0")
        assert "Rank 1 has left the group" in str(error)
        assert "Run the same number of steps on every rank before detach() or the end of the script" in str(error)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_peer_that_left_after_sending_its_frame_is_missed_at_the_next_step(how: str) -> None:
    with setup(stall=600.0) as made:
        content = made.send(1, 50)
        getattr(made.network.transports[1], how)()
        run, got = receiving(key())
        made.engine.run(run)
        made.engine.wait_idle()
        until(lambda: made.network.transports[0].departed(1) is not None)
        made.engine.wait_idle()
        assert made.engine.error is None
        made.engine.run(receiving(key(), name="next", round=1)[0])
        error = failure_of(made.engine)
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.tensor, error.phase) == (1, "next", "recv stage 0")
    assert got == {key(): content.tobytes()}


@pytest.mark.parametrize("killed_first", [True, False])
def test_a_killed_rank_is_missed_if_a_future_may_depend_on_it(killed_first: bool) -> None:
    with setup(stall=600.0) as made:
        if not killed_first:
            made.engine.run(asking())
        made.network.kill(1)
        until(lambda: made.network.transports[0].departed(1) is not None)
        if killed_first:
            made.engine.wait_idle()
            made.engine.run(asking())
        error = failure_of(made.engine)
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.tensor) == (1, "w")


def test_a_rank_that_closed_gracefully_is_not_missed_by_a_rank_that_waits_for_a_future() -> None:
    answer: Future[int] = Future()
    with setup(stall=600.0) as made:
        made.engine.run(asking(answer))
        made.network.transports[1].close()
        until(lambda: made.network.transports[0].departed(1) is not None)
        answer.set_result(5)
        made.engine.wait_idle()


@pytest.mark.parametrize("how", ["close", "kill"])
def test_what_is_left_to_compute_ends_after_a_peer_has_left(how: str) -> None:
    """Peers may be done while this rank still decodes, and waits for a third rank."""
    hold, held = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        assert hold.wait(PATIENCE)

    with setup(3, stall=600.0) as made:
        made.send(1, 50)
        run, got = receiving(key(1), key(2))
        made.engine.run(run)
        made.engine.run(computing(block))
        assert held.wait(PATIENCE)
        getattr(made.network.transports[1], how)()
        until(lambda: made.network.transports[0].departed(1) is not None)
        made.send(2, 50)
        hold.set()
        made.engine.wait_idle()
        assert made.engine.error is None
    assert set(got) == {key(1), key(2)}


def test_a_live_rank_that_does_not_send_is_blamed_after_the_stall_timeout() -> None:
    with setup(3, stall=0.6) as made:
        made.send(1)
        until(lambda: made.network.transports[0].received_bytes[1] > 0)
        run, _ = receiving(key(1), key(2), name="fc.weight")
        made.engine.run(run)
        error = failure_of(made.engine)
        assert type(error) is PeerTimeoutError
        assert (error.rank, error.tensor, error.phase) == (2, "fc.weight", "recv stage 0")
        assert "(limit 0.6 s)" in str(error)
        assert "pass a larger stall_timeout" in str(error)
        assert made.peers[1].failure().rank == 2, "the others are told whose fault it is"


def test_a_rank_that_lacks_a_first_stage_is_blamed_before_a_rank_that_waits_for_it() -> None:
    """Rank 1 cannot send its aggregate while rank 2's frame is missing, so rank 2 is to blame."""
    with setup(3, stall=0.6) as made:
        made.engine.run(receiving(key(1, stage=1))[0])
        made.engine.run(receiving(key(2, stage=0), round=1)[0])
        assert failure_of(made.engine).rank == 2


def test_a_future_that_never_ends_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FUTURE_GRACE_SECONDS", 0.2)
    with setup(stall=0.3) as made:
        made.engine.run(asking(name="fc.weight", round=3))
        error = failure_of(made.engine)
        assert type(error) is PeerTimeoutError
        assert (error.rank, error.tensor, error.phase) == (None, "fc.weight", "ask for the sum")
        assert "Nothing has answered ask for the sum (tensor fc.weight, round 3)" in str(error)
        assert "pass a larger stall_timeout" in str(error)


def test_a_rank_that_lacks_only_a_later_stage_is_blamed_in_the_end() -> None:
    with setup(stall=0.3) as made:
        made.engine.run(receiving(key(1, stage=2))[0])
        assert failure_of(made.engine).rank == 1
