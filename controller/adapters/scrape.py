"""Telemetry straight from /metrics endpoints, without a Prometheus.

Each read is one scrape round: all targets at once (a bounded number in flight), each with the policy's timeout, all
within the caller's deadline. What a target says is stamped with the time of the read and kept in a `SeriesStore`,
which evaluates the catalogue as Prometheus would. Rates need two rounds; the first read has none (absent, not zero).

What is said of a target:

    it answered                      up = 1; its series that are missing from the page end
    it failed (refused, slow, 503,   up = 0; all its series end; a hole says what happened and what to do
    no metrics page, too large)
    the deadline came first          nothing: its last values stay and grow old; a hole says so
    broken or repeated lines         up = 1 with the lines that can be read; a hole counts the others

A change of process_start_time_seconds marks every counter of the target as reset, also those that have already regrown
past their old value. Proxies, redirects and credentials of the environment are not used: a target is read where the
policy says it is, or not at all.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from controller.adapters.exposition import Page, PageReader
from controller.adapters.promql import Entry, promql
from controller.adapters.series import LOOKBACK_S, Grouping, Row, SeriesStore, label_pairs
from controller.adapters.signals import catalogue, tasks
from controller.errors import TelemetryError
from controller.observations import Labels, Signal, Snapshot, SourceHole
from controller.policy import FleetPolicy, ScrapeTarget

IN_FLIGHT = 64
"""How many targets are read at the same time."""

PAGE_LIMIT_BYTES = 16 * 1024 * 1024
"""The largest page that is read, unpacked: it takes a second. A vLLM page has 60 kB, a busy gateway's a few MB."""

PIECE_BYTES = 64 * 1024

DEADLINE_SHARE = 0.9
"""A target's timeout ends before the deadline of the round, so that a hanging target is told from a late round."""

RESTART_S = 2.0
"""Process start times that differ by more are those of two processes; less is the jitter of the kernel's boot time."""

START_TIME = "process_start_time_seconds"
HEADERS = {
    "accept": "text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1",
    "accept-encoding": "identity",
    "user-agent": "trimtab",
}


@dataclass(frozen=True, slots=True)
class Target:
    """One endpoint: its URL without the password (URLs are logged), the labels of its series, its name in holes."""

    url: httpx.URL
    auth: httpx.BasicAuth | None
    labels: Labels
    name: str


@dataclass(frozen=True, slots=True)
class _Body:
    text: str
    content_type: str


@dataclass(frozen=True, slots=True)
class _Failure:
    """The target failed, and why, with the remedy."""

    detail: str


@dataclass(frozen=True, slots=True)
class _Unread:
    """Nothing was learnt about the target: the round's deadline came first."""


_Answer = _Body | _Failure | _Unread


