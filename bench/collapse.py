"""Does a lost third of the fleet come back? Good tasks before and after, by load and by the clients' retries.

    python -m bench.collapse [--quick] [--json FILE]

Eight replicas of a 70B model on four H100s each serve coding assistants only; nobody steers. At 900 virtual seconds
three replicas are lost and start again at once, cold, which takes 150 s. A figure is the share of tasks that succeeded
among those that ended, over 600 s: before the loss (300 to 900 s), just after it (900 to 1,500 s), and twenty minutes
later (2,100 to 2,700 s): mean and least over the seeds. "Untouched" is that last figure of a fleet that lost nothing.
`down` counts the seeds whose last figure is below 0.85 of the first.

What it asks: an earlier study found that clients' retries decide whether such a fleet recovers. They decide here at a
load if without retries no seed stays down and with them one does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.arguments import writable
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import COPILOT, H100_X4, Clients, PoolOf, ServiceOf

LOADS_TASKS_PER_S = (2.5, 2.6, 2.7, 2.8, 2.9, 3.0)
QUICK_LOADS = (2.5, 2.75, 3.0)
RETRIES = (0, 2, 4)
SEEDS = (1, 2, 3, 4)
QUICK_SEEDS = (1, 2)
REPLICAS = 8
LOST = 3
LOSS_S = 900.0
WINDOW_S = 600.0
LATER_S = 1200.0
RECOVERED = 0.85


@dataclass(frozen=True, slots=True)
class Run:
    """One run: shares of tasks that succeeded, of those that ended in each window; calls that timed out, over all."""

    before: float
    after: float
    later: float
    timeouts: float

    @property
    def down(self) -> bool:
        """Whether it never came back."""
        return self.later < RECOVERED * self.before


@dataclass(frozen=True, slots=True)
class Cell:
    """One load and number of retries: a run per seed, with the loss and without it."""

    tasks_per_s: float
    retries: int
    lost: tuple[Run, ...]
    untouched: tuple[Run, ...]


def play(tasks_per_s: float, retries: int, seed: int, *, loses: bool) -> Run:
    """One run of 2,700 virtual seconds."""
    service = ServiceOf(
        "copilot",
        (PoolOf("h100", H100_X4, REPLICAS, REPLICAS),),
        (tasks_per_s,),
        profiles=(replace(COPILOT, share=1.0),),
        clients=Clients(retries=retries),
    )
    plant = Plant((service,), seed)
    plant.run(LOSS_S - WINDOW_S)
    before = _watch(plant, LOSS_S)
    if loses:
        places = plant.places("h100")[:LOST]
        plant.lose(places)
        plant.restore(places)
    after = _watch(plant, LOSS_S + WINDOW_S)
    plant.run(LOSS_S + LATER_S)
    later = _watch(plant, LOSS_S + LATER_S + WINDOW_S)
    return Run(before, after, later, float(plant.world.counts["timed_out"].sum()))


def _watch(plant: Plant, until_s: float) -> float:
    """The share of succeeded tasks among the ones that ended until then."""
    tallies = plant.world.tallies
    good, bad = float(tallies["succeeded"].sum()), float(tallies["failed"].sum())
    plant.run(until_s)
    good, bad = float(tallies["succeeded"].sum()) - good, float(tallies["failed"].sum()) - bad
    return good / max(good + bad, 1.0)


def scan(loads: tuple[float, ...], seeds: tuple[int, ...]) -> list[Cell]:
    """Every cell, the lightest load first."""
    wanted = [
        (load, retries, loses, seed)
        for load in loads
        for retries in RETRIES
        for loses in (True, False)
        for seed in seeds
    ]
    console = Console(stderr=True, width=100)
    runs = {
        one: play(one[0], one[1], one[3], loses=one[2])
        for one in track(wanted, "runs", console=console, disable=not console.is_terminal)
    }
    return [
        Cell(
            load,
            retries,
            tuple(runs[load, retries, True, seed] for seed in seeds),
            tuple(runs[load, retries, False, seed] for seed in seeds),
        )
        for load in loads
        for retries in RETRIES
    ]


def shown(cells: list[Cell], seeds: int) -> Table:
    """The table of the scan."""
    table = Table(title=f"Share of tasks that succeed, mean (least) of {seeds} seeds", width=100)
    for name in ("tasks/s", "retries", "before", "after", "20 min after", "down", "untouched", "down", "timeouts"):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(
            f"{cell.tasks_per_s:g}",
            str(cell.retries),
            *(_of([getattr(run, name) for run in cell.lost]) for name in ("before", "after", "later")),
            f"{sum(run.down for run in cell.lost)}/{seeds}",
            _of([run.later for run in cell.untouched]),
            f"{sum(run.down for run in cell.untouched)}/{seeds}",
            f"{sum(run.timeouts for run in cell.lost) / seeds:,.0f}",
            end_section=cell.retries == RETRIES[-1],
        )
    return table


def _of(shares: list[float]) -> str:
    return f"{sum(shares) / len(shares):.2f} ({min(shares):.2f})"


def decided_by_retries(cells: list[Cell]) -> list[float]:
    """Loads at which no seed stays down without retries and some seed does with them."""
    down = {(cell.tasks_per_s, cell.retries): sum(run.down for run in cell.lost) for cell in cells}
    loads = sorted({cell.tasks_per_s for cell in cells})
    return [load for load in loads if down[load, 0] == 0 and any(down[load, retries] for retries in RETRIES[1:])]


def main() -> None:
    """Print the table and the answer; write JSON where asked."""
    arguments = argparse.ArgumentParser(description="Recovery from a loss, by load and by the clients' retries.")
    arguments.add_argument("--quick", action="store_true", help="three loads and two seeds")
    arguments.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    chosen = arguments.parse_args()
    seeds = QUICK_SEEDS if chosen.quick else SEEDS
    cells = scan(QUICK_LOADS if chosen.quick else LOADS_TASKS_PER_S, seeds)
    console = Console(width=100)
    console.print(shown(cells, len(seeds)))
    loads = ", ".join(f"{load:g}" for load in decided_by_retries(cells))
    console.print(f"Retries decide at: {loads + ' tasks/s' if loads else 'none of these loads'}.")
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, {len(seeds)} seeds.")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
