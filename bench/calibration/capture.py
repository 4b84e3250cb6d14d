"""A recorded load as the plant needs it: when calls came, and what the real engine counted, scrape by scrape.

The capture (tests/data/vllm_cpu) is a Prometheus that scraped two real vLLM engines every second. Per engine and load:

    calls that had arrived by a scrape = finished + running + waiting, never falling
    what a load did                    = counters at its last scrape minus those at the scrape before it began

Times within a second are not recorded: the generator's arrivals were a Poisson process, and given their number those
are uniform; the loads that began with all their calls at once are placed so. One load is one run of the generator,
which drew new prompts: nothing cached before helps it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.make_recording import dump, series_of
from models.fleetsim.world import ITL_BOUNDS, TTFT_BOUNDS

Numbers = NDArray[np.float64]

COUNTERS = {
    "output": "vllm:generation_tokens_total",
    "finished": "vllm:request_success_total",
    "ttft_sum": "vllm:time_to_first_token_seconds_sum",
    "itl_sum": "vllm:inter_token_latency_seconds_sum",
    "queue_sum": "vllm:request_queue_time_seconds_sum",
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm:iteration_tokens_total_count",
}
GAUGES = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds_bucket", TTFT_BOUNDS),
    "itl": ("vllm:inter_token_latency_seconds_bucket", ITL_BOUNDS),
}
SYSTEM_TOKENS = 300
"""The generator's shared prefix in tokens (its words are one token each); each engine sees two such prefixes."""


