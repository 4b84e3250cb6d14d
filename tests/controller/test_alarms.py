"""Who is called for help about a replica that is starting: nobody, for two lead times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.alarms import STARTING_LEADS, Watched, alarms
from controller.decisions import Alarm, AlarmKind, PoolState, ReplicaMemory
from controller.observations import Hole, Known, Nothing, Observation, ReplicaObservation, ReplicaState
from controller.pools import unobserved
from models.types import Slo

LEAD_S = 150.0
NOTHING = Hole(Nothing.ABSENT, "no series")


def down(name: str) -> ReplicaObservation:
    fields = dict.fromkeys(ReplicaObservation.__slots__, NOTHING)
    fields |= {"name": name, "state": ReplicaState.DOWN, "detail": "its scrape fails (up = 0)"}
    return ReplicaObservation(**fields)


def raised(now_s: float, scaled_at_s: tuple[float, ...]) -> list[Alarm]:
    pool = replace(unobserved("a"), replicas=(down("new"), down("old")), offered_calls_per_s=Known(1.0, 0.0))
    memory = PoolState("a", replicas=(ReplicaMemory("old", 0.0),), scaled_at_s=scaled_at_s)
    observation = Observation(now_s, 60.0, (pool,), (), ())
    return list(alarms(observation, (Watched(pool, Slo(2.0, 0.1, 95.0, 0.99), memory, LEAD_S),), ()))


@pytest.mark.parametrize(
    ("now_s", "scaled_at_s", "down_replicas"),
    [
        (1000.0 + LEAD_S, (1000.0,), ["a/old"]),
        (1000.0 + STARTING_LEADS * LEAD_S + 1, (1000.0,), ["a/new", "a/old"]),
        (1000.0, (), ["a/new", "a/old"]),
    ],
)
def test_a_replica_that_never_served_is_starting_for_two_lead_times_after_a_move(
    now_s: float, scaled_at_s: tuple[float, ...], down_replicas: list[str]
) -> None:
    found = raised(now_s, scaled_at_s)
    assert {alarm.kind for alarm in found} == {AlarmKind.REPLICA_DOWN}
    assert [alarm.target for alarm in found] == down_replicas


@pytest.mark.parametrize(
    ("state", "first", "kinds"),
    [
        (ReplicaState.SERVING, True, []),
        (ReplicaState.SERVING, False, [AlarmKind.TELEMETRY_BLIND]),
        (ReplicaState.BLIND, True, [AlarmKind.TELEMETRY_BLIND]),
    ],
)
def test_rates_that_need_a_second_look_are_not_missed_at_the_first(
    state: ReplicaState, first: bool, kinds: list[AlarmKind]
) -> None:
    pool = replace(unobserved("a"), replicas=(replace(down("p"), state=state),))
    watched = Watched(pool, Slo(2.0, 0.1, 95.0, 0.99), PoolState("a"), LEAD_S, first=first)
    assert [alarm.kind for alarm in alarms(Observation(0.0, 60.0, (pool,), (), ()), (watched,), ())] == kinds
