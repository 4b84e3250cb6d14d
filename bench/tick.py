"""Time and memory of one `step`, by the number of pools.

    python -m bench.tick [--quick] [--json FILE]

Each fleet has four replicas per pool and five pools per service; loads differ from pool to pool and change from tick to
tick, so that the stages, the plan and the guards all have work. The figure is the median of the ticks after the first
(which meets an empty state). Memory is what the process holds resident at its end, observation and state included; each
size runs in a process of its own, on one core. Goal: 1,000 pools within 1 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import resource
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.arguments import writable
from controller.decisions import ControllerState
from controller.observations import (
    Hole,
    Known,
    Nothing,
    Observation,
    PoolObservation,
    ReplicaObservation,
    ReplicaState,
    ServiceObservation,
)
from controller.policy import FleetPolicy
from controller.pools import no_fleet
from controller.step import step

GOAL_S = 1.0
REPLICAS = 4
POOLS_PER_SERVICE = 5
INTERVAL_S = 15.0


@dataclass(frozen=True, slots=True)
class Result:
    """One size: the median time of a step in seconds, the number of moves it made, resident memory in MB."""

    pools: int
    step_s: float
    moves: int
    rss_mb: float


def policy(pools: int) -> FleetPolicy:
    """A fleet of `pools` pools of 70B replicas on four H100s each."""
    names = [f"pool-{index}" for index in range(pools)]
    services = {
        f"service-{start // POOLS_PER_SERVICE}": {
            "slo": {"ttft_s": 2.0, "tpot_s": 0.05},
            "pools": names[start : start + POOLS_PER_SERVICE],
        }
        for start in range(0, pools, POOLS_PER_SERVICE)
    }
    entry = {
        "model": {"name": "llama-3.3-70b", "parameters": 70e9, "precision": "fp8"},
        "gpu": {"type": "H100-SXM", "per_replica": 4},
        "replicas": {"min": 2, "max": 12},
        "max_num_seqs": 48,
        "survive": ["replica"],
    }
    return FleetPolicy.model_validate(
        {
            "version": 1,
            "gpus": {"H100-SXM": {"count": min(pools * 20, 1_000_000), "usd_per_gpu_hour": 3.2}},
            "services": services,
            "pools": {name: {**entry, "select": {"app": name}} for name in names},
        }
    )


def observation(fleet: FleetPolicy, now_s: float, chance: random.Random) -> Observation:
    """Every pool under a load of its own, between a tenth and 1.2 times what its replicas carry."""
    pools = tuple(pool_observation(name, chance.uniform(0.5, 40.0)) for name in fleet.pools)
    hole = Hole(Nothing.ABSENT, "the policy names no such series for the service")
    services = tuple(ServiceObservation(name, hole, hole, hole, hole, hole, hole, hole) for name in fleet.services)
    return Observation(now_s, 60.0, pools, services, ())


def pool_observation(name: str, calls_per_s: float) -> PoolObservation:
    """A healthy pool: 2,000 prompt tokens at a hit rate of 0.6 and 250 output tokens per call."""

    def known(value: float) -> Known:
        return Known(value, 12.0)

    share, itl_s = calls_per_s / REPLICAS, 0.02 + 0.0002 * calls_per_s
    replicas = tuple(
        ReplicaObservation(
            f"{name}-{index}",
            ReplicaState.SERVING,
            "",
            known(share * 5),
            known(0.0),
            known(0.4),
            known(40.0),
            known(share),
            known(share * 250),
            known(itl_s),
        )
        for index in range(REPLICAS)
    )
    return PoolObservation(
        name=name,
        replicas=replicas,
        gpus=(),
        fleet=no_fleet(name),
        offered_calls_per_s=known(calls_per_s),
        served_calls_per_s=known(calls_per_s),
        finished_calls_per_s=known(calls_per_s),
        failed_calls_per_s=known(0.0),
        rejected_calls_per_s=known(0.0),
        running=known(share * 5 * REPLICAS),
        waiting=known(0.0),
        prompt_tokens_per_s=known(calls_per_s * 2000),
        computed_prompt_tokens_per_s=known(calls_per_s * 800),
        generation_tokens_per_s=known(calls_per_s * 250),
        hit_ratio=known(0.6),
        preemptions_per_s=known(0.0),
        ttft_s=known(0.4),
        ttft_good_ratio=known(0.99),
        itl_s=known(itl_s * 1.5),
        itl_mean_s=known(itl_s),
        kv_usage_ratio=known(0.4),
        kv_capacity_tokens=known(800_000.0),
    )


def measure(pools: int, ticks: int) -> Result:
    """Run `ticks` ticks of a fleet of `pools` pools."""
    fleet, state, chance = policy(pools), ControllerState(), random.Random(1)
    times: list[float] = []
    moves = 0
    for number in range(ticks):
        seen = observation(fleet, 1_790_000_000.0 + number * INTERVAL_S, chance)
        started_s = time.perf_counter()
        state, decision = step(fleet, state, seen)
        times.append(time.perf_counter() - started_s)
        moves += len(decision.moves)
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Result(pools, statistics.median(times[1:]), moves, rss_mb)


def main() -> None:
    """Print the table; write JSON where asked."""
    arguments = argparse.ArgumentParser(description="Time and memory of one step, by the number of pools.")
    arguments.add_argument("--quick", action="store_true", help="up to 1,000 pools, few ticks")
    arguments.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    chosen = arguments.parse_args()
    sizes = (10, 100, 1000) if chosen.quick else (10, 100, 1000, 10_000)
    ticks = 5 if chosen.quick else 15
    console = Console(width=100)
    # spawn: a forked child would count its parent's memory as its own.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as child:
        shown = track(sizes, "stepping", console=console, transient=True)
        results = [child.apply(measure, (size, ticks)) for size in shown]
    table = Table(
        title=f"One step ({platform.python_implementation()} {platform.python_version()}, one core)", width=100
    )
    for column in (
        "pools",
        "step, ms (median)",
        "per pool, us",
        "moves made",
        "resident, MB",
        f"goal {GOAL_S:g} s at 1,000",
    ):
        table.add_column(column, justify="right")
    for result in results:
        met = ("met" if result.step_s <= GOAL_S else "MISSED") if result.pools == 1000 else ""
        table.add_row(
            f"{result.pools:,}",
            f"{result.step_s * 1000:.1f}",
            f"{result.step_s / result.pools * 1e6:.0f}",
            str(result.moves),
            f"{result.rss_mb:.0f}",
            met,
        )
    console.print(table)
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, {ticks} ticks per size.")
    if chosen.json:
        figures = {
            "step_s": {str(result.pools): result.step_s for result in results},
            "rss_mb": {str(result.pools): result.rss_mb for result in results},
        }
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
