"""The command line, and the only place that wires adapters to the loop.

Exit codes: 0 done; 1 the answer is no (a check found something missing, a replay differed); 2 something outside is
wrong, said in one sentence; 70 a bug. TRIMTAB_DEBUG=1 shows where an error came from.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from controller import answers, check, demo, explain, logs, loop, replay, settings, tables
from controller.adapters import recording, signals
from controller.adapters.clock import WallClock
from controller.adapters.codec import canonical_bytes
from controller.adapters.journal import JournalReader, SqliteJournal, open_reader
from controller.adapters.prometheus import PrometheusTelemetry
from controller.adapters.scrape import ScrapeTelemetry
from controller.errors import PolicyError, TrimtabError
from controller.metrics import Metrics
from controller.policy import FleetPolicy, PrometheusSource
from controller.policy_file import LoadedPolicy, PolicyWatch, load, parse, schema_text
from controller.ports import Telemetry
from controller.server import Server
from controller.starter import engines_from, starter
from controller.types import ControllerState, TickRecord

app = typer.Typer(
    help="Trimtab: a control plane for LLM inference fleets. It reads vLLM and DCGM telemetry, says what it would "
    "change and why, and never sits in the request path.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)

PolicyOption = Annotated[
    Path | None, typer.Option("--policy", "-p", help="The fleet policy file [default: fleet.yaml].")
]
JournalOption = Annotated[Path | None, typer.Option("--journal", help="The journal file [default: trimtab.db].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
AtOption = Annotated[
    str | None, typer.Option("--at", help="Look at this time: Unix seconds or RFC 3339 [default: now].")
]

out = Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=True)


@app.command()
def run(
    policy: PolicyOption = None,
    journal: JournalOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
) -> None:
    """The daemon: observe, decide, explain and record, every interval, until SIGTERM."""
    process = settings.load(policy=policy, journal=journal, host=host, port=port, log_format=log_format)
    logs.configure(process.log_format, process.log_level)
    loaded = _load(process.policy)
    clock, metrics = WallClock(), Metrics()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: clock.stop())
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(
            contextlib.closing(SqliteJournal(process.journal, max_bytes=process.journal_max_bytes))
        )
        shown = loop.Shown(metrics, lambda count: _recent(process.journal, count))
        interval_s = loaded.policy.telemetry.interval_s
        server = Server(shown, process.host, process.port, max(process.health_limit_s, 3 * interval_s))
        ports = loop.Ports(clock, _telemetry(loaded.policy), journal=records)
        server.start()
        stack.callback(server.stop)
        logs.started(process, loaded, server.port)
        daemon = loop.Loop(ports, loaded, _telemetry, metrics, shown, process.tick_deadline_s)
        daemon.run(PolicyWatch(loaded), records.prune)


@app.command()
def recommend(
    policy: PolicyOption = None,
    at: AtOption = None,
    pool: Annotated[str | None, typer.Option(help="Only this pool.")] = None,
    as_json: JsonOption = False,
) -> None:
    """One tick: what is observed now, what should be done, and why. Nothing is recorded and nothing is changed."""
    loaded = _load(settings.load(policy=policy).policy)
    _known_pool(pool, loaded.policy)
    with contextlib.closing(_telemetry(loaded.policy)) as telemetry:
        at_s = _time(at)
        ports = loop.Ports(recording.VirtualClock(at_s), telemetry)
        _, record = loop.tick(ports, loaded, ControllerState(), (), _patience_s(loaded.policy))
    if as_json:
        sys.stdout.write(answers.encode(answers.answer(record, pool)).decode() + "\n")
        return
    tables.readings(record.observation, out, pool)
    out.print(explain.record_text(record, loaded.policy, pool), markup=False, soft_wrap=True)
    for hole in record.observation.holes:
        out.print(f"missing    {hole.source}: {hole.detail}", markup=False, soft_wrap=True)


@app.command("check")
def check_policy(
    policy: Annotated[Path | None, typer.Argument(help="The fleet policy file [default: fleet.yaml].")] = None,
    at: AtOption = None,
    offline: Annotated[bool, typer.Option("--offline", help="Validate the file only, ask no telemetry.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Validate a policy, then ask the telemetry source whether each signal of each pool exists."""
    loaded = _load(settings.load(policy=policy).policy)
    if not as_json:
        out.print(f"{loaded.path}: valid", markup=False)
        for warning in loaded.warnings:
            out.print(f"warning    {warning}", markup=False, soft_wrap=True)
    if offline:
        return
    with contextlib.closing(_telemetry(loaded.policy)) as telemetry:
        window_s = loaded.policy.telemetry.window_s
        snapshot = telemetry.read(_time(at), window_s, _patience_s(loaded.policy))
        wanted = {
            engine: tuple(check.Wanted(entry.signal, entry.about, entry.essential) for entry in entries)
            for engine, entries in signals.ENGINES.items()
        }
        found = check.findings(loaded.policy, snapshot, wanted)
        if as_json:
            sys.stdout.write(answers.encode(found).decode() + "\n")
        else:
            tables.findings(found, loaded.policy, telemetry.expressions(window_s), out)
    if found.fatal:
        raise typer.Exit(1)


