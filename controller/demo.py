"""The demo: the daemon's own loop on captured telemetry of two real vLLM engines, on virtual time.

Nothing is simulated: the recording holds what the engines' /metrics said, once per second, through an idle phase, a
ramp, a burst, KV-cache pressure, a kill -9 with restart, and a hang; the loop, the decisions, the journal and the words
are those of `trimtab run`. Only the clock is virtual. At the end the journal is replayed and must decide the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controller import reasons
from controller.types import Alarm, AlarmKind, Known, Move, Scale, Stage, TickRecord


@dataclass(slots=True)
class Story:
    """What happened so far: moves, and alarms with the times between which they were raised."""

    moves: list[tuple[float, Move]] = field(default_factory=list)
    alarms: dict[tuple[AlarmKind, str], tuple[float, float, str]] = field(default_factory=dict)
    raised: frozenset[tuple[AlarmKind, str]] = frozenset()
    ticks: int = 0

    def tell(self, record: TickRecord) -> list[str]:
        """Take in one tick, and return the lines that a person should read about it."""
        decision = record.decision
        at = reasons.clock(decision.now_s)
        self.ticks += 1
        lines = []
        for move in decision.moves:
            self.moves.append((decision.now_s, move))
            lines.append(f"[bold]{at}[/]  [cyan]{move.target}[/]  {_what(move)}  ({move.quadrant.value}): {_why(move)}")
        raised = frozenset((alarm.kind, alarm.target) for alarm in decision.alarms)
        for alarm in decision.alarms:
            lines += self._alarm(alarm, decision.now_s, at)
        lines += [
            f"[bold]{at}[/]  [green]over[/]   {kind.value} of {target}" for kind, target in sorted(self.raised - raised)
        ]
        self.raised = raised
        return lines

    def _alarm(self, alarm: Alarm, now_s: float, at: str) -> list[str]:
        key = (alarm.kind, alarm.target)
        new = key not in self.raised
        first_s, _, detail = self.alarms.get(key, (now_s, now_s, alarm.detail))
        self.alarms[key] = (first_s, now_s, detail)
        return [f"[bold]{at}[/]  [red]alarm[/]  {alarm.kind.value}: {alarm.target}: {alarm.detail}"] if new else []


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
            for line in story.tell(record):
                progress.console.print(line, soft_wrap=False)
            progress.update(bar, completed=record.decision.now_s - start_s, description=_state(record))

        run(listen)
    return story


def summary(story: Story, console: Console) -> None:
    """What it would have done, when, why; and what it called for help about."""
    moves = Table(title="What it would have done", title_justify="left", width=100)
    for column, style in (("when", "bold"), ("pool", "cyan"), ("what", ""), ("why", "")):
        moves.add_column(column, style=style)
    for at_s, move in story.moves:
        moves.add_row(reasons.clock(at_s), move.target, _what(move), _why(move))
    console.print(moves if story.moves else "It would have changed nothing.")
    alarms = Table(title="What it called for help about", title_justify="left", width=100)
    for column, style in (("from", "bold"), ("to", "bold"), ("alarm", "red"), ("about", "")):
        alarms.add_column(column, style=style)
    for (kind, target), (first_s, last_s, detail) in story.alarms.items():
        alarms.add_row(reasons.clock(first_s), reasons.clock(last_s), kind.value, f"{target}: {detail}")
    if story.alarms:
        console.print(alarms)


def _what(move: Move) -> str:
    return "; ".join(f"{a.before} -> {a.after} replicas" for a in move.actions if isinstance(a, Scale))


def _why(move: Move) -> str:
    return next(change.reason for change in move.changes if change.stage is Stage.PLANNED)


def _state(record: TickRecord) -> str:
    load = sum(
        p.offered_calls_per_s.value for p in record.observation.pools if isinstance(p.offered_calls_per_s, Known)
    )
    return f"{reasons.clock(record.decision.now_s)} {load:6.1f} calls/s"
