"""The demo as a person sees it: three runs in three processes, one line per event, the table, the report's place.

Each process sends what its run has to tell; the lines of all are put in the order of the day's clock, so that the same
seed prints the same words on any machine. The first use of a machine compiles the simulator, and says so.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import assert_never

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controller import answers, logs, reasons
from controller.adapters.simulated import EPOCH_S
from controller.demo.day import GOAL, Course, Run, Side, sizing_of
from controller.demo.page import MARK, NAMES, Row, html
from controller.demo.scenario import SLO_TTFT_S, DayOf, Sizing, replicas, short_day, sized, whole_day
from controller.demo.score import Score, score
from controller.demo.story import Told, ToldKind
from controller.errors import TrimtabError
from models.fleetsim.ready import COMPILING_S, compile_all, is_compiled

REPORT = Path("trimtab-demo.html")
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Options:
    """See the options of `trimtab demo`."""

    report: Path
    as_json: bool
    seed: int
    short: bool


@dataclass(frozen=True, slots=True)
class Column:
    """A run's score, and the replicas of each pool that it began with."""

    side: Side
    replicas: tuple[int, ...]
    score: Score


@dataclass(frozen=True, slots=True)
class Answer:
    """What `--json` prints. Shares are of 0-1; times of minutes are virtual s, those of `told` Unix s."""

    version: int
    day: DayOf
    scores: tuple[Column, ...]
    runs: tuple[Run, ...]
    report: str


