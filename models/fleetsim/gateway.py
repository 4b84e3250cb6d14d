"""The gateway: admission by token buckets, weights over pools, affinity inside a pool, bounded parallelism.

In the order a call meets them, with the product feature behind each:

1. a token bucket per (class, stage, attempt): local rate limits by header descriptors (Envoy, Envoy Gateway); 429
2. the pool: route weights, drawn per call, or by a hash of the session where the gateway keeps sessions
3. the parallel-request breaker of the pool's cluster; 503
4. the replica: least requests, or a consistent hash of the session (rendezvous), which spills to the least loaded
   replica when its home has too many waiting (endpoint pickers)
5. the engine's own bounded queue (vLLM --max-num-queued-reqs); 503, blind to classes
"""

from __future__ import annotations

import numpy as np

from models.fleetsim import frontend
from models.fleetsim.chance import mixed, uniform
from models.fleetsim.compiled import compiled
from models.fleetsim.world import READY, World

ADMITTED = 0
LIMITED = 1
LIMITED_FOR_GOOD = 2
OVERFLOWED = 3
REFUSED = 4
UNROUTABLE = 5


@compiled
def passes(world: World, service: int, klass: int, stage: int, attempt: int) -> int:
    """Ask the token bucket: 0 passes, 1 limited, 2 limited and told not to try again."""
    bucket = world.buckets[service, klass, stage, attempt]
    if bucket.rate < 0:
        return ADMITTED
    now_s = world.clock[0]
    bucket.level = min(bucket.level + (now_s - bucket.at_s) * bucket.rate, bucket.depth)
    bucket.at_s = now_s
    if bucket.level >= 1.0:
        bucket.level -= 1.0
        return ADMITTED
    return LIMITED_FOR_GOOD if bucket.final else LIMITED


@compiled
def _pool(world: World, service: int, home: np.uint64) -> int:
    total = 0.0
    for index in range(world.pools.shape[0]):
        if world.pools[index].service == service:
            total += world.pools[index].weight
    if total <= 0.0:
        return -1
    if world.services[service].sticky_weights:
        point = float(mixed(home) >> np.uint64(11)) * (1.0 / 9007199254740992.0) * total
    else:
        point = uniform(world.random) * total
    chosen = -1
    for index in range(world.pools.shape[0]):
        if world.pools[index].service == service and world.pools[index].weight > 0.0:
            chosen = index
            point -= world.pools[index].weight
            if point < 0.0:
                break
    return chosen


@compiled
def _replica(world: World, pool: int, home: np.uint64) -> int:
    service = world.services[world.pools[pool].service]
    best, best_load, kept, kept_rank = -1, 0, -1, np.uint64(0)
    for index in range(world.replicas.shape[0]):
        replica = world.replicas[index]
        if replica.pool != pool or replica.state != READY:
            continue
        load = replica.running + replica.waiting + replica.arriving
        if best < 0 or load < best_load:
            best, best_load = index, load
        rank = mixed(home ^ mixed(np.uint64(index + 1)))
        if kept < 0 or rank > kept_rank:
            kept, kept_rank = index, rank
    if not service.affinity or kept < 0 or world.replicas[kept].waiting > service.spill_waiting:
        return best
    return kept


@compiled
def route(world: World, index: int, home: np.uint64) -> int:
    """Send an admitted call on: ADMITTED with the call queued at a replica, or why not."""
    call = world.calls[index]
    task = world.tasks[call.task]
    pool = _pool(world, task.service, home)
    if pool < 0:
        return UNROUTABLE
    counts, limit = world.pool_counts[pool], world.pools[pool].max_parallel
    if limit >= 0 and world.pools[pool].active >= limit:
        counts.overflowed += 1
        return OVERFLOWED
    replica = _replica(world, pool, home)
    if replica < 0:
        counts.unroutable += 1
        return UNROUTABLE
    bound = world.pools[pool].max_queued
    queued = world.replicas[replica].waiting + world.replicas[replica].arriving
    if (bound >= 0 and queued >= bound) or queued >= world.queues.shape[1]:
        world.replicas[replica].rejected += 1
        counts.refused += 1
        return REFUSED
    counts.admitted += 1
    call.replica = replica
    world.pools[pool].active += 1
    frontend.receive(world, index)
    return ADMITTED
