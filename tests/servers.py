"""Servers that tests start for themselves: a real Prometheus, and scripted HTTP servers; and loud skips."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from controller.policy import FleetPolicy

ROOT = Path(__file__).resolve().parent.parent
CAPTURE = ROOT / "tests" / "data" / "vllm_cpu"
READY_WITHIN_S = 30.0

INSTALL = {
    "prometheus": "sh tests/packages.sh, or apt-get install prometheus",
    "promtool": "sh tests/packages.sh, or apt-get install prometheus",
    "openssl": "apt-get install openssl",
}


def require(program: str) -> str:
    """The program's path; a loud skip where it is absent, a failure on CI, where it must not be."""
    path = shutil.which(program)
    if path is not None:
        return path
    reason = f"the program {program} is not installed; get it by: {INSTALL.get(program, f'installing {program}')}"
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A running Prometheus and its address, like http://127.0.0.1:40001."""

    url: str
    pid: int


class PrometheusServers:
    """Starts Prometheus servers; all of them are ended with the session.

    Called without arguments it serves (one server for all) the captured TSDB; with `targets` ("host:port") a new
    server scrapes these every `interval_s`; with `config` a new server runs that configuration text.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._running = ExitStack()
        self._capture: PrometheusServer | None = None

    def __call__(
        self, *, targets: Sequence[str] = (), interval_s: float = 0.2, config: str | None = None
    ) -> PrometheusServer:
        if targets:
            config = scrape_config(targets, interval_s)
        if config is not None:
            return self._start(config, None)
        if self._capture is None:
            self._capture = self._start("{}\n", CAPTURE / "tsdb_snapshot")
        return self._capture

    def close(self) -> None:
        self._running.close()

    def _start(self, config: str, blocks: Path | None) -> PrometheusServer:
        program = require("prometheus")
        folder = self._folder()
        data = folder / "tsdb"
        if blocks is None:
            data.mkdir()
        else:
            shutil.copytree(blocks, data, copy_function=shutil.copyfile)
        (folder / "prometheus.yml").write_text(config)
        for _ in range(3):  # another process may take the free port first
            server = self._attempt(program, folder, free_port())
            if server is not None:
                return server
        pytest.fail(f"Prometheus does not start: {(folder / 'log').read_text()[-2000:]}")

    def _attempt(self, program: str, folder: Path, port: int) -> PrometheusServer | None:
        command = [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        url = f"http://127.0.0.1:{port}"
        if not _answers(f"{url}/-/ready", process):
            _end(process)
            return None
        self._running.callback(_end, process)
        return PrometheusServer(url, process.pid)


@dataclass(frozen=True, slots=True)
class Request:
    """What a test's HTTP server was asked: query string and form together in `form`."""

    method: str
    path: str
    headers: dict[str, str]
    form: dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a test's HTTP server answers.

    claimed_bytes: a Content-Length that is not the truth (the connection then closes early); drip_s: a pause after
    each byte of the body; stall_s: a pause before anything is answered.
    """

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    claimed_bytes: int | None = None
    drip_s: float = 0.0
    stall_s: float = 0.0


class HttpServer:
    """An HTTP server of a test's own on 127.0.0.1, scripted by one function; it remembers what it was asked."""

    def __init__(self, respond: Callable[[Request], Reply], tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self._respond = respond
        self._closing = threading.Event()
        server = self

        class Connection(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._serve(self)

            def do_GET(self) -> None:
                server._serve(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                """Say nothing: the tests look at `requests`."""

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def get_request(self) -> tuple[socket.socket, object]:
                connection, address = super().get_request()
                if tls is not None:
                    connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                return connection, address

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that goes away is what some tests are about."""

        self._listener = Listener(("127.0.0.1", 0), Connection)
        self.address = f"127.0.0.1:{self._listener.server_address[1]}"
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def _serve(self, connection: BaseHTTPRequestHandler) -> None:
        body = connection.rfile.read(int(connection.headers.get("Content-Length", 0)))
        parts = urlsplit(connection.path)
        form = dict(parse_qsl(parts.query, keep_blank_values=True)) | dict(parse_qsl(body.decode()))
        request = Request(connection.command, parts.path, dict(connection.headers), form)
        self.requests.append(request)
        reply = self._respond(request)
        self._closing.wait(reply.stall_s)
        connection.send_response(reply.status)
        connection.send_header("Content-Type", reply.content_type)
        connection.send_header("Content-Length", str(reply.claimed_bytes or len(reply.body)))
        for name, text in reply.headers.items():
            connection.send_header(name, text)
        connection.end_headers()
        for piece in [reply.body] if not reply.drip_s else [bytes([byte]) for byte in reply.body]:
            connection.wfile.write(piece)
            if self._closing.wait(reply.drip_s):
                break
        connection.close_connection = reply.claimed_bytes is not None


def scrape_config(targets: Sequence[str], interval_s: float) -> str:
    """A Prometheus configuration that scrapes targets ("host:port") as the pods engine-0, engine-1, ... of pool a."""
    groups = [
        {"targets": [target], "labels": {"pod": f"engine-{number}", "pool": "a"}}
        for number, target in enumerate(targets)
    ]
    interval = f"{round(interval_s * 1000)}ms"
    scrape = {"scrape_interval": interval, "scrape_timeout": interval}
    return json.dumps({"global": scrape, "scrape_configs": [{"job_name": "vllm", "static_configs": groups}]})


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def prometheus_policy(
    url: str,
    *,
    selects: Sequence[dict[str, str]] = ({"pool": "a"},),
    telemetry: dict[str, object] | None = None,
    service: dict[str, object] | None = None,
    **source: object,
) -> FleetPolicy:
    """A policy that reads a Prometheus at `url`, with pools p0, p1, ... that select by `selects`."""
    pool = {"model": {"name": "m"}, "gpu": {"type": "g"}, "replicas": {"max": 4}}
    pools = {f"p{number}": {**pool, "select": select} for number, select in enumerate(selects)}
    return FleetPolicy.model_validate(
        {
            "version": 1,
            "telemetry": {"prometheus": {"url": url, **source}, **(telemetry or {})},
            "gpus": {"g": {"count": 8, "usd_per_gpu_hour": 2}},
            "services": {"s": {"slo": {"ttft_s": 2, "tpot_s": 0.1}, "pools": list(pools), **(service or {})}},
            "pools": pools,
        }
    )
