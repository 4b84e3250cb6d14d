"""What if: an allocation moves sessions, work, queues and latency, and all of it together."""

import math
from dataclasses import replace
from typing import Any

import pytest
from engines import BARE, LEARNT, LOAD, POOL, SLO, learn, served
from hypothesis import given
from hypothesis import strategies as st

from models.predict import Allocation, Clients, Part, Place, Prediction, Seen, predict, present
from models.types import Estimate, Gaps, Load, Unknown

SHORT = Gaps((1.0, 5.0, 20.0, 60.0, math.inf), (0.0, 500.0, 400.0, 50.0, 0.0))
PART = Part(POOL, SLO, LEARNT, replace(LOAD, offered_calls_per_s=24.0), 6, None)
PATIENT = Clients()
LATER_S = 300.0


def after(
    part: Part, replicas: int, *, admitted: float = 1.0, clients: Clients = PATIENT, in_s: float = LATER_S
) -> Prediction:
    (answer,) = predict((part,), Allocation((Place(replicas, 1.0),), admitted), clients, in_s)
    assert isinstance(answer, Prediction)
    return answer


def test_predictions_give_the_worked_numbers() -> None:
    six, five = after(PART, 6), after(PART, 5, in_s=1e9)
    assert (six.tpot_s, six.batch) == (pytest.approx(0.0252, rel=0.003), pytest.approx(30.2, rel=0.003))
    assert six.ttft_s == pytest.approx(0.225, rel=0.005)
    assert (five.tpot_s, five.ttft_s) == (pytest.approx(0.0308, rel=0.003), pytest.approx(0.275, rel=0.005))
    assert six.usd_per_h == pytest.approx(6 * 4 * 3.2)
    assert six.usd_per_call == pytest.approx(six.usd_per_h / (24 * 3600 * six.good_share))
    assert six.good_share == pytest.approx(1.0)


def test_what_is_seen_now_is_right_and_the_model_says_by_which_factor_it_changes() -> None:
    seen = replace(PART, seen=Seen(ttft_s=0.4, tpot_s=0.03, hit_ratio=0.8))
    assert after(seen, 6).ttft_s == pytest.approx(0.4)
    assert after(seen, 6).hit_ratio == pytest.approx(0.8)
    bare = after(PART, 5).tpot_s
    assert bare is not None
    assert after(seen, 5).tpot_s == pytest.approx(0.03 * bare / 0.0252, rel=0.003)


def test_moved_sessions_are_cold_and_are_warm_again_later() -> None:
    at_once, later = after(PART, 5, in_s=0.0), after(PART, 5, in_s=LATER_S)
    assert at_once.cold_share == pytest.approx(1 / 6)
    assert at_once.hit_ratio == pytest.approx(0.9 * 5 / 6)
    assert at_once.ttft_s is not None
    assert later.ttft_s is not None
    assert at_once.ttft_s > later.ttft_s
    assert later.hit_ratio == pytest.approx(0.9, abs=1e-3)


def test_weights_move_calls_from_one_pool_to_the_other() -> None:
    other = replace(PART, pool=replace(POOL, name="other"))
    before = present((PART, other))
    assert [place.weight for place in before.places] == [0.5, 0.5]
    shifted = Allocation((Place(6, 0.25), Place(6, 0.75)))
    calm, busy = predict((PART, other), shifted, PATIENT, 0.0)
    assert isinstance(calm, Prediction)
    assert isinstance(busy, Prediction)
    assert (calm.calls_per_s, busy.calls_per_s) == (12.0, 36.0)
    assert (calm.cold_share, busy.cold_share) == (0.0, pytest.approx(1 / 3))


def test_a_cache_that_is_too_small_loses_hits_and_then_its_balance() -> None:
    estimate = learn(None, [served(1.0, 10, 3000, 3000, SHORT)] * 200)
    part = replace(PART, estimate=estimate, kv_tokens=4e5)
    loads = [after(part, replicas) for replicas in (12, 8, 6, 4, 3, 2)]
    hits = [one.hit_ratio for one in loads]
    assert hits == sorted(hits, reverse=True)
    assert hits[0] > hits[-1] + 0.01
    assert loads[-1].full
    assert loads[-1].ttft_s is None
    assert loads[-1].success_share < 1


