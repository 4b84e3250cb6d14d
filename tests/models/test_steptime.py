"""A step's time begins as a roofline and is learnt in the combination that telemetry shows."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from engines import BARE, CONTEXT_TOKENS, LEARNT, LOAD, POOL, learn, steps
from hypothesis import given
from hypothesis import strategies as st

from models.capacity import update
from models.steptime import GENERIC, has_roofline, prior, regressors, sane, unlearnt
from models.types import Estimate, Load, Model, Pool, Steps, StepTime, Unknown

CAPTURED = Path(__file__).parents[1] / "data" / "vllm_cpu" / "steps.csv"


def predicted_s(estimate: Estimate, window: Steps, pool: Pool = POOL, context: float = CONTEXT_TOKENS) -> float:
    row = regressors(prior(pool), window, context)
    assert row is not None
    return sum(scale * term for scale, term in zip(estimate.scales, row, strict=True))


def test_prior_gives_the_worked_numbers() -> None:
    step = prior(POOL)
    assert step.fixed_s == pytest.approx(0.01321, abs=5e-6)
    assert step.per_prefill_token_s == step.per_sequence_s == pytest.approx(43.7e-6, abs=5e-8)
    assert step.per_kv_token_s == pytest.approx(43.1e-9, abs=5e-11)
    assert steps(1.0, 40, 900).itl_s == pytest.approx(0.0269, abs=5e-5)


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
def test_learns_what_a_step_takes_at_the_loads_it_saw(scale: float, prefill_tokens_per_s: float) -> None:
    windows = [steps(scale, batch, prefill_tokens_per_s) for batch in (20, 40, 60)] * 20
    estimate = learn(None, windows)
    assert estimate.observations == 60
    for window in windows[:3]:
        assert predicted_s(estimate, window) == pytest.approx(window.itl_s, rel=0.03)


def test_learns_without_any_figures_from_a_generic_prior() -> None:
    window = steps(0.15, 40, pool=BARE)
    assert predicted_s(learn(None, [window] * 60, BARE), window, BARE) == pytest.approx(window.itl_s, rel=0.05)


@pytest.mark.parametrize("nothing", [None, LEARNT])
def test_unknown_steps_or_lengths_change_nothing(nothing: Estimate | None) -> None:
    assert update(nothing, POOL, Unknown("no steps"), LOAD) is nothing
    assert update(nothing, POOL, steps(1, 40), Unknown("no calls")) is nothing
    for broken in (math.nan, math.inf, 0.0, -1.0):
        assert update(nothing, POOL, Steps(40, broken, 0), LOAD) is nothing


def test_a_freak_window_is_rejected_and_only_widens_the_estimate() -> None:
    after = learn(LEARNT, [steps(30, 40)])
    assert after == replace(LEARNT, covariance=tuple(2 * cell for cell in LEARNT.covariance))


@pytest.mark.parametrize("factor", [0.3, 3.0, 20.0])
def test_a_lasting_change_is_let_in_after_a_few_rejections(factor: float) -> None:
    before = learn(None, [steps(1.0, 40)] * 40)
    after, windows = before, 0
    while after.observations == before.observations:
        after, windows = learn(after, [steps(factor, 40)]), windows + 1
    assert windows <= 20
    window = steps(factor, 40)
    assert predicted_s(learn(after, [window] * 40), window) == pytest.approx(window.itl_s, rel=0.1)


def test_an_old_shape_of_estimate_is_begun_anew() -> None:
    damaged = Estimate((1.0,), (0.04,), 30.0, 500)
    assert not sane(damaged)
    assert learn(damaged, [steps(1.0, 40)]).observations == 1


def test_the_second_half_of_a_real_capture_is_predicted_from_its_first() -> None:
    """Windows of 15 s of two real engines, of which we know no figures: half teach, half are predicted."""
    errors: list[float] = []
    rows: dict[str, list[tuple[Steps, Load]]] = {}
    with CAPTURED.open() as lines:
        for row in csv.DictReader(lines):
            pod, number = row.pop("pod"), {name: float(text) for name, text in row.items()}
            lengths = Load(*(number[name] for name in ("calls_per_s", "prompt_tokens_per_call")), 48.0, 0.5)
            lengths = replace(
                lengths, output_tokens_per_call=number["output_tokens_per_call"], hit_ratio=number["hit_ratio"]
            )
            window = Steps(number["batch"], number["itl_s"], number["prefill_tokens_per_s"])
            rows.setdefault(pod, []).append((window, lengths))
    for windows in rows.values():
        estimate: Estimate | None = None
        half = len(windows) // 2
        for window, lengths in windows[:half]:
            estimate = update(estimate, BARE, window, lengths)
        assert estimate is not None
        for window, lengths in windows[half:]:
            context = lengths.prompt_tokens_per_call + lengths.output_tokens_per_call / 2
            errors.append(abs(math.log(predicted_s(estimate, window, BARE, context) / window.itl_s)))
    assert sorted(errors)[len(errors) // 2] < CAPTURE_MEDIAN


CAPTURE_MEDIAN = math.log(2.0)
"""Noisy 15 s windows of a shared CPU with few calls each: within a factor of 2 in the median, no better."""

ANY_LOAD = st.from_type(Load) | st.from_type(Unknown)


@given(st.none() | st.from_type(Estimate), st.from_type(Pool), st.from_type(Steps) | st.from_type(Unknown), ANY_LOAD)
def test_update_is_total(estimate: Estimate | None, pool: Pool, seen: Steps | Unknown, load: Load | Unknown) -> None:
    after = update(estimate, pool, seen, load)
    assert after is estimate or after is not None


@given(st.from_type(Pool))
def test_prior_is_total_and_positive(pool: Pool) -> None:
    step = prior(pool)
    assert isinstance(step, StepTime)
    assert min(step.fixed_s, step.per_prefill_token_s, step.per_sequence_s, step.per_kv_token_s) > 0
    assert sane(unlearnt(pool))


@given(st.floats(0.25, 4), st.floats(1, 200), st.floats(0, 2000), st.integers(1, 30))
def test_an_estimate_stays_one(scale: float, batch: float, prefill_tokens_per_s: float, count: int) -> None:
    estimate = learn(None, [steps(scale, batch, prefill_tokens_per_s)] * count)
    assert sane(estimate)
    first = unlearnt(POOL).covariance
    if estimate.observations == count:
        assert all(estimate.covariance[5 * term] <= first[5 * term] * (1 + 1e-9) for term in range(4))
