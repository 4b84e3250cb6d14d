import contextlib
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from structlog.testing import capture_logs
from ticks import NOW_S, tick_record

from controller.answers import encode
from controller.decisions import (
    ActionKind,
    AdmissionLimit,
    Alarm,
    AlarmKind,
    Hold,
    SetAdmission,
    ShiftWeights,
    Sleep,
    TickRecord,
    Wake,
    WarmCache,
    Weight,
)
from controller.errors import JournalError, TrimtabError
from controller.metrics import Metrics
from controller.observations import Known
from controller.server import CONNECTIONS, Server

HEALTH_LIMIT_S = 30.0


class Loop:
    """The side of the daemon's loop that the server sees, driven by the test."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.beat_s: float | None = 1.5
        self.policy = True
        self.failure: Exception | None = None
        self._records: deque[TickRecord] = deque(maxlen=2000)

    def publish(self, record: TickRecord) -> None:
        self.metrics.publish(record, tick_duration_s=0.1)
        self._records.append(record)

    def heartbeat_age_s(self) -> float | None:
        return self.beat_s

    def policy_loaded(self) -> bool:
        return self.policy

    def ticked(self) -> bool:
        return bool(self._records)

    def last(self) -> TickRecord | None:
        return self._records[-1] if self._records else None

    def recent(self, count: int) -> Sequence[TickRecord]:
        if self.failure is not None:
            raise self.failure
        return tuple(self._records.copy())[-count:]

    def exposition(self) -> tuple[bytes, str]:
        return self.metrics.render()


def tick(number: int, pool: str = "assistant-h100") -> TickRecord:
    record = tick_record(pool)
    return replace(record, decision=replace(record.decision, tick=number, now_s=NOW_S + 15 * number))


def wide_tick(number: int, pools: int = 40) -> TickRecord:
    """A decision about many pools: a thousand of them are more JSON than the sockets' buffers hold."""
    record = tick(number)
    moves = tuple(replace(record.decision.moves[0], id=f"{number}-{index}") for index in range(pools))
    return replace(
        record,
        decision=replace(record.decision, moves=moves, assessments=record.decision.assessments * pools),
        outcomes=(),
    )


def unread_answer(port: int) -> socket.socket:
    """A connection that asks for a very long answer and reads only its beginning."""
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.settimeout(10)
    unread.connect(("127.0.0.1", port))
    unread.sendall(b"GET /api/v1/decisions?limit=1000 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert unread.recv(15).startswith(b"HTTP/1.1 200")
    return unread


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def server(loop: Loop) -> Iterator[Server]:
    server = Server(loop, "127.0.0.1", 0, HEALTH_LIMIT_S)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=20, trust_env=False) as client:
        yield client


def strict(body: bytes) -> object:
    """JSON as the standard has it: Python's parser alone would take NaN and Infinity."""

    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(body, parse_constant=refuse)


def test_metrics_are_served_in_the_text_format(loop, client):
    loop.publish(tick(1))
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'trimtab_pool_offered_calls_per_second{pool="assistant-h100"} 46.0' in answer.text


def test_health_follows_the_heartbeat(loop, client):
    assert client.get("/healthz").status_code == 200
    loop.beat_s = 31.24
    answer = client.get("/healthz")
    assert (answer.status_code, answer.text) == (
        503,
        "the loop's last sign of life was 31.2 s ago; the limit is 30 s\n",
    )
    loop.beat_s = None
    assert client.get("/healthz").status_code == 503


def test_readiness_says_what_is_missing(loop, client):
    loop.policy = False
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.text == "not ready: no valid policy is loaded, no tick has succeeded yet\n"
    loop.policy = True
    assert client.get("/readyz").text == "not ready: no tick has succeeded yet\n"
    loop.publish(tick(1))
    assert client.get("/readyz").status_code == 200


def test_state_before_the_first_tick_has_no_record(client):
    body = client.get("/api/v1/state").json()
    assert body == {
        "ready": False,
        "missing": ["no tick has succeeded yet"],
        "heartbeat_age_s": 1.5,
        "record": None,
    }


def test_state_is_the_last_record_whole(loop, client):
    loop.publish(tick(1))
    loop.publish(tick(2))
    record = client.get("/api/v1/state").json()["record"]
    pool = record["observation"]["pools"][0]
    assert record["decision"]["tick"] == 2
    assert pool["offered_calls_per_s"] == {"value": 46.0, "age_s": 12.0}
    assert pool["ttft_s"] == {"kind": "nan", "detail": "no call got a first token in the window"}
    assert record["decision"]["moves"][0]["actions"] == [
        {"kind": "scale", "pool": "assistant-h100", "before": 10, "after": 12}
    ]
    assert record["outcomes"][0]["status"] == "dry_run"


