"""What the daemon calls for help about. Pure: alarms are read off the observation and off what the guards stopped.

A mislabelled autoscaler that does nothing and stays green is a known outage; so a pool without a usable signal is an
alarm of its own, and so is every engine that answers its health check and does not work.

A replica that has never served, in a pool that was told to grow within `STARTING_LEADS` lead times, is starting: its
scrape fails and nobody is called. Longer than that, or without such a move, it is down like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from controller.decisions import Alarm, AlarmKind, Hold, PoolState
from controller.observations import Hole, Known, Observation, PoolObservation, ReplicaState, Status
from controller.reasons import number
from models.types import Slo

STARTING_LEADS = 2.0
"""How long, in lead times since the pool's last move, a replica that never served is taken to be starting."""

_OF_STATE = {
    ReplicaState.HUNG: (AlarmKind.REPLICA_HUNG, ": restart it"),
    ReplicaState.DOWN: (AlarmKind.REPLICA_DOWN, ""),
}


@dataclass(frozen=True, slots=True)
class Watched:
    """A pool of the policy, observed or not, with its promise, what is remembered of it, and its lead time.

    first: it is the first look for a window or more. A rate needs two looks, so that its lack says nothing yet.
    """

    observation: PoolObservation
    slo: Slo
    memory: PoolState
    lead_s: float
    first: bool = False

    def starting(self, now_s: float) -> frozenset[str]:
        """Replicas that are being started by a move of this pool."""
        last_s = max(self.memory.scaled_at_s, default=None)
        if last_s is None or now_s - last_s > STARTING_LEADS * self.lead_s:
            return frozenset()
        served = {memory.name for memory in self.memory.replicas}
        down = (r.name for r in self.observation.replicas if r.state is ReplicaState.DOWN)
        return frozenset(name for name in down if name not in served)


def alarms(observation: Observation, pools: tuple[Watched, ...], holds: tuple[Hold, ...]) -> tuple[Alarm, ...]:
    """Every alarm of a tick, pool by pool."""
    found: list[Alarm] = []
    for pool in pools:
        found += _of_pool(pool.observation, pool.starting(observation.now_s), first=pool.first)
        found += _of_promise(pool.observation, pool.slo)
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
        waiting = f"; {number(pool.waiting.value)} waiting" if isinstance(pool.waiting, Known) else ""
        yield Alarm(AlarmKind.SLO_BROKEN, pool.name, " and ".join(broken) + waiting)


def _is_empty(pool: PoolObservation) -> bool:
    """Whether the cluster wants no replica of the pool and none says anything: then nothing is missed."""
    unwanted = isinstance(pool.fleet.wanted, Known) and pool.fleet.wanted.value == 0
    return unwanted and all(replica.state is ReplicaState.DOWN for replica in pool.replicas)


def _of_pool(pool: PoolObservation, starting: frozenset[str], *, first: bool) -> Iterator[Alarm]:
    empty = _is_empty(pool)
    only_rates = first and pool.count(ReplicaState.SERVING) > 0
    if isinstance(pool.offered_calls_per_s, Hole) and not empty and not only_rates:
        detail = pool.offered_calls_per_s.detail
        yield Alarm(AlarmKind.TELEMETRY_BLIND, pool.name, f"no usable signal: {detail}")
    elif blind := pool.count(ReplicaState.BLIND):
        yield Alarm(AlarmKind.TELEMETRY_BLIND, pool.name, f"{blind} of {len(pool.replicas)} replicas are unreadable")
    for replica in pool.replicas:
        if replica.state in _OF_STATE and not empty and replica.name not in starting:
            kind, advice = _OF_STATE[replica.state]
            yield Alarm(kind, f"{pool.name}/{replica.name}", f"{replica.detail}{advice}")
    for gpu in pool.gpus:
        if isinstance(gpu.last_xid, Known) and gpu.last_xid.value > 0:
            detail = f"the last XID error of {gpu.name} was {gpu.last_xid.value:.0f}; it may be old"
            yield Alarm(AlarmKind.GPU_XID, f"{pool.name}/{gpu.replica}", detail)
