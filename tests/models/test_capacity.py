"""The estimator learns the scale of the step time and doubts what it has not seen; capacity follows from it."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.capacity import GENERIC, capacity, has_roofline, narrow, prior, unloaded, update
from models.hardware import gpu
from models.types import Capacity, Estimate, Interval, Limit, Load, Model, Pool, Slo, Steps, StepTime, Unknown, Unloaded

CAPTURED = Path(__file__).parents[1] / "data" / "vllm_cpu" / "steps.csv"

POOL = Pool(
    name="assistant",
    service="assistant",
    gpu_type="H100-SXM",
    gpus_per_replica=4,
    gpu=gpu("H100-SXM", "fp8"),
    model=Model("llama-3.3-70b", 70e9, 1.0, 327_680),
    usd_per_gpu_h=3.2,
    replicas_min=1,
    replicas_max=12,
    cold_start_s=240,
    survive_replica=False,
)
BARE = replace(POOL, gpu=None, model=None)
SLO = Slo(ttft_s=2.0, tpot_s=0.05, percentile=95, task_success=0.99)
LOAD = Load(offered_calls_per_s=46, prompt_tokens_per_call=6000, output_tokens_per_call=300, hit_ratio=0.9)
LEARNT = Estimate(log_scale_mean=0.0, log_scale_variance=0.05**2, largest_batch=100, observations=20)


def steps(scale: float, batch: float, prefill_tokens_per_s: float = 0.0, pool: Pool = POOL) -> Steps:
    """What an engine whose every coefficient is `scale` times the prior's would show at that batch."""
    step = prior(pool)
    context = LOAD.prompt_tokens_per_call + LOAD.output_tokens_per_call / 2
    decode_s = scale * (step.fixed_s + batch * (step.per_sequence_s + step.per_kv_token_s * context))
    itl_s = decode_s / (1 - scale * step.per_prefill_token_s * prefill_tokens_per_s)
    return Steps(batch, itl_s, prefill_tokens_per_s)


def learn(estimate: Estimate | None, windows: list[Steps], pool: Pool = POOL) -> Estimate:
    for window in windows:
        estimate = update(estimate, pool, window, LOAD)
    assert estimate is not None
    return estimate


def known(estimate: Estimate | None, slo: Slo = SLO, load: Load = LOAD, kv: float | None = None) -> Capacity:
    answer = capacity(estimate, POOL, slo, load, kv)
    assert isinstance(answer, Capacity)
    return answer


def test_prior_gives_the_worked_numbers() -> None:
    step = prior(POOL)
    assert step.fixed_s == pytest.approx(0.01321, abs=5e-6)
    assert step.per_prefill_token_s == step.per_sequence_s == pytest.approx(43.7e-6, abs=5e-8)
    assert step.per_kv_token_s == pytest.approx(43.1e-9, abs=5e-11)


def test_capacity_gives_the_worked_numbers() -> None:
    answer = known(LEARNT)
    assert answer.warm_calls_per_s.mid == pytest.approx(6.19, abs=0.005)
    assert answer.cold_calls_per_s.mid == pytest.approx(2.07, abs=0.005)
    assert answer.warm_calls_per_s.low == pytest.approx(5.53, abs=0.005)
    assert answer.warm_calls_per_s.high == pytest.approx(6.91, abs=0.005)
    assert answer.limit is Limit.DECODE_BANDWIDTH


def test_prior_is_generic_where_figures_are_missing_or_absurd() -> None:
    assert prior(BARE) == prior(replace(POOL, gpu=None)) == prior(replace(POOL, gpus_per_replica=0)) == GENERIC
    assert prior(replace(POOL, model=Model("?", math.nan, 1, 1))) == GENERIC
    assert has_roofline(POOL)
    assert not has_roofline(BARE)


def test_more_gpus_make_a_step_faster_but_not_in_proportion() -> None:
    one, two = prior(replace(POOL, gpus_per_replica=1)), prior(replace(POOL, gpus_per_replica=2))
    assert 1 < one.per_kv_token_s / two.per_kv_token_s < 2


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.8])
@pytest.mark.parametrize("prefill_tokens_per_s", [0.0, 4000.0])
def test_learns_the_scale_of_the_step_time(scale: float, prefill_tokens_per_s: float) -> None:
    estimate = learn(None, [steps(scale, 40, prefill_tokens_per_s)] * 30)
    assert math.exp(estimate.log_scale_mean) == pytest.approx(scale, rel=0.02)
    assert estimate.observations == 30


