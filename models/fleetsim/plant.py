"""The plant: a fleet of engines behind a gateway, with its clients, on virtual time. See the package for its knobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.fleetsim import cache, chance, clients, engine, events, run
from models.fleetsim import world as w
from models.fleetsim.scenario import PoolOf, ServiceOf
from models.fleetsim.world import World

QUEUE_PLACES = 4096
STARTING = (w.UNSCHEDULABLE, w.SCHEDULING, w.PULLING, w.LOADING, w.COMPILING)
NEXT = {w.SCHEDULING: w.PULLING, w.PULLING: w.LOADING, w.LOADING: w.COMPILING, w.COMPILING: w.READY}


@dataclass(frozen=True, slots=True)
class Size:
    """Room for what is alive at once; a scenario that needs more says so."""

    tasks: int = 40_000
    calls: int = 20_000
    chains: int = 200_000
    events: int = 400_000


class Plant:
    """One fleet. Every knob is a method that a product offers; every series is one that a product publishes."""

    def __init__(self, services: tuple[ServiceOf, ...], seed: int, size: Size | None = None) -> None:
        self.services = services
        self.pools: tuple[PoolOf, ...] = tuple(pool for service in services for pool in service.pools)
        self._rows = {pool.name: index for index, pool in enumerate(self.pools)}
        self.world = _allocate(services, self.pools, seed, size or Size())
        self._finished = np.zeros(self.world.running.shape[1], np.int32)
        self._wanted = {pool.name: pool.replicas for pool in self.pools}
        for pool in self.pools:
            for replica in self.members(pool.name)[: pool.replicas]:
                self._enter(replica, w.READY)
        for index in range(len(services)):
            at_s = clients.next_arrival(self.world, index)
            if at_s < np.inf:
                events.push(self.world, at_s, w.TASK_ARRIVES, index, 0)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return float(self.world.clock[0])

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while run.run(self.world, until_s, self._finished):
            replica, mark = int(self.world.event_what[0, 1]), int(self.world.event_what[0, 2])
            events.pop(self.world)
            if self.world.replicas[replica]["life"] == mark:
                self._live(replica)

    def members(self, pool: str) -> list[int]:
        """The places of a pool's replicas, taken or not."""
        row = self._rows[pool]
        return [int(i) for i in np.flatnonzero(self.world.replicas["pool"] == row)]

    def count(self, pool: str, *states: int) -> int:
        """How many replicas of a pool are in one of the states."""
        return sum(int(self.world.replicas[i]["state"]) in states for i in self.members(pool))

    # ------------------------------------------------------------------------------------------------------ knobs

    def scale(self, pool: str, replicas: int) -> None:
        """Kubernetes `/scale`: start what is missing; drain the newest of what is too many."""
        self._wanted[pool] = replicas
        spec = self.pools[self._rows[pool]]
        replicas = min(replicas, spec.replicas_max)
        alive = [i for i in self.members(pool) if self.world.replicas[i]["state"] not in {w.GONE, w.DRAINING}]
        for index in sorted(alive, key=self._age, reverse=True)[: max(len(alive) - replicas, 0)]:
            self._enter(index, w.DRAINING if self.world.replicas[index]["state"] == w.READY else w.GONE)
        free = [i for i in self.members(pool) if self.world.replicas[i]["state"] == w.GONE]
        for index in free[: max(replicas - len(alive), 0)]:
            self._enter(index, w.SCHEDULING)

    def set_weight(self, pool: str, weight: float) -> None:
        """HTTPRoute backendRefs weight, or Envoy's weighted clusters."""
        self.world.pools[self._rows[pool]]["weight"] = weight

    def limit(self, service: int, klass: int, stage: int, attempt: int, rate: float, *, final: bool = False) -> None:
        """A local rate limit: calls/s of one class, stage and attempt, in buckets of one second; negative is none.

        final: its 429 says `x-should-retry: false`, and the client believes it.
        """
        bucket = self.world.buckets[service, klass, stage, attempt]
        bucket["rate"], bucket["depth"], bucket["final"] = rate, max(rate, 1.0), int(final)
        bucket["level"], bucket["at_s"] = max(rate, 1.0), self.now_s

    def sleep(self, replica: int) -> None:
        """Call vLLM's `/sleep?level=1` on a replica without calls (drained first)."""
        if self.world.replicas[replica]["state"] == w.READY and self._idle(replica):
            self._enter(replica, w.ASLEEP)

    def wake(self, replica: int) -> None:
        """Call vLLM's `/wake_up`: its weights return to the GPU, its cache is empty."""
        if self.world.replicas[replica]["state"] == w.ASLEEP:
            self._enter(replica, w.WAKING)

    # ------------------------------------------------------------------------------------------------------ faults

    def crash(self, replica: int, *, restart: bool = True) -> None:
        """A replica dies at once: its calls are lost, its cache is gone; Kubernetes starts it again, or can't."""
        self._enter(replica, w.SCHEDULING if restart else w.GONE)

    def flush(self, replica: int) -> None:
        """The prefix cache is reset (a new build, `/reset_prefix_cache`)."""
        cache.flush(self.world, replica)

    def throttle(self, replica: int, factor: float) -> None:
        """Its steps take `factor` times as long from now on (heat, a bad link)."""
        self.world.replicas[replica]["slow"] = factor

    # ------------------------------------------------------------------------------------------------ life of replicas

    def _age(self, replica: int) -> float:
        return float(self.world.replicas[replica]["started_s"])

    def _idle(self, replica: int) -> bool:
        row = self.world.replicas[replica]
        return int(row["running"]) + int(row["waiting"]) == 0

    def _enter(self, replica: int, state: int) -> None:
        """Change a replica's state, with all that belongs to it."""
        row = self.world.replicas[replica]
        before = int(row["state"])
        starts = self.pools[int(row["pool"])].starts
        row["state"], row["life"] = state, events.serial(self.world)
        if state not in {w.READY, w.DRAINING}:
            row["stepping"] = 0
            run.lose_all(self.world, replica)
            cache.flush(self.world, replica)
        if state == w.GONE:
            row["held_s"] += self.now_s - float(row["held_since_s"]) if before != w.GONE else 0.0
        elif before == w.GONE:
            row["held_since_s"] = row["started_s"] = self.now_s
        wait_s = {
            w.SCHEDULING: starts.schedule_s,
            w.PULLING: starts.pull_s,
            w.LOADING: starts.load_s,
            w.COMPILING: starts.compile_s,
            w.WAKING: starts.wake_s,
            w.DRAINING: 1.0,
        }.get(state)
        if wait_s is not None:
            events.push(self.world, self.now_s + wait_s, w.LIFE, replica, int(row["life"]))
        if state == w.READY:
            engine.schedule(self.world, replica)

    def _live(self, replica: int) -> None:
        state = int(self.world.replicas[replica]["state"])
        if state == w.DRAINING:
            self._enter(replica, w.GONE)
        elif state == w.WAKING:
            self._enter(replica, w.READY)
        else:
            self._enter(replica, NEXT[state])