@app.command("explain")
def explain_decision(
    pool: Annotated[str | None, typer.Argument(help="The pool [default: all].")] = None,
    journal: JournalOption = None,
    last: Annotated[int, typer.Option("--last", min=1, help="The last so many moves instead of the last tick.")] = 0,
) -> None:
    """The chain of reasons behind the last decisions in the journal, as sentences."""
    path = settings.load(journal=journal).journal
    with contextlib.closing(open_reader(path)) as records:
        newest = tuple(records.tail(1)) if not last else _last_moves(records, pool, last)
        for record in newest:
            fleet = parse(records.policy_text(record.policy_sha256), "the journal", telemetry_required=False).policy
            _known_pool(pool, fleet)
            if not last:
                out.print(explain.record_text(record, fleet, pool), markup=False, soft_wrap=True)
            for move in record.decision.moves if last else ():
                if pool in {None, move.target}:
                    out.print(explain.move_text(move, record), markup=False, soft_wrap=True)
    if not newest:
        out.print(f"{path} holds no {'move' if last else 'tick'} yet.", markup=False)


@app.command("replay")
def replay_journal(
    journal: Annotated[Path, typer.Argument(help="The journal file.")],
    as_json: JsonOption = False,
) -> None:
    """Run the recorded observations through the decision again: the decisions must be the recorded ones."""
    with contextlib.closing(open_reader(journal)) as records:
        total, differing = _replay(records, quiet=as_json)
    if as_json:
        sys.stdout.write(answers.encode({"replayed": total, "differing_ticks": differing}).decode() + "\n")
    elif differing:
        out.print(f"{len(differing)} of {total} ticks decide differently now, the first is tick {differing[0]}.")
    else:
        out.print(f"{total} ticks replayed; every decision is the recorded one, byte for byte.")
    if differing:
        raise typer.Exit(1)


@app.command()
def init(
    prometheus: Annotated[str, typer.Option("--prometheus", help="The URL of a Prometheus that scrapes the engines.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here [default: standard output].")
    ] = None,
    at: AtOption = None,
) -> None:
    """Look at what engines exist, and write a starter policy with comments."""
    if output is not None and output.exists():
        raise TrimtabError(f"{output} exists already; name another file with --output, or move it away first.")
    source = PrometheusSource(url=prometheus)
    running = PrometheusTelemetry.discover(source, signals.RUNNING_SERIES, None if at is None else _time(at))
    gpus = PrometheusTelemetry.discover(source, signals.GPU_SERIES, None if at is None else _time(at))
    text = starter(engines_from(running, gpus), prometheus)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TrimtabError(f"{output} can't be written: {error.strerror}.") from error
    out.print(f"{output} written; look through its comments, then say: trimtab check {output}", markup=False)


@app.command()
def schema() -> None:
    """The JSON Schema of the policy file."""
    sys.stdout.write(schema_text())


@app.command("demo")
def play_demo(
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Captured telemetry of two real vLLM engines (the only demo yet).")
    ] = True,
    journal: Annotated[Path | None, typer.Option(help="Keep the demo's journal in this file.")] = None,
) -> None:
    """The daemon on captured telemetry of two real vLLM engines, on virtual time."""
    del recorded
    logs.configure("console", "error")
    telemetry = recording.RecordingTelemetry(recording.VLLM_CPU)
    path = recording.VLLM_CPU.parent / "vllm_cpu.yaml"
    loaded = load(path, telemetry_required=False)
    if journal is not None and journal.exists():
        raise TrimtabError(f"{journal} exists already; name another file with --journal, or move it away first.")
    with tempfile.TemporaryDirectory(prefix="trimtab-demo-") as folder:
        kept = journal or Path(folder) / "demo.db"
        with contextlib.closing(SqliteJournal(kept)) as records:
            metrics = Metrics()
            ports = loop.Ports(recording.VirtualClock(telemetry.start_s, telemetry.end_s), telemetry, journal=records)
            shown = loop.Shown(metrics, lambda _: ())
            daemon = loop.Loop(ports, loaded, lambda _: telemetry, metrics, shown)
            out.print(demo.INTRODUCTION, markup=False)
            story = demo.play(
                lambda listen: daemon.run(listen=listen), out, "00:00:00", telemetry.start_s, telemetry.end_s
            )
        demo.summary(story, out)
        with contextlib.closing(open_reader(kept)) as records:
            total, differing = _replay(records, quiet=True)
    out.print(f"{story.ticks} ticks; {total} replayed from the journal, {len(differing)} of them decided differently.")
    if journal is not None:
        out.print(f"Now say: trimtab explain --journal {journal} --last 3", markup=False)
    if differing or not total:
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------------------ wiring


