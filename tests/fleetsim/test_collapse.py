"""Metastable collapse: what an earlier, simpler study found, asked of this plant.

One scan over the load of the default scenario (eight H100 replicas, copilot tasks only, three lost for the 150 s of a
cold start at 900 s; good tasks per task in the last 600 of 3,300 s): 1.5 to 2.5 tasks/s recover (0.98 and more);
at 3.0 tasks/s the service level is 1.000 until the loss, and 0.44 of tasks succeed afterwards, for good; from 3.5 on
it is not healthy before it either. Here the plant disagrees with the study: at 3.0 tasks/s it collapses without a
trigger too, later; and without retries (0.47) as well as with two (0.44) or four (0.42). Retries multiply timeouts
(952 to 20,423), they do not decide. `bench.collapse` scans the loads in between: at 2.75 tasks/s the loss alone makes
the difference, with and without retries.
"""

from dataclasses import dataclass

from plants import ONLY_COPILOT, count, of_all, tally

from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import H100_X4, Clients, PoolOf, ServiceOf


@dataclass(frozen=True)
class Seen:
    good: float
    in_slo: float
    hits: float
    timeouts: float


def fleet(rate: float, *, retries: int = 2, affinity: bool = True) -> Plant:
    pools = (PoolOf("p", H100_X4, 8, 8),)
    clients = Clients(retries=retries)
    return Plant((ServiceOf("s", pools, (rate,), profiles=ONLY_COPILOT, clients=clients, affinity=affinity),), 1)


def watch(p: Plant, until_s: float) -> Seen:
    def now() -> tuple[float, ...]:
        names = ("finished", "in_slo", "timed_out")
        counters = ("prefix_queries", "prefix_hits")
        tallies = (tally(p, "started"), tally(p, "succeeded"))
        return (*tallies, *(count(p, n) for n in names), *(of_all(p, n) for n in counters))

    before = now()
    p.run(until_s)
    started, good, finished, in_slo, timeouts, asked, hit = (b - a for a, b in zip(before, now(), strict=True))
    return Seen(good / started, in_slo / finished, hit / asked, timeouts)


def lose_three(p: Plant) -> None:
    places = p.places("p")[:3]
    p.lose(places)
    p.restore(places)


def before_and_after(p: Plant) -> tuple[Seen, Seen]:
    p.run(300.0)
    before = watch(p, 900.0)
    lose_three(p)
    p.run(2700.0)
    after = watch(p, 3300.0)
    assert recount(p) == ()
    return before, after


def test_the_service_level_is_perfect_until_the_loss_and_stays_lost_when_the_capacity_is_back() -> None:
    before, after = before_and_after(fleet(3.0))
    assert before.in_slo > 0.999
    assert before.timeouts == 0
    assert before.hits > 0.9
    assert after.good < 0.6
    assert after.in_slo < 0.05
    assert after.hits < 0.55


def test_a_lightly_loaded_fleet_recovers_from_the_same_loss() -> None:
    _, after = before_and_after(fleet(2.0))
    assert after.good > 0.95
    assert after.in_slo > 0.99
    assert after.hits > 0.9


def test_retries_multiply_the_timeouts_but_do_not_decide_here() -> None:
    _, without = before_and_after(fleet(3.0, retries=0))
    _, four = before_and_after(fleet(3.0, retries=4))
    assert without.good < 0.6 > four.good
    assert four.timeouts > 5 * without.timeouts


def test_least_loaded_routing_without_affinity_collapses_where_affinity_is_perfect() -> None:
    seen = []
    for affinity in (True, False):
        p = fleet(3.0, affinity=affinity)
        p.run(300.0)
        seen.append(watch(p, 900.0))
    assert seen[0].in_slo > 0.999
    assert seen[1].in_slo < 0.8
    assert seen[1].hits < 0.55
    assert seen[0].hits > 0.9
