"""The daemon's window: metrics, health and decisions over HTTP, read-only, in a thread of its own.

The server never asks the loop to wait. It reads through a `View`, whose answers are finished immutable values, and it
encodes them in worker threads, one decision at a time: the loop is held up neither by a large answer nor by a reader
who takes it slowly.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from controller.answers import StateAnswer, answer, encode, pools
from controller.decisions import TickRecord
from controller.errors import TrimtabError

MOST_DECISIONS = 1000
CONNECTIONS = 256
"""Connections at a time. One more makes the one give way that has gone longest without a whole request and answer."""
HEADER_LIMIT_S = 10.0
"""Seconds that a new connection has to send its first request."""
START_LIMIT_S = 10.0
GRACE_S = 1
"""Seconds that open requests get to finish when the server is stopped."""
STOP_LIMIT_S = 1.9
"""Seconds after which a stop no longer waits for the server's thread, so that the caller has it within 2 s."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}

INDEX = """Trimtab, read-only.

/metrics            metrics of the daemon, for Prometheus
/healthz            200 while the loop is alive
/readyz             200 once a policy is loaded and a tick has succeeded
/api/v1/state       the last tick, whole: what was observed, decided and done
/api/v1/decisions   the newest decisions first; ?limit=1..1000 (50), ?pool=NAME
"""

_log = structlog.get_logger(__name__)


class View(Protocol):
    """What the loop shows. Any thread may call any method, several at once, and none of them waits for a tick."""

    def heartbeat_age_s(self) -> float | None:
        """Seconds since the loop's last sign of life; None before the first."""
        ...

    def policy_loaded(self) -> bool:
        """Whether a valid policy is in force."""
        ...

    def ticked(self) -> bool:
        """Whether a tick of this process has succeeded."""
        ...

    def last(self) -> TickRecord | None:
        """The newest record; None where there is none."""
        ...

    def recent(self, count: int) -> Sequence[TickRecord]:
        """The newest records, at most `count`, oldest first (as `Journal.tail` has them)."""
        ...

    def exposition(self) -> tuple[bytes, str]:
        """The metrics and their content type (`Metrics.render`)."""
        ...