def test_numbers_that_are_not_finite_are_null_in_strict_json(loop, client):
    record = tick(1)
    pool = replace(record.observation.pools[0], ttft_s=Known(math.nan, math.inf), itl_s=Known(-math.inf, 1.0))
    loop.publish(replace(record, observation=replace(record.observation, pools=(pool,))))
    body = strict(client.get("/api/v1/state").content)
    shown = body["record"]["observation"]["pools"][0]
    assert shown["ttft_s"] == {"value": None, "age_s": None}
    assert shown["itl_s"] == {"value": None, "age_s": 1.0}


def test_decisions_come_newest_first_and_without_the_observation(loop, client):
    for number in range(1, 61):
        loop.publish(tick(number))
    assert [one["tick"] for one in client.get("/api/v1/decisions?limit=3").json()["decisions"]] == [60, 59, 58]
    default = client.get("/api/v1/decisions").json()["decisions"]
    assert len(default) == 50
    assert set(default[0]) == {
        "tick",
        "now_s",
        "policy_sha256",
        "moves",
        "holds",
        "alarms",
        "assessments",
        "outcomes",
    }


def test_decisions_are_empty_before_the_first_tick(client):
    assert client.get("/api/v1/decisions?pool=assistant-h100").json() == {"decisions": []}


def test_decisions_of_one_pool_leave_out_the_others(loop, client):
    one, other = tick(1, "assistant-h100"), tick(1, "assistant-l40s")
    shift = ShiftWeights("assistant", (Weight("assistant-h100", 1.0),), (Weight("assistant-h100", 0.9),))
    move = replace(one.decision.moves[0], id="1-assistant", target="assistant", actions=(shift,))
    both = replace(
        one,
        observation=replace(one.observation, pools=one.observation.pools + other.observation.pools),
        decision=replace(
            one.decision,
            moves=(*one.decision.moves, move, *other.decision.moves),
            holds=(Hold("assistant-l40s", ActionKind.SCALE, "enough"),),
            alarms=(*one.decision.alarms, Alarm(AlarmKind.CAPACITY_UNKNOWN, "assistant-l40s", "no call was seen")),
            assessments=one.decision.assessments + other.decision.assessments,
        ),
        outcomes=one.outcomes + other.outcomes,
    )
    loop.publish(both)
    (shown,) = client.get("/api/v1/decisions?pool=assistant-h100").json()["decisions"]
    assert [move["id"] for move in shown["moves"]] == ["7-assistant-h100", "1-assistant"]
    assert shown["holds"] == []
    assert [alarm["target"] for alarm in shown["alarms"]] == ["assistant-h100/r-2"]
    assert [one["pool"] for one in shown["assessments"]] == ["assistant-h100"]
    assert [one["move_id"] for one in shown["outcomes"]] == ["7-assistant-h100"]


def test_a_pool_that_was_never_seen_is_not_found(loop, client):
    loop.publish(tick(1))
    answer = client.get("/api/v1/decisions?pool=asistant")
    assert answer.status_code == 404
    assert answer.json() == {"error": "none of the last 1 decisions is about 'asistant'; pools: assistant-h100"}


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=-1", "limit=abc", "limit=", "limit=1e3", "limit=%D9%A3", "pool=", "limits=3"],
)
def test_a_bad_parameter_is_refused_with_one_sentence(loop, client, query):
    loop.publish(tick(1))
    answer = client.get(f"/api/v1/decisions?{query}")
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/api/v1/state", "/api/v1/decisions"])
def test_nothing_can_be_written(client, method, path):
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.json() == {"error": "this server only reads; use GET or HEAD"}
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/api/v1/state", "/api/v1/decisions"])
def test_head_is_get_without_the_body(loop, client, path):
    loop.publish(tick(1))
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_index_lists_every_path(client):
    listed = [line.split()[0] for line in client.get("/").text.splitlines() if line.startswith("/")]
    assert len(listed) == 5
    assert {client.get(path).status_code for path in listed} <= {200, 503}


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/state", "/nowhere", "/api/v1/decisions?limit=0"])
def test_every_answer_carries_the_security_headers(client, path):
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_an_unknown_path_is_a_json_error(client):
    answer = client.get("/nowhere")
    assert (answer.status_code, answer.json()) == (404, {"error": "there is no such path; / lists the paths"})


def test_a_journal_that_cannot_be_read_is_said_in_its_own_words(loop, client):
    loop.failure = JournalError("the journal trimtab.db is damaged; move it away and start again")
    answer = client.get("/api/v1/decisions")
    assert (answer.status_code, answer.json()) == (503, {"error": str(loop.failure)})


def test_a_bug_is_logged_and_never_shown(loop, client):
    loop.failure = KeyError("secret detail")
    with capture_logs() as lines:
        answer = client.get("/api/v1/decisions")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert [(line["path"], line["exc_info"]) for line in lines] == [("/api/v1/decisions", loop.failure)]
    for _ in range(20):  # on the same connection, which an answered bug must not cut
        assert client.get("/healthz").status_code == 200