def test_retries_make_a_full_replica_of_a_busy_one() -> None:
    impatient = Clients(timeout_s=0.35, retries=4)
    busy = replace(PART, load=replace(LOAD, offered_calls_per_s=6 * 6.6))
    assert not after(busy, 6).full
    assert not after(busy, 6, clients=replace(impatient, retries=0)).full
    assert after(busy, 6, clients=impatient).full


def test_a_full_replica_serves_what_it_can() -> None:
    flood = replace(PART, load=replace(LOAD, offered_calls_per_s=600.0))
    answer = after(flood, 6)
    assert answer.full
    assert answer.utilisation == 1.0
    assert 600 * answer.success_share == pytest.approx(6 * 1024 / (300 * 0.01321 + 1024 * 0.1189), rel=0.002)


@pytest.mark.parametrize(
    ("part", "replicas", "why"),
    [
        (replace(PART, load=Unknown("the gateway is silent")), 6, "the gateway is silent"),
        (replace(PART, estimate=None), 6, "no engine step"),
        (replace(PART, kv_tokens=math.nan), 6, "KV cache"),
        (PART, 0, "no replica"),
        (replace(PART, load=replace(LOAD, offered_calls_per_s=math.nan)), 6, "not a number of calls"),
    ],
)
def test_what_is_unknown_is_said(part: Part, replicas: int, why: str) -> None:
    (answer,) = predict((part,), Allocation((Place(replicas, 1.0),)), PATIENT, LATER_S)
    assert isinstance(answer, Unknown)
    assert why in answer.reason


def test_one_unknown_pool_makes_the_others_unknown_because_their_loads_depend_on_it() -> None:
    blind = replace(PART, load=Unknown("the gateway is silent"))
    answers = predict((PART, blind), present((PART, blind)), PATIENT, LATER_S)
    assert all(isinstance(answer, Unknown) for answer in answers)


@given(
    load=st.builds(Load, st.floats(0, 400), st.just(6000.0), st.just(300.0), st.floats(0, 1)),
    replicas=st.integers(1, 50),
    kv=st.none() | st.floats(1e3, 1e8),
    clients=st.builds(Clients, st.floats(0.01, 1e3), st.integers(0, 8)),
    learnt=st.sampled_from([LEARNT, learn(None, [served(1.0, 10, 3000, 3000, SHORT)] * 50)]),
)
def test_more_replicas_are_never_slower_once_warm_and_always_cost_more(
    load: Load, replicas: int, kv: float | None, clients: Clients, learnt: Estimate
) -> None:
    part = Part(POOL, SLO, learnt, load, replicas, kv)
    few, more = (after(part, n, clients=clients, in_s=1e9) for n in (replicas, replicas + 1))
    assert more.usd_per_h > few.usd_per_h
    assert more.success_share >= few.success_share - 1e-4
    if few.ttft_s is not None:
        assert more.ttft_s is not None
        assert more.ttft_s <= few.ttft_s * (1 + 1e-3)


@given(
    load=st.builds(Load, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0.01, 1e5), st.floats(0, 1)),
    replicas=st.integers(1, 50),
    kv=st.none() | st.floats(1, 1e8),
    clients=st.builds(Clients, st.floats(0, 1e3), st.integers(0, 8)),
    learnt=st.sampled_from([LEARNT, learn(None, [served(1.0, 10, 3000, 3000, SHORT)] * 50)]),
    pool=st.sampled_from([POOL, BARE]),
    in_s=st.floats(0, 1e4),
)
def test_every_prediction_is_possible(**drawn: Any) -> None:
    part = Part(drawn["pool"], SLO, drawn["learnt"], drawn["load"], 7, drawn["kv"])
    one = after(part, drawn["replicas"], clients=drawn["clients"], in_s=drawn["in_s"])
    assert 0 <= one.hit_ratio <= 1
    assert 0 <= one.utilisation <= 1 + 1e-9
    assert 0 <= one.success_share <= 1
    assert math.isfinite(one.batch)
    assert one.batch >= 0
    assert (one.ttft_s is None) == one.full
