"""From a scenario to a world: checks that the values make sense together, then fills the arrays.

A profile that several services have is one row, so that the system prompt is one prompt; each service has its own
shares of the profiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise

import numpy as np

from models.fleetsim import chance
from models.fleetsim import world as w
from models.fleetsim.scenario import PoolOf, Profile, ServiceOf
from models.fleetsim.world import World

QUEUE_PLACES = 4096


@dataclass(frozen=True, slots=True)
class Size:
    """Room for what is alive at once; a scenario that needs more says so (IndexError)."""

    tasks: int = 40_000
    calls: int = 20_000
    chains: int = 200_000
    events: int = 400_000


def profiles_of(services: tuple[ServiceOf, ...]) -> tuple[Profile, ...]:
    """The profiles of all services, each once, without shares: the last axis of `World.tallies`."""
    return tuple(dict.fromkeys(replace(profile, share=0.0) for service in services for profile in service.profiles))


def kv_blocks(pool: PoolOf) -> int:
    """KV blocks of one replica: what the weights leave of its memory."""
    return int((pool.hardware.memory_bytes - pool.engine.weight_bytes) / (_kv_bytes(pool) * pool.engine.block_tokens))


def _kv_bytes(pool: PoolOf) -> float:
    return 2 * pool.engine.layers * pool.engine.kv_heads_size * pool.engine.kv_bytes_per_element


_POSITIVE = {
    "gpus", "flop_per_s", "bytes_per_s", "memory_bytes", "parameters", "weight_bytes", "layers", "hidden",
    "kv_heads_size", "kv_bytes_per_element", "block_tokens", "max_seqs", "token_budget", "zones", "nodes", "steps_mean",
    "steps_max", "input_mean", "output_mean", "gap_mean_s", "human_gap_s", "context_max", "ttft_timeout_s",
    "total_timeout_s", "backoff_s", "resubmit_after_s", "bin_s", "slo_ttft_s",
}  # fmt: skip
_SHARES = {"human_share", "resubmit_share"}
_NONE_IS_MINUS_ONE = {"max_queued", "max_parallel"}
NUMBER_MAX = 1e18


def _possible(place: str, value: object) -> None:
    """Raise ValueError at the first number below that can't be one of its kind: NaN, negative, beyond any machine."""
    if isinstance(value, tuple):
        for item in value:
            _possible(place, item)
    if not is_dataclass(value):
        return
    for field in fields(value):
        held = getattr(value, field.name)
        where = f"{place}: {field.name}"
        for number in held if isinstance(held, tuple) else (held,):
            if not isinstance(number, (int, float)):
                _possible(f"{place}: {getattr(number, 'name', field.name)}", number)
            elif field.name in _NONE_IS_MINUS_ONE and number == -1:
                continue
            elif not 0 <= number <= NUMBER_MAX or (number == 0 and field.name in _POSITIVE):
                least = "more than zero" if field.name in _POSITIVE else "zero or more"
                raise ValueError(f"{where} must be {least}, and below {NUMBER_MAX:g}; it is {number}")
            elif number > 1 and field.name in _SHARES:
                raise ValueError(f"{where} is a share, from 0 to 1; it is {number}")
            elif field.type == "int" and int(number) != number:
                raise ValueError(f"{where} must be a whole number; it is {number}")


def check(services: tuple[ServiceOf, ...]) -> None:
    """Raise ValueError, in one sentence with the place, where a scenario can't be played."""
    names = [pool.name for service in services for pool in service.pools]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a scenario needs pools with names of their own; it has: {', '.join(names) or 'none'}")
    for service in services:
        _possible(service.name, service)
        rates, times = service.tasks_per_s, service.arrivals_s
        if service.bin_s <= 0 or not rates or not all(0 <= rate < math.inf for rate in rates):
            raise ValueError(f"{service.name}: tasks_per_s needs rates of zero or more, and bins of some length")
        if any(later < time for time, later in pairwise(times)):
            raise ValueError(f"{service.name}: arrivals_s must be in order")
        if sum(service.classes) <= 0 or sum(profile.share for profile in service.profiles) <= 0:
            raise ValueError(f"{service.name}: the shares of its classes and of its profiles must not all be zero")
        for pool in service.pools:
            if not 0 <= pool.replicas <= pool.replicas_max or pool.zones < 1 or pool.nodes < 1:
                raise ValueError(f"{pool.name}: needs 0 <= replicas <= replicas_max, a zone and a node")
            room = kv_blocks(pool) * pool.engine.block_tokens
            for profile in service.profiles:
                if not profile.system_tokens + 64 <= profile.context_max <= room:
                    raise ValueError(
                        f"{pool.name}: {profile.name} needs a context_max from {profile.system_tokens + 64} tokens (its"
                        f" system prompt and a little) to {room} (the KV memory); it is {profile.context_max}"
                    )


def build(services: tuple[ServiceOf, ...], seed: int, size: Size) -> World:
    """A world at time 0 without any replica or task. Raises ValueError where the scenario makes no sense."""
    check(services)
    pools = tuple(pool for service in services for pool in service.pools)
    world = _allocate(services, pools, seed, size)
    _fill_pools(world, services, pools)
    _fill_services(world, services)
    return world