def test_learns_without_any_figures_from_a_generic_prior() -> None:
    windows = [steps(0.15, 40, pool=BARE)] * 30
    assert math.exp(learn(None, windows, BARE).log_scale_mean) == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize("nothing", [None, LEARNT])
def test_unknown_steps_or_lengths_change_nothing(nothing: Estimate | None) -> None:
    assert update(nothing, POOL, Unknown("no steps"), LOAD) is nothing
    assert update(nothing, POOL, steps(1, 40), Unknown("no calls")) is nothing
    for broken in (math.nan, math.inf, 0.0, -1.0):
        assert update(nothing, POOL, Steps(40, broken, 0), LOAD) is nothing


def test_a_freak_window_is_rejected_and_only_widens_the_estimate() -> None:
    after = learn(LEARNT, [steps(30, 40)])
    assert after == replace(LEARNT, log_scale_variance=2 * LEARNT.log_scale_variance)


@pytest.mark.parametrize("factor", [0.05, 0.3, 3.0, 20.0])
def test_a_lasting_change_is_let_in_after_a_few_rejections(factor: float) -> None:
    before = learn(None, [steps(1.0, 40)] * 40)
    after = before
    rejected = 0
    while after.observations == before.observations:
        after = learn(after, [steps(factor, 40)])
        rejected += 1
    assert rejected <= 10
    after = learn(after, [steps(factor, 40)] * 30)
    assert math.exp(after.log_scale_mean) == pytest.approx(factor, rel=0.05)


def test_variance_has_a_floor() -> None:
    assert learn(None, [steps(1.0, 40)] * 1000).log_scale_variance == pytest.approx(0.05**2)


def test_a_quiet_night_unlearns_nothing() -> None:
    day = learn(None, [steps(1.5, 80)] * 40)
    night = learn(day, [steps(0.7, 1.2)] * 2000)
    assert night == day


def test_a_gross_change_is_let_in_even_at_night() -> None:
    day = learn(None, [steps(1.0, 80)] * 40)
    night = learn(day, [steps(200, 1.2)] * 40)
    assert night.log_scale_mean > math.log(5)


def test_a_first_larger_batch_is_not_taken_for_a_freak() -> None:
    quiet = learn(None, [steps(0.5, 1.5)] * 40)
    busy = learn(quiet, [steps(1.2, 30)])
    assert busy.largest_batch == 30
    assert math.exp(busy.log_scale_mean) == pytest.approx(1.2, rel=0.1)


def test_knowledge_of_small_batches_is_not_narrow_and_of_large_ones_is() -> None:
    assert not narrow(known(learn(None, [steps(1.0, 3)] * 40)).warm_calls_per_s)
    assert narrow(known(learn(None, [steps(1.0, 60)] * 40)).warm_calls_per_s)


def test_names_what_limits_a_replica() -> None:
    assert known(LEARNT, kv=300_000).limit is Limit.KV_MEMORY
    assert known(LEARNT, kv=1.2e6).limit is Limit.DECODE_BANDWIDTH
    assert known(LEARNT, slo=replace(SLO, tpot_s=10.0)).limit is Limit.BATCH_SIZE
    assert known(LEARNT, load=replace(LOAD, output_tokens_per_call=8)).limit is Limit.PREFILL_COMPUTE


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
        (LEARNT, replace(SLO, tpot_s=math.nan), LOAD, "the TPOT limit is not a positive number"),
    ],
)
def test_says_why_it_does_not_know(estimate: Estimate | None, slo: Slo, load: Load | Unknown, reason: str) -> None:
    answer = capacity(estimate, POOL, slo, load, None)
    assert isinstance(answer, Unknown)
    assert answer.reason.startswith(reason)


def test_a_lone_call_meets_the_engine_of_the_estimate() -> None:
    lone = unloaded(replace(LEARNT, log_scale_mean=math.log(2)), POOL, LOAD)
    assert isinstance(lone, Unloaded)
    assert lone.tpot_s == pytest.approx(2 * 0.01352, abs=1e-4)
    assert lone.ttft_s == pytest.approx(2 * (0.01321 + 600 * 43.67e-6), abs=1e-4)
    assert isinstance(unloaded(None, POOL, LOAD), Unknown)