class Part(Enum):
    """What a load is for."""

    FITTED = "fitted"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Totals:
    """What one engine did under one load. Sums in seconds; counts by bucket, not cumulative."""

    output_tokens: float
    busy_s: float
    ttft_sum_s: float
    itl_sum_s: float
    queue_sum_s: float
    finished: float
    queries: float
    hits: float
    preemptions: float
    steps: float
    ttft_counts: Numbers
    itl_counts: Numbers

    @property
    def calls(self) -> float:
        """Calls that got a first token."""
        return float(self.ttft_counts.sum())


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One engine under one run of the generator. times_s: scrapes since the first; arrivals: calls in each interval."""

    name: str
    part: Part
    pod: str
    times_s: Numbers
    arrivals: NDArray[np.int64]
    opens_at_once: bool
    system_tokens: int
    input_tokens: int
    output_tokens: int
    measured: Totals


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    part: Part
    pods: tuple[str, ...]
    start_s: float
    end_s: float
    opens_at_once: bool = False


def totals(times_s: Numbers, counters: dict[str, Numbers], buckets: dict[str, Numbers]) -> Totals:
    """The difference between the last and the first of cumulative readings.

    counters: [scrape] by the names of `COUNTERS`; buckets: [scrape, bucket] by the names of `HISTOGRAMS`. busy_s: the
    length of the intervals in which tokens came.
    """
    grown = {name: float(values[-1] - values[0]) for name, values in counters.items()}
    busy_s = float(np.diff(times_s)[np.diff(counters["output"]) > 0].sum())
    return Totals(
        output_tokens=grown["output"],
        busy_s=busy_s,
        ttft_sum_s=grown["ttft_sum"],
        itl_sum_s=grown["itl_sum"],
        queue_sum_s=grown["queue_sum"],
        finished=grown["finished"],
        queries=grown["queries"],
        hits=grown["hits"],
        preemptions=grown["preemptions"],
        steps=grown["steps"],
        ttft_counts=buckets["ttft"][-1] - buckets["ttft"][0],
        itl_counts=buckets["itl"][-1] - buckets["itl"][0],
    )


def percentile(counts: Numbers, bounds: tuple[float, ...], level: float) -> float:
    """From counts by bucket [bounds + 1]; the last bound where it lies above all, NaN where nothing was counted."""
    total = counts.sum()
    if total <= 0:
        return math.nan
    cumulative = np.cumsum(counts)
    place = int(np.searchsorted(cumulative, level * total))
    if place >= len(bounds):
        return bounds[-1]
    low, before = (bounds[place - 1], cumulative[place - 1]) if place else (0.0, 0.0)
    return float(low + (bounds[place] - low) * (level * total - before) / counts[place])


def read(folder: Path) -> tuple[LoadRun, ...]:
    """The loads of a capture, in order. Needs promtool.

    Raises OSError or ValueError where the folder is no capture, subprocess.CalledProcessError where promtool fails.
    """
    names = (*COUNTERS.values(), *GAUGES.values(), *(name for name, _ in HISTOGRAMS.values()))
    found = _by_pod(folder / "tsdb_snapshot", names)
    runs = []
    for span in _spans(folder):
        for pod in span.pods:
            if pod not in found:
                raise ValueError(f"{folder}: the capture has no engine {pod}")
            run = _run(span, pod, found[pod])
            if run is not None:
                runs.append(run)
    return tuple(runs)


def _spans(folder: Path) -> tuple[_Span, ...]:
    """The loads as the generator ran them; the ramp is five runs with the start of a process before each."""
    lines = (folder / "phases.jsonl").read_text(encoding="utf-8").splitlines()
    at = {str(one["phase"]): float(one["t"]) for one in map(json.loads, lines)}
    results = map(json.loads, (folder / "load_results.jsonl").read_text(encoding="utf-8").splitlines())
    lasted = {str(one["label"]): float(one["seconds"]) for one in results if "label" in one}
    both, first = ("vllm-0", "vllm-1"), ("vllm-0",)
    ramp = [name for name in lasted if name.startswith("ramp_")]
    spare_s = (at["burst"] - at["ramp"] - sum(lasted[name] for name in ramp)) / len(ramp)
    spans, start_s = [], at["ramp"]
    for name in ramp:
        end_s = start_s + spare_s + lasted[name]
        spans.append(_Span(name.replace("_", " "), Part.FITTED, both, start_s, end_s))
        start_s = end_s
    return (
        *spans,
        _Span("burst", Part.FITTED, both, at["burst"], at["cooldown"] + 5, opens_at_once=True),
        _Span("KV full", Part.PREDICTED, first, at["kv_pressure_server0_only"], at["steady"], opens_at_once=True),
        _Span("steady", Part.PREDICTED, both, at["steady"], at["steady_with_kill"]),
        _Span("survivor", Part.PREDICTED, first, at["steady_with_kill"], at["server1_healthy_again"]),
        _Span("victim", Part.PREDICTED, ("vllm-1",), at["steady_with_kill"], at["kill9_server1_api"] - 1),
        _Span("restarted", Part.PREDICTED, both, at["server1_healthy_again"], at["engine_hang_server0"]),
    )


@dataclass(frozen=True, slots=True)
class _Readings:
    times_s: Numbers
    values: dict[str, Numbers]
    buckets: dict[str, Numbers]


def _by_pod(tsdb: Path, names: tuple[str, ...]) -> dict[str, _Readings]:
    """What each engine showed at each scrape; a name that several series have is their sum."""
    single: dict[str, dict[str, dict[int, float]]] = {}
    histogram: dict[str, dict[str, dict[float, dict[int, float]]]] = {}
    for one in series_of(dump(tsdb, names)):
        labels = dict(one.labels)
        pod, name = labels["pod"], labels["__name__"]
        if "le" in labels:
            into = histogram.setdefault(pod, {}).setdefault(name, {}).setdefault(float(labels["le"]), {})
        else:
            into = single.setdefault(pod, {}).setdefault(name, {})
        for time_ms, value in zip(one.times_ms, one.values, strict=True):
            if value is not None:
                into[time_ms] = into.get(time_ms, 0.0) + value
    return {pod: _readings(pod, single[pod], histogram.get(pod, {})) for pod in sorted(single)}


def _readings(
    pod: str, single: dict[str, dict[int, float]], histogram: dict[str, dict[float, dict[int, float]]]
) -> _Readings:
    times = sorted(single[GAUGES["running"]])
    values = {
        short: np.array([single[name].get(time, np.nan) for time in times])
        for short, name in {**COUNTERS, **GAUGES}.items()
    }
    buckets = {}
    for short, (name, bounds) in HISTOGRAMS.items():
        found = sorted(histogram[name])
        if tuple(found[:-1]) != bounds:
            raise ValueError(f"{pod}: the buckets of {name} are not those of the plant, so they can't be compared")
        cumulative = np.array([[histogram[name][bound].get(time, np.nan) for bound in found] for time in times])
        buckets[short] = np.diff(cumulative, axis=1, prepend=0.0)
    return _Readings(np.array(times) / 1000.0, values, buckets)


def _run(span: _Span, pod: str, seen: _Readings) -> LoadRun | None:
    """One engine's part of a span; None where it answered nothing."""
    first = max(int(np.searchsorted(seen.times_s, span.start_s, side="right")) - 1, 0)
    last = int(np.searchsorted(seen.times_s, span.end_s, side="right"))
    # Two loads may follow each other at once: calls under way at the border belong to the first of them.
    cut = slice(first, last)
    times_s = seen.times_s[cut]
    counters = {name: seen.values[name][cut] for name in COUNTERS}
    measured = totals(times_s, counters, {name: rows[cut] for name, rows in seen.buckets.items()})
    if measured.calls == 0 or measured.finished == 0:
        return None
    present = counters["finished"] + seen.values["running"][cut] + seen.values["waiting"][cut]
    prompt = round(measured.queries / measured.calls)
    shared = SYSTEM_TOKENS if measured.hits > 0 else 0
    return LoadRun(
        name=span.name,
        part=span.part,
        pod=pod,
        times_s=times_s - times_s[0],
        arrivals=np.diff(np.maximum.accumulate(present)).round().astype(np.int64),
        opens_at_once=span.opens_at_once,
        system_tokens=shared,
        input_tokens=prompt - shared,
        output_tokens=_nominal(measured),
        measured=measured,
    )


def _nominal(measured: Totals) -> int:
    """Output tokens of a call: the generator asked for 48, 96 or 600 and ignored ends of text."""
    per_call = measured.output_tokens / measured.calls
    return min((48, 96, 600), key=lambda asked: abs(asked - per_call))