def test_every_action_says_its_kind():
    actions = (
        Sleep("p", ("r",)),
        Wake("p", ("r",)),
        WarmCache("p", "r"),
        ShiftWeights("s", (Weight("p", 1.0),), (Weight("p", 1.0),)),
        SetAdmission("s", (), (AdmissionLimit("gold", "new", "first", None),), tightens=True),
    )
    assert [one["kind"] for one in strict(encode(actions))] == ["sleep", "wake", "warm", "weights", "admission"]


def test_fifty_readers_at_once_while_ticks_are_published(loop, server):
    paths = ["/metrics", "/api/v1/state", "/api/v1/decisions?limit=100", "/healthz", "/readyz"]
    loop.publish(tick(0))

    def read(number: int) -> int:
        answer = httpx.get(f"http://127.0.0.1:{server.port}{paths[number % 5]}", timeout=60, trust_env=False)
        if answer.headers["content-type"] == "application/json":
            strict(answer.content)
        return answer.status_code

    with ThreadPoolExecutor(50) as readers:
        answers = [readers.submit(read, number) for number in range(50)]
        slowest_s = 0.0
        for number in range(1, 301):
            began_s = time.perf_counter()
            loop.publish(tick(number))
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
        assert {answer.result(60) for answer in answers} == {200}
    assert slowest_s < 2.0


def test_a_taken_port_is_one_sentence_with_place_and_remedy(loop, server):
    second = Server(loop, "127.0.0.1", server.port, HEALTH_LIMIT_S)
    with pytest.raises(TrimtabError) as caught:
        second.start()
    assert str(caught.value) == (
        f"can't listen on 127.0.0.1:{server.port}: another program listens there; "
        "end it, or set TRIMTAB_PORT to a free port"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_one_sentence(loop, host):
    with pytest.raises(TrimtabError, match="set TRIMTAB_HOST to an address of this machine"):
        Server(loop, host, 0, HEALTH_LIMIT_S).start()


def test_a_server_can_be_stopped_twice_and_started_again(loop):
    server = Server(loop, "127.0.0.1", 0, HEALTH_LIMIT_S)
    server.stop()
    for _ in range(2):
        server.start()
        assert httpx.get(f"http://127.0.0.1:{server.port}/healthz", trust_env=False).status_code == 200
        server.stop()
        server.stop()


def test_stops_in_time_in_spite_of_idle_half_sent_and_unread_connections(loop):
    for _ in range(1000):
        loop.publish(wide_tick(1))
    server = Server(loop, "127.0.0.1", 0, HEALTH_LIMIT_S)
    server.start()
    address = ("127.0.0.1", server.port)
    idle, half = (socket.create_connection(address, timeout=10) for _ in range(2))
    with idle, half, unread_answer(server.port):
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        half.sendall(b"GET /healthz HTT")
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < 2.0
        for thread in threading.enumerate():
            if thread.name == "trimtab-server":
                thread.join(10)
                assert not thread.is_alive()


def test_a_reader_who_does_not_read_holds_up_neither_ticks_nor_other_readers(loop, server, client):
    for _ in range(1000):
        loop.publish(wide_tick(1))
    with unread_answer(server.port):
        began_s = time.monotonic()
        loop.publish(tick(1001))
        assert client.get("/healthz").status_code == 200
        assert client.get("/api/v1/decisions?limit=1").json()["decisions"][0]["tick"] == 1001
        assert time.monotonic() - began_s < 5.0


def test_connections_that_say_nothing_keep_no_reader_out(loop, server, client):
    address = ("127.0.0.1", server.port)
    silent = []
    try:
        for number in range(CONNECTIONS + 40):
            one = socket.create_connection(address, timeout=10)
            silent.append(one)
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"")
            if number % 50 == 0:
                assert client.get("/healthz").status_code == 200
        assert client.get("/healthz").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{server.port}/readyz", trust_env=False).status_code in {200, 503}
        # The first ones had to give way, the last ones are still there.
        silent[0].settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        silent[-1].sendall(b"\r\n")
        assert silent[-1].recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        for one in silent:
            one.close()


def test_a_connection_without_a_request_is_closed_in_time(loop, monkeypatch):
    monkeypatch.setattr("controller.server.HEADER_LIMIT_S", 0.2)
    server = Server(loop, "127.0.0.1", 0, HEALTH_LIMIT_S)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            silent.sendall(b"GET /healthz HTT")
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
    finally:
        server.stop()


def test_readers_who_do_not_read_keep_no_reader_out_either(loop, server, client):
    for _ in range(60):
        loop.publish(wide_tick(1))
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as open_ones:
        for _ in range(CONNECTIONS + 10):
            one = open_ones.enter_context(socket.create_connection(address, timeout=10))
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.get("/healthz").status_code == 200
