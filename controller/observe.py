"""Samples in, one Observation out: who is alive, what each reading is, and which kind of nothing is where.

Telemetry of engines lies in known ways, and this is where it is caught:

- A gauge freezes when its engine stops stepping. A replica with running or waiting requests and no engine step in
  the whole window is HUNG; one whose sleep state says so is ASLEEP (its queue then hangs uncounted). Neither counts
  as serving, and their gauges are STALE.
- A dead replica has no series, it does not read zero. A replica seen before and not now is DOWN, or BLIND where it was
  the source that failed to answer. A scrape job that was lost looks the same as pods that were removed, so time alone
  removes nothing: a replica is gone where a scale-in of that many stands (it is what was asked for), where a new one
  took its place, or where a person says so (`trimtab run --forget-missing`).
- Quantiles and ratios of an idle engine are NAN, while its rates are an honest zero.
- Instant queries return values up to five minutes old; the heartbeat signal carries the true age. DCGM values are
  another 30 s older than their scrape.
- One pod may be scraped by two jobs (the same instance twice: one is taken, and said) or expose data-parallel ranks
  on several ports (several instances: they are added).
- Request histograms are observed late and the queue is invisible in them, so offered load is what got a first token,
  plus what was rejected, plus the growth of the queue.

Values are rounded to six significant digits, so that the journal is small and a replay sees just what was
decided on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from controller.decisions import ControllerState, ReplicaMemory, Standing
from controller.gpus import observe_gpus
from controller.histogram import Histogram, histogram, merge, quantile, share_within
from controller.observations import (
    GpuObservation,
    Hole,
    Known,
    Nothing,
    Observation,
    PoolFleet,
    PoolObservation,
    Reading,
    ReplicaObservation,
    ReplicaState,
    Sample,
    ServiceObservation,
    Signal,
    Snapshot,
)
from controller.policy import FleetPolicy, SloPolicy
from controller.pools import no_fleet
from controller.replicas import REPLACED_S, Raw, Reader, collect, judge, names_of, ratio, rounded
from models.types import Gaps

_GPU = {signal for signal in Signal if signal.value.startswith("gpu_")}
_OF_SERVICES = {signal for signal in Signal if signal.value.startswith(("gateway_", "tasks_"))}


def build(
    policy: FleetPolicy,
    state: ControllerState,
    snapshot: Snapshot,
    fleet: tuple[PoolFleet, ...],
    now_s: float,
) -> Observation:
    """The observation at `now_s` (Unix s) of every pool and service that the policy names, in the policy's order."""
    names = names_of(policy, state)
    holes = list(snapshot.holes)
    engines, devices, others = _split(snapshot.samples)
    raw = collect(engines, names, holes)
    gpus: dict[str, list[GpuObservation]] = defaultdict(list)
    for gpu in observe_gpus(devices, policy.telemetry.fresh_s):
        gpus[gpu.replica].append(gpu)
    fleets = {entry.pool: entry for entry in fleet}
    remembered = {pool.name: pool.replicas for pool in state.pools}
    standing = {pool.name: pool.standing for pool in state.pools}
    slos = {pool: service.slo for service in policy.services.values() for pool in service.pools}
    pools = []
    for name in policy.pools:
        memories = remembered.get(name, ())
        known = {memory.name: now_s - memory.last_seen_s for memory in memories}
        seen: Mapping[str, Raw] = raw.get(name, {})
        recent = set(known)
        if not (snapshot.failed or snapshot.holes):
            seen = _without_leavers(fleets.get(name, no_fleet(name)), seen)
            recent -= _unwanted(fleets.get(name, no_fleet(name)), seen, recent)
            recent -= _removed(standing.get(name), recent - seen.keys())
            recent -= _replaced(memories, seen, now_s)
        replicas = tuple(
            Reader(replica, seen.get(replica), known.get(replica), snapshot, policy).observe()
            for replica in sorted({*seen, *recent})
        )
        serving = {replica.name: seen[replica.name] for replica in replicas if replica.state is ReplicaState.SERVING}
        pools.append(
            _Summary(name, slos[name], snapshot, replicas, serving).observe(
                fleets.get(name, no_fleet(name)), tuple(gpu for r in replicas for gpu in gpus.get(r.name, ()))
            )
        )
    services = tuple(_service(name, policy, snapshot, others) for name in policy.services)
    return Observation(round(now_s, 3), policy.telemetry.window_s, tuple(pools), services, tuple(holes))


def _replaced(memories: Iterable[ReplicaMemory], seen: Mapping[str, Raw], now_s: float) -> set[str]:
    """Replicas that vanished more than `REPLACED_S` ago and were each followed by a new one, as in a roll-out."""
    alive = {name for name, raw in seen.items() if Signal.HEARTBEAT_AGE_S in raw.values}
    newcomers = sorted(m.first_seen_s for m in memories if m.name in alive and m.first_seen_s > 0)
    gone = set()
    for memory in sorted((m for m in memories if m.name not in seen), key=lambda m: m.last_seen_s):
        if now_s - memory.last_seen_s <= REPLACED_S:
            continue
        successor = next((s for s in newcomers if s > memory.last_seen_s - REPLACED_S), None)
        if successor is not None:
            newcomers.remove(successor)
            gone.add(memory.name)
    return gone


