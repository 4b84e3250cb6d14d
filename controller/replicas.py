"""Who is who, and how each replica is: from samples to the readings of single engines. Pure; see `observe`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan

from controller.decisions import ControllerState
from controller.observations import (
    Hole,
    Known,
    Labels,
    Nothing,
    Reading,
    ReplicaObservation,
    ReplicaState,
    Sample,
    Signal,
    Snapshot,
    SourceHole,
)
from controller.policy import FleetPolicy
from controller.reasons import span

_MAX_OVER_INSTANCES = {Signal.KV_USAGE_RATIO, Signal.HEARTBEAT_AGE_S}
_MIN_OVER_INSTANCES = {Signal.UP, Signal.AWAKE}
_SIGNED = {Signal.WAITING_GROWTH_PER_S}
_BUCKETS = {Signal.TTFT_BUCKETS_PER_S, Signal.ITL_BUCKETS_PER_S, Signal.REUSE_GAP_BUCKETS_PER_S}


@dataclass(slots=True)
class Raw:
    """All that was said of one replica in this snapshot."""

    values: dict[Signal, float] = field(default_factory=dict)
    buckets: dict[Signal, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    kv_capacity_tokens: float | None = None
    open_files: dict[str, float] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)

    def opened(self, window_s: float) -> float:
        """Files (connections, most of all) that the engine's processes opened in the window's older half."""
        return sum(growth * window_s / 2 for instance, growth in self.open_files.items() if instance in self.engines)


@dataclass(frozen=True, slots=True)
class Names:
    """Finds the pool and the replica that a label set names."""

    by_select: Mapping[tuple[str, ...], Mapping[tuple[str, ...], str]]
    remembered: Mapping[str, str]

    def find(self, labels: Mapping[str, str]) -> tuple[str, str] | None:
        """(pool, replica), or None where no pool selects the labels."""
        replica = labels.get("pod") or labels.get("instance")
        if not replica:
            return None
        for keys, pools in self.by_select.items():
            pool = pools.get(tuple(labels.get(key, "") for key in keys))
            if pool is not None:
                return pool, replica
        pool = self.remembered.get(replica)
        return None if pool is None else (pool, replica)


# ---------------------------------------------------------------------------------------------------- who is who


def names_of(policy: FleetPolicy, state: ControllerState) -> Names:
    """How label sets name pools: by what the policy selects, or by the replicas that are remembered."""
    by_select: dict[tuple[str, ...], dict[tuple[str, ...], str]] = defaultdict(dict)
    for name, pool in policy.pools.items():
        keys = tuple(sorted(pool.select))
        by_select[keys][tuple(pool.select[key] for key in keys)] = name
    # A replica's `up` series may lack the labels a pool selects by (a model's name, say); its name then decides,
    # unless two pools have a replica of that name.
    owners: dict[str, set[str]] = defaultdict(set)
    for remembered in state.pools:
        for memory in remembered.replicas:
            owners[memory.name].add(remembered.name)
    alone = {replica: next(iter(pools)) for replica, pools in owners.items() if len(pools) == 1}
    specific_first = sorted(by_select.items(), key=lambda item: -len(item[0]))
    return Names(dict(specific_first), alone)


def collect(samples: Iterable[Sample], names: Names, holes: list[SourceHole]) -> dict[str, dict[str, Raw]]:
    """What was said, by pool and replica; duplicates of one instance are dropped and reported once per pool."""
    pools: dict[str, dict[str, Raw]] = defaultdict(dict)
    seen: set[tuple[Signal, Labels]] = set()
    duplicated: dict[str, str] = {}
    found: dict[Labels, tuple[str, str] | None] = {}
    # A job's name decides between duplicates, so that the same one is taken at every tick.
    for sample in sorted(samples, key=lambda s: (s.labels, s.signal)):
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        blocks = labels.pop("block_size", None), labels.pop("num_gpu_blocks", None)
        key = tuple(labels.items())
        if key not in found:
            found[key] = names.find(labels)
        place = found[key]
        if place is None:
            continue
        pool, replica = place
        raw = pools[pool].setdefault(replica, Raw())
        instance, job = labels.get("instance", ""), labels.get("job", "")
        if raw.jobs.setdefault(instance, job) != job or (sample.signal, sample.labels) in seen:
            duplicated.setdefault(pool, replica)
            continue
        seen.add((sample.signal, sample.labels))
        _take(raw, sample, instance, bound, blocks)
    holes.extend(
        SourceHole(
            "duplicate series", f"{pool}: {replica} is scraped more than once; one copy is used, drop a scrape job"
        )
        for pool, replica in sorted(duplicated.items())
    )
    return pools


def _take(raw: Raw, sample: Sample, instance: str, bound: str | None, blocks: tuple[str | None, str | None]) -> None:
    signal, value = sample.signal, sample.value
    if signal is Signal.OPEN_FILES_GROWTH_PER_S:
        # A sidecar of the same pod has open files too; they count where an engine's series come from.
        raw.open_files[instance] = value if isfinite(value) else 0.0
        return
    if signal is Signal.HEARTBEAT_AGE_S:
        raw.engines.add(instance)
    if signal in _BUCKETS:
        upper = _number(bound)
        if upper is not None:
            raw.buckets.setdefault(signal, {}).setdefault(instance, []).append((upper, value))
        return
    if signal is Signal.KV_BLOCKS:
        size, count = _number(blocks[0]), _number(blocks[1])
        if size is not None and count is not None and isfinite(size * count) and size * count > 0:
            raw.kv_capacity_tokens = (raw.kv_capacity_tokens or 0.0) + size * count
        return
    known = raw.values.get(signal)
    if known is None or isnan(value):
        raw.values[signal] = value
    elif isnan(known):
        # One instance whose value is undefined makes the replica's undefined, in whatever order they come.
        return
    elif signal in _MAX_OVER_INSTANCES:
        raw.values[signal] = max(value, raw.values[signal])
    elif signal in _MIN_OVER_INSTANCES:
        raw.values[signal] = min(value, raw.values[signal])
    else:
        raw.values[signal] += value


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


# ---------------------------------------------------------------------------------------------------- one replica


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns what was said of one replica into readings. raw is None where nothing was said in this snapshot."""

    name: str
    raw: Raw | None
    unseen_s: float | None
    snapshot: Snapshot
    policy: FleetPolicy

    def observe(self) -> ReplicaObservation:
        """The replica with its state; the readings of a BLIND or stopped engine are STALE."""
        state, detail, age_s = self._state()
        frozen = None if state is ReplicaState.SERVING else f"{state.value}: {detail}"

        def gauge(signal: Signal) -> Reading:
            reading = self.reading(signal, age_s)
            return Hole(Nothing.STALE, frozen) if frozen and isinstance(reading, Known) else reading

        blind = state in {ReplicaState.BLIND, ReplicaState.DOWN}
        steady = gauge if blind else lambda signal: self.reading(signal, age_s)
        return ReplicaObservation(
            name=self.name,
            state=state,
            detail=detail,
            # What a hung engine last said it was running is the evidence that it hangs; it stays readable.
            running=self.reading(Signal.RUNNING, age_s) if state is ReplicaState.HUNG else gauge(Signal.RUNNING),
            waiting=gauge(Signal.WAITING),
            kv_usage_ratio=gauge(Signal.KV_USAGE_RATIO),
            steps_per_s=steady(Signal.STEPS_PER_S),
            first_tokens_per_s=steady(Signal.FIRST_TOKENS_PER_S),
            generation_tokens_per_s=steady(Signal.GENERATION_TOKENS_PER_S),
            prompt_tokens_per_s=steady(Signal.PROMPT_TOKENS_PER_S),
            itl_mean_s=ratio(
                steady(Signal.ITL_SUM_PER_S), steady(Signal.ITL_COUNT_PER_S), "no output tokens in the window"
            ),
        )

    def reading(self, signal: Signal, age_s: float) -> Reading:
        """One signal of the replica, whatever its state."""
        return judge(signal, None if self.raw is None else self.raw.values.get(signal), age_s, self.snapshot)

    def _state(self) -> tuple[ReplicaState, str, float]:
        values = {} if self.raw is None else self.raw.values
        if values.get(Signal.UP) == 0:
            # Its rates outlive it by a window; they are no sign of life.
            return ReplicaState.DOWN, "its scrape fails (up = 0)", 0.0
        if not any(signal not in _OF_ANY_PROCESS for signal in values):
            return (*self._silent(), 0.0)
        limit_s, age_s = self.policy.telemetry.fresh_s, values.get(Signal.HEARTBEAT_AGE_S)
        if age_s is None or isnan(age_s):
            return ReplicaState.BLIND, "the age of its telemetry is unknown", 0.0
        if age_s > limit_s:
            return ReplicaState.BLIND, f"its telemetry is {age_s:.0f} s old, the limit is {limit_s:g} s", age_s
        # A clock that runs ahead gives negative ages; they say nothing about staleness.
        return (*self._speaking(values), max(round(age_s, 1), 0.0))

    def _silent(self) -> tuple[ReplicaState, str]:
        """The state of a replica without a single series of its engine."""
        if {Signal.RUNNING, Signal.HEARTBEAT_AGE_S} & set(self.snapshot.failed):
            return ReplicaState.BLIND, "the telemetry source did not answer"
        if self.unseen_s is None:
            return ReplicaState.BLIND, "it is scraped (up = 1) and exposes none of its engine's series"
        gone = "; if it was removed, restart with --forget-missing" if self.unseen_s > REPLACED_S else ""
        return ReplicaState.DOWN, f"its series vanished {span(self.unseen_s)} ago{gone}"

    def _speaking(self, values: Mapping[Signal, float]) -> tuple[ReplicaState, str]:
        """The state of a replica whose engine's series are fresh."""
        for signal in _VITAL:
            reading = judge(signal, values.get(signal), 0.0, self.snapshot)
            if isinstance(reading, Hole) and reading.kind is Nothing.NAN:
                # Left out of the pool's sums without a word, its load would be missed by nobody.
                return ReplicaState.BLIND, reading.detail
        if values.get(Signal.AWAKE) == 0:
            return ReplicaState.ASLEEP, "the engine sleeps; requests sent to it hang uncounted"
        if values.get(Signal.STEPS_PER_S) == 0:
            window_s = self.policy.telemetry.window_s
            held = [f"{values[s]:g} {word}" for s, word in _HELD if values.get(s, 0) > 0]
            opened = self.raw.opened(window_s) if self.raw is not None else 0.0
            if opened >= HANGING_CONNECTIONS:
                held.append(f"{opened:.0f} more open connections")
            if held:
                return ReplicaState.HUNG, f"{' and '.join(held)} and no engine step in {window_s:g} s"
        return ReplicaState.SERVING, ""


