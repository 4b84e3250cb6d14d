"""From two point forecasts to quantiles: how the errors of each were distributed lately, tracked online.

For a point f, an error r = y - f and a level q, a tracker keeps the size of errors s and the quantile z of r/s:

    s <- (1 - a)*s + a*|r|                        a = 1 - 0.5^(1/half-life); divided by its weight after n errors
    z <- z + eta*(1[r/s > z] - (1 - q))           eta falls with the first errors to its final value
    u = f + s*z

Five trackers per point: half-lives of 1000, 240, 40 and 12 bins, and one of 240 whose errors are relative to the load.
z starts where errors with the tails of a Laplace distribution have it. The points are the experts' combined median and
the last value; the ten candidates of each level are combined by their pinball loss (`weights`); to that combination u

    u + s*c                                       c <- c + 0.003*(1[y > u + s*c] - (1 - q)); s over 240 bins

is added, so that misses can't stay more frequent than 1 - q for long whatever the data do; not to the median.

Worked: s = 2, z = 1.6, eta = .05, level .9, f = 10: u = 13.2. y = 15: r/s = 2.5 > 1.6, so z = 1.6 + .05*.9 = 1.645.

Source: Gibbs and Candes (2021), adaptive conformal inference; Angelopoulos, Candes and Tibshirani (2023), quantile
tracking. The half-lives and steps were chosen on public traces (`bench.forecast` says which, and on which it was not).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.forecast.memory import CANDIDATES, ERRORS, LEVELS, POINTS, Array, Mask
from models.forecast.weights import Statistics, regrets

LEVEL = np.asarray(LEVELS)
HALF_LIFE_BINS = np.tile((1000.0, 240.0, 40.0, 12.0, 240.0), POINTS)
STEP = np.tile((0.01, 0.02, 0.05, 0.05, 0.02), POINTS)
RELATIVE = np.tile((False, False, False, False, True), POINTS)
FIRST_STEP = 0.4
START = np.asarray((0.0, 1.6, 2.4))
"""Quantiles of an error over its mean size: Laplace has 0, 1.61 and 2.30."""
LOAD_FLOOR = 0.02
RELATIVE_MAX = 5.0
"""The first calls after a silence are infinitely many times the load before them: that says nothing of what follows."""
DISCOUNT = 0.995
COVERAGE_STEP = np.where(LEVEL > 0.5, 0.003, 0.0)
SPREAD_SHARE = 1 - 0.5 ** (1 / 240)
_SHARE = 1 - 0.5 ** (1 / HALF_LIFE_BINS)
_PRIOR = np.full((CANDIDATES, 1), 1 / CANDIDATES)


@dataclass(frozen=True, slots=True)
class Said:
    """What was said h bins ago: points, candidates, their combination and the result, each series x horizons x ..."""

    points: Array
    candidates: Array
    combined: Array
    result: Array


def prepare(fields: dict[str, Array]) -> None:
    """Sets what does not start at zero: the quantiles of errors."""
    fields["quantile"][:] = START


def learn(fields: dict[str, Array], said: Said, value: Array, known: Mask, spans: Array) -> None:
    """Judges by `value` (one per series) what was said h bins ago.

    known: series x horizons, where there is both; spans: the horizons in bins.
    """
    y = value[:, None, None]
    regret = regrets(y[..., None], said.combined[:, :, None, :], said.candidates, LEVEL)
    _statistics(fields).learn(regret, DISCOUNT, known[..., None, None])
    judged, scale, quantile = fields["judged"], fields["scale"], fields["quantile"]
    judged += known
    error = (y - np.repeat(said.points, ERRORS, axis=2)) / _load(fields, said.points)
    error = np.where(RELATIVE, np.minimum(error, RELATIVE_MAX), error)
    size = np.where(scale > 0, _sizes(scale, judged - known), np.abs(error))
    relative = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
    step = np.maximum(STEP, FIRST_STEP / (judged / spans + 2.0)[..., None])
    beyond = (relative[..., None] > quantile) - (1 - LEVEL)
    np.copyto(quantile, quantile + step[..., None] * beyond, where=known[..., None, None])
    np.copyto(scale, scale + _SHARE * (np.abs(error) - scale), where=known[..., None])
    spread, coverage = fields["spread"], fields["coverage"]
    away = np.abs(value[:, None] - said.combined[..., 0])
    np.copyto(spread, spread + SPREAD_SHARE * (away - spread), where=known)
    np.copyto(coverage, coverage + COVERAGE_STEP * ((y > said.result) - (1 - LEVEL)), where=known[..., None])


def say(fields: dict[str, Array], points: Array) -> Said:
    """Candidates, combination and result for the points of this bin (series x horizons x 2)."""
    judged = fields["judged"]
    size = _sizes(fields["scale"], judged) * _load(fields, points)
    candidates = np.repeat(points, ERRORS, axis=2)[..., None] + size[..., None] * fields["quantile"]
    combined = (_statistics(fields).weights() * candidates).sum(axis=2)
    spread = fields["spread"] / _weight(SPREAD_SHARE, judged)
    result = np.maximum(combined + spread[..., None] * fields["coverage"], 0.0)
    return Said(points, candidates, combined, np.maximum.accumulate(result, axis=2))


def _statistics(fields: dict[str, Array]) -> Statistics:
    return Statistics(fields["regret"], fields["variance"], fields["range"], _PRIOR, axis=2)


def _sizes(scale: Array, judged: Array) -> Array:
    """Mean absolute errors of the candidates, series x horizons x candidates; 0 before the first."""
    sizes: Array = scale / _weight(_SHARE, judged[..., None])
    return sizes


def _weight(share: Array | float, judged: Array) -> Array:
    """What a smoothed mean that started at 0 weighs after so many values.

    Not as a power: NumPy has two, which differ in the last digit, and takes one or the other by how an array lies in
    memory, so that a series' forecast would depend on how many others there are.
    """
    weight: Array = 1 - np.exp(np.log1p(-share) * np.maximum(judged, 1.0))
    return weight


def _load(fields: dict[str, Array], points: Array) -> Array:
    """What errors are divided by: 1, or the forecast load for trackers of relative errors."""
    floor = np.maximum(LOAD_FLOOR * fields["top"], 1e-300)[:, None, None]
    load = np.repeat(np.maximum(points, floor), ERRORS, axis=2)
    return np.where(RELATIVE, load, 1.0)
