"""Every way in which a Prometheus can fail to answer."""

from __future__ import annotations

import base64
import json
import re
import threading
import time

import pytest
from prometheus_replies import EMPTY, EVERY, only_for, the_hole, vector
from servers import HttpServer, Reply, free_port, prometheus_policy

from controller.adapters.prometheus import PrometheusTelemetry
from controller.observations import Signal

# ------------------------------------------------------------------------------------------------ failing servers


LOGIN = Reply(b"<html><body>Please log in</body></html>", content_type="text/html; charset=utf-8")


def error(status, kind, message):
    return Reply(json.dumps({"status": "error", "errorType": kind, "error": message}).encode(), status)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (LOGIN, r"answered something else than JSON \(text/html; charset=utf-8\): a login page or a proxy"),
        (Reply(b'{"status": "succ'), r"its JSON breaks off"),
        (Reply(b""), r"its JSON breaks off"),
        (Reply(b"[]"), r"answered JSON that is not Prometheus's"),
        (Reply(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}'), r"answered a matrix where"),
        (Reply(b"[" * 100_000), r"its JSON breaks off"),
        (
            error(400, "bad_data", "parse error: unexpected identifier"),
            r"HTTP 400 \(bad_data: parse error.*\); check the label",
        ),
        (
            error(422, "execution", "too many samples"),
            r"HTTP 422 \(execution: too many samples\); raise the server's query lim",
        ),
        (error(503, "timeout", "query timed out"), r"HTTP 503 \(timeout: query timed out\); read the log"),
        (error(200, "execution", "odd"), r"HTTP 200 \(execution: odd\)"),
        (
            Reply(b"no org id", 401, "text/plain"),
            r"HTTP 401 \(Unauthorized\); check telemetry.prometheus bearer_token_file.*tenant",
        ),
        (Reply(b"404 page not found", 404, "text/plain"), r"HTTP 404 \(Not Found\); telemetry.prometheus.url must be"),
        (Reply(b"", 405), r"HTTP 405 .*let POST through"),
        (Reply(b"slow down", 429, "text/plain"), r"HTTP 429 .*raise telemetry.interval_s"),
        (Reply(b"<h1>Bad gateway</h1>", 502, "text/html"), r"HTTP 502 \(Bad Gateway\); read the log"),
        (Reply(b"", 302, headers={"Location": "https://login/x"}), r"HTTP 302 .*it points to https://login/x"),
        (Reply(EMPTY, 500), r"HTTP 500"),
        (Reply(EMPTY, claimed_bytes=len(EMPTY) + 10), r"the connection to .* broke off \(.*\); look at the server"),
        (Reply(b"no gzip", headers={"Content-Encoding": "gzip"}), r"broke off"),
    ],
)
def test_a_failed_query_costs_its_own_signal_and_says_why(read_prometheus, reply, said):
    snapshot = read_prometheus(only_for("vllm:num_preemptions", reply))
    assert snapshot.failed == (Signal.PREEMPTIONS_PER_S,)
    assert re.match(r"preemptions_per_s: (the connection to )?http://127\.0\.0\.1:\d+ ", the_hole(snapshot))
    assert re.search(said, the_hole(snapshot))


def test_a_refused_connection_is_said_once_for_all_signals(read_prometheus):
    snapshot = read_prometheus(None, url=f"http://127.0.0.1:{free_port()}")
    assert the_hole(snapshot).startswith(f"all {len(EVERY)} signals: http://127.0.0.1:")
    assert "refused the connection; start the server or correct telemetry.prometheus.url" in the_hole(snapshot)
    assert snapshot.failed == tuple(entry.signal for entry in EVERY)
    assert snapshot.samples == ()
    assert re.fullmatch(r"prometheus: http://127\.0\.0\.1:\d+", snapshot.holes[0].source)


def test_a_name_that_does_not_resolve_is_named(read_prometheus):
    snapshot = read_prometheus(None, url="http://prometheus.invalid:9090/")
    assert "the name prometheus.invalid of http://prometheus.invalid:9090 can't be resolved" in the_hole(snapshot)


