"""Raw series in memory, and the catalogue's sources evaluated on them as Prometheus would evaluate their PromQL.

A series is what one scrape target exposes under one name with one label set: sample times (ms), values, and the times
at which it ended. A series that is missing from its target's next scrape, or whose target can't be scraped, ends at
that scrape and not five minutes later; it is back as soon as it is seen again.

The newest value at time t is the last sample in (t - 5 min, t], unless the series ended after it. A change over the
window (t - w, t] needs two samples or there is none (absent, not zero); with first and last sample f and l, n samples
covering c seconds, distances s and e from the first and the last of them to the window's edges:

    counter   change = l - f + the value before each reset       gauge   change = l - f
    s := c/(n-1)/2 if s >= 1.1 c/(n-1)                           (the series began inside the window)
    s := min(s, c f/change) for a growing counter                (it can't have been below zero)
    e := c/(n-1)/2 if e >= 1.1 c/(n-1)                           (it ended inside the window)
    change over the window = change (c + s + e) / c,             per second: divided by w

Example: w = 10 s, a counter read 1 s, 4 s, 7 s and 10 s into the window as 100, 130, 10, 40. There is one reset, so
change = 40 - 100 + 130 = 70 in c = 9 s; s = 1 s, e = 0 s: 70 * 10/9 = 77.8, a rate of 7.78/s.

Resets are looked for in each series before any sum. Besides a falling value, a restart that the caller knows of counts
as a reset: a counter that has regrown past its old value would hide one.

Source: Prometheus `promql/functions.go` (extrapolatedRate) and `promql/engine.go`, version 3. Version 2 has windows
closed on both ends and limits s by the zero point before it looks at 1.1 c/(n-1): `PROMETHEUS_2`. Native histograms do
not occur in the text formats and are not stored.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from controller.adapters.promql import Entry, Fold, How, Source
from controller.adapters.signals import GPU_LABELS
from controller.observations import Labels, Level, Sample

LOOKBACK_S = 300.0
"""How old, in seconds, the newest value of a series may be that has not ended."""

EXTRAPOLATION_LIMIT = 1.1
"""Distances to the window's edge beyond this many mean sample intervals are not bridged."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What differs between versions of PromQL; see the module's docstring."""

    left_open: bool
    zero_point_first: bool


PROMETHEUS_3 = Rules(left_open=True, zero_point_first=False)
PROMETHEUS_2 = Rules(left_open=False, zero_point_first=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a scrape: name, the series' own labels, value, and a time (Unix seconds) if the target gave one."""

    name: str
    labels: Labels
    value: float
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which labels stay on the samples of each level; the series that agree in them are folded."""

    replica: tuple[str, ...]
    gpu: tuple[str, ...] = GPU_LABELS
    gateway: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def of(self, level: Level) -> tuple[str, ...]:
        """The labels of one level."""
        match level:
            case Level.REPLICA:
                return self.replica
            case Level.GPU:
                return self.gpu
            case Level.GATEWAY:
                return self.gateway
            case Level.TASKS:
                return self.tasks
            case _:
                assert_never(level)


def label_pairs(pairs: Iterable[tuple[str, str]]) -> Labels:
    """Pairs as `Labels`: sorted by name, empty values dropped."""
    return tuple(sorted(pair for pair in pairs if pair[1]))


def merged(target: Labels, own: Labels) -> Labels:
    """A target's labels and a series' own; a name in both stays the target's, the own one becomes `exported_...`."""
    labels = dict(target)
    for name, text in own:
        free = name
        while free in labels:
            free = f"exported_{free}"
        labels[free] = text
    return label_pairs(labels.items())


@dataclass(frozen=True, slots=True)
class _Span:
    """A window in ms under the rules of one PromQL version."""

    start_ms: int
    end_ms: int
    rules: Rules

    def first(self, times_ms: list[int]) -> int:
        """The index of the first time inside, if any is."""
        bisect = bisect_right if self.rules.left_open else bisect_left
        return bisect(times_ms, self.start_ms)


