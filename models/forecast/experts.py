"""Simple forecasts of a load, one state per series, for all series and horizons at once.

    last value        y(t)
    smoothed level    m <- m + a*(y - m), divided by 1 - (1 - a)^n, its weight after n bins
    damped trend      l' = a*y + (1 - a)*(l + phi*b);  b' = beta*(l' - l) + (1 - beta)*phi*b
                      forecast l + b*(phi + phi^2 + ... + phi^h)
    daily profile     a smoothed level times p(t + h)/p(t), p the mean load of each 10 minutes of the day, halfway to
                      the newest day's; within 1/3 and 3; the level alone until both are known
    regression        y(t + h) on [scale, y(t), smoothed levels, y(t-1), y(t-2)], all over the scale of bin t, by
                      recursive least squares with forgetting; bounded to between 0.4 times the lowest and 2.5 times
                      the highest of what it sees. Errors beyond three times their mean size count as three (Huber).

Worked: levels start at the first value, so after y = 10, 12 the level of a = .5 is (10*.25 + 12*.5)/.75 = 11.33.

Sources: Hyndman and Athanasopoulos, Forecasting: Principles and Practice (2021), chapters 5 and 8; Ljung and
Soderstrom, Theory and Practice of Recursive Identification (1983), for the recursion; Huber (1964).
"""

from __future__ import annotations

import numpy as np

from models.forecast.memory import DAY_S, LONG, SHORT, SLOTS, SMOOTHINGS, TRENDS, Array, Grid, Mask

_A = np.asarray(SMOOTHINGS)
_LOG_KEPT = np.log1p(-_A)
_ALPHA, _BETA, _PHI = np.asarray(TRENDS).T
PROFILE_LEVELS = (1, 0)
"""The smoothed levels that are moved along the daily profile: a = .2 and a = .5."""
PROFILE_LIMIT = 3.0
PROFILE_SHARE = 0.5
SCALE_FLOOR = 0.02
"""A scale is at least this share of the highest recent load: a silent hour is no reason to divide by nothing."""
TOP_MEMORY = 0.9995
FORGETTING = {SHORT: 0.998, LONG: 0.9995}
RIDGE = {SHORT: 5.0, LONG: 20.0}
TRACE_MAX = 100.0
HUBER = 3.0
LOW, HIGH = 0.4, 2.5


def prepare(fields: dict[str, Array]) -> None:
    """Sets what does not start at zero: coefficients at the mean of two smoothed levels, covariances at 1/ridge."""
    fields["profile"][:] = np.nan
    for name, size in (("short", SHORT), ("long", LONG)):
        fields[f"{name}_coefficients"][:] = 0.0
        fields[f"{name}_coefficients"][..., 2:4] = 0.5
        fields[f"{name}_covariance"][:] = np.eye(size) / RIDGE[size]


def learn(fields: dict[str, Array], value: Array, known: Mask) -> None:
    """Takes in one bin: value and known per series."""
    seen, last = fields["seen"], fields["last"]
    first = known & (seen == 0)
    y = value[:, None]
    for name in ("level", "last"):
        np.copyto(fields[name], y, where=first[:, None])
    np.copyto(last, np.concatenate([y, last[:, :2]], axis=1), where=(known & ~first)[:, None])
    np.copyto(fields["top"], np.maximum(TOP_MEMORY * fields["top"], value), where=known)
    smooth, level, trend = fields["smooth"], fields["level"], fields["trend"]
    np.copyto(smooth, smooth + _A * (y - smooth), where=known[:, None])
    later = (known & ~first)[:, None]
    moved = _ALPHA * y + (1 - _ALPHA) * (level + _PHI * trend)
    np.copyto(trend, _BETA * (moved - level) + (1 - _BETA) * _PHI * trend, where=later)
    np.copyto(level, moved, where=later)
    seen += known


def regress(fields: dict[str, Array], said: Array, value: Array, judged: Mask) -> None:
    """Teaches the regressions what followed the features `said` h bins ago (series x horizons), where `judged`."""
    scale = said[..., -1]
    valid = judged & (scale > 0)
    unit = np.where(valid, scale, 1.0)
    target = np.where(valid, value[:, None] / unit, 0.0)
    for number, (name, size) in enumerate((("short", SHORT), ("long", LONG))):
        x = np.where(valid[..., None], said[..., :size] / unit[..., None], 0.0)
        coefficients, covariance = fields[f"{name}_coefficients"], fields[f"{name}_covariance"]
        error = target - (x * coefficients).sum(axis=2)
        size_of_error = fields["regression_error"][:, number]
        np.copyto(size_of_error, _mean_size(size_of_error, error), where=valid)
        weight = np.minimum(1.0, HUBER * size_of_error / (np.abs(error) + 1e-12))
        gain = (covariance @ x[..., None])[..., 0]
        forgetting = FORGETTING[size]
        divisor = forgetting + weight * (x * gain).sum(axis=2)
        step = gain * (weight / divisor)[..., None]
        np.copyto(coefficients, coefficients + step * error[..., None], where=valid[..., None])
        narrowed = (covariance - step[..., :, None] * gain[..., None, :]) / forgetting
        trace = np.trace(narrowed, axis1=2, axis2=3)
        # Without new information forgetting alone would let the covariance grow for ever.
        narrowed *= (np.minimum(1.0, TRACE_MAX * size / np.maximum(trace, 1e-12)))[..., None, None]
        np.copyto(covariance, narrowed, where=valid[..., None, None])


