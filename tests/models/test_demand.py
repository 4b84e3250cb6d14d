"""Histories hold only what was observed, in order and bounded; the forecast is persistence, or says why not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.demand import forecast, update
from models.types import Bin, Forecast, Quantile, Unknown

HISTORY = (Bin(100, 40), Bin(115, 46))
MOMENTS = st.floats(0, 1e6)


def test_adds_a_bin_and_drops_old_ones() -> None:
    assert update(HISTORY, 130, 50, keep_s=15) == (Bin(115, 46), Bin(130, 50))


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -1.0])
def test_unknown_load_is_no_bin(unknown: float | None) -> None:
    assert update(HISTORY, 130, unknown, keep_s=3600) == HISTORY


def test_zero_load_is_a_bin() -> None:
    assert update((), 130, 0.0, keep_s=3600) == (Bin(130, 0.0),)


@pytest.mark.parametrize("at_s", [115.0, 101.0, -1000.0, math.nan, math.inf])
def test_ignores_time_that_repeats_or_goes_back(at_s: float) -> None:
    assert update(HISTORY, at_s, 50, keep_s=3600) == HISTORY


def test_starts_anew_when_the_clock_was_far_ahead() -> None:
    assert update((Bin(1e9, 40),), 115, 46, keep_s=3600) == (Bin(115, 46),)


@given(st.lists(st.tuples(MOMENTS, st.none() | st.floats())), st.floats(0, 1e5))
def test_history_ascends_and_is_bounded(seen: list[tuple[float, float | None]], keep_s: float) -> None:
    history: tuple[Bin, ...] = ()
    for at_s, calls_per_s in seen:
        history = update(history, at_s, calls_per_s, keep_s)
        times = [past.at_s for past in history]
        assert times == sorted(set(times))
        assert all(time >= times[-1] - keep_s for time in times)
        assert all(0 <= past.calls_per_s < math.inf for past in history)


@given(st.from_type(tuple[Bin, ...]), st.floats(), st.none() | st.floats(), st.floats())
def test_update_is_total(history: tuple[Bin, ...], at_s: float, calls_per_s: float | None, keep_s: float) -> None:
    assert isinstance(update(history, at_s, calls_per_s, keep_s), tuple)


def test_forecasts_the_newest_load_as_a_median_without_spread() -> None:
    assert forecast(HISTORY, 118, 245) == Forecast(245, (Quantile(0.5, 46),))


def test_does_not_know_from_a_load_that_is_too_old() -> None:
    answer = forecast(HISTORY, 240, 245)
    assert answer == Unknown("the newest observed load is 125 s old, more than 120 s")


def test_does_not_know_without_history_or_from_the_future() -> None:
    assert isinstance(forecast((), 118, 245), Unknown)
    assert isinstance(forecast(HISTORY, 90, 245), Unknown)


def test_skips_bins_from_the_future() -> None:
    assert forecast(HISTORY, 110, 245) == Forecast(245, (Quantile(0.5, 40),))


@given(st.from_type(tuple[Bin, ...]), st.floats(), st.floats())
def test_forecast_is_total_and_never_claims_more_than_was_seen(
    history: tuple[Bin, ...], now_s: float, horizon_s: float
) -> None:
    answer = forecast(history, now_s, horizon_s)
    if isinstance(answer, Forecast):
        assert [quantile.level for quantile in answer.quantiles] == [0.5]
        assert answer.quantiles[0].value in [past.calls_per_s for past in history]
    else:
        assert answer.reason
