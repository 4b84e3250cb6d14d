"""The demo: the daemon's own loop on captured telemetry of two real vLLM engines, on virtual time.

Nothing is simulated: the recording holds what the engines' /metrics said, once per second, through an idle phase, a
ramp, a burst, KV-cache pressure, a kill -9 with restart, and a hang; the loop, the decisions, the journal and the words
are those of `trimtab run`. Only the clock is virtual. At the end the journal is replayed and must decide the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controller import reasons
from controller.decisions import TickRecord
from controller.demo.story import Story, Told, ToldKind, what, why
from controller.observations import Known

INTRODUCTION = (
    "Two real vLLM engines, recorded for six minutes: idle, a ramp, a burst, KV-cache pressure, a kill -9\n"
    "with a restart, a hang. The daemon's own loop reads them on virtual time; it recommends, no more.\n"
)


def play(
    run: Callable[[Callable[[TickRecord], None]], None], console: Console, title: str, start_s: float, end_s: float
) -> Story:
    """Run the loop, which calls back after each tick, under a progress bar; one line per decision or alarm."""
    story = Story()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=end_s - start_s)

        def listen(record: TickRecord) -> None:
            for told in story.tell(record):
                progress.console.print(_line(told), soft_wrap=False)
            progress.update(bar, completed=record.decision.now_s - start_s, description=_state(record))

        run(listen)
    return story


def summary(story: Story, console: Console) -> None:
    """What it would have done, when, why; and what it called for help about."""
    moves = Table(title="What it would have done", title_justify="left", width=100)
    for column, style in (("when", "bold"), ("pool", "cyan"), ("what", ""), ("why", "")):
        moves.add_column(column, style=style)
    for at_s, move in story.moves:
        moves.add_row(reasons.clock(at_s), move.target, what(move), why(move))
    console.print(moves if story.moves else "It would have changed nothing.")
    alarms = Table(title="What it called for help about", title_justify="left", width=100)
    for column, style in (("from", "bold"), ("to", "bold"), ("alarm", "red"), ("about", "")):
        alarms.add_column(column, style=style)
    for span in story.alarms():
        about = f"{span.alarm.target}: {span.alarm.detail}"
        alarms.add_row(reasons.clock(span.first_s), reasons.clock(span.last_s), span.alarm.kind.value, about)
    if alarms.row_count:
        console.print(alarms)


def _line(told: Told) -> str:
    at = f"[bold]{reasons.clock(told.at_s)}[/]"
    match told.kind:
        case ToldKind.MOVE:
            return f"{at}  [cyan]{told.target}[/]  {told.text}"
        case ToldKind.ALARM:
            kind, _, detail = told.text.partition(": ")
            return f"{at}  [red]alarm {kind}[/]  {told.target}: {detail}"
        case ToldKind.OVER:
            return f"{at}  [green]over  {told.text}[/]  {told.target}"
        case _:
            assert_never(told.kind)


def _state(record: TickRecord) -> str:
    load = sum(
        p.offered_calls_per_s.value for p in record.observation.pools if isinstance(p.offered_calls_per_s, Known)
    )
    return f"{reasons.clock(record.decision.now_s)} {load:6.1f} calls/s"
