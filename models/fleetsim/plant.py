"""The plant: a fleet of engines behind a gateway, with its clients, on virtual time. See the package for its knobs.

A pool has places, each with the GPUs of one replica. Like a Deployment, the plant keeps as many replicas as are wanted:
one that drains to its end no longer counts, so its successor is made at once and starts as soon as a place is free; one
that finds no place is UNSCHEDULABLE and holds no GPUs. A container that crashes starts again where it is, without
pulling its image. Counters belong to a process: they begin at zero with each (what ended ones counted is in `past`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from models.fleetsim import cache, clients, events, run, steps
from models.fleetsim import world as w
from models.fleetsim.build import Size, build, profiles_of
from models.fleetsim.scenario import PoolOf, ServiceOf

STARTING = (w.UNSCHEDULABLE, w.SCHEDULING, w.PULLING, w.LOADING, w.COMPILING)
NEXT = {
    w.SCHEDULING: w.PULLING,
    w.PULLING: w.LOADING,
    w.LOADING: w.COMPILING,
    w.COMPILING: w.READY,
    w.WAKING: w.READY,
}
WITHOUT_GPUS = (w.GONE, w.UNSCHEDULABLE)
COUNTERS = (
    "prompt_tokens", "computed_tokens", "generated_tokens", "prefix_queries", "prefix_hits", "preemptions", "steps",
    "step_tokens", "prefill_tokens", "stopped", "rejected", "ttft_sum", "itl_sum", "e2e_sum", "queue_sum",
    "reuse_sum",
)  # fmt: skip
"""Of a replica's row, what its process counts; `busy_s` and `held_s` go on, they are the GPUs'."""


@dataclass(frozen=True, slots=True)
class Change:
    """A replica has gone from one state to another."""

    at_s: float
    replica: int
    before: int
    after: int


class Plant:
    """One fleet. Every knob is a method that a product offers; every series is one that a product publishes."""

    def __init__(self, services: tuple[ServiceOf, ...], seed: int, size: Size | None = None) -> None:
        self.world = build(services, seed, size or Size())
        self.services = services
        self.pools: tuple[PoolOf, ...] = tuple(pool for service in services for pool in service.pools)
        self.profiles = profiles_of(services)
        self.changes: list[Change] = []
        self.past = np.zeros(len(self.world.replicas), w.REPLICA)
        self._rows = {pool.name: index for index, pool in enumerate(self.pools)}
        self._finished = np.zeros(self.world.running.shape[1], np.int32)
        self._wanted = {pool.name: pool.replicas for pool in self.pools}
        self._blocked = dict.fromkeys(self._rows, 0)
        self._lost: set[int] = set()
        self._broken: str | None = None
        self._after_drain: dict[int, int] = {}
        self._sleeps: dict[int, tuple[int, float]] = {}  # level, since when
        self._to_roll: dict[str, list[int]] = {pool.name: [] for pool in self.pools}  # pods, by number
        for pool in self.pools:
            for replica in self.members(pool.name)[: pool.replicas]:
                self._enter(replica, w.READY)
        for index, service in enumerate(services):
            at_s = clients.next_arrival(self.world, index)
            if at_s < np.inf:
                events.push(self.world, at_s, w.TASK_ARRIVES, index, -1)
            if service.arrivals_s:
                events.push(self.world, service.arrivals_s[0], w.TASK_ARRIVES, index, 0)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return float(self.world.clock[0])

    @property
    def lost(self) -> frozenset[int]:
        """The places that are lost now."""
        return frozenset(self._lost)

    def run(self, until_s: float) -> None:
        """Let time pass. Raises IndexError where more is alive at once than the plant has room for (`Size`)."""
        if self._broken is not None:
            raise IndexError(self._broken)
        if not self.now_s <= until_s < np.inf:
            raise ValueError(
                f"time does not run backwards, nor for ever: it is {self.now_s} s, and {until_s} s is asked"
            )
        try:
            while run.run(self.world, until_s, self._finished):
                replica, mark = int(self.world.event_what[0, 1]), int(self.world.event_what[0, 2])
                events.pop(self.world)
                if self.world.replicas[replica]["life"] == mark:
                    self._live(replica)
        except IndexError as error:
            # It broke off in the middle of an event: nothing that is counted from here on adds up.
            self._broken = str(error)
            raise

    def settle(self) -> None:
        """Bring every counter up to now: engines that take many steps as one event have counted none of them yet."""
        for replica in range(len(self.world.replicas)):
            steps.settle(self.world, replica, False)

    def members(self, pool: str) -> list[int]:
        """The places of a pool's replicas, taken or not."""
        return [int(i) for i in np.flatnonzero(self.world.replicas["pool"] == self._row(pool))]

    def places(self, pool: str, *, node: int | None = None, zone: int | None = None) -> list[int]:
        """The places of a pool that are on a node, or in a zone."""
        spec, chosen = self.pools[self._row(pool)], []
        for number, place in enumerate(self.members(pool)):
            at = number % max(spec.nodes, spec.zones)
            if (node is None or at == node) and (zone is None or at % spec.zones == zone):
                chosen.append(place)
        return chosen

    def count(self, pool: str, *states: int) -> int:
        """How many replicas of a pool are in one of the states."""
        return sum(self._state(i) in states for i in self.members(pool))

    def wanted(self, pool: str) -> int:
        """How many replicas a pool was last told to have."""
        self._row(pool)
        return self._wanted[pool]

    def sleep_level(self, replica: int) -> int:
        """The level at which a replica sleeps, also while it wakes; 0 where it does not sleep."""
        return self._sleeps[replica][0] if self._state(replica) in {w.ASLEEP, w.WAKING} else 0

    def gpu_s(self, pool: str) -> float:
        """GPU-seconds that a pool has held until now; starting and sleeping replicas hold theirs."""
        rows = self.world.replicas[self.members(pool)]
        holding = ~np.isin(rows["state"], WITHOUT_GPUS)
        held_s = rows["held_s"].sum() + (self.now_s - rows["held_since_s"][holding]).sum()
        return float(held_s) * self.pools[self._row(pool)].hardware.gpus

    # ------------------------------------------------------------------------------------------------------ knobs

    def scale(self, pool: str, replicas: int) -> None:
        """Kubernetes `/scale`: start what is missing; of what is too many end those not ready, then the newest."""
        self._row(pool)
        self._wanted[pool] = _whole(pool, replicas)
        self._reconcile(pool)

    def set_weight(self, pool: str, weight: float) -> None:
        """HTTPRoute backendRefs weight, or Envoy's weighted clusters."""
        if not 0.0 <= weight < np.inf:
            raise ValueError(f"{pool}: a weight is zero or more, not {weight}")
        self.world.pools[self._row(pool)]["weight"] = weight

    def limit(self, service: int, klass: int, stage: int, attempt: int, rate: float, *, final: bool = False) -> None:
        """A local rate limit: calls/s of one class, stage and attempt, in buckets of one second; negative is none.

        final: its 429 says `x-should-retry: false`, and the client believes it. A new limit begins with a full bucket;
        the same limit again is no change.
        """
        place, shape = (service, klass, stage, attempt), self.world.buckets.shape
        if not all(0 <= at < size for at, size in zip(place, shape, strict=True)):
            raise ValueError(f"there is no bucket {place}; there are {shape} services, classes, stages and attempts")
        if not rate < np.inf:
            raise ValueError(f"a rate is a number of calls/s, or negative for no limit, not {rate}")
        bucket = self.world.buckets[place]
        if (float(bucket["rate"]), int(bucket["final"])) == (rate, int(final)):
            return
        bucket["rate"], bucket["depth"], bucket["final"] = rate, max(rate, 1.0), int(final)
        bucket["level"], bucket["at_s"] = max(rate, 1.0), self.now_s

    def sleep(self, replica: int, level: int = 1) -> None:
        """Drain a replica and call vLLM's `/sleep`: level 1 keeps the weights in host memory, level 2 drops them."""
        if level not in {1, 2}:
            raise ValueError(f"vLLM sleeps at level 1 or 2, not {level}")
        if self._state(replica) == w.READY:
            self._sleeps[replica] = (level, 0.0)
            self._drain(replica, w.ASLEEP)

    def wake(self, replica: int) -> None:
        """Call vLLM's `/wake_up`: its weights return to the GPU, its cache is empty."""
        if self._state(replica) == w.ASLEEP:
            self._enter(replica, w.WAKING)

    def warm(self, replica: int, profile: int) -> None:
        """Send a replica a profile's system prompt and ask for one token: it is cached, at the cost of its prefill."""
        row = self.world.replicas[self._known(replica)]
        if not 0 <= profile < len(self.profiles):
            raise ValueError(f"there is no profile {profile}; there are {len(self.profiles)}")
        room = int(row["waiting"]) + int(row["arriving"]) < self.world.queues.shape[1]
        if self._state(replica) == w.READY and room and self.profiles[profile].system_tokens > 0:
            service = int(self.world.pools[int(row["pool"])]["service"])
            clients.warm(self.world, service, profile, replica)

    def roll(self, pool: str) -> None:
        """Roll out a new build: one ready replica after another is drained and replaced by one with an empty cache."""
        ready = [i for i in self.members(pool) if self._state(i) == w.READY]
        self._to_roll[pool] = [int(self.world.replicas[i]["born"]) for i in ready]
        self._roll_on(pool)

    # ------------------------------------------------------------------------------------------------------ faults

    def crash(self, replica: int) -> None:
        """A replica's process dies at once: its calls are lost, its cache is gone; its container starts again."""
        state = self._state(replica)
        if state in {w.LOADING, w.COMPILING, w.READY, w.ASLEEP, w.WAKING}:
            self._enter(replica, w.LOADING)
        elif state == w.DRAINING:
            self._enter(replica, w.GONE)
            self._follow_up(replica)

    def lose(self, places: Iterable[int]) -> None:
        """Places and what runs there are lost at once (a node, a zone, a pool: see `places`) until `restore`."""
        lost = sorted(self._known(place) for place in places)
        self._lost.update(lost)
        for place in lost:
            if self._state(place) not in WITHOUT_GPUS:
                self._enter(place, w.GONE)
        for pool in self._pools_of(lost):
            self._reconcile(pool)

    def restore(self, places: Iterable[int]) -> None:
        """Lost places can be used again: replicas that waited for them start, from nothing."""
        restored = sorted(self._known(place) for place in places)
        self._lost.difference_update(restored)
        for pool in self._pools_of(restored):
            self._reconcile(pool)

    def block(self, pool: str, places: int) -> None:
        """So many of a pool's free places are taken by somebody else (0: none): starts that need them must wait."""
        self._row(pool)
        self._blocked[pool] = _whole(pool, places)
        self._reconcile(pool)

    def flush(self, replica: int) -> None:
        """The prefix cache is reset (`/reset_prefix_cache`); blocks that running requests use stay."""
        cache.flush(self.world, self._known(replica))

    def throttle(self, replica: int, factor: float) -> None:
        """Its steps take `factor` times as long from the next one on (heat, a bad link)."""
        if not 0 < factor < np.inf:
            raise ValueError(f"a factor on the time of steps is more than zero, not {factor}")
        steps.settle(self.world, self._known(replica), True)
        self.world.replicas[replica]["slow"] = factor

    # ------------------------------------------------------------------------------------------------ life of replicas

    def _row(self, pool: str) -> int:
        if pool not in self._rows:
            raise ValueError(f"there is no pool {pool}; there are: {', '.join(self._rows)}")
        return self._rows[pool]

    def _known(self, replica: int) -> int:
        if not 0 <= replica < len(self.world.replicas):
            raise ValueError(f"there is no replica {replica}; they are 0 to {len(self.world.replicas) - 1}")
        return replica

    def _state(self, replica: int) -> int:
        return int(self.world.replicas[self._known(replica)]["state"])

    def _pools_of(self, places: list[int]) -> list[str]:
        rows = {int(self.world.replicas[place]["pool"]) for place in places}
        return [self.pools[row].name for row in sorted(rows)]

    def _leaves(self, replica: int) -> bool:
        return self._state(replica) == w.DRAINING and self._after_drain[replica] == w.GONE

    def _order_of_removal(self, replica: int) -> tuple[bool, float, int]:
        row = self.world.replicas[replica]
        return int(row["state"]) == w.READY, -float(row["started_s"]), -replica

    def _reconcile(self, pool: str) -> None:
        """Make and end replicas until there are as many as wanted, as far as places go."""
        members, wanted = self.members(pool), min(self._wanted[pool], self.pools[self._row(pool)].replicas_max)
        alive = [i for i in members if self._state(i) != w.GONE and not self._leaves(i)]
        for index in sorted(alive, key=self._order_of_removal)[: max(len(alive) - wanted, 0)]:
            if self._state(index) in {w.READY, w.DRAINING}:
                self._drain(index, w.GONE)
            else:
                self._enter(index, w.GONE)
        placed = [i for i in members if self._state(i) not in WITHOUT_GPUS and not self._leaves(i)]
        waiting = [i for i in members if self._state(i) == w.UNSCHEDULABLE]
        free = [i for i in members if self._state(i) == w.GONE]
        usable = [i for i in (*waiting, *free) if i not in self._lost]
        missing = max(wanted - len(placed), 0)
        starts = usable[: min(missing, max(len(usable) - self._blocked[pool], 0))]
        without = missing - len(starts)
        keep = [i for i in (*waiting, *free) if i not in starts][:without]
        for index in waiting:
            if index not in starts and index not in keep:
                self._enter(index, w.GONE)
        for index in starts:
            self._enter(index, w.SCHEDULING)
        for index in keep:
            if self._state(index) == w.GONE:
                self._enter(index, w.UNSCHEDULABLE)

    def _drain(self, replica: int, then: int) -> None:
        row = self.world.replicas[replica]
        self._after_drain[replica] = then
        if int(row["state"]) != w.DRAINING:
            self._enter(replica, w.DRAINING)
        if int(row["running"]) + int(row["waiting"]) + int(row["arriving"]) == 0:
            events.push(self.world, self.now_s, w.LIFE, replica, int(row["life"]))

    def _roll_on(self, pool: str) -> None:
        """Drain the next replica of a roll-out, once all others are there again."""
        queue = self._to_roll[pool]
        if not queue or self.count(pool, w.DRAINING, w.WAKING, *STARTING):
            return
        ready = {int(self.world.replicas[i]["born"]): i for i in self.members(pool) if self._state(i) == w.READY}
        while queue:
            born = queue.pop(0)
            if born in ready:
                self._drain(ready[born], w.GONE)
                self._reconcile(pool)
                return

    def _enter(self, replica: int, state: int) -> None:
        """Change a replica's state, with all that belongs to it."""
        row = self.world.replicas[replica]
        before = int(row["state"])
        self.changes.append(Change(self.now_s, replica, before, state))
        row["state"], row["life"] = state, events.serial(self.world)
        if state not in {w.READY, w.DRAINING}:
            run.lose_all(self.world, replica)
            cache.flush(self.world, self._known(replica))
        if before in WITHOUT_GPUS and state not in WITHOUT_GPUS:
            row["held_since_s"] = self.now_s
        elif before not in WITHOUT_GPUS and state in WITHOUT_GPUS:
            row["held_s"] += self.now_s - float(row["held_since_s"])
        if before == w.GONE:
            row["started_s"], row["born"], row["restarts"] = self.now_s, int(row["life"]), 0
        if state == w.LOADING:
            row["restarts"] += int(before != w.PULLING)
            self._new_process(replica)
        if state == w.ASLEEP:
            self._sleeps[replica] = (self._sleeps[replica][0], self.now_s)
        wait_s = self._wait_s(replica, state)
        if wait_s is not None:
            events.push(self.world, self.now_s + wait_s, w.LIFE, replica, int(row["life"]))

    def _wait_s(self, replica: int, state: int) -> float | None:
        """How long a state lasts; None where something else ends it."""
        starts = self.pools[int(self.world.replicas[replica]["pool"])].starts
        if state == w.WAKING:
            level, since_s = self._sleeps[replica]
            falling_asleep_s = max(since_s + starts.sleep_s - self.now_s, 0.0)
            return falling_asleep_s + (starts.wake_s if level == 1 else starts.load_s)
        return {
            w.SCHEDULING: starts.schedule_s,
            w.PULLING: starts.pull_s,
            w.LOADING: starts.load_s,
            w.COMPILING: starts.compile_s,
            w.DRAINING: starts.drain_s,
        }.get(state)

    def _new_process(self, replica: int) -> None:
        world, row = self.world, self.world.replicas[replica]
        row["process_s"] = self.now_s
        for name in COUNTERS:
            self.past[replica][name] += row[name]
            row[name] = 0.0
        for name in ("shown_running", "shown_waiting", "shown_kv"):
            row[name] = 0.0
        for name in ("ttft", "itl", "e2e", "queue", "reuse"):
            getattr(world, f"{name}_counts")[replica] = 0.0

    def _live(self, replica: int) -> None:
        """A state has lasted its time, or a draining replica has nothing left to do."""
        state = self._state(replica)
        self._enter(replica, self._after_drain[replica] if state == w.DRAINING else NEXT[state])
        self._follow_up(replica)

    def _follow_up(self, replica: int) -> None:
        pool = self.pools[int(self.world.replicas[replica]["pool"])].name
        if self._state(replica) == w.GONE:
            self._reconcile(pool)
        self._roll_on(pool)


def _whole(pool: str, number: float) -> int:
    if not 0 <= number < np.inf or number % 1:
        raise ValueError(f"{pool}: a number of replicas or places is whole, and zero or more, not {number}")
    return int(number)