REPLACED_S = 600.0
"""How long after a replica vanished its successor must be there for it to be forgotten, and how much earlier that
may have come."""

HANGING_CONNECTIONS = 3.0
"""An engine that stopped between two calls froze its gauges at zero. What still moves is its API server, which goes on
accepting calls. So many more open files in the older half of a window without a single step are connections that
nobody serves; only the older half counts, because a step that answers new calls may not have been scraped yet."""

_OF_ANY_PROCESS = {Signal.UP, Signal.OPEN_FILES_GROWTH_PER_S}
_VITAL = (Signal.RUNNING, Signal.FIRST_TOKENS_PER_S)
POSSIBLE_MAX = 1e15
"""No gauge of an engine, a GPU or a gateway is larger: bytes of memory are 1e12, tokens/s of a fleet 1e9."""
_HELD = ((Signal.RUNNING, "running"), (Signal.WAITING, "waiting"))


def judge(signal: Signal, value: float | None, age_s: float, snapshot: Snapshot) -> Reading:
    """A raw value as a reading: a number that can be one, or the kind of nothing that it is."""
    if value is None:
        failed = signal in snapshot.failed
        return Hole(Nothing.ABSENT, f"the query for {signal} failed" if failed else f"no series of {signal}")
    if isnan(value):
        return Hole(Nothing.NAN, f"{signal} is NaN at its source")
    if not abs(value) <= POSSIBLE_MAX or (value < 0 and signal not in _SIGNED):
        return Hole(Nothing.NAN, f"{signal} has the impossible value {value:g}")
    return Known(rounded(value), age_s)


def ratio(numerator: Reading, denominator: Reading, idle: str) -> Reading:
    """A quotient of two readings; NAN with the reason `idle` where the denominator is zero."""
    match numerator, denominator:
        case Known(top, age_s), Known(bottom, other_s):
            if bottom <= 0 or not isfinite(top / bottom):
                return Hole(Nothing.NAN, idle if bottom <= 0 else f"{top:g} / {bottom:g} is no number")
            return Known(rounded(top / bottom), max(age_s, other_s))
        case Hole(), _:
            return numerator
        case _:
            return denominator


def rounded(value: float) -> float:
    """Six significant digits: more than any telemetry is worth."""
    return float(f"{value:.6g}")