def learn_profile(fields: dict[str, Array], value: Array, known: Mask, at_s: float, bin_s: float) -> None:
    """Adds the bin that ended at `at_s` to the mean of its 10 minutes; a bin of the next ones closes those before."""
    total, count, open_ = fields["slot"].T
    slot = int(((at_s - bin_s / 2) % DAY_S) / DAY_S * SLOTS) % SLOTS
    closed = np.flatnonzero((open_ != slot) & (count > 0))
    if closed.size:
        place = closed, open_[closed].astype(np.intp)
        mean, profile = total[closed] / count[closed], fields["profile"][place]
        fields["profile"][place] = np.where(np.isnan(profile), mean, profile + PROFILE_SHARE * (mean - profile))
        total[closed], count[closed] = 0.0, 0.0
    open_[:] = slot
    total += np.where(known, value, 0.0)
    count += known


def features(fields: dict[str, Array]) -> Array:
    """What a regression sees, series x (FEATURES + 1), in units of the load; the last column is the scale."""
    levels, last = _levels(fields), fields["last"]
    scale = np.maximum(levels[:, 4], SCALE_FLOOR * fields["top"])
    # The levels of a = .5, .2, .05 come first: the quick regression sees no more than these.
    columns = (scale, last[:, 0], levels[:, 0], levels[:, 1], levels[:, 3], last[:, 1], last[:, 2], levels[:, 2], scale)
    return np.stack(columns, axis=1)


def forecasts(fields: dict[str, Array], grid: Grid, at_s: float, seen_features: Array) -> Array:
    """Forecasts of every expert, series x horizons x experts, in the order of the module's docstring."""
    series, horizons = len(seen_features), len(grid.horizons)
    levels, last = _levels(fields), fields["last"][:, :1]
    spans = np.asarray(grid.horizons, np.float64)
    damped = _PHI * (1 - _PHI ** spans[:, None]) / (1 - _PHI)
    trends = fields["level"][:, None, :] + fields["trend"][:, None, :] * damped
    ratio = _profile_ratios(fields, at_s, spans * grid.bin_s, grid.bin_s)
    profiles = np.stack([levels[:, None, k] * ratio for k in PROFILE_LEVELS], axis=2)
    seen = seen_features[:, None, :]
    lowest = seen_features[:, 1:-1].min(axis=1)[:, None] * LOW
    highest = seen_features[:, 1:-1].max(axis=1)[:, None] * HIGH
    regressions = np.stack(
        [
            np.clip((seen[..., :size] * fields[f"{name}_coefficients"]).sum(axis=2), lowest, highest)
            for name, size in (("short", SHORT), ("long", LONG))
        ],
        axis=2,
    )
    level_part = np.broadcast_to(np.concatenate([last, levels], axis=1)[:, None, :], (series, horizons, 1 + len(_A)))
    return np.concatenate([level_part, trends, profiles, regressions], axis=2)


def _levels(fields: dict[str, Array]) -> Array:
    """Smoothed levels, divided by their weight."""
    weight = 1 - np.exp(_LOG_KEPT * np.maximum(fields["seen"], 1.0)[:, None])  # no power: see errors
    levels: Array = fields["smooth"] / weight
    return levels


def _profile_ratios(fields: dict[str, Array], at_s: float, spans_s: Array, bin_s: float) -> Array:
    """p(t + h)/p(t), series x horizons; 1 where unknown."""
    now, later = _profile(fields, at_s - bin_s / 2), [_profile(fields, at_s - bin_s / 2 + s) for s in spans_s]
    ahead = np.stack(later, axis=1)
    known = np.isfinite(ahead) & (now > 0)[:, None]
    ratio = np.where(known, ahead, 1.0) / np.where(now > 0, now, 1.0)[:, None]
    return np.where(known, np.clip(ratio, 1 / PROFILE_LIMIT, PROFILE_LIMIT), 1.0)


def _profile(fields: dict[str, Array], at_s: float) -> Array:
    """The profile at a time, linear between the middles of its slots."""
    place = (at_s % DAY_S) / DAY_S * SLOTS - 0.5
    low = int(np.floor(place))
    share = place - low
    profile = fields["profile"]
    value: Array = profile[:, low % SLOTS] * (1 - share) + profile[:, (low + 1) % SLOTS] * share
    return value


def _mean_size(size: Array, error: Array) -> Array:
    """Smoothed absolute error; starts at the first one."""
    return np.where(size > 0, 0.99 * size + 0.01 * np.abs(error), np.abs(error))
