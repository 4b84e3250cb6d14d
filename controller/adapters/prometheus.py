"""Telemetry from Prometheus, Thanos, Mimir or VictoriaMetrics: one query per signal and tick, however many pools.

Each entry of the catalogue becomes one PromQL expression, grouped by the labels that name a replica and the labels by
which any pool selects, so that one answer holds every pool's samples. All are asked for the same instant, in
parallel, under one deadline for the whole read; a query that fails costs its own signal and no other. Answers are
read in the workers as well, so that a late or very large one doesn't hold the read up: what is not ready is a hole.

Narrowing keeps a shared Prometheus from answering with everybody's series: `pool=~"a|b|"` for a label by which all
pools select. The empty alternative lets series pass that lack the label (`up` has no model_name, vLLM's
cache_config_info neither), for which observe finds the pool by the replica's name. Where the matchers would make an
expression longer than `LONGEST_BYTES` it is asked for without them: more data, the same samples.

What differs between servers stays as they say it: VictoriaMetrics computes rates without extrapolation and with the
sample before the window, so its rates run some percent apart from Prometheus's at the same instant.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from controller.adapters.prometheus_answer import Answer, Point
from controller.adapters.prometheus_api import PrometheusApi
from controller.adapters.promql import label_name, quoted
from controller.adapters.signals import GPU_LABELS, Entry, catalogue, promql, tasks
from controller.errors import TelemetryError
from controller.observations import Labels, Level, Sample, Signal, Snapshot, SourceHole
from controller.policy import FleetPolicy, PrometheusSource

T = TypeVar("T")

WORKERS = 8
STUCK_MAX = 8 * WORKERS
"""Queries at a time: well below Prometheus's default limit of 20, which others use as well."""

LONGEST_BYTES = 8192

ALWAYS_THERE = frozenset({"instance", "job"})
"""Labels that Prometheus puts on every series it scrapes."""

ENGINE_LABELS = {"engine", "model_name"}
"""Labels that engines put on their own series, so that `up` can't have them."""

BUCKETS = {Signal.TTFT_BUCKETS_PER_S, Signal.ITL_BUCKETS_PER_S, Signal.REUSE_GAP_BUCKETS_PER_S}


@dataclass(frozen=True, slots=True)
class _Question:
    """One entry of the catalogue as it is asked: grouped, narrowed, for a server that knows native histograms or not.

    canonical: label names of the scrape configuration and what the daemon calls them; kept: labels that keep
    their own names as well.
    """

    entry: Entry
    by: tuple[str, ...]
    matchers: str
    native: bool
    canonical: tuple[tuple[str, str], ...] = ()
    kept: frozenset[str] = frozenset()

    def expression(self, window_s: float) -> str:
        """The PromQL text."""
        narrowed = promql(self.entry, self.by, window_s, self.matchers, native=self.native)
        if len(narrowed.encode("utf-8", "replace")) <= LONGEST_BYTES:
            return narrowed
        return promql(self.entry, self.by, window_s, native=self.native)

    def labels(self, found: Labels) -> Labels:
        """A series' labels under canonical names, sorted."""
        labels = {name: text for name, text in found if name != "__name__"}
        for own, name in self.canonical:
            text = labels.get(own) if own in self.kept else labels.pop(own, None)
            # A label by which pools select keeps its meaning, even where it has the canonical name by chance.
            if text is not None and name not in self.kept:
                labels[name] = text
        return tuple(sorted(labels.items()))


@dataclass(frozen=True, slots=True)
class _Told:
    """What one answer says of a signal."""

    samples: tuple[Sample, ...]
    complaints: tuple[str, ...]
    partial: bool


