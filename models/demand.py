"""Offered demand: which loads are followed, and what they will be when a start ordered now serves.

Followed are the offered calls/s of every pool and service, and of every service its tasks/s, prompt tokens/s (all, and
those computed), output tokens/s and running calls: what was offered, so that shed calls count and retries don't. Each
is a series of bins of 60 s for `models.forecast`, which learns from it quantiles 2, 5 and 10 minutes ahead. A
forecast for another lead lies on the line between its neighbours, the newest bin being the one of lead 0; beyond 10
minutes the last one stands.

Until eight forecasts of a horizon have met their bin there is no spread to speak of, and the forecast is persistence:

    yhat(t + horizon) = y(t)                       calls/s, one quantile, level 0.5

the newest observation being a mean over the observation window (about 60 s). Demand that was not observed is no bin:
unknown is not zero. A newest bin older than FRESH_S says nothing of now.

Worked: bins of 40 calls/s at 100 s and 46 calls/s at 115 s; at 118 s the forecast for any lead is 46 calls/s; at
240 s it is unknown, since the newest bin is 125 s old. Learnt medians of 46 now, 48 in 120 s and 54 in 300 s: the
median in 210 s is 51 calls/s.

Source: Hyndman and Athanasopoulos, Forecasting: Principles and Practice (2021), section 5.2, naive method;
`models.forecast` names its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from models import forecast as learnt
from models.forecast import LEVELS, Grid, Memory
from models.types import Bin, Forecast, Quantile, Unknown

FRESH_S = 120.0
"""The newest bin may be this old before it says nothing of the present."""

RESET_S = 3600.0
"""A clock set back by more than this was wrong before: the history it wrote is dropped, or it would block for long."""

BIN_S = 60.0
GRID = Grid(BIN_S, (2, 5, 10))
JUDGED_MIN = 8
LOAD_MAX = 1e15
"""A load beyond this is a broken counter; its square is still a number."""
BINS_MAX = 2**53


class Quantity(StrEnum):
    """What a series counts."""

    CALLS = "calls/s"
    TASKS = "tasks/s"
    PROMPT_TOKENS = "prompt tokens/s"
    COMPUTED_TOKENS = "computed prompt tokens/s"
    OUTPUT_TOKENS = "output tokens/s"
    RUNNING = "running calls"


def series(owner: str, quantity: Quantity) -> str:
    """The name of the series of a pool or service; `owner` begins with what it is ("pool chat-l4")."""
    return f"{owner}: {quantity}"


def observe(memory: Memory | None, now_s: float, loads: Mapping[str, float | None]) -> Memory:
    """The memory with the newest loads by series, at the first observation after each full minute.

    A series that is not among the loads is forgotten, a new one starts; None, and what can't be a load, is a bin
    without a value. Minutes without any observation are gaps. A clock that goes back up to an hour is waited for.
    """
    names = tuple(loads)
    bin_ = math.floor(now_s / BIN_S) if math.isfinite(now_s) else 0
    if memory is not None and not _usable(memory, bin_):
        memory = None
    if memory is None:
        memory = learnt.start(GRID, names)
    if not abs(bin_) < BINS_MAX:
        return memory
    memory = learnt.with_series(memory, names)
    newest = bin_ - 1 if memory.at_s is None else round(memory.at_s / BIN_S)
    if bin_ <= newest:
        return memory
    values = np.array([_load(load) for load in loads.values()], np.float64)
    return learnt.update(learnt.skip(memory, bin_ - newest - 1), bin_ * BIN_S, values)


def _usable(memory: Memory, bin_: int) -> bool:
    ahead_s = 0.0 if memory.at_s is None else memory.at_s - bin_ * BIN_S
    return memory.grid == GRID and memory.whole() and ahead_s <= RESET_S


def _load(load: float | None) -> float:
    return load if load is not None and 0 <= load <= LOAD_MAX else math.nan


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
    """Offered calls/s at `now_s + horizon_s`, by persistence from the newest bin that is not in the future."""
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


class Outlook:
    """The learnt forecasts of one memory, ready to be asked for any series and lead."""

    def __init__(self, memory: Memory | None) -> None:
        self._at_s = math.nan if memory is None or memory.at_s is None else memory.at_s
        self._place: dict[str, int] = {}
        if memory is not None and math.isfinite(self._at_s):
            self._place = {name: number for number, name in enumerate(memory.names)}
            said = learnt.quantiles(memory)
            self._values, self._judged, self._newest = said.values, said.judged, said.newest

    def forecast(self, name: str, now_s: float, horizon_s: float) -> Forecast | None:
        """Quantiles of a series at `now_s + horizon_s`; None where too little was learnt, or too long ago."""
        place, ahead_s = self._place.get(name), now_s + horizon_s - self._at_s
        if place is None or not (0 <= now_s - self._at_s <= FRESH_S and 0 <= horizon_s < math.inf):
            return None
        leads_s = [0.0, *(bins * BIN_S for bins in GRID.horizons)]
        after = next((number for number, lead_s in enumerate(leads_s) if lead_s >= ahead_s), len(leads_s) - 1)
        needed = self._judged[place, max(after - 2, 0) : max(after, 1)]
        if not (needed >= JUDGED_MIN).all():
            return None
        values = np.concatenate((np.full((1, len(LEVELS)), self._newest[place]), self._values[place]))
        between = [float(np.interp(ahead_s, leads_s, values[:, level])) for level in range(len(LEVELS))]
        if not all(math.isfinite(value) for value in between):
            return None
        return Forecast(horizon_s, tuple(map(Quantile, LEVELS, between)))
