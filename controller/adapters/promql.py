"""How raw series become a canonical signal, as a value, and its rendering as PromQL.

A signal has, per engine (or exporter), alternatives in order of preference: renames over the releases, and other
spellings of the same thing. The first alternative that a scrape target exposes is taken, the others of that target
are not. A `Source` says how raw series become the signal's value:

    VALUE    the newest value                      gauges
    RATE     per-second increase over the window   counters, resets handled per series before any sum
    DELTA    change per second over the window     gauges whose growth counts
    EARLIER  DELTA over the window's older half    growth that something should have answered by now
    AGE      seconds since the newest sample       freshness
    BUCKETS  RATE of each `le` bucket              classic histograms; native ones where there are no classic ones

then the series of one target are folded (sum over data-parallel ranks and reasons, or max) and scaled to the
signal's unit. The Prometheus adapter renders sources as PromQL (`promql`), the scrape adapter evaluates them on its
own series (controller.adapters.series); a test holds the two equal on captured telemetry of real engines.

Worked: the KV usage of a target has two names, so with by = (pod) it is
`max by (pod) (vllm:kv_cache_usage_perc) or max by (pod) (vllm:gpu_cache_usage_perc)`: `or` adds the series of its
right side whose labels its left side lacks, so a pod that exposes both names is taken once, under the newer one.

A Prometheus that keeps histograms as native ones only has no `_bucket`, `_sum` and `_count` series at all; the RATE
of a metric with one of the last two suffixes then comes from the native histogram, too (Prometheus 2.40 and newer).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from controller.observations import Level, Signal


class How(StrEnum):
    """How raw series become a value; see the module's docstring."""

    VALUE = "value"
    RATE = "rate"
    DELTA = "delta"
    EARLIER = "earlier"
    AGE = "age"
    BUCKETS = "buckets"


class Fold(StrEnum):
    """How the series of one scrape target become one sample."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Source:
    """One way to get a signal from raw series.

    metric: exposition name (for BUCKETS the family name, without `_bucket`); where: label equalities; where_not:
    label inequalities; keep: labels that stay on the sample; scale: factor to the signal's unit.
    """

    metric: str
    how: How
    fold: Fold = Fold.SUM
    where: tuple[tuple[str, str], ...] = ()
    where_not: tuple[tuple[str, str], ...] = ()
    keep: tuple[str, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One signal of one engine or exporter: its alternatives, and what its absence means to a user."""

    signal: Signal
    level: Level
    sources: tuple[Source, ...]
    essential: bool
    about: str


def promql(entry: Entry, by: tuple[str, ...], window_s: float, matchers: str = "", *, native: bool = True) -> str:
    """The entry as one PromQL expression, grouped by the labels `by`; `matchers` narrows every selector of it.

    native: whether the server knows native histograms and their functions.
    """
    window = _Window(f"{round(window_s * 1000)}ms", f"{round(window_s * 500)}ms", window_s, native)
    histograms = [source for source in entry.sources if source.how is How.BUCKETS]
    others = [_promql(source, by, window, matchers) for source in entry.sources if source.how is not How.BUCKETS]
    return " or ".join([*others, *_buckets(histograms, by, window, matchers)])


def quoted(text: str) -> str:
    """The text as a string literal of PromQL (Go's escapes, of which JSON's are a part)."""
    return json.dumps(text, ensure_ascii=False)


def label_name(name: str) -> str:
    """The label as it stands in PromQL: names outside the classic alphabet are quoted (Prometheus 3)."""
    return name if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) else quoted(name)


@dataclass(frozen=True, slots=True)
class _Window:
    """The window and its half as PromQL text, its seconds, and whether to ask for native histograms."""

    text: str
    half: str
    length_s: float
    native: bool


def _promql(source: Source, by: tuple[str, ...], window: _Window, matchers: str) -> str:
    chosen = _selector(source, matchers)
    group = _group(by, *source.keep)
    scale = f" * {source.scale!r}" if source.scale != 1 else ""
    fold = f"{source.fold.value} by ({group})"
    match source.how:
        case How.VALUE:
            return f"{fold} ({source.metric}{chosen}){scale}"
        case How.RATE:
            floats = f"{fold} (rate({source.metric}{chosen}[{window.text}])){scale}"
            family, _, part = source.metric.rpartition("_")
            if not window.native or part not in {"sum", "count"}:
                return floats
            return f"{floats} or histogram_{part}({fold} (rate({family}{chosen}[{window.text}]))){scale}"
        case How.DELTA:
            return f"{fold} (delta({source.metric}{chosen}[{window.text}])) / {window.length_s!r}"
        case How.EARLIER:
            half = f"[{window.half}] offset {window.half}"
            return f"{fold} (delta({source.metric}{chosen}{half})) / {window.length_s / 2!r}"
        case How.AGE:
            return f"{fold} (time() - timestamp({source.metric}{chosen}))"
        case How.BUCKETS:
            return " or ".join(_buckets([source], by, window, matchers))
        case _:
            assert_never(source.how)


def _buckets(sources: list[Source], by: tuple[str, ...], window: _Window, matchers: str) -> list[str]:
    """Terms of one `or`: each is silent for the groups in which an earlier one speaks.

    `or` alone compares `le` as well, and would mix the buckets of two histograms of different layouts into one.
    """
    group = _group(by)
    terms: list[str] = []
    taken: list[str] = []
    for source in sources:
        buckets = f"rate({source.metric}_bucket{_selector(source, matchers)}[{window.text}])"
        last = f"rate({source.metric}_bucket{_selector(source, matchers, ('le', '+Inf'))}[{window.text}])"
        forms = [(f"sum by ({_group(by, 'le')}) ({buckets})", last)]
        if window.native:
            histogram = f"rate({source.metric}{_selector(source, matchers)}[{window.text}])"
            forms.append((f"sum by ({group}) ({histogram})", histogram))
        for term, presence in forms:
            terms.append(f"({f' unless on ({group}) '.join([term, *taken])})" if taken else term)
            taken.append(f"group by ({group}) ({presence})")
    return terms


def _group(by: tuple[str, ...], *more: str) -> str:
    return ", ".join(label_name(name) for name in (*by, *more))


def _selector(source: Source, matchers: str, *more: tuple[str, str]) -> str:
    conditions = [f"{label_name(name)}={quoted(text)}" for name, text in (*source.where, *more)]
    conditions += [f"{label_name(name)}!={quoted(text)}" for name, text in source.where_not]
    conditions += [matchers] if matchers else []
    return f"{{{','.join(conditions)}}}" if conditions else ""
