"""A simulated fleet in real time: its metrics endpoints over HTTP, for a Prometheus and a daemon that know no better.

The fleet's time is the wall's, times a speed, since the start. One thread (the caller's of `Simulation.run`) lets it
pass, every `TICK_S`, and publishes all pages of that moment at once; the threads that answer requests only read what
was published last, so a page is at most a tick old, as a real exporter's is. At another speed than 1 every rate that a
Prometheus computes is multiplied by it, while latencies, which the fleet measures itself, are not: at speed 10, calls
that arrive at 4/s and wait 0.5 s are seen as 40/s that wait 0.5 s.

Each page (a replica's, DCGM's, the gateway's, the tasks') has a path of its own on one port. A Prometheus finds them by
service discovery from a file (`file_sd`, its JSON), which is replaced as a whole whenever a replica comes or goes: a
replica that is dead answers 503 and stays a target, one that is gone is none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from controller.adapters.simulated import loaded_policy_of
from controller.errors import PolicyError, TrimtabError
from controller.policy_file import LoadedPolicy, parse
from models.fleetsim.exposition import Labels, text
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import H100_X4, L40S_X4, PoolOf, ServiceOf
from models.fleetsim.telemetry import Exporters, Page

HOST = "127.0.0.1"
TICK_S = 0.1
STRIDE_S = 1.0
"""The most wall time that is caught up with before pages are made again, on a machine too slow for the speed."""
SCRAPE_S = 5
IDLE_S = 120.0
"""Seconds after which a connection that asks nothing is closed; above Prometheus's usual scrape intervals."""
SPEED_MAX = 1000.0
TEXT = "text/plain; version=0.0.4; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"

SCENARIO = (
    ServiceOf(
        "assistant",
        (PoolOf("assistant-h100", H100_X4, 3, 8), PoolOf("assistant-l40s", L40S_X4, 2, 8, weight=0.25)),
        (0.3, 0.5, 0.8, 1.0, 0.8, 0.5),
        bin_s=600.0,
    ),
)
"""A service on a fast and dear pool and a slow and cheap one; its load goes up and down within the hour."""


@dataclass(frozen=True, slots=True)
class Target:
    """One scrape target: host and port, and all its labels, the path of its page among them."""

    address: str
    labels: Labels

    def group(self) -> dict[str, object]:
        """The target as an entry of `static_configs` and of a file_sd file."""
        return {"targets": [self.address], "labels": dict(self.labels)}


@dataclass(frozen=True, slots=True)
class Served:
    """One answer: when it was asked for (Unix s), and the page; a page without rows was answered with 503."""

    at_s: float
    page: Page


