"""Pinball loss and coverage of the demand forecaster on demand traces, beside what others would have said.

    python -m bench.forecast [--traces DIR] [--origins N] [--quick] [--json FILE]

Rolling origin: at each bin the forecasters see the loads up to it and say quantiles 2, 5 and 10 minutes ahead. The
yardstick is the last value plus rolling quantiles (window 240) of its own errors; an origin is scored once that has met
8 errors, and unless its target lies beyond the end or in a collection gap. A figure is a mean pinball loss over the
yardstick's on the same origins: geometric mean over the loads of a trace, then over traces with equal weight.

Ours, last value and seasonal naive are scored at every bin. ETS, SARIMAX, AutoETS, AutoARIMA and Prophet refit at every
origin, so they are scored on N origins per load, evenly spaced and shared by all methods, ours included.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.pool
import os
import platform
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from bench import rivals
from bench.arguments import writable
from bench.traces import HOUR_S, MINUTES, Array, Trace, read
from models import forecast, scoring
from models.forecast import LEVELS, Grid

T = TypeVar("T")

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces" / "series"
GOALS = {2: 0.88, 5: 0.90, 10: 0.92}
WINDOW_BINS = 500
TICK_SERIES = 1000
OURS = "Trimtab"
LAST = "last value + quantiles"

_done = multiprocessing.Value("q", 0)


@dataclass(frozen=True, slots=True)
class Score:
    """One load at one horizon: origins scored, loss over the yardstick's per level, coverage at .9."""

    trace: Trace
    minutes: int
    origins: int
    ratios: tuple[float, ...]
    coverage: float
    lowest: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """Losses at .9 over the yardstick's on the shared origins of one load and horizon, by method."""

    trace: Trace
    minutes: int
    ratios: dict[str, float]


def ours(traces: list[Trace]) -> dict[tuple[str, int], Array]:
    """Quantiles at every bin by load and minutes; traces share one bin width, and are all updated at once."""
    longest_first = sorted(traces, key=lambda trace: -len(trace.load))
    horizons = longest_first[0].horizons()
    grid = Grid(float(longest_first[0].bin_s), tuple(horizons.values()))
    lengths = [len(trace.load) for trace in longest_first]
    values = np.full((lengths[0], len(traces)), np.nan)
    for number, trace in enumerate(longest_first):
        values[: lengths[number], number] = trace.load
    said = np.full((len(traces), lengths[0], len(horizons), len(LEVELS)), np.nan)
    memory = forecast.start(grid, tuple(trace.name for trace in longest_first))
    going = len(traces)
    for bin_ in range(lengths[0]):
        while lengths[going - 1] <= bin_:
            going -= 1
        memory = forecast.with_series(memory, memory.names[:going])
        memory = forecast.update(memory, (bin_ + 1) * grid.bin_s, values[bin_, :going])
        said[:going, bin_] = forecast.quantiles(memory).values
        with _done.get_lock():
            _done.value += 1
    return {
        (trace.name, minutes): said[number, : lengths[number], place]
        for number, trace in enumerate(longest_first)
        for place, minutes in enumerate(horizons)
    }


def score(trace: Trace, minutes: int, said: Array) -> Score | None:
    """Score quantiles (origins x levels); None where no origin can be scored."""
    bins = trace.horizons()[minutes]
    target, yardstick = trace.targets(bins), rivals.last_value(trace.load, bins, trace.bin_s)
    target = np.where(np.isfinite(yardstick[:, 1]), target, np.nan)
    if not np.isfinite(target).any():
        return None
    return Score(
        trace,
        minutes,
        int(np.isfinite(target).sum()),
        tuple(scoring.ratio(target, said[:, k], yardstick[:, k], level) for k, level in enumerate(LEVELS)),
        scoring.coverage(target, said[:, 1]),
        scoring.lowest_coverage(target, said[:, 1], WINDOW_BINS),
    )


def sample(task: tuple[Trace, int, dict[int, Array]]) -> list[Sampled]:
    """Refit every rival at a load's shared origins; `said` is ours at every bin, by minutes."""
    trace, count, said = task
    horizons = trace.horizons()
    longest = max(horizons.values())
    targets = {minutes: trace.targets(bins) for minutes, bins in horizons.items()}
    yardsticks = {minutes: rivals.last_value(trace.load, bins, trace.bin_s) for minutes, bins in horizons.items()}
    usable = np.all([np.isfinite(targets[m]) & np.isfinite(yardsticks[m][:, 1]) for m in horizons], axis=0)
    possible = np.flatnonzero(usable)
    found: list[Sampled] = []
    if possible.size:
        origins = possible[np.unique(np.linspace(0, len(possible) - 1, min(count, len(possible))).astype(int))]
        refits = {
            name: np.stack([rivals.refitted(name, trace.load[: origin + 1], longest) for origin in origins])
            for name in rivals.installed()
        }
        for minutes, bins in horizons.items():
            methods = {name: refit[:, bins - 1, 1] for name, refit in refits.items()}
            methods |= {n: f(trace.load, bins, trace.bin_s)[origins, 1] for n, f in rivals.EVERY_BIN.items()}
            methods[OURS] = said[minutes][origins, 1]
            against = targets[minutes][origins], yardsticks[minutes][origins, 1]
            found.append(
                Sampled(trace, minutes, {n: scoring.ratio(against[0], u, against[1], 0.9) for n, u in methods.items()})
            )
    with _done.get_lock():
        _done.value += 1
    return found


