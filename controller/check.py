"""Does the telemetry know the pools of a policy? Pure: a snapshot in, what is present and missing out.

A mislabelled autoscaler that stays green is a known outage: the policy is valid, every health check passes, and nothing
is ever decided because no series carries the labels that a pool selects. `trimtab check` finds that before the daemon
runs: for each pool, which engines answer to its labels and which signals they lack; for each service, whether its
gateway and task series exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controller.decisions import ControllerState
from controller.gpus import pod_of
from controller.observations import Sample, Signal, Snapshot, SourceHole
from controller.policy import FleetPolicy
from controller.replicas import Raw, collect, names_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """A signal that an engine of some kind should have, what it is, and whether the daemon is blind without it."""

    signal: Signal
    about: str
    essential: bool


@dataclass(frozen=True, slots=True)
class PoolFinding:
    """What telemetry knows of a pool: its engines, and the wanted signals that none or not all of them have."""

    pool: str
    engines: tuple[str, ...]
    missing: tuple[Wanted, ...]
    gpus: int

    @property
    def fatal(self) -> bool:
        """Whether the daemon would be blind to the pool."""
        return not self.engines or any(wanted.essential for wanted in self.missing)


@dataclass(frozen=True, slots=True)
class ServiceFinding:
    """Whether the series that the policy names for a service exist; None where it names none."""

    service: str
    gateway: bool | None
    tasks: bool | None

    @property
    def fatal(self) -> bool:
        """Whether something that the policy names does not exist."""
        return self.gateway is False or self.tasks is False


@dataclass(frozen=True, slots=True)
class Findings:
    """The whole answer; `unanswered` are the signals that the source failed to answer for."""

    pools: tuple[PoolFinding, ...]
    services: tuple[ServiceFinding, ...]
    holes: tuple[SourceHole, ...]
    unanswered: tuple[Signal, ...]

    @property
    def fatal(self) -> bool:
        """Whether anything that the daemon needs is missing."""
        blind = any(pool.fatal for pool in self.pools) or any(service.fatal for service in self.services)
        return bool(self.unanswered) or blind


def findings(policy: FleetPolicy, snapshot: Snapshot, wanted: Mapping[str, tuple[Wanted, ...]]) -> Findings:
    """What `snapshot` says of each pool and service; `wanted` holds the signals of each kind of engine."""
    holes = list(snapshot.holes)
    seen = collect(snapshot.samples, names_of(policy, ControllerState()), holes)
    gpu_pods: dict[str, int] = {}
    for sample in snapshot.samples:
        if sample.signal is Signal.GPU_MEMORY_USED_BYTES:
            pod = pod_of(dict(sample.labels))
            gpu_pods[pod] = gpu_pods.get(pod, 0) + 1
    pools = []
    for name, pool in policy.pools.items():
        engines = {replica: raw for replica, raw in sorted(seen.get(name, {}).items()) if _speaks(raw)}
        missing = tuple(w for w in wanted[pool.engine] if not all(_has(raw, w.signal) for raw in engines.values()))
        gpus = sum(gpu_pods.get(replica, 0) for replica in engines)
        pools.append(PoolFinding(name, tuple(engines), missing if engines else (), gpus))
    services = tuple(
        ServiceFinding(
            name,
            _exists(snapshot.samples, Signal.GATEWAY_CALLS_PER_S, service.gateway),
            _exists(snapshot.samples, Signal.TASKS_FINISHED_PER_S, service.tasks),
        )
        for name, service in policy.services.items()
    )
    return Findings(tuple(pools), services, tuple(holes), snapshot.failed)


def _speaks(raw: Raw) -> bool:
    return any(signal is not Signal.UP for signal in raw.values) or bool(raw.buckets)


def _has(raw: Raw, signal: Signal) -> bool:
    if signal is Signal.KV_BLOCKS:
        return raw.kv_capacity_tokens is not None
    return signal in raw.values or signal in raw.buckets


def _exists(samples: tuple[Sample, ...], signal: Signal, select: Mapping[str, str]) -> bool | None:
    if not select:
        return None
    return any(s.signal is signal and select.items() <= dict(s.labels).items() for s in samples)
