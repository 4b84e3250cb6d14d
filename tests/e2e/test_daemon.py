"""`trimtab run` against real servers: killed, starved, misconfigured; nothing is decided twice, nothing is lost."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rig import Daemon, Engine, Prometheus, fleet, sql, strict, trimtab, until, write_policy
from servers import HttpServer

from controller.adapters.journal import open_reader
from controller.decisions import TickRecord

Start = Callable[[Path, Path], Daemon]
Serve = Callable[..., HttpServer]

needs_prometheus = pytest.mark.needs("prometheus")
WINDOW_IS_FULL = "count(count_over_time(vllm:num_requests_running[4s]) >= 7) == 2"


@dataclass(frozen=True, slots=True)
class Site:
    """Two engines and the Prometheus that scrapes them as engine-0 and engine-1."""

    steady: Engine
    other: Engine
    server: Prometheus


@pytest.fixture(scope="module")
def one_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    engines = (Engine(calls_per_s=40), Engine(calls_per_s=40))
    with ExitStack() as running:
        servers = [running.enter_context(closing(HttpServer(engine.respond))) for engine in engines]
        server = Prometheus(tmp_path_factory.mktemp("prometheus"), [one.address for one in servers])
        running.callback(server.kill)
        yield Site(*engines, server)


@pytest.fixture
def site(one_site: Site) -> Site:
    """The site, scraped for a whole window; a test may leave its Prometheus dead."""
    one_site.server.start()
    one_site.server.wait_for(WINDOW_IS_FULL)
    return one_site


def policy_for(folder: Path, site: Site, pod: str = "engine-0") -> Path:
    """A policy of a pool of one engine."""
    policy = fleet({"prometheus": {"url": site.server.url, "timeout_s": 2}}, select={"pod": pod})
    return write_policy(folder / "fleet.yaml", policy)


def records(journal: Path) -> list[TickRecord]:
    with open_reader(journal) as reader:
        return list(reader.records())


def moves(journal: Path) -> list[str]:
    return [move.id for record in records(journal) for move in record.decision.moves]


def series(daemon: Daemon) -> dict[str, float]:
    """The daemon's own metrics, by name and labels, from a page that parses."""
    page = until(lambda: daemon.get("/metrics"), 5, "an answer of /metrics")
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def holds_everything(record: dict) -> bool:
    """Whether a tick changes nothing, for want of data."""
    decision = record["decision"]
    scale = [hold["reason"] for hold in decision["holds"] if hold["kind"] == "scale"]
    return decision["moves"] == [] and len(scale) == 1


@needs_prometheus
def test_killed_daemon_repeats_nothing_and_loses_nothing(site: Site, start_daemon: Start, tmp_path: Path) -> None:
    policy, journal = policy_for(tmp_path, site, "engine-1"), tmp_path / "trimtab.db"
    told: list[int] = []

    daemon = start_daemon(policy, journal)
    daemon.wait("move")
    told += daemon.ticks()
    daemon.kill()  # at once after a move was told of

    daemon = start_daemon(policy, journal)
    before = moves(journal)
    daemon.wait_ticks(3)
    assert moves(journal) == before, "a standing recommendation was made again"
    standing = daemon.state()["decision"]["assessments"][0]["standing"]
    assert standing["move_id"] == before[-1]
    told += [*daemon.ticks(), daemon.state()["decision"]["tick"]]
    daemon.kill()  # somewhere between two moves

    daemon = start_daemon(policy, journal)
    daemon.wait_ticks(1)
    site.other.load(100)
    count = len(before)
    until(lambda: len(moves(journal)) > count, 20, "a further move in the journal")
    told += daemon.ticks()
    daemon.kill()  # as soon as a move is durable, perhaps before its outcome is

    daemon = start_daemon(policy, journal)
    daemon.wait_ticks(3)
    told += daemon.ticks()
    assert daemon.stop() == 0
    told += daemon.ticks()

    written = records(journal)
    ticks = [record.decision.tick for record in written]
    assert ticks == list(range(1, len(ticks) + 1))
    assert set(told) <= set(ticks)
    made = moves(journal)
    assert len(made) == len(set(made))
    # Every move has its outcome, be it completed by the next process.
    for record in written:
        assert [outcome.move_id for outcome in record.outcomes] == [move.id for move in record.decision.moves]
    # Each move goes further than the one that stands.
    targets = [(move.actions[0].before, move.actions[0].after) for record in written for move in record.decision.moves]
    assert [before for before, _ in targets] == [1] * len(targets)
    assert sorted({after for _, after in targets}) == [after for _, after in targets]
    assert sql(journal, "PRAGMA integrity_check") == [("ok",)]
    again = trimtab("replay", journal)
    assert (again.returncode, again.stdout.split()[0]) == (0, str(len(ticks)))


@needs_prometheus
def test_sigterm_finishes_the_tick_and_writes_the_checkpoint(site: Site, start_daemon: Start, tmp_path: Path) -> None:
    journal = tmp_path / "trimtab.db"
    daemon = start_daemon(policy_for(tmp_path, site), journal)
    daemon.wait("tick")
    second = trimtab("run", "--policy", tmp_path / "fleet.yaml", "--journal", journal, "--port", "0")
    assert second.returncode == 2
    assert f"another Trimtab (process {daemon.process.pid}) already writes this journal" in second.stderr
    assert daemon.stop(within_s=5) == 0
    ((last,),) = sql(journal, "SELECT max(tick) FROM ticks")
    assert sql(journal, "SELECT tick FROM checkpoint") == [(last,)]
    assert daemon.wait("stopped")["tick"] == last == daemon.ticks()[-1]