def test_two_captured_engines_of_one_kind_are_estimated_alike() -> None:
    """Windows of 15 s from two real engines, quiet and noisy but for a burst: their busy hours must decide."""
    estimates: dict[str, Estimate | None] = {"vllm-0": None, "vllm-1": None}
    busy: dict[str, tuple[Steps, Load]] = {}
    with CAPTURED.open() as lines:
        for row in csv.DictReader(lines):
            pod, number = row.pop("pod"), {name: float(text) for name, text in row.items()}
            lengths = Load(
                number["calls_per_s"],
                number["prompt_tokens_per_call"],
                number["output_tokens_per_call"],
                number["hit_ratio"],
            )
            window = Steps(number["batch"], number["itl_s"], number["prefill_tokens_per_s"])
            estimates[pod] = update(estimates[pod], BARE, window, lengths)
            if pod not in busy or window.batch > busy[pod][0].batch:
                busy[pod] = (window, lengths)
    scales = []
    for pod, estimate in estimates.items():
        assert estimate is not None
        window, lengths = busy[pod]
        assert estimate.largest_batch == window.batch
        context = lengths.prompt_tokens_per_call + lengths.output_tokens_per_call / 2
        decode_s = GENERIC.fixed_s + window.batch * (GENERIC.per_sequence_s + GENERIC.per_kv_token_s * context)
        prefill_s = GENERIC.per_prefill_token_s * window.prefill_tokens_per_s * window.itl_s
        scales.append(math.exp(estimate.log_scale_mean))
        assert scales[-1] * (decode_s + prefill_s) == pytest.approx(window.itl_s, rel=0.35)
    assert max(scales) / min(scales) < 1.4


ANY_ESTIMATE = st.none() | st.from_type(Estimate)
ANY_LOAD = st.from_type(Load) | st.from_type(Unknown)


@given(ANY_ESTIMATE, st.from_type(Pool), st.from_type(Steps) | st.from_type(Unknown), ANY_LOAD)
def test_update_is_total(estimate: Estimate | None, pool: Pool, seen: Steps | Unknown, load: Load | Unknown) -> None:
    after = update(estimate, pool, seen, load)
    assert after is estimate or after is not None


@given(st.from_type(Pool))
def test_prior_is_total_and_positive(pool: Pool) -> None:
    step = prior(pool)
    assert isinstance(step, StepTime)
    assert min(step.fixed_s, step.per_prefill_token_s, step.per_sequence_s, step.per_kv_token_s) > 0


LOADS = st.builds(Load, st.floats(0, 1e5), st.floats(0, 2e5), st.floats(1, 1e5), st.floats(0, 1))
ESTIMATES = st.builds(Estimate, st.floats(-3, 3), st.floats(0.0025, 4), st.floats(1, 256), st.integers(1, 1000))
SLOS = st.builds(Slo, st.floats(0.1, 60), st.floats(1e-4, 10), st.just(95.0), st.just(0.99))
KV = st.none() | st.floats(1e3, 1e8)


@given(ANY_ESTIMATE, st.from_type(Pool), st.from_type(Slo), ANY_LOAD, st.none() | st.floats())
def test_capacity_is_total(
    estimate: Estimate | None, pool: Pool, slo: Slo, load: Load | Unknown, kv: float | None
) -> None:
    assert isinstance(capacity(estimate, pool, slo, load, kv), Capacity | Unknown)
    assert isinstance(unloaded(estimate, pool, load), Unloaded | Unknown)


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
    for hard in (
        capacity(replace(estimate, log_scale_mean=estimate.log_scale_mean + math.log(factor)), POOL, slo, load, kv),
        capacity(estimate, POOL, slo, replace(load, prompt_tokens_per_call=load.prompt_tokens_per_call * factor), kv),
        capacity(estimate, POOL, slo, replace(load, hit_ratio=load.hit_ratio / factor), kv),
        capacity(estimate, POOL, replace(slo, tpot_s=slo.tpot_s / factor), load, kv),
        capacity(estimate, POOL, slo, load, 5000.0) if kv is None else easy,
    ):
        if isinstance(hard, Capacity):
            assert isinstance(easy, Capacity)
            assert hard.warm_calls_per_s.mid <= easy.warm_calls_per_s.mid * (1 + 1e-9)


@given(st.floats(0.25, 4), st.floats(1, 200), st.floats(0, 2000), st.integers(1, 30))
def test_never_more_certain_than_the_floor_nor_less_than_the_prior(
    scale: float, batch: float, prefill_tokens_per_s: float, count: int
) -> None:
    estimate = learn(None, [steps(scale, batch, prefill_tokens_per_s)] * count)
    assert 0.05**2 <= estimate.log_scale_variance <= math.log(2) ** 2
    assert abs(estimate.log_scale_mean) <= abs(math.log(scale)) + 1e-9


@given(st.from_type(Interval))
def test_narrow_is_total_and_only_of_ordered_positive_intervals(interval: Interval) -> None:
    if narrow(interval):
        assert 0 < interval.low <= interval.mid <= interval.high <= 3 * interval.low
    assert not narrow(Interval(0.0, interval.mid, interval.high))
