"""The HTTP API of a Prometheus-compatible server: one instant query at a time, by a deadline, failures in one sentence.

prometheus-api-client's PrometheusConnect keeps the address, the session's adapter (with its retries off) and the
closing. Its query methods are passed by, and its session is used directly, because they lose data or time: they
return `data.result` alone (status, warnings, isPartial and resultType are dropped, and with them the news that an
answer is partial), put long queries into the URL, wait for ever by default, repeat with pauses that know no deadline,
and turn an error's JSON body into a string of bytes.

Time: a request ends at the policy's timeout or at the caller's deadline, whichever comes first. Sockets count their
timeouts anew with every byte, so the body is read piecewise against the clock. A connection that breaks, or a server
that is overloaded, is asked again, `RETRY_PAUSES_S` later, unless the deadline comes first; a timeout is not retried.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import assert_never
from urllib.parse import urlsplit

import requests
import requests.exceptions as failures
import urllib3.exceptions
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.auth import AuthBase, HTTPBasicAuth
from requests.utils import get_auth_from_url
from urllib3.util.retry import Retry

from controller.adapters.prometheus_answer import Answer, Foreign, Refusal, decode, shown
from controller.errors import TelemetryError
from controller.policy import PrometheusSource

RETRY_PAUSES_S = (0.1, 0.3)
PIECE_BYTES = 1 << 16
LIMIT_BYTES = 1 << 24
"""The largest answer that is read, unpacked: 16 MiB is some 100,000 series and two to four seconds of reading."""

OVERLOADED = {429, 502, 503, 504}

FLAVOURS: dict[str, tuple[tuple[str, str], ...]] = {
    "prometheus": (),
    # Thanos answers HTTP 200 with what its stores happen to have unless told not to, and may serve downsampled data.
    "thanos": (("dedup", "true"), ("partial_response", "false"), ("max_source_resolution", "0s")),
    "mimir": (),
    # VictoriaMetrics hides the newest 30 s unless told not to. 1 ms, because it refuses a zero as out of range.
    "victoriametrics": (("nocache", "1"), ("latency_offset", "1ms"), ("deny_partial_response", "1")),
}
"""Form fields that make a flavour answer with everything it has, or say that it can't."""


class OutageError(TelemetryError):
    """A failure that may be gone a moment later: the only kind that is retried."""


