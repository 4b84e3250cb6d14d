"""Clients and the gateway: arrivals, retries, limits, weights, affinity."""

from dataclasses import replace

import numpy as np
import pytest
from plants import ONE_STEP, ONLY_COPILOT, count, engine_with, of_all, plant, pool, tally

from models.fleetsim import world as w
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import CHAT, Clients, ServiceOf


def test_arrivals_follow_the_rate_of_each_bin_which_repeat() -> None:
    p = plant(pool(), rate=0.0, tasks_per_s=(1.0, 4.0, 0.0), bin_s=100.0, profiles=(ONE_STEP,))
    started = []
    for moment in np.arange(100.0, 1801.0, 100.0):
        p.run(float(moment))
        started.append(tally(p, "started"))
    per_bin = np.diff([0.0, *started]).reshape(6, 3).sum(axis=0)
    assert abs(per_bin[0] - 600) < 4 * 600**0.5
    assert abs(per_bin[1] - 2400) < 4 * 2400**0.5
    assert per_bin[2] == 0


def test_a_very_low_rate_still_brings_tasks() -> None:
    p = plant(pool(replicas=1), rate=0.0005, profiles=(ONE_STEP,))
    p.run(400_000.0)
    assert abs(tally(p, "started") - 200) < 4 * 200**0.5


def test_each_service_repeats_bins_of_its_own() -> None:
    services = (
        ServiceOf("a", (pool("pa"),), (1.0, 0.0), profiles=(ONE_STEP,)),
        ServiceOf("b", (pool("pb"),), (0.0, 0.0, 2.0), profiles=(CHAT, ONE_STEP)),
    )
    p = Plant(services, 1)
    p.run(3600.0)
    a, b = p.world.tallies["started"].sum(axis=(1, 2))
    assert abs(a - 1800) < 4 * 1800**0.5
    assert abs(b - 2400) < 4 * 2400**0.5
    assert [profile.name for profile in p.profiles] == ["one", "chat"]
    assert p.world.tallies["started"][0, :, 1].sum() == 0
    share = p.world.tallies["started"][1, :, 1].sum() / b
    assert abs(share - 0.6 / 1.6) < 0.04
    assert recount(p) == ()


def test_a_trace_arrives_when_it_says_beside_the_random_ones() -> None:
    times = (1.0, 1.0, 2.5, 7.25)
    p = plant(pool(), rate=0.0, arrivals_s=times, profiles=(ONE_STEP,))
    began = []
    for moment in np.arange(0.25, 10.0, 0.25):
        before = tally(p, "started")
        p.run(float(moment))
        began += [float(moment)] * int(tally(p, "started") - before)
    assert tuple(began) == times
    both = plant(pool(), rate=1.0, arrivals_s=times, profiles=(ONE_STEP,))
    alone = plant(pool(), rate=1.0, profiles=(ONE_STEP,))
    both.run(300.0)
    alone.run(300.0)
    assert abs(tally(both, "started") - tally(alone, "started") - 4) < 80


def test_a_token_bucket_admits_its_rate_and_once_its_depth() -> None:
    clients = Clients(retries=0)
    p = plant(pool(), rate=20.0, profiles=(ONE_STEP,), clients=clients)
    p.limit(0, 0, w.NEW, w.FIRST, 3.0)
    for moment in range(1, 101):
        p.run(float(moment))
        admitted = count(p, "admitted")
        assert admitted <= 3.0 * moment + 3.0
        p.limit(0, 0, w.NEW, w.FIRST, 3.0)  # said again, it gives nothing away
    assert admitted > 3.0 * 100 - 3.0
    assert count(p, "limited") == tally(p, "failed") > 1000


def test_a_bucket_of_less_than_one_call_per_second_fills_slowly() -> None:
    p = plant(pool(), rate=20.0, profiles=(ONE_STEP,), clients=Clients(retries=0))
    p.limit(0, 0, w.NEW, w.FIRST, 0.1)
    p.run(100.0)
    assert 10 <= count(p, "admitted") <= 11


def test_a_final_answer_is_not_tried_again() -> None:
    attempts = []
    for final in (False, True):
        p = plant(pool(), rate=2.0, profiles=(ONE_STEP,), clients=Clients(retries=3, backoff_s=0.1))
        for attempt in (w.FIRST, w.RETRY):
            p.limit(0, 0, w.NEW, attempt, 0.0, final=final)
        p.world.buckets["level"] = 0.0
        p.run(60.0)
        attempts.append(count(p, "sent") / tally(p, "started"))
    assert 3.5 < attempts[0] <= 4.0
    assert attempts[1] == 1.0


@pytest.mark.parametrize("heeds", [False, True])
def test_retry_after_is_heeded_or_not(heeds: bool) -> None:
    clients = Clients(retries=1, backoff_s=1.0, heeds_retry_after=heeds)
    p = plant(pool(), rate=0.0, arrivals_s=(0.0,), retry_after_s=20.0, profiles=(ONE_STEP,), clients=clients)
    p.limit(0, 0, w.NEW, w.FIRST, 0.0)
    p.world.buckets["level"] = 0.0
    p.run(19.0)
    assert count(p, "sent") == (1 if heeds else 2)
    p.run(20.5)
    assert count(p, "sent") == 2


