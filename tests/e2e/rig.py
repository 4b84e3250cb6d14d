"""Real processes for end-to-end tests: the `trimtab` command, its daemon, a Prometheus that can die and come back.

The engines are pages of a captured vLLM whose counters are advanced in time (`Engine`), served by an HTTP server of
the test's own. Nothing waits for a fixed time: `until` polls what it waits for, up to a deadline.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import yaml
from servers import CAPTURE, PrometheusServer, Reply, Request, free_port, require, scrape_config

T = TypeVar("T")

TRIMTAB = (sys.executable, "-m", "controller")
CALLS = 200
"""Calls between the two pages that `Engine` advances along."""


def until(probe: Callable[[], T | None], within_s: float, what: str) -> T:
    """The first truthy answer of `probe`; a failure that says what was waited for when none comes in time."""
    deadline_s = time.monotonic() + within_s
    while not (found := probe()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"within {within_s:g} s there was no sign of: {what}")
        time.sleep(0.02)
    return found


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: without the developer's own settings, and with a proxy that is not asked."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TRIMTAB_")}
    return kept | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | more


def trimtab(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The command's whole run, its environment extended by `more`."""
    command = [*TRIMTAB, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**more), check=False)


def fleet(telemetry: dict[str, object], select: dict[str, str] | None = None) -> dict[str, object]:
    """A policy of one pool of tiny engines on CPU cores, which selects pool="a" or what is given."""
    return {
        "version": 1,
        "telemetry": {"interval_s": 1, "window_s": 4, "fresh_s": 5, **telemetry},
        "gpus": {
            "CPU-CORE": {
                "count": 64,
                "usd_per_gpu_hour": 0.05,
                "memory_gib": 2,
                "bandwidth_gb_per_s": 10,
                "dense_tflops": 0.05,
            }
        },
        "services": {"tiny": {"slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "pools": ["tiny-cpu"]}},
        "pools": {
            "tiny-cpu": {
                "select": select or {"pool": "a"},
                "model": {"name": "tiny", "parameters": 210e3, "kv_bytes_per_token": 512},
                "gpu": {"type": "CPU-CORE"},
                "max_num_seqs": 16,
                "replicas": {"min": 1, "max": 60},
                "start": {"cold_s": 45},
            }
        },
        "limits": {"replicas_per_step": 50, "scalings_per_hour": 100},
    }


def write_policy(path: Path, policy: dict[str, object]) -> Path:
    """Publish a policy as a whole, as Kubernetes does."""
    fresh = path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(policy, sort_keys=False))
    fresh.rename(path)
    return path


class Engine:
    """The /metrics of an engine under a steady load: the captured page, its counters advanced in time.

    Between the pages 01_before and 03_after lie 200 calls. A page here is the first one plus so many times their
    difference as calls were made since; gauges are those of 03_after, and `running` is how many calls are in flight.
    Every answer comes after `stall_s`.
    """

    def __init__(self, calls_per_s: float, running: int = 6) -> None:
        folder = CAPTURE / "metrics"
        self._before = dict(_values((folder / "01_before.prom").read_text()))
        self._after = (folder / "03_after.prom").read_text()
        self._running = running
        self._calls, self._since_s = 0.0, time.monotonic()
        self._calls_per_s = calls_per_s
        self.stall_s = 0.0

    def load(self, calls_per_s: float) -> None:
        """Change the load, without a jump of the counters."""
        now_s = time.monotonic()
        self._calls += self._calls_per_s * (now_s - self._since_s)
        self._since_s, self._calls_per_s = now_s, calls_per_s

    def page(self) -> str:
        """The exposition text of this moment."""
        calls = self._calls + self._calls_per_s * (time.monotonic() - self._since_s)
        return "".join(f"{line}\n" for line in self._lines(calls / CALLS))

    def respond(self, request: Request) -> Reply:
        """Serve the page."""
        del request
        return Reply(self.page().encode(), content_type="text/plain; version=0.0.4", stall_s=self.stall_s)

    def _lines(self, share: float) -> Iterator[str]:
        for line in self._after.splitlines():
            series, _, text = line.rpartition(" ")
            name = series.partition("{")[0]
            if line.startswith("#"):
                yield line
            elif name == "vllm:num_requests_running":
                yield f"{series} {self._running}"
            elif name.endswith(("_total", "_count", "_sum", "_bucket")):
                first = self._before.get(series, 0.0)
                yield f"{series} {first + share * (float(text) - first)!r}"
            else:
                yield line


def frozen(name: str) -> Callable[[Request], Reply]:
    """A server's answer: one captured page, unchanged for ever."""
    body = (CAPTURE / "metrics" / name).read_bytes()
    return lambda _: Reply(body, content_type="text/plain; version=0.0.4")


def _values(page: str) -> Iterator[tuple[str, float]]:
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, text = line.rpartition(" ")
            yield series, float(text)


class Prometheus:
    """A Prometheus that scrapes `targets` twice a second, on one port over all its lives."""

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        (folder / "prometheus.yml").write_text(scrape_config(targets, 0.5))

    def start(self) -> None:
        """Run it, until it is ready; one that runs is left alone."""
        if self._process is not None:
            return
        command = [
            require("prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        until(lambda: fetch(f"{self.url}/-/ready"), 30, "a Prometheus that is ready")

    def wait_for(self, expression: str) -> None:
        """Until an expression has a result."""
        server = PrometheusServer(self.url, 0)
        until(lambda: query(server, expression), 30, f"a result of {expression}")

    def kill(self) -> None:
        """End it at once; its connections break."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def fetch(url: str) -> str | None:
    """The body of a 200 answer, else None."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def query(server: PrometheusServer, expression: str, at_s: float | None = None) -> list[dict[str, object]]:
    """The result of an instant query, asked without any of our own code."""
    form = {"query": expression} | ({} if at_s is None else {"time": repr(at_s)})
    with urllib.request.urlopen(f"{server.url}/api/v1/query?{urllib.parse.urlencode(form)}", timeout=10) as response:
        found: list[dict[str, object]] = json.load(response)["data"]["result"]
    return found


class Daemon:
    """`trimtab run` in a process of its own, with JSON log lines and a free port."""

    def __init__(self, folder: Path, policy: Path, journal: Path) -> None:
        self._log = folder / f"log-{time.monotonic_ns()}.jsonl"
        command = [*TRIMTAB, "run", "--policy", policy, "--journal", journal, "--port", "0", "--log-format", "json"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment())

    def lines(self) -> list[dict[str, object]]:
        """The whole log lines so far; each must be JSON."""
        text = self._log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def said(self, event: str, **fields: object) -> list[dict[str, object]]:
        """The log lines of one event, with the given fields."""
        return [line for line in self.lines() if line["event"] == event and fields.items() <= line.items()]

    def wait(self, event: str, within_s: float = 20, count: int = 1, **fields: object) -> dict[str, object]:
        """The `count`-th line of an event."""

        def there() -> list[dict[str, object]] | None:
            found = self.said(event, **fields)
            if len(found) < count:
                assert self.process.poll() is None, f"the daemon ended: {self._log.read_text()[-2000:]}"
            return found if len(found) >= count else None

        try:
            return until(there, within_s, f"{event} {fields}")[count - 1]
        except AssertionError as error:
            error.add_note(self._log.read_text()[-2000:])
            raise

    def ticks(self) -> list[int]:
        """The numbers of the ticks that it told of."""
        return [int(str(line["tick"])) for line in self.said("tick")]

    def wait_ticks(self, more: int) -> None:
        """Until it has ticked so many times more."""
        self.wait("tick", 20 + 2 * more, count=len(self.said("tick")) + more)

    def get(self, path: str) -> str | None:
        """The body of a 200 answer of its server, else None."""
        return fetch(f"{self.wait('started')['address']}{path}")

    def state(self) -> dict[str, object]:
        """The record of the last tick, by the API; waits for the first one."""

        def record() -> dict[str, object] | None:
            body = self.get("/api/v1/state")
            found = None if body is None else strict(body)["record"]
            assert found is None or isinstance(found, dict)
            return found

        return until(record, 10, "a record in /api/v1/state")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self, within_s: float = 10) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(within_s)


def strict(text: str) -> dict[str, object]:
    """A JSON object, strictly: NaN and Infinity are no JSON."""
    found = json.loads(text, parse_constant=_no_constant)
    assert isinstance(found, dict)
    return found


def _no_constant(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


def sql(journal: Path, statement: str) -> list[tuple[object, ...]]:
    """Rows of the journal's file, read beside whoever writes it."""
    with closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True, timeout=10)) as database:
        return list(database.execute(statement))


def sane(text: str) -> None:
    """A person's text: no traceback, no NaN, and no line over 100 columns but commands and expressions."""
    assert "Traceback" not in text
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)
    for line in text.splitlines():
        whole = line.lstrip().startswith(("do ", "undo ", "asked:"))
        assert whole or len(line) <= 100, line
