"""`trimtab simulate --serve`: what a real Prometheus makes of it, and what the daemon then reads, against memory."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from rig import TRIMTAB, environment, fetch, query, trimtab, until
from servers import PrometheusServer, PrometheusServers, free_port, require

from controller import observe
from controller.adapters.prometheus import PrometheusTelemetry
from controller.adapters.series import PROMETHEUS_2, PROMETHEUS_3, Grouping, Row, Rules, SeriesStore
from controller.adapters.signals import catalogue, tasks
from controller.decisions import ControllerState
from controller.errors import TrimtabError
from controller.observations import Hole, Known, Observation, ReplicaState, Snapshot
from controller.policy import FleetPolicy
from controller.policy_file import load
from controller.simulate import Served, Simulation, policy_for, scrape_config, write_targets
from models.fleetsim.build import Size
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import CHAT, H100_X4, PoolOf, ServiceOf, Starts

WINDOW_S = 8.0
STARTS = Starts(1.0, 1.0, 2.0, 3.0, 1.0, 1.0, 2.0)
"""A crashed container serves again after 2 + 3 s."""
SERVICES = (
    ServiceOf(
        "assistant",
        (PoolOf("fast", H100_X4, 2, 4, starts=STARTS), PoolOf("slow", H100_X4, 1, 2)),
        (6.0,),
        profiles=(CHAT,),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Processes have a minute: in a fresh clone the plant must have been compiled, to disk, before they start."""
    plant = Plant(SERVICES, seed=1)
    plant.run(5.0)
    plant.crash(0)


@contextmanager
def running(simulation: Simulation, file_sd: Path | None = None) -> Iterator[None]:
    """The simulation's time passes, in a thread; what it raises fails the test."""
    stop, raised = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            simulation.run(stop, file_sd=file_sd)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not raised, raised


# ------------------------------------------------------------------------------------- through Prometheus and in memory


@dataclass(frozen=True, slots=True)
class Scraped:
    """What a Prometheus scraped: its server, every answer in order, the targets, and instants to look at (Unix s)."""

    server: PrometheusServer
    served: tuple[Served, ...]
    targets: dict[str, tuple[tuple[str, str], ...]]
    instants: dict[str, float]


