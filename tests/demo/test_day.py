"""The simulated demo's arithmetic, from the plant's own books."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from controller.demo.day import ENDINGS, STEADY, Course, Minute, Run, Side
from controller.demo.scenario import (
    MINUTE_S,
    Sizing,
    arrivals_s,
    calls_per_task,
    mean_share,
    rates,
    replicas,
    short_day,
    sized,
    whole_day,
)
from controller.demo.score import recovery_s, score
from models.fleetsim.plant import WITHOUT_GPUS
from models.fleetsim.recount import recount

DAY = short_day(3)

pytestmark = pytest.mark.timeout(900)  # four half hours, on machines that are busy with other work


@pytest.fixture(scope="module")
def played() -> dict[Side, tuple[Course, Run]]:
    courses = {side: Course(side, DAY) for side in (Side.MEAN, Side.TRIMTAB)}
    return {side: (course, course.play()) for side, course in courses.items()}


def gpu_seconds_by_changes(course: Course) -> float:
    """From the plant's list of changes of state alone."""
    plant, total_s = course.plant, 0.0
    since: dict[int, float] = {}
    for change in plant.changes:
        gpus = plant.pools[int(plant.world.replicas[change.replica]["pool"])].hardware.gpus
        if change.before in WITHOUT_GPUS and change.after not in WITHOUT_GPUS:
            since[change.replica] = change.at_s
        elif change.before not in WITHOUT_GPUS and change.after in WITHOUT_GPUS:
            total_s += gpus * (change.at_s - since.pop(change.replica))
    for replica, at_s in since.items():
        gpus = plant.pools[int(plant.world.replicas[replica]["pool"])].hardware.gpus
        total_s += gpus * (plant.now_s - at_s)
    return total_s


@pytest.mark.parametrize("side", [Side.MEAN, Side.TRIMTAB])
def test_the_table_is_what_the_plants_books_say(played: dict[Side, tuple[Course, Run]], side: Side) -> None:
    course, run = played[side]
    plant, found = course.plant, score(run, DAY)
    plant.settle()
    assert recount(plant) == ()
    assert plant.now_s == DAY.length_s
    counts, tallies = plant.world.counts, plant.world.tallies
    ended = sum(counts[name].sum() for name in ENDINGS)
    assert found.slo_attainment == pytest.approx(counts["in_slo"].sum() / ended)
    succeeded, failed = tallies["succeeded"].sum(), tallies["failed"].sum()
    assert (found.tasks_succeeded, found.tasks_failed) == (succeeded, failed)
    assert found.task_success == pytest.approx(succeeded / (succeeded + failed))
    assert found.gpu_hours == pytest.approx(gpu_seconds_by_changes(course) / 3600)
    prices = {pool.name: pool.hardware.usd_per_gpu_h for pool in plant.pools}
    assert found.usd == pytest.approx(sum(pool.gpu_hours * prices[pool.name] for pool in run.pools))
    assert found.usd_per_1000_tasks == pytest.approx(1000 * found.usd / succeeded)
    assert run.minutes[-1].usd == pytest.approx(found.usd)
    assert len(run.minutes) == DAY.length_s / MINUTE_S
    assert sum(minute.sent for minute in run.minutes) == counts["sent"].sum()


def test_all_runs_get_the_same_arrivals(played: dict[Side, tuple[Course, Run]]) -> None:
    started = {side: course.plant.world.tallies["started"].sum() for side, (course, _) in played.items()}
    assert set(started.values()) == {len(arrivals_s(DAY))}


def test_the_loop_acts_and_the_fixed_fleet_only_loses(played: dict[Side, tuple[Course, Run]]) -> None:
    _, fixed = played[Side.MEAN]
    _, steered = played[Side.TRIMTAB]
    assert fixed.ticks == 0
    assert steered.ticks == DAY.length_s / 15 + 1
    assert max(minute.held[0] for minute in fixed.minutes) == fixed.minutes[0].held[0]
    assert {told.kind.value for told in fixed.told} <= {"alarm", "over"}
    assert any(told.kind.value == "move" for told in steered.told)
    lost = next(minute for minute in fixed.minutes if minute.at_s == DAY.loss.start_s + MINUTE_S)
    assert lost.ready[0] < fixed.minutes[0].ready[0]


def test_a_run_is_the_same_bytes_again(played: dict[Side, tuple[Course, Run]]) -> None:
    for side, (_, run) in played.items():
        # Through pickle once, as both come out of the processes of the demo: equal values, equal bytes.
        again = Course(side, DAY).play()
        assert again == run
        assert pickle.dumps(pickle.loads(pickle.dumps(again))) == pickle.dumps(pickle.loads(pickle.dumps(run)))


def test_another_seed_is_another_day() -> None:
    assert arrivals_s(short_day(1)) == arrivals_s(short_day(1))
    assert arrivals_s(short_day(1)) != arrivals_s(short_day(2))


@pytest.mark.parametrize("day", [whole_day(1), short_day(1)])
def test_arrivals_follow_the_curve_the_burst_and_the_order(day) -> None:
    times, rate = np.array(arrivals_s(day)), rates(day)
    assert (np.diff(times) >= 0).all()
    assert len(times) == pytest.approx(rate.sum(), rel=0.03)
    start, end = int(day.burst.start_s), int(day.burst.end_s)
    assert rate[start] / rate[start - 1] == pytest.approx(day.burst.factor, rel=0.02)
    assert rate[end - 1] / rate[end] == pytest.approx(day.burst.factor, rel=0.02)
    quiet = np.concatenate((rate[:start], rate[end:]))
    assert quiet.max() <= day.peak_tasks_per_s
    assert np.append(quiet, rate[start:end] / day.burst.factor).mean() / day.peak_tasks_per_s == pytest.approx(
        mean_share(), rel=0.01
    )


def test_the_fixed_fleets_follow_their_rule() -> None:
    day = whole_day(1)
    assert calls_per_task() == pytest.approx(5.2)
    assert [replicas(pool, day, Sizing.PEAK) for pool in sized()] == [8, 6]
    assert [replicas(pool, day, Sizing.MEAN) for pool in sized()] == [5, 4]


def minutes(*good: bool) -> tuple[Minute, ...]:
    return tuple(
        Minute(60.0 * number, 10, 10, 10 if fine else 0, 10, None, None, (1,), (1,), 0.0)
        for number, fine in enumerate(good, 1)
    )


@pytest.mark.parametrize(
    ("good", "expected"),
    [
        ([True] * 20, 0.0),
        ([False] * 3 + [True] * 6, 180.0),
        ([True, False, False] + [True] * 5, 180.0),
        ([False, True, True, True, True, False] + [True] * STEADY, 360.0),
        ([False] * 3 + [True] * 4, None),
        ([False] * 20, None),
        ([True] * 12 + [False] * 3, 0.0),
    ],
)
def test_recovery_ends_with_five_good_minutes(good: list[bool], expected: float | None) -> None:
    assert recovery_s(minutes(*good), 0.0) == expected
