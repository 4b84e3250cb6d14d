"""What the forecaster remembers: one row of numbers per series, laid out in named fields.

A row holds the experts' states, the weights' and trackers' statistics, and for every horizon of h bins a ring of the
last h forecasts, so that each can be judged when its bin arrives. The row of a bin width of 60 s and horizons of 2, 5
and 10 minutes has about 1,900 numbers (15 kB). Rows are kept as bytes: a memory is a value, equal to another one
exactly when all of its numbers are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Slots = NDArray[np.intp]

LEVELS = (0.5, 0.9, 0.95)
"""The quantiles that are forecast; the first one is the median."""

SMOOTHINGS = (0.5, 0.2, 0.1, 0.05, 0.005)
TRENDS = ((0.5, 0.1, 0.9), (0.3, 0.1, 0.95), (0.2, 0.05, 0.98), (0.1, 0.05, 0.98), (0.5, 0.3, 0.8), (0.05, 0.02, 0.995))
"""Smoothing constants of level and trend, and the damping per bin."""
DAY_S, SLOTS = 86_400.0, 144
FEATURES = 8
"""A regression sees the scale, the last three values and four smoothed levels."""
SHORT, LONG = 5, 8
"""Features of the quick regression and of the slow one."""
EXPERTS = 1 + len(SMOOTHINGS) + len(TRENDS) + 2 + 2
POINTS = 2
ERRORS = 5
CANDIDATES = POINTS * ERRORS


@dataclass(frozen=True, slots=True)
class Grid:
    """What is forecast: bins of `bin_s` seconds, at horizons of so many bins, ascending."""

    bin_s: float
    horizons: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless bin_s is positive and the horizons ascend from 1 or more."""
        ascending = all(one < other for one, other in zip(self.horizons, self.horizons[1:], strict=False))
        if not (0 < self.bin_s < math.inf and self.horizons and self.horizons[0] >= 1 and ascending):
            raise ValueError(f"a grid needs a bin width above 0 and ascending horizons, not {self}")


@dataclass(frozen=True, slots=True)
class Memory:
    """All that was learnt of the named series up to bin `ticks`, which ended at `at_s` (Unix seconds).

    rows: float64 numbers, series x width of the grid's layout.
    """

    grid: Grid
    names: tuple[str, ...]
    ticks: int = 0
    at_s: float | None = None
    rows: bytes = field(default=b"", repr=False)

    def whole(self) -> bool:
        """Whether there is a full row for every series."""
        return len(self.rows) == 8 * len(self.names) * layout(self.grid).width

    def array(self) -> Array:
        """The rows as a read-only array, series x width."""
        return np.frombuffer(self.rows, np.float64).reshape(len(self.names), layout(self.grid).width)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Forecasts in the series' own unit.

    values: series x horizons x levels, never below 0, ascending over the levels, NaN where nothing was observed yet;
    judged: series x horizons, how many forecasts of that horizon have met their bin (0: no spread is known yet);
    newest: per series the newest load that was observed.
    """

    values: Array
    judged: Array
    newest: Array


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each field of a row starts, and its shape."""

    fields: dict[str, tuple[int, tuple[int, ...]]]
    width: int

    def views(self, rows: Array) -> dict[str, Array]:
        """The fields of all rows as views into them, series x shape."""
        return {
            name: rows[:, start : start + math.prod(shape)].reshape(len(rows), *shape)
            for name, (start, shape) in self.fields.items()
        }


@cache
def layout(grid: Grid) -> Layout:
    """The layout of a grid's rows."""
    horizons, ring, levels = len(grid.horizons), sum(grid.horizons), len(LEVELS)
    shapes: dict[str, tuple[int, ...]] = {
        # experts
        "seen": (),
        "last": (3,),
        "top": (),
        "smooth": (len(SMOOTHINGS),),
        "level": (len(TRENDS),),
        "trend": (len(TRENDS),),
        "profile": (SLOTS,),
        "slot": (3,),
        "short_coefficients": (horizons, SHORT),
        "short_covariance": (horizons, SHORT, SHORT),
        "long_coefficients": (horizons, LONG),
        "long_covariance": (horizons, LONG, LONG),
        "regression_error": (2, horizons),
        # weights of the experts
        "expert_regret": (horizons, EXPERTS),
        "expert_variance": (horizons, EXPERTS),
        "expert_range": (horizons, EXPERTS),
        # trackers of errors, and their weights
        "judged": (horizons,),
        "scale": (horizons, CANDIDATES),
        "quantile": (horizons, CANDIDATES, levels),
        "regret": (horizons, CANDIDATES, levels),
        "variance": (horizons, CANDIDATES, levels),
        "range": (horizons, CANDIDATES, levels),
        "coverage": (horizons, levels),
        "spread": (horizons,),
        # rings: what was said h bins ago
        "said_known": (ring,),
        "said_features": (ring, FEATURES + 1),
        "said_experts": (ring, EXPERTS),
        "said_points": (ring, POINTS),
        "said_candidates": (ring, CANDIDATES, levels),
        "said_combined": (ring, levels),
        "said_result": (ring, levels),
    }
    fields, start = {}, 0
    for name, shape in shapes.items():
        fields[name] = (start, shape)
        start += math.prod(shape)
    return Layout(fields, start)


def ring_slots(grid: Grid, tick: int) -> Slots:
    """The slot of each horizon's ring that was written at bin `tick - h` and is to be written at bin `tick`."""
    starts = np.cumsum((0, *grid.horizons[:-1]))
    return np.asarray([start + tick % h for start, h in zip(starts, grid.horizons, strict=True)], np.intp)
