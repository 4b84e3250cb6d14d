"""Tables for people, at most 100 columns wide; `--json` is for machines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from controller.check import Findings
from controller.observations import Hole, Known, Nothing, Observation, PoolObservation, Reading, ReplicaState, Signal
from controller.policy import FleetPolicy
from controller.reasons import nothing, number

WIDTH = 100


def readings(observation: Observation, console: Console, pool: str | None = None) -> None:
    """What is observed of each pool: numbers where they are known, the kind of nothing where they are not."""
    title = f"Observed over {observation.window_s:g} s"
    # Without lines between columns it fits into a terminal of 80.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("pool", style="cyan", overflow="fold")
    table.add_column("replicas", overflow="fold", min_width=9)
    for column in ("calls/s", "waiting", "hit rate", "KV", "preempt/s", "TTFT s", "ITL ms"):
        table.add_column(column, justify="right", overflow="fold")
    for entry in observation.pools:
        if pool in {None, entry.name}:
            table.add_row(
                escape(entry.name),
                _replicas(entry),
                _cell(entry.offered_calls_per_s),
                _cell(entry.waiting, whole=True),
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
    table = Table(title_justify="left", width=min(WIDTH, console.width))
    for column in ("pool", "engines", "GPUs", "signals"):
        table.add_column(column, overflow="fold")
    for pool in found.pools:
        lacking = ", ".join(wanted.signal.value for wanted in pool.missing if wanted.essential)
        verdict = "no engine" if not pool.engines else f"missing: {lacking}" if lacking else "all there"
        style = "red" if pool.fatal else "green"
        table.add_row(escape(pool.pool), str(len(pool.engines)), str(pool.gpus), f"[{style}]{verdict}[/]")
    console.print(table)
    for pool in found.pools:
        if not pool.engines:
            for line in _no_engine(pool.pool, found, policy, asked.get(Signal.RUNNING, "")):
                console.print(line, markup=False, soft_wrap=True)
        for wanted in pool.missing:
            kind = "essential" if wanted.essential else "optional"
            text = f"{pool.pool}: no {wanted.signal.value} ({wanted.about}; {kind})"
            console.print(text, markup=False, soft_wrap=True)
            if wanted.essential:
                console.print(f"  asked: {asked.get(wanted.signal, '')}", markup=False, soft_wrap=True)
    for service in found.services:
        for what, there in (("gateway", service.gateway), ("tasks", service.tasks)):
            if there is False:
                text = f"{service.service}: no series carry the labels under `{what}`."
                console.print(text, markup=False, soft_wrap=True)
    for hole in found.holes:
        console.print(row("missing", f"{hole.source}: {hole.detail}"), markup=False, soft_wrap=True)


def row(name: str, text: str) -> str:
    """A named line, wrapped; addresses and expressions stay whole."""
    first = f"{name:<10} "
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _no_engine(pool: str, found: Findings, policy: FleetPolicy, asked: str) -> Iterator[str]:
    select = ", ".join(f'{key}="{value}"' for key, value in policy.pools[pool].select.items())
    yield f"{pool}: no engine's series carry {select}."
    yield f"  asked: {asked}"
    if found.holes:
        yield "  The telemetry is not whole (see below); mend that first."
    else:
        yield "  Compare with the labels that your scrape configuration sets, and mend `select`."
        yield "  (An empty alternative in the query lets series without that label pass. For old data: --at.)"


def _replicas(pool: PoolObservation) -> str:
    counts = [(state, pool.count(state)) for state in ReplicaState]
    return ", ".join(f"{count} {state.value}" for state, count in counts if count) or "none"


def _cell(reading: Reading, scale: float = 1.0, *, whole: bool = False) -> str:
    match reading:
        case Known(value, _):
            return f"{value:g}" if whole else number(value * scale)
        case Hole(kind, _):
            return "undef." if kind is Nothing.NAN else nothing(kind)