def test_users_begin_a_failed_task_anew_as_often_as_they_are_said_to() -> None:
    clients = Clients(retries=0, resubmit_share=0.6, resubmit_after_s=5.0)
    p = plant(pool(), rate=5.0, profiles=(ONE_STEP,), clients=clients)
    p.limit(0, 0, w.NEW, w.FIRST, 0.0)
    p.world.buckets["level"] = 0.0
    p.run(600.0)
    assert tally(p, "succeeded") == 0
    assert tally(p, "resubmitted") / tally(p, "failed") == pytest.approx(0.6, abs=0.03)
    assert tally(p, "started") == pytest.approx(5.0 * 600 / (1 - 0.6), rel=0.08)


def test_what_a_failed_task_spent_is_waste_and_what_a_good_one_spent_is_not() -> None:
    p = plant(pool(replicas=2), rate=12.0, clients=Clients(ttft_timeout_s=3.0, retries=0), profiles=ONLY_COPILOT)
    p.run(120.0)
    assert tally(p, "failed") > 0 < tally(p, "succeeded")
    assert tally(p, "lost_output") > 0
    assert tally(p, "lost_prompt") > tally(p, "failed") * 100


def homes(p: Plant) -> dict[int, int]:
    """The pool of each task that has a call, by the task's serial number."""
    calls = p.world.calls[p.world.calls["state"] != w.FREE]
    rows = p.world.replicas["pool"][calls["replica"]]
    return dict(zip(p.world.tasks["serial"][calls["task"]].tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("sticky", [True, False])
def test_weights_split_the_traffic_in_proportion(sticky: bool) -> None:
    p = plant(
        pool("a", weight=0.7), pool("b", weight=0.2), pool("c", weight=0.1), rate=5.0, profiles=(ONE_STEP,),
        sticky_weights=sticky,
    )  # fmt: skip
    p.run(600.0)
    p.settle()
    stopped = np.array([p.world.replicas["stopped"][p.members(name)].sum() for name in "abc"])
    assert np.abs(stopped / stopped.sum() - [0.7, 0.2, 0.1]).max() < 0.03


def test_sticky_sessions_stay_and_a_changed_weight_moves_just_its_share() -> None:
    session = replace(ONE_STEP, steps_mean=400.0, steps_max=400, gap_mean_s=0.05, input_mean=10.0, output_mean=2.0)
    times = tuple(np.linspace(0.0, 1.0, 400))
    p = plant(pool("a", 8), pool("b", 8), rate=0.0, arrivals_s=times, profiles=(session,))

    def watched(until_s: float) -> dict[int, set[int]]:
        seen: dict[int, set[int]] = {}
        while p.now_s < until_s:
            p.run(p.now_s + 0.02)
            for task, row in homes(p).items():
                seen.setdefault(task, set()).add(row)
        return seen

    before = watched(5.0)
    assert all(len(rows) == 1 for rows in before.values())
    p.set_weight("a", 0.6)
    p.set_weight("b", 1.4)
    p.run(6.0)
    after = watched(10.0)
    assert all(len(rows) == 1 for rows in after.values())
    both = before.keys() & after.keys()
    moved = [task for task in both if before[task] != after[task]]
    assert len(both) > 350
    # From 0.5 : 0.5 to 0.3 : 0.7, and nobody moves against the change.
    assert len(moved) / len(both) == pytest.approx(0.2, abs=0.05)
    assert all(after[task] == {1} for task in moved)


def test_affinity_finds_the_session_again_and_least_loaded_does_not() -> None:
    hits = []
    for affinity in (True, False):
        p = plant(pool(replicas=6), rate=0.5, profiles=ONLY_COPILOT, affinity=affinity)
        p.run(900.0)
        hits.append(of_all(p, "prefix_hits") / of_all(p, "prefix_queries"))
    assert hits[0] > 0.9
    assert hits[1] < hits[0] - 0.1


def test_a_session_spills_over_while_its_home_has_too_many_waiting() -> None:
    longest = []
    for spill in (2, 10_000):
        few = engine_with(max_seqs=4)
        p = plant(pool(replicas=4, engine=few), rate=6.0, profiles=(ONE_STEP,), spill_waiting=spill)
        p.throttle(0, 20.0)
        longest.append(0)
        while p.now_s < 100.0:
            p.run(p.now_s + 0.25)
            longest[-1] = max(longest[-1], int(p.world.replicas["waiting"].max()))
    # Up to two may wait when the third comes; then the session goes where there is room.
    assert longest[0] == 3
    assert longest[1] > 10


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tasks_per_s": ()}, "tasks_per_s needs rates"),
        ({"arrivals_s": (2.0, 1.0)}, "arrivals_s must be in order"),
        ({"classes": (0.0,)}, "must not all be zero"),
        ({"pools": ()}, "needs pools"),
        ({"pools": (pool(replicas=4, spare=-1),)}, "replicas <= replicas_max"),
        ({"profiles": (replace(CHAT, context_max=10**9),)}, "needs a context_max from"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused_with_the_reason(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plant(pool(), **change)  # type: ignore[arg-type]
