"""Scores are those of the textbook, on the bins that all have."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import scoring

LOADS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30).map(np.asarray)


def test_pinball_is_as_worked_in_the_docstring():
    value = np.array([10.0, 10.0])
    np.testing.assert_allclose(scoring.pinball(value, np.array([12.0, 8.0]), 0.9), [0.2, 1.8])


@given(LOADS, st.floats(0.05, 0.95))
def test_no_constant_loses_less_than_the_quantile(values, level):
    best = np.full_like(values, np.quantile(values, level, method="inverted_cdf"))
    lost = scoring.mean_pinball(values, best, level)
    for other in (*values, values.mean(), 0.0):
        assert lost <= scoring.mean_pinball(values, np.full_like(values, other), level) * (1 + 1e-9) + 1e-9


def test_what_is_not_finite_is_left_out_everywhere_at_once():
    value = np.array([1.0, math.nan, 3.0, 4.0])
    said = np.array([2.0, 2.0, math.nan, 3.0])
    assert scoring.coverage(value, said) == 0.5
    assert scoring.bias(value, said) == 0.0
    assert scoring.mean_pinball(value, said, 0.5) == 0.5
    assert scoring.ratio(value, said, np.array([3.0, 0.0, 0.0, math.inf]), 0.5) == 0.5


def test_nothing_to_judge_is_not_a_number():
    nothing = np.full(3, math.nan)
    assert math.isnan(scoring.mean_pinball(nothing, nothing, 0.5))
    assert math.isnan(scoring.ratio(nothing, nothing, nothing, 0.5))
    assert math.isnan(scoring.ratio(np.ones(3), np.ones(3), np.ones(3), 0.5))  # the baseline lost nothing
    assert math.isnan(scoring.coverage(nothing, nothing))
    assert math.isnan(scoring.bias(nothing, nothing))
    assert math.isnan(scoring.regret(nothing, nothing, nothing[None], 0.5))
    assert math.isnan(scoring.lowest_coverage(np.ones(3), np.ones(3), 5))
    assert math.isnan(scoring.geometric_mean(nothing))


def test_the_lowest_window_is_found():
    value = np.array([0.0, 0, 2, 2, 0, 0])
    assert scoring.lowest_coverage(value, np.ones(6), 2) == 0.0
    assert scoring.lowest_coverage(value, np.ones(6), 4) == 0.5


def test_regret_is_what_the_best_other_would_have_saved():
    value = np.array([1.0, 1.0])
    assert scoring.regret(value, np.array([3.0, 3.0]), np.array([[2.0, 2.0], [9.0, 9.0]]), 0.5) == 0.5


def test_geometric_mean_treats_halves_and_doubles_alike():
    assert scoring.geometric_mean(np.array([0.5, 2.0, math.nan])) == pytest.approx(1.0)
