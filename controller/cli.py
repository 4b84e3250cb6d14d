"""The command line: what can be said, and what becomes of errors. What the commands do is in controller.commands.

Exit codes: 0 done; 1 the answer is no (a check found something missing, a replay differed); 2 something outside is
wrong, said in one sentence; 70 a bug. TRIMTAB_DEBUG=1 shows where an error came from.

Commands are imported when they are called: `--help`, completion and a mistyped option answer at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from controller.errors import TrimtabError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class _Group(TyperGroup):
    """The group of commands; a reader who leaves early (`trimtab explain | head`) is no error."""

    def invoke(self, ctx: typer.Context) -> None:  # type: ignore[override]  # typer names its own context
        """Run the command, and bring all that it said to its reader."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Nobody is there to be told.
            _drop_output()


class _OutputError(OSError):
    """What standard output raises, so that its troubles are not taken for those of another file."""


class _Output(io.FileIO):
    """Standard output that says that it is the one in trouble."""

    def write(self, data: Buffer, /) -> int:
        """Write what there is room for."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _OutputError(error.errno, error.strerror) from error


def _drop_output() -> None:
    """What is still buffered must not fail again at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Standard output as an `_Output`; a stream that was closed before the start (`>&-`) goes nowhere, quietly."""
    # In the order of their numbers, so that no file that is opened later gets the number of one of them.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    old, replaced = sys.stdout, sys.stdout is not sys.__stdout__
    if old is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - likewise
    elif not replaced:  # whoever replaced it knows what becomes of it
        raw = io.BufferedWriter(_Output(old.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=bool(old.line_buffering))
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - likewise


app = typer.Typer(
    cls=_Group,
    help="Trimtab: a control plane for LLM inference fleets. It reads vLLM and DCGM telemetry, says what it would "
    "change and why, and never sits in the request path.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PolicyOption = Annotated[
    Path | None, typer.Option("--policy", "-p", help="The fleet policy file [default: fleet.yaml].")
]
JournalOption = Annotated[Path | None, typer.Option("--journal", help="The journal file [default: trimtab.db].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
AtOption = Annotated[
    str | None, typer.Option("--at", help="Look at this time: Unix seconds or RFC 3339 [default: now].")
]


@app.command(short_help="The daemon: observe, decide, explain and record, until SIGTERM.")
def run(
    policy: PolicyOption = None,
    journal: JournalOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for a free one [default: 9099].")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json [default: console].")] = None,
    forget_missing: Annotated[
        bool, typer.Option("--forget-missing", help="Replicas that are missing now were removed for good.")
    ] = False,
) -> None:
    """The daemon: observe, decide, explain and record, every interval, until SIGTERM. SIGHUP reloads the policy."""
    from controller import commands

    commands.run(
        forget_missing=forget_missing, policy=policy, journal=journal, host=host, port=port, log_format=log_format
    )


@app.command(short_help="One tick: what is observed, what should be done, and why.")
def recommend(
    policy: PolicyOption = None,
    at: AtOption = None,
    pool: Annotated[str | None, typer.Option(help="Only this pool.")] = None,
    as_json: JsonOption = False,
) -> None:
    """One tick: what is observed now, what should be done, and why. Nothing is recorded and nothing is changed."""
    from controller import commands

    commands.recommend(policy, at, pool, as_json=as_json)


@app.command(short_help="Is the policy valid, and does each of its signals exist?")
def check(
    policy: Annotated[Path | None, typer.Argument(help="The fleet policy file [default: fleet.yaml].")] = None,
    at: AtOption = None,
    offline: Annotated[bool, typer.Option("--offline", help="Validate the file only, ask no telemetry.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Validate a policy, then ask the telemetry source whether each signal of each pool exists."""
    from controller import commands

    _answer(yes=commands.check_policy(policy, at, offline=offline, as_json=as_json))


@app.command(short_help="The reasons behind the last decisions in the journal.")
def explain(
    pool: Annotated[str | None, typer.Argument(help="The pool [default: all].")] = None,
    journal: JournalOption = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="The last so many moves instead of the last tick.")
    ] = None,
) -> None:
    """The chain of reasons behind the last decisions in the journal, as sentences."""
    from controller import commands

    commands.explain_decision(pool, journal, last)


