"""Every metric that the daemon exports, from one value, the record of the last tick.

Two kinds of series, with two rules:

    gauges    say what the last tick saw and thought (controller.gauges). They are made anew from the last `TickRecord`
              at every scrape, so what left the policy leaves the metrics, and nothing can contradict the journal.
    counters  say what happened since the daemon started. Those whose labels are known beforehand start at zero,
              because `increase()` does not see a counter that is born with its first event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import assert_never

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from controller.decisions import ActionKind, Mode, Move, Scale, TickRecord
from controller.gauges import BUILD, RELOADED, LastTick, Recommendation, Sheet, fill, source_word
from controller.observations import Status

TICK_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0)


class Gauges(Collector):
    """The gauges of the last tick, built at every scrape. Both attributes are replaced whole, never changed."""

    def __init__(self) -> None:
        self.last: LastTick | None = None
        self.reload_ok: bool | None = None
        try:
            self._version: str | None = version("trimtab")
        except PackageNotFoundError:  # run from a source tree that was never installed
            self._version = None

    def collect(self) -> Iterator[Metric]:
        """One family for each gauge that has something to say."""
        sheet = Sheet()
        last = self.last
        if last is not None:
            fill(sheet, last)
        sheet.put(RELOADED, (), None if self.reload_ok is None else float(self.reload_ok))
        if self._version is not None:
            sheet.put(BUILD, (self._version,), 1)
        yield from sheet.families()


class WithoutCreated(Collector):
    """A registry's families without the `_created` series, which double the counters and which nothing reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """The registry's families, in its order."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _move_labels(move: Move) -> tuple[str, str, str, str]:
    """Pool, service, kind and mode of a move; the one of pool and service that it is not about is empty."""
    match move.kind:
        case ActionKind.SCALE | ActionKind.SLEEP | ActionKind.WAKE | ActionKind.WARM:
            return move.target, "", move.kind, move.mode
        case ActionKind.WEIGHTS | ActionKind.ADMISSION:
            return "", move.target, move.kind, move.mode
        case _:
            assert_never(move.kind)


class Metrics:
    """The daemon's metrics, with a registry of their own. All methods may be called from any thread.

    `publish`, `policy_reload` and `loop_error` only swap a reference and count; the work is done by `render`, in the
    thread that answers the scrape.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges = Gauges()
        self._registry.register(self._gauges)
        self._duration = Histogram(
            "trimtab_tick_duration_seconds",
            "Wall time of a tick, from reading to recording.",
            buckets=TICK_BUCKETS_S,
            registry=self._registry,
        )
        self._ticks = self._counter("trimtab_ticks", "Recorded ticks.")
        self._moves = self._counter("trimtab_moves", "Decided moves.", "pool", "service", "kind", "mode")
        self._holds = self._counter("trimtab_holds", "Decisions to leave a target as it is.", "kind")
        self._outcomes = self._counter("trimtab_outcomes", "Outcomes of moves.", "status")
        self._holes = self._counter("trimtab_telemetry_holes", "Sources that did not answer as they should.", "source")
        self._reloads = self._counter("trimtab_policy_reloads", "Loads of the policy file.", "result")
        self._errors = self._counter(
            "trimtab_loop_errors", "Ticks that failed or could not be recorded, and timed work that failed."
        )
        for kind in ActionKind:
            self._holds.labels(kind)
        for status in Status:
            self._outcomes.labels(status)
        for result in ("success", "failure"):
            self._reloads.labels(result)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, registry=self._registry)

    def publish(self, record: TickRecord, *, tick_duration_s: float) -> None:
        """Export a recorded tick, outcomes included, that took `tick_duration_s` of wall time."""
        decision = record.decision
        pools = [pool.name for pool in record.observation.pools]
        for pool in pools:
            for mode in (Mode.RECOMMEND, Mode.ACT):
                self._moves.labels(pool, "", ActionKind.SCALE, mode)
        for move in decision.moves:
            self._moves.labels(*_move_labels(move)).inc()
        for hold in decision.holds:
            self._holds.labels(hold.kind).inc()
        for outcome in record.outcomes:
            self._outcomes.labels(outcome.status).inc()
        for hole in record.observation.holes:
            self._holes.labels(source_word(hole.source)).inc()
        if math.isfinite(tick_duration_s):
            self._duration.observe(tick_duration_s)
        self._ticks.inc()
        self._gauges.last = LastTick(record, self._recommended(record, pools))

    def _recommended(self, record: TickRecord, pools: list[str]) -> tuple[Recommendation, ...]:
        """The last recommendation of each pool that is still in the policy."""
        last = self._gauges.last
        known = {one.pool: one for one in (last.recommended if last else ())}
        for move in record.decision.moves:
            for action in move.actions:
                if isinstance(action, Scale):
                    known[action.pool] = Recommendation(action.pool, action.after, record.decision.now_s)
        return tuple(known[pool] for pool in dict.fromkeys(pools) if pool in known)

    def policy_reload(self, ok: bool) -> None:
        """Say whether a load of the policy file was accepted."""
        self._gauges.reload_ok = ok
        self._reloads.labels("success" if ok else "failure").inc()

    def loop_error(self) -> None:
        """Count a tick, or a piece of timed work, that failed."""
        self._errors.inc()

    def render(self) -> tuple[bytes, str]:
        """The exposition in the Prometheus text format, and its content type."""
        return generate_latest(WithoutCreated(self._registry)), CONTENT_TYPE_PLAIN_0_0_4