def _speaking(seen: Mapping[str, Raw]) -> set[str]:
    return {name for name, raw in seen.items() if Signal.HEARTBEAT_AGE_S in raw.values}


def _complete(fleet: PoolFleet, seen: Mapping[str, Raw]) -> bool:
    """Whether as many replicas speak as the cluster wants: then none is missing, whatever has vanished."""
    wanted = fleet.wanted
    return isinstance(wanted, Known) and 0 < wanted.value <= len(_speaking(seen))


def _without_leavers(fleet: PoolFleet, seen: Mapping[str, Raw]) -> Mapping[str, Raw]:
    """What was said, without the last rates of replicas that are no scrape target any more and that nobody misses."""
    if not _complete(fleet, seen):
        return seen
    speaking = _speaking(seen)
    return {name: raw for name, raw in seen.items() if name in speaking or Signal.UP in raw.values}


def _unwanted(fleet: PoolFleet, seen: Mapping[str, Raw], recent: set[str]) -> set[str]:
    """Replicas that vanished and that nobody misses: a scale-in that is done, a lost node's that are replaced."""
    return recent - seen.keys() if _complete(fleet, seen) else set()


def _removed(standing: Standing | None, vanished: set[str]) -> set[str]:
    """The vanished replicas, where a standing scale-in accounts for all of them."""
    asked = 0 if standing is None else standing.replicas_before - standing.replicas_after
    return vanished if len(vanished) <= asked else set()


# ---------------------------------------------------------------------------------------------------- one pool


@dataclass(frozen=True, slots=True)
class _Summary:
    """Adds up the serving replicas of one pool."""

    name: str
    slo: SloPolicy
    snapshot: Snapshot
    replicas: tuple[ReplicaObservation, ...]
    serving: Mapping[str, Raw]

    def observe(self, fleet: PoolFleet, gpus: tuple[GpuObservation, ...]) -> PoolObservation:
        """The pool: sums of rates, ratios of sums, quantiles of merged histograms."""
        first = self._sum(Signal.FIRST_TOKENS_PER_S)
        rejected = self._sum(Signal.REJECTED_PER_S)
        prompt, hits = self._sum(Signal.PROMPT_TOKENS_PER_S), self._sum(Signal.PREFIX_HITS_PER_S)
        idle = "no calls in the window"

        def at_percentile(whole: Histogram) -> float | None:
            return quantile(whole, self.slo.percentile / 100)

        def in_time(whole: Histogram) -> float | None:
            return share_within(whole, self.slo.ttft_s)

        return PoolObservation(
            name=self.name,
            replicas=self.replicas,
            gpus=gpus,
            fleet=fleet,
            offered_calls_per_s=_offered(first, rejected, self._sum(Signal.WAITING_GROWTH_PER_S)),
            served_calls_per_s=first,
            finished_calls_per_s=self._sum(Signal.FINISHED_PER_S),
            failed_calls_per_s=self._sum(Signal.FAILED_PER_S),
            rejected_calls_per_s=rejected,
            running=self._sum(Signal.RUNNING),
            waiting=self._sum(Signal.WAITING),
            prompt_tokens_per_s=prompt,
            computed_prompt_tokens_per_s=_computed(prompt, hits),
            generation_tokens_per_s=self._sum(Signal.GENERATION_TOKENS_PER_S),
            hit_ratio=ratio(hits, self._sum(Signal.PREFIX_QUERIES_PER_S), idle),
            preemptions_per_s=self._sum(Signal.PREEMPTIONS_PER_S),
            ttft_s=self._of_histogram(Signal.TTFT_BUCKETS_PER_S, at_percentile, idle),
            ttft_good_ratio=self._of_histogram(Signal.TTFT_BUCKETS_PER_S, in_time, idle),
            itl_s=self._of_histogram(Signal.ITL_BUCKETS_PER_S, at_percentile, idle),
            itl_mean_s=ratio(self._sum(Signal.ITL_SUM_PER_S), self._sum(Signal.ITL_COUNT_PER_S), idle),
            kv_usage_ratio=self._largest(Signal.KV_USAGE_RATIO),
            kv_capacity_tokens=self._kv_capacity(),
            reuse_gaps=self._gaps(),
        )

    def _readings(self, signal: Signal) -> list[Known]:
        readings = [
            judge(signal, raw.values.get(signal), self._age_s(raw), self.snapshot) for raw in self.serving.values()
        ]
        return [reading for reading in readings if isinstance(reading, Known)]

    def _sum(self, signal: Signal) -> Reading:
        known = self._readings(signal)
        if not known:
            return self._hole(signal)
        # The sum of possible numbers may be too large for one.
        total = sum(reading.value for reading in known)
        return judge(signal, total, max(reading.age_s for reading in known), self.snapshot)

    def _largest(self, signal: Signal) -> Reading:
        known = self._readings(signal)
        return max(known, key=lambda reading: reading.value) if known else self._hole(signal)

    def _merged(self, signal: Signal) -> Histogram | None:
        parts: list[Histogram] = []
        for raw in self.serving.values():
            built = (histogram(buckets) for buckets in raw.buckets.get(signal, {}).values())
            parts.extend(part for part in built if part is not None)
        return merge(parts)

    def _gaps(self) -> Gaps:
        whole = self._merged(Signal.REUSE_GAP_BUCKETS_PER_S)
        if whole is None:
            return Gaps()
        below = (0.0, *whole.cumulative)
        weights = (rounded((high - low) / len(self.serving)) for low, high in pairwise(below))
        return Gaps(whole.bounds, tuple(weights))

    def _of_histogram(self, signal: Signal, what: Callable[[Histogram], float | None], idle: str) -> Reading:
        whole = self._merged(signal)
        if whole is None:
            return self._hole(signal)
        value = what(whole)
        if value is None:
            return Hole(Nothing.NAN, idle)
        return judge(signal, value, max(self._age_s(raw) for raw in self.serving.values()), self.snapshot)

    def _kv_capacity(self) -> Reading:
        sizes = [raw.kv_capacity_tokens for raw in self.serving.values() if raw.kv_capacity_tokens is not None]
        return judge(Signal.KV_BLOCKS, min(sizes), 0.0, self.snapshot) if sizes else self._hole(Signal.KV_BLOCKS)

    def _age_s(self, raw: Raw) -> float:
        return max(round(raw.values.get(Signal.HEARTBEAT_AGE_S, 0.0), 1), 0.0)

    def _hole(self, signal: Signal) -> Hole:
        """Why the pool has no reading of a signal: the most telling kind of nothing among its replicas."""
        if self.serving:
            hole = next(judge(signal, r.values.get(signal), 0.0, self.snapshot) for r in self.serving.values())
            return hole if isinstance(hole, Hole) else Hole(Nothing.ABSENT, f"no series of {signal}")
        if not self.replicas:
            unanswered = signal in self.snapshot.failed
            why = (
                f"the query for {signal} failed"
                if unanswered
                else "no engine's series carry the labels that it selects"
            )
            return Hole(Nothing.ABSENT, why)
        worst = next((r for r in self.replicas if r.state is ReplicaState.BLIND), self.replicas[0])
        kind = Nothing.ABSENT if worst.state is ReplicaState.DOWN else Nothing.STALE
        return Hole(kind, f"no replica serves; {worst.name} is {worst.state.value}: {worst.detail}")


