"""All ports over one plant, on virtual time: the daemon's own loop runs against it unchanged.

The plant is scraped at every multiple of the scrape interval, as a Prometheus would, into a `SeriesStore`, which
evaluates the catalogue. Nothing moves by itself: whoever reads or acts first lets the plant's time pass up to the
clock's, so that the result is the same whichever of the loop's threads comes first.

Actions can go wrong as they do in clusters: applied late, twice, or not at all although the API said yes; refused;
or timed out, which leaves open whether it happened (here it did).
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

import yaml

from controller.adapters.promql import promql
from controller.adapters.recording import VirtualClock
from controller.adapters.series import LOOKBACK_S, Grouping, Row, SeriesStore
from controller.adapters.signals import catalogue, tasks
from controller.decisions import Action, Scale, SetAdmission, ShiftWeights, Sleep, Wake, WarmCache
from controller.errors import ActuationError
from controller.observations import Known, PoolFleet, Signal, Snapshot, SourceHole
from controller.policy import FleetPolicy
from controller.policy_file import LoadedPolicy, parse
from models.fleetsim import envoy
from models.fleetsim import world as w
from models.fleetsim.envoy import ATTEMPTS, STAGES
from models.fleetsim.plant import STARTING, Plant
from models.fleetsim.scenario import A100_X4, H100_X4, L40S_X4, Hardware, PoolOf, ServiceOf
from models.fleetsim.telemetry import Exporters, FaultyExporters, TelemetryFault

EPOCH_S = 1_800_000_000.0
"""Unix seconds of a plant's time 0."""

CARDS: dict[Hardware, str] = {H100_X4: "H100-SXM", A100_X4: "A100-80GB", L40S_X4: "L40S"}
ERROR = (("status_code", "STATUS_CODE_ERROR"),)

STATES = {
    w.UNSCHEDULABLE: "unschedulable",
    w.SCHEDULING: "starting",
    w.PULLING: "starting",
    w.LOADING: "starting",
    w.COMPILING: "starting",
    w.READY: "ready",
    w.DRAINING: "draining",
    w.ASLEEP: "asleep",
    w.WAKING: "waking",
}
AWAKE = (w.READY, w.ASLEEP)
SLEEPY = (w.ASLEEP, w.WAKING, w.READY)
"""States in which an engine takes /sleep and /wake_up: what it is already, it answers well and changes nothing."""


