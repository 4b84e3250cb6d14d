"""The calibration: the fit finds what made the data, sees one part of the capture only, and is judged on the other."""

import math
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.calibrate import CAPTURE, silicon_errors
from bench.calibration.capture import LoadRun, Part, percentile, read
from bench.calibration.compare import Compared, errors
from bench.calibration.fit import START, fit, mean_itl_s, mean_queue_s
from bench.calibration.replay import Constants, mean_replay
from bench.calibration.silicon import Beside, Latency, Point, batch, installed, of_silicon, steady
from tests.servers import ROOT, require

TRUTH = Constants(step_s=0.003, token_s=6e-5, sequence_s=5e-4, call_s=0.008)
SEEDS = 1


def load(name: str, arrivals: list[int], prompt: tuple[int, int], output: int, salvo: bool = False) -> LoadRun:
    """A load that the plant itself has answered. prompt: tokens that calls share, and tokens of their own."""
    blank = LoadRun(
        name,
        Part.FITTED,
        "engine-0",
        np.arange(len(arrivals) + 1, dtype=float),
        np.array(arrivals),
        salvo,
        *prompt,
        output,
        None,  # type: ignore[arg-type] - filled on the next line
    )
    return replace(blank, measured=mean_replay(blank, TRUTH, SEEDS))


@pytest.fixture(scope="module")
def made() -> list[LoadRun]:
    return [
        load("quiet", [1] * 12, (300, 31), 48),
        load("busy", [6] * 12, (300, 31), 48),
        load("prompts", [2] * 12, (0, 1500), 20),
        load("burst", [0, 100] + [0] * 25, (300, 31), 96, salvo=True),
    ]


@pytest.fixture(scope="module")
def captured() -> tuple[LoadRun, ...]:
    require("promtool")
    return read(CAPTURE)


def test_fit_recovers_the_constants_that_made_the_data(made: list[LoadRun]) -> None:
    found = fit(made, SEEDS, noise=0.01).constants
    for name, value in asdict(TRUTH).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.15), name


def test_fit_stays_near_the_arithmetic_where_nothing_tells(made: list[LoadRun]) -> None:
    found = fit(made[:1], SEEDS)
    assert 1 / 3 < found.constants.sequence_s / START.sequence_s < 3
    assert found.spread.sequence_s > fit(made, SEEDS).spread.sequence_s


def test_without_loads_there_is_no_fit_and_no_error() -> None:
    with pytest.raises(ValueError, match="no load to fit"):
        fit([], SEEDS)
    with pytest.raises(ValueError, match="no load to compare"):
        errors([])


def test_a_perfect_prediction_has_no_error(made: list[LoadRun]) -> None:
    left = errors([Compared(run, run.measured) for run in made])
    assert left.itl == left.ttft == left.throughput == left.hit_ratio == left.preemptions == 0.0
    assert left.twin_itl is None


def test_errors_are_fractions_of_what_was_measured(made: list[LoadRun]) -> None:
    slow = [Compared(run, replace(run.measured, itl_sum_s=1.2 * run.measured.itl_sum_s)) for run in made]
    assert errors(slow).itl == pytest.approx(0.2)
    assert errors(slow).ttft == 0.0


def test_every_recorded_call_arrives_in_the_replay(captured: tuple[LoadRun, ...]) -> None:
    for run in captured:
        assert run.arrivals.sum() == pytest.approx(run.measured.calls, abs=4), run.name
        assert run.arrivals.min() >= 0
        assert run.output_tokens * run.measured.calls == pytest.approx(run.measured.output_tokens, rel=0.25), run.name
    assert {run.part for run in captured} == set(Part)
    assert sum(run.measured.preemptions for run in captured if run.part is Part.PREDICTED) == 27


def test_errors_are_finite_on_the_part_that_was_not_fitted(captured: tuple[LoadRun, ...]) -> None:
    found = fit([run for run in captured if run.part is Part.FITTED], SEEDS)
    held_out = [run for run in captured if run.part is Part.PREDICTED]
    left = errors([Compared(run, mean_replay(run, found.constants, SEEDS)) for run in held_out])
    assert all(value is None or math.isfinite(value) for value in asdict(left).values())
    # Fitted nowhere, and clear: what is cached of a prompt follows from the plant's cache alone.
    assert left.hit_ratio < 0.02


def test_preemptions_follow_from_memory_and_not_from_speed(captured: tuple[LoadRun, ...]) -> None:
    full = next(run for run in captured if run.name == "KV full")
    assert mean_replay(full, START, SEEDS).preemptions > 0
    steady_load = next(run for run in captured if run.name == "steady")
    assert mean_replay(steady_load, START, SEEDS).preemptions == 0


def test_a_folder_that_is_no_capture_gives_one_sentence(tmp_path: object) -> None:
    command = [sys.executable, "-m", "bench.calibrate", "--capture", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert len(ran.stdout.strip().splitlines()) == 1
    assert "nothing to calibrate by" in ran.stdout
    assert ran.stderr == ""


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), st.floats(0.01, 0.99))
def test_percentiles_lie_within_the_bucket_that_holds_them(counts: list[int], level: float) -> None:
    bounds = (1.0, 2.0, 4.0)
    value = percentile(np.array(counts, dtype=float), bounds, level)
    below = np.cumsum(counts) / sum(counts)
    place = int(np.searchsorted(below, level))
    edges = (0.0, *bounds, bounds[-1])
    assert edges[place] - 1e-9 <= value <= edges[place + 1] + 1e-9


def test_percentile_of_nothing_is_unknown() -> None:
    assert math.isnan(percentile(np.zeros(4), (1.0, 2.0, 4.0), 0.5))


def test_a_batch_that_decodes_takes_the_step_that_the_h100_arithmetic_gives() -> None:
    # (70e9 B of weights + 1,152 tokens of 327,680 B) / 1.0e13 B/s + 4 ms + 0.02 ms
    assert batch(Point(False, 1024, 256, 1)).itl_s == pytest.approx(0.01106, rel=0.01)


def test_a_steady_point_has_the_wanted_number_of_calls_under_way() -> None:
    few, many = steady(Point(True, 1024, 64, 4)), steady(Point(True, 1024, 64, 32))
    assert few.itl_s < many.itl_s
    assert few.ttft_s is not None
    assert many.ttft_s is not None


def test_median_errors_are_over_the_points_that_have_a_value() -> None:
    rows = [
        Beside(Point(False, 1, 1, 1), Latency(1.0, 1.0), Latency(1.1, 0.8)),
        Beside(Point(False, 1, 1, 8), Latency(None, 1.0), Latency(None, 1.4)),
    ]
    found = silicon_errors(rows)
    assert found["aiconfigurator_itl_error"] == pytest.approx(0.3)
    assert found["aiconfigurator_ttft_error"] == pytest.approx(0.1)
    assert "aiconfigurator_steady_ttft_error" not in found


@pytest.mark.skipif(not installed(), reason="aiconfigurator is not installed; get it by: pip install '.[bench]'")
def test_the_plant_decodes_on_h100s_as_the_silicon_does() -> None:
    point = Point(False, 1024, 256, 1)
    assert batch(point).itl_s == pytest.approx(of_silicon(point).itl_s, rel=0.15)


def test_the_queue_of_a_burst_is_in_the_engine(made: list[LoadRun]) -> None:
    assert mean_queue_s(made[3].measured) > 100 * mean_itl_s(made[3].measured)