@dataclass(slots=True)
class _Series:
    """Samples in order of time, the times at which the series ended, and those at which a restart was known."""

    times_ms: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ends_ms: list[int] = field(default_factory=list)
    restarts_ms: list[int] = field(default_factory=list)

    def add(self, at_ms: int, value: float, restarted: bool) -> None:
        """Append a sample; one that is not newer than the last is the same sample again, and the first one counts."""
        if self.times_ms and at_ms <= self.times_ms[-1]:
            return
        self.times_ms.append(at_ms)
        self.values.append(value)
        if restarted:
            self.restarts_ms.append(at_ms)

    def end(self, at_ms: int) -> None:
        """Mark the series as gone, if it isn't yet."""
        if self.times_ms and not (self.ends_ms and self.ends_ms[-1] > self.times_ms[-1]):
            self.ends_ms.append(at_ms)

    def rewind(self, at_ms: int) -> None:
        """Drop everything from `at_ms` on."""
        cut = bisect_left(self.times_ms, at_ms)
        del self.times_ms[cut:], self.values[cut:]
        for times in (self.ends_ms, self.restarts_ms):
            del times[bisect_left(times, at_ms) :]

    def forget(self, before_ms: int) -> None:
        """Drop everything before `before_ms`."""
        cut = bisect_left(self.times_ms, before_ms)
        del self.times_ms[:cut], self.values[:cut]
        for times in (self.ends_ms, self.restarts_ms):
            del times[: bisect_left(times, before_ms)]

    def newest(self, span: _Span) -> int | None:
        """The index of the newest sample inside `span`, unless the series ended after it."""
        index = bisect_right(self.times_ms, span.end_ms) - 1
        if index < span.first(self.times_ms):
            return None
        ended = bisect_right(self.ends_ms, span.end_ms) - 1
        if ended >= 0 and self.ends_ms[ended] > self.times_ms[index]:
            return None
        return index

    def lost(self, low: int, high: int) -> float:
        """What resets took away between the samples low..high-1: the value before each of them."""
        values = self.values
        total = 0.0
        previous = values[low]
        for value in values[low + 1 : high]:
            if value < previous:
                total += previous
            previous = value
        for at_ms in self.restarts_ms:
            index = bisect_left(self.times_ms, at_ms)
            if low < index < high and not values[index] < values[index - 1]:
                total += values[index - 1]
        return total

    def change(self, span: _Span, *, counter: bool) -> float | None:
        """The change over `span`, extrapolated to its edges; None where fewer than two samples are inside."""
        low, high = span.first(self.times_ms), bisect_right(self.times_ms, span.end_ms)
        if high - low < 2:
            return None
        first_ms, last_ms, first = self.times_ms[low], self.times_ms[high - 1], self.values[low]
        change = self.values[high - 1] - first
        if counter:
            change += self.lost(low, high)
        covered_s = (last_ms - first_ms) / 1000
        interval_s = covered_s / (high - low - 1)
        to_start_s, to_end_s = (first_ms - span.start_ms) / 1000, (span.end_ms - last_ms) / 1000
        to_zero_s = covered_s * (first / change) if counter and change > 0 and first >= 0 else math.inf
        if span.rules.zero_point_first:
            to_start_s = min(to_start_s, to_zero_s)
        if to_start_s >= EXTRAPOLATION_LIMIT * interval_s:
            to_start_s = interval_s / 2
        if to_end_s >= EXTRAPOLATION_LIMIT * interval_s:
            to_end_s = interval_s / 2
        # min keeps its first argument where the second is NaN, as a comparison in PromQL would.
        to_start_s = min(to_start_s, to_zero_s)
        return change * ((covered_s + to_start_s + to_end_s) / covered_s)


