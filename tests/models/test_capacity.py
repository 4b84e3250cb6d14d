"""Capacity follows from the step time, the lengths of calls, and what the cache can hold."""

import math
from dataclasses import replace

import pytest
from engines import BARE, LEARNT, LOAD, POOL, SLO, learn, served, steps
from hypothesis import given
from hypothesis import strategies as st

from models import workload
from models.capacity import capacity, narrow, unloaded
from models.types import Capacity, Estimate, Gaps, Interval, Limit, Load, Pool, Slo, Unknown, Unloaded, Workload

SHORT = Gaps((1.0, 5.0, 20.0, 60.0, math.inf), (0.0, 500.0, 400.0, 50.0, 0.0))
LONG = Gaps((1.0, 5.0, 20.0, 60.0, math.inf), (0.0, 0.0, 100.0, 800.0, 50.0))


def known(
    estimate: Estimate | None, slo: Slo = SLO, load: Load = LOAD, kv: float | None = None, pool: Pool = POOL
) -> Capacity:
    answer = capacity(estimate, pool, slo, load, kv)
    assert isinstance(answer, Capacity)
    return answer


def test_capacity_gives_the_worked_numbers() -> None:
    answer = known(LEARNT)
    assert answer.warm_calls_per_s.mid == pytest.approx(6.19, abs=0.005)
    assert answer.cold_calls_per_s.mid == pytest.approx(1.99, abs=0.005)
    assert answer.limit is Limit.DECODE_BANDWIDTH


def test_knowledge_of_small_batches_is_wider_than_of_large_ones() -> None:
    def width(batch: float) -> float:
        warm = known(learn(None, [steps(1.0, batch)] * 40)).warm_calls_per_s
        return warm.high / warm.low

    assert width(60) < width(3)
    assert narrow(known(learn(None, [steps(1.0, 60)] * 40)).warm_calls_per_s)


def test_names_what_limits_a_replica() -> None:
    assert known(LEARNT, kv=300_000).limit is Limit.KV_MEMORY
    assert known(LEARNT).limit is Limit.DECODE_BANDWIDTH
    assert known(LEARNT, slo=replace(SLO, tpot_s=10.0), pool=replace(POOL, max_num_seqs=64)).limit is Limit.BATCH_SIZE
    assert known(LEARNT, load=replace(LOAD, output_tokens_per_call=8)).limit is Limit.PREFILL_COMPUTE
    assert known(LEARNT, slo=replace(SLO, tpot_s=10.0, ttft_s=0.3)).limit is Limit.QUEUEING


def test_sessions_that_return_later_need_more_cache() -> None:
    soon = learn(None, [served(1.0, 10, 3000, 3000, SHORT)] * 200)
    late = learn(None, [served(1.0, 10, 3000, 3000, LONG)] * 200)
    assert known(late, kv=7e5).limit is Limit.KV_MEMORY
    assert known(late, kv=7e5).warm_calls_per_s.mid < 0.8 * known(soon, kv=7e5).warm_calls_per_s.mid
    assert known(late).warm_calls_per_s.mid == pytest.approx(known(soon).warm_calls_per_s.mid, rel=0.01)


def test_more_cache_never_carries_less() -> None:
    estimate = learn(None, [served(1.0, 10, 3000, 3000, SHORT)] * 100)
    rates = [known(estimate, kv=size).warm_calls_per_s.mid for size in (5e4, 1e5, 2e5, 5e5, 1e6, math.inf)]
    assert rates == sorted(rates)


def test_what_is_shared_is_told_from_what_requests_own() -> None:
    estimate = learn(None, [served(1.0, running, 4000, 2500, SHORT) for running in (4, 8, 12, 6)] * 40)
    call = workload.call(estimate.workload, LOAD)
    assert call.own_tokens == pytest.approx(2500, rel=0.05)
    assert call.shared_tokens == pytest.approx(6150 - 2500, rel=0.05)
    assert call.resident_tokens == pytest.approx(4000, rel=0.2)


def test_a_restless_load_leaves_less_capacity_where_memory_binds() -> None:
    calm = learn(None, [served(1.0, 10, 3000, 3000, SHORT)] * 200)
    bursts = [served(rate, 10, 3000, 3000, SHORT) for rate in [0.2] * 30 + [1.8] * 30]
    restless = learn(None, bursts * 4)
    assert known(restless, kv=7e5).warm_calls_per_s.mid < known(calm, kv=7e5).warm_calls_per_s.mid


def test_an_infinite_cache_bounds_nothing_and_a_broken_size_is_unknown() -> None:
    assert known(LEARNT, kv=math.inf) == known(LEARNT)
    for broken in (math.nan, 0.0, -5.0, 100.0):
        assert isinstance(capacity(LEARNT, POOL, SLO, LOAD, broken), Unknown)


