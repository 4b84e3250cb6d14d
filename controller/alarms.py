"""What the daemon calls for help about. Pure: alarms are read off the observation and off what the guards stopped.

A mislabelled autoscaler that does nothing and stays green is a known outage; so a pool without a usable signal is an
alarm of its own, and so is every engine that answers its health check and does not work.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.types import (
    Alarm,
    AlarmKind,
    Hold,
    Hole,
    Known,
    Observation,
    PoolObservation,
    ReplicaState,
    Status,
)

_OF_STATE = {
    ReplicaState.HUNG: (AlarmKind.REPLICA_HUNG, ": restart it"),
    ReplicaState.DOWN: (AlarmKind.REPLICA_DOWN, ""),
}


def alarms(observation: Observation, pools: tuple[PoolObservation, ...], holds: tuple[Hold, ...]) -> tuple[Alarm, ...]:
    """Every alarm of a tick, pool by pool; `pools` are those of the policy, whether they were observed or not."""
    found = [alarm for pool in pools for alarm in _of_pool(pool)]
    found += [Alarm(AlarmKind.TELEMETRY_PARTIAL, hole.source, hole.detail) for hole in observation.holes]
    found += [Alarm(hold.alarm, hold.target, hold.reason) for hold in holds if hold.alarm is not None]
    found += [
        Alarm(AlarmKind.CANNOT_ACT, outcome.move_id.partition("-")[2], outcome.detail)
        for outcome in observation.outcomes
        if outcome.status in {Status.REFUSED, Status.FAILED}
    ]
    return tuple(found)


def _of_pool(pool: PoolObservation) -> Iterator[Alarm]:
    if isinstance(pool.offered_calls_per_s, Hole):
        detail = pool.offered_calls_per_s.detail
        yield Alarm(AlarmKind.TELEMETRY_BLIND, pool.name, f"no usable signal: {detail}")
    elif blind := pool.count(ReplicaState.BLIND):
        yield Alarm(AlarmKind.TELEMETRY_BLIND, pool.name, f"{blind} of {len(pool.replicas)} replicas are unreadable")
    for replica in pool.replicas:
        if replica.state in _OF_STATE:
            kind, advice = _OF_STATE[replica.state]
            yield Alarm(kind, f"{pool.name}/{replica.name}", f"{replica.detail}{advice}")
    for gpu in pool.gpus:
        if isinstance(gpu.last_xid, Known) and gpu.last_xid.value > 0:
            detail = f"the last XID error of {gpu.name} was {gpu.last_xid.value:.0f}; it may be old"
            yield Alarm(AlarmKind.GPU_XID, f"{pool.name}/{gpu.replica}", detail)