@needs_prometheus
def test_running_daemon_answers(site: Site, start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(policy_for(tmp_path, site), tmp_path / "trimtab.db")
    daemon.wait("tick")
    assert daemon.get("/healthz") is not None
    assert daemon.get("/readyz") == "ready\n"
    found = series(daemon)
    assert found['trimtab_pool_offered_calls_per_second{"pool": "tiny-cpu"}'] == pytest.approx(40, rel=0.05)
    assert any(name.startswith("trimtab_replica_capacity_calls_per_second") for name in found)
    pool = daemon.state()["observation"]["pools"][0]
    assert pool["offered_calls_per_s"]["value"] == pytest.approx(40, rel=0.05)
    decisions = strict(str(daemon.get("/api/v1/decisions?limit=1000")))["decisions"]
    assert [one["tick"] for one in decisions] == sorted((one["tick"] for one in decisions), reverse=True)


@needs_prometheus
def test_outage_of_prometheus_holds_and_ends(site: Site, start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(policy_for(tmp_path, site), tmp_path / "trimtab.db")
    daemon.wait("tick")
    site.server.kill()
    daemon.wait("alarm", kind="telemetry_blind", target="tiny-cpu")
    daemon.wait_ticks(1)
    record = daemon.state()
    assert "refused the connection" in record["observation"]["holes"][0]["detail"]
    assert [one["state"] for one in record["observation"]["pools"][0]["replicas"]] == ["blind"]
    assert holds_everything(record)
    assert {alarm["kind"] for alarm in record["decision"]["alarms"]} == {"telemetry_blind", "telemetry_partial"}
    found = series(daemon)
    assert sum(value for name, value in found.items() if name.startswith("trimtab_telemetry_holes_total")) > 0
    assert any(name.startswith("trimtab_alarm{") and "telemetry_blind" in name for name in found)
    assert not any(name.startswith("trimtab_pool_offered_calls_per_second") for name in found)
    assert daemon.get("/healthz") is not None
    site.server.start()
    daemon.wait("alarm over", kind="telemetry_blind", target="tiny-cpu")
    until(lambda: "value" in daemon.state()["observation"]["pools"][0]["offered_calls_per_s"], 20, "a load again")
    assert daemon.state()["observation"]["holes"] == []


@needs_prometheus
def test_bad_policy_changes_nothing_and_a_good_one_is_taken(site: Site, start_daemon: Start, tmp_path: Path) -> None:
    policy = policy_for(tmp_path, site)
    good, journal = policy.read_text(), tmp_path / "trimtab.db"
    daemon = start_daemon(policy, journal)
    daemon.wait("tick")
    first = daemon.state()["policy_sha256"]
    policy.write_text(good.replace("mode: recommend", "mode: recomend").replace("engine-0", "engine-1") + "typo: 1\n")
    daemon.signal(signal.SIGHUP)
    line = daemon.wait("the changed policy is refused, the old one stays in force")
    assert f"{policy}:" in str(line["cause"])
    daemon.wait_ticks(1)
    assert daemon.state()["policy_sha256"] == first
    assert series(daemon)["trimtab_policy_reload_success{}"] == 0
    # Nobody needs to tell it: the file is looked at every few seconds.
    policy.write_text(good.replace("scalings_per_hour: 100", "scalings_per_hour: 90"))
    daemon.wait("policy reloaded")
    daemon.wait_ticks(1)
    assert daemon.state()["policy_sha256"] != first
    assert series(daemon)["trimtab_policy_reload_success{}"] == 1
    assert daemon.stop() == 0
    second = hashlib.sha256(policy.read_bytes()).hexdigest()
    assert {record.policy_sha256 for record in records(journal)} == {first, second}
    assert trimtab("replay", journal).returncode == 0


def test_daemon_reads_engines_without_a_prometheus(http_server: Serve, start_daemon: Start, tmp_path: Path) -> None:
    engine = Engine(calls_per_s=20)
    alive, dying = http_server(engine.respond), http_server(engine.respond)
    targets = [
        {"url": f"{one.url}/metrics", "labels": {"pool": "a", "pod": f"engine-{number}"}}
        for number, one in enumerate((alive, dying))
    ]
    policy = write_policy(tmp_path / "fleet.yaml", fleet({"scrape": {"targets": targets, "timeout_s": 2}}))
    journal = tmp_path / "trimtab.db"
    daemon = start_daemon(policy, journal)

    def offered() -> float:
        reading = daemon.state()["observation"]["pools"][0]["offered_calls_per_s"]
        return float(reading.get("value", 0))

    until(lambda: offered() == pytest.approx(40, rel=0.05), 20, "the load of both engines")
    dying.close()
    daemon.wait("alarm", kind="replica_down", target="tiny-cpu/engine-1")
    until(lambda: offered() == pytest.approx(20, rel=0.05), 20, "the load of the one that is left")
    # A stop in the middle of a tick lets it finish.
    engine.stall_s, asked = 1.0, len(alive.requests)
    until(lambda: len(alive.requests) > asked, 10, "a tick that has begun")
    begun = sql(journal, "SELECT max(tick) FROM ticks")[0][0]
    assert daemon.stop() == 0
    assert sql(journal, "SELECT max(tick) FROM ticks") == [(begun + 1,)]
    assert trimtab("replay", journal).returncode == 0