@pytest.fixture(scope="module")
def scraped(prometheus_server: PrometheusServers, tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    """Some 20 s of a fleet, scraped every second; one replica crashes in between and comes back."""
    file_sd = tmp_path_factory.mktemp("simulated") / "targets.json"
    served: list[Served] = []

    def newest(name: str) -> list[Served]:
        return [each for each in list(served) if each.page.name == name]

    def scrapes(name: str, count: int, *, fine: bool) -> Callable[[], bool]:
        """Whether a page's last so many answers were all whole (fine), or all refused."""
        return lambda: (
            len(last := newest(name)[-count:]) == count and all((each.page.rows is not None) is fine for each in last)
        )

    with ExitStack() as stack:
        simulation = stack.enter_context(closing(Simulation(Plant(SERVICES, seed=5), listen=served.append)))
        stack.enter_context(running(simulation, file_sd))
        until(file_sd.exists, 10, "the targets")
        config = yaml.safe_load(scrape_config(simulation.targets(), file_sd))
        config["scrape_configs"][0] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
        server = prometheus_server(config=yaml.safe_dump(config))
        instants: dict[str, float] = {}
        until(scrapes("fast-0", 10, fine=True), 30, "ten scrapes")
        instants["all serve"] = newest("fast-0")[-1].at_s + 0.3
        simulation.change(lambda plant: plant.crash(0))
        until(scrapes("fast-0", 3, fine=False), 30, "three scrapes of a replica that is down")
        instants["one is down"] = newest("fast-0")[-1].at_s + 0.3
        until(scrapes("fast-0", 5, fine=True), 30, "five scrapes of the replica's next process")
        instants["it is back"] = newest("fast-0")[-1].at_s + 0.3
        last_s = instants["it is back"]
        until(
            lambda: query(server, f"min(timestamp(up)) > {last_s}"),
            10,
            "a scrape of every target after the last instant",
        )
        targets = {dict(target.labels)["instance"]: target.labels[1:] for target in simulation.targets()}
    return Scraped(server, tuple(served), targets, instants)


def policy(url: str) -> FleetPolicy:
    data = policy_for(SERVICES, url).policy.model_dump(mode="json")
    data["telemetry"] |= {"interval_s": 1, "window_s": WINDOW_S, "fresh_s": 5}
    return FleetPolicy.model_validate(data)


def in_memory(scraped: Scraped, fleet: FleetPolicy, at_s: float) -> SeriesStore:
    """The pages until `at_s` (Unix s) in a store, each at the time that the Prometheus gave its scrape."""
    source = fleet.telemetry.tasks
    entries = catalogue(("vllm",), gateway=True, task_entries=tasks(source.metric, tuple(source.error.items())))
    replica = ("instance", "job", "pod", "namespace", "pool")
    store = SeriesStore(entries, Grouping(replica, gateway=("envoy_cluster_name",), tasks=("service_name",)))
    for series in query(scraped.server, "up[2m]", at_s):
        labels, values = series["metric"], series["values"]
        assert isinstance(labels, dict)
        assert isinstance(values, list)
        target = tuple(sorted(scraped.targets[labels["instance"]]))
        assert dict(target).items() <= labels.items()
        pages = [each for each in scraped.served if each.page.name == labels["instance"]]
        for scrape_s, up in values:
            # The scrape began at or just before the time at which it was answered.
            answers = [each.page.rows for each in pages if -0.01 <= each.at_s - scrape_s < 0.9]
            found = answers[0] if answers and up == "1" else ()
            assert found is not None, f"{labels['instance']} was refused, and yet is up"
            assert bool(found) == (up == "1")
            rows = [Row(row.name, row.labels, row.value) for row in found]
            store.scraped(scrape_s, target, (*rows, Row("up", (), float(up))))
    return store


def leaves(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Every reading and every other value of an observation, by its place; times and wordings are left out."""
    if isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from leaves(each, f"{place}[{number}]")
    elif is_dataclass(value) and not isinstance(value, Known | Hole):
        for field in fields(value):
            if field.name not in {"now_s", "detail"}:
                yield from leaves(getattr(value, field.name), f"{place}.{field.name}")
    else:
        yield place, value


def alike(one: object, other: object) -> bool:
    """Whether two values are the same, far closer than the 5 % that are promised, or the same kind of nothing."""
    match one, other:
        case Known(), Known():
            return one.value == pytest.approx(other.value, rel=0.001, abs=1e-9)
        case Hole(), Hole():
            return one.kind is other.kind
        case _:
            return one == other


def differences(one: Observation, other: Observation) -> dict[str, tuple[object, object]]:
    """Where two observations are not alike, and what each says there."""
    mine, yours = dict(leaves(one)), dict(leaves(other))
    return {
        place: (mine.get(place), yours.get(place))
        for place in {**mine, **yours}
        if not alike(mine.get(place), yours.get(place))
    }


def rules_of(server: PrometheusServer) -> list[Rules]:
    """The rules that the server's version may have: of version 2, late releases extrapolate as version 3 does."""
    version = json.loads(fetch(f"{server.url}/api/v1/status/buildinfo") or "")["data"]["version"]
    late_2 = Rules(left_open=False, zero_point_first=False)
    return [PROMETHEUS_2, late_2] if version.startswith("2.") else [PROMETHEUS_3]


def states(observation: Observation) -> list[ReplicaState]:
    return [replica.state for replica in observation.pools[0].replicas]


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize("moment", ["all serve", "one is down", "it is back"])
def test_daemon_reads_the_same_through_prometheus_as_in_memory(scraped: Scraped, moment: str) -> None:
    fleet, at_s = policy(scraped.server.url), round(scraped.instants[moment], 3)
    with closing(PrometheusTelemetry(fleet)) as telemetry:
        snapshot = telemetry.read(at_s, WINDOW_S, 20)
    assert not snapshot.holes
    read = observe.build(fleet, ControllerState(), snapshot, (), at_s)
    store = in_memory(scraped, fleet, at_s)
    found = []
    for rules in rules_of(scraped.server):
        known = observe.build(fleet, ControllerState(), Snapshot(store.evaluate(at_s, WINDOW_S, rules)), (), at_s)
        found.append(differences(read, known))
    assert min(found, key=len) == {}
    first = ReplicaState.DOWN if moment == "one is down" else ReplicaState.SERVING
    assert states(read) == [first, ReplicaState.SERVING]
    for rate in (read.pools[0].served_calls_per_s, read.services[0].gateway_calls_per_s):
        assert isinstance(rate, Known)
        assert rate.value > 0
    assert len(read.pools[0].gpus) == 8


# ---------------------------------------------------------------------------------------------------- targets, command


def test_file_sd_follows_replicas_that_come_and_go(tmp_path: Path) -> None:
    file_sd = tmp_path / "targets.json"

    def pods() -> set[str]:
        return {group["labels"]["instance"] for group in json.loads(file_sd.read_text())} - {"dcgm", "gateway", "tasks"}

    with closing(Simulation(Plant(SERVICES, seed=2), speed=20)) as simulation, running(simulation, file_sd):
        until(file_sd.exists, 10, "the targets")
        assert pods() == {"fast-0", "fast-1", "slow-0"}
        simulation.change(lambda plant: plant.scale("fast", 3))
        (fresh,) = until(lambda: pods() - {"fast-0", "fast-1", "slow-0"}, 10, "a new replica")
        assert fetch(f"http://{simulation.address}/{fresh}/metrics") is None
        until(lambda: fetch(f"http://{simulation.address}/{fresh}/metrics"), 10, "the new replica's first page")
        simulation.change(lambda plant: plant.scale("fast", 1))
        until(lambda: len(pods()) == 2, 10, "two replicas fewer")
        assert list(tmp_path.iterdir()) == [file_sd]


def test_without_a_file_the_targets_are_static(tmp_path: Path) -> None:
    with closing(Simulation(Plant(SERVICES, seed=2))) as simulation:
        config = yaml.safe_load(scrape_config(simulation.targets(), None))
        groups = config["scrape_configs"][0]["static_configs"]
        labels = [group["labels"] for group in groups]
        assert labels[0] == {
            "__metrics_path__": "/fast-0/metrics",
            "instance": "fast-0",
            "job": "replica",
            "namespace": "serving",
            "pod": "fast-0",
            "pool": "fast",
        }
        assert {group["targets"][0] for group in groups} == {simulation.address}
        assert fetch(f"http://{simulation.address}/").split() == [each["__metrics_path__"] for each in labels]
        assert fetch(f"http://{simulation.address}/fast-7/metrics") is None


def test_command_serves_until_sigterm_and_ends_with_0(tmp_path: Path) -> None:
    port, file_sd, out = free_port(), tmp_path / "targets.json", tmp_path / "fleet.yaml"
    options = ["--port", str(port), "--file-sd", file_sd, "--policy-out", out, "--prometheus", "http://127.0.0.1:9"]
    command = [*TRIMTAB, "simulate", "--serve", *map(str, options)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            page = until(lambda: fetch(f"http://127.0.0.1:{port}/assistant-h100-0/metrics"), 60, "a page")
            until(file_sd.exists, 10, "the targets")
        finally:
            process.send_signal(signal.SIGTERM)
            printed, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert not file_sd.exists(), "a Prometheus would go on scraping what it names"
    assert "vllm:num_requests_running" in page
    assert "Traceback" not in said
    assert load(out).policy.telemetry.prometheus.url == "http://127.0.0.1:9"
    config = tmp_path / "prometheus.yml"
    config.write_text(printed)
    promtool = [require("promtool"), "check", "config", str(config)]
    checked = subprocess.run(promtool, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_command_stops_after_its_seconds_and_refuses_without_serve(tmp_path: Path) -> None:
    assert trimtab("simulate", "--serve", "--port", "0", "--seconds", "0.2").returncode == 0
    refused = trimtab("simulate")
    assert refused.returncode == 2
    assert "--serve" in refused.stderr


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    plant = Plant(SERVICES, seed=2)
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TrimtabError, match="--speed"):
            Simulation(plant, speed=speed)
    with closing(Simulation(plant)) as simulation:
        taken = int(simulation.address.rpartition(":")[2])
        with pytest.raises(TrimtabError, match="another program listens there"):
            Simulation(plant, port=taken)
        with pytest.raises(TrimtabError, match="from 0"):
            Simulation(plant, port=70_000)
        with pytest.raises(TrimtabError, match=r"^--prometheus is the text"):
            policy_for(SERVICES, "nonsense")
        with pytest.raises(TrimtabError, match=r"must end in \.json"):
            write_targets(tmp_path / "targets.yaml", simulation.targets())
        with pytest.raises(TrimtabError, match="can't be written"):
            write_targets(tmp_path / "nowhere" / "targets.json", simulation.targets())


def test_fleet_that_outgrows_its_room_ends_with_one_sentence() -> None:
    plant = Plant(SERVICES, seed=2, size=Size(tasks=20, calls=20, chains=200, events=400))
    with closing(Simulation(plant, speed=100)) as simulation, pytest.raises(TrimtabError, match="room for"):
        simulation.run(threading.Event(), seconds=30)


def test_existing_policy_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "fleet.yaml"
    out.write_text("mine")
    said = trimtab("simulate", "--serve", "--port", "0", "--policy-out", out)
    assert said.returncode == 2
    assert "exists already" in said.stderr
    assert out.read_text() == "mine"
