"""Measured against predicted, load by load, and what is left of it in a few numbers.

    error of a load     |predicted / measured - 1| of its mean ITL, mean TTFT, or tokens per busy second
    error of a part     mean of those, weighted with the loads' tokens (ITL, throughput) or calls (TTFT)
    hit ratio           mean of |predicted - measured|, weighted with the loads' prompt tokens
    preemptions         |predicted / measured - 1| of their sums; none of both is no error
    twins               what the two engines, identical and under the same load, differ by from their common mean: an
                        error that no model of one engine can be below, because it would need to tell them apart

A busy second is one in which tokens came. Percentiles are read from the histograms of both, between the bounds of
vLLM's buckets, linearly: ITL below 10 ms is one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.capture import LoadRun, Totals, percentile
from bench.calibration.fit import mean_itl_s, mean_ttft_s, median_ttft_s
from models.fleetsim.world import ITL_BOUNDS, TTFT_BOUNDS


@dataclass(frozen=True, slots=True)
class Compared:
    """One engine under one load, and the plant in its place."""

    run: LoadRun
    predicted: Totals


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one part, as fractions; None where there is nothing to compare."""

    itl: float
    itl_p95: float
    ttft: float
    ttft_median: float
    ttft_p95: float
    throughput: float
    hit_ratio: float
    preemptions: float | None
    twin_itl: float | None
    twin_ttft: float | None


def itl_p95_s(done: Totals) -> float:
    """95th percentile of the time between tokens."""
    return percentile(done.itl_counts, ITL_BOUNDS, 0.95)


def ttft_p95_s(done: Totals) -> float:
    """95th percentile of the time to the first token."""
    return percentile(done.ttft_counts, TTFT_BOUNDS, 0.95)


def tokens_per_s(done: Totals) -> float:
    """Output tokens per busy second."""
    return done.output_tokens / done.busy_s


def errors(compared: Sequence[Compared]) -> Errors:
    """What is left. Raises ValueError where nothing was compared."""
    if not compared:
        raise ValueError("there is no load to compare")

    def left(figure: Callable[[Totals], float], weight: Callable[[Totals], float]) -> float:
        parts = [abs(figure(one.predicted) / figure(one.run.measured) - 1) for one in compared]
        return float(np.average(parts, weights=[weight(one.run.measured) for one in compared]))

    def summed(figure: Callable[[Totals], float]) -> tuple[float, float]:
        return sum(figure(one.predicted) for one in compared), sum(figure(one.run.measured) for one in compared)

    tokens, calls = (lambda done: done.output_tokens), (lambda done: done.calls)
    hits = [
        abs(one.predicted.hits / one.predicted.queries - one.run.measured.hits / one.run.measured.queries)
        for one in compared
    ]
    preempted, really = summed(lambda done: done.preemptions)
    return Errors(
        itl=left(mean_itl_s, tokens),
        itl_p95=left(itl_p95_s, tokens),
        ttft=left(mean_ttft_s, calls),
        ttft_median=left(median_ttft_s, calls),
        ttft_p95=left(ttft_p95_s, calls),
        throughput=left(tokens_per_s, tokens),
        hit_ratio=float(np.average(hits, weights=[one.run.measured.queries for one in compared])),
        preemptions=abs(preempted / really - 1) if really > 0 else 0.0 if preempted == 0 else None,
        twin_itl=twins(compared, mean_itl_s),
        twin_ttft=twins(compared, mean_ttft_s),
    )


def twins(compared: Sequence[Compared], figure: Callable[[Totals], float]) -> float | None:
    """Mean distance of the engines of a load from their common mean, by tokens; None without two engines."""
    by_load: dict[str, list[Totals]] = {}
    for one in compared:
        by_load.setdefault(one.run.name, []).append(one.run.measured)
    distances, weights = [], []
    for engines in by_load.values():
        if len(engines) > 1:
            middle = sum(figure(one) for one in engines) / len(engines)
            distances += [abs(figure(one) / middle - 1) for one in engines]
            weights += [one.output_tokens for one in engines]
    return float(np.average(distances, weights=weights)) if distances else None
