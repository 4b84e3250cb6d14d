"""The command line: what each command says, and how it fails: one sentence with place and remedy, and an exit code.

Most commands run in this process, through `main`; a process of its own runs where that is what is tested (start-up,
pipes, terminals, signal handlers and log files).
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from fcntl import ioctl
from pathlib import Path

import pytest
import yaml
from properties import worlds
from properties.worlds import PoolTick, WorldTick
from servers import CAPTURE, HttpServer, PrometheusServers, Reply, free_port

from controller.act import perform
from controller.adapters.journal import DECISIONS, SqliteJournal, open_reader
from controller.cli import main
from controller.decisions import ControllerState, TickRecord
from controller.policy_file import parse
from controller.step import step

COMMANDS = ("run", "recommend", "check", "explain", "replay", "init", "schema", "demo", "simulate")
BUSY_S, IDLE_S, HUNG_S = "1796077425", "1796077355", "1796077603"
TRIMTAB = (sys.executable, "-m", "controller")

POLICY = {
    "version": 1,
    "telemetry": {"prometheus": {"url": "http://127.0.0.1:9"}, "interval_s": 2, "window_s": 10, "fresh_s": 15},
    "gpus": {"CPU-CORE": {"count": 8, "usd_per_gpu_hour": 0.05}},
    "services": {"tiny": {"slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "pools": ["tiny-cpu"]}},
    "pools": {
        "tiny-cpu": {
            "select": {"pool": "a"},
            "model": {"name": "tiny"},
            "gpu": {"type": "CPU-CORE"},
            "replicas": {"min": 1, "max": 6},
        }
    },
}


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of the test's own, without the developer's settings."""
    for name in [name for name in os.environ if name.startswith("TRIMTAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trimtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process."""

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return Said(int(end.value.code or 0), said.out, said.err)

    return run


def spawn(*arguments: str | Path, **more: str) -> Said:
    """Run the command in a process of its own."""
    command = [*TRIMTAB, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | more, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


def refused(said: Said, *words: str) -> None:
    """Exit code 2, nothing but one sentence, which has the words."""
    assert said.code == 2
    assert said.err.startswith("trimtab: ")
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def strict(text: str) -> dict:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def write_policy(path: Path, url: str | None = None, **changes: object) -> Path:
    policy = json.loads(json.dumps(POLICY)) | changes
    if url is not None:
        policy["telemetry"]["prometheus"]["url"] = url
    path.write_text(yaml.safe_dump(policy))
    return path


@pytest.fixture
def policy(prometheus_server: PrometheusServers, tmp_path: Path) -> Path:
    """A policy of the captured fleet; nothing else of it is in the folder."""
    return write_policy(tmp_path / "fleet.yaml", prometheus_server().url)


@dataclass(frozen=True, slots=True)
class Played:
    """The demo's words and its journal."""

    said: Said
    journal: Path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    journal = tmp_path_factory.mktemp("demo") / "demo.db"
    return Played(spawn("demo", "--recorded", "--journal", journal), journal)


@pytest.fixture
def journal(played: Played, tmp_path: Path) -> Path:
    """A copy of the demo's journal, to be harmed."""
    return Path(shutil.copyfile(played.journal, tmp_path / "trimtab.db"))


MOVES = """
version: 1
telemetry: {prometheus: {url: "http://127.0.0.1:1"}}
gpus: {H100-SXM: {count: 16, usd_per_gpu_hour: 2.0}}
services: {chat: {slo: {ttft_s: 2.0, tpot_s: 0.05}, pools: [chat]}}
pools:
  chat:
    select: {app: chat}
    model: {name: m, parameters: 8.0e9}
    gpu: {type: H100-SXM}
    replicas: {min: 1, max: 8}
    scale: {kind: Deployment, name: chat}
"""


@pytest.fixture
def moves(tmp_path: Path) -> Path:
    """A journal of a pool whose load grows twice: two moves."""
    rules = parse(MOVES, "fleet.yaml").policy
    path, sha256 = tmp_path / "trimtab.db", hashlib.sha256(MOVES.encode()).hexdigest()
    script = [
        WorldTick(15.0, False, (PoolTick(load),)) for load in (20.0, 20.0, 60.0, 60.0, 120.0, 120.0, 400.0, 400.0)
    ]
    state = ControllerState()
    with SqliteJournal(path) as journal:
        for tick in worlds.play(rules, script):
            state, decision = step(rules, state, tick.observation)
            outcomes = perform(decision, rules, None, decision.now_s)
            journal.append(TickRecord(tick.observation, decision, sha256, outcomes), MOVES, state)
    return path


# --------------------------------------------------------------------------------------------------------------- help


def test_help_comes_at_once_and_reads_well() -> None:
    took_s = []
    for _ in range(3):
        started_s = time.monotonic()
        said = spawn("--help")
        took_s.append(time.monotonic() - started_s)
    assert min(took_s) < 1.0
    assert said.code == 0
    listed = said.out.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert not [line for line in listed if not line.endswith((".", "?")) or line.endswith("...")]
    assert max(map(len, said.out.splitlines())) <= 80


def test_help_loads_no_heavy_library() -> None:
    heavy = ("pydantic", "httpx", "requests", "uvicorn", "starlette", "apscheduler", "structlog", "numpy", "rich")
    code = f"import sys, controller.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(trimtab: Command, command: str) -> None:
    said = trimtab(command, "--help")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("Usage: ")


def test_a_command_that_is_none_is_refused(trimtab: Command) -> None:
    said = trimtab("recomend")
    assert said.code == 2
    assert "No such command 'recomend'" in said.err


# ------------------------------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize("command", [("recommend", "--policy"), ("check",)])
def test_policy_that_cannot_be_read_is_one_sentence(trimtab: Command, tmp_path: Path, command: tuple[str, ...]) -> None:
    refused(trimtab(*command, "nope.yaml"), "nope.yaml: there is no such file", "trimtab init")
    refused(trimtab(*command, tmp_path), "is a directory")
    write_policy(tmp_path / "fleet.yaml", "prometheus:9090")
    refused(trimtab(*command, "fleet.yaml"), "fleet.yaml:", "telemetry.prometheus.url", "http://")


def test_default_policy_is_named_when_it_is_absent(trimtab: Command) -> None:
    refused(trimtab("recommend"), "fleet.yaml: there is no such file")


def test_every_fault_of_a_policy_has_its_line(trimtab: Command, tmp_path: Path) -> None:
    write_policy(tmp_path / "fleet.yaml", mode="recomend", gpus={}, extra=1)
    said = trimtab("check", "--offline")
    assert (said.code, said.out) == (2, "")
    lines = said.err.removeprefix("trimtab: ").splitlines()
    assert len(lines) >= 3
    assert all(re.match(r"fleet\.yaml:\d+: ", line) for line in lines)


def test_policy_is_found_by_the_environment(trimtab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_policy(tmp_path / "other.yaml")
    monkeypatch.setenv("TRIMTAB_POLICY", "other.yaml")
    said = trimtab("check", "--offline")
    assert (said.code, said.out.splitlines()[0]) == (0, "other.yaml: valid")


def test_schema_is_json(trimtab: Command) -> None:
    said = trimtab("schema")
    assert said.code == 0
    assert strict(said.out)["title"] == "FleetPolicy"


# ------------------------------------------------------------------------------------------------- recommend and check


def test_recommend_says_what_it_sees_and_why_it_holds(trimtab: Command, policy: Path) -> None:
    said = trimtab("recommend", "--at", BUSY_S)
    assert (said.code, said.err) == (0, "")
    for word in ("Observed over 10 s", "2 serving", "tiny-cpu  scale: hold", "observed", "forecast", "hold"):
        assert word in said.out
    assert strict(trimtab("recommend", "--at", IDLE_S, "--json", "--pool", "tiny-cpu").out)["decision"]["tick"] == 1


@pytest.mark.parametrize("at", ["2026-11-30T22:23:45Z", "2026-11-30T23:23:45+01:00", "1796077425.0"])
def test_time_may_be_written_in_two_ways(trimtab: Command, policy: Path, at: str) -> None:
    assert strict(trimtab("recommend", "--at", at, "--json").out)["observation"]["now_s"] == 1796077425


@pytest.mark.parametrize("at", ["yesterday", "nan", "inf", "-5", "1e30", "22:23:45"])
def test_time_that_is_none_is_refused(trimtab: Command, policy: Path, at: str) -> None:
    for command in ("recommend", "check"):
        refused(trimtab(command, f"--at={at}"), f"--at '{at}' is no time", "2026-11-30T14:32:15Z")


def test_time_without_a_zone_is_refused(trimtab: Command, policy: Path) -> None:
    refused(trimtab("recommend", "--at", "2026-11-30T22:23:45"), "names no time zone; write 2026-11-30T22:23:45Z")


def test_unknown_pool_is_refused_with_those_that_are(trimtab: Command, policy: Path, journal: Path) -> None:
    refused(trimtab("recommend", "--pool", "tiny"), "no pool 'tiny'", "tiny-cpu")
    refused(trimtab("explain", "tiny"), "no pool 'tiny'", "tiny-cpu")
    refused(trimtab("explain", "tiny", "--last", "2"), "no pool 'tiny'", "tiny-cpu")


def test_prometheus_that_is_down_is_one_sentence(trimtab: Command, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    write_policy(tmp_path / "fleet.yaml", url)
    for said in (trimtab("recommend", "--json"), trimtab("check")):
        refused(said, f"{url} refused the connection", "telemetry.prometheus.url")
    refused(trimtab("init", "--prometheus", url), f"{url} refused the connection", "--prometheus")


def test_what_is_no_prometheus_is_one_sentence(
    trimtab: Command, tmp_path: Path, http_server: Callable[..., HttpServer]
) -> None:
    url = http_server(lambda _: Reply(b"<html>hello</html>", content_type="text/html")).url
    write_policy(tmp_path / "fleet.yaml", url)
    for said in (trimtab("recommend"), trimtab("check"), trimtab("init", "--prometheus", url)):
        refused(said, url)


def test_check_is_green_where_all_signals_are_there(trimtab: Command, policy: Path) -> None:
    said = trimtab("check", policy, "--at", BUSY_S)
    assert (said.code, said.err) == (0, "")
    assert "all there" in said.out
    found = strict(trimtab("check", policy, "--at", BUSY_S, "--json").out)
    assert found["pools"] == [{"pool": "tiny-cpu", "engines": ["vllm-0", "vllm-1"], "missing": [], "gpus": 0}]


def test_check_finds_a_wrong_label_and_prints_the_query(
    trimtab: Command, policy: Path, prometheus_server: PrometheusServers
) -> None:
    pools = {"tiny-cpu": POLICY["pools"]["tiny-cpu"] | {"select": {"pool": "b", "app": "chat"}}}
    write_policy(policy, prometheus_server().url, pools=pools)
    said = trimtab("check", policy, "--at", BUSY_S)
    assert (said.code, said.err) == (1, "")
    assert 'tiny-cpu: no engine\'s series carry pool="b", app="chat".' in said.out.replace(
        'app="chat", pool="b"', 'pool="b", app="chat"'
    )
    asked = next(line for line in said.out.splitlines() if line.startswith("  asked: "))
    assert "vllm:num_requests_running{" in asked
    assert 'pool=~"b|"' in asked
    assert "mend `select`" in said.out
    assert trimtab("check", policy, "--at", BUSY_S, "--json").code == 1


def test_check_offline_asks_nobody(trimtab: Command, tmp_path: Path) -> None:
    write_policy(tmp_path / "fleet.yaml")
    said = trimtab("check", "--offline")
    assert (said.code, said.out.splitlines()[0]) == (0, "fleet.yaml: valid")
    assert strict(trimtab("check", "--offline", "--json").out)["valid"] is True


def test_check_reads_scraped_engines_twice_because_rates_need_it(
    trimtab: Command, tmp_path: Path, http_server: Callable[..., HttpServer]
) -> None:
    page = (CAPTURE / "metrics" / "03_after.prom").read_bytes()
    engine = http_server(lambda _: Reply(page, content_type="text/plain; version=0.0.4"))
    targets = [{"url": f"{engine.url}/metrics", "labels": {"pool": "a", "pod": "engine-0"}}]
    write_policy(tmp_path / "fleet.yaml", telemetry={"scrape": {"targets": targets}, "interval_s": 2, "window_s": 10})
    said = trimtab("check")
    assert (said.code, "all there" in said.out) == (0, True)
    refused(trimtab("check", "--at", BUSY_S), "--at needs a Prometheus")
    engine.close()
    said = trimtab("check")
    assert said.code == 1
    assert "can't be reached" in said.out
    assert "mend `select`" not in said.out


# --------------------------------------------------------------------------------------------------------------- init


def test_init_writes_a_policy_that_check_accepts(
    trimtab: Command, prometheus_server: PrometheusServers, tmp_path: Path
) -> None:
    arguments = ("init", "--prometheus", prometheus_server().url, "--at", BUSY_S)
    shown = trimtab(*arguments)
    assert (shown.code, shown.err) == (0, "")
    assert list(parse(shown.out, "shown").policy.pools) == ["a"]
    said = trimtab(*arguments, "--output", "fleet.yaml")
    assert (said.code, (tmp_path / "fleet.yaml").read_text()) == (0, shown.out)
    assert "trimtab check fleet.yaml" in said.out
    assert trimtab("check", "--at", BUSY_S).code == 0
    assert trimtab("recommend", "--at", BUSY_S).code == 0


def test_init_overwrites_nothing(trimtab: Command, policy: Path, prometheus_server: PrometheusServers) -> None:
    before = policy.read_text()
    said = trimtab("init", "--prometheus", prometheus_server().url, "--at", BUSY_S, "--output", policy)
    refused(said, "exists already", "--output")
    assert policy.read_text() == before


def test_init_that_cannot_write_says_so(trimtab: Command, policy: Path, prometheus_server: PrometheusServers) -> None:
    for place in ("nowhere/fleet.yaml", f"{policy.name}/fleet.yaml"):
        said = trimtab("init", "--prometheus", prometheus_server().url, "--at", BUSY_S, "--output", place)
        refused(said, f"{place} can't be written")


def test_init_without_engines_says_where_it_looked(trimtab: Command, prometheus_server: PrometheusServers) -> None:
    url = prometheus_server().url
    refused(trimtab("init", "--prometheus", url, "--at", "1700000000"), url, "no engine's series")
    refused(trimtab("init", "--prometheus", "prometheus:9090"), "--prometheus", "http://prometheus:9090")
    refused(trimtab("init", "--prometheus", url, "--at", "noon"), "--at 'noon' is no time")


# ---------------------------------------------------------------------------------------- demo, explain and replay


def test_demo_tells_its_story(played: Played) -> None:
    assert (played.said.code, played.said.err) == (0, "")
    for word in (
        "alarm replica_hung",
        "alarm replica_down",
        "slo_broken",
        "It would have changed nothing",
        "0 of them decided",
    ):
        assert word in played.said.out
    assert not re.search(r"\bnan\b", played.said.out)
    assert all(len(line) <= 100 for line in played.said.out.splitlines() if "trimtab explain" not in line)


def test_demo_overwrites_nothing(journal: Path) -> None:
    before = journal.read_bytes()
    refused(spawn("demo", "--recorded", "--journal", journal), "exists already", "--journal")
    assert journal.read_bytes() == before


def test_explain_tells_of_the_last_tick(trimtab: Command, journal: Path) -> None:
    for said in (trimtab("explain"), trimtab("explain", "tiny-cpu"), trimtab("explain", "--journal", journal)):
        assert (said.code, said.err) == (0, "")
        assert "tiny-cpu  scale: hold" in said.out
        assert "  observed " in said.out


def test_explain_tells_of_the_last_moves(trimtab: Command, moves: Path) -> None:
    one, two = (trimtab("explain", "chat", "--last", count, "--journal", moves) for count in ("1", "2"))
    assert (one.code, two.code) == (0, 0)
    assert (one.out.count("  do "), two.out.count("  do ")) == (1, 2)
    assert two.out.endswith(one.out)
    for word in ("recommended", "kubectl -n default scale deployment/chat", "  undo ", "  expected "):
        assert word in one.out
    assert trimtab("explain", "--last", "0").code == 2


def test_empty_journal_is_said_to_be_empty(trimtab: Command, tmp_path: Path) -> None:
    SqliteJournal(tmp_path / "trimtab.db").close()
    said = trimtab("explain")
    assert (said.code, said.out) == (0, "trimtab.db holds no tick yet.\n")
    said = trimtab("explain", "tiny-cpu", "--last", "3")
    assert (said.code, said.out) == (0, "trimtab.db holds no move of tiny-cpu yet.\n")


@pytest.mark.parametrize("command", [("explain", "--journal"), ("replay",)])
def test_journal_that_cannot_be_read_is_one_sentence(
    trimtab: Command, journal: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    refused(trimtab(*command, "nope.db"), "nope.db: there is no journal", "trimtab run")
    refused(trimtab(*command, tmp_path), "folder")
    (tmp_path / "junk.db").write_bytes(b"no database " * 1000)
    refused(trimtab(*command, "junk.db"), "junk.db: this is not a journal")
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE t (a)")
    refused(trimtab(*command, "other.db"), "other.db: this is another application's database")
    journal.write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])
    refused(trimtab(*command, journal), "trimtab.db", "damaged")


def test_replay_gives_the_recorded_decisions(trimtab: Command, journal: Path) -> None:
    said = trimtab("replay", journal)
    assert (said.code, said.err) == (0, "")
    ticks = int(said.out.split()[0])
    assert said.out == f"{ticks} ticks replayed; every decision is the recorded one, byte for byte.\n"
    assert strict(trimtab("replay", journal, "--json").out) == {"replayed": ticks, "differing_ticks": []}


def test_replay_finds_a_decision_that_was_changed(trimtab: Command, moves: Path) -> None:
    journal = moves
    with closing(open_reader(journal)) as reader:
        record = next(record for record in reader.records() if record.decision.moves)
    tick = record.decision.tick
    forged = DECISIONS.encode(replace(record.decision, moves=()))
    with closing(sqlite3.connect(journal)) as database, database:
        database.execute("UPDATE ticks SET decision = ? WHERE tick = ?", (forged, tick))
    said = trimtab("replay", journal)
    assert said.code == 1
    assert re.fullmatch(rf"1 of \d+ ticks decide differently now, the first is tick {tick}\.\n", said.out)
    said = trimtab("replay", journal, "--json")
    assert (said.code, strict(said.out)["differing_ticks"]) == (1, [tick])


def test_replay_of_a_broken_record_says_which(trimtab: Command, journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as database, database:
        database.execute("UPDATE ticks SET observation = x'00' WHERE tick = 7")
    refused(trimtab("replay", journal), "tick 7 can't be read")


# ---------------------------------------------------------------------------------------------------------------- run


def test_run_refuses_what_it_cannot_do(policy: Path, http_server: Callable[..., HttpServer]) -> None:
    refused(spawn("run", "--policy", "nope.yaml"), "nope.yaml: there is no such file")
    refused(spawn("run", "--log-format", "xml"), "--log-format", "console", "json")
    taken = http_server(lambda _: Reply()).address.rpartition(":")[2]
    refused(spawn("run", "--port", taken), f"127.0.0.1:{taken}", "another program listens there")


# ------------------------------------------------------------------------------------------------ pipes and terminals


@pytest.mark.parametrize(("command", "reader"), [("explain --last 9", "head -1 >/dev/null"), ("schema", "true")])
def test_reader_who_leaves_early_is_no_error(journal: Path, command: str, reader: str) -> None:
    pipe = f"set -o pipefail; {' '.join(TRIMTAB)} {command} | {reader}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["schema", "--help", "demo"])
def test_output_that_cannot_be_written_is_one_sentence(command: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*TRIMTAB, command], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2
    said = done.stderr.decode()
    assert said == (
        "trimtab: standard output can't be written (No space left on device); free space there, or write elsewhere\n"
    )


@pytest.mark.parametrize(("command", "code"), [("schema", 0), ("check nowhere.yaml", 2)])
def test_streams_that_were_closed_before_the_start_are_no_bug(command: str, code: int) -> None:
    script = f"{' '.join(TRIMTAB)} {command} >&- 2>&- <&-"
    assert subprocess.run(["bash", "-c", script], timeout=60, check=False).returncode == code


def on_terminal(columns: int, *arguments: str, **more: str) -> str:
    """What the command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [*TRIMTAB, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | more
    )
    os.close(theirs)
    text = b"".join(_read(ours)).decode()
    os.close(ours)
    assert process.wait(30) == 0
    return text.replace("\r\n", "\n")


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the last writer has left
            return
        if not piece:
            return
        yield piece


def test_table_fits_a_narrow_terminal(policy: Path) -> None:
    text = on_terminal(80, "recommend", "--at", HUNG_S, TERM="xterm", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text), "a colour in spite of NO_COLOR"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    table = plain[: plain.index("tiny-cpu  scale: hold")]
    assert max(map(len, table.splitlines())) <= 80
    assert "1 serving, 1 hung" in re.sub(r"\s+", " ", table)


def test_dumb_terminal_gets_plain_text(policy: Path) -> None:
    assert "\x1b" not in on_terminal(120, "recommend", "--at", IDLE_S, TERM="dumb")
