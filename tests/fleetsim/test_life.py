"""The life of replicas: starts, drains, crashes, sleep, roll-outs, and places that are lost or taken."""

from dataclasses import replace

import pytest
from plants import QUICK, count, of_all, plant, pool, ready, tally

from models.fleetsim import world as w
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import Clients, Profile

LONG = Profile("long", 1.0, 160, 1.0, 0.0, 1, 100.0, 0.0, 3_000.0, 0.0, 1.0, context_max=20_000)
"""Half a minute of one stream."""
PATIENT = Clients(ttft_timeout_s=1e6, total_timeout_s=1e6, retries=0)


def states(p: Plant, name: str = "p") -> list[int]:
    return [int(p.world.replicas[i]["state"]) for i in p.members(name)]


def test_a_start_goes_through_its_parts_and_holds_gpus_meanwhile() -> None:
    p = plant(pool(replicas=0, spare=1), rate=0.0)
    p.scale("p", 1)
    seen = []
    for moment in (0.5, 2.0, 4.0, 7.0, 10.5):
        p.run(moment)
        seen += states(p)
    assert seen == [w.SCHEDULING, w.PULLING, w.LOADING, w.COMPILING, w.READY]
    assert p.gpu_s("p") == 4 * 10.5


def test_a_draining_replica_ends_as_soon_as_it_is_idle() -> None:
    short = replace(LONG, output_mean=300.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0,), profiles=(short,), clients=PATIENT)
    p.run(1.0)
    p.scale("p", 0)
    p.run(1.1)
    assert states(p) == [w.DRAINING]
    p.run(20.0)
    assert tally(p, "succeeded") == 1
    ended_s = p.changes[-1].at_s
    assert p.changes[-1].after == w.GONE
    assert ended_s == pytest.approx(float(p.past["e2e_sum"][0] + p.world.replicas[0]["e2e_sum"]))
    assert p.gpu_s("p") == pytest.approx(4 * ended_s)


def test_an_idle_replica_is_drained_at_once() -> None:
    p = plant(pool(replicas=2), rate=0.0)
    p.run(5.0)
    p.scale("p", 1)
    p.run(5.0)
    assert sorted(states(p)) == [w.GONE, w.READY]


def test_a_draining_replica_gets_no_calls_and_loses_what_it_has_at_its_deadline() -> None:
    p = plant(
        pool(replicas=2), rate=0.0, arrivals_s=(0.0, 0.0, 5.0, 6.0), profiles=(LONG,), clients=PATIENT, affinity=False
    )
    p.run(3.0)
    p.scale("p", 1)
    (draining,) = (i for i in p.members("p") if p.world.replicas[i]["state"] == w.DRAINING)
    p.run(3.0 + QUICK.drain_s - 0.1)
    assert p.world.replicas[draining]["running"] == 1
    assert p.world.replicas[ready(p)[0]]["running"] == 3
    p.run(3.0 + QUICK.drain_s)
    assert p.world.replicas[draining]["state"] == w.GONE
    assert (count(p, "cut"), tally(p, "failed")) == (1, 1)
    assert recount(p) == ()


def test_of_too_many_replicas_those_not_ready_end_first_then_the_newest() -> None:
    p = plant(pool(replicas=1, spare=3), rate=0.0)
    p.run(1.0)
    p.scale("p", 2)
    p.run(20.0)
    p.scale("p", 4)
    p.run(22.0)
    p.scale("p", 2)
    p.run(22.0)
    assert states(p) == [w.READY, w.READY, w.GONE, w.GONE]
    p.scale("p", 1)
    p.run(23.0)
    assert states(p) == [w.READY, w.GONE, w.GONE, w.GONE]


def test_a_crash_loses_streams_for_good_and_calls_that_wait_are_sent_again() -> None:
    retrying = replace(PATIENT, retries=5)
    p = plant(pool(replicas=2), rate=0.0, arrivals_s=(0.0,) * 20, profiles=(LONG,), clients=retrying, affinity=False)
    p.world.pools["max_seqs"] = 6
    p.run(2.0)
    assert p.world.replicas["running"].tolist() == [6, 6]
    p.crash(0)
    assert (count(p, "cut"), count(p, "lost"), tally(p, "failed")) == (6, 4, 6)
    p.run(400.0)
    assert (tally(p, "succeeded"), tally(p, "failed")) == (14, 6)
    assert p.world.counts[0, 0, w.NEW, w.RETRY]["sent"] >= 4


def test_a_crashed_container_starts_again_where_it_is_with_its_counters_at_zero() -> None:
    p = plant(pool(replicas=1), rate=1.0)
    p.run(30.0)
    before = p.world.replicas[0].copy()
    total = of_all(p, "generated_tokens")
    p.crash(0)
    row = p.world.replicas[0]
    assert (row["state"], row["restarts"], row["born"], row["process_s"]) == (w.LOADING, 1, before["born"], 30.0)
    assert row["generated_tokens"] == row["prefix_queries"] == row["shown_running"] == 0
    assert p.world.ttft_counts[0].sum() == 0
    assert of_all(p, "generated_tokens") >= total > 0
    p.run(30.0 + QUICK.load_s + QUICK.compile_s)
    assert row["state"] == w.READY
    assert p.gpu_s("p") == pytest.approx(4 * p.now_s)


