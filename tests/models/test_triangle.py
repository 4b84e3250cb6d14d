"""Scores are in [0, 1] or unknown; the position is one only where all three are known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.triangle import place
from models.types import Performance, Placement, Slo, Unknown

SLO = Slo(ttft_s=2.0, tpot_s=0.05, percentile=95, task_success=0.99)
WORKED = Performance(SLO, 0.5, 0.02, 0.125, 0.01, 0.99, 0.002, 0.001)


def placed(performance: Performance) -> Placement:
    answer = place(performance)
    assert isinstance(answer, Placement)
    return answer


def test_gives_the_worked_numbers() -> None:
    answer = placed(WORKED)
    assert answer.latency_score == pytest.approx(0.5)
    assert answer.throughput_score == 0.99
    assert answer.cost_score == 0.5
    assert answer.position is not None
    assert answer.position.throughput == pytest.approx(0.497, abs=5e-4)
    assert answer.position.cost == pytest.approx(0.251, abs=5e-4)
    assert answer.magnitude == pytest.approx(0.628, abs=5e-4)


def test_latency_is_that_of_the_worse_limit() -> None:
    assert placed(replace(WORKED, tpot_s=0.04)).latency_score == pytest.approx(math.log(1.25) / math.log(5))


def test_latency_scores_zero_at_its_limit_even_where_the_other_limit_is_unknown() -> None:
    assert placed(replace(WORKED, ttft_s=2.0, tpot_s=None)).latency_score == 0


def test_latency_scores_one_at_or_below_unloaded() -> None:
    assert placed(replace(WORKED, ttft_s=0.1, tpot_s=0.01)).latency_score == 1


@pytest.mark.parametrize(
    "unknown",
    [
        replace(WORKED, ttft_s=None),
        replace(WORKED, tpot_s=math.nan),
        replace(WORKED, unloaded_ttft_s=None),
        replace(WORKED, unloaded_ttft_s=2.5),
    ],
)
def test_latency_is_unknown_where_a_term_is(unknown: Performance) -> None:
    answer = placed(unknown)
    assert answer.latency_score is None
    assert answer.throughput_score == 0.99
    assert answer.position is None
    assert answer.magnitude is None


def test_cost_below_the_best_known_scores_one() -> None:
    assert placed(replace(WORKED, usd_per_call=0.0005)).cost_score == 1


def test_has_no_position_when_all_scores_are_zero() -> None:
    answer = placed(replace(WORKED, ttft_s=9, good_share=0.0, usd_per_call=1e300, best_usd_per_call=1e-300))
    assert answer.position is None
    assert answer.magnitude == 0


def test_does_not_know_where_nothing_is_known() -> None:
    assert isinstance(place(Performance(SLO)), Unknown)


@given(st.from_type(Performance))
def test_place_is_total_and_its_scores_are_shares(performance: Performance) -> None:
    answer = place(performance)
    if isinstance(answer, Unknown):
        assert answer.reason
        return
    scores = (answer.latency_score, answer.throughput_score, answer.cost_score)
    assert all(score is None or 0 <= score <= 1 for score in scores)
    if None in scores:
        assert answer.position is None
        assert answer.magnitude is None
    else:
        assert answer.magnitude is not None
        assert 0 <= answer.magnitude <= 1
    if answer.position is not None:
        shares = (answer.position.latency, answer.position.throughput, answer.position.cost)
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(1)


LATENCIES = st.floats(0.01, 5)


@given(LATENCIES, LATENCIES, LATENCIES)
def test_slower_never_scores_better(one_s: float, other_s: float, unloaded_s: float) -> None:
    fast, slow = sorted((one_s, other_s))
    better = placed(replace(WORKED, ttft_s=fast, unloaded_ttft_s=unloaded_s)).latency_score
    worse = placed(replace(WORKED, ttft_s=slow, unloaded_ttft_s=unloaded_s)).latency_score
    if better is not None and worse is not None:
        assert worse <= better