@app.command(short_help="Recorded observations again: is the same decided?")
def replay(
    journal: Annotated[Path, typer.Argument(help="The journal file.")],
    as_json: JsonOption = False,
) -> None:
    """Run the recorded observations through the decision again: the decisions must be the recorded ones."""
    from controller import commands

    _answer(yes=commands.replay_journal(journal, as_json=as_json))


@app.command(short_help="Look at what engines exist, and write a starter policy.")
def init(
    prometheus: Annotated[str, typer.Option("--prometheus", help="The URL of a Prometheus that scrapes the engines.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here [default: standard output].")
    ] = None,
    at: AtOption = None,
) -> None:
    """Look at what engines exist, and write a starter policy with comments."""
    from controller import commands

    commands.init(prometheus, output, at)


@app.command()
def schema() -> None:
    """The JSON Schema of the policy file."""
    from controller import commands

    commands.schema()


@app.command(short_help="A simulated day with and without Trimtab, side by side.")
def demo(
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Instead: the daemon on captured telemetry of two real vLLM engines.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write the plots here [default: trimtab-demo.html].")
    ] = None,
    as_json: JsonOption = False,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another day.")] = 1,
    short: Annotated[bool, typer.Option("--short", help="Half an hour instead of three hours: a first look.")] = False,
    journal: Annotated[Path | None, typer.Option(help="With --recorded: keep the demo's journal in this file.")] = None,
) -> None:
    """A simulated day, played three times: with two fixed fleets, and with the daemon's own loop in charge.

    Prints what happened as it happens, a table of all three, and where the plots are. With --recorded: the daemon on
    captured telemetry of two real vLLM engines, on virtual time; it recommends, no more.
    """
    if recorded:
        if report is not None or as_json or short:
            raise TrimtabError(
                "--report, --json and --short are for the simulated day; leave them out with --recorded."
            )
        from controller import commands

        _answer(yes=commands.play_recorded(journal))
        return
    if journal is not None:
        raise TrimtabError("--journal is for the recorded demo; add --recorded.")
    from controller import commands
    from controller.demo import show

    try:
        show.play(show.Options(report or show.REPORT, as_json, seed, short), commands.out)
    except KeyboardInterrupt:
        sys.stderr.write("trimtab: stopped; no report was written\n")
        raise typer.Exit(130) from None


@app.command(short_help="A simulated fleet in real time, for a Prometheus to scrape.")
def simulate(
    *,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the fleet's metrics endpoints (the only form yet).")],
    speed: Annotated[
        float, typer.Option(help="Virtual seconds per second; rates seen by Prometheus grow with it.")
    ] = 1.0,
    port: Annotated[int, typer.Option(help="Port to listen on, 0 for a free one.")] = 9100,
    file_sd: Annotated[
        Path | None, typer.Option("--file-sd", help="Keep the targets in this .json file, for Prometheus's file_sd.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other calls.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many seconds [default: at SIGTERM].")
    ] = None,
    policy_out: Annotated[
        Path | None, typer.Option("--policy-out", help="Write the fleet's policy here, for `trimtab run`.")
    ] = None,
    prometheus: Annotated[
        str, typer.Option("--prometheus", help="The URL of the Prometheus that will scrape, for that policy.")
    ] = "http://127.0.0.1:9090",
) -> None:
    """A simulated fleet in real time: vLLM, DCGM, gateway and task metrics over HTTP, for a Prometheus to scrape.

    Prints the scrape configuration, then serves until SIGTERM.
    """
    from controller import commands

    del serve
    commands.simulate(
        commands.Serving(speed, port, file_sd, seed, seconds), policy_out=policy_out, prometheus=prometheus
    )


def _answer(*, yes: bool) -> None:
    if not yes:
        raise typer.Exit(1)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Errors as sentences, never as tracebacks (unless TRIMTAB_DEBUG asks for them)."""
    try:
        yield
    except TrimtabError as error:
        if os.environ.get("TRIMTAB_DEBUG"):
            raise
        with contextlib.suppress(OSError):
            sys.stderr.write(f"trimtab: {error}\n")
        sys.exit(2)
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


@contextlib.contextmanager
def _delivered() -> Iterator[None]:
    """Bring all that was said to its reader, also what is said on the way out. Raises TrimtabError."""
    try:
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
    except _OutputError as error:
        said = error.strerror
        raise TrimtabError(
            f"standard output can't be written ({said}); free space there, or write elsewhere"
        ) from error
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()


def main() -> None:
    """The console script."""
    _open_streams()
    with _plainly(), _delivered():
        app()