def _offered(first: Reading, rejected: Reading, growth: Reading) -> Reading:
    if isinstance(first, Hole):
        return first
    extra = sum(reading.value for reading in (rejected, growth) if isinstance(reading, Known))
    offered = max(first.value + extra, 0.0)
    if not isfinite(offered):
        return Hole(Nothing.NAN, f"the offered load has the impossible value {offered:g}")
    return Known(rounded(offered), first.age_s)


def _computed(prompt: Reading, hits: Reading) -> Reading:
    if isinstance(prompt, Known) and isinstance(hits, Known):
        return Known(rounded(max(prompt.value - hits.value, 0.0)), prompt.age_s)
    return prompt


# ---------------------------------------------------------------------------------------------------- services


def _split(samples: Iterable[Sample]) -> tuple[list[Sample], list[Sample], dict[Signal, list[Sample]]]:
    """Samples of engines, of GPUs, and of gateways and tasks by signal."""
    engines: list[Sample] = []
    devices: list[Sample] = []
    others: dict[Signal, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.signal in _OF_SERVICES:
            others[sample.signal].append(sample)
        else:
            (devices if sample.signal in _GPU else engines).append(sample)
    return engines, devices, others


def _service(
    name: str, policy: FleetPolicy, snapshot: Snapshot, others: Mapping[Signal, list[Sample]]
) -> ServiceObservation:
    service = policy.services[name]

    def reading(signal: Signal, select: Mapping[str, str]) -> Reading:
        if not select:
            return Hole(Nothing.ABSENT, "the policy names no such series for the service")
        chosen = [s.value for s in others.get(signal, ()) if select.items() <= dict(s.labels).items()]
        total = sum(chosen) if chosen else None
        return judge(signal, total, 0.0, snapshot)

    return ServiceObservation(
        name=name,
        gateway_calls_per_s=reading(Signal.GATEWAY_CALLS_PER_S, service.gateway),
        gateway_retries_per_s=reading(Signal.GATEWAY_RETRIES_PER_S, service.gateway),
        gateway_timeouts_per_s=reading(Signal.GATEWAY_TIMEOUTS_PER_S, service.gateway),
        gateway_overflows_per_s=reading(Signal.GATEWAY_OVERFLOWS_PER_S, service.gateway),
        gateway_errors_per_s=reading(Signal.GATEWAY_ERRORS_PER_S, service.gateway),
        tasks_finished_per_s=reading(Signal.TASKS_FINISHED_PER_S, service.tasks),
        tasks_failed_per_s=reading(Signal.TASKS_FAILED_PER_S, service.tasks),
    )