def _load(path: Path) -> LoadedPolicy:
    return load(path)


def _telemetry(policy: FleetPolicy) -> Telemetry:
    if policy.telemetry.prometheus is not None:
        return PrometheusTelemetry(policy)
    if policy.telemetry.scrape is not None:
        return ScrapeTelemetry(policy)
    raise PolicyError(
        "telemetry: names no source; add `prometheus: {url: ...}` or `scrape: {targets: [...]}` under it."
    )


def _patience_s(policy: FleetPolicy) -> float:
    """How long a command that a person waits for may take to read its telemetry."""
    source = policy.telemetry.prometheus or policy.telemetry.scrape
    return max(10.0, source.timeout_s + 2) if source is not None else 10.0


def _recent(path: Path, count: int) -> tuple[TickRecord, ...]:
    with contextlib.closing(open_reader(path)) as records:
        return tuple(records.tail(count))


def _last_moves(records: JournalReader, pool: str | None, count: int) -> tuple[TickRecord, ...]:
    """The newest records with moves (of the pool), at most `count`, oldest first; read backwards in portions."""
    found: list[TickRecord] = []
    newest = next((record.decision.tick for record in records.tail(1)), 0)
    while newest > 0 and len(found) < count:
        portion = list(records.records(max(newest - 199, 1), newest))
        moving = [r for r in portion if any(pool in {None, move.target} for move in r.decision.moves)]
        found = moving + found
        if not portion:
            break
        newest = portion[0].decision.tick - 1
    return tuple(found[-count:])


def _replay(records: JournalReader, *, quiet: bool) -> tuple[int, list[int]]:
    def policy(text: str) -> FleetPolicy:
        return parse(text, "the journal", telemetry_required=False).policy

    steps = records.replayable()
    ticks = next((record.decision.tick for record in records.tail(1)), 0)
    shown = steps if quiet else track(steps, "replaying", total=ticks, console=out, transient=True)
    entries = (replay.Recorded(entry.state_before, entry.policy_text, entry.record) for entry in shown)
    total, differing = 0, []
    for replayed in replay.replay(entries, policy, canonical_bytes):
        total += 1
        if not replayed.same:
            differing.append(replayed.record.decision.tick)
    return total, differing


def _known_pool(pool: str | None, policy: FleetPolicy) -> None:
    if pool is not None and pool not in policy.pools:
        raise TrimtabError(f"The policy has no pool {pool!r}; it has: {', '.join(policy.pools)}.")


def _time(text: str | None) -> float:
    if text is None:
        return WallClock().now_s()
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise TrimtabError(f"--at {text!r} is no time; write Unix seconds or 2026-11-30T14:32:15Z.") from None
    if moment.tzinfo is None:
        raise TrimtabError(f"--at {text!r} names no time zone; write {text}Z for UTC.")
    return moment.timestamp()


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Errors as sentences, never as tracebacks (unless TRIMTAB_DEBUG asks for them)."""
    try:
        yield
    except TrimtabError as error:
        if os.environ.get("TRIMTAB_DEBUG"):
            raise
        sys.stderr.write(f"trimtab: {error}\n")
        sys.exit(2)
    except BrokenPipeError:
        # The reader has left (`trimtab explain | head`): nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("TRIMTAB_DEBUG"):
            raise
        sys.stderr.write(
            f"trimtab: this is a bug in Trimtab, please report it: {type(error).__name__}: {error} "
            "(TRIMTAB_DEBUG=1 shows where)\n"
        )
        sys.exit(70)


def main() -> None:
    """The console script."""
    with _plainly():
        app()