class ActionFaultKind(StrEnum):
    """What becomes of an action: done late, done twice, lost, refused, or done without an answer."""

    LATE = "late"
    TWICE = "twice"
    LOST = "lost"
    REFUSED = "refused"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class ActionFault:
    """A fault of every action from start_s to end_s (virtual s, end excluded); late_s is for LATE and TWICE."""

    kind: ActionFaultKind
    start_s: float
    end_s: float
    late_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that goes wrong, by time."""

    telemetry: tuple[TelemetryFault, ...] = ()
    actions: tuple[ActionFault, ...] = ()


@dataclass(frozen=True, slots=True)
class LateFailure:
    """An action that was accepted and then, when it was due (virtual s), could not be done."""

    at_s: float
    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class _Pending:
    due_s: float
    action: Action


class SimulatedFleet:
    """The world of a plant. It is Telemetry and Actuator itself; `fleet` reads the cluster, `clock` is its time.

    scrape_s: interval of the scrapes, in virtual seconds.
    """

    def __init__(
        self, plant: Plant, policy: FleetPolicy, *, scrape_s: float = 5.0, faults: Faults | None = None
    ) -> None:
        self.plant = plant
        self.clock = VirtualClock(EPOCH_S)
        self.fleet = SimulatedCluster(self)
        self._faults = faults or Faults()
        self._exporters = FaultyExporters(Exporters(plant, EPOCH_S), plant, self._faults.telemetry)
        self._names = Exporters(plant)
        self._entries = catalogue(("vllm",), gateway=True, task_entries=tasks("traces_span_metrics_calls_total", ERROR))
        self._grouping = Grouping(
            replica=("instance", "namespace", "pod", "pool"), gateway=("envoy_cluster_name",), tasks=("service_name",)
        )
        self._store = SeriesStore(self._entries, self._grouping)
        self._history_s = max(LOOKBACK_S, policy.telemetry.window_s)
        self._scrape_s = scrape_s
        self._scrapes = 0
        self._seen: dict[str, tuple[tuple[str, str], ...]] = {}
        self._pending: list[_Pending] = []
        self.late_failures: list[LateFailure] = []
        self._lock = threading.RLock()

    # -------------------------------------------------------------------------------------------------- telemetry

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:  # noqa: ARG002  (virtual time waits)
        """Every signal's samples at `at_s` (Unix s), after the plant's time has passed up to it."""
        with self._lock:
            self.advance(at_s)
            self._history_s = max(self._history_s, window_s)
            self._store.forget(at_s - self._history_s)
            return Snapshot(self._store.evaluate(at_s, window_s))

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        """The PromQL that each signal is equal to."""
        return tuple((entry.signal, promql(entry, self._grouping.of(entry.level), window_s)) for entry in self._entries)

    def close(self) -> None:
        """Nothing to release."""

    def fork(self) -> SimulatedFleet:
        """An equal world, chance included, that goes its own way from now on."""
        with self._lock:
            return copy.deepcopy(self, {id(self._lock): threading.RLock()})

    def advance(self, at_s: float) -> None:
        """Let the plant's time pass up to `at_s` (Unix s), scraping and carrying out late actions on the way."""
        with self._lock:
            until_s = at_s - EPOCH_S
            while True:
                scrape_s = self._scrapes * self._scrape_s
                due_s = min((pending.due_s for pending in self._pending), default=float("inf"))
                next_s = min(scrape_s, due_s)
                if next_s > until_s:
                    break
                self.plant.run(max(next_s, self.plant.now_s))
                if due_s <= scrape_s:
                    self._carry_out_due()
                else:
                    self._scrapes += 1
                    self._scrape()
            self.plant.run(max(until_s, self.plant.now_s))

    def _carry_out_due(self) -> None:
        now_s = self.plant.now_s
        due = [pending for pending in self._pending if pending.due_s <= now_s]
        self._pending = [pending for pending in self._pending if pending.due_s > now_s]
        for pending in due:
            try:
                self._apply(pending.action)
            except ActuationError as error:
                # The API has answered long ago: whoever asked cannot be told, and time goes on.
                self.late_failures.append(LateFailure(now_s, pending.action, str(error)))

    def _scrape(self) -> None:
        at_s = EPOCH_S + self.plant.now_s
        present: dict[str, tuple[tuple[str, str], ...]] = {}
        for page in self._exporters.pages():
            target = tuple(sorted((*page.labels, ("instance", page.name), ("job", page.kind.value))))
            present[page.name] = target
            rows = [Row(row.name, row.labels, row.value) for row in page.rows or ()]
            self._store.scraped(at_s, target, (*rows, Row("up", (), float(page.rows is not None))))
        for name, target in self._seen.items():
            if name not in present:
                # A target that service discovery dropped: its series end, `up` as well.
                self._store.scraped(at_s, target, ())
        self._seen = present

    # -------------------------------------------------------------------------------------------------- the cluster

    def cluster(self) -> tuple[PoolFleet, ...]:
        """Wanted, ready, starting, unschedulable and draining replicas of each pool, now."""
        with self._lock:
            self.advance(self.clock.now_s())

            def count(pool: PoolOf, *states: int) -> Known:
                return Known(float(self.plant.count(pool.name, *states)), 0.0)

            return tuple(
                PoolFleet(
                    pool.name,
                    wanted=Known(float(self.plant.wanted(pool.name)), 0.0),
                    ready=count(pool, w.READY),
                    starting=count(pool, *(state for state in STARTING if state != w.UNSCHEDULABLE)),
                    unschedulable=count(pool, w.UNSCHEDULABLE),
                    draining=count(pool, w.DRAINING),
                )
                for pool in self.plant.pools
            )

    # ----------------------------------------------------------------------------------------------------- actions

    def describe(self, action: Action) -> tuple[str, str]:
        """What is done, in words; the plant has no commands to type."""
        return f"# simulated: {action}", "# simulated: the reverse"

    def perform(self, action: Action, deadline_s: float) -> str:
        """Do it now, or as the faults of this moment will have it. Raises ActuationError."""
        with self._lock:
            self.advance(self.clock.now_s())
            now_s = self.plant.now_s
            fault = next((fault for fault in self._faults.actions if fault.start_s <= now_s < fault.end_s), None)
            if fault is None:
                self._apply(action)
                return "done"
            match fault.kind:
                case ActionFaultKind.LATE:
                    self._pending.append(_Pending(now_s + fault.late_s, action))
                case ActionFaultKind.TWICE:
                    self._apply(action)
                    self._pending.append(_Pending(now_s + fault.late_s, action))
                case ActionFaultKind.LOST:
                    return "accepted"
                case ActionFaultKind.REFUSED:
                    raise ActuationError("the simulated API refused the change; look at the scenario's faults")
                case ActionFaultKind.TIMED_OUT:
                    self._apply(action)
                    raise ActuationError(
                        f"the simulated API gave no answer within {deadline_s:g} s; look at the fleet itself",
                        outcome_unknown=True,
                    )
                case _:
                    assert_never(fault.kind)
            return "accepted"

    def _apply(self, action: Action) -> None:
        try:
            self._do(action)
        except (ValueError, IndexError) as error:
            raise ActuationError(
                f"the simulated fleet cannot do {action}: {error}; look at the scenario's pools and classes"
            ) from error

    def _do(self, action: Action) -> None:
        match action:
            case Scale(pool, _, after):
                self.plant.scale(pool, after)
            case ShiftWeights(_, _, after):
                for weight in after:
                    self.plant.set_weight(weight.pool, weight.share)
            case SetAdmission():
                self._limit(action)
            case Sleep(pool, replicas):
                for index in self._engines(pool, replicas, AWAKE):
                    self.plant.sleep(index)
            case Wake(pool, replicas):
                for index in self._engines(pool, replicas, SLEEPY):
                    self.plant.wake(index)
            case WarmCache(pool, replica):
                self._warm(pool, replica)
            case _:
                assert_never(action)

    def _limit(self, action: SetAdmission) -> None:
        services = [service.name for service in self.plant.services]
        for limit in action.after:
            klass = int(limit.klass.removeprefix("class"))
            rate = -1.0 if limit.calls_per_s is None else limit.calls_per_s
            self.plant.limit(
                services.index(action.service), klass, STAGES.index(limit.stage), ATTEMPTS.index(limit.attempt), rate
            )

    def _warm(self, pool: str, replica: str) -> None:
        """Every profile of the pool's service: its system prompts are the hottest prefixes it has."""
        service = next((s for s in self.plant.services if pool in (own.name for own in s.pools)), None)
        if service is None:
            raise ValueError(f"no service has a pool {pool}")
        for index in self._engines(pool, (replica,), (w.READY,)):
            for profile in service.profiles:
                self.plant.warm(index, self.plant.profiles.index(replace(profile, share=0.0)))

    def _engines(self, pool: str, replicas: tuple[str, ...], states: tuple[int, ...]) -> list[int]:
        """The places of the replicas. Raises ValueError, before anything is done, where one is not in such a state."""
        by_name = {self._names.pod(i): i for i in self.plant.members(pool) if self._state(i) != w.GONE}
        for name in replicas:
            if name not in by_name:
                known = ", ".join(sorted(by_name)) or "none"
                raise ValueError(f"{pool} has no replica {name}; there are: {known}")
            if (state := self._state(by_name[name])) not in states:
                raise ValueError(f"{name} is {STATES[state]} and does not take this call")
        return [by_name[name] for name in replicas]

    def _state(self, place: int) -> int:
        return int(self.plant.world.replicas[place]["state"])