def tick_s() -> float:
    """Median seconds of processor time of one update of 1,000 series at three horizons."""
    noise = np.random.default_rng(0)
    memory = forecast.start(Grid(60.0, MINUTES), tuple(str(number) for number in range(TICK_SERIES)))
    took = []
    for number in range(25):
        load = noise.gamma(20.0, 1.0, TICK_SERIES)
        began = time.process_time()
        memory = forecast.update(memory, 60.0 * (number + 1), load)
        forecast.quantiles(memory)
        took.append(time.process_time() - began)
    return statistics.median(took)


def over_traces(pairs: Iterable[tuple[Trace, float]]) -> float:
    """Geometric mean over the loads of each trace and bin width, then over these."""
    by_trace: dict[tuple[str, int], list[float]] = {}
    for trace, value in pairs:
        by_trace.setdefault((trace.trace, trace.bin_s), []).append(value)
    return scoring.geometric_mean(np.asarray([scoring.geometric_mean(np.asarray(v)) for v in by_trace.values()]))


def per_trace(scores: list[Score]) -> Table:
    """One row per trace: losses at .9 of the three horizons, of .5 and .95 at 5 minutes, coverage."""
    table = Table(title="Loss over last value + quantiles, at every bin", width=100)
    table.add_column("trace", no_wrap=True)
    for column in (".9: 2", "5", "10 min", ".5: 10", ".95: 10", "coverage", "origins"):
        table.add_column(column, justify="right")
    for key in dict.fromkeys((s.trace.trace, s.trace.bin_s) for s in scores):
        mine = [s for s in scores if (s.trace.trace, s.trace.bin_s) == key]
        cells = [_mean(mine, minutes, 1) for minutes in MINUTES] + [_mean(mine, 10, 0), _mean(mine, 10, 2)]
        covered = statistics.fmean(s.coverage for s in mine)
        origins = max(s.origins for s in mine)
        row = (f"{key[0]} {key[1]} s", *map(_shown, cells), f"{covered:.3f}")
        table.add_row(*row, f"{origins:,}")
    return table


def _mean(scores: list[Score], minutes: int, level: int) -> float:
    return scoring.geometric_mean(np.asarray([s.ratios[level] for s in scores if s.minutes == minutes]))


def _shown(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def figures(scores: list[Score], sampled: list[Sampled], seconds: float) -> dict[str, object]:
    """All that is judged, by name."""
    long = [s for s in scores if s.trace.long]
    errors = [abs(s.coverage - 0.9) for s in long]
    covered = [s.coverage - 0.9 for s in long]
    lowest = [s.lowest for s in long if math.isfinite(s.lowest)]
    hours = [s for s in scores if len(s.trace.load) * s.trace.bin_s <= HOUR_S]
    kinds = sorted({s.trace.kind for s in scores})
    methods = list(sampled[0].ratios) if sampled else []
    return {
        "pinball90_vs_last": {str(m): over_traces(_at(scores, m)) for m in MINUTES},
        "pinball50_vs_last": {str(m): over_traces(_at(scores, m, 0)) for m in MINUTES},
        "pinball95_vs_last": {str(m): over_traces(_at(scores, m, 2)) for m in MINUTES},
        "by_kind": {
            kind: {str(m): over_traces(_at([s for s in scores if s.trace.kind == kind], m)) for m in MINUTES}
            for kind in kinds
        },
        "worst_long_ratio": _worst(long),
        "worst_hour_ratio": _worst(hours),
        "coverage90_error_mean": abs(statistics.fmean(covered)) if covered else math.nan,
        "coverage90_absolute_error_mean": statistics.fmean(errors) if errors else math.nan,
        "coverage90_error_max": max(errors, default=math.nan),
        "coverage90_lowest_window": min(lowest, default=math.nan),
        "coverage90_windows_by_bin": {
            str(b): min((s.lowest for s in long if s.trace.bin_s == b and math.isfinite(s.lowest)), default=math.nan)
            for b in sorted({s.trace.bin_s for s in long})
        },
        "sampled90_vs_last": {
            name: {str(m): over_traces((s.trace, s.ratios[name]) for s in sampled if s.minutes == m) for m in MINUTES}
            for name in methods
        },
        "tick_s_1000_series": seconds,
    }


def _at(scores: list[Score], minutes: int, level: int = 1) -> list[tuple[Trace, float]]:
    return [(s.trace, s.ratios[level]) for s in scores if s.minutes == minutes]


def _worst(scores: list[Score]) -> float:
    """The highest loss of a trace at any horizon."""
    keys = {(s.trace.trace, s.trace.bin_s, s.minutes) for s in scores}
    ratios = [
        over_traces(_at([s for s in scores if (s.trace.trace, s.trace.bin_s) == key[:2]], key[2])) for key in keys
    ]
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=math.nan)


