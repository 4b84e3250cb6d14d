"""One engine keeps vLLM's rules: budget, order, preemption, aborts, bounds."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from plants import ONE_STEP, count, engine_with, of_all, plant, pool, tally

from models.fleetsim import world as w
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import Clients, Profile

PATIENT = Clients(ttft_timeout_s=1e6, total_timeout_s=1e6, retries=0)


def moments(p: Plant, until_s: float, every_s: float = 0.01) -> Iterator[float]:
    while p.now_s < until_s:
        p.run(p.now_s + every_s)
        yield p.now_s


def in_step(p: Plant, replica: int = 0) -> int:
    batch = p.world.running[replica, : p.world.replicas[replica]["running"]]
    return int(p.world.calls["in_step"][batch].sum())


def test_no_step_takes_more_tokens_than_its_budget() -> None:
    e = engine_with(token_budget=512)
    p = plant(pool(replicas=1, engine=e), rate=2.0, clients=PATIENT)
    steps = [in_step(p) for _ in moments(p, 60.0)]
    assert max(steps) == 512
    assert recount(p) == ()


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    long = Profile("long", 1.0, 160, 1.0, 0.0, 1, 20_000.0, 0.0, 200.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0, 1.5), profiles=(long,), clients=PATIENT)
    p.run(1.5)
    p.settle()
    first = p.world.running[0, 0]
    before = int(p.world.calls[first]["generated"])
    for _ in moments(p, 20.0, 0.001):
        assert p.world.calls[first]["state"] == w.RUNNING
        batch = p.world.running[0, : p.world.replicas[0]["running"]]
        if len(batch) == 2 and p.world.calls[batch[1]]["generated"]:
            break
    p.settle()
    # 20,160 tokens in chunks of at most 8,191 beside one token of the first call: three steps.
    assert 3 <= p.world.calls[first]["generated"] - before <= 6
    # Its stream slows down to the pace of full chunks: 0.2 s and more.
    assert p.world.itl_counts[0, 7:].sum() >= 2


def order_of_ends(p: Plant, until_s: float) -> list[int]:
    """Tasks of one call in the order in which they end, by their serial numbers."""
    there: set[int] = set()
    ends: list[int] = []
    for _ in moments(p, until_s):
        live = {int(t["serial"]) for t in p.world.tasks[p.world.tasks["live"] == w.LIVE]}
        ends += sorted(there - live)
        there = live
    return ends


def test_calls_are_served_in_the_order_they_came() -> None:
    one = engine_with(max_seqs=1)
    times = tuple(np.linspace(0.0, 1.0, 20))
    p = plant(pool(replicas=1, engine=one), rate=0.0, arrivals_s=times, profiles=(ONE_STEP,), clients=PATIENT)
    ends = order_of_ends(p, 30.0)
    assert len(ends) == 20
    assert ends == sorted(ends)


def test_the_more_important_class_is_served_first() -> None:
    one = engine_with(max_seqs=1, by_priority=True)
    times = tuple(np.linspace(0.0, 0.2, 30))
    p = plant(
        pool(replicas=1, engine=one), rate=0.0, arrivals_s=times, profiles=(ONE_STEP,), clients=PATIENT,
        classes=(0.5, 0.5),
    )  # fmt: skip
    for _ in moments(p, 30.0):
        queue = p.world.queues[0, : p.world.replicas[0]["waiting"]]
        classes = p.world.tasks["klass"][p.world.calls["task"][queue]]
        assert (np.diff(classes) >= 0).all()
        for klass in (0, 1):
            sent_s = p.world.calls["sent_s"][queue[classes == klass]]
            assert (np.diff(sent_s) >= 0).all()
    assert count(p, "finished") == 30


SHORT_OF_MEMORY = Profile("talks", 1.0, 160, 1.0, 0.0, 1, 2_000.0, 0.0, 1_500.0, 0.0, 1.0, context_max=8_000)


def test_preempted_calls_are_computed_again_save_for_what_is_still_cached() -> None:
    short = engine_with(kv_tokens=16_000)
    p = plant(
        pool(replicas=1, engine=short), rate=0.0, arrivals_s=(0.0,) * 7, profiles=(SHORT_OF_MEMORY,), clients=PATIENT
    )
    preempted = 0
    for _ in moments(p, 120.0, 0.2):
        preempted = max(preempted, int(p.world.calls["preempted"].max()))
    assert recount(p) == ()
    assert preempted > 0
    assert tally(p, "succeeded") == 7
    assert of_all(p, "preemptions") > 0
    assert of_all(p, "generated_tokens") == 7 * 1_500
    once = 160 + 7 * 2_000
    again = of_all(p, "prefill_tokens") - once
    # At most a whole context each time; less, because the tail is evicted and the head hits.
    assert 0 < again < of_all(p, "preemptions") * 3_600
    # The gap that a preemption tears into a stream is seen by the one who waits for the next token.
    assert p.world.itl_counts[0, 12:].sum() > 0


def test_memory_that_is_short_preempts_the_least_important_class() -> None:
    short = engine_with(kv_tokens=16_000, by_priority=True)
    p = plant(
        pool(replicas=1, engine=short), rate=0.0, arrivals_s=(0.0,) * 7, profiles=(SHORT_OF_MEMORY,), clients=PATIENT,
        classes=(0.5, 0.5), seed=4,
    )  # fmt: skip
    preempted = {0: 0, 1: 0}
    for _ in moments(p, 120.0, 0.05):
        for call in p.world.calls[p.world.calls["state"] != w.FREE]:
            klass = int(p.world.tasks[call["task"]]["klass"])
            preempted[klass] = max(preempted[klass], int(call["preempted"]))
    assert p.world.tallies["started"].sum(axis=(0, 2)).min() > 0
    assert preempted[0] == 0 < preempted[1]


def test_a_call_that_its_client_gave_up_frees_its_blocks() -> None:
    impatient = Clients(ttft_timeout_s=0.5, total_timeout_s=1.0, retries=0)
    times = tuple(np.linspace(0.0, 1.0, 40))
    long = replace(ONE_STEP, input_mean=4_000.0, output_mean=400.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=times, profiles=(long,), clients=impatient)
    p.run(0.6)
    assert p.world.replicas[0]["kv_used"] > 0
    p.run(10.0)
    assert count(p, "timed_out") == tally(p, "failed") > 0
    assert p.world.replicas[0]["kv_used"] == p.world.replicas[0]["running"] == p.world.replicas[0]["waiting"] == 0


def test_a_full_queue_answers_at_once() -> None:
    bounded = engine_with(max_seqs=1, max_queued=3)
    p = plant(pool(replicas=1, engine=bounded), rate=0.0, arrivals_s=(0.0,) * 10, profiles=(ONE_STEP,), clients=PATIENT)
    longest = max(int(p.world.replicas[0]["waiting"]) for _ in moments(p, 20.0))
    assert longest == 3
    # One runs, three wait.
    assert count(p, "refused") == of_all(p, "rejected") == tally(p, "failed") == 6
    assert tally(p, "succeeded") == 4


def test_a_full_breaker_answers_at_once() -> None:
    p = plant(pool(replicas=2, max_parallel=5), rate=0.0, arrivals_s=(0.0,) * 9, profiles=(ONE_STEP,), clients=PATIENT)
    p.run(20.0)
    assert (count(p, "overflowed"), count(p, "finished")) == (4, 5)


def test_a_call_that_arrives_in_a_jump_waits_for_the_step_under_way_and_no_more() -> None:
    long = Profile("long", 1.0, 160, 1.0, 0.0, 1, 100.0, 0.0, 1_000.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0, 2.0), profiles=(long,), clients=PATIENT)
    p.run(1.9999)
    assert p.world.replicas[0]["jump"] > 1
    p.run(2.0)
    home = p.world.replicas[0]
    assert home["jump"] == 1
    assert home["step_began_s"] <= 2.0 < home["step_began_s"] + home["step_s"]
    p.run(2.0 + 2 * float(home["step_s"]))
    assert home["running"] == 2


def test_a_crash_in_a_jump_counts_the_tokens_that_were_streamed() -> None:
    long = Profile("long", 1.0, 160, 1.0, 0.0, 1, 100.0, 0.0, 1_000.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0,), profiles=(long,), clients=PATIENT)
    p.run(2.0)
    jump = p.world.replicas[0].copy()
    assert jump["jump"] > 1
    p.crash(0)
    streamed = jump["generated_tokens"] + int((2.0 - jump["step_began_s"]) / jump["step_s"])
    assert tally(p, "lost_output") == streamed > jump["generated_tokens"]
    assert (count(p, "cut"), tally(p, "failed")) == (1, 1)
    assert recount(p) == ()


def test_gauges_change_only_as_steps_end_and_stay_when_the_engine_stops() -> None:
    one = engine_with(max_seqs=1)
    p = plant(pool(replicas=1, engine=one), rate=0.0, arrivals_s=(0.0, 0.0), profiles=(ONE_STEP,), clients=PATIENT)
    p.run(0.001)
    home = p.world.replicas[0]
    assert (home["running"], home["waiting"], home["shown_running"], home["shown_waiting"]) == (1, 1, 0, 0)
    p.run(0.1)
    assert (home["shown_running"], home["shown_waiting"]) == (1, 1)
    p.run(30.0)
    assert (home["running"], home["shown_running"], home["shown_waiting"], home["shown_kv"]) == (0, 0, 0, 0)


def test_a_throttled_replica_takes_longer_for_the_same_work() -> None:
    times = []
    for slow in (1.0, 3.0):
        p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0,) * 5, profiles=(ONE_STEP,), clients=PATIENT)
        p.throttle(0, slow)
        p.run(30.0)
        times.append(float(p.world.replicas[0]["busy_s"]))
    assert times[1] == pytest.approx(3.0 * times[0])