class Simulation:
    """A plant's exporters on 127.0.0.1 at `port` (0: a free one), which answer from construction until `close`.

    speed: virtual seconds per second, of (0, 1000]. listen: is told of every answer, from the threads that answer.
    Raises TrimtabError where the port can't be had or the speed is none.
    """

    def __init__(
        self, plant: Plant, *, speed: float = 1.0, port: int = 0, listen: Callable[[Served], None] | None = None
    ) -> None:
        if not 0.0 < speed <= SPEED_MAX:
            raise TrimtabError(f"--speed {speed:g} is no speed; give a number above 0 and up to {SPEED_MAX:g}.")
        self._plant = plant
        self._speed = speed
        self._listen = listen
        self._began_s = time.monotonic() - plant.now_s / speed
        self._exporters = Exporters(plant, time.time() - plant.now_s)
        self._lock = threading.Lock()
        self._pages: dict[str, Page] = {}
        self._pass(plant.now_s)
        self._server = _listener(port, partial(_Connection, self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(TICK_S,), name="exporters", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Host and port, as a Prometheus has its targets."""
        return f"{HOST}:{self._server.server_address[1]}"

    @property
    def now_s(self) -> float:
        """Virtual seconds since the fleet's start."""
        with self._lock:
            return self._plant.now_s

    def run(self, stop: threading.Event, seconds: float = math.inf, file_sd: Path | None = None) -> None:
        """Let time pass until `stop` is set, or for so many seconds, and keep the targets in `file_sd` up to date.

        Raises TrimtabError where the file can't be written, or where the load outgrows what can be simulated.
        """
        began_s = time.monotonic()
        self._began_s = began_s - self.now_s / self._speed
        written: tuple[Target, ...] | None = None
        while True:
            now_s = time.monotonic()
            self._pass((now_s - self._began_s) * self._speed)
            if file_sd is not None and (found := self.targets()) != written:
                write_targets(file_sd, found)
                written = found
            left_s = seconds - (now_s - began_s)
            if left_s <= 0 or stop.wait(min(TICK_S, left_s)):
                return

    def change(self, how: Callable[[Plant], None]) -> None:
        """Turn a knob or cause a fault of the plant, between two moments of its time."""
        with self._lock:
            how(self._plant)

    def targets(self) -> tuple[Target, ...]:
        """The scrape targets of this moment; a page's own labels, its path, and by `instance` and `job` what it is."""
        return tuple(
            Target(
                self.address,
                (("__metrics_path__", path), *page.labels, ("instance", page.name), ("job", page.kind.value)),
            )
            for path, page in self._pages.items()
        )

    def page(self, path: str) -> Page | None:
        """What is published at a path, as of the last tick; None where there is no such target."""
        return self._pages.get(path)

    def paths(self) -> tuple[str, ...]:
        """The path of every page."""
        return tuple(self._pages)

    def tell(self, served: Served) -> None:
        """Tell the listener of an answer."""
        if self._listen is not None:
            self._listen(served)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _pass(self, until_s: float) -> None:
        with self._lock:
            try:
                self._plant.run(max(min(until_s, self._plant.now_s + STRIDE_S * self._speed), self._plant.now_s))
            except IndexError as error:
                raise TrimtabError(
                    f"after {self._plant.now_s:.0f} s the simulated fleet has more calls at once than it has room for; "
                    "start again with another --seed."
                ) from error
            self._pages = {f"/{page.name}/metrics": page for page in self._exporters.pages()}


# ------------------------------------------------------------------------------------------------------------- serving


class _Listener(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, and cuts those that are open when it is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, connection: Callable[..., BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((HOST, port), connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer a connection."""
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the port and cut every connection: a Prometheus keeps its own open."""
        super().server_close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # the client was faster
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about a client that went away before it had its answer."""


class _Connection(BaseHTTPRequestHandler):
    """One client's connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def __init__(self, simulation: Simulation, *connection: object) -> None:
        self._simulation = simulation
        super().__init__(*connection)  # type: ignore[arg-type]  # what the server passes on, whatever it is

    def do_GET(self) -> None:
        """Answer with a page, or say which there are."""
        at_s, path = time.time(), urlsplit(self.path).path
        page = self._simulation.page(path)
        if page is None:
            paths = "".join(f"{each}\n" for each in self._simulation.paths())
            status, note = (200, "") if path == "/" else (404, f"there is no {path}; there are:\n")
            self._answer(status, PLAIN, note + paths)
        elif page.rows is None:
            self._simulation.tell(Served(at_s, page))
            self._answer(503, PLAIN, f"{page.name} does not serve now\n")
        else:
            self._simulation.tell(Served(at_s, page))
            self._answer(200, TEXT, text(page.rows or ()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Keep no log of requests."""

    def _answer(self, status: int, content_type: str, body: str) -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _listener(port: int, connection: Callable[..., BaseHTTPRequestHandler]) -> _Listener:
    try:
        return _Listener(port, connection)
    except (OSError, OverflowError) as error:
        match getattr(error, "errno", None):
            case errno.EADDRINUSE:
                remedy = "another program listens there; end it, or name a free port with --port"
            case errno.EACCES | errno.EPERM:
                remedy = "the port needs privileges; name one above 1023 with --port"
            case _:
                remedy = "name a port from 0 (a free one) to 65535 with --port"
        raise TrimtabError(f"can't listen on {HOST}:{port}: {remedy}.") from error


# -------------------------------------------------------------------------------------------------- what others need


def write_targets(path: Path, targets: tuple[Target, ...]) -> None:
    """Replace a file_sd file as a whole, so that no reader sees half of it. Raises TrimtabError."""
    if path.suffix != ".json":
        raise TrimtabError(f"--file-sd {path} must end in .json; a Prometheus reads no other name as JSON.")
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps([target.group() for target in targets], indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise TrimtabError(
            f"--file-sd {path} can't be written ({error.strerror}); name a file in a folder that is there and writable."
        ) from error


def scrape_config(targets: tuple[Target, ...], file_sd: Path | None) -> str:
    """A Prometheus configuration of one job; without a file the targets are those of now and stay so."""
    found: dict[str, object] = (
        {"static_configs": [target.group() for target in targets]}
        if file_sd is None
        else {"file_sd_configs": [{"files": [str(file_sd.absolute())], "refresh_interval": f"{SCRAPE_S}s"}]}
    )
    job = {"job_name": "simulated", "scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", **found}
    return str(yaml.safe_dump({"scrape_configs": [job]}, sort_keys=False, width=120))


def policy_for(services: tuple[ServiceOf, ...], prometheus_url: str) -> LoadedPolicy:
    """The policy of a scenario, in recommendation mode, read through a Prometheus. Raises PolicyError for its URL."""
    data = yaml.safe_load(loaded_policy_of(services, mode="recommend").text)
    data["telemetry"]["prometheus"] = {"url": prometheus_url}
    head = "# The policy of a simulated fleet: see `trimtab simulate --help`.\n"
    try:
        return parse(head + yaml.safe_dump(data, sort_keys=False), "the simulated fleet's policy")
    except PolicyError as error:
        # The file is ours and the URL is not: there is no line of it that could be corrected.
        raise PolicyError(f"--prometheus {str(error).partition('telemetry.prometheus.url: ')[2] or error}") from error
