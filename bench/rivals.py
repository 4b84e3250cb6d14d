"""Forecasters to compare with: each says quantiles for all horizons from the loads up to an origin.

Those of statsmodels, statsforecast and Prophet are refitted at every origin on the newest `CONTEXT` bins, as a user
would call them: additive damped trend (ETS), ARIMA(1,1,1), AutoETS, AutoARIMA, Prophet with its defaults. Their
quantiles are their own prediction intervals. The two persistences have rolling quantiles of their own errors.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import norm

Array = NDArray[np.float64]

LEVELS = (0.5, 0.9, 0.95)
Z = norm.ppf(LEVELS)
CONTEXT = 240
WINDOW = 240
ERRORS_MIN = 8
DAY_S = 86_400


def with_rolling_errors(load: Array, point: Array, bins: int) -> Array:
    """Point forecasts plus rolling quantiles of their last `WINDOW` errors: origins x levels.

    point[t] is for bin t + bins. NaN before the first `ERRORS_MIN` errors.
    """
    error = pd.Series(np.full(len(load), np.nan))
    if bins < len(load):
        error.iloc[bins:] = load[bins:] - point[:-bins]
    rolling = error.rolling(WINDOW, min_periods=ERRORS_MIN)
    return np.stack([point + rolling.quantile(level).to_numpy() for level in LEVELS], axis=1)


def last_value(load: Array, bins: int, bin_s: int) -> Array:
    """The yardstick: last value plus rolling quantiles of its errors."""
    del bin_s
    return with_rolling_errors(load, load, bins)


def last_value_bare(load: Array, bins: int, bin_s: int) -> Array:
    """Last value for every level."""
    del bins, bin_s
    return np.repeat(load[:, None], len(LEVELS), axis=1)


def seasonal_naive(load: Array, bins: int, bin_s: int) -> Array:
    """The load a day before the target, plus rolling quantiles of its errors; last value on the first day."""
    day = DAY_S // bin_s
    point = load.copy()
    for_target = np.arange(len(load)) + bins - day
    known = for_target >= 0
    point[known] = load[for_target[known]]
    return with_rolling_errors(load, point, bins)


EVERY_BIN: dict[str, Callable[[Array, int, int], Array]] = {
    "last value, no quantiles": last_value_bare,
    "seasonal naive (day)": seasonal_naive,
}


def _ets(load: Array, bins: int) -> tuple[Array, Array]:
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel  # noqa: PLC0415 - a second to import

    fitted = ETSModel(pd.Series(load), trend="add", damped_trend=True).fit(disp=0)
    said = fitted.get_prediction(start=len(load), end=len(load) + bins - 1)
    return np.asarray(said.predicted_mean), np.sqrt(np.asarray(said.forecast_variance))


def _sarimax(load: Array, bins: int) -> tuple[Array, Array]:
    from statsmodels.tsa.statespace.sarimax import SARIMAX  # noqa: PLC0415 - a second to import

    said = SARIMAX(load, order=(1, 1, 1)).fit(disp=0, maxiter=50).get_forecast(bins)
    return said.predicted_mean, said.se_mean


def _statsforecast(model: str) -> Callable[[Array, int], tuple[Array, Array]]:
    def forecast(load: Array, bins: int) -> tuple[Array, Array]:
        from statsforecast import models  # noqa: PLC0415 - optional: the bench extra

        said = getattr(models, model)(season_length=1).forecast(load, bins, level=[80])
        return said["mean"], (said["hi-80"] - said["mean"]) / norm.ppf(0.9)

    return forecast


def _prophet(load: Array, bins: int) -> tuple[Array, Array]:
    from prophet import Prophet  # noqa: PLC0415 - optional: the bench extra

    # Only distances in time matter to its defaults on so short a stretch; minutes stand for bins.
    at = pd.date_range("2026-01-01", periods=len(load) + bins, freq="min")
    fitted = Prophet(interval_width=0.8, uncertainty_samples=200).fit(pd.DataFrame({"ds": at[: len(load)], "y": load}))
    said = fitted.predict(pd.DataFrame({"ds": at[len(load) :]}))
    mean = said["yhat"].to_numpy()
    return mean, (said["yhat_upper"].to_numpy() - mean) / norm.ppf(0.9)


REFITTED: dict[str, tuple[str, Callable[[Array, int], tuple[Array, Array]]]] = {
    "statsmodels ETS, damped": ("statsmodels", _ets),
    "statsmodels SARIMAX(1,1,1)": ("statsmodels", _sarimax),
    "statsforecast AutoETS": ("statsforecast", _statsforecast("AutoETS")),
    "statsforecast AutoARIMA": ("statsforecast", _statsforecast("AutoARIMA")),
    "Prophet": ("prophet", _prophet),
}


def installed() -> tuple[str, ...]:
    """The refitted forecasters whose packages are here."""
    return tuple(name for name, (package, _) in REFITTED.items() if importlib.util.find_spec(package))


def refitted(name: str, load: Array, bins: int) -> Array:
    """Quantiles for the next `bins` bins, bins x levels, from the newest loads; last value where the fit fails."""
    newest = load[-CONTEXT:]
    scale = newest.mean() or 1.0
    logging.getLogger("cmdstanpy").disabled = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mean, spread = REFITTED[name][1](newest / scale, bins)
        except (ValueError, np.linalg.LinAlgError, RuntimeError, ZeroDivisionError, IndexError):
            mean, spread = np.full(bins, newest[-1] / scale), np.zeros(bins)
    said = (np.asarray(mean)[:, None] + np.nan_to_num(np.asarray(spread))[:, None] * Z) * scale
    return np.maximum(said, 0.0)
