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
from controller.decisions import Alarm, AlarmKind, Move, Scale, Stage, TickRecord
from controller.observations import Known

INTRODUCTION = (
    "Two real vLLM engines, recorded for six minutes: idle, a ramp, a burst, KV-cache pressure, a kill -9\n"
    "with a restart, a hang. The daemon's own loop reads them on virtual time; it recommends, no more.\n"
)


@dataclass(slots=True)
class Span:
    """An alarm from the first tick that raised it to the first that did not (or the last there was), Unix s."""

    alarm: Alarm
    first_s: float
    last_s: float


@dataclass(slots=True)
class Story:
    """What happened so far: moves, alarms that are over, alarms that are raised."""

    moves: list[tuple[float, Move]] = field(default_factory=list)
    over: list[Span] = field(default_factory=list)
    raised: dict[tuple[AlarmKind, str], Span] = field(default_factory=dict)
    ticks: int = 0

    def tell(self, record: TickRecord) -> list[str]:
        """Take in one tick, and return the lines that a person should read about it."""
        decision = record.decision
        now_s, at = decision.now_s, f"[bold]{reasons.clock(decision.now_s)}[/]"
        self.ticks += 1
        lines = []
        for move in decision.moves:
            self.moves.append((now_s, move))
            lines.append(f"{at}  [cyan]{move.target}[/]  {_what(move)}: {_why(move)}")
        seen = {(alarm.kind, alarm.target): alarm for alarm in decision.alarms}
        for key, alarm in seen.items():
            if key in self.raised:
                self.raised[key].last_s = now_s
            else:
                self.raised[key] = Span(alarm, now_s, now_s)
                lines.append(f"{at}  [red]alarm {alarm.kind.value}[/]  {alarm.target}: {alarm.detail}")
        for key in [key for key in self.raised if key not in seen]:
            span = self.raised.pop(key)
            span.last_s = now_s
            self.over.append(span)
            lines.append(f"{at}  [green]over  {key[0].value}[/]  {key[1]}")
        return lines

    def alarms(self) -> list[Span]:
        """Every span, by its start."""
        return sorted([*self.over, *self.raised.values()], key=lambda span: span.first_s)


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
    for span in story.alarms():
        about = f"{span.alarm.target}: {span.alarm.detail}"
        alarms.add_row(reasons.clock(span.first_s), reasons.clock(span.last_s), span.alarm.kind.value, about)
    if alarms.row_count:
        console.print(alarms)


def _what(move: Move) -> str:
    return "; ".join(f"{a.before} -> {reasons.replicas(a.after)}" for a in move.actions if isinstance(a, Scale))


def _why(move: Move) -> str:
    """The plan's reason, and those of the guards that changed it."""
    planned = [change.reason for change in move.changes if change.stage is Stage.PLANNED]
    guarded = [c.reason for c in move.changes if c.stage is Stage.GUARDED and c.before != c.after]
    return "; ".join(planned + guarded)


def _state(record: TickRecord) -> str:
    load = sum(
        p.offered_calls_per_s.value for p in record.observation.pools if isinstance(p.offered_calls_per_s, Known)
    )
    return f"{reasons.clock(record.decision.now_s)} {load:6.1f} calls/s"
