"""How good quantile forecasts were: pinball loss, coverage, bias, regret.

    pinball     l(y, u) = max(q*(y - u), (q - 1)*(y - u))     unit of y; smallest at the true quantile of level q
    ratio       mean loss / mean loss of a baseline           without unit; below 1: better than the baseline
    coverage    share of values at or below their forecast    should be q
    bias        mean of forecast - value                      unit of y
    regret      mean loss - mean loss of the best of several  unit of y

Values or forecasts that are not finite are left out, everywhere at once, so that all are judged on the same bins.

Worked: level .9, y = 10: u = 12 costs .1*2 = 0.2, u = 8 costs .9*2 = 1.8.

Source: Koenker and Bassett, Regression Quantiles, Econometrica 46 (1978); Gneiting and Raftery (2007).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pinball(value: Array, forecast: Array, level: float) -> Array:
    """Loss of each forecast, in the unit of the values; arrays of equal shape, level in (0, 1)."""
    over = value - forecast
    return np.maximum(level * over, (level - 1) * over)


def mean_pinball(value: Array, forecast: Array, level: float) -> float:
    """Mean loss over the bins where both are finite; NaN where there are none."""
    judged = np.isfinite(value) & np.isfinite(forecast)
    return float(pinball(value[judged], forecast[judged], level).mean()) if judged.any() else math.nan


def ratio(value: Array, forecast: Array, baseline: Array, level: float) -> float:
    """Mean loss over the baseline's on the bins where all are finite; NaN where there are none or it lost nothing."""
    judged = np.isfinite(value) & np.isfinite(forecast) & np.isfinite(baseline)
    if not judged.any():
        return math.nan
    lost = pinball(value[judged], baseline[judged], level).mean()
    return float(pinball(value[judged], forecast[judged], level).mean() / lost) if lost > 0 else math.nan


def coverage(value: Array, forecast: Array) -> float:
    """Share of values at or below their forecast; NaN without any."""
    judged = np.isfinite(value) & np.isfinite(forecast)
    return float((value[judged] <= forecast[judged]).mean()) if judged.any() else math.nan


def lowest_coverage(value: Array, forecast: Array, bins: int) -> float:
    """The lowest coverage of any `bins` judged bins in a row; NaN where there are fewer."""
    judged = np.isfinite(value) & np.isfinite(forecast)
    covered = np.concatenate(([0], np.cumsum(value[judged] <= forecast[judged])))
    return float((covered[bins:] - covered[:-bins]).min() / bins) if len(covered) > bins else math.nan


def bias(value: Array, forecast: Array) -> float:
    """Mean of forecast - value, in the unit of the values; NaN without any."""
    judged = np.isfinite(value) & np.isfinite(forecast)
    return float((forecast[judged] - value[judged]).mean()) if judged.any() else math.nan


def regret(value: Array, forecast: Array, others: Array, level: float) -> float:
    """Mean loss above that of the best of the others (others x bins), on the bins where all are finite."""
    judged = np.isfinite(value) & np.isfinite(forecast) & np.isfinite(others).all(axis=0)
    if not judged.any():
        return math.nan
    best = min(float(pinball(value[judged], other[judged], level).mean()) for other in others)
    return float(pinball(value[judged], forecast[judged], level).mean()) - best


def geometric_mean(ratios: Array) -> float:
    """Mean of ratios that treats 1/2 and 2 alike; NaNs are left out; NaN where there is nothing above 0."""
    positive = ratios[np.isfinite(ratios) & (ratios > 0)]
    return float(np.exp(np.log(positive).mean())) if positive.size else math.nan
