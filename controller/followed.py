"""Which loads the forecaster follows, out of an observation.

Of every pool the offered calls/s. Of every service, summed over its pools, offered calls/s, prompt tokens/s (all, and
those computed), output tokens/s and running calls; and its tasks/s where the policy names their metrics. A sum of which
one part is unknown is unknown: a pool that can't be seen is not a drop in demand.
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.observations import Known, Observation, Reading
from controller.policy import FleetPolicy
from models.demand import Quantity, series


def pool_owner(name: str) -> str:
    """A pool, as the owner of a series."""
    return f"pool {name}"


def service_owner(name: str) -> str:
    """A service, as the owner of a series."""
    return f"service {name}"


def followed(policy: FleetPolicy, observation: Observation) -> dict[str, float | None]:
    """The loads by the name of their series, in the policy's order; None where unknown."""
    pools = {pool.name: pool for pool in observation.pools}
    services = {service.name: service for service in observation.services}
    loads: dict[str, float | None] = {}
    for name in policy.pools:
        pool = pools.get(name)
        loads[series(pool_owner(name), Quantity.CALLS)] = None if pool is None else _sum((pool.offered_calls_per_s,))
    for name, entry in policy.services.items():
        owner = service_owner(name)
        parts = [pools[pool] for pool in entry.pools if pool in pools]
        if len(parts) < len(entry.pools):
            parts = []
        loads[series(owner, Quantity.CALLS)] = _sum(p.offered_calls_per_s for p in parts)
        loads[series(owner, Quantity.PROMPT_TOKENS)] = _sum(p.prompt_tokens_per_s for p in parts)
        loads[series(owner, Quantity.COMPUTED_TOKENS)] = _sum(p.computed_prompt_tokens_per_s for p in parts)
        loads[series(owner, Quantity.OUTPUT_TOKENS)] = _sum(p.generation_tokens_per_s for p in parts)
        loads[series(owner, Quantity.RUNNING)] = _sum(p.running for p in parts)
        if entry.tasks:
            service = services.get(name)
            ended = () if service is None else (service.tasks_finished_per_s,)
            loads[series(owner, Quantity.TASKS)] = _sum(ended)
    return loads


def _sum(readings: Iterable[Reading]) -> float | None:
    total, some = 0.0, False
    for reading in readings:
        if not isinstance(reading, Known):
            return None
        total, some = total + reading.value, True
    return total if some else None
