"""`trimtab recommend` on a real Prometheus with real telemetry: each phase of the capture, read by the real command.

What is right was read off the capture's raw counters (`promtool tsdb dump`) by hand: a count of calls is the value
of `vllm:time_to_first_token_seconds_count` at the given time less the one 10 s before, summed over both engines.
`test_the_expected_values_are_those_of_the_raw_counters` reads them again, from the server's raw samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rig import Engine, fleet, frozen, query, sane, strict, trimtab, until, write_policy
from servers import HttpServer, PrometheusServer, PrometheusServers
from typer.testing import CliRunner

from controller.cli import app

pytestmark = pytest.mark.needs("prometheus")

WINDOW_S = 10
IDLE_S, BURST_S, PRESSURE_S, KILLED_S, HUNG_S = 1796077355, 1796077433, 1796077455, 1796077560, 1796077603
RAMP = {1796077385: 15, 1796077405: 44, 1796077415: 63, 1796077425: 111}
"""Calls of the 10 s before each time. Earlier in the ramp one call more or less is over 10 % of them."""

BURST_CALLS, BURST_WAITING, PRESSURE_PREEMPTIONS = 114, 159, 13
"""In the burst the queues, empty 10 s before, hold 87 and 72 calls; nothing was rejected."""


@pytest.fixture(scope="module")
def capture(prometheus_server: PrometheusServers) -> PrometheusServer:
    return prometheus_server()


@pytest.fixture(scope="module")
def policy(capture: PrometheusServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    telemetry = {"prometheus": {"url": capture.url}, "interval_s": 2, "window_s": WINDOW_S, "fresh_s": 15}
    return write_policy(tmp_path_factory.mktemp("phases") / "fleet.yaml", fleet(telemetry))


@pytest.fixture(scope="module", autouse=True)
def frozen_site(prometheus_server: PrometheusServers) -> Iterator[PrometheusServer]:
    """A Prometheus that scrapes an engine whose page never changes; it starts early, to have a window in time."""
    with closing(HttpServer(frozen("04_kvpressure_4.prom"))) as engine:
        yield prometheus_server(targets=[engine.address])


def recommended(policy: Path, at_s: float | None) -> tuple[dict, dict, dict]:
    """The pool as observed, its engines by name, and the decision."""
    at = () if at_s is None else ("--at", str(at_s))
    done = trimtab("recommend", "--policy", policy, *at, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = strict(done.stdout)
    pool = answer["observation"]["pools"][0]
    return pool, {replica["name"]: replica for replica in pool["replicas"]}, answer["decision"]


def scale_hold(decision: dict) -> str:
    """The reason why the pool is left as it is; there must be no move."""
    assert decision["moves"] == []
    return next(hold["reason"] for hold in decision["holds"] if hold["kind"] == "scale")


def states(replicas: dict) -> dict[str, str]:
    return {name: replica["state"] for name, replica in replicas.items()}


def alarms(decision: dict) -> list[tuple[str, str]]:
    return [(alarm["kind"], alarm["target"]) for alarm in decision["alarms"]]


def test_idle_is_zero_calls_and_no_latency(policy: Path) -> None:
    pool, replicas, decision = recommended(policy, IDLE_S)
    assert states(replicas) == {"vllm-0": "serving", "vllm-1": "serving"}
    for name in ("offered_calls_per_s", "served_calls_per_s", "running", "waiting", "preemptions_per_s"):
        assert pool[name]["value"] == 0, name
    for name in ("ttft_s", "itl_s", "hit_ratio"):
        assert pool[name]["kind"] == "nan", name
        assert "value" not in pool[name]
    assert scale_hold(decision)
    assert alarms(decision) == []


@pytest.mark.parametrize(("at_s", "calls"), RAMP.items())
def test_ramp_is_read_within_a_tenth_of_the_raw_counters(policy: Path, at_s: int, calls: int) -> None:
    pool, replicas, decision = recommended(policy, at_s)
    assert states(replicas) == {"vllm-0": "serving", "vllm-1": "serving"}
    assert pool["offered_calls_per_s"]["value"] == pytest.approx(calls / WINDOW_S, rel=0.1)
    assert 0 < pool["ttft_s"]["value"] < 60
    # The policy promises 1 s at the 95th percentile, and these engines are at their edge.
    broken = pool["ttft_s"]["value"] > 1.0
    assert alarms(decision) == ([("slo_broken", "tiny-cpu")] if broken else [])


def test_burst_is_offered_though_it_waits(policy: Path) -> None:
    pool, _, _ = recommended(policy, BURST_S)
    assert pool["waiting"]["value"] == BURST_WAITING
    assert pool["served_calls_per_s"]["value"] == pytest.approx(BURST_CALLS / WINDOW_S, rel=0.1)
    offered = (BURST_CALLS + BURST_WAITING) / WINDOW_S
    assert pool["offered_calls_per_s"]["value"] == pytest.approx(offered, rel=0.1)


def test_kv_pressure_shows_as_preemptions(policy: Path) -> None:
    pool, _, _ = recommended(policy, PRESSURE_S)
    assert pool["preemptions_per_s"]["value"] == pytest.approx(PRESSURE_PREEMPTIONS / WINDOW_S, rel=0.15)
    assert pool["kv_usage_ratio"]["value"] > 0.8


def test_killed_replica_is_down_and_no_reason_to_scale_in(policy: Path) -> None:
    pool, replicas, decision = recommended(policy, KILLED_S)
    assert states(replicas) == {"vllm-0": "serving", "vllm-1": "down"}
    gone = {name: reading for name, reading in replicas["vllm-1"].items() if isinstance(reading, dict)}
    assert {reading.get("kind") for reading in gone.values()} == {"absent"}
    # The other one is idle: its zero is a number, and no load at all would ask for fewer replicas.
    assert pool["offered_calls_per_s"]["value"] == 0
    assert "no scale-in while vllm-1 is down" in scale_hold(decision)
    assert alarms(decision) == [("replica_down", "tiny-cpu/vllm-1")]


def test_hung_replica_is_found_though_its_running_gauge_froze_at_zero(policy: Path) -> None:
    _, replicas, decision = recommended(policy, HUNG_S)
    assert states(replicas) == {"vllm-0": "hung", "vllm-1": "serving"}
    assert replicas["vllm-0"]["steps_per_s"]["value"] == 0
    assert replicas["vllm-0"]["waiting"]["kind"] == "stale"
    assert scale_hold(decision)
    assert alarms(decision) == [("replica_hung", "tiny-cpu/vllm-0")]


def test_engine_frozen_with_calls_running_is_hung(frozen_site: PrometheusServer, tmp_path: Path) -> None:
    whole = "count_over_time(vllm:num_requests_running[4s]) >= 18"
    until(lambda: query(frozen_site, whole), 30, "a window of scrapes")
    policy = write_policy(tmp_path / "fleet.yaml", fleet({"prometheus": {"url": frozen_site.url}}))
    _, replicas, decision = recommended(policy, None)
    assert states(replicas) == {"engine-0": "hung"}
    assert replicas["engine-0"]["running"]["value"] == 11
    assert replicas["engine-0"]["steps_per_s"]["value"] == 0
    assert scale_hold(decision)
    assert ("replica_hung", "tiny-cpu/engine-0") in alarms(decision)


def test_without_a_prometheus_a_window_of_pages_is_read(http_server: Callable[..., HttpServer], tmp_path: Path) -> None:
    engine = http_server(Engine(calls_per_s=40).respond)
    target = {"url": f"{engine.url}/metrics", "labels": {"pool": "a", "pod": "engine-0"}}
    policy = write_policy(tmp_path / "fleet.yaml", fleet({"scrape": {"targets": [target]}}))
    done = trimtab("recommend", "--policy", policy, "--json")
    assert (done.returncode, done.stderr) == (0, "trimtab: reading the endpoints for 4 s, the policy's window\n")
    pool = strict(done.stdout)["observation"]["pools"][0]
    assert pool["offered_calls_per_s"]["value"] == pytest.approx(40, rel=0.1)


@pytest.mark.parametrize(
    ("at_s", "words"),
    [
        (IDLE_S, ("2 of 2 replicas serve", "0 calls/s offered", "undef.")),
        (max(RAMP), ("2 of 2 replicas serve", "calls/s offered")),
        (BURST_S, ("159 waiting",)),
        (PRESSURE_S, ("hit rate",)),
        (KILLED_S, ("1 serving, 1 down", "ALARM replica_down", "no scale-in while")),
        (HUNG_S, ("1 serving, 1 hung", "ALARM replica_hung", "restart it")),
    ],
)
def test_phases_read_well(policy: Path, at_s: int, words: tuple[str, ...]) -> None:
    # In this process: only the words are new.
    done = CliRunner().invoke(app, ["recommend", "--policy", str(policy), "--at", str(at_s)])
    assert (done.exit_code, done.stderr) == (0, "")
    sane(done.stdout)
    for word in words:
        assert word in done.stdout


def test_the_expected_values_are_those_of_the_raw_counters(capture: PrometheusServer) -> None:
    def at(metric: str, at_s: float) -> float:
        series = query(capture, f'vllm:{metric}{{pool="a"}}', at_s)
        return sum(float(one["value"][1]) for one in series)

    def grown(metric: str, at_s: float) -> float:
        return at(metric, at_s) - at(metric, at_s - WINDOW_S)

    for at_s, calls in RAMP.items():
        assert grown("time_to_first_token_seconds_count", at_s) == calls
        assert grown("num_requests_waiting", at_s) == grown("admission_rejections_total", at_s) == 0
    assert grown("time_to_first_token_seconds_count", IDLE_S) == 0
    assert grown("time_to_first_token_seconds_count", BURST_S) == BURST_CALLS
    assert at("num_requests_waiting", BURST_S) == grown("num_requests_waiting", BURST_S) == BURST_WAITING
    assert grown("num_preemptions_total", PRESSURE_S) == PRESSURE_PREEMPTIONS
    assert at("num_requests_running", HUNG_S) == 0
    assert [one["value"][1] for one in query(capture, 'up{pod="vllm-1"}', KILLED_S)] == ["0"]
