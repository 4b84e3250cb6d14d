"""Nothing is lost or made from nothing: after everything that can happen the world still adds up, and the same seed is
the same world."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plants import MIX, count, engine_with, of_all, plant, pool, ready, run_checked, state_bytes, tally

from models.fleetsim import world as w
from models.fleetsim.build import Size
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import CHAT, Clients, ServiceOf

IMPATIENT = Clients(ttft_timeout_s=4.0, total_timeout_s=30.0, retries=2, resubmit_share=0.7, resubmit_after_s=5.0)


def calm(p: Plant) -> None:
    run_checked(p, 300.0)
    assert count(p, "timed_out") == tally(p, "failed") == 0


def overload(p: Plant) -> None:
    p.world.rates[:] *= 20
    run_checked(p, 200.0)
    assert count(p, "timed_out") > 0


def crash_of_half(p: Plant) -> None:
    run_checked(p, 100.3)
    for replica in ready(p)[:2]:
        p.crash(replica)
        assert recount(p) == ()
    run_checked(p, 300.0)
    assert count(p, "cut") > 0


def flushes(p: Plant) -> None:
    for moment in (60.0, 61.0, 120.5):
        run_checked(p, moment)
        for replica in ready(p):
            p.flush(replica)
        assert recount(p) == ()
    run_checked(p, 200.0)


def drain(p: Plant) -> None:
    run_checked(p, 60.0)
    p.scale("p", 1)
    assert recount(p) == ()
    run_checked(p, 200.0)
    assert p.count("p", w.READY) == 1


def throttled(p: Plant) -> None:
    for moment, factor in ((50.01, 3.0), (100.02, 1.0)):
        run_checked(p, moment)
        p.throttle(0, factor)
    run_checked(p, 150.0)


def scaled_up_and_down(p: Plant) -> None:
    for moment, wanted in ((20.0, 7), (25.0, 3), (40.0, 8), (90.0, 2), (95.0, 6), (150.0, 0), (160.0, 4)):
        run_checked(p, moment, 3)
        p.scale("p", wanted)
        assert recount(p) == ()
    run_checked(p, 250.0)
    assert p.count("p", w.READY) == 4


def asleep_and_awake(p: Plant) -> None:
    run_checked(p, 30.0)
    p.sleep(0)
    p.sleep(1, level=2)
    run_checked(p, 80.0)
    assert p.count("p", w.ASLEEP) == 2
    p.wake(0)
    p.wake(1)
    run_checked(p, 150.0)
    assert p.count("p", w.READY) == 4


def limited(p: Plant) -> None:
    p.limit(0, 0, w.NEW, w.FIRST, 0.5)
    p.limit(0, 0, w.CONTINUING, w.RETRY, 0.1, final=True)
    overload(p)
    assert count(p, "limited") > 0
    assert tally(p, "resubmitted") > 0


def rolled(p: Plant) -> None:
    run_checked(p, 30.0)
    p.roll("p")
    run_checked(p, 400.0)
    assert p.count("p", w.READY) == 4


def lost_zone(p: Plant) -> None:
    run_checked(p, 50.0)
    zone = p.places("p", zone=0)
    p.block("p", 4)
    p.lose(zone)
    assert recount(p) == ()
    run_checked(p, 80.0)
    p.restore(zone)
    run_checked(p, 120.0)
    p.block("p", 0)
    run_checked(p, 150.0)
    assert p.count("p", w.READY) == 4


def warmed(p: Plant) -> None:
    for replica in ready(p):
        for profile in range(len(p.profiles)):
            p.warm(replica, profile)
    assert recount(p) == ()
    p.crash(0)
    run_checked(p, 60.0)


@pytest.mark.parametrize(
    "happens",
    [
        calm, overload, crash_of_half, flushes, drain, throttled, scaled_up_and_down, asleep_and_awake, limited, rolled,
        lost_zone, warmed,
    ],
    ids=lambda happens: happens.__name__,
)  # fmt: skip
def test_the_world_adds_up_after_everything_that_can_happen(happens: Callable[[Plant], None]) -> None:
    clients = Clients() if happens is calm else IMPATIENT
    happens(plant(pool(spare=4, zones=2), rate=0.5 if happens is calm else 1.0, clients=clients))


def test_the_world_adds_up_while_memory_is_short_and_calls_are_preempted() -> None:
    short = engine_with(kv_tokens=40_000)
    small = tuple(replace(profile, context_max=30_000) for profile in MIX)
    p = plant(pool(replicas=2, engine=short), rate=2.0, profiles=small, clients=IMPATIENT)
    run_checked(p, 200.0, 40)
    assert of_all(p, "preemptions") > 10


OPERATIONS: dict[str, Callable[[Plant, int], None]] = {
    "crash": Plant.crash,
    "flush": Plant.flush,
    "sleep": Plant.sleep,
    "deep": lambda p, i: p.sleep(i, 2),
    "wake": Plant.wake,
    "warm": lambda p, i: p.warm(i, i % len(p.profiles)),
    "slow": lambda p, i: p.throttle(i, 2.0),
    "scale": lambda p, i: p.scale("p", i),
    "roll": lambda p, i: p.roll("p"),
    "lose": lambda p, i: p.lose([i]),
    "restore": lambda p, i: p.restore(range(i + 1)),
    "block": lambda p, i: p.block("p", i),
    "limit": lambda p, i: p.limit(0, 0, i % 2, i // 2 % 2, float(i - 1)),
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.floats(0.0, 15.0)), max_size=25)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 1000))
def test_the_world_adds_up_whatever_is_done_to_it(steps: list[tuple[str, int, float]], seed: int) -> None:
    short = engine_with(kv_tokens=60_000, by_priority=bool(seed % 2))
    small = tuple(replace(profile, context_max=40_000) for profile in MIX)
    p = plant(pool(spare=2, engine=short), rate=3.0, seed=seed, profiles=small, clients=IMPATIENT, classes=(0.5, 0.5))
    for name, number, wait_s in steps:
        OPERATIONS[name](p, number)
        p.run(p.now_s + wait_s)
        assert recount(p) == ()
    p.run(p.now_s + 30.0)
    assert recount(p) == ()


def busy(seed: int = 1) -> Plant:
    return plant(pool(spare=2), rate=2.0, seed=seed, clients=IMPATIENT)


def test_the_same_seed_is_the_same_world_byte_for_byte() -> None:
    worlds = []
    for seed in (1, 1, 2):
        p = busy(seed)
        p.run(60.0)
        p.crash(0)
        p.run(120.0)
        worlds.append(state_bytes(p))
    assert worlds[0] == worlds[1] != worlds[2]


def test_running_in_one_go_is_running_in_many_small_steps_byte_for_byte() -> None:
    one, many = busy(), busy()
    one.run(90.0)
    for moment in np.linspace(0.0, 90.0, 4001)[1:]:
        many.run(float(moment))
    assert state_bytes(one) == state_bytes(many)


def test_reading_the_counters_changes_nothing_that_happens_later() -> None:
    unread, read = busy(), busy()
    unread.run(90.0)
    for moment in np.linspace(0.0, 90.0, 1001)[1:]:
        read.run(float(moment))
        read.settle()
    unread.settle()
    for name in ("tasks", "calls", "counts", "tallies", "event_at", "random", "clock", "itl_counts", "ttft_counts"):
        assert getattr(unread.world, name).tobytes() == getattr(read.world, name).tobytes(), name
    for name in w.REPLICA.names or ():
        # Sums of durations are added up in other pieces: equal up to rounding.
        assert np.allclose(unread.world.replicas[name], read.world.replicas[name], rtol=1e-9, atol=0.0), name


def test_a_recount_finds_what_does_not_add_up() -> None:
    p = busy()
    p.run(60.0)
    for array, name in (("counts", "finished"), ("tallies", "started"), ("replicas", "kv_used"), ("pools", "active")):
        rows = getattr(p.world, array)[name]
        rows.flat[0] += 1
        assert any("is kept" in sentence for sentence in recount(p)), name
        rows.flat[0] -= 1
    assert recount(p) == ()


def test_a_scenario_that_is_too_large_for_its_plant_says_so() -> None:
    p = Plant((ServiceOf("s", (pool(),), (50.0,), profiles=(CHAT,)),), 1, Size(10, 10, 1000, 1000))
    with pytest.raises(IndexError, match="at once: the scenario is larger than the plant was made for"):
        p.run(60.0)
