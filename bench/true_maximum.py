"""The plant's true maximum: the highest load that ten two-hour runs survive, each with a seed of its own.

A run survives where, after 20 minutes of warming up, at least the SLO's share of calls got their first token in time
(over the whole rest, and over its last ten minutes), where the mean time between tokens stayed within its limit, and
where no ten minutes had fewer than half of their calls in time (a collapse; the run ends there). Calls that were given
up count as late ones. The search bisects the rate of tasks in steps of `STEP`, and ends a load at the first seed lost.

Results are kept in a file, by scenario and by the source of the plant, because a search takes a minute or two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import models.fleetsim
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import ServiceOf

SEEDS = 10
FIRST_SEED = 1000
RUN_S = 7200.0
WARM_UP_S = 1200.0
CHECK_S = 600.0
STEP = 1.05
COLLAPSED_SHARE = 0.5

ABREAST = 2
"""Runs at a time: a lost one ends its load, and more would be begun for nothing."""

Jobs = Callable[[list["Run"]], list["Outcome"]]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be kept: first tokens within the service's own TTFT at this share, mean seconds between tokens."""

    in_time_share: float = 0.95
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a scenario, at its own rate of tasks."""

    service: ServiceOf
    seed: int
    goal: Goal
    run_s: float = RUN_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. calls_per_s counts finished calls of all replicas after the warm-up; itl_s is a mean."""

    survived: bool
    calls_per_s: float
    in_time_share: float
    itl_s: float
    hit_ratio: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Maximum:
    """The highest load survived, tasks/s of the fleet and calls/s of one replica, and how runs looked at it."""

    tasks_per_s: float
    calls_per_s: float
    itl_s: float
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counters of the whole fleet, ended processes left out (nothing dies here)."""

    finished: float
    in_time: float
    given_up: float
    tokens: float
    itl_sum_s: float
    queries: float
    hits: float

    def since(self, earlier: _Totals) -> _Totals:
        """What was counted since then."""
        now, then = asdict(self), asdict(earlier)
        return _Totals(**{name: now[name] - then[name] for name in now})

    def in_time_share(self) -> float:
        """Share of calls in time, of those that ended; 1 where none did."""
        ended = self.finished + self.given_up
        return self.in_time / ended if ended else 1.0

    def itl_s(self) -> float:
        """Mean seconds between tokens."""
        return self.itl_sum_s / self.tokens if self.tokens else 0.0


def play(run: Run) -> Outcome:
    """Play one run to its end, or to its collapse."""
    plant = Plant((run.service,), run.seed)
    at_start = before = _totals(plant)
    for end_s in np.arange(CHECK_S, run.run_s + 1.0, CHECK_S):
        plant.run(float(end_s))
        now = _totals(plant)
        if end_s <= WARM_UP_S:
            at_start = before = now
            continue
        if now.since(before).in_time_share() < COLLAPSED_SHARE:
            break
        last, before = now.since(before), now
    else:
        whole = now.since(at_start)
        kept = min(whole.in_time_share(), last.in_time_share()) >= run.goal.in_time_share
        return _outcome(kept and whole.itl_s() <= run.goal.tpot_s, whole, plant.now_s)
    return _outcome(False, now.since(at_start), plant.now_s)


def _outcome(survived: bool, whole: _Totals, now_s: float) -> Outcome:
    calls_per_s = whole.finished / max(now_s - WARM_UP_S, 1.0)
    hit_ratio = whole.hits / whole.queries if whole.queries else 0.0
    return Outcome(survived, calls_per_s, whole.in_time_share(), whole.itl_s(), hit_ratio, now_s)


def _totals(plant: Plant) -> _Totals:
    plant.settle()
    counts, rows = plant.world.counts, plant.world.replicas
    given_up = sum(float(counts[name].sum()) for name in ("timed_out", "refused", "overflowed", "unroutable"))
    return _Totals(
        float(counts["finished"].sum()),
        float(counts["in_slo"].sum()),
        given_up,
        float(plant.world.itl_counts.sum()),
        float(rows["itl_sum"].sum()),
        float(rows["prefix_queries"].sum()),
        float(rows["prefix_hits"].sum()),
    )


@dataclass(frozen=True, slots=True)
class Search:
    """One search: `at` makes the scenario of a rate of tasks; `guess` is where it begins."""

    at: Callable[[float], ServiceOf]
    guess_tasks_per_s: float
    goal: Goal
    seeds: int = SEEDS
    run_s: float = RUN_S

    def find(self, jobs: Jobs) -> Maximum:
        """The highest rate on the grid of `STEP` around the guess that all seeds survive."""
        known: dict[int, tuple[Outcome, ...] | None] = {}

        def survived(place: int) -> tuple[Outcome, ...] | None:
            if place not in known:
                known[place] = self._survive(self.guess_tasks_per_s * STEP**place, jobs)
            return known[place]

        low = high = 0
        stride = 4
        while survived(low) is None:
            high, low = low, low - stride
            stride *= 2
            if stride > 256:
                raise ValueError("no load was survived: the scenario cannot keep its SLO at all")
        stride = 4
        while high <= low or survived(high) is not None:
            low = max(low, high)
            high = low + stride
            stride *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if survived(middle) is not None else (low, middle)
        outcomes = survived(low)
        assert outcomes is not None
        rate = self.guess_tasks_per_s * STEP**low
        replicas = sum(pool.replicas for pool in self.at(rate).pools)
        return Maximum(
            rate,
            float(np.mean([o.calls_per_s for o in outcomes])) / replicas,
            float(np.mean([o.itl_s for o in outcomes])),
            float(np.mean([o.hit_ratio for o in outcomes])),
        )

    def _survive(self, tasks_per_s: float, jobs: Jobs) -> tuple[Outcome, ...] | None:
        outcomes: list[Outcome] = []
        service = self.at(tasks_per_s)
        for first in range(0, self.seeds, ABREAST):
            seeds = range(first, min(first + ABREAST, self.seeds))
            found = jobs([Run(service, FIRST_SEED + seed, self.goal, self.run_s) for seed in seeds])
            if not all(outcome.survived for outcome in found):
                return None
            outcomes.extend(found)
        return tuple(outcomes)


def plant_mark() -> str:
    """A short mark of the plant's source: its results are another plant's after any edit."""
    digest = hashlib.sha256()
    for file in sorted(Path(models.fleetsim.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Kept:
    """Maxima that were found before, in a JSON file; a file that can't be read is begun anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            loaded = json.loads(file.read_text(encoding="utf-8"))
            self._known = {str(key): Maximum(**value) for key, value in loaded.items()}
        except (OSError, ValueError, TypeError):
            self._known = {}

    def find(self, search: Search, jobs: Jobs) -> Maximum:
        """The kept maximum of this very search, or the one found now."""
        what = repr((search.at(1.0), search.guess_tasks_per_s, search.goal, search.seeds, search.run_s, plant_mark()))
        key = hashlib.sha256(what.encode()).hexdigest()[:24]
        if key not in self._known:
            self._known[key] = search.find(jobs)
            values = {name: asdict(value) for name, value in self._known.items()}
            self._file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        return self._known[key]
