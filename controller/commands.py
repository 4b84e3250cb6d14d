"""What the commands do; with `controller.demo.day`, which runs the loop on a plant, all that wires adapters to it.

A command says what it found on standard output and returns; one that asks a question returns whether the answer is yes.
What is wrong outside is raised as a TrimtabError, which controller.cli turns into one sentence.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import track

from controller import answers, check, explain, logs, loop, reasons, replay, settings, tables
from controller.adapters import recording, signals
from controller.adapters.clock import WallClock
from controller.adapters.codec import canonical_bytes
from controller.adapters.journal import JournalReader, SqliteJournal, open_reader
from controller.adapters.prometheus import PrometheusTelemetry
from controller.adapters.scrape import ScrapeTelemetry
from controller.decisions import ControllerState, TickRecord
from controller.demo import recorded
from controller.errors import JournalError, PolicyError, TelemetryError, TrimtabError
from controller.metrics import Metrics
from controller.policy import FleetPolicy, PrometheusSource
from controller.policy_file import PolicyWatch, load, parse, schema_text
from controller.ports import Telemetry
from controller.server import Server
from controller.starter import engines_from, starter


class _Console(Console):
    """A console that lets its caller judge a reader who left."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught (it would end the process with 1, which means "the answer is no")."""
        raise BrokenPipeError


RATE_S = 1.0
"""How long an endpoint is read before its counters have rates."""

YEAR_10000_S = 253_402_300_800.0

out = _Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=True)


def run(*, forget_missing: bool, **flags: object) -> None:
    """Observe, decide, explain and record, every interval, until SIGTERM; SIGHUP looks at the policy file at once."""
    process = settings.load(**flags)
    logs.configure(process.log_format, process.log_level)
    loaded = load(process.policy)
    clock, metrics, watch = WallClock(), Metrics(), PolicyWatch(loaded)
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
        signal.signal(signal.SIGHUP, lambda *_: daemon.post(lambda: daemon.reload(watch)))
        daemon.run(watch, records.prune, forget_missing=forget_missing)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        # A thread that a broken server holds would keep the process from ending; everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def recommend(policy: Path | None, at: str | None, pool: str | None, *, as_json: bool) -> None:
    """One tick of a daemon without memory, at a time of the caller's choice."""
    loaded = load(settings.load(policy=policy).policy)
    _known_pool(pool, loaded.policy)
    window_s = loaded.policy.telemetry.window_s
    with contextlib.closing(_telemetry(loaded.policy)) as telemetry:
        at_s = _ready_at_s(telemetry, loaded.policy, at, window_s)
        ports = loop.Ports(recording.VirtualClock(at_s), telemetry)
        _, record = loop.tick(ports, loaded, ControllerState(), (), _patience_s(loaded.policy))
    holes = record.observation.holes
    if holes and not any(entry.replicas for entry in record.observation.pools):
        raise TelemetryError("; ".join(hole.detail for hole in holes))
    if as_json:
        _print_json(answers.about(record, pool))
        return
    tables.readings(record.observation, out, pool)
    _say(explain.record_text(record, loaded.policy, pool))
    for hole in holes:
        _say(tables.row("missing", f"{hole.source}: {hole.detail}"))


def check_policy(policy: Path | None, at: str | None, *, offline: bool, as_json: bool) -> bool:
    """Whether the policy is valid and the telemetry knows all that it names."""
    loaded = load(settings.load(policy=policy).policy)
    if not as_json:
        _say(f"{loaded.path}: valid")
        for warning in loaded.warnings:
            _say(tables.row("warning", warning))
    if offline:
        if as_json:
            _print_json({"valid": True, "warnings": loaded.warnings})
        return True
    with contextlib.closing(_telemetry(loaded.policy)) as telemetry:
        window_s = loaded.policy.telemetry.window_s
        at_s = _ready_at_s(telemetry, loaded.policy, at, min(RATE_S, window_s / 2))
        snapshot = telemetry.read(at_s, window_s, _patience_s(loaded.policy))
        expressions = telemetry.expressions(window_s)
        if {asked for asked, _ in expressions} <= set(snapshot.failed):
            raise TelemetryError("; ".join(hole.detail for hole in snapshot.holes) or "no signal was answered for")
        wanted = {
            engine: tuple(check.Wanted(entry.signal, entry.about, entry.essential) for entry in entries)
            for engine, entries in signals.ENGINES.items()
        }
        found = check.findings(loaded.policy, snapshot, wanted)
        if as_json:
            _print_json(found)
        else:
            tables.findings(found, loaded.policy, expressions, out)
    return not found.fatal


