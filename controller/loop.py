"""The loop: observe, step, record, act, publish; then wait for the next tick.

Order is safety. The observation, the decision and the new state are made durable in one transaction before anything is
done; the outcome is added afterwards, and is an input of the next tick. If the process dies in between, the next one
finds a decision without an outcome: a recommendation is simply completed, a request has the outcome UNKNOWN, and
neither is made again. A tick that can't be recorded is not acted on and leaves no trace in the state.

There is one error boundary, around a tick. What fails outside is a value by then (a hole, an outcome); what is left is
a full disk or a bug: it is logged with its cause, counted, and the next tick starts from the last recorded state.

Ticks are due at fixed times (previous due time + interval), so that a slow tick does not shift the others; a loop that
is over one interval late says so and starts counting anew. Timed work (policy file, journal size) is APScheduler's:
jobs only put a note into the inbox, which the loop empties between ticks, so that the state has one writer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace

import structlog
from apscheduler.schedulers.background import BackgroundScheduler

from controller import act, explain, observe
from controller.decisions import AlarmKind, ControllerState, Mode, TickRecord
from controller.errors import JournalError, TrimtabError
from controller.metrics import Metrics
from controller.observations import Observation, Outcome, PoolFleet, Signal, Snapshot, SourceHole, Status
from controller.policy import FleetPolicy
from controller.policy_file import LoadedPolicy, PolicyWatch
from controller.ports import Actuator, Clock, Fleet, Journal, Telemetry
from controller.step import step

RELOAD_S = 5
CLOCK_GRAIN_S = 0.001
"""Unix seconds as floats add up to within less than this."""
PRUNE_S = 600

_log = structlog.get_logger("trimtab")


@dataclass(frozen=True, slots=True)
class Ports:
    """The world, as the loop reaches it. fleet, actuator and journal are None where there is none."""

    clock: Clock
    telemetry: Telemetry
    fleet: Fleet | None = None
    actuator: Actuator | None = None
    journal: Journal | None = None


def tick(
    ports: Ports, policy: LoadedPolicy, state: ControllerState, outcomes: tuple[Outcome, ...], deadline_s: float
) -> tuple[ControllerState, TickRecord]:
    """One whole tick; raises JournalError where it could not be recorded (then nothing was done)."""
    state, record = decide(ports, policy, state, outcomes, deadline_s)
    record = carry_out(ports, policy.policy, record)
    if ports.journal is not None:
        ports.journal.finish(record.decision.tick, record.outcomes)
    return state, record


def decide(
    ports: Ports,
    policy: LoadedPolicy,
    state: ControllerState,
    outcomes: tuple[Outcome, ...],
    deadline_s: float,
    *,
    forget_missing: bool = False,
) -> tuple[ControllerState, TickRecord]:
    """Observe, step, record; raises JournalError where it could not be recorded (then nothing may be done).

    forget_missing: observe as if no replica had been seen before, so that those that are missing are gone for good.
    """
    now_s = ports.clock.now_s()
    remembered = state
    if forget_missing:
        remembered = replace(state, pools=tuple(replace(pool, replicas=()) for pool in state.pools))
    observation = observe_world(ports, policy.policy, remembered, now_s, deadline_s)
    observation = replace(observation, outcomes=outcomes)
    state, decision = step(policy.policy, state, observation)
    record = TickRecord(observation, decision, policy.sha256)
    if ports.journal is not None:
        ports.journal.append(record, policy.text, state)
    return state, record


def carry_out(ports: Ports, policy: FleetPolicy, record: TickRecord) -> TickRecord:
    """The recorded moves, done or only told, with what became of them."""
    done = act.perform(record.decision, policy, ports.actuator, record.decision.now_s)
    return replace(record, outcomes=done)


def observe_world(
    ports: Ports, policy: FleetPolicy, state: ControllerState, now_s: float, deadline_s: float
) -> Observation:
    """Read all ports in parallel, each within the deadline; one that is late or broken is a hole."""
    workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="read")
    try:
        telemetry = workers.submit(ports.telemetry.read, now_s, policy.telemetry.window_s, deadline_s)
        fleet = workers.submit(ports.fleet.read, deadline_s) if ports.fleet is not None else None
        # A port keeps its own deadline; this one is for a port that breaks its promise.
        last_s = time.monotonic() + deadline_s * 1.5
        snapshot = _snapshot(telemetry, last_s)
        pools, holes = _fleet(fleet, last_s)
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
    snapshot = replace(snapshot, holes=(*snapshot.holes, *holes))
    return observe.build(policy, state, snapshot, pools, now_s)


def _snapshot(future: Future[Snapshot], last_s: float) -> Snapshot:
    try:
        return future.result(max(last_s - time.monotonic(), 0.01))
    except Exception as error:  # an outage of telemetry, even one by a bug, must be decided on
        return Snapshot((), (_hole("telemetry", error),), tuple(Signal))


def _fleet(
    future: Future[tuple[tuple[PoolFleet, ...], tuple[SourceHole, ...]]] | None, last_s: float
) -> tuple[tuple[PoolFleet, ...], tuple[SourceHole, ...]]:
    if future is None:
        return (), ()
    try:
        return future.result(max(last_s - time.monotonic(), 0.01))
    except Exception as error:  # as above
        return (), (_hole("cluster", error),)


def _hole(source: str, error: Exception) -> SourceHole:
    if isinstance(error, FutureTimeout):
        return SourceHole(source, str(error) or "no answer within the deadline")
    if isinstance(error, TrimtabError):
        return SourceHole(source, str(error))
    _log.error("a port broke, which is a bug: please report it", source=source, exc_info=error)
    return SourceHole(source, f"its adapter broke ({type(error).__name__}: {error}); please report this bug")


def resume(journal: Journal, now_s: float) -> tuple[ControllerState, tuple[Outcome, ...]]:
    """Where the last process stopped: its state, and the outcomes of its last tick, completed where it died."""
    state = journal.load() or ControllerState()
    last = next(iter(journal.tail(1)), None)
    if last is None or last.decision.tick != state.tick:
        return state, ()
    known = {outcome.move_id for outcome in last.outcomes}
    missing = tuple(
        Outcome(
            move.id,
            Status.UNKNOWN if move.mode is Mode.ACT else Status.DRY_RUN,
            now_s,
            "the daemon stopped before the outcome was recorded",
            "",
            "",
        )
        for move in last.decision.moves
        if move.id not in known
    )
    if missing:
        journal.finish(last.decision.tick, (*last.outcomes, *missing))
    return state, (*last.outcomes, *missing)


class Shown:
    """What the server may see: the newest values, handed over by one reference at a time."""

    def __init__(self, metrics: Metrics, recent: Callable[[int], Sequence[TickRecord]]) -> None:
        self._metrics = metrics
        self._recent = recent
        self._last: TickRecord | None = None
        self._beat_s: float | None = None
        self._policy_loaded = False

    def heartbeat_age_s(self) -> float | None:
        """Seconds since the loop's last sign of life."""
        beat_s = self._beat_s
        return None if beat_s is None else time.monotonic() - beat_s

    def policy_loaded(self) -> bool:
        """Whether a valid policy is in force."""
        return self._policy_loaded

    def ticked(self) -> bool:
        """Whether a tick of this process has succeeded."""
        return self._last is not None

    def last(self) -> TickRecord | None:
        """The newest record of this process."""
        return self._last

    def recent(self, count: int) -> Sequence[TickRecord]:
        """The newest records, oldest first."""
        return self._recent(count)

    def exposition(self) -> tuple[bytes, str]:
        """The metrics and their content type."""
        return self._metrics.render()

    def beat(self) -> None:
        """The loop is alive."""
        self._beat_s = time.monotonic()

    def show(self, record: TickRecord) -> None:
        """A tick has succeeded."""
        self._last = record

    def governed(self) -> None:
        """A policy is in force."""
        self._policy_loaded = True