def test_passwords_in_the_url_reach_the_server_and_no_message(read_prometheus):
    asked = []
    server_says = lambda request: asked.append(request) or Reply(b"", 403)  # noqa: E731
    server = HttpServer(server_says)
    try:
        snapshot = read_prometheus(None, url=server.url.replace("//", "//ann:s3cret@"))
    finally:
        server.close()
    assert asked[0].headers["Authorization"] == f"Basic {base64.b64encode(b'ann:s3cret').decode()}"
    assert "s3cret" not in repr(snapshot)


def test_a_hanging_server_costs_no_more_than_the_timeout(read_prometheus):
    started_s = time.monotonic()
    snapshot = read_prometheus(only_for("vllm:num_preemptions", Reply(EMPTY, stall_s=60)), timeout_s=0.5)
    assert time.monotonic() - started_s < 10
    assert snapshot.failed == (Signal.PREEMPTIONS_PER_S,)
    assert re.search(r"did not answer within 0\.5 s; raise telemetry\.prometheus\.timeout_s", the_hole(snapshot))


@pytest.mark.parametrize("reply", [Reply(EMPTY, stall_s=60), Reply(EMPTY, drip_s=0.2)], ids=["hangs", "drips"])
def test_the_deadline_holds_for_the_whole_read_however_many_queries_hang(read_prometheus, reply):
    started_s = time.monotonic()
    snapshot = read_prometheus(lambda _: reply, deadline_s=1.0)
    assert time.monotonic() - started_s < 3
    assert set(snapshot.failed) == {entry.signal for entry in EVERY}
    assert all("did not answer within" in hole.detail for hole in snapshot.holes)


def test_a_deadline_that_is_over_is_answered_at_once(read_prometheus):
    snapshot = read_prometheus(lambda _: Reply(EMPTY), deadline_s=0.0)
    assert set(snapshot.failed) == {entry.signal for entry in EVERY}


def test_what_came_before_the_deadline_is_kept(read_prometheus):
    body = vector(({"pod": "a"}, "3"))
    snapshot = read_prometheus(
        lambda request: Reply(body) if "num_preemptions" in request.form["query"] else Reply(EMPTY, stall_s=60),
        deadline_s=2.0,
        timeout_s=0.2,
    )
    assert [sample.value for sample in snapshot.samples] == [3.0]


def test_a_server_that_recovers_is_asked_again_and_nothing_is_said(http_server, read_prometheus):
    lock, failures = threading.Lock(), {}

    def respond(request):
        with lock:
            failures[request.form["query"]] = failures.get(request.form["query"], 0) + 1
            return Reply(b"", 503) if failures[request.form["query"]] < 3 else Reply(EMPTY)

    assert read_prometheus(respond).holes == ()
    assert set(failures.values()) == {3}


def test_retries_are_few_and_a_wrong_query_is_not_repeated(http_server, read_prometheus):
    for status, attempts in ((503, 3), (400, 1), (404, 1)):
        server = http_server(lambda _, status=status: Reply(b"", status))
        assert read_prometheus(None, url=server.url).samples == ()
        assert len(server.requests) == attempts * len(EVERY)


def test_an_answer_without_end_is_cut_off(read_prometheus, monkeypatch):
    monkeypatch.setattr("controller.adapters.prometheus_api.LIMIT_BYTES", 1 << 20)
    snapshot = read_prometheus(only_for("vllm:num_preemptions", Reply(b" " * (2 << 20))))
    assert "is larger than 1 MiB; give the pools' select more labels in common" in the_hole(snapshot)


def test_answers_of_very_many_series_do_not_hold_the_read_up(http_server):
    body = vector(*(({"instance": f"10.0.0.{n}:8000", "job": "vllm", "pod": f"pod-{n}"}, "1") for n in range(40_000)))
    server = http_server(lambda _: Reply(body))
    telemetry = PrometheusTelemetry(prometheus_policy(server.url))
    started_s = time.monotonic()
    snapshot = telemetry.read(1e9, 60.0, 1.0)
    took_s = time.monotonic() - started_s
    telemetry.close()
    assert took_s < 5.0
    assert snapshot.failed
    assert snapshot.holes


def test_closing_does_not_wait_for_a_hanging_server(http_server):
    server = http_server(lambda _: Reply(EMPTY, stall_s=60))
    telemetry = PrometheusTelemetry(prometheus_policy(server.url, timeout_s=1))
    telemetry.read(1e9, 60.0, 0.1)
    started_s = time.monotonic()
    telemetry.close()
    assert time.monotonic() - started_s < 1