class PrometheusTelemetry:
    """ports.Telemetry over the server named in `policy.telemetry.prometheus`. Raises TelemetryError without one."""

    def __init__(self, policy: FleetPolicy) -> None:
        source = policy.telemetry.prometheus
        if source is None:
            raise TelemetryError("the policy names no Prometheus; add telemetry.prometheus.url")
        self._questions = _questions(policy, native=source.flavour != "victoriametrics")
        self._flavour = source.flavour
        self._api = PrometheusApi(source)
        self._workers = ThreadPoolExecutor(WORKERS, "prometheus")
        self._stuck: list[Future[_Told]] = []

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:
        """Every signal at `at_s` (Unix s), rates over `window_s`; back within `deadline_s`, with what came by then."""
        deadline_at_s = time.monotonic() + deadline_s
        self._replace_stuck_workers()
        futures = [
            self._workers.submit(self._ask, question, window_s, at_s, deadline_at_s) for question in self._questions
        ]
        # The requests watch the deadline themselves; waiting as well covers what knows no timeout (name resolution).
        self._stuck += wait(futures, timeout=max(deadline_at_s - time.monotonic(), 0.0)).not_done
        samples: list[Sample] = []
        complaints: list[tuple[str, Signal]] = []
        failed: list[Signal] = []
        for question, future in zip(self._questions, futures, strict=True):
            signal = question.entry.signal
            result = self._result(future, deadline_s)
            if isinstance(result, TelemetryError):
                complaints.append((str(result), signal))
                failed.append(signal)
                continue
            samples += result.samples
            complaints += [(text, signal) for text in result.complaints]
            if result.partial:
                failed.append(signal)
        return Snapshot(tuple(samples), self._holes(complaints), tuple(failed))

    def _ask(self, question: _Question, window_s: float, at_s: float, deadline_at_s: float) -> _Told:
        answer = self._api.query(question.expression(window_s), at_s, deadline_at_s)
        found, unfit = _samples(question, answer.points)
        return _Told(tuple(found), (*answer.complaints, *unfit), answer.partial)

    def _replace_stuck_workers(self) -> None:
        """New workers where the old ones are held by a server that drips its headers (no timeout ends that).

        They end when the server lets go of them; more than STUCK_MAX of them at once are not left behind.
        """
        self._stuck = [future for future in self._stuck if future.running()]
        if WORKERS <= len(self._stuck) < STUCK_MAX:
            self._workers.shutdown(wait=False, cancel_futures=True)
            self._workers = ThreadPoolExecutor(WORKERS, "prometheus")

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        """The PromQL of each signal."""
        return tuple((question.entry.signal, question.expression(window_s)) for question in self._questions)

    def series(self, expression: str, deadline_s: float, at_s: float | None = None) -> tuple[Labels, ...]:
        """The label sets (with `__name__`) that `expression` yields at `at_s` (Unix s; None: now), sorted.

        Raises TelemetryError where the server can't say, or can't say all.
        """
        future = self._workers.submit(self._api.query, expression, at_s, time.monotonic() + deadline_s)
        wait([future], timeout=deadline_s)
        result = self._result(future, deadline_s)
        if isinstance(result, TelemetryError):
            raise result
        return _whole(result, self._api.where)

    @staticmethod
    def discover(source: PrometheusSource, expression: str, at_s: float | None = None) -> tuple[Labels, ...]:
        """What `series` says, within the source's timeout, for people who have no policy yet."""
        with closing(PrometheusApi(source)) as api:
            return _whole(api.query(expression, at_s, time.monotonic() + source.timeout_s), api.where)

    def close(self) -> None:
        """Release connections and threads; a query that still runs ends by itself, at its timeout."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._api.close()

    def _result(self, future: Future[T], deadline_s: float) -> T | TelemetryError:
        if not future.done():
            future.cancel()
            return self._api.late(deadline_s)
        try:
            return future.result()
        except TelemetryError as error:
            return error

    def _holes(self, complaints: Sequence[tuple[str, Signal]]) -> tuple[SourceHole, ...]:
        """One hole per complaint: a server that is gone is said once, with every signal it costs."""
        signals: dict[str, list[Signal]] = {}
        for text, signal in complaints:
            signals.setdefault(text, []).append(signal)
        asked = len(self._questions)
        return tuple(
            SourceHole(
                f"{self._flavour}: {self._api.where}",
                f"{f'all {asked} signals' if len(of) == asked else ', '.join(dict.fromkeys(of))}: {text}",
            )
            for text, of in signals.items()
        )


def _whole(answer: Answer, where: str) -> tuple[Labels, ...]:
    """The label sets of an answer. Raises TelemetryError where it is only a part of the truth."""
    if answer.partial:
        said = "; ".join(answer.complaints)
        raise TelemetryError(f"{where} answered in part only ({said}); try again when it is whole")
    return tuple(point.labels for point in answer.points)


def _samples(question: _Question, points: Iterable[Point]) -> tuple[list[Sample], tuple[str, ...]]:
    """The samples of one answer, and what is wrong with it: numbers and histograms each where the other belongs."""
    signal = question.entry.signal
    samples: list[Sample] = []
    unfit = 0
    for point in points:
        labels = question.labels(point.labels)
        if isinstance(point.value, tuple):
            if signal in BUCKETS:
                samples += [
                    Sample(signal, tuple(sorted((*labels, ("le", bucket.le)))), bucket.value) for bucket in point.value
                ]
            else:
                unfit += 1
        elif signal in BUCKETS and not any(name == "le" for name, _ in labels):
            unfit += 1
        else:
            samples.append(Sample(signal, labels, point.value))
    if not unfit:
        return samples, ()
    wrong = "numbers instead of a histogram" if signal in BUCKETS else "histograms instead of a number"
    return samples, (f"{unfit} series are {wrong}; a recording rule or relabelling gave them that metric name",)


# ------------------------------------------------------------------------------------------- what is asked, and how


def _questions(policy: FleetPolicy, *, native: bool) -> tuple[_Question, ...]:
    names = policy.telemetry.labels
    selects = [pool.select for pool in policy.pools.values()]
    gateways = [service.gateway for service in policy.services.values() if service.gateway]
    traces = [service.tasks for service in policy.services.values() if service.tasks]
    keys = _union(selects)
    replica = tuple(dict.fromkeys(("instance", "job", names.pod, names.namespace, *keys)))
    canonical = tuple((own, name) for own, name in ((names.pod, "pod"), (names.namespace, "namespace")) if own != name)
    source = policy.telemetry.tasks
    engines = tuple(dict.fromkeys(pool.engine for pool in policy.pools.values()))
    entries = catalogue(
        engines,
        gateway=bool(gateways),
        task_entries=tasks(source.metric, tuple(sorted(source.error.items()))) if traces else (),
    )

    def question(entry: Entry) -> _Question:
        match entry.level:
            case Level.REPLICA:
                absent = ENGINE_LABELS if entry.signal is Signal.UP else set()
                matchers = _matchers(selects, ignored=absent, lenient=True)
                return _Question(entry, replica, matchers, native, canonical, ALWAYS_THERE.union(keys))
            case Level.GPU:
                return _Question(entry, GPU_LABELS, "", native)
            case Level.GATEWAY:
                return _Question(entry, _union(gateways), _matchers(gateways), native)
            case Level.TASKS:
                return _Question(entry, _union(traces), _matchers(traces), native)

    return tuple(question(entry) for entry in entries)


def _union(selects: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    return tuple(sorted({key for select in selects for key in select}))


def _matchers(selects: Sequence[Mapping[str, str]], ignored: Iterable[str] = (), *, lenient: bool = False) -> str:
    """Label matchers, joined by commas, that pass every series which one of `selects` can mean.

    lenient: series that lack a label pass as well.
    """
    shared = set.intersection(*(set(select) for select in selects)) - set(ignored)
    matchers = []
    for key in sorted(shared):
        texts = sorted({select[key] for select in selects})
        if lenient and key not in ALWAYS_THERE and "" not in texts:
            texts.append("")
        if len(texts) == 1:
            matchers.append(f"{label_name(key)}={quoted(texts[0])}")
        else:
            matchers.append(f"{label_name(key)}=~{quoted('|'.join(map(_literal, texts)))}")
    return ",".join(matchers)


def _literal(text: str) -> str:
    r"""The text as an RE2 pattern that matches it alone; only what has a meaning there is escaped."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)
