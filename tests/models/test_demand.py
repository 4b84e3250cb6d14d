"""Histories hold only what was observed; the forecast is learnt, else persistence, or says why there is none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import demand
from models.demand import GRID, Outlook, Quantity, forecast, observe, series, update
from models.forecast import Memory
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


# ------------------------------------------------------------------------------------------------------------- learnt

CALLS = series("pool a", Quantity.CALLS)


def learnt(minutes: int, calls_per_s: float = 20.0, memory: Memory | None = None, first: int = 0) -> Memory:
    """What was learnt of loads that alternate around a level, one observation per minute."""
    for minute in range(first, first + minutes):
        memory = observe(memory, 60.0 * minute, {CALLS: calls_per_s + (-1) ** minute})
    assert memory is not None
    return memory


def test_only_the_first_observation_of_a_minute_is_a_bin() -> None:
    one = observe(None, 600.0, {CALLS: 20.0})
    assert observe(one, 645.0, {CALLS: 90.0}) == one
    assert observe(one, 661.0, {CALLS: 90.0}) != one


def test_too_little_to_learn_from_gives_no_forecast() -> None:
    few = Outlook(learnt(9))
    assert few.forecast(CALLS, 60.0 * 8, 120.0) is None
    assert Outlook(None).forecast(CALLS, 0.0, 120.0) is None
    assert few.forecast("another series", 60.0 * 8, 120.0) is None


def test_learnt_quantiles_ascend_and_lie_around_the_level() -> None:
    said = Outlook(learnt(120)).forecast(CALLS, 60.0 * 119, 240.0)
    assert said is not None
    assert [quantile.level for quantile in said.quantiles] == [0.5, 0.9, 0.95]
    values = [quantile.value for quantile in said.quantiles]
    assert values == sorted(values)
    assert 18.5 < values[0] < 21.5


def test_leads_between_horizons_lie_on_the_line_and_beyond_the_last_one_it_stands() -> None:
    outlook, now_s = Outlook(learnt(200)), 60.0 * 199

    def upper(lead_s: float) -> float:
        said = outlook.forecast(CALLS, now_s, lead_s)
        assert said is not None
        return said.quantiles[1].value

    assert upper(210.0) == pytest.approx((upper(120.0) + upper(300.0)) / 2)
    assert upper(3600.0) == upper(600.0)


def test_what_was_learnt_too_long_ago_gives_no_forecast() -> None:
    outlook = Outlook(learnt(120))
    assert outlook.forecast(CALLS, 60.0 * 119 + 121, 240.0) is None
    assert outlook.forecast(CALLS, 60.0 * 119 - 1, 240.0) is None


def test_starts_anew_when_the_clock_was_far_ahead_or_the_memory_is_damaged() -> None:
    ahead = learnt(20, first=10**6)
    assert observe(ahead, 60.0, {CALLS: 1.0}) == observe(None, 60.0, {CALLS: 1.0})
    damaged = Memory(GRID, (CALLS,), 5, 60.0, b"")
    assert observe(damaged, 120.0, {CALLS: 1.0}) == observe(None, 120.0, {CALLS: 1.0})


def test_a_clock_that_goes_back_a_little_is_waited_for() -> None:
    memory = learnt(20)
    assert observe(memory, 60.0 * 15, {CALLS: 500.0}) == memory


@given(
    st.lists(st.tuples(st.floats(), st.dictionaries(st.sampled_from("abc"), st.none() | st.floats())), max_size=8),
    st.floats(),
    st.floats(),
)
def test_observing_and_asking_are_total(
    seen: list[tuple[float, dict[str, float | None]]], now_s: float, horizon_s: float
) -> None:
    memory = None
    for at_s, loads in seen:
        memory = observe(memory, at_s, loads)
        assert memory.whole()
    for name in "abc":
        said = Outlook(memory).forecast(name, now_s, horizon_s)
        assert said is None or all(math.isfinite(quantile.value) for quantile in said.quantiles)


def test_minutes_without_an_observation_are_gaps() -> None:
    memory = learnt(60)
    later = demand.observe(memory, 60.0 * 90, {CALLS: 20.0})
    assert later.ticks == memory.ticks + 31