@dataclass(frozen=True, slots=True)
class Passed:
    """A run has come so far (virtual s), and has this to tell."""

    at_s: float
    told: tuple[Told, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A run can't go on, and why, as a sentence."""

    reason: str


Message = Passed | Failed | Run


def play(options: Options, out: Console) -> None:
    """Play all runs, print the table, write the report. Raises TrimtabError."""
    day = short_day(options.seed) if options.short else whole_day(options.seed)
    check_place(options.report)
    if not is_compiled():
        sys.stderr.write(f"trimtab: compiling the simulator, once on this machine: about {COMPILING_S} s\n")
        compile_all()
    quiet = Console(quiet=True) if options.as_json else out
    quiet.print(introduction(day), markup=False)
    runs = _all(day, quiet)
    columns = tuple(Column(run.side, sizes(day, sizing_of(run.side)), score(run, day)) for run in runs)
    rows = table_rows(tuple(column.score for column in columns))
    write(options.report, html(runs, rows, day, introduction(day)))
    if options.as_json:
        answer = Answer(1, day, columns, runs, str(options.report))
        sys.stdout.write(answers.encode(answer).decode() + "\n")
        return
    out.print(shown(rows))
    out.print(f"The plots: {options.report.absolute()}", markup=False, soft_wrap=True)


def sizes(day: DayOf, sizing: Sizing) -> tuple[int, ...]:
    """Replicas of each pool."""
    return tuple(replicas(pool, day, sizing) for pool in sized())


def introduction(day: DayOf) -> str:
    """What is played, and what the columns are, in a few lines."""

    def fleet(sizing: Sizing) -> str:
        pools = zip(sizes(day, sizing), sized(), strict=True)
        return " + ".join(f"{count} {pool.hardware_name}" for count, pool in pools)

    length = f"{day.length_s / 3600:g} hours" if day.length_s >= 7200 else f"{day.length_s / 60:g} minutes"
    return (
        f"A simulated day of chat and coding agents, morning to morning, its load compressed into {length}:\n"
        f"a burst at noon (x {day.burst.factor:g}), half of the fast pool lost in the afternoon; three fleets:\n"
        f"  peak     fixed, {fleet(Sizing.PEAK)} replicas: a load test's capacity at 0.7, for the day's peak\n"
        f"  mean     fixed, {fleet(Sizing.MEAN)} replicas: the same for the day's mean, as where GPUs are scarce\n"
        "  trimtab  begins as mean does; Trimtab's own loop adds and removes replicas, nothing else\n"
    )


# ---------------------------------------------------------------------------------------------------- three processes


def run_one(side: Side, day: DayOf, pipe: Connection) -> None:
    """One run, in a process of its own; what it has to tell goes into the pipe."""
    logs.configure("console", "error")
    try:
        try:
            pipe.send(Course(side, day, lambda at_s, told: pipe.send(Passed(at_s, told))).play())
        except TrimtabError as error:
            pipe.send(Failed(str(error)))
    except BrokenPipeError:
        os._exit(1)  # the parent is gone, and nobody is left to tell


def _all(day: DayOf, console: Console) -> tuple[Run, ...]:
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: dict[Connection, Side] = {}
    # The terminal's Ctrl-C reaches every process, and the parent is the one to answer it: a child inherits the mask, a
    # Ctrl-C meanwhile waits. Python's tracker of resources lifts the mask when it starts, so it starts first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for side in Side:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(side, day, theirs), name=side.value, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = side
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return _listen(pipes, day, console)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for process in processes:
            process.terminate()
            process.join()


def _listen(pipes: dict[Connection, Side], day: DayOf, console: Console) -> tuple[Run, ...]:
    runs: dict[Side, Run] = {}
    far = dict.fromkeys(Side, 0.0)
    lines = Lines(day)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("playing", total=len(Side) * day.length_s)
        while len(runs) < len(pipes):
            for pipe in wait([pipe for pipe, side in pipes.items() if side not in runs]):
                assert isinstance(pipe, Connection)  # noqa: S101  (for the type: `wait` takes sockets as well)
                side = pipes[pipe]
                match _received(pipe, side):
                    case Passed(at_s, told):
                        far[side] = at_s
                        lines.add(side, told)
                    case Failed(reason):
                        raise TrimtabError(reason)
                    case Run() as run:
                        runs[side], far[side] = run, day.length_s
                    case message:
                        assert_never(message)
            for line in lines.until(min(far.values())):
                progress.console.print(line, soft_wrap=False)
            progress.update(bar, completed=sum(far.values()), description=reasons.clock(EPOCH_S + min(far.values())))
    return tuple(runs[side] for side in Side)


def _received(pipe: Connection, side: Side) -> Message:
    try:
        message: Message = pipe.recv()
    except EOFError:
        raise TrimtabError(
            f"the run {side.value} was ended from outside; it needs 600 MB of memory; free some, start again."
        ) from None
    return message


# -------------------------------------------------------------------------------------------------------------- words


class Lines:
    """The lines of all runs and of the day itself, in the order of the day's clock."""

    def __init__(self, day: DayOf) -> None:
        self._waiting: list[tuple[float, int, str]] = []
        loss, burst = day.loss, day.burst
        for at_s, text in (
            (burst.start_s, f"a burst: {burst.factor:g} times the traffic"),
            (burst.end_s, "the burst is over"),
            (loss.start_s, f"half of the places of {loss.pool} are lost, with what runs there"),
            (loss.end_s, f"the lost places of {loss.pool} can be used again"),
        ):
            self._waiting.append((at_s, -1, f"[bold]{reasons.clock(EPOCH_S + at_s)}[/]  [yellow]the day[/]  {text}"))

    def add(self, side: Side, told: Iterable[Told]) -> None:
        """Lines of a run, one for each kind of thing that happened at the same moment."""
        for (at_s, kind, what), group in itertools.groupby(told, _alike):
            line = f"[bold]{reasons.clock(at_s)}[/]  {side.value:<7}  {_words(kind, what, list(group))}"
            self._waiting.append((at_s - EPOCH_S, list(Side).index(side), line))

    def until(self, at_s: float) -> list[str]:
        """The lines up to a moment (virtual s) that all runs have passed."""
        due = sorted((entry for entry in self._waiting if entry[0] <= at_s), key=lambda entry: entry[:2])
        self._waiting = [entry for entry in self._waiting if entry[0] > at_s]
        return [line for _, _, line in due]


def _alike(told: Told) -> tuple[float, ToldKind, str]:
    kind = told.text.partition(":")[0] if told.kind is not ToldKind.MOVE else told.target
    return told.at_s, told.kind, kind


def _words(kind: ToldKind, what: str, group: list[Told]) -> str:
    first, more = group[0], len(group) - 1
    about = escape(first.target + (f" and {more} more" if more else ""))
    match kind:
        case ToldKind.MOVE:
            return f"[cyan]{about}[/]  {escape(first.text)}"
        case ToldKind.ALARM:
            return f"[red]alarm[/] {about}  {escape(first.text)}"
        case ToldKind.OVER:
            return f"[green]over[/]  {about}  {escape(what)}"
        case _:
            assert_never(kind)


def table_rows(scores: tuple[Score, ...]) -> tuple[Row, ...]:
    """The rows of the table, in words."""
    kinds = [kind for kind, _ in scores[0].success_by_kind]

    def row(what: str, cell: Callable[[Score], str]) -> Row:
        return Row(what, tuple(cell(each) for each in scores))

    def of_kind(kind: str) -> Row:
        return row(f"  {kind}", lambda s: _percent(dict(s.success_by_kind)[kind]))

    return (
        row("tasks that succeeded", lambda s: _percent(s.task_success)),
        *(of_kind(kind) for kind in kinds),
        row(f"calls within the SLO (first token in {SLO_TTFT_S:g} s)", lambda s: _percent(s.slo_attainment)),
        row(f"minutes with less than {GOAL:.0%} of calls in it", lambda s: f"{s.minutes_out_of_slo}"),
        row("recovery after the loss", lambda s: _recovery(s.recovery_s)),
        row("GPU-hours", lambda s: f"{s.gpu_hours:.1f}"),
        row("cost", lambda s: f"${s.usd:,.2f}"),
        row("cost per 1,000 successful tasks", lambda s: _usd(s.usd_per_1000_tasks)),
    )


def _usd(usd: float | None) -> str:
    return "-" if usd is None else f"${usd:,.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _recovery(seconds: float | None) -> str:
    if seconds is None:
        return "not that day"
    return "SLO held" if seconds == 0 else reasons.span(seconds)


def shown(rows: tuple[Row, ...]) -> Table:
    """The table for a terminal."""
    table = Table(title="The day, without and with Trimtab", title_justify="left", width=WIDTH)
    table.add_column("")
    for name in NAMES.values():
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.what, *row.cells)
    return table


# ------------------------------------------------------------------------------------------------------------- report


def check_place(path: Path) -> None:
    """Whether the report can be written there; before two runs are played for nothing. Raises TrimtabError."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise TrimtabError(f"the report {path} can't be written; name a file in a writable folder with --report.")
    if path.exists() and not _ours(path):
        raise TrimtabError(f"{path} exists already and is no report of this demo; name another file with --report.")


def _ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(400)
    except OSError:
        return False


def write(path: Path, text: str) -> None:
    """Replace the report as a whole. Raises TrimtabError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise TrimtabError(
            f"the report {path} can't be written ({error.strerror}); name another file with --report."
        ) from error
