"""The table's arithmetic: what a run was worth, from what was seen of it.

    task success      succeeded / (succeeded + failed)              tasks that ended, not those under way
    SLO attainment    calls that ended within the SLO / calls that ended
    GPU-hours         sum over pools of the hours in which replicas held GPUs (starting and draining ones too)
    cost              sum over pools of GPU-hours * $ per GPU-hour
    per 1,000         1000 * cost / succeeded tasks
    recovery          from the loss to the first of five minutes in a row with `GOAL` of calls within the SLO, counted
                      from the first bad minute; 0 where none of the ten minutes after the loss was bad, none where the
                      day ends before

Worked: bad minutes end 60, 120 and 180 s after the loss, the next five are good: recovered after 180 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.demo.day import GOAL, STEADY, Minute, Run, Tasks
from controller.demo.scenario import MINUTE_S, DayOf

SHOCK_MINUTES = 10


@dataclass(frozen=True, slots=True)
class Score:
    """One column of the table. Shares of 0-1, or None of nothing; recovery_s is None where there was none."""

    task_success: float | None
    success_by_kind: tuple[tuple[str, float | None], ...]
    slo_attainment: float | None
    minutes_out_of_slo: int
    gpu_hours: float
    usd: float
    usd_per_1000_tasks: float | None
    recovery_s: float | None
    tasks_succeeded: int
    tasks_failed: int


def score(run: Run, day: DayOf) -> Score:
    """What a run was worth."""
    succeeded, failed = sum(t.succeeded for t in run.tasks), sum(t.failed for t in run.tasks)
    ended = sum(minute.ended for minute in run.minutes)
    usd = sum(pool.gpu_hours * pool.usd_per_gpu_h for pool in run.pools)
    return Score(
        task_success=_share(succeeded, succeeded + failed),
        success_by_kind=tuple((t.kind, success(t)) for t in run.tasks),
        slo_attainment=_share(sum(minute.in_slo for minute in run.minutes), ended),
        minutes_out_of_slo=sum(minute.good_share < GOAL for minute in run.minutes),
        gpu_hours=sum(pool.gpu_hours for pool in run.pools),
        usd=usd,
        usd_per_1000_tasks=1000 * usd / succeeded if succeeded else None,
        recovery_s=recovery_s(run.minutes, day.loss.start_s),
        tasks_succeeded=succeeded,
        tasks_failed=failed,
    )


def success(tasks: Tasks) -> float | None:
    """Share of a kind's tasks that succeeded."""
    return _share(tasks.succeeded, tasks.succeeded + tasks.failed)


def recovery_s(minutes: tuple[Minute, ...], lost_s: float) -> float | None:
    """Seconds from a loss until the SLO holds again; 0 where it was never broken, None where it stayed broken."""
    after = [minute for minute in minutes if minute.at_s > lost_s]
    good = [minute.good_share >= GOAL for minute in after]
    shock = next((place for place, fine in enumerate(good[:SHOCK_MINUTES]) if not fine), None)
    if shock is None:
        return 0.0
    for place in range(shock, len(good) - STEADY + 1):
        if all(good[place : place + STEADY]):
            return after[place].at_s - MINUTE_S - lost_s
    return None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