def explain_decision(pool: str | None, journal: Path | None, last: int | None) -> None:
    """The reasons of the last tick, or of the last so many moves, from the journal."""
    path = settings.load(journal=journal).journal
    with contextlib.closing(open_reader(path)) as records:
        newest = tuple(records.tail(1)) if last is None else _last_moves(records, pool, last)
        for record in newest:
            fleet = _policy_of(records, record)
            if last is None:
                _known_pool(pool, fleet)
                _say(explain.record_text(record, fleet, pool))
            for move in () if last is None else record.decision.moves:
                if pool in {None, move.target}:
                    _say(explain.move_text(move, record))
        if newest:
            return
        for record in records.tail(1):
            _known_pool(pool, _policy_of(records, record))
    what = "tick" if last is None else "move" if pool is None else f"move of {pool}"
    _say(f"{path} holds no {what} yet.")


def replay_journal(journal: Path, *, as_json: bool) -> bool:
    """Whether every recorded decision comes out again, byte for byte."""
    with contextlib.closing(open_reader(journal)) as records:
        total, differing = _replay(records, quiet=as_json)
    if as_json:
        _print_json({"replayed": total, "differing_ticks": differing})
    elif not total:
        _say(f"{journal} holds no tick that could be replayed.")
    elif differing:
        _say(f"{len(differing)} of {total} ticks decide differently now, the first is tick {differing[0]}.")
    else:
        _say(f"{total} ticks replayed; every decision is the recorded one, byte for byte.")
    return bool(total) and not differing


def init(prometheus: str, output: Path | None, at: str | None) -> None:
    """A starter policy for the engines that a Prometheus knows."""
    if output is not None and os.path.lexists(output):
        raise _exists(output, "--output")
    at_s = None if at is None else _time(at)
    source = PrometheusSource(url=prometheus)
    try:
        running = PrometheusTelemetry.discover(source, signals.RUNNING_SERIES, at_s)
        gpus = PrometheusTelemetry.discover(source, signals.GPU_SERIES, at_s)
    except TelemetryError as error:
        # There is no policy yet that could be corrected.
        raise TelemetryError(str(error).replace("telemetry.prometheus.url", "--prometheus")) from error
    text = starter(engines_from(running, gpus), prometheus)
    if output is None:
        sys.stdout.write(text)
        return
    _create(output, text, "--output")
    _say(f"{output} written; look through its comments, then say: trimtab check {output}")


def schema() -> None:
    """The JSON Schema of the policy file."""
    sys.stdout.write(schema_text())


@dataclass(frozen=True, slots=True)
class Serving:
    """How a simulated fleet is served: see the options of `trimtab simulate`."""

    speed: float
    port: int
    file_sd: Path | None
    seed: int
    seconds: float | None