class PrometheusApi:
    """A server's query API. Thread-safe; `deadline_at_s` is always on time.monotonic()."""

    def __init__(self, source: PrometheusSource) -> None:
        self._source = source
        self._where = _place(source.url)
        self._session = requests.Session()
        self._session.headers.update({"Accept": "application/json", "User-Agent": "trimtab", **source.headers})
        if source.tenant is not None:
            self._session.headers["X-Scope-OrgID"] = source.tenant
        self._session.auth = _Credentials(source)
        self._server = PrometheusConnect(source.url.rstrip("/"), session=self._session, retry=Retry(0), method="POST")
        self._closed = threading.Event()

    @property
    def where(self) -> str:
        """The server's address, without a password that its URL may hold."""
        return self._where

    def query(self, expression: str, at_s: float | None, deadline_at_s: float) -> Answer:
        """The vector of `expression` at `at_s` (Unix s; None: now). Raises TelemetryError."""
        form = [("query", expression), *FLAVOURS[self._source.flavour]]
        if at_s is not None:
            form.append(("time", f"{at_s:.3f}"))
        for pause_s in RETRY_PAUSES_S:
            try:
                return self._ask(form, deadline_at_s)
            except OutageError:
                if self._closed.is_set() or time.monotonic() + pause_s >= deadline_at_s:
                    raise
                self._closed.wait(pause_s)
        return self._ask(form, deadline_at_s)

    def close(self) -> None:
        """Release the idle connections; a query that still runs ends at its timeout."""
        self._closed.set()
        self._server.close()

    def late(self, after_s: float) -> TelemetryError:
        """The error of a server that did not answer in time."""
        return TelemetryError(
            f"{self._where} did not answer within {max(after_s, 0.0):.3g} s; raise telemetry.prometheus.timeout_s"
            " and telemetry.interval_s, or lighten the server's load"
        )

    def _ask(self, form: list[tuple[str, str]], deadline_at_s: float) -> Answer:
        """One attempt."""
        source, started_s = self._source, time.monotonic()
        limit_s = min(source.timeout_s, deadline_at_s - started_s)
        if limit_s <= 0:
            raise self.late(0.0)
        try:
            with self._session.post(
                f"{self._server.url}/api/v1/query",
                # The server is told as well, so that it does not go on computing for nobody.
                data=[*form, ("timeout", f"{max(round(limit_s * 1000), 1)}ms")],
                timeout=limit_s,
                # Set here and not on the session, where an environment variable would override it.
                verify=source.ca_file or True,
                cert=_certificate(source),
                # A redirected POST loses its body, and its credentials may reach a stranger.
                allow_redirects=False,
                stream=True,
            ) as response:
                body = self._body(response, started_s + limit_s, limit_s)
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:
            raise self._failure(error, limit_s) from error
        answer = self._judge(response, decode(body))
        if time.monotonic() > deadline_at_s:
            raise TelemetryError(
                f"an answer of {self._where} has {len(body) / 2**20:.1f} MiB, more than could be read in time;"
                " give the pools' select more labels in common, or raise telemetry.interval_s"
            )
        return answer

    def _body(self, response: requests.Response, until_s: float, limit_s: float) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := response.raw.read1(PIECE_BYTES, decode_content=True):
            pieces.append(piece)
            size += len(piece)
            if size > LIMIT_BYTES:
                raise TelemetryError(
                    f"an answer of {self._where} is larger than {LIMIT_BYTES >> 20} MiB;"
                    " give the pools' select more labels in common"
                )
            if time.monotonic() > until_s:
                raise self.late(limit_s)
        return b"".join(pieces)

    def _judge(self, response: requests.Response, decoded: Answer | Refusal | Foreign) -> Answer:
        """The answer, where it is one. Raises TelemetryError with the place, the cause and the remedy."""
        status = response.status_code
        match decoded:
            case Answer() if status == 200:
                return decoded
            case Refusal(kind, message):
                said = f"HTTP {status} ({f'{kind}: {message}' if kind else message})"
                again = status in OVERLOADED and kind != "timeout"
            case Foreign(detail, json=is_json) if status == 200:
                content = shown(response.headers.get("Content-Type", "no content type"))
                remedy = (
                    "its JSON breaks off or comes from another program"
                    if is_json or "json" in content
                    else ("a login page or a proxy stands before it")
                )
                raise TelemetryError(
                    f"{self._where} {detail} ({content}): {remedy};"
                    " telemetry.prometheus.url must lead to the API itself"
                )
            case Answer() | Foreign():
                said = f"HTTP {status} ({shown(response.reason or 'no reason given')})"
                again = status in OVERLOADED
            case _:
                assert_never(decoded)
        sentence = f"{self._where} answered {said}; {_remedy(status, response.headers.get('Location'))}"
        raise OutageError(sentence) if again else TelemetryError(sentence)

    def _failure(self, error: Exception, limit_s: float) -> TelemetryError:
        """The sentence for a request that got no answer."""
        causes = tuple(_causes(error))
        last = shown(causes[-1])

        def caused_by(*kinds: type[BaseException]) -> bool:
            return any(isinstance(cause, kinds) for cause in causes)

        if caused_by(failures.ProxyError):
            return OutageError(f"the proxy before {self._where} failed ({last}); check HTTP_PROXY and NO_PROXY")
        if caused_by(ssl.SSLError, urllib3.exceptions.SSLError):
            return TelemetryError(
                f"TLS with {self._where} failed ({last}); check telemetry.prometheus ca_file, cert_file and key_file"
            )
        if caused_by(urllib3.exceptions.NameResolutionError):
            host = urlsplit(self._source.url).hostname
            return OutageError(f"the name {host} of {self._where} can't be resolved; correct telemetry.prometheus.url")
        if caused_by(ConnectionRefusedError):
            return OutageError(
                f"{self._where} refused the connection; start the server or correct telemetry.prometheus.url"
            )
        # urllib3 counts a connection that could not be opened among the timeouts.
        opened = not caused_by(urllib3.exceptions.NewConnectionError)
        if opened and caused_by(failures.Timeout, urllib3.exceptions.TimeoutError, TimeoutError):
            return self.late(limit_s)
        if caused_by(failures.ConnectionError, failures.ChunkedEncodingError, urllib3.exceptions.HTTPError):
            return OutageError(
                f"the connection to {self._where} broke off ({last}); look at the server and what is between"
            )
        return TelemetryError(
            f"{self._where} can't be asked ({last}); check telemetry.prometheus: its url, headers and files"
        )