def _json(body: object, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


def _error(sentence: str, status: int) -> Response:
    return _json({"error": sentence}, status)


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of /api/v1/decisions."""

    limit: int
    pool: str | None


def _query(request: Request) -> Query:
    """The request's parameters; raises HTTPException 400 with one sentence."""
    given = request.query_params
    unknown = sorted(set(given) - {"limit", "pool"})
    if unknown:
        raise HTTPException(400, f"there is no parameter {unknown[0]!r}; use limit and pool")
    limit = given.get("limit", "50")
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= MOST_DECISIONS:
        raise HTTPException(400, f"limit is {limit!r}; it has to be a whole number from 1 to {MOST_DECISIONS}")
    pool = given.get("pool")
    if pool == "":
        raise HTTPException(400, "pool is empty; name a pool of the policy or leave the parameter out")
    return Query(int(limit), pool)


class Endpoints:
    """The answers. Health is answered in the server's own loop, what takes time to encode in worker threads."""

    def __init__(self, view: View, health_limit_s: float) -> None:
        self._view = view
        self._health_limit_s = health_limit_s

    async def index(self, _: Request) -> Response:
        """A short list of the paths."""
        return PlainTextResponse(INDEX)

    async def healthz(self, _: Request) -> Response:
        """200 while the loop's last sign of life is younger than the limit."""
        age_s = self._view.heartbeat_age_s()
        if age_s is None:
            return PlainTextResponse("the loop has not given a sign of life yet\n", 503)
        if age_s < self._health_limit_s:
            return PlainTextResponse(f"alive: last sign of life {age_s:.1f} s ago\n")
        return PlainTextResponse(
            f"the loop's last sign of life was {age_s:.1f} s ago; the limit is {self._health_limit_s:g} s\n", 503
        )

    async def readyz(self, _: Request) -> Response:
        """200 once a policy is loaded and a tick has succeeded."""
        missing = self._missing()
        if not missing:
            return PlainTextResponse("ready\n")
        return PlainTextResponse(f"not ready: {', '.join(missing)}\n", 503)

    def _missing(self) -> tuple[str, ...]:
        policy = () if self._view.policy_loaded() else ("no valid policy is loaded",)
        tick = () if self._view.ticked() else ("no tick has succeeded yet",)
        return policy + tick

    def metrics(self, _: Request) -> Response:
        """The exposition."""
        body, content_type = self._view.exposition()
        return Response(body, headers={"Content-Type": content_type})

    def state(self, _: Request) -> Response:
        """The last record, whole, and whether the daemon is ready."""
        missing = self._missing()
        return _json(StateAnswer(not missing, missing, self._view.heartbeat_age_s(), self._view.last()))

    def decisions(self, request: Request) -> Response:
        """The newest decisions, streamed, so that a long answer is never held in memory as a whole."""
        query = _query(request)
        records = self._view.recent(query.limit)
        known = pools(records)
        if query.pool is not None and records and query.pool not in known:
            choice = ", ".join(known)
            return _error(f"none of the last {len(records)} decisions is about {query.pool!r}; pools: {choice}", 404)

        def chunks() -> Iterator[bytes]:
            yield b'{"decisions":['
            for index, record in enumerate(reversed(records)):
                yield (b"," if index else b"") + encode(answer(record, query.pool))
            yield b"]}"

        return StreamingResponse(chunks(), media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    match error:
        case HTTPException(status_code=404):
            return _error("there is no such path; / lists the paths", 404)
        case HTTPException(status_code=405):
            response = _error("this server only reads; use GET or HEAD", 405)
            response.headers.update(error.headers or {})
            return response
        case HTTPException():
            return _error(error.detail, error.status_code)
        case _:
            raise error


async def _unavailable(_: Request, error: Exception) -> Response:
    return _error(str(error), 503)


async def _bug(request: Request, error: Exception) -> Response:
    _log.error("request failed by a bug", path=request.url.path, exc_info=error)
    return _error("an internal error; the daemon's log has the details", 500)


class _Secured:
    """Adds the security headers to every answer, those of errors included, and ends what `_bug` has answered.

    Starlette raises a bug again after its answer went out; passed on to uvicorn it would cut a connection on which
    the client, who has a whole answer, may just be asking the next thing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = False

        async def send_secured(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_secured)
        except Exception:
            if not answered:
                raise


def application(view: View, health_limit_s: float) -> ASGIApp:
    """The ASGI application; `health_limit_s` is the age of a heartbeat beyond which the loop counts as dead."""
    serve = Endpoints(view, health_limit_s)
    return _Secured(
        Starlette(
            routes=[
                Route("/", serve.index, methods=["GET"]),
                Route("/metrics", serve.metrics, methods=["GET"]),
                Route("/healthz", serve.healthz, methods=["GET"]),
                Route("/readyz", serve.readyz, methods=["GET"]),
                Route("/api/v1/state", serve.state, methods=["GET"]),
                Route("/api/v1/decisions", serve.decisions, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refused, TrimtabError: _unavailable, Exception: _bug},
        )
    )


class _Connection(H11Protocol):
    """A connection that doesn't keep others out by doing nothing.

    uvicorn's own limit answers 503 to whoever comes when it is reached: some hundred connections that say nothing would
    make a healthy daemon look dead.
    """

    served_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in its base class
        """Make room where there is none, and wait for the first request, but not for ever."""
        self.served_s = self.loop.time()
        if len(self.connections) >= CONNECTIONS:
            idlest = min((one for one in self.connections if isinstance(one, _Connection)), key=_served_s)
            self.connections.discard(idlest)
            idlest.transport.abort()
        super().connection_made(transport)
        self.loop.call_later(HEADER_LIMIT_S, self._expect_request)

    def _expect_request(self) -> None:
        if self.cycle is None and self in self.connections:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """A whole answer is a sign of life."""
        self.served_s = self.loop.time()
        super().on_response_complete()


def _served_s(connection: _Connection) -> float:
    return connection.served_s


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it serves, and that cuts off the clients who outlast the grace of a stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)  # the aborted connections are closed in the loop's next round


class Server:
    """Serves a view on `host`:`port` from a thread. Port 0 takes a free one; `port` tells which."""

    def __init__(self, view: View, host: str, port: int, health_limit_s: float) -> None:
        self._app = application(view, health_limit_s)
        self._host = host
        self._port = port
        self._uvicorn: _Uvicorn | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; the one asked for, before `start`."""
        return self._port

    def start(self) -> None:
        """Listen and serve. Raises TrimtabError when the address can't be had."""
        if self._thread is not None:
            return
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        server = _Uvicorn(
            uvicorn.Config(
                self._app,
                loop="asyncio",
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # requests that fail are logged by `_bug`
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="trimtab-server", daemon=True)
        self._uvicorn, self._thread = server, thread
        thread.start()
        if not server.serving.wait(START_LIMIT_S):
            self.stop()
            listener.close()
            raise TrimtabError(
                f"the server on {self._host}:{self._port} did not start within {START_LIMIT_S:g} s; "
                "look at the machine's load and start again"
            )

    def stop(self) -> None:
        """Stop within 2 seconds: open requests get a second to finish, then their connections are cut."""
        if self._uvicorn is not None and self._thread is not None:
            self._uvicorn.should_exit = True
            self._thread.join(STOP_LIMIT_S)
            self._uvicorn, self._thread = None, None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                remedy = "another program listens there; end it, or set TRIMTAB_PORT to a free port"
            case errno.EACCES | errno.EPERM:
                remedy = "the port needs privileges; set TRIMTAB_PORT to one above 1023"
            case _:
                remedy = f"{error.strerror or error}; set TRIMTAB_HOST to an address of this machine"
        raise TrimtabError(f"can't listen on {host}:{port}: {remedy}") from error
