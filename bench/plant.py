"""Calls that the plant carries per second of one core, by load, and memory over a simulated week.

    python -m bench.plant [--quick] [--json FILE]

Eight replicas of a 70B model on four H100s each serve coding assistants only: prompts of 8,000 tokens and more on
average, answers of 200 and more; both means are shown, over what engines were given and have generated. A figure is the
median of three runs of 600 virtual seconds, after compilation, in calls that clients sent per second of processor time
(and of wall time). The same seed makes the same calls. Memory is what the process holds resident as the week begins,
warm, and as it ends; it has a process of its own. Goal: 20,000 calls per CPU-second at 4 tasks/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.arguments import writable
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import COPILOT, H100_X4, PoolOf, ServiceOf

GOAL_CALLS_PER_S = 20_000.0
GOAL_TASKS_PER_S = 4.0
LOADS_TASKS_PER_S = (2.0, 4.0, 6.0)
REPLICAS = 8
RUNS = 3
RUN_S = 600.0
DAY_S = 86_400.0
QUIET_TASKS_PER_S = 0.02


@dataclass(frozen=True, slots=True)
class Result:
    """One load: medians of calls per CPU-second and per second of wall time; mean tokens of a call."""

    tasks_per_s: float
    calls: int
    calls_per_cpu_s: float
    calls_per_wall_s: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident MB as a simulated stretch of `days` begins and ends, and the calls in between."""

    days: float
    start_mb: float
    end_mb: float
    calls: int


def plant(tasks_per_s: float) -> Plant:
    """The fleet, under coding assistants only."""
    pool = PoolOf("h100", H100_X4, REPLICAS, REPLICAS)
    return Plant((ServiceOf("copilot", (pool,), (tasks_per_s,), profiles=(replace(COPILOT, share=1.0),)),), seed=1)


def measure(tasks_per_s: float) -> Result:
    """Run one load `RUNS` times; compile first."""
    plant(tasks_per_s).run(60.0)
    cpu: list[float] = []
    wall: list[float] = []
    fleet = plant(tasks_per_s)
    for number in range(RUNS):
        fleet = fleet if number == 0 else plant(tasks_per_s)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        fleet.run(RUN_S)
        cpu.append(time.process_time() - cpu_s)
        wall.append(time.perf_counter() - wall_s)
    fleet.settle()
    calls, rows = int(fleet.world.counts["sent"].sum()), fleet.world.replicas
    answered = float(fleet.world.ttft_counts.sum())
    return Result(
        tasks_per_s,
        calls,
        calls / statistics.median(cpu),
        calls / statistics.median(wall),
        float(rows["prompt_tokens"].sum()) / answered,
        float(rows["generated_tokens"].sum()) / answered,
    )


def remember(days: float) -> Memory:
    """Let a quiet fleet run for `days` simulated days."""
    fleet = plant(QUIET_TASKS_PER_S)
    fleet.run(3600.0)
    start_mb = resident_mb()
    fleet.run(3600.0 + days * DAY_S)
    return Memory(days, start_mb, resident_mb(), int(fleet.world.counts["sent"].sum()))


def resident_mb() -> float:
    """What this process holds resident now; its peak so far where the system has no /proc."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def shown(results: list[Result]) -> Table:
    """The table of speeds."""
    title = f"The plant ({platform.python_implementation()} {platform.python_version()}, one core)"
    table = Table(title=title, width=100)
    for column in (
        "tasks/s",
        "calls",
        "prompt, tokens",
        "output, tokens",
        "calls per CPU s",
        "per wall s",
        f"goal {GOAL_CALLS_PER_S:,.0f} at {GOAL_TASKS_PER_S:g}",
    ):
        table.add_column(column, justify="right")
    for result in results:
        met = "met" if result.calls_per_cpu_s >= GOAL_CALLS_PER_S else "MISSED"
        table.add_row(
            f"{result.tasks_per_s:g}",
            f"{result.calls:,}",
            f"{result.prompt_tokens:,.0f}",
            f"{result.output_tokens:,.0f}",
            f"{result.calls_per_cpu_s:,.0f}",
            f"{result.calls_per_wall_s:,.0f}",
            met if result.tasks_per_s == GOAL_TASKS_PER_S else "",
        )
    return table


def main() -> None:
    """Print the table; write JSON where asked."""
    arguments = argparse.ArgumentParser(description="Calls that the plant carries per second, and its memory.")
    arguments.add_argument("--quick", action="store_true", help="a simulated day instead of a week")
    arguments.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    chosen = arguments.parse_args()
    console = Console(width=100)
    # spawn: a forked child would count its parent's memory as its own.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as child:
        results = [child.apply(measure, (load,)) for load in LOADS_TASKS_PER_S]
        memory = child.apply(remember, (1.0 if chosen.quick else 7.0,))
    console.print(shown(results))
    console.print(
        f"{memory.days:g} simulated days at {QUIET_TASKS_PER_S:g} tasks/s, {memory.calls:,} calls: "
        f"resident {memory.start_mb:.0f} MB at the start, {memory.end_mb:.0f} MB at the end."
    )
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, median of {RUNS} runs of {RUN_S:g} virtual s.")
    if chosen.json:
        by_load = {f"{result.tasks_per_s:g}": result.calls_per_cpu_s for result in results}
        figures = {
            "calls_per_s": by_load[f"{GOAL_TASKS_PER_S:g}"],
            "calls_per_s_by_load": by_load,
            "rss_mb_week": [memory.start_mb, memory.end_mb],
        }
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