def summary(found: dict[str, object], origins: int) -> tuple[Table, Table]:
    """The two tables of means: at every bin by kind, and on the shared origins by method."""
    every = Table(title="Loss at .9 over last value + quantiles, every bin", width=100)
    shared = Table(title=f"The same on {origins} origins per load, shared by all methods", width=100)
    for table, first in ((every, "traces"), (shared, "method")):
        table.add_column(first)
        for minutes in MINUTES:
            table.add_column(f"{minutes} min", justify="right")
    by_kind, by_method = found["by_kind"], found["sampled90_vs_last"]
    assert isinstance(by_kind, dict)
    assert isinstance(by_method, dict)
    for kind, row in {"all": found["pinball90_vs_last"], **by_kind}.items():
        every.add_row(kind, *(_shown(row[str(m)]) for m in MINUTES))
    every.add_row("goal, all", *(f"{GOALS[m]:.2f}" for m in MINUTES))
    shared.add_row(LAST, *("1.000" for _ in MINUTES))
    for name, row in by_method.items():
        shared.add_row(name, *(_shown(row[str(m)]) for m in MINUTES))
    return every, shared


def run(traces: list[Trace], origins: int, console: Console) -> tuple[list[Score], list[Sampled]]:
    """Score all traces in two processes, with a progress bar."""
    groups = [[t for t in traces if t.bin_s == width and t.horizons()] for width in sorted({t.bin_s for t in traces})]
    groups = [group for group in groups if group]
    bins = sum(max(len(trace.load) for trace in group) for group in groups)
    context = multiprocessing.get_context("fork")
    said: dict[tuple[str, int], Array] = {}
    sampled: list[Sampled] = []
    with context.Pool(2) as pool, Progress(console=console, transient=True) as progress:
        task = progress.add_task("forecasting every bin", total=bins)
        _done.value = 0
        for part in _watched(pool.map_async(ours, groups, chunksize=1), progress, task):
            said |= part
        tasks = [(t, origins, {m: said[t.name, m] for m in t.horizons()}) for group in groups for t in group]
        task = progress.add_task(f"refitting {len(rivals.installed())} rivals", total=len(tasks))
        _done.value = 0
        for found in _watched(pool.map_async(sample, tasks, chunksize=1), progress, task):
            sampled.extend(found)
    scored = (score(t, m, said[t.name, m]) for group in groups for t in group for m in t.horizons())
    return [s for s in scored if s is not None], sampled


def _watched(result: multiprocessing.pool.MapResult[T], progress: Progress, task: TaskID) -> list[T]:
    while not result.ready():
        progress.update(task, completed=_done.value)
        result.wait(0.5)
    progress.update(task, completed=_done.value)
    return result.get()


def main() -> None:
    """Print the tables; write JSON where asked."""
    parser = argparse.ArgumentParser(description="Pinball loss and coverage of the demand forecaster.")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="a folder of NAME_<bin>s.csv.gz")
    parser.add_argument("--origins", type=int, default=20, metavar="N", help="origins per load for what refits (20)")
    parser.add_argument("--quick", action="store_true", help="the first 1,500 bins of each trace, 3 origins")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    chosen = parser.parse_args()
    console = Console(width=100)
    try:
        traces = read(chosen.traces, 1500 if chosen.quick else None)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    if not traces:
        parser.exit(2, f"There are no traces (NAME_<bin>s.csv.gz) in {chosen.traces}; name their folder by --traces.\n")
    origins = 3 if chosen.quick else chosen.origins
    missing = [name for name in rivals.REFITTED if name not in rivals.installed()]
    if missing:
        console.print(f"Left out, not installed: {', '.join(missing)} (pip install 'trimtab[bench]').", markup=False)
    scores, sampled = run(traces, origins, console)
    found = figures(scores, sampled, tick_s())
    console.print(per_trace(scores))
    for table in summary(found, origins):
        console.print(table)
    console.print(
        f"Worst long trace {found['worst_long_ratio']:.3f}, worst one-hour trace {found['worst_hour_ratio']:.3f}. "
        f"Coverage at .9 on loads of 1,000 bins and more: mean off by {found['coverage90_error_mean']:.4f}, one load "
        f"by at most {found['coverage90_error_max']:.4f}; lowest {WINDOW_BINS} bins by bin width, s: "
        f"{ {k: round(v, 3) for k, v in found['coverage90_windows_by_bin'].items()} }. "  # type: ignore[attr-defined]
        f"One update of 1,000 series at 3 horizons: {found['tick_s_1000_series']:.3f} CPU-s."
    )
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}.")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
