"""Offered demand: a bounded history of it, and what it will be when a start ordered now serves.

First stage: persistence. The forecast for any horizon is the newest bin, whose value is already a mean over the
observation window (about 60 s):

    yhat(t + horizon) = y(t)                       calls/s, one quantile, level 0.5

It claims no spread, because it has measured none. Persistence is the yardstick every forecaster has to beat, and at
leads of minutes few do: on a simulated day with a lead of 150 s, quantile forecasts saved nothing measurable over the
load of the last 60 s, because theta and the rounding up already pay for the error.

Demand that was not observed is no bin: unknown is not zero. A newest bin older than FRESH_S says nothing of now.

Worked: bins of 40 calls/s at 100 s and 46 calls/s at 115 s; at 118 s the forecast for any lead is 46 calls/s; at
240 s it is unknown, since the newest bin is 125 s old.

Source: Hyndman and Athanasopoulos, Forecasting: Principles and Practice (2021), section 5.2, naive method.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from models.types import Bin, Forecast, Quantile, Unknown

FRESH_S = 120.0
"""The newest bin may be this old before it says nothing of the present."""

RESET_S = 3600.0
"""A clock set back by more than this was wrong before: the history it wrote is dropped, or it would block for long."""


def update(history: tuple[Bin, ...], at_s: float, calls_per_s: float | None, keep_s: float) -> tuple[Bin, ...]:
    """The history with one more bin, ending at `at_s`, and without bins older than `keep_s` before it.

    history ascends in time. None, NaN, infinite or negative loads are unknown, and leave the history as it is; so
    does a time that repeats or goes back (by up to an hour; then the history starts anew).
    """
    if calls_per_s is None or not (math.isfinite(calls_per_s) and calls_per_s >= 0 and math.isfinite(at_s)):
        return history
    if history and not history[-1].at_s < at_s:
        if history[-1].at_s - at_s <= RESET_S:
            return history
        history = ()
    first = bisect_left(history, at_s - keep_s, key=lambda past: past.at_s)
    return (*history[first:], Bin(at_s, calls_per_s))


def forecast(history: tuple[Bin, ...], now_s: float, horizon_s: float) -> Forecast | Unknown:
    """Offered calls/s at `now_s + horizon_s`, from the newest bin that is not in the future."""
    if not (math.isfinite(now_s) and math.isfinite(horizon_s) and horizon_s >= 0):
        return Unknown("the time or the horizon is not a finite number")
    newest = next((past for past in reversed(history) if past.at_s <= now_s), None)
    if newest is None:
        return Unknown("no load was observed yet")
    age_s = now_s - newest.at_s
    if not age_s <= FRESH_S:
        return Unknown(f"the newest observed load is {age_s:.0f} s old, more than {FRESH_S:.0f} s")
    if not (math.isfinite(newest.calls_per_s) and newest.calls_per_s >= 0):
        return Unknown("the newest observed load is not a number of calls")
    return Forecast(horizon_s, (Quantile(0.5, newest.calls_per_s),))