UNPACKED = {"identity": 0, "gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Encodings that are understood, although none is asked for, with zlib's number of each."""


class _Unpacker:
    """Unpacks a body piece by piece: 64 kB of a gzip bomb are 64 MB, which must not be made at once."""

    def __init__(self, encoding: str) -> None:
        self._zlib = zlib.decompressobj(UNPACKED[encoding]) if UNPACKED[encoding] else None

    def __call__(self, packed: bytes) -> Iterator[bytes]:
        """What is in the next part of a body, in pieces. Raises ValueError where it is broken."""
        if self._zlib is None:
            yield packed
            return
        while packed:
            try:
                yield self._zlib.decompress(packed, PIECE_BYTES)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            packed = self._zlib.unconsumed_tail


class ScrapeTelemetry:
    """The `Telemetry` of a policy with `telemetry.scrape`. Raises TelemetryError where the policy has none."""

    def __init__(self, policy: FleetPolicy) -> None:
        source = policy.telemetry.scrape
        if source is None:
            raise TelemetryError("telemetry.scrape is missing from the policy; list the metrics endpoints there")
        targets = [_target(index, target, policy) for index, target in enumerate(source.targets, start=1)]
        self._targets = tuple({target.labels: target for target in reversed(targets)}.values())[::-1]
        self._twins = tuple(_twins(targets))
        self._timeout_s = source.timeout_s
        self._entries = _entries(policy)
        self._grouping = _grouping(policy, self._targets)
        self._store = SeriesStore(self._entries, self._grouping)
        self._pages = PageReader(lambda name: name == START_TIME or self._store.wants(name))
        self._history_s = max(LOOKBACK_S, policy.telemetry.window_s)
        self._started_s: dict[Labels, float] = {}
        self._last_s = float("-inf")
        self._lock = threading.Lock()
        # Connections are not kept: servers close idle ones after about 5 s, and a race with that looks like a failure.
        self._client = httpx.AsyncClient(
            headers=HEADERS,
            verify=ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
            timeout=source.timeout_s,
            limits=httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=0),
        )
        self._runner = asyncio.Runner()

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:
        """Scrape every target once, stamp what it says with `at_s`, and evaluate all signals over `window_s`."""
        with self._lock:
            until_s = time.monotonic() + deadline_s
            answers = self._runner.run(self._round(deadline_s))
            holes = list(self._twins)
            if at_s < self._last_s:
                back_s = self._last_s - at_s
                holes.append(
                    SourceHole("scrape", f"the clock was set back by {back_s:.1f} s: what came later is dropped")
                )
            self._last_s = at_s
            for target, answer in zip(self._targets, answers, strict=True):
                if time.monotonic() > until_s:
                    answer = _Unread()  # noqa: PLW2901 - what could not be read in time was not read
                details = self._take(at_s, target, answer)
                holes += [SourceHole(f"scrape:{target.name}", detail) for detail in details]
            self._history_s = max(self._history_s, window_s)
            self._store.forget(at_s - self._history_s)
            samples = self._store.evaluate(at_s, window_s)
        unread = all(isinstance(answer, _Unread) for answer in answers)
        failed = tuple(entry.signal for entry in self._entries) if unread else ()
        return Snapshot(samples, tuple(holes), failed)

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        """The PromQL that each signal is equal to, if a Prometheus scraped the same targets."""
        return tuple((entry.signal, promql(entry, self._grouping.of(entry.level), window_s)) for entry in self._entries)

    def close(self) -> None:
        """Close connections and the event loop; closing twice does nothing."""
        with self._lock:
            if not self._client.is_closed:
                self._runner.run(self._client.aclose())
                self._runner.close()

    async def _round(self, deadline_s: float) -> tuple[_Answer, ...]:
        if deadline_s <= 0:
            return (_Unread(),) * len(self._targets)
        gate = asyncio.Semaphore(IN_FLIGHT)
        timeout_s = min(self._timeout_s, DEADLINE_SHARE * deadline_s)
        reads = [asyncio.create_task(self._fetch(gate, target, timeout_s)) for target in self._targets]
        _, late = await asyncio.wait(reads, timeout=deadline_s)
        for read in late:
            read.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return tuple(_Unread() if read.cancelled() else read.result() for read in reads)

    async def _fetch(self, gate: asyncio.Semaphore, target: Target, timeout_s: float) -> _Answer:
        async with gate:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._body(target)
            except (TimeoutError, httpx.TimeoutException):
                return _Failure(f"gave no whole answer within {timeout_s:.3g} s; see whether the engine hangs")
            except httpx.ConnectError as error:
                return _Failure(f"can't be reached ({_words(error)}); see whether it runs and the address is right")
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                return _Failure(f"broke off its answer ({_words(error)}); see the engine's log")

    async def _body(self, target: Target) -> _Body | _Failure:
        async with self._client.stream("GET", target.url, auth=target.auth) as response:
            if response.is_redirect:
                return _Failure(f"answered HTTP {response.status_code}, a redirect; give the final address")
            if response.status_code != httpx.codes.OK:
                return _Failure(
                    f"answered HTTP {response.status_code}; see whether the path is right and the engine well"
                )
            encoding = response.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in UNPACKED:
                return _Failure(f"answered in the encoding {encoding!r}, which was not asked for; take it away")
            unpack = _Unpacker(encoding)
            body = bytearray()
            async for packed in response.aiter_raw(PIECE_BYTES):
                for piece in unpack(packed):
                    body += piece
                    if len(body) > PAGE_LIMIT_BYTES:
                        return _Failure(
                            f"answered with more than {PAGE_LIMIT_BYTES // 1024**2} MiB; see whether this is a metrics "
                            "page"
                        )
            return _Body(body.decode("utf-8", errors="replace"), response.headers.get("content-type", ""))

    def _take(self, at_s: float, target: Target, answer: _Answer) -> tuple[str, ...]:
        """Put an answer into the store; what was wrong with it, as clauses."""
        match answer:
            case _Unread():
                return ("was not read: the deadline of the round came first",)
            case _Failure(detail):
                self._store.scraped(at_s, target.labels, (Row("up", (), 0.0),))
                return (detail,)
            case _Body(text, content_type):
                page = self._pages.read(text, content_type)
                if page.rows is None:
                    self._store.scraped(at_s, target.labels, (Row("up", (), 0.0),))
                    return page.faults
                repeated = self._store.scraped(
                    at_s,
                    target.labels,
                    (*page.rows, Row("up", (), 1.0)),
                    restarted=self._restarted(target, page),
                )
                if not repeated:
                    return page.faults
                more = f" and {len(repeated) - 1} more" if len(repeated) > 1 else ""
                return (*page.faults, f"gave {repeated[0].name}{more} twice with the same labels: the first one counts")

    def _restarted(self, target: Target, page: Page) -> bool:
        """Whether the page is of another process than the last one of this target."""
        started_s = next((row.value for row in page.rows or () if row.name == START_TIME), None)
        if started_s is None:
            return False
        before_s = self._started_s.get(target.labels)
        self._started_s[target.labels] = started_s
        return before_s is not None and abs(started_s - before_s) > RESTART_S