class _Credentials(AuthBase):
    """Puts credentials on a request; files are read each time, because they rotate.

    As an explicit authentication it also keeps a stray netrc file from overriding what the policy says.
    """

    def __init__(self, source: PrometheusSource) -> None:
        self._source = source

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        source = self._source
        if source.bearer_token_file is not None:
            request.headers["Authorization"] = f"Bearer {_secret(source.bearer_token_file, 'bearer_token_file')}"
            return request
        username, password = get_auth_from_url(source.url)
        if source.username is not None:
            username = source.username
            password = "" if source.password_file is None else _secret(source.password_file, "password_file")
        if username:
            # As bytes, because text would have to be Latin-1.
            HTTPBasicAuth(username.encode(), password.encode())(request)
        return request


def _secret(path: str, key: str) -> str:
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise TelemetryError(f"telemetry.prometheus.{key} {path} can't be read: {reason}; correct the path") from error
    if not secret or (key == "bearer_token_file" and not (secret.isascii() and secret.isprintable())):
        raise TelemetryError(f"telemetry.prometheus.{key} {path} does not hold a secret in one line; write it anew")
    return secret


def _certificate(source: PrometheusSource) -> str | tuple[str, str] | None:
    if source.cert_file is None or source.key_file is None:
        return source.cert_file
    return source.cert_file, source.key_file


def _place(url: str) -> str:
    """The address to show to people. Raises TelemetryError where it is not one."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise TelemetryError(
            f"telemetry.prometheus.url {shown(url)!r} is not an address; write it like http://prometheus:9090"
        )
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it wraps, innermost last. requests and urllib3 wrap by argument, `reason` and cause."""
    seen: set[int] = set()
    current: object = error
    while isinstance(current, BaseException) and id(current) not in seen:
        seen.add(id(current))
        yield current
        wrapped = getattr(current, "reason", None)
        if not isinstance(wrapped, BaseException):
            wrapped = next((part for part in current.args if isinstance(part, BaseException)), None)
        current = wrapped or current.__cause__ or current.__context__


def _remedy(status: int, location: str | None) -> str:
    match status:
        case 401 | 403:
            return "check telemetry.prometheus bearer_token_file, username, password_file, cert_file and tenant"
        case 404:
            return "telemetry.prometheus.url must be what stands before /api/v1 (Mimir: often .../prometheus)"
        case 405:
            return "the server, or a proxy before it, must let POST through to /api/v1/query"
        case 400:
            return "check the label names in select, gateway, tasks and telemetry.labels, and the server's version"
        case 422:
            return "raise the server's query limits, or give the pools' select more labels in common"
        case 429:
            return "raise telemetry.interval_s or the server's limits"
        case _ if 300 <= status < 400:
            return f"put the final address into telemetry.prometheus.url (it points to {shown(location or 'nowhere')})"
        case _:
            return "read the log of the server, or of the proxy before it"
