"""Tables for people, at most 100 columns wide; `--json` is for machines."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from controller.check import Findings
from controller.policy import FleetPolicy
from controller.reasons import nothing, number
from controller.types import Hole, Known, Observation, PoolObservation, Reading, ReplicaState, Signal

WIDTH = 100


def readings(observation: Observation, console: Console, pool: str | None = None) -> None:
    """What is observed of each pool: numbers where they are known, the kind of nothing where they are not."""
    table = Table(title=f"Observed over {observation.window_s:g} s", title_justify="left", width=WIDTH)
    table.add_column("pool", style="cyan", overflow="fold")
    table.add_column("replicas", overflow="fold")
    for column in ("calls/s", "waiting", "hit rate", "KV use", "preempt./s", "TTFT s", "ITL ms"):
        table.add_column(column, justify="right")
    for entry in observation.pools:
        if pool in {None, entry.name}:
            table.add_row(
                entry.name,
                _replicas(entry),
                _cell(entry.offered_calls_per_s),
                _cell(entry.waiting),
                _cell(entry.hit_ratio),
                _cell(entry.kv_usage_ratio),
                _cell(entry.preemptions_per_s),
                _cell(entry.ttft_s),
                _cell(entry.itl_s, 1000),
            )
    console.print(table)


def findings(
    found: Findings, policy: FleetPolicy, expressions: tuple[tuple[Signal, str], ...], console: Console
) -> None:
    """What telemetry knows of each pool, and what to do where it lacks something."""
    asked = dict(expressions)
    table = Table(title_justify="left", width=WIDTH)
    for column in ("pool", "engines", "GPUs", "signals"):
        table.add_column(column, overflow="fold")
    for pool in found.pools:
        lacking = ", ".join(wanted.signal.value for wanted in pool.missing if wanted.essential)
        verdict = "no engine" if not pool.engines else f"missing: {lacking}" if lacking else "all there"
        style = "red" if pool.fatal else "green"
        table.add_row(pool.pool, str(len(pool.engines)), str(pool.gpus), f"[{style}]{verdict}[/]")
    console.print(table)
    for pool in found.pools:
        if not pool.engines:
            select = ", ".join(f'{key}="{value}"' for key, value in policy.pools[pool.pool].select.items())
            console.print(f"{pool.pool}: no engine's series carry {select}.", markup=False, soft_wrap=True)
            console.print(f"  asked: {asked.get(Signal.RUNNING, '')}", markup=False, soft_wrap=True)
            console.print("  Compare with the labels that your scrape configuration sets, and mend `select`.")
        for wanted in pool.missing:
            kind = "essential" if wanted.essential else "optional"
            console.print(
                f"{pool.pool}: no {wanted.signal.value} ({wanted.about}; {kind})", markup=False, soft_wrap=True
            )
    for service in found.services:
        for what, there in (("gateway", service.gateway), ("tasks", service.tasks)):
            if there is False:
                console.print(f"{service.service}: no series carry the labels under `{what}`.", markup=False)
    for hole in found.holes:
        console.print(f"missing: {hole.source}: {hole.detail}", markup=False, soft_wrap=True)


def _replicas(pool: PoolObservation) -> str:
    counts = [(state, pool.count(state)) for state in ReplicaState]
    return ", ".join(f"{count} {state.value}" for state, count in counts if count) or "none"


def _cell(reading: Reading, scale: float = 1.0) -> str:
    match reading:
        case Known(value, _):
            return number(value * scale)
        case Hole(kind, _):
            return nothing(kind)