class Loop:
    """Ticks until its clock is stopped. Everything it owns has one writer: the thread that calls `run`."""

    def __init__(
        self,
        ports: Ports,
        policy: LoadedPolicy,
        reopen: Callable[[FleetPolicy], Telemetry],
        metrics: Metrics,
        shown: Shown,
        deadline_s: float = 10.0,
    ) -> None:
        self._ports = ports
        self._policy = policy
        self._reopen = reopen
        self._metrics = metrics
        self._shown = shown
        self._deadline_s = deadline_s
        self._state = ControllerState()
        self._outcomes: tuple[Outcome, ...] = ()
        self._waiting: LoadedPolicy | None = None
        self._forget_missing = False
        self._alarms: frozenset[tuple[AlarmKind, str]] = frozenset()
        self._inbox: deque[Callable[[], None]] = deque()

    def run(
        self,
        watch: PolicyWatch | None = None,
        prune: Callable[[], None] | None = None,
        listen: Callable[[TickRecord], None] | None = None,
        *,
        forget_missing: bool = False,
    ) -> None:
        """Tick at every interval until the clock is stopped; `listen` hears of every tick that succeeded.

        forget_missing: replicas that are missing at the first tick are gone for good.
        """
        self._forget_missing = forget_missing
        if self._ports.journal is not None:
            self._state, self._outcomes = resume(self._ports.journal, self._ports.clock.now_s())
        self._shown.governed()
        self._metrics.policy_reload(ok=True)
        jobs = self._jobs(watch, prune)
        due_s = self._ports.clock.now_s()
        try:
            while self._ports.clock.sleep_until(due_s):
                self._shown.beat()
                self._empty_inbox()
                record = self._tick_safely()
                self._shown.beat()
                if record is not None and listen is not None:
                    listen(record)
                due_s = self._next(due_s)
        finally:
            if jobs is not None:
                jobs.shutdown(wait=False)
            self._ports.telemetry.close()
            _log.info("stopped", tick=self._state.tick)

    def _next(self, due_s: float) -> float:
        interval_s, now_s = self._policy.policy.telemetry.interval_s, self._ports.clock.now_s()
        due_s += interval_s
        late_s = now_s - due_s
        if late_s > interval_s:
            _log.warning("ticks are late; counting anew", late_s=round(late_s, 1))
            return now_s + interval_s
        if late_s < -interval_s - CLOCK_GRAIN_S:
            _log.warning("the clock was set back; counting anew", back_s=round(-late_s - interval_s, 1))
            return now_s + interval_s
        return due_s

    def _tick_safely(self) -> TickRecord | None:
        started_s = time.monotonic()
        try:
            self._state, record = decide(
                self._ports,
                self._policy,
                self._state,
                self._outcomes,
                self._deadline_s,
                forget_missing=self._forget_missing,
            )
            self._forget_missing = False
            # The tick is recorded: its state is the one to go on from, whatever happens to the rest of it.
            self._outcomes = ()
            record = carry_out(self._ports, self._policy.policy, record)
            self._outcomes = record.outcomes
            self._finish(record)
            duration_s = time.monotonic() - started_s
            self._metrics.publish(record, tick_duration_s=duration_s)
            self._shown.show(record)
            self._say(record, duration_s)
        except JournalError as error:
            self._metrics.loop_error()
            _log.error("tick not recorded, so nothing was done", cause=str(error))
        except Exception:  # the one error boundary: a bug must not end the loop
            self._metrics.loop_error()
            _log.exception("tick failed; the next one starts from the last recorded state")
        else:
            return record
        return None

    def _finish(self, record: TickRecord) -> None:
        """Record the outcomes; where that fails nothing is lost but a line: the next observation holds them too."""
        try:
            if self._ports.journal is not None:
                self._ports.journal.finish(record.decision.tick, record.outcomes)
        except JournalError as error:
            self._metrics.loop_error()
            _log.error("outcomes not recorded beside their tick", cause=str(error))

    def _say(self, record: TickRecord, duration_s: float) -> None:
        decision = record.decision
        for move in decision.moves:
            _log.info("move", id=move.id, text=explain.headline(move, decision.now_s))
        # An alarm is the same one as long as its kind and target are; its words change with the numbers in them.
        alarms: dict[tuple[AlarmKind, str], str] = {}
        for alarm in decision.alarms:
            known = alarms.get((alarm.kind, alarm.target))
            alarms[alarm.kind, alarm.target] = alarm.detail if known is None else f"{known}; {alarm.detail}"
        for kind, target in sorted(alarms.keys() - self._alarms):
            _log.warning("alarm", kind=kind.value, target=target, detail=alarms[kind, target])
        for kind, target in sorted(self._alarms - alarms.keys()):
            _log.info("alarm over", kind=kind.value, target=target)
        self._alarms = frozenset(alarms)
        _log.info(
            "tick",
            tick=decision.tick,
            pools=len(record.observation.pools),
            moves=len(decision.moves),
            alarms=len(alarms),
            holes=len(record.observation.holes),
            duration_s=round(duration_s, 3),
        )

    # ------------------------------------------------------------------------------------------------- timed work

    def _jobs(self, watch: PolicyWatch | None, prune: Callable[[], None] | None) -> BackgroundScheduler | None:
        if watch is None and prune is None:
            return None
        jobs = BackgroundScheduler(timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1})
        if watch is not None:
            jobs.add_job(lambda: self.post(lambda: self.reload(watch)), "interval", seconds=RELOAD_S)
        if prune is not None:
            jobs.add_job(lambda: self.post(prune), "interval", seconds=PRUNE_S)
        jobs.start()
        return jobs

    def post(self, note: Callable[[], None]) -> None:
        """Leave work for the loop's own thread, to be done before its next tick. Safe in a signal handler."""
        self._inbox.append(note)

    def _empty_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            note = self._inbox.popleft()
            try:
                note()
            except TrimtabError as error:
                self._metrics.loop_error()
                _log.error("timed work failed", cause=str(error))
            except Exception:  # as around a tick
                self._metrics.loop_error()
                _log.exception("timed work failed")

    def reload(self, watch: PolicyWatch) -> None:
        """Take a changed policy, whole or not at all."""
        before = watch.problem
        # A good policy whose telemetry could not be opened (a certificate that is not there yet) is tried again.
        fresh = watch.poll() or self._waiting
        if watch.problem is not None:
            if watch.problem != before:
                self._metrics.policy_reload(ok=False)
                _log.error("the changed policy is refused, the old one stays in force", cause=watch.problem)
            return
        if fresh is None:
            return
        try:
            telemetry = self._telemetry_for(fresh.policy)
        except TrimtabError as error:
            if fresh is not self._waiting:
                self._metrics.policy_reload(ok=False)
                _log.error("the changed policy can't be used yet, the old one stays in force", cause=str(error))
            self._waiting = fresh
            return
        self._waiting = None
        if telemetry is not self._ports.telemetry:
            self._ports.telemetry.close()
        self._ports = replace(self._ports, telemetry=telemetry)
        self._policy = fresh
        self._metrics.policy_reload(ok=True)
        _log.info("policy reloaded", sha256=fresh.sha256[:12])

    def _telemetry_for(self, policy: FleetPolicy) -> Telemetry:
        """The present source where the new policy asks the same of it (its counters' history is worth keeping)."""
        if _asked(policy) == _asked(self._policy.policy):
            return self._ports.telemetry
        return self._reopen(policy)


def _asked(policy: FleetPolicy) -> tuple[object, ...]:
    return (
        policy.telemetry,
        {name: (pool.select, pool.engine) for name, pool in policy.pools.items()},
        {name: (service.gateway, service.tasks) for name, service in policy.services.items()},
    )
