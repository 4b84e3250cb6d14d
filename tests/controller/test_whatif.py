"""From readings to the questions that predictions answer."""

from dataclasses import replace

from controller.observations import Hole, Known, Nothing, ReplicaObservation, ReplicaState
from controller.policy import ClientPolicy
from controller.pools import unobserved
from controller.whatif import clients_of, part_of
from models.predict import Clients, Seen
from models.types import Load, Pool, Slo

POOL = Pool("a", "s", "H100-SXM", 1, None, None, 3.0, 1, 8, 240.0, survive_replica=False)
SLO = Slo(2.0, 0.1, 95.0, 0.99)
LOAD = Load(5.0, 1000.0, 100.0, 0.5)
HOLE = Hole(Nothing.NAN, "no calls in the window")


def replica(name: str, state: ReplicaState) -> ReplicaObservation:
    return ReplicaObservation(name, state, "", *([HOLE] * 7))


def test_only_replicas_that_serve_count_and_holes_are_not_numbers() -> None:
    observation = replace(
        unobserved("a"),
        replicas=(replica("p", ReplicaState.SERVING), replica("q", ReplicaState.DOWN)),
        ttft_s=Known(0.4, 5.0),
        hit_ratio=Known(0.8, 5.0),
        kv_capacity_tokens=Known(1e5, 0.0),
    )
    part = part_of(POOL, SLO, observation, LOAD, None)
    assert (part.replicas, part.kv_tokens) == (1, 1e5)
    assert part.seen == Seen(ttft_s=0.4, tpot_s=None, hit_ratio=0.8)


def test_clients_are_those_of_the_policy() -> None:
    assert clients_of(ClientPolicy(timeout_s=15, retries=3)) == Clients(15, 3)
