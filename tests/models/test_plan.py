"""The single-pool rule: enough replicas and no more, and no target at all where something is not known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.plan import plan
from models.types import (
    Capacity,
    Forecast,
    Interval,
    Limit,
    Pool,
    Quantile,
    Situation,
    Target,
    Unknown,
)


def situation(
    calls_per_s: float | Unknown, calls_per_replica: float | Unknown, *, survive: bool = False, width: float = 1.1
) -> Situation:
    pool = Pool("assistant", "assistant", "H100-SXM", 4, None, None, 3.2, 1, 12, 240.0, survive)
    demand = calls_per_s if isinstance(calls_per_s, Unknown) else Forecast(245, (Quantile(0.5, calls_per_s),))
    if isinstance(calls_per_replica, Unknown):
        return Situation(pool, 10, 0, demand, calls_per_replica)
    warm = Interval(calls_per_replica / width, calls_per_replica, calls_per_replica * width)
    return Situation(pool, 10, 0, demand, Capacity(warm, warm, Limit.DECODE_BANDWIDTH))


def one(known: Situation, theta: float = 0.7) -> Target | Unknown:
    (answer,) = plan((known,), theta).targets
    return answer


def target(known: Situation, theta: float = 0.7) -> Target:
    answer = one(known, theta)
    assert isinstance(answer, Target)
    return answer


def test_gives_the_worked_number() -> None:
    answer = target(situation(57.0, 7.1))
    assert answer.replicas == 12
    assert answer.raw_replicas == pytest.approx(11.47, abs=0.005)
    assert answer.binding == "headroom theta 0.7"
    assert answer.demand_calls_per_s == 57.0


def test_rounding_dust_buys_no_replica() -> None:
    assert target(situation(0.7 * 7.1 * 12, 7.1)).replicas == 12
    assert target(situation(0.7 * 3 * 1.1, 1.1)).replicas == 3


def test_no_load_wants_no_replica_and_any_load_wants_one() -> None:
    assert target(situation(0.0, 7.1, survive=True)).replicas == 0
    assert target(situation(0.0, 7.1)).binding == "no load"
    assert target(situation(5e-324, 7.1)).replicas == 1


def test_pays_for_the_loss_of_one_replica_where_the_policy_asks() -> None:
    small = target(situation(7.0, 7.1, survive=True))
    assert (small.replicas, small.binding) == (2, "headroom theta 0.7")
    tight = target(situation(14.0, 7.1, survive=True), theta=1.0)
    assert (tight.replicas, tight.binding) == (3, "survives the loss of one replica")
    assert target(situation(57.0, 7.1, survive=True)).replicas == 12


def test_plans_the_median_of_a_wider_forecast() -> None:
    known = situation(57.0, 7.1)
    quantiles = (Quantile(0.1, 20.0), Quantile(0.5, 57.0), Quantile(0.9, 90.0))
    wide = Situation(known.pool, 10, 0, Forecast(245, quantiles), known.capacity)
    assert target(wide).demand_calls_per_s == 57.0


def test_no_target_while_the_capacity_is_known_too_vaguely() -> None:
    answer = one(situation(57.0, 7.0, width=2))
    assert answer == Unknown("the capacity is known too vaguely yet (3.5 to 14 calls/s per replica)")


def test_says_everything_that_is_unknown() -> None:
    answer = one(situation(Unknown("no load was observed yet"), Unknown("no engine step was measured yet")))
    assert answer == Unknown(
        "the demand is unknown (no load was observed yet); the capacity is unknown (no engine step was measured yet)"
    )


def test_refuses_an_absurd_number_of_replicas() -> None:
    assert isinstance(one(situation(1e9, 1.0)), Unknown)
    assert isinstance(one(situation(1e300, 5e-324)), Unknown)


@pytest.mark.parametrize("theta", [0.0, -1.0, 1.01, math.nan, math.inf])
def test_refuses_a_headroom_outside_its_range(theta: float) -> None:
    assert isinstance(one(situation(57.0, 7.1), theta), Unknown)


def test_answers_each_situation_in_order() -> None:
    situations = (situation(57.0, 7.1), situation(Unknown("blind"), 7.1), situation(7.0, 7.1))
    answers = plan(situations, 0.7).targets
    assert [answer.replicas if isinstance(answer, Target) else None for answer in answers] == [12, None, 2]
    assert plan((), 0.7).targets == ()


@given(st.from_type(tuple[Situation, ...]), st.floats() | st.floats(0.1, 1))
def test_plan_is_total_and_never_absurd(situations: tuple[Situation, ...], theta: float) -> None:
    answers = plan(situations, theta).targets
    assert len(answers) == len(situations)
    for answer in answers:
        assert isinstance(answer, Unknown) or 0 <= answer.replicas <= 1_000_001


CALLS = st.floats(0, 1e4)


@given(CALLS, CALLS, st.floats(0.1, 100), st.floats(0.1, 100), st.booleans())
def test_more_demand_or_less_capacity_never_wants_fewer(
    one_demand: float, other_demand: float, one_rate: float, other_rate: float, survive: bool
) -> None:
    less, more = sorted((one_demand, other_demand))
    slow, fast = sorted((one_rate, other_rate))
    easy = target(situation(less, fast, survive=survive)).replicas
    assert easy <= target(situation(more, fast, survive=survive)).replicas
    assert easy <= target(situation(less, slow, survive=survive)).replicas


@given(st.floats(1e-6, 1e4), st.floats(0.1, 100), st.floats(0.1, 1), st.booleans())
def test_the_target_carries_the_load_and_one_fewer_would_not(
    calls_per_s: float, rate: float, theta: float, survive: bool
) -> None:
    wanted = target(situation(calls_per_s, rate, survive=survive), theta).replicas
    dust = calls_per_s * (1 + 1e-6)

    def enough(replicas: int) -> bool:
        return replicas * theta * rate * (1 + 1e-6) >= calls_per_s and not (
            survive and (replicas - 1) * rate * (1 + 1e-6) < calls_per_s
        )

    assert enough(wanted)
    carried = (wanted - 1) * theta * rate < dust or (survive and (wanted - 2) * rate < dust)
    assert carried