def _allocate(services: tuple[ServiceOf, ...], pools: tuple[PoolOf, ...], seed: int, size: Size) -> World:
    profiles = services[0].profiles
    places = sum(pool.replicas_max for pool in pools)
    classes = max(len(service.classes) for service in services)
    bins = max(len(service.tasks_per_s) for service in services)
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
        tallies=np.zeros((len(services), classes, len(profiles)), w.TALLY),
        class_share=np.zeros((len(services), classes)),
        rates=np.zeros((len(services), bins)),
        queues=np.zeros((places, QUEUE_PLACES), np.int32),
        running=np.zeros((places, seats), np.int32),
        systems=np.full((places, len(profiles)), -1, np.int32),
        ttft_counts=np.zeros((places, len(w.TTFT_BOUNDS) + 1)),
        itl_counts=np.zeros((places, len(w.ITL_BOUNDS) + 1)),
        e2e_counts=np.zeros((places, len(w.REQUEST_BOUNDS) + 1)),
        queue_counts=np.zeros((places, len(w.REQUEST_BOUNDS) + 1)),
        free_calls=np.arange(size.calls, dtype=np.int32),
        free_tasks=np.arange(size.tasks, dtype=np.int32),
        free_chains=np.arange(size.chains, dtype=np.int32),
        free_left=np.array([size.calls, size.tasks, size.chains]),
        event_at=np.zeros(size.events),
        event_what=np.zeros((size.events, 3), np.int64),
        event_order=np.zeros(size.events, np.int64),
        numbers=np.zeros(3, np.int64),
        clock=np.zeros(1),
        random=chance.seeded(seed),
    )
    world.buckets["rate"] = -1.0
    world.replicas["slow"] = 1.0
    world.replicas["oldest"] = world.replicas["newest"] = -1
    world.chains["replica"] = world.tasks["chains"] = world.tasks["call"] = -1
    _fill(world, services, pools)
    return world


def _fill(world: World, services: tuple[ServiceOf, ...], pools: tuple[PoolOf, ...]) -> None:
    place = 0
    owners = [index for index, service in enumerate(services) for _ in service.pools]
    for index, pool in enumerate(pools):
        e, h = pool.engine, pool.hardware
        kv_bytes = 2 * e.layers * e.kv_heads_size * e.kv_bytes_per_element
        row = world.pools[index]
        row["service"], row["gpus"], row["weight"] = owners[index], h.gpus, pool.weight
        row["max_seqs"], row["token_budget"], row["max_queued"] = e.max_seqs, e.token_budget, e.max_queued
        row["block_tokens"], row["by_priority"], row["max_parallel"] = e.block_tokens, e.by_priority, pool.max_parallel
        row["kv_blocks"] = int((h.memory_bytes - e.weight_bytes) / (kv_bytes * e.block_tokens))
        row["flop_per_token"], row["flop_per_pair"] = 2 * e.parameters, 4 * e.layers * e.hidden
        row["flop_per_s"], row["bytes_per_s"] = h.flop_per_s, h.bytes_per_s
        row["weight_bytes"], row["kv_bytes"] = e.weight_bytes, kv_bytes
        row["overhead_s"], row["per_seq_s"], row["noise"] = e.overhead_s, e.per_sequence_s, e.noise
        world.replicas["pool"][place : place + pool.replicas_max] = index
        place += pool.replicas_max
    for index, service in enumerate(services):
        row, c = world.services[index], service.clients
        row["affinity"], row["spill_waiting"] = service.affinity, service.spill_waiting
        row["sticky_weights"], row["slo_ttft_s"] = service.sticky_weights, service.slo_ttft_s
        row["ttft_timeout_s"], row["total_timeout_s"] = c.ttft_timeout_s, c.total_timeout_s
        row["retries"], row["backoff_s"] = c.retries, c.backoff_s
        row["resubmit_share"], row["resubmit_after_s"] = c.resubmit_share, c.resubmit_after_s
        row["rate_bin_s"] = service.bin_s
        world.class_share[index, : len(service.classes)] = service.classes
        world.rates[index] = np.resize(service.tasks_per_s, world.rates.shape[1])
    for index, profile in enumerate(services[0].profiles):
        row = world.profiles[index]
        for name in w.PROFILE.names or ():
            row[name] = getattr(profile, name)
