from __future__ import annotations

import pytest

from gradwire.net.challenges import CHALLENGE_BYTES, VALID_SECONDS, Challenges

NONCE = bytes(range(32))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_is_stored_for_a_challenge(clock: Clock) -> None:
    challenges = Challenges(clock)
    before = repr(vars(challenges))
    made = challenges.challenge("10.0.0.1", 3, NONCE)
    assert len(made) == CHALLENGE_BYTES
    assert repr(vars(challenges)) == before
    assert challenges.knows(made, "10.0.0.1", 3, NONCE)


@pytest.mark.parametrize("caller", [("10.0.0.2", 3, NONCE), ("10.0.0.1", 4, NONCE), ("10.0.0.1", 3, NONCE[::-1])])
def test_a_challenge_is_for_one_caller(clock: Clock, caller: tuple[str, int, bytes]) -> None:
    challenges = Challenges(clock)
    made = challenges.challenge("10.0.0.1", 3, NONCE)
    assert not challenges.knows(made, *caller)
    assert not Challenges(clock).knows(made, "10.0.0.1", 3, NONCE)


def test_a_challenge_is_valid_for_a_time(clock: Clock) -> None:
    challenges = Challenges(clock)
    made = challenges.challenge("10.0.0.1", 3, NONCE)
    clock.now += VALID_SECONDS
    assert challenges.knows(made, "10.0.0.1", 3, NONCE)
    clock.now += VALID_SECONDS
    assert not challenges.knows(made, "10.0.0.1", 3, NONCE)


def test_a_challenge_is_answered_once_and_then_forgotten_when_it_is_not_valid(clock: Clock) -> None:
    challenges = Challenges(clock)
    made = [challenges.challenge("10.0.0.1", rank, NONCE) for rank in range(100)]
    assert all(challenges.answer(each) for each in made)
    clock.now += VALID_SECONDS
    assert not any(challenges.answer(each) for each in made)
    clock.now += VALID_SECONDS
    challenges.answer(challenges.challenge("10.0.0.1", 0, NONCE))
    assert len(challenges._answered) == 1