def simulate(serving: Serving, *, policy_out: Path | None, prometheus: str) -> None:
    """A simulated fleet's metrics endpoints, until SIGTERM or for so many seconds."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if policy_out is not None and os.path.lexists(policy_out):
        raise _exists(policy_out, "--policy-out")
    from models.fleetsim.ready import COMPILING_S, is_compiled  # noqa: PLC0415  (takes a second to import)

    if not is_compiled():
        sys.stderr.write(f"trimtab: compiling the simulator, once on this machine: about {COMPILING_S} s\n")
    from controller import simulate as simulated  # noqa: PLC0415
    from models.fleetsim.plant import Plant  # noqa: PLC0415

    plant = Plant(simulated.SCENARIO, serving.seed)
    with contextlib.ExitStack() as stack:
        simulation = simulated.Simulation(plant, speed=serving.speed, port=serving.port)
        stack.enter_context(contextlib.closing(simulation))
        if serving.file_sd is not None:
            simulated.write_targets(serving.file_sd, simulation.targets())
            # A Prometheus goes on scraping what the file names, for as long as it is there.
            stack.callback(serving.file_sd.unlink, missing_ok=True)
        policy = simulated.policy_for(simulated.SCENARIO, prometheus)
        if policy_out is not None:
            _create(policy_out, policy.text, "--policy-out")
        sys.stdout.write(simulated.scrape_config(simulation.targets(), serving.file_sd))
        sys.stdout.flush()
        sys.stderr.write(f"trimtab: serving {len(simulation.targets())} targets on http://{simulation.address}/\n")
        simulation.run(stop, math.inf if serving.seconds is None else serving.seconds, serving.file_sd)


def play_recorded(journal: Path | None) -> bool:
    """Whether the replay of the recorded demo decides as the demo did."""
    logs.configure("console", "error")
    telemetry = recording.RecordingTelemetry(recording.VLLM_CPU)
    path = recording.VLLM_CPU.parent / "vllm_cpu.yaml"
    loaded = load(path, telemetry_required=False)
    if journal is not None and os.path.lexists(journal):
        raise _exists(journal, "--journal")
    with tempfile.TemporaryDirectory(prefix="trimtab-demo-") as folder:
        kept = journal or Path(folder) / "demo.db"
        with contextlib.closing(SqliteJournal(kept)) as records:
            metrics = Metrics()
            # Rates need a window of samples: before that every counter is unknown, and rightly an alarm.
            start_s, end_s = telemetry.start_s + loaded.policy.telemetry.window_s, telemetry.end_s
            ports = loop.Ports(recording.VirtualClock(start_s, end_s), telemetry, journal=records)
            shown = loop.Shown(metrics, lambda _: ())
            daemon = loop.Loop(ports, loaded, lambda _: telemetry, metrics, shown)
            _say(recorded.INTRODUCTION)
            story = recorded.play(lambda listen: daemon.run(listen=listen), out, reasons.clock(start_s), start_s, end_s)
        recorded.summary(story, out)
        with contextlib.closing(open_reader(kept)) as records:
            total, differing = _replay(records, quiet=True)
    _say(f"{story.ticks} ticks; {total} replayed from the journal, {len(differing)} of them decided differently.")
    if journal is not None:
        _say(f"Now say: trimtab explain --journal {journal}")
    return bool(total) and not differing


# ------------------------------------------------------------------------------------------------------------ wiring


def _say(text: str) -> None:
    """Words as they are: brackets in them are no markup, and a terminal breaks what is longer than its lines."""
    out.print(text, markup=False, soft_wrap=True)


def _print_json(answer: object) -> None:
    sys.stdout.write(answers.encode(answer).decode() + "\n")


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


def _ready_at_s(telemetry: Telemetry, policy: FleetPolicy, at: str | None, span_s: float) -> float:
    """The time to read the telemetry for, Unix s; scraped endpoints are first read for `span_s`, for rates to exist."""
    if policy.telemetry.prometheus is not None:
        return _time(at)
    if at is not None:
        raise TrimtabError("--at needs a Prometheus; scraped endpoints tell of now alone, so leave it out.")
    clock, every_s = WallClock(), min(policy.telemetry.interval_s, span_s / 4)
    due_s = clock.now_s()
    last_s = due_s + span_s
    if span_s > RATE_S:
        sys.stderr.write(f"trimtab: reading the endpoints for {span_s:g} s, the policy's window\n")
    while due_s < last_s:
        telemetry.read(clock.now_s(), policy.telemetry.window_s, _patience_s(policy))
        due_s = min(max(due_s + every_s, clock.now_s()), last_s)
        clock.sleep_until(due_s)
    return clock.now_s()


def _recent(path: Path, count: int) -> tuple[TickRecord, ...]:
    with contextlib.closing(open_reader(path)) as records:
        return tuple(records.tail(count))


def _policy_of(records: JournalReader, record: TickRecord) -> FleetPolicy:
    return _kept_policy(records.policy_text(record.policy_sha256))


def _kept_policy(text: str) -> FleetPolicy:
    """A policy that was in force when it was written to the journal."""
    try:
        return parse(text, "the policy", telemetry_required=False).policy
    except PolicyError as error:
        raise JournalError(
            f"a policy in the journal can't be read any more ({error}); use the Trimtab that wrote it, or move the "
            "journal away, and Trimtab starts a new one"
        ) from error


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
    steps = records.replayable()
    ticks = next((record.decision.tick for record in records.tail(1)), 0)
    shown = (
        steps if quiet or not out.is_terminal else track(steps, "replaying", total=ticks, console=out, transient=True)
    )
    entries = (replay.Recorded(entry.state_before, entry.policy_text, entry.record) for entry in shown)
    total, differing = 0, []
    for replayed in replay.replay(entries, _kept_policy, canonical_bytes):
        total += 1
        if not replayed.same:
            differing.append(replayed.record.decision.tick)
    return total, differing


def _create(path: Path, text: str, option: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise _exists(path, option) from error
    except OSError as error:
        raise TrimtabError(
            f"{path} can't be written ({error.strerror}); name a file in a folder that is there and writable."
        ) from error


def _exists(path: Path, option: str) -> TrimtabError:
    return TrimtabError(f"{path} exists already; name another file with {option}, or move it away first.")


def _known_pool(pool: str | None, policy: FleetPolicy) -> None:
    if pool is not None and pool not in policy.pools:
        raise TrimtabError(f"The policy has no pool {pool!r}; it has: {', '.join(policy.pools)}.")


def _time(text: str | None) -> float:
    if text is None:
        return WallClock().now_s()
    try:
        at_s = float(text)
    except ValueError:
        at_s = _moment_s(text)
    if not 0 <= at_s < YEAR_10000_S:
        raise _no_time(text)
    return at_s


def _moment_s(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _no_time(text) from None
    if moment.tzinfo is None:
        raise TrimtabError(f"--at {text!r} names no time zone; write {moment.isoformat()}Z for UTC.")
    return moment.timestamp()


def _no_time(text: str) -> TrimtabError:
    return TrimtabError(f"--at {text!r} is no time; write Unix seconds or 2026-11-30T14:32:15Z.")