def test_a_new_pod_has_a_number_of_its_own() -> None:
    p = plant(pool(replicas=1), rate=0.0)
    born = int(p.world.replicas[0]["born"])
    for wanted in (0, 1):
        p.scale("p", wanted)
        p.run(p.now_s + 20.0)
    assert p.world.replicas[0]["state"] == w.READY
    assert p.world.replicas[0]["born"] != born


@pytest.mark.parametrize(("level", "takes_s"), [(1, QUICK.wake_s), (2, QUICK.load_s)])
def test_waking_from_level_2_takes_as_long_as_loading_the_weights(level: int, takes_s: float) -> None:
    p = plant(pool(replicas=1), rate=0.0)
    p.sleep(0, level)
    p.run(10.0)
    assert states(p) == [w.ASLEEP]
    p.wake(0)
    p.run(10.0 + takes_s - 0.01)
    assert states(p) == [w.WAKING]
    p.run(10.0 + takes_s)
    assert states(p) == [w.READY]
    assert p.gpu_s("p") == pytest.approx(4 * p.now_s)


def test_a_replica_finishes_what_it_has_before_it_sleeps_and_wakes_without_a_cache() -> None:
    short = replace(LONG, output_mean=300.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0,), profiles=(short,), clients=PATIENT)
    p.run(1.0)
    p.sleep(0)
    p.run(1.5)
    assert states(p) == [w.DRAINING]
    p.run(15.0)
    assert states(p) == [w.ASLEEP]
    assert tally(p, "succeeded") == 1
    assert p.world.replicas[0]["kv_idle"] == 0


def test_starts_that_find_their_places_taken_wait_without_gpus() -> None:
    p = plant(pool(replicas=1, spare=3), rate=0.0)
    p.block("p", 2)
    p.scale("p", 4)
    p.run(20.0)
    assert sorted(states(p)) == [w.UNSCHEDULABLE, w.UNSCHEDULABLE, w.READY, w.READY]
    assert p.gpu_s("p") == pytest.approx(2 * 4 * 20.0)
    p.block("p", 0)
    p.run(40.0)
    assert states(p) == [w.READY] * 4
    assert recount(p) == ()


def test_a_roll_out_replaces_one_replica_after_another() -> None:
    p = plant(pool(replicas=3), rate=1.0)
    p.run(20.0)
    old = {int(p.world.replicas[i]["born"]) for i in p.members("p")}
    p.roll("p")
    fewest = 3
    while p.now_s < 200.0:
        p.run(p.now_s + 0.5)
        fewest = min(fewest, len(ready(p)))
    assert fewest == 2
    assert states(p) == [w.READY] * 3
    assert not old & {int(p.world.replicas[i]["born"]) for i in p.members("p")}


def test_a_roll_out_uses_a_spare_place_before_the_old_replica_is_gone() -> None:
    p = plant(
        pool(replicas=2, spare=1), rate=0.0, arrivals_s=(0.0, 0.0), profiles=(LONG,), clients=PATIENT, affinity=False
    )
    p.run(2.0)
    p.roll("p")
    p.run(3.0)
    assert sorted(states(p)) == [w.PULLING, w.READY, w.DRAINING]


def test_replicas_are_dealt_over_nodes_and_zones_and_lost_with_them() -> None:
    p = plant(pool(replicas=6, zones=2, nodes=4), rate=0.0)
    assert p.places("p", node=1) == [1, 5]
    assert p.places("p", zone=0) == [0, 2, 4]
    assert p.places("p") == p.members("p")
    p.lose(p.places("p", zone=0))
    assert p.count("p", w.READY) == 3
    assert p.count("p", w.UNSCHEDULABLE) == 3
    p.run(60.0)
    assert p.count("p", w.UNSCHEDULABLE) == 3
    p.restore(p.places("p", zone=0))
    p.run(71.0)
    assert p.count("p", w.READY) == 6


def test_what_was_lost_starts_elsewhere_where_there_is_room() -> None:
    p = plant(pool(replicas=2, spare=2, nodes=4), rate=0.0)
    p.lose([0])
    p.run(20.0)
    assert states(p) == [w.GONE, w.READY, w.READY, w.GONE]


def test_a_pool_without_ready_replicas_is_unroutable() -> None:
    p = plant(pool(replicas=2), rate=5.0, clients=replace(PATIENT, retries=1))
    p.lose(p.places("p"))
    p.run(20.0)
    assert count(p, "unroutable") == count(p, "sent") > 0
    assert recount(p) == ()


def test_a_pool_that_is_not_there_is_named() -> None:
    p = plant(pool(), rate=0.0)
    with pytest.raises(ValueError, match="there is no pool q; there are: p"):
        p.scale("q", 1)
    with pytest.raises(ValueError, match="time does not run backwards"):
        p.run(-1.0)
