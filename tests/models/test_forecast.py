"""Quantiles learnt online cover what they promise, and depend on nothing but the loads that were seen."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import forecast, scoring
from models.forecast import LEVELS, Grid, Memory
from models.forecast.weights import Statistics, regrets

GRID = Grid(60.0, (2, 5, 10))


def run(values, grid=GRID, start_s=0.0):
    """All quantiles said (bins x series x horizons x levels), and the memory after the last bin."""
    memory = forecast.start(grid, tuple(f"series {n}" for n in range(values.shape[1])))
    said = []
    for number, row in enumerate(values):
        memory = forecast.update(memory, start_s + (number + 1) * grid.bin_s, row)
        said.append(forecast.quantiles(memory).values)
    return np.stack(said), memory


def walk(bins, series=1, seed=0):
    """Loads that wander around their mean."""
    noise = np.random.default_rng(seed)
    level = np.zeros(series)
    rows = []
    for _ in range(bins):
        level = 0.95 * level + noise.normal(0.0, 0.1, series)
        rows.append(20.0 * np.exp(level))
    return np.stack(rows)


def of_horizon(said, values, place, series=0):
    """Targets and quantiles of one horizon, aligned."""
    bins = GRID.horizons[place]
    return values[bins:, series], said[:-bins, series, place]


# --------------------------------------------------------------------------------------------------- what is promised


@pytest.mark.parametrize("place", range(3))
def test_quantiles_cover_their_share_of_a_wandering_load(place):
    values = walk(4000)
    said, _ = run(values)
    target, quantiles = of_horizon(said, values, place)
    for number, level in enumerate(LEVELS):
        assert scoring.coverage(target[200:], quantiles[200:, number]) == pytest.approx(level, abs=0.03)


def test_coverage_comes_back_after_the_noise_has_trebled():
    noise = np.random.default_rng(1)
    values = np.concatenate([noise.normal(100, 5, 1000), noise.normal(100, 15, 1000)])[:, None]
    said, _ = run(values)
    target, quantiles = of_horizon(said, values, 0)
    assert scoring.coverage(target[1300:], quantiles[1300:, 1]) == pytest.approx(0.9, abs=0.04)


def test_beats_the_last_value_with_its_own_errors_on_noise_around_a_level():
    values = np.random.default_rng(2).normal(100, 10, (1500, 1))
    said, _ = run(values)
    target, quantiles = of_horizon(said, values, 1)
    error = target - values[: len(target), 0]
    naive = values[: len(target), 0] + np.quantile(error, 0.9)
    assert scoring.ratio(target[300:], quantiles[300:, 1], naive[300:], 0.9) < 0.8


def test_learns_the_shape_of_the_day():
    at_s = np.arange(1, 4 * 1440 + 1) * 60.0
    values = (100 + 80 * np.sin(2 * np.pi * at_s / 86_400))[:, None]
    said, _ = run(values)
    target, quantiles = of_horizon(said, values, 2)
    fourth_day = slice(3 * 1440, None)
    error = np.abs(target[fourth_day] - quantiles[fourth_day, 0])
    assert error.mean() < 0.25 * np.abs(values[10:, 0] - values[:-10, 0]).mean()


def test_a_constant_load_is_forecast_without_spread():
    said, _ = run(np.full((60, 1), 7.0))
    assert said[-1] == pytest.approx(7.0)


def test_a_load_of_zero_is_forecast_as_zero():
    said, _ = run(np.zeros((60, 1)))
    assert (said == 0).all()


# ------------------------------------------------------------------------------------------------- invariants

ROWS = st.lists(
    st.lists(st.floats(0, 1e6) | st.sampled_from([math.nan, math.inf, -1.0, 0.0]), min_size=2, max_size=2),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_quantiles_ascend_and_are_never_below_zero(rows):
    said, memory = run(np.asarray(rows, float))
    seen = np.isfinite(said)
    assert (said[seen] >= 0).all()
    assert (np.diff(np.where(seen, said, 0.0), axis=3) >= 0).all()
    assert memory.whole()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 2.0), st.sampled_from([1e-3, 1e3]))
def test_other_units_give_the_same_forecast_in_other_units(seed, spread, factor):
    # No two loads are equal: where a forecast is hit exactly, rounding says on which side of it the load lies.
    values = np.random.default_rng(seed).lognormal(3.0, spread, (40, 2))
    said, _ = run(values)
    scaled, _ = run(values * factor)
    np.testing.assert_allclose(scaled, said * factor, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=12, max_size=40), st.integers(0, 30))
def test_no_quantile_is_far_above_everything_seen(loads, silence):
    values = np.concatenate([np.zeros(silence), loads])[:, None]
    said, _ = run(values)
    assert np.nanmax(said) <= 30 * values.max() + 1e-6


def test_series_do_not_know_of_each_other():
    values = walk(200, series=3)
    together, _ = run(values)
    for number in range(3):
        alone, _ = run(values[:, [number]])
        np.testing.assert_array_equal(alone[:, 0], together[:, number])


def test_the_same_loads_give_the_same_bytes():
    values = walk(100, series=2)
    assert run(values)[1] == run(values)[1]


# --------------------------------------------------------------------------------------------------- kinds of nothing


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf, -5.0])
def test_what_is_no_load_teaches_nothing(nothing):
    values = walk(100)
    _, memory = run(values)
    before = forecast.quantiles(memory)
    after = forecast.quantiles(forecast.update(memory, 101 * 60.0, np.array([nothing])))
    np.testing.assert_array_equal(after.judged, before.judged)
    np.testing.assert_array_equal(after.newest, before.newest)


def test_nothing_is_forecast_before_a_load_was_seen():
    said, memory = run(np.full((5, 1), math.nan))
    assert np.isnan(said).all()
    assert np.isnan(forecast.quantiles(memory).newest).all()
    assert np.isnan(forecast.quantiles(forecast.start(GRID, ("new",))).values).all()


def test_what_was_said_before_a_gap_is_not_judged_by_what_came_after_it():
    _, memory = run(walk(50))
    judged = forecast.quantiles(memory).judged
    resumed = forecast.skip(memory, 1000)
    for number in range(2):
        resumed = forecast.update(resumed, (1051 + number) * 60.0, np.array([500.0]))
    np.testing.assert_array_equal(forecast.quantiles(resumed).judged, judged)
    resumed = forecast.update(resumed, 1053 * 60.0, np.array([500.0]))
    np.testing.assert_array_equal(forecast.quantiles(resumed).judged[0], judged[0] + [1, 0, 0])


def test_a_short_gap_hides_only_what_would_have_been_said_in_it():
    _, memory = run(walk(50))
    judged = forecast.quantiles(memory).judged
    resumed = forecast.update(forecast.skip(memory, 3), 54 * 60.0, np.array([20.0]))
    # Four bins on, forecasts for 5 and 10 bins of before the gap meet their bin; the one for 2 was never said.
    np.testing.assert_array_equal(forecast.quantiles(resumed).judged[0], judged[0] + [0, 1, 1])


# ------------------------------------------------------------------------------------------------ series come and go


def test_series_that_stay_keep_what_was_learnt_and_new_ones_start():
    values = walk(100, series=3)
    said, memory = run(values)
    changed = forecast.with_series(memory, ("series 2", "new", "series 0"))
    quantiles = forecast.quantiles(changed)
    np.testing.assert_array_equal(quantiles.values[0], said[-1, 2])
    np.testing.assert_array_equal(quantiles.values[2], said[-1, 0])
    assert np.isnan(quantiles.values[1]).all()
    assert (quantiles.judged[1] == 0).all()
    assert forecast.with_series(memory, memory.names) is memory


@pytest.mark.parametrize(
    ("bin_s", "horizons"), [(0.0, (1,)), (math.nan, (1,)), (60.0, ()), (60.0, (0,)), (60.0, (5, 2))]
)
def test_an_impossible_grid_is_refused(bin_s, horizons):
    with pytest.raises(ValueError, match="a grid needs"):
        Grid(bin_s, horizons)


def test_rows_that_do_not_fit_are_not_whole():
    assert not Memory(GRID, ("one",), 5, 300.0, b"").whole()
    assert forecast.start(GRID, ("one",)).whole()


# --------------------------------------------------------------------------------------------------------- weights


def statistics(members):
    return Statistics(np.zeros(members), np.zeros(members), np.zeros(members), np.full(members, 1 / members), axis=0)


def test_weights_are_as_worked_in_the_docstring():
    two = statistics(2)
    combined, opinions = np.array(5.0), np.array([0.0, 10.0])
    two.learn(regrets(np.array(8.0), combined, opinions, 0.5), 1.0, np.array(True))
    np.testing.assert_allclose(two.regret, [-3.75, 1.25])
    np.testing.assert_allclose(two.weights(), [0.269, 0.731], atol=0.001)


def test_weights_go_to_the_member_that_is_right_and_no_member_is_lost():
    three = statistics(3)
    opinions = np.array([0.0, 8.0, 20.0])
    for _ in range(500):
        combined = (three.weights() * opinions).sum()
        three.learn(regrets(np.array(8.0), np.array(combined), opinions, 0.5), 0.998, np.array(True))
    weights = three.weights()
    assert (weights * opinions).sum() == pytest.approx(8.0, abs=1.0)
    assert weights.min() >= 0.001 / 3
    assert weights.sum() == pytest.approx(1.0)