@dataclass(frozen=True, slots=True)
class _Member:
    """A series that a source reads: the group it belongs to, and the labels of the sample it goes into."""

    series: _Series
    owner: Labels
    labels: Labels


@dataclass(slots=True)
class _Alternative:
    """One source of an entry, with the series that it reads."""

    source: Source
    by: tuple[str, ...]
    members: dict[tuple[Labels, str, Labels], _Member] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The exposition name of the series."""
        return f"{self.source.metric}_bucket" if self.source.how is How.BUCKETS else self.source.metric

    def member(self, series: _Series, labels: Labels) -> _Member | None:
        """The series as a member, if its labels meet the source's conditions."""
        texts = dict(labels)
        if any(texts.get(name, "") != text for name, text in self.source.where):
            return None
        if any(texts.get(name, "") == text for name, text in self.source.where_not):
            return None
        kept = (*self.by, *self.source.keep, *(("le",) if self.source.how is How.BUCKETS else ()))
        return _Member(
            series,
            owner=tuple(pair for pair in labels if pair[0] in self.by),
            labels=tuple(pair for pair in labels if pair[0] in kept),
        )


@dataclass(frozen=True, slots=True)
class _Instant:
    """The time an evaluation is for, with its windows; `older` is the first half of `window`."""

    at_ms: int
    window_s: float
    lookback: _Span
    window: _Span
    older: _Span

    def read(self, series: _Series, how: How) -> float | None:
        """A series' value at this instant, None where there is none."""
        match how:
            case How.VALUE:
                index = series.newest(self.lookback)
                return None if index is None else series.values[index]
            case How.AGE:
                index = series.newest(self.lookback)
                return None if index is None else (self.at_ms - series.times_ms[index]) / 1000
            case How.DELTA:
                change = series.change(self.window, counter=False)
                return None if change is None else change / self.window_s
            case How.EARLIER:
                change = series.change(self.older, counter=False)
                return None if change is None else change / (self.window_s / 2)
            case How.RATE | How.BUCKETS:
                change = series.change(self.window, counter=True)
                return None if change is None else change / self.window_s
            case _:
                assert_never(how)


