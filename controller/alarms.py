"""What the daemon calls for help about. Pure: alarms are read off the observation and off what the guards stopped.

A mislabelled autoscaler that does nothing and stays green is a known outage; so a pool without a usable signal is an
alarm of its own, and so is every engine that answers its health check and does not work.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.decisions import Alarm, AlarmKind, Hold
from controller.observations import Hole, Known, Observation, PoolObservation, ReplicaState, Status
from controller.reasons import number
from models.types import Slo

_OF_STATE = {
    ReplicaState.HUNG: (AlarmKind.REPLICA_HUNG, ": restart it"),
    ReplicaState.DOWN: (AlarmKind.REPLICA_DOWN, ""),
}


def alarms(
    observation: Observation, pools: tuple[tuple[PoolObservation, Slo], ...], holds: tuple[Hold, ...]
) -> tuple[Alarm, ...]:
    """Every alarm of a tick, pool by pool; `pools` are those of the policy, whether they were observed or not."""
    found = [alarm for pool, slo in pools for alarm in (*_of_pool(pool), *_of_promise(pool, slo))]
    found += [Alarm(AlarmKind.TELEMETRY_PARTIAL, hole.source, hole.detail) for hole in observation.holes]
    found += [Alarm(hold.alarm, hold.target, hold.reason) for hold in holds if hold.alarm is not None]
    found += [
        Alarm(AlarmKind.CANNOT_ACT, outcome.move_id.partition("-")[2], outcome.detail)
        for outcome in observation.outcomes
        if outcome.status in {Status.REFUSED, Status.FAILED}
    ]
    return tuple(found)


def _of_promise(pool: PoolObservation, slo: Slo) -> Iterator[Alarm]:
    """A broken promise is an alarm whether or not anything can be done about it, or is known of capacity."""
    broken = [
        f"{name} p{slo.percentile:g} is {number(reading.value)} s of {limit_s:g} s"
        for name, reading, limit_s in (("TTFT", pool.ttft_s, slo.ttft_s), ("ITL", pool.itl_s, slo.tpot_s))
        if isinstance(reading, Known) and reading.value > limit_s
    ]
    if broken:
        waiting = f"; {pool.waiting.value:.0f} waiting" if isinstance(pool.waiting, Known) else ""
        yield Alarm(AlarmKind.SLO_BROKEN, pool.name, " and ".join(broken) + waiting)


def _is_empty(pool: PoolObservation) -> bool:
    """Whether the cluster wants no replica of the pool and none says anything: then nothing is missed."""
    unwanted = isinstance(pool.fleet.wanted, Known) and pool.fleet.wanted.value == 0
    return unwanted and all(replica.state is ReplicaState.DOWN for replica in pool.replicas)


def _of_pool(pool: PoolObservation) -> Iterator[Alarm]:
    empty = _is_empty(pool)
    if isinstance(pool.offered_calls_per_s, Hole) and not empty:
        detail = pool.offered_calls_per_s.detail
        yield Alarm(AlarmKind.TELEMETRY_BLIND, pool.name, f"no usable signal: {detail}")
    elif blind := pool.count(ReplicaState.BLIND):
        yield Alarm(AlarmKind.TELEMETRY_BLIND, pool.name, f"{blind} of {len(pool.replicas)} replicas are unreadable")
    for replica in pool.replicas:
        if replica.state in _OF_STATE and not empty:
            kind, advice = _OF_STATE[replica.state]
            yield Alarm(kind, f"{pool.name}/{replica.name}", f"{replica.detail}{advice}")
    for gpu in pool.gpus:
        if isinstance(gpu.last_xid, Known) and gpu.last_xid.value > 0:
            detail = f"the last XID error of {gpu.name} was {gpu.last_xid.value:.0f}; it may be old"
            yield Alarm(AlarmKind.GPU_XID, f"{pool.name}/{gpu.replica}", detail)
