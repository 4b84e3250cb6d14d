"""The demo's day, as values: what is served where, how its load goes, and what goes wrong.

A day's load in three hours, from a morning to the next one. Only the load's shape is compressed: engines start, callers
wait and caches are lost at their own speed, so that ramps are eight times as steep as in life and a start, 150 s, is
as long as it is.

    rate(t) = peak * share(t) * (burst factor while it lasts)         tasks/s; share: linear between `CURVE`'s points
    arrivals  a Poisson number within each second, at uniform moments of it, drawn once from the seed

All runs get the same arrivals; what each task asks for is drawn by the plant, so it differs between runs in detail.

Fixed fleets, those without a controller, as they are sized in most places: a load test says what a replica sustains,
0.7 of it is planned on, for the highest load of an ordinary day, or, where GPUs are scarce, for its mean (bursts and
losses are not ordinary):

    replicas = ceil(load, tasks/s * calls per task * share of the pool / (0.7 * calls/s of a replica in the load test))

Load test (this plant, seed 1, four replicas of one pool, an hour of steady load after an hour of warming up): the
highest load with 95 % of calls within the SLO was 5.4 calls/s per replica for H100 and 1.2 for L40S. Calls per task:
chat 0.7 of tasks with 1, coding agents 0.3 with 15: 5.2. Worked: 6.6 * 5.2 * 0.86 / (0.7 * 5.4) = 7.8: 8 replicas for
the peak; the mean is 0.59 of it: 4.6, 5 replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import assert_never

import numpy as np

from models.fleetsim.scenario import CHAT, COPILOT, H100_X4, L40S_X4, Hardware, PoolOf, ServiceOf

HEADROOM = 0.7
SLO_TTFT_S = 2.0
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Tested:
    """A pool before it is sized: its share of the traffic (0-1), its places, and what a replica sustained, calls/s."""

    name: str
    hardware: Hardware
    hardware_name: str
    share: float
    places: int
    calls_per_s: float


FAST = Tested("assistant-h100", H100_X4, "H100", 0.86, 14, 5.4)
CHEAP = Tested("assistant-l40s", L40S_X4, "L40S", 0.14, 10, 1.2)
PROFILES = (replace(CHAT, share=0.7), replace(COPILOT, share=0.3))
NAMES = {"chat": "chat", "copilot": "coding agents"}
"""A task's kind, in the plant's word and in the table's."""

CURVE = (
    (0.00, 0.35), (0.10, 0.55), (0.20, 0.95), (0.28, 1.00), (0.36, 0.85), (0.45, 0.95), (0.55, 0.75), (0.65, 0.50),
    (0.75, 0.20), (0.92, 0.15), (1.00, 0.35),
)  # fmt: skip
"""The day: (part of it that has passed, share of the peak's load), from a morning over noon and a night to the next."""


class Sizing(StrEnum):
    """What a fleet is sized for: the highest load of an ordinary day, or its mean."""

    PEAK = "peak"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Burst:
    """Traffic is multiplied from start_s to end_s (virtual s)."""

    start_s: float
    end_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Loss:
    """Every other place of a pool (a zone) is lost at start_s and can be used again at end_s (virtual s)."""

    pool: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DayOf:
    """A day. Lengths in virtual seconds, whole minutes; the peak in tasks/s."""

    length_s: float
    peak_tasks_per_s: float
    burst: Burst
    loss: Loss
    seed: int


def whole_day(seed: int) -> DayOf:
    """The demo's day: three hours, a burst at noon, half of the fast pool lost in the afternoon for 20 minutes."""
    return DayOf(10_800.0, 6.6, Burst(2_700.0, 3_060.0, 1.5), Loss(FAST.name, 4_800.0, 6_000.0), seed)


def short_day(seed: int) -> DayOf:
    """Half an hour: the same curve, six times as steep, with a shorter burst and loss. For tests and a first look."""
    return DayOf(1_800.0, 6.6, Burst(480.0, 600.0, 1.5), Loss(FAST.name, 780.0, 960.0), seed)


def sized() -> tuple[Tested, ...]:
    """The pools, in the order in which a run's minutes have them."""
    return FAST, CHEAP


def calls_per_task() -> float:
    """The mean number of calls that a task makes."""
    return sum(profile.share * profile.steps_mean for profile in PROFILES) / sum(p.share for p in PROFILES)


def replicas(pool: Tested, day: DayOf, sizing: Sizing) -> int:
    """The fixed size of a pool, by the rule above."""
    match sizing:
        case Sizing.PEAK:
            share = max(share for _, share in CURVE)
        case Sizing.MEAN:
            share = mean_share()
        case _:
            assert_never(sizing)
    return math.ceil(share * day.peak_tasks_per_s * calls_per_task() * pool.share / (HEADROOM * pool.calls_per_s))


def mean_share() -> float:
    """The day's mean load, as a share of its peak, without the burst."""
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(CURVE))


def services(day: DayOf, sizing: Sizing) -> tuple[ServiceOf, ...]:
    """What a run begins with: a fleet, and every arrival of the day."""
    pools = tuple(
        PoolOf(pool.name, pool.hardware, replicas(pool, day, sizing), pool.places, weight=pool.share, zones=2)
        for pool in sized()
    )
    return (
        ServiceOf("assistant", pools, (0.0,), arrivals_s=arrivals_s(day), profiles=PROFILES, slo_ttft_s=SLO_TTFT_S),
    )


def rates(day: DayOf) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Tasks/s in each second of the day."""
    seconds = np.arange(int(day.length_s))
    parts, shares = zip(*CURVE, strict=True)
    curve = np.interp((seconds + 0.5) / day.length_s, parts, shares)
    bursting = (seconds >= day.burst.start_s) & (seconds < day.burst.end_s)
    made: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        day.peak_tasks_per_s * curve * np.where(bursting, day.burst.factor, 1.0)
    )
    return made


def arrivals_s(day: DayOf) -> tuple[float, ...]:
    """The moments at which tasks arrive, virtual s, in order."""
    random = np.random.default_rng(day.seed)
    counts = random.poisson(rates(day))
    moments = np.repeat(np.arange(len(counts)), counts) + random.random(int(counts.sum()))
    return tuple(float(moment) for moment in np.sort(moments))