class SeriesStore:
    """The series that `entries` read, and the entries' samples at any instant that is still remembered."""

    def __init__(self, entries: tuple[Entry, ...], grouping: Grouping) -> None:
        self._plan = tuple(
            (entry.signal, [_Alternative(source, grouping.of(entry.level)) for source in entry.sources])
            for entry in entries
        )
        self._readers: dict[str, list[_Alternative]] = {}
        for _, alternatives in self._plan:
            for alternative in alternatives:
                self._readers.setdefault(alternative.metric, []).append(alternative)
        self._targets: dict[Labels, dict[tuple[str, Labels], _Series]] = {}
        self._newest_ms: dict[Labels, int] = {}

    def wants(self, name: str) -> bool:
        """Whether some entry reads series of this exposition name; others are not kept."""
        return name in self._readers

    def append(self, t_s: float, target: Labels, row: Row) -> None:
        """Add one sample at `t_s` (Unix seconds), or at the row's own time where that is earlier."""
        series = self._series(target, row)
        if series is not None:
            series.add(_at_ms(t_s, row), row.value, False)

    def end(self, t_s: float, target: Labels, name: str, labels: Labels) -> None:
        """Mark one series as gone at `t_s`."""
        series = self._targets.get(target, {}).get((name, labels))
        if series is not None:
            series.end(_ms(t_s))

    def scraped(self, t_s: float, target: Labels, rows: Iterable[Row], *, restarted: bool = False) -> tuple[Row, ...]:
        """Add all that one scrape of a target gave at `t_s`; the target's other series end. Returns repeated rows.

        A failed scrape is one that gave nothing but `up` 0. restarted: the target's process is not the one of the
        last scrape. A time before the target's last scrape means that the clock was set back: what was stamped later
        is dropped.
        """
        t_ms = _ms(t_s)
        known = self._targets.setdefault(target, {})
        if t_ms <= self._newest_ms.get(target, t_ms - 1):
            for series in known.values():
                series.rewind(t_ms)
        self._newest_ms[target] = t_ms
        seen: set[tuple[str, Labels]] = set()
        repeated: list[Row] = []
        for row in rows:
            identity = (row.name, row.labels)
            if identity in seen:
                repeated.append(row)
                continue
            seen.add(identity)
            wanted = self._series(target, row)
            if wanted is not None:
                wanted.add(_at_ms(t_s, row), row.value, restarted)
        for identity, series in known.items():
            if identity not in seen:
                series.end(t_ms)
        return tuple(repeated)

    def forget(self, before_s: float) -> None:
        """Drop what is older than `before_s` (Unix seconds), and series of which nothing is left."""
        before_ms = _ms(before_s)
        for target, known in self._targets.items():
            for identity, series in list(known.items()):
                series.forget(before_ms)
                if not series.times_ms:
                    del known[identity]
                    for alternative in self._readers[identity[0]]:
                        alternative.members.pop((target, *identity), None)

    def evaluate(self, at_s: float, window_s: float, rules: Rules = PROMETHEUS_3) -> tuple[Sample, ...]:
        """Every entry's samples at `at_s` (Unix seconds), rates over `window_s`; in the order of entries and labels."""
        at_ms, half_ms = _ms(at_s), _ms(window_s / 2)
        instant = _Instant(
            at_ms,
            window_s,
            lookback=_Span(at_ms - _ms(LOOKBACK_S), at_ms, rules),
            window=_Span(at_ms - _ms(window_s), at_ms, rules),
            older=_Span(at_ms - 2 * half_ms, at_ms - half_ms, rules),
        )
        samples: list[Sample] = []
        for signal, alternatives in self._plan:
            values = _first_answers(alternatives, instant)
            samples.extend(Sample(signal, labels, values[labels]) for labels in sorted(values))
        return tuple(samples)

    def _series(self, target: Labels, row: Row) -> _Series | None:
        """The series a row belongs to, new if need be; None where no entry reads it."""
        known = self._targets.setdefault(target, {})
        identity = (row.name, row.labels)
        series = known.get(identity)
        if series is None and row.name in self._readers:
            series = known[identity] = _Series()
            labels = merged(target, row.labels)
            for alternative in self._readers[row.name]:
                member = alternative.member(series, labels)
                if member is not None:
                    alternative.members[(target, *identity)] = member
        return series


def _first_answers(alternatives: list[_Alternative], instant: _Instant) -> dict[Labels, float]:
    """The folded values of the first alternative that says anything, for each group by itself."""
    answers: dict[Labels, float] = {}
    answered: set[Labels] = set()
    for alternative in alternatives:
        source = alternative.source
        folding: dict[Labels, list[float]] = {}
        owners: set[Labels] = set()
        for member in alternative.members.values():
            if member.owner in answered:
                continue
            value = instant.read(member.series, source.how)
            if value is not None:
                folding.setdefault(member.labels, []).append(value)
                owners.add(member.owner)
        answered |= owners
        answers.update((labels, _folded(source.fold, values) * source.scale) for labels, values in folding.items())
    return answers


def _folded(fold: Fold, values: list[float]) -> float:
    """One value of several, whatever their order; NaN makes a sum NaN, and is a maximum or minimum of NaN alone."""
    if len(values) == 1:
        return values[0]
    numbers = [value for value in values if not math.isnan(value)]
    match fold:
        case Fold.SUM:
            return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
        case Fold.MAX:
            return max(numbers, default=math.nan)
        case Fold.MIN:
            return min(numbers, default=math.nan)
        case _:
            assert_never(fold)


def _ms(t_s: float) -> int:
    return round(t_s * 1000)


def _at_ms(t_s: float, row: Row) -> int:
    return _ms(t_s if row.at_s is None else min(t_s, row.at_s))
