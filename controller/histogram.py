"""Quantiles of classic histograms, as Prometheus' `histogram_quantile` defines them, over replicas of mixed layouts.

A histogram is a set of cumulative rates: for each upper bound `le` the observations per second at or below it. The
quantile is linear inside its bucket, the lowest bucket starts at 0, and a quantile that falls into the +Inf bucket is
the highest finite bound. Replicas are merged by adding cumulative rates, never by averaging quantiles; where their
bucket layouts differ (`--custom-histogram-buckets`), each layout is read at the other's bounds by the same linear
rule. Worked number: buckets (0.1: 0), (0.25: 8), (+Inf: 10) have the quantile 0.5 at 0.1 + 0.15*5/8 = 0.194.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan


@dataclass(frozen=True, slots=True)
class Histogram:
    """Ascending upper bounds (the last one is +Inf) and the cumulative rate at each, non-decreasing."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]

    @property
    def total(self) -> float:
        """Observations per second, all buckets together."""
        return self.cumulative[-1]


def histogram(buckets: Sequence[tuple[float, float]]) -> Histogram | None:
    """A histogram from (upper bound, cumulative rate) pairs in any order; None where it has no +Inf bucket.

    Pairs with a NaN or negative rate, or with a bound that is NaN or -Inf, are left out; duplicate bounds keep the
    larger rate; a rate below its predecessor's (scrapes of one histogram that tore) is raised to it, as Prometheus
    does.
    """
    best: dict[float, float] = {}
    for bound, cumulative in buckets:
        if not isnan(bound) and bound != -inf and isfinite(cumulative) and cumulative >= 0:
            best[bound] = max(cumulative, best.get(bound, 0.0))
    if inf not in best:
        return None
    bounds = tuple(sorted(best))
    rates: list[float] = []
    for bound in bounds:
        rates.append(max(best[bound], rates[-1] if rates else 0.0))
    return Histogram(bounds, tuple(rates))


def merge(parts: Sequence[Histogram]) -> Histogram | None:
    """The sum of histograms; None of none."""
    if not parts:
        return None
    if all(part.bounds == parts[0].bounds for part in parts):
        return Histogram(
            parts[0].bounds, tuple(sum(rates) for rates in zip(*(p.cumulative for p in parts), strict=True))
        )
    bounds = tuple(sorted({bound for part in parts for bound in part.bounds}))
    return Histogram(bounds, tuple(sum(_cumulative_at(part, bound) for part in parts) for bound in bounds))


def quantile(whole: Histogram, level: float) -> float | None:
    """The value below which the share `level` (0-1) of the observations lies; None without observations."""
    if whole.total <= 0 or len(whole.bounds) < 2:
        return None
    rank = level * whole.total
    index = min(bisect_left(whole.cumulative, rank), len(whole.bounds) - 1)
    if whole.bounds[index] == inf:
        return whole.bounds[index - 1]
    low = whole.bounds[index - 1] if index else min(0.0, whole.bounds[0])
    below = whole.cumulative[index - 1] if index else 0.0
    inside = whole.cumulative[index] - below
    share = (rank - below) / inside if inside > 0 else 1.0
    return low + (whole.bounds[index] - low) * share


def share_within(whole: Histogram, limit: float) -> float | None:
    """The share (0-1) of the observations at or below `limit`; None without observations."""
    return None if whole.total <= 0 else min(_cumulative_at(whole, limit) / whole.total, 1.0)


def _cumulative_at(part: Histogram, bound: float) -> float:
    index = bisect_left(part.bounds, bound)
    if part.bounds[index] == bound or part.bounds[index] == inf:
        # Inside the +Inf bucket nothing is known but that its observations are above the last finite bound.
        return part.cumulative[index] if part.bounds[index] == bound else part.cumulative[max(index - 1, 0)]
    low = part.bounds[index - 1] if index else min(0.0, part.bounds[0])
    below = part.cumulative[index - 1] if index else 0.0
    share = (bound - low) / (part.bounds[index] - low) if part.bounds[index] > low else 1.0
    return below + (part.cumulative[index] - below) * max(share, 0.0)