def _allocate(services: tuple[ServiceOf, ...], pools: tuple[PoolOf, ...], seed: int, size: Size) -> World:
    profiles = profiles_of(services)
    places = sum(pool.replicas_max for pool in pools)
    classes = max(len(service.classes) for service in services)
    bins = max(len(service.tasks_per_s) for service in services)
    longest = max(len(service.arrivals_s) for service in services)
    seats = max(pool.engine.max_seqs for pool in pools)
    world = World(
        pools=np.zeros(len(pools), w.POOL),
        replicas=np.zeros(places, w.REPLICA),
        calls=np.zeros(size.calls, w.CALL),
        tasks=np.zeros(size.tasks, w.TASK),
        chains=np.zeros(size.chains, w.CHAIN),
        services=np.zeros(len(services), w.SERVICE),
        profiles=np.zeros(len(profiles), w.PROFILE),
        buckets=np.zeros((len(services), classes, 2, 2), w.BUCKET),
        counts=np.zeros((len(services), classes, 2, 2), w.COUNTS),
        pool_counts=np.zeros(len(pools), w.COUNTS),
        tallies=np.zeros((len(services), classes, len(profiles)), w.TALLY),
        class_share=np.zeros((len(services), classes)),
        profile_share=np.zeros((len(services), len(profiles))),
        rates=np.zeros((len(services), bins)),
        traces=np.full((len(services), longest), np.inf),
        queues=np.zeros((places, QUEUE_PLACES), np.int32),
        running=np.zeros((places, seats), np.int32),
        systems=np.full((places, len(profiles)), -1, np.int32),
        ttft_counts=np.zeros((places, len(w.TTFT_BOUNDS) + 1)),
        itl_counts=np.zeros((places, len(w.ITL_BOUNDS) + 1)),
        reuse_counts=np.zeros((places, len(w.RESIDENCY_BOUNDS) + 1)),
        e2e_counts=np.zeros((places, len(w.REQUEST_BOUNDS) + 1)),
        queue_counts=np.zeros((places, len(w.REQUEST_BOUNDS) + 1)),
        free_calls=np.arange(size.calls, dtype=np.int32),
        free_tasks=np.arange(size.tasks, dtype=np.int32),
        free_chains=np.arange(size.chains, dtype=np.int32),
        free_left=np.array([size.calls, size.tasks, size.chains]),
        event_at=np.zeros(size.events),
        event_what=np.zeros((size.events, 3), np.int64),
        event_order=np.zeros(size.events, np.int64),
        numbers=np.zeros(4, np.int64),
        clock=np.zeros(1),
        random=chance.seeded(seed),
    )
    world.buckets["rate"] = -1.0
    world.replicas["slow"] = 1.0
    world.replicas["oldest"] = world.replicas["newest"] = -1
    world.chains["replica"] = world.tasks["chains"] = world.tasks["call"] = -1
    return world


def _fill_pools(world: World, services: tuple[ServiceOf, ...], pools: tuple[PoolOf, ...]) -> None:
    place = 0
    owners = [index for index, service in enumerate(services) for _ in service.pools]
    for index, pool in enumerate(pools):
        e, h = pool.engine, pool.hardware
        row = world.pools[index]
        row["service"], row["gpus"], row["weight"] = owners[index], h.gpus, pool.weight
        row["max_seqs"], row["token_budget"], row["max_queued"] = e.max_seqs, e.token_budget, e.max_queued
        row["block_tokens"], row["by_priority"], row["max_parallel"] = e.block_tokens, e.by_priority, pool.max_parallel
        row["kv_blocks"], row["kv_bytes"], row["weight_bytes"] = kv_blocks(pool), _kv_bytes(pool), e.weight_bytes
        row["flop_per_token"], row["flop_per_pair"] = 2 * e.parameters, 4 * e.layers * e.hidden
        row["flop_per_s"], row["bytes_per_s"] = h.flop_per_s, h.bytes_per_s
        row["overhead_s"], row["per_seq_s"], row["noise"] = e.overhead_s, e.per_sequence_s, e.noise
        row["frontend_s"], row["eager"] = e.frontend_s, e.eager
        world.replicas["pool"][place : place + pool.replicas_max] = index
        place += pool.replicas_max


def _fill_services(world: World, services: tuple[ServiceOf, ...]) -> None:
    profiles = profiles_of(services)
    for index, profile in enumerate(profiles):
        for name in w.PROFILE.names or ():
            world.profiles[index][name] = getattr(profile, name)
    for index, service in enumerate(services):
        row, c = world.services[index], service.clients
        row["affinity"], row["spill_waiting"] = service.affinity, service.spill_waiting
        row["sticky_weights"], row["slo_ttft_s"] = service.sticky_weights, service.slo_ttft_s
        row["ttft_timeout_s"], row["total_timeout_s"] = c.ttft_timeout_s, c.total_timeout_s
        row["retries"], row["backoff_s"], row["heeds_retry_after"] = c.retries, c.backoff_s, c.heeds_retry_after
        row["resubmit_share"], row["resubmit_after_s"] = c.resubmit_share, c.resubmit_after_s
        row["retry_after_s"] = service.retry_after_s
        row["rate_bin_s"], row["bins"] = service.bin_s, len(service.tasks_per_s)
        world.class_share[index, : len(service.classes)] = np.divide(service.classes, sum(service.classes))
        world.rates[index, : len(service.tasks_per_s)] = service.tasks_per_s
        world.traces[index, : len(service.arrivals_s)] = service.arrivals_s
        shares = sum(profile.share for profile in service.profiles)
        for profile in service.profiles:
            world.profile_share[index, profiles.index(replace(profile, share=0.0))] += profile.share / shares
