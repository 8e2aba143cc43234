"""Exactly-once aggregation under loss, repetition, reordering, truncation, flipped bits and restarts.

`python -m tests.schedules --schedules 100000` is the long form.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from gradwire.aggregator.packet import SERVER, PacketKind, unpack
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.core.errors import SyncError
from tests.schedules import campaign, jobs
from tests.schedules.datagrams import Faults

ROUNDS = (3, 4, 7)
HARSH = Faults(loss=0.1, duplicate=0.1, truncate=0.05, corrupt=0.05, spread=0.01)


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.01, 0.05, 0.2, 0.5])
def test_every_contribution_is_added_exactly_once(loss):
    for seed in range(20):
        job = jobs.config(mtu=(0, 1500)[seed % 2])
        run = jobs.simulation(job, ROUNDS, dataclasses.replace(HARSH, loss=loss), seed)
        assert run.run(until=1000)
        jobs.check(run, ROUNDS)


def test_some_schedules_of_the_long_campaign():
    for seed in range(80):
        campaign.schedule(seed)


def test_without_faults_nothing_is_sent_twice():
    job = jobs.config(8)
    run = jobs.simulation(job, ROUNDS, Faults(), 0, pace=lambda worker, place: worker * 0.05)
    assert run.run(until=1000)
    jobs.check(run, ROUNDS)
    assert all(counters.sent_again == 0 for counters in run.worker_counters)


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_counters_agree_with_the_network(spread):
    job = jobs.config()
    run = jobs.simulation(job, range(20), dataclasses.replace(HARSH, spread=spread), 1)
    assert run.run(until=1000)
    while run.network.next_arrival() is not None:  # what is still under way
        run._deliver()
    network, ends = run.network, [*run.server_counters, *run.worker_counters]
    everyone = sum(1 for _ in range(20) for stream in range(3) for _ in range(job.num_packets(stream)))
    assert network.done["lost"] > 100
    assert network.done["corrupted"] > 50
    # a result to everyone is one packet of the server's and three of the network's
    assert sum(end.sent for end in ends) + (job.world_size - 1) * everyone == network.done["sent"]
    delivered = network.done["sent"] - network.done["lost"] + network.done["duplicated"]
    assert sum(end.received for end in ends) == sum(network.delivered.values()) == delivered
    assert sum(end.corrupt for end in ends) == sum(network.damaged.values())
    assert network.done["truncated"] + network.done["corrupted"] == sum(network.damaged.values())
    assert run.server_counters[0].taken == job.world_size * everyone
    assert all(end.taken == everyone for end in run.worker_counters)
    assert sum(end.stale + end.refused for end in ends) == 0


def test_restarts_of_the_server_change_no_result():
    job = jobs.config()
    for seed in range(30):
        run = jobs.simulation(job, ROUNDS, HARSH, seed, pace=lambda worker, place: 0.01 * worker)
        rng, finished = random.Random(seed), False
        for _ in range(3):
            finished = finished or run.run(until=run.network.now + rng.uniform(0, 0.3))
            if not finished:
                run.restart()
        assert finished or run.run(until=1000)
        jobs.check(run, ROUNDS)


def test_packets_of_another_round_are_never_added():
    """Packets of round k are replayed in rounds k + 1, k + 2^8, k + 2^16 and k + 2^32."""
    job = jobs.config()
    rounds = [5, 6, 5 + 2**8, 5 + 2**16, 5 + 2**32, 2**64 - 2]
    run = jobs.simulation(job, rounds, Faults(spread=0.002), 3)
    recorded: list[tuple[int, bytes]] = []
    send = run.network.send

    def replaying(receiver, datagram):
        recorded.append((receiver, datagram))
        send(receiver, datagram)
        old = random.Random(len(recorded)).choice(recorded)
        send(*old)

    run.network.send = replaying
    assert run.run(until=1000)
    jobs.check(run, rounds)
    assert run.server_counters[0].duplicates > 50


def test_incast_into_a_small_buffer_loses_packets_and_nothing_else():
    job = jobs.config(16)
    incast = Faults(rate=1e6, buffer_bytes=4096)
    run = jobs.simulation(job, ROUNDS, incast, 0, window=64)
    assert run.run(until=1000)
    jobs.check(run, ROUNDS)
    assert run.network.done["overflowed"] > 10


# -- stragglers ---------------------------------------------------------------------------------------------


def test_partial_sums_name_their_workers():
    job = jobs.config(4, fraction=0.75)
    for seed in range(15):
        rng = random.Random(seed)
        pace = {(worker, place): rng.choice([0, 0, 0.05]) for worker in range(4) for place in range(10)}
        run = jobs.simulation(job, range(8), HARSH, seed, pace=lambda worker, place, pace=pace: pace[worker, place])
        assert run.run(until=1000)
        jobs.check(run, range(8))
    assert sum(counters.late for counters in run.server_counters) > 0


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_slow_worker_is_left_out_a_bounded_number_of_times_in_a_row(most):
    job = jobs.config(4, fraction=0.75, max_misses=most)
    run = jobs.simulation(job, range(60), Faults(), 0, pace=lambda worker, place: 0.05 if worker == 3 else 0.01)
    assert run.run(until=1000)
    jobs.check(run, range(60))
    heard = [run.results[0, round_, 0].reply.counted[0, 3] for round_ in range(60)]
    gave = [jobs.payload(job, 3, round_, 0) is not None for round_ in range(60)]
    missed = longest = 0
    for in_it, had in zip(heard, gave):
        missed = missed + 1 if had and not in_it else 0
        longest = max(longest, missed)
    assert bool(most) <= longest <= most


def test_a_restart_with_partial_sums_ends_the_job():
    job = jobs.config(4, fraction=0.75)
    run = jobs.simulation(job, ROUNDS, Faults(), 0)
    assert not run.run(until=0.0007)
    with pytest.raises(SyncError, match="could count others"):
        run.restart()


# -- zeros after a timeout ----------------------------------------------------------------------------------


def filled(run) -> int:
    return sum(counters.filled for counters in run.worker_counters)


def test_workers_that_fill_have_zeros_or_the_sum_and_go_on():
    """However much is lost. Maxima are waited for, whatever they cost."""
    total = 0
    for seed in range(20):
        job = jobs.config(fill_seconds=(0.001, 0.02)[seed % 2])
        run = jobs.simulation(job, range(6), dataclasses.replace(HARSH, loss=(0.01, 0.3)[seed // 2 % 2]), seed)
        assert run.run(until=1000)
        jobs.check(run, range(6))
        total += filled(run)
    assert total > 100


def test_nothing_is_filled_where_results_come_in_time():
    run = jobs.simulation(jobs.config(fill_seconds=0.05), ROUNDS, Faults(spread=0.001), 0)
    assert run.run(until=1000)
    jobs.check(run, ROUNDS)
    assert not filled(run) and not run.server_counters[0].abandoned


def losing_sums(run, lost):
    """Let a network lose the packets of sums that `lost` chooses by receiver and packet."""
    send = run.network.send

    def losing(receiver, datagram):
        packet = unpack(datagram)
        if run.config.fills(packet.key.stream) and lost(receiver, packet):
            return
        send(receiver, datagram)

    run.network.send = losing


def test_a_worker_that_is_not_heard_is_in_no_sum_and_the_next_round_replaces_it():
    job = jobs.config(fill_seconds=0.02)
    run = jobs.simulation(job, range(8), Faults(), 0)
    losing_sums(run, lambda receiver, packet: receiver == SERVER and packet.worker == 2 and packet.key.round < 2)
    assert run.run(until=1000)
    jobs.check(run, range(8))
    filled_in = {round_: set() for round_ in range(8)}
    for (_, round_, stream), result in run.results.items():
        filled_in[round_].update(result.reply.filled.tolist() if job.fills(stream) else ())
    assert filled_in[0] == filled_in[1] == {True} and filled_in[7] == {False}  # once its window is wide again
    assert run.server_counters[0].abandoned >= 2 * 4  # packets of sums


def test_a_worker_alone_may_fill_and_the_others_have_the_sum():
    run = jobs.simulation(jobs.config(fill_seconds=0.02), range(1), Faults(), 0)
    losing_sums(run, lambda receiver, packet: receiver == 1 and packet.kind is PacketKind.RESULT)
    assert run.run(until=1000)
    jobs.check(run, range(1))
    assert [counters.filled for counters in run.worker_counters] == [0, 4, 0]
    assert run.server_counters[0].taken == 3 * 5


def test_a_restart_ends_no_job_that_fills():
    for seed in range(10):
        job = jobs.config(fill_seconds=0.02)
        run = jobs.simulation(job, ROUNDS, HARSH, seed, pace=lambda worker, place: 0.01 * worker)
        for at in (0.004, 0.03):
            if not run.run(until=at):
                run.restart()
        assert run.run(until=1000)
        jobs.check(run, ROUNDS)


# -- timers -------------------------------------------------------------------------------------------------


def test_timers_follow_the_round_trip():
    """The round trip jumps between 0.05 and 200 ms, without loss: almost nothing is sent again."""
    job = jobs.config(2)
    run = jobs.simulation(job, range(1000), Faults(), 0)
    delays, at = itertools.cycle([0.000025, 0.1, 0.001, 0.05, 0.0001]), 0.0
    while not run.run(until=at):
        delay = next(delays)
        run.network.faults = Faults(delay=delay, spread=0.05 * delay)
        at += 100 * 2 * delay  # about 100 rounds between jumps
    jobs.check(run, range(0, 1000, 100))
    sent = sum(counters.sent for counters in run.worker_counters)
    again = sum(counters.sent_again for counters in run.worker_counters)
    assert again < 0.01 * sent


def test_deadlines_hold_while_nothing_gets_through():
    job = jobs.config()
    run = jobs.simulation(job, ROUNDS, Faults(loss=1.0), 0, timeout=30.0)
    with pytest.raises(SyncError, match="in time"):
        run.run(until=1000)
    assert run.network.now < 31
    assert sum(counters.sent for counters in run.worker_counters) < 3 * 100  # no storm


def long_job(world_size: int) -> SessionConfig:
    return SessionConfig(world_size, (jobs.WIDE,), (Stream(Operation.SUM, 64 << 10),), 1024)


@pytest.mark.parametrize("rate", [None, 2e5], ids=["together", "one by one"])
def test_waiting_for_a_slow_worker_costs_a_few_small_packets(rate):
    job = long_job(3)
    run = jobs.simulation(job, range(6), Faults(rate=rate), 0, pace=lambda worker, place: 1.0 if worker == 2 else 0.001)
    assert run.run(until=1000)
    jobs.check(run, [0, 5])
    asked = [counters.sent - counters.sent_again - 6 * 64 for counters in run.worker_counters]
    assert max(asked) <= 3 * 5  # rounds that are waited for
    assert asked[2] == 0


def lost_in_the_last_of_twenty_rounds(lost) -> float:
    """Duration of the last round in seconds, in which packets chosen by `lost` are lost at their first sending."""
    run, ends = jobs.simulation(long_job(2), range(20), Faults(spread=0.0001), 0, window=16), []
    send, gone = run.network.send, set()

    def losing(receiver, datagram):
        packet = unpack(datagram)
        if packet.key.round == 19:
            ends.append(run.network.now)
            if lost(receiver, packet) and packet.key not in gone:
                gone.add(packet.key)
                return
        send(receiver, datagram)

    run.network.send = losing
    assert run.run(until=1000)
    jobs.check(run, [19])
    return run.network.now - ends[0]


def test_a_lost_tail_is_recovered_within_a_few_round_trips():
    """The last 16 of 64 packets. The round trip is a millisecond, and the grain of the timer another."""
    alone = lost_in_the_last_of_twenty_rounds(lambda receiver, packet: False)
    tail = lost_in_the_last_of_twenty_rounds(
        lambda receiver, packet: receiver == SERVER and packet.worker == 0 and packet.key.packet >= 48
    )
    assert alone < tail < alone + 0.015


def test_lost_results_are_recovered_within_a_few_round_trips():
    alone = lost_in_the_last_of_twenty_rounds(lambda receiver, packet: False)
    late = lost_in_the_last_of_twenty_rounds(
        lambda receiver, packet: receiver == 0 and packet.kind is PacketKind.RESULT and packet.key.packet % 2
    )
    assert alone < late < alone + 0.02


def test_rounds_without_contributions():
    job = jobs.config(2)
    run = jobs.simulation(job, [0], Faults(), 0)
    run._payloads = lambda worker, round_, stream: None
    assert run.run(until=10)
    assert run.results[0, 0, 0].reply.counts.tolist() == [0, 0, 0]
    assert not run.results[0, 0, 0].values.any()
    assert (run.results[1, 0, 1].values == -np.inf).all()