@pytest.mark.parametrize(
    ("estimate", "slo", "load", "reason"),
    [
        (None, SLO, LOAD, "no engine step was measured yet"),
        (replace(LEARNT, observations=0), SLO, LOAD, "no engine step was measured yet"),
        (LEARNT, SLO, Unknown("blind"), "the load is unknown (blind)"),
        (LEARNT, SLO, replace(LOAD, output_tokens_per_call=0), "no calls were seen that would tell how long"),
        (LEARNT, SLO, replace(LOAD, prompt_tokens_per_call=math.nan), "no calls were seen that would tell how long"),
        (LEARNT, replace(SLO, tpot_s=0.01), LOAD, "a sequence alone takes 0.0135 s per token, and the SLO allows 0.01"),
        (LEARNT, replace(SLO, tpot_s=math.nan), LOAD, "the latency limits are not positive numbers"),
        (LEARNT, replace(SLO, ttft_s=0.01), LOAD, "no rate keeps the latency limits"),
    ],
)
def test_says_why_it_does_not_know(estimate: Estimate | None, slo: Slo, load: Load | Unknown, reason: str) -> None:
    answer = capacity(estimate, POOL, slo, load, None)
    assert isinstance(answer, Unknown)
    assert answer.reason.startswith(reason)


def test_a_lone_call_meets_the_engine_of_the_estimate() -> None:
    lone = unloaded(replace(LEARNT, scales=(2.0,) * 4), POOL, LOAD)
    assert isinstance(lone, Unloaded)
    assert lone.tpot_s == pytest.approx(2 * 0.01352, abs=1e-4)
    assert lone.ttft_s == pytest.approx(2 * (0.01321 + 600 * 43.67e-6), abs=1e-4)
    assert isinstance(unloaded(None, POOL, LOAD), Unknown)


ANY_ESTIMATE = st.none() | st.from_type(Estimate)
ANY_LOAD = st.from_type(Load) | st.from_type(Unknown)
LOADS = st.builds(Load, st.floats(0, 1e5), st.floats(0, 2e5), st.floats(1, 1e5), st.floats(0, 1))
SCALES = st.floats(0.05, 20)
VARIANCES = st.floats(0.0025, 4)
ESTIMATES = st.builds(
    lambda scales, v, batch: Estimate(scales, tuple(v if i % 5 == 0 else 0.0 for i in range(16)), batch, 50),
    st.tuples(SCALES, SCALES, SCALES, SCALES),
    VARIANCES,
    st.floats(1, 256),
)
SLOS = st.builds(Slo, st.floats(0.1, 60), st.floats(1e-4, 10), st.just(95.0), st.just(0.99))
KV = st.none() | st.floats(1e3, 1e8)


@given(ANY_ESTIMATE | ESTIMATES, st.from_type(Pool), st.from_type(Slo), ANY_LOAD, st.none() | st.floats())
def test_capacity_is_total(
    estimate: Estimate | None, pool: Pool, slo: Slo, load: Load | Unknown, kv: float | None
) -> None:
    assert isinstance(capacity(estimate, pool, slo, load, kv), Capacity | Unknown)
    assert isinstance(unloaded(estimate, pool, load), Unloaded | Unknown)


@given(ESTIMATES, st.from_type(Workload), SLOS, LOADS, KV)
def test_capacity_is_total_whatever_is_remembered(
    estimate: Estimate, remembered: Workload, slo: Slo, load: Load, kv: float | None
) -> None:
    answer = capacity(replace(estimate, workload=remembered), POOL, slo, load, kv)
    assert isinstance(answer, Capacity | Unknown)


@given(ESTIMATES, st.sampled_from([POOL, BARE]), SLOS, LOADS, KV)
def test_intervals_are_in_order_and_cold_is_never_above_warm(
    estimate: Estimate, pool: Pool, slo: Slo, load: Load, kv: float | None
) -> None:
    answer = capacity(estimate, pool, slo, load, kv)
    if isinstance(answer, Unknown):
        return
    warm, cold = answer.warm_calls_per_s, answer.cold_calls_per_s
    for interval in (warm, cold):
        assert 0 <= interval.low <= interval.mid <= interval.high < math.inf
        assert interval.mid > 0
    assert cold.low <= warm.low
    assert cold.mid <= warm.mid
    assert cold.high <= warm.high


@given(ESTIMATES, SLOS, LOADS, KV, st.floats(1, 3))
def test_harder_work_or_a_slower_engine_never_has_more_capacity(
    estimate: Estimate, slo: Slo, load: Load, kv: float | None, factor: float
) -> None:
    easy = capacity(estimate, POOL, slo, load, kv)
    slower = replace(estimate, scales=tuple(scale * factor for scale in estimate.scales))
    for hard in (
        capacity(slower, POOL, slo, load, kv),
        capacity(estimate, POOL, slo, replace(load, prompt_tokens_per_call=load.prompt_tokens_per_call * factor), kv),
        capacity(estimate, POOL, replace(slo, tpot_s=slo.tpot_s / factor), load, kv),
        capacity(estimate, POOL, replace(slo, ttft_s=slo.ttft_s / factor), load, kv),
    ):
        if isinstance(hard, Capacity):
            assert isinstance(easy, Capacity)
            assert hard.warm_calls_per_s.mid <= easy.warm_calls_per_s.mid * (1 + 1e-9)


@given(st.from_type(Interval))
def test_narrow_is_total_and_only_of_ordered_positive_intervals(interval: Interval) -> None:
    if narrow(interval):
        assert 0 < interval.low <= interval.mid <= interval.high <= 3 * interval.low
    assert not narrow(Interval(0.0, interval.mid, interval.high))
