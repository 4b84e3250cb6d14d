"""Fixtures of the whole suite: real servers, captured telemetry, data beside the repository."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from servers import CAPTURE, ROOT, HttpServer, PrometheusServers, Reply, Request, prometheus_policy, require

from controller.adapters.prometheus import PrometheusTelemetry
from controller.observations import Snapshot

# The same examples in every run, on machines of any speed.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what the scenarios decide now into their files")


def pytest_configure() -> None:
    # Servers of tests are on this host: a developer's proxy must not be asked for them.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for program in marker.args:
            require(program)


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of the capture, in Unix seconds."""

    name: str
    start_s: float
    end_s: float


@pytest.fixture(scope="session")
def phases() -> dict[str, Phase]:
    """The phases of the capture by name, in their order."""
    marks = [json.loads(line) for line in (CAPTURE / "phases.jsonl").read_text().splitlines()]
    return {mark["phase"]: Phase(mark["phase"], mark["t"], after["t"]) for mark, after in pairwise(marks)}


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data that can't be part of the repository; tests that need it skip in a plain clone."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is absent: data that may not be published with the repository")
    return folder


@pytest.fixture(scope="session")
def prometheus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServers]:
    """A factory of real Prometheus servers: `prometheus_server()` serves the capture."""
    require("prometheus")
    servers = PrometheusServers(lambda: tmp_path_factory.mktemp("prometheus"))
    yield servers
    servers.close()


@pytest.fixture
def http_server() -> Iterator[Callable[..., HttpServer]]:
    """A factory of scripted HTTP servers: `http_server(lambda request: Reply(b"..."))`."""
    with ExitStack() as running:

        def start(respond: Callable[[Request], Reply], tls: ssl.SSLContext | None = None) -> HttpServer:
            server = HttpServer(respond, tls)
            running.callback(server.close)
            return server

        yield start


@pytest.fixture
def read_prometheus(http_server: Callable[..., HttpServer]) -> Callable[..., Snapshot]:
    """Reads once from a scripted server: read_prometheus(respond, deadline_s=..., **source) -> Snapshot."""

    def once(
        respond: Callable[[Request], Reply] | None,
        *,
        deadline_s: float = 30.0,
        url: str | None = None,
        **source: object,
    ) -> Snapshot:
        telemetry = PrometheusTelemetry(prometheus_policy(url or http_server(respond).url, **source))
        try:
            return telemetry.read(1e9, 60.0, deadline_s)
        finally:
            telemetry.close()

    return once
