"""Learnt capacity against the plant's true maximum, at several loads, after a shift of lengths, with wrong priors.

    python -m bench.capacity [--quick] [--json FILE] [--keep FILE]

For each pair of mixes on one kind of replica: learn for an hour on one mix at a share of what the plant can carry of
it, then look at the other mix for two hours at the same share of its own, and say how many calls/s a replica carries.
The truth is what ten two-hour runs of the other mix survive (bench.true_maximum). Three estimators see the same
telemetry: told the right figures of their GPUs, half of them, double of them. The plant shares no formula with them.

error      |said/true - 1|, its median over scenarios and priors, by load
coverage   share of the 90 % intervals that hold the truth; width: (high - low)/true, its median

Goals: error <= 10 % from 20 % load on, <= 20 % at 10 %; coverage >= 85 %; width <= 40 %. --quick: one pair, three seeds
of one hour, two loads. Scenarios and seeds are not those that constants were chosen on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.arguments import writable
from bench.learnt_capacity import Lesson, Said, teach
from bench.true_maximum import ABREAST, SEEDS, Goal, Jobs, Kept, Maximum, Search, play
from models.fleetsim.scenario import (
    A100_X4,
    H100_X4,
    RESEARCH,
    Engine,
    Hardware,
    PoolOf,
    Profile,
    ServiceOf,
)

LOADS = (0.10, 0.20, 0.35, 0.60, 0.80)
QUICK_LOADS = (0.10, 0.35)
LEARN_SEED = 77
ERRORS = Console(stderr=True)

L40S = Hardware(1, 1.6e14, 6.5e11, 4.3e10, 1.05)
"""One card: 362e12 (bf16 dense) * 0.45, 864e9 * 0.75, 48 GB * 0.9."""
SMALL = Engine(8e9, 16e9, layers=32, hidden=4096, kv_heads_size=1024)
"""8e9 parameters in bf16."""

ASSISTANT = Profile("assistant", 1.0, 2500, 10.0, 0.5, 50, 800.0, 0.8, 350.0, 0.7, 8.0, human_share=0.2)
RAG = Profile("rag", 1.0, 600, 1.0, 0.0, 1, 6000.0, 0.6, 300.0, 0.6, 1.0)
TALK = Profile("talk", 1.0, 500, 5.0, 0.5, 20, 250.0, 0.8, 300.0, 0.7, 20.0, human_share=0.5, context_max=60_000)
DIGEST = Profile("digest", 1.0, 800, 1.0, 0.0, 1, 2500.0, 0.7, 150.0, 0.6, 1.0, context_max=60_000)
AGENT = Profile("agent", 0.6, 3500, 15.0, 0.5, 60, 500.0, 0.8, 200.0, 0.7, 5.0, human_share=0.1)


@dataclass(frozen=True, slots=True)
class Mix:
    """One mix of calls on one kind of replica; tasks_per_s: where the search for its maximum begins."""

    name: str
    pool: PoolOf
    profiles: tuple[Profile, ...]
    tasks_per_s: float
    tpot_s: float

    def at(self, tasks_per_s: float) -> ServiceOf:
        """The service at a rate of tasks."""
        return ServiceOf(self.name, (self.pool,), (tasks_per_s,), profiles=self.profiles)


H100 = PoolOf("h100", H100_X4, 3, 3)
A100 = PoolOf("a100", A100_X4, 2, 2)
CARD = PoolOf("l40s", L40S, 4, 4, engine=SMALL)
PAIRS = (
    (Mix("h100 assistant", H100, (ASSISTANT,), 1.0, 0.1), Mix("h100 rag", H100, (RAG,), 6.0, 0.1)),
    (Mix("a100 agent", A100, (AGENT,), 0.2, 0.1), Mix("a100 agent+research", A100, (AGENT, RESEARCH), 0.1, 0.1)),
    (Mix("l40s talk", CARD, (TALK,), 1.0, 0.08), Mix("l40s digest", CARD, (DIGEST,), 3.0, 0.08)),
)


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer beside the truth."""

    mix: str
    load: float
    factor: float
    true: float
    said: Said

    @property
    def error(self) -> float | None:
        """said/true - 1; None where the estimator did not know."""
        return None if self.said.warm is None else self.said.warm.mid / self.true - 1

    @property
    def holds(self) -> bool:
        """Whether the interval holds the truth; one that is not known holds nothing."""
        warm = self.said.warm
        return warm is not None and warm.low <= self.true <= warm.high

    @property
    def width(self) -> float:
        """Width of the interval as a share of the truth; infinite where nothing is known."""
        warm = self.said.warm
        return math.inf if warm is None else (warm.high - warm.low) / self.true


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is run."""

    pairs: tuple[tuple[Mix, Mix], ...]
    loads: tuple[float, ...]
    seeds: int
    run_s: float
    learn_s: float
    use_s: float


FULL = Extent(PAIRS, LOADS, SEEDS, 7200.0, 3600.0, 7200.0)
QUICK = Extent(PAIRS[2:], QUICK_LOADS, 3, 3600.0, 2400.0, 1800.0)


def maxima(extent: Extent, kept: Kept, jobs: Jobs) -> dict[str, Maximum]:
    """The true maximum of every mix."""
    found: dict[str, Maximum] = {}
    mixes = [mix for pair in extent.pairs for mix in pair]
    for mix in track(mixes, "true maxima", console=ERRORS):
        search = Search(mix.at, mix.tasks_per_s, Goal(tpot_s=mix.tpot_s), extent.seeds, extent.run_s)
        found[mix.name] = kept.find(search, jobs)
    return found


def lessons(extent: Extent, true: dict[str, Maximum]) -> list[tuple[str, float, Lesson]]:
    """Every lesson with the mix it is scored on and its load."""
    jobs = []
    for pair in extent.pairs:
        for first, second in (pair, pair[::-1]):
            for load in extent.loads:
                lesson = Lesson(
                    first.at(load * true[first.name].tasks_per_s),
                    second.at(load * true[second.name].tasks_per_s),
                    second.tpot_s,
                    LEARN_SEED,
                    extent.learn_s,
                    extent.use_s,
                )
                jobs.append((second.name, load, lesson))
    return jobs


def scored(extent: Extent, kept: Kept) -> tuple[dict[str, Maximum], list[Scored]]:
    """Search, teach, compare."""
    with multiprocessing.get_context("spawn").Pool(ABREAST) as pool:
        true = maxima(extent, kept, lambda runs: pool.map(play, runs, 1))
        jobs = lessons(extent, true)
        said = pool.imap(teach, [lesson for _, _, lesson in jobs])
        answers: list[Scored] = []
        shown = track(said, "lessons", total=len(jobs), console=ERRORS)
        for (mix, load, _), group in zip(jobs, shown, strict=True):
            answers.extend(Scored(mix, load, one.factor, true[mix].calls_per_s, one) for one in group)
    return true, answers


def median_error(answers: list[Scored]) -> float:
    """Median of |error|; an answer that is not known is wrong by all of it."""
    return statistics.median(1.0 if one.error is None else abs(one.error) for one in answers)


def by_load(answers: list[Scored]) -> Table:
    """Errors, coverage and width by load."""
    table = Table(title="Said against true, over all mixes and priors", width=100)
    for column in ("load", "answers", "median error", "worst", "bias", "coverage", "median width"):
        table.add_column(column, justify="right")
    for load in sorted({one.load for one in answers}):
        group = [one for one in answers if one.load == load]
        errors = [one.error for one in group if one.error is not None]
        table.add_row(
            f"{load:.0%}",
            str(len(group)),
            f"{median_error(group):.1%}",
            f"{max(errors, key=abs):+.0%}" if errors else "",
            f"{statistics.median(errors):+.1%}" if errors else "",
            f"{statistics.mean(one.holds for one in group):.0%}",
            f"{statistics.median(one.width for one in group):.0%}",
        )
    return table


def by_mix(answers: list[Scored], true: dict[str, Maximum]) -> Table:
    """What was said with the right figures, by mix and load."""
    loads = sorted({one.load for one in answers})
    table = Table(title="calls/s of one replica, said with the right figures", width=100)
    table.add_column("mix")
    for column in ("true", "ITL, ms", "hits", *(f"at {load:.0%}" for load in loads)):
        table.add_column(column, justify="right")
    table.add_column("limited by")
    for mix, maximum in true.items():
        own = {one.load: one for one in answers if one.mix == mix and one.factor == 1.0}
        mids = [own[load].said.warm for load in loads]
        last = own[loads[-1]].said.limit
        table.add_row(
            mix,
            f"{maximum.calls_per_s:.2f}",
            f"{1000 * maximum.itl_s:.0f}",
            f"{maximum.hit_ratio:.2f}",
            *("?" if mid is None else f"{mid.mid:.2f}" for mid in mids),
            last.value if last else "?",
        )
    return table


def main() -> None:
    """Print the tables; write JSON where asked."""
    arguments = argparse.ArgumentParser(description="Learnt capacity against the plant's true maximum.")
    arguments.add_argument("--quick", action="store_true", help="one pair of mixes, fewer and shorter runs")
    arguments.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    default = Path(__file__).with_name("true_maxima.json")
    arguments.add_argument("--keep", type=Path, metavar="FILE", default=default, help="where found maxima are kept")
    chosen = arguments.parse_args()
    true, answers = scored(QUICK if chosen.quick else FULL, Kept(chosen.keep))
    console = Console(width=100)
    console.print(by_mix(answers, true))
    console.print(by_load(answers))
    coverage = statistics.mean(one.holds for one in answers)
    width = statistics.median(one.width for one in answers)
    console.print(f"90 % intervals: coverage {coverage:.0%} (goal 85 %), median width {width:.0%} (goal 40 % at most).")
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}.")
    if chosen.json:
        figures = {
            "median_error": {
                f"{100 * load:.0f}": median_error([one for one in answers if one.load == load])
                for load in sorted({one.load for one in answers})
            },
            "interval_coverage": coverage,
            "interval_width": width,
        }
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