class SimulatedCluster:
    """The `Fleet` of a simulation."""

    def __init__(self, simulated: SimulatedFleet) -> None:
        self._simulated = simulated

    def read(self, deadline_s: float) -> tuple[tuple[PoolFleet, ...], tuple[SourceHole, ...]]:  # noqa: ARG002 - it always answers
        """The pools at the clock's time; a simulated cluster always answers."""
        return self._simulated.cluster(), ()


# ---------------------------------------------------------------------------------------------------------- policies


def policy_of(services: tuple[ServiceOf, ...], *, mode: str = "act") -> FleetPolicy:
    """The policy of a scenario: its pools, their inventory at most, its clients, and the SLO that it counts by."""
    return loaded_policy_of(services, mode=mode).policy


def loaded_policy_of(services: tuple[ServiceOf, ...], *, mode: str = "act") -> LoadedPolicy:
    """`policy_of` with its text, as the loop and the journal want it."""
    stock: dict[str, dict[str, object]] = {}
    pools: dict[str, dict[str, object]] = {}
    for pool in (pool for service in services for pool in service.pools):
        card = CARDS.get(pool.hardware, f"{pool.name}-card")
        count = pool.replicas_max * pool.hardware.gpus
        known = stock.get(card)
        stock[card] = _card(pool, count + (int(str(known["count"])) if known else 0))
        pools[pool.name] = _pool(pool, card)
    data = {
        "version": 1,
        "mode": mode,
        "telemetry": {"interval_s": 15, "window_s": 60, "fresh_s": 60},
        "gpus": stock,
        "services": {service.name: _service(service) for service in services},
        "pools": pools,
    }
    return parse(yaml.safe_dump(data, sort_keys=False), "scenario.yaml", telemetry_required=False)


