"""The cascade margin of losing one replica: worked number, honest unknowns, and its direction."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from models.cascade import margins
from models.types import Capacity, Interval, Limit, Load, Margin, Pool, Unknown

POOL = Pool("assistant", "assistant", "H100-SXM", 4, None, None, 3.2, 1, 12, 240.0, survive_replica=False)


def capacity(cold: float) -> Capacity:
    return Capacity(Interval(cold, cold, cold), Interval(cold, cold, cold), Limit.DECODE_BANDWIDTH)


def load(calls_per_s: float) -> Load:
    return Load(calls_per_s, 6000, 300, 0.9)


def only(answer: tuple[Margin, ...] | Unknown) -> Margin:
    assert isinstance(answer, tuple)
    (margin,) = answer
    return margin


def test_gives_the_worked_numbers() -> None:
    margin = only(margins(POOL, capacity(1.2), load(46), 10))
    assert margin.domain == "replica"
    assert margin.lost_share == 0.1
    assert margin.cold_load_ratio == pytest.approx(4.26, abs=0.005)
    assert margin.margin == pytest.approx(-0.70, abs=0.005)


def test_a_single_replica_has_no_margin_because_losing_it_loses_all() -> None:
    assert margins(POOL, capacity(1.2), load(46), 1) == Unknown("assistant has one replica: losing it loses all")


def test_no_load_leaves_the_whole_margin() -> None:
    assert only(margins(POOL, capacity(1.2), load(0), 2)) == Margin("replica", 0.5, 0, 1)


@pytest.mark.parametrize("replicas", [0, -3, 10**400])
def test_does_not_know_for_an_impossible_count(replicas: int) -> None:
    assert isinstance(margins(POOL, capacity(1.2), load(46), replicas), Unknown)


def test_passes_on_why_the_capacity_or_the_load_is_unknown() -> None:
    answer = margins(POOL, Unknown("no engine step was measured yet"), load(46), 3)
    assert answer == Unknown("the capacity is unknown (no engine step was measured yet)")
    answer = margins(POOL, capacity(1.2), Unknown("nothing was observed"), 3)
    assert answer == Unknown("the load is unknown (nothing was observed)")


@given(
    st.from_type(Pool),
    st.from_type(Capacity) | st.from_type(Unknown),
    st.from_type(Load) | st.from_type(Unknown),
    st.integers(),
)
def test_margins_are_total_and_finite(
    pool: Pool, known: Capacity | Unknown, offered: Load | Unknown, replicas: int
) -> None:
    answer = margins(pool, known, offered, replicas)
    if isinstance(answer, tuple):
        assert all(math.isfinite(margin.margin) and margin.cold_load_ratio >= 0 for margin in answer)


@given(st.floats(0.01, 100), st.floats(0, 1000), st.integers(2, 1000))
def test_one_more_replica_never_lowers_the_margin(cold: float, calls_per_s: float, replicas: int) -> None:
    assume(calls_per_s > 0)
    few = only(margins(POOL, capacity(cold), load(calls_per_s), replicas))
    more = only(margins(POOL, capacity(cold), load(calls_per_s), replicas + 1))
    assert more.margin >= few.margin