def _target(index: int, given: ScrapeTarget, policy: FleetPolicy) -> Target:
    """A target of the policy with its labels. Raises TelemetryError where its URL can't be one."""
    try:
        url = httpx.URL(given.url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    port = url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
    if not url.host or not 0 < port < 65536 or url.scheme not in {"http", "https"}:
        raise TelemetryError(
            f"telemetry.scrape.targets: the url of target {index} is no address; write it like http://10.0.0.7:8000/metrics"
        )
    host = f"[{url.host}]" if ":" in url.host else url.host
    labels = {"instance": f"{host}:{port}", "job": "scrape"} | given.labels
    for canonical, name in (("pod", policy.telemetry.labels.pod), ("namespace", policy.telemetry.labels.namespace)):
        if name in labels:
            labels.setdefault(canonical, labels[name])
    auth = httpx.BasicAuth(url.username, url.password) if url.userinfo else None
    plain = url.copy_with(userinfo=b"", path="/metrics" if url.path in {"", "/"} else url.path)
    # Several engines behind one address differ by their path; holes and alarms must tell them apart as well.
    name = labels["instance"] if plain.path == "/metrics" else labels["instance"] + plain.path
    return Target(plain, auth, label_pairs(labels.items()), name)


def _twins(targets: list[Target]) -> Iterator[SourceHole]:
    """A hole for each target whose series could not be told from those of an earlier one; it is not read."""
    first: dict[Labels, Target] = {}
    for target in targets:
        if first.setdefault(target.labels, target) is not target:
            detail = "is listed twice in telemetry.scrape.targets: the first one is read; give the other its own labels"
            yield SourceHole(f"scrape:{target.name}", detail)


def _entries(policy: FleetPolicy) -> tuple[Entry, ...]:
    """The catalogue's entries for the engines and sources that the policy uses."""
    engines = tuple(sorted({pool.engine for pool in policy.pools.values()}))
    services = policy.services.values()
    source = policy.telemetry.tasks
    task_entries = tasks(source.metric, label_pairs(source.error.items())) if any(s.tasks for s in services) else ()
    return catalogue(engines, gateway=any(s.gateway for s in services), task_entries=task_entries)


def _grouping(policy: FleetPolicy, targets: tuple[Target, ...]) -> Grouping:
    """Replicas are told apart by their targets' labels and by what the pools select them by."""
    of_targets = {name for target in targets for name, _ in target.labels}
    selected = {name for pool in policy.pools.values() for name in pool.select}
    services = policy.services.values()
    return Grouping(
        replica=tuple(sorted(of_targets | selected | {"pod", "namespace"})),
        gateway=tuple(sorted({name for service in services for name in service.gateway})),
        tasks=tuple(sorted({name for service in services for name in service.tasks})),
    )


def _words(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