def _card(pool: PoolOf, count: int) -> dict[str, object]:
    card: dict[str, object] = {"count": count, "usd_per_gpu_hour": pool.hardware.usd_per_gpu_h}
    if pool.hardware not in CARDS:
        gpus = pool.hardware.gpus
        # What a data sheet says of a card that attains what the scenario has: its usual shares are 0.9, 0.75 and 0.45.
        card["memory_gib"] = pool.hardware.memory_bytes / gpus / 0.9 / 2**30
        card["bandwidth_gb_per_s"] = pool.hardware.bytes_per_s / gpus / 0.75 / 1e9
        card["dense_tflops"] = pool.hardware.flop_per_s / gpus / 0.45 / 1e12
    return card


def _pool(pool: PoolOf, card: str) -> dict[str, object]:
    engine, starts = pool.engine, pool.starts
    per_token = 2 * engine.layers * engine.kv_heads_size * engine.kv_bytes_per_element
    return {
        "select": {"pool": pool.name},
        "model": {
            "name": "llm",
            "parameters": engine.parameters,
            "precision": "fp8" if engine.weight_bytes <= 1.5 * engine.parameters else "bf16",
            "kv_bytes_per_token": per_token,
        },
        "gpu": {"type": card, "per_replica": pool.hardware.gpus},
        "replicas": {"min": 1, "max": pool.replicas_max},
        "scale": {"kind": "Deployment", "name": pool.name, "namespace": "serving"},
        "max_num_seqs": engine.max_seqs,
        "start": {
            "cold_s": starts.schedule_s + starts.pull_s + starts.load_s + starts.compile_s,
            "wake_s": starts.wake_s,
        },
    }


def _service(service: ServiceOf) -> dict[str, object]:
    return {
        "slo": {"ttft_s": service.slo_ttft_s, "tpot_s": 0.1, "percentile": 95},
        "clients": {"timeout_s": service.clients.ttft_timeout_s, "retries": service.clients.retries},
        "pools": [pool.name for pool in service.pools],
        "gateway": {"envoy_cluster_name": envoy.rule(service.name)},
        "tasks": {"service_name": service.name},
    }
