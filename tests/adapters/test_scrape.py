"""Scraping real HTTP servers that serve captured vLLM pages, and everything a metrics endpoint can do wrong."""

from __future__ import annotations

import gzip
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from controller.adapters import scrape
from controller.adapters.scrape import ScrapeTelemetry
from controller.errors import TelemetryError
from controller.observations import Signal, Snapshot
from controller.policy import FleetPolicy

METRICS = Path(__file__).resolve().parents[1] / "data" / "vllm_cpu" / "metrics"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
DEADLINE_S = 10.0

Answer = Callable[[BaseHTTPRequestHandler], None]


def page(text: str | bytes, content_type: str = TEXT, status: int = 200, headers: tuple[str, ...] = ()) -> Answer:
    """An answer with the given body; headers are "Name: value"."""
    body = text.encode() if isinstance(text, str) else text

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(len(body)))
        for header in headers:
            name, _, value = header.partition(": ")
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def captured(name: str) -> Answer:
    return page((METRICS / f"{name}.prom").read_bytes())


class Endpoint:
    """A small HTTP server whose answer can be exchanged; it notes the paths and headers it was asked with."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.headers.append({name.lower(): text for name, text in self.headers.items()})
                try:
                    outer.answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (its base class's name)
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.name = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.name}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def hang(self, request: BaseHTTPRequestHandler) -> None:
        """Accept, and say nothing until the test is over."""
        self.over.wait(60)

    def dribble(self, request: BaseHTTPRequestHandler) -> None:
        """A byte now and then: every single read succeeds, the whole never ends."""
        request.send_response(200)
        request.send_header("Content-Type", TEXT)
        request.end_headers()
        while not self.over.wait(0.05):
            request.wfile.write(b"#")

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def endpoint(opened: ExitStack) -> Callable[[Answer], Endpoint]:
    def start(answer: Answer) -> Endpoint:
        one = Endpoint(answer)
        opened.callback(one.close)
        return one

    return start


@pytest.fixture
def telemetry(opened: ExitStack) -> Callable[..., ScrapeTelemetry]:
    def start(*targets: Endpoint | dict[str, Any], **more: Any) -> ScrapeTelemetry:
        one = ScrapeTelemetry(policy(*targets, **more))
        opened.callback(one.close)
        return one

    return start


def policy(*targets: Endpoint | dict[str, Any], timeout_s: float = 5, **telemetry: Any) -> FleetPolicy:
    listed = [{"url": one.url} if isinstance(one, Endpoint) else one for one in targets]
    return FleetPolicy.model_validate(
        {
            "version": 1,
            "telemetry": {"scrape": {"targets": listed, "timeout_s": timeout_s}, **telemetry},
            "gpus": {"H100": {"count": 8, "usd_per_gpu_hour": 2}},
            "services": {"chat": {"slo": {"ttft_s": 2, "tpot_s": 0.1}, "pools": ["a"]}},
            "pools": {
                "a": {
                    "select": {"pool": "a"},
                    "model": {"name": "tiny"},
                    "gpu": {"type": "H100"},
                    "replicas": {"max": 4},
                }
            },
        }
    )


def values(snapshot: Snapshot, signal: Signal, **labels: str) -> list[float]:
    """The values of one signal, of the samples that have the given labels."""
    return [
        sample.value
        for sample in snapshot.samples
        if sample.signal is signal and labels.items() <= dict(sample.labels).items()
    ]


def details(snapshot: Snapshot) -> list[str]:
    return [hole.detail for hole in snapshot.holes]


# ------------------------------------------------------------------------------------------------- captured pages


def test_first_read_has_gauges_and_no_rates(endpoint: Any, telemetry: Any) -> None:
    engine = endpoint(captured("00_idle_fresh"))
    snapshot = telemetry(engine).read(1000.0, 60.0, DEADLINE_S)
    assert values(snapshot, Signal.UP) == [1.0]
    assert values(snapshot, Signal.RUNNING) == [0.0]
    assert values(snapshot, Signal.HEARTBEAT_AGE_S) == [0.0]
    assert values(snapshot, Signal.GENERATION_TOKENS_PER_S) == []
    assert values(snapshot, Signal.TTFT_BUCKETS_PER_S) == []
    assert snapshot.holes == ()
    assert snapshot.failed == ()
    assert {("instance", engine.name), ("job", "scrape")} <= set(snapshot.samples[0].labels)


def test_pages_of_a_burst_give_rates_between_two_reads(endpoint: Any, telemetry: Any) -> None:
    engine = endpoint(captured("01_before"))
    reader = telemetry(engine)
    reader.read(1000.0, 60.0, DEADLINE_S)
    engine.answer = captured("02_during_3")
    snapshot = reader.read(1015.0, 60.0, DEADLINE_S)
    for signal in (
        Signal.STEPS_PER_S,
        Signal.FIRST_TOKENS_PER_S,
        Signal.PROMPT_TOKENS_PER_S,
        Signal.GENERATION_TOKENS_PER_S,
        Signal.ITL_SUM_PER_S,
    ):
        assert min(values(snapshot, signal)) > 0, signal
    buckets = values(snapshot, Signal.TTFT_BUCKETS_PER_S, le="+Inf")
    assert buckets == values(snapshot, Signal.FIRST_TOKENS_PER_S)
    assert len(values(snapshot, Signal.TTFT_BUCKETS_PER_S)) == 23


def test_kv_pressure_shows_full_cache_and_preemptions(endpoint: Any, telemetry: Any) -> None:
    engine = endpoint(captured("04_kvpressure_1"))
    reader = telemetry(engine)
    usage, preemptions = [], []
    for step in range(1, 9):
        engine.answer = captured(f"04_kvpressure_{step}")
        snapshot = reader.read(1000.0 + step, 4.0, DEADLINE_S)
        usage += values(snapshot, Signal.KV_USAGE_RATIO)
        preemptions += values(snapshot, Signal.PREEMPTIONS_PER_S)
        assert snapshot.holes == ()
    assert max(usage) == 1.0
    assert max(preemptions) > 0


def test_engine_that_sleeps_is_up_and_not_awake(endpoint: Any, telemetry: Any) -> None:
    snapshot = telemetry(endpoint(captured("07_sleeping_with_5_pending"))).read(1000.0, 60.0, DEADLINE_S)
    assert values(snapshot, Signal.UP) == [1.0]
    assert values(snapshot, Signal.AWAKE) == [0.0]
    assert values(snapshot, Signal.WAITING) == [0.0]


def test_engine_that_hangs_repeats_its_page_and_steps_at_rate_zero(endpoint: Any, telemetry: Any) -> None:
    reader = telemetry(endpoint(captured("08_engine_hung")))
    reader.read(1000.0, 60.0, DEADLINE_S)
    snapshot = reader.read(1015.0, 60.0, DEADLINE_S)
    assert values(snapshot, Signal.UP) == [1.0]
    assert values(snapshot, Signal.STEPS_PER_S) == [0.0]
    assert values(snapshot, Signal.HEARTBEAT_AGE_S) == [0.0]


def test_rejections_are_summed_over_their_reasons(endpoint: Any, telemetry: Any) -> None:
    text = (METRICS / "09_admission_rejections.prom").read_text()
    engine = endpoint(page(text))
    reader = telemetry(engine)
    reader.read(1000.0, 30.0, DEADLINE_S)
    lines = [line for line in text.splitlines() if line.startswith("vllm:admission_rejections_total{")]
    assert len(lines) == 2
    for line in lines:
        head, _, count = line.rpartition(" ")
        text = text.replace(line, f"{head} {float(count) + 15}")
    engine.answer = page(text)
    snapshot = reader.read(1015.0, 30.0, DEADLINE_S)
    # 1/s of the one that began at 80, and half of it for the one that began at zero: it can't have been below before.
    assert values(snapshot, Signal.REJECTED_PER_S) == [pytest.approx(1.5)]


def test_kill_and_restart_gives_down_then_a_rate_from_zero(endpoint: Any, telemetry: Any) -> None:
    engine = endpoint(captured("03_after"))
    reader = telemetry(engine)
    reader.read(1000.0, 60.0, DEADLINE_S)
    engine.answer = page("starting", status=503)
    down = reader.read(1015.0, 60.0, DEADLINE_S)
    assert values(down, Signal.UP) == [0.0]
    assert {sample.signal for sample in down.samples} == {Signal.UP}
    assert "HTTP 503" in details(down)[0]
    engine.answer = captured("00_idle_fresh")
    back = reader.read(1030.0, 60.0, DEADLINE_S)
    assert values(back, Signal.UP) == [1.0]
    assert values(back, Signal.GENERATION_TOKENS_PER_S)[0] >= 0
    assert all(sample.value >= 0 for sample in back.samples if sample.signal.endswith("_per_s"))


def test_restart_is_seen_even_where_the_counter_has_regrown(endpoint: Any, telemetry: Any) -> None:
    def text(started_s: float, tokens: float) -> Answer:
        return page(f"process_start_time_seconds {started_s}\nvllm:prompt_tokens_total {tokens}\n")

    rates = []
    for started_s in (500.0, 500.4, 1010.0):
        engine = endpoint(text(500.0, 100.0))
        reader = telemetry(engine)
        reader.read(1000.0, 20.0, DEADLINE_S)
        engine.answer = text(started_s, 120.0)
        rates += values(reader.read(1020.0, 20.5, DEADLINE_S), Signal.PROMPT_TOKENS_PER_S)
    assert rates[0] == rates[1] == pytest.approx(1.0, rel=0.05)
    assert rates[2] == pytest.approx(6.0, rel=0.05)


# ------------------------------------------------------------------------------------------- targets that misbehave


def test_targets_that_fail_cost_only_themselves_and_no_time_beyond_the_deadline(
    endpoint: Any, telemetry: Any, unused_port: int
) -> None:
    good, hung, slow = (endpoint(captured("01_before")) for _ in range(3))
    hung.answer, slow.answer = hung.hang, slow.dribble
    gone = {"url": f"http://127.0.0.1:{unused_port}/metrics"}
    started_s = time.monotonic()
    snapshot = telemetry(hung, good, slow, gone).read(1000.0, 60.0, 1.0)
    assert time.monotonic() - started_s < 3.0
    assert values(snapshot, Signal.UP, instance=good.name) == [1.0]
    assert values(snapshot, Signal.RUNNING) == [0.0]
    for name in (hung.name, slow.name, f"127.0.0.1:{unused_port}"):
        assert values(snapshot, Signal.UP, instance=name) == [0.0]
    said = {hole.source: hole.detail for hole in snapshot.holes}
    assert said[f"scrape:{hung.name}"].startswith("gave no whole answer within 0.9 s; ")
    assert said[f"scrape:{slow.name}"].startswith("gave no whole answer within 0.9 s; ")
    assert said[f"scrape:127.0.0.1:{unused_port}"].startswith("can't be reached (")
    assert len(said) == 3


@pytest.fixture
def unused_port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    return int(server.server_address[1])


def test_target_that_the_deadline_left_unread_is_not_called_down(
    endpoint: Any, telemetry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = endpoint(captured("01_before")), endpoint(captured("01_before"))
    reader = telemetry(first, second)
    reader.read(1000.0, 60.0, DEADLINE_S)
    monkeypatch.setattr(scrape, "IN_FLIGHT", 1)
    first.answer = first.hang
    snapshot = reader.read(1015.0, 60.0, 1.5)
    assert values(snapshot, Signal.UP, instance=first.name) == [0.0]
    assert values(snapshot, Signal.UP, instance=second.name) in ([], [1.0])
    assert values(snapshot, Signal.HEARTBEAT_AGE_S, instance=second.name) in ([15.0], [0.0])


def test_all_signals_failed_where_the_deadline_left_no_time_at_all(endpoint: Any, telemetry: Any) -> None:
    reader = telemetry(endpoint(captured("01_before")))
    snapshot = reader.read(1000.0, 60.0, 0.0)
    assert snapshot.samples == ()
    assert Signal.RUNNING in snapshot.failed
    assert details(snapshot) == ["was not read: the deadline of the round came first"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (page("no", status=500), "answered HTTP 500"),
        (
            page("", status=301, headers=("Location: /elsewhere",)),
            "answered HTTP 301, a redirect; give the final address",
        ),
        (page("<html><body>Log in</body></html>", "text/html"), "did not answer with a metrics page (line 1 is broken"),
        (page('{"error": {"message": "not found"}}', "application/json"), "did not answer with a metrics page"),
        (page("hello world\n"), "did not answer with a metrics page"),
        (page(bytes(range(256)) * 9), "did not answer with a metrics page"),
        (page("# TYPE a gauge\na 1x\n# EOF\n", OPENMETRICS), "gave OpenMetrics that is broken at line 2"),
    ],
)
def test_answer_that_is_no_metrics_page_means_down_and_says_why(
    endpoint: Any, telemetry: Any, answer: Answer, words: str
) -> None:
    engine = endpoint(answer)
    snapshot = telemetry(engine).read(1000.0, 60.0, DEADLINE_S)
    assert [sample.value for sample in snapshot.samples] == [0.0]
    assert [hole.source for hole in snapshot.holes] == [f"scrape:{engine.name}"]
    assert words in snapshot.holes[0].detail
    assert engine.asked == ["/metrics"]


def test_page_that_never_ends_is_given_up_at_its_limit(
    endpoint: Any, telemetry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "PAGE_LIMIT_BYTES", 4 * 1024 * 1024)

    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(b"vllm:num_requests_running 1\n" * 4096)

    (detail,) = details(telemetry(endpoint(endless)).read(1000.0, 60.0, DEADLINE_S))
    assert detail == "answered with more than 4 MiB; see whether this is a metrics page"


def test_compressed_bomb_is_given_up_at_the_same_limit(
    endpoint: Any, telemetry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "PAGE_LIMIT_BYTES", 1024 * 1024)
    bomb = gzip.compress(b"a 1\n" * 4_000_000)
    answer = page(bomb, headers=("Content-Encoding: gzip",))
    (detail,) = details(telemetry(endpoint(answer)).read(1000.0, 60.0, DEADLINE_S))
    assert "more than 1 MiB" in detail


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_page_that_was_packed_unasked_is_read_all_the_same(endpoint: Any, telemetry: Any, encoding: str) -> None:
    plain = (METRICS / "03_after.prom").read_bytes()
    packed = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
    engine = endpoint(page(packed, headers=(f"Content-Encoding: {encoding}",)))
    snapshot = telemetry(engine).read(1000.0, 60.0, DEADLINE_S)
    assert snapshot.holes == ()
    assert values(snapshot, Signal.UP) == [1.0]


@pytest.mark.parametrize(("encoding", "words"), [("br", "in the encoding 'br'"), ("gzip", "broke off its answer")])
def test_a_packed_page_that_cannot_be_unpacked_means_down(
    endpoint: Any, telemetry: Any, encoding: str, words: str
) -> None:
    answer = page(b"vllm:num_requests_running 1\n", headers=(f"Content-Encoding: {encoding}",))
    assert words in details(telemetry(endpoint(answer)).read(1000.0, 60.0, DEADLINE_S))[0]


def test_a_bomb_is_never_unpacked_at_once() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    assert len(bomb) < scrape.PIECE_BYTES
    unpack = scrape._Unpacker("gzip")
    assert max(len(piece) for piece in unpack(bomb)) <= scrape.PIECE_BYTES


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            page("".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(10_050))),
            "answered with more than 10,000 wanted series; see whether this is one target's own page",
        ),
        (page("# TYPE a gauge\n" + "a 1\n" * 50_100 + "# EOF\n", OPENMETRICS), "more than 50,000 lines of OpenMetrics"),
    ],
    ids=["series", "lines"],
)
def test_a_page_of_too_much_to_read_is_given_up(endpoint: Any, telemetry: Any, answer: Answer, words: str) -> None:
    snapshot = telemetry(endpoint(answer)).read(1000.0, 60.0, DEADLINE_S)
    assert words in details(snapshot)[0]
    assert values(snapshot, Signal.UP) == [0.0]


def test_pages_that_could_not_be_read_in_time_are_holes_and_the_round_ends(endpoint: Any, telemetry: Any) -> None:
    text = "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(9_000))
    engines = [endpoint(page(text.replace("engine", f"engine{n}"))) for n in range(8)]
    began_s = time.monotonic()
    snapshot = telemetry(*engines).read(1000.0, 60.0, 1.0)
    assert time.monotonic() - began_s < 8.0
    assert "was not read: the deadline of the round came first" in details(snapshot)


def test_connection_lost_in_the_middle_means_down(endpoint: Any, telemetry: Any) -> None:
    def cut(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        request.wfile.write(b"vllm:num_requests_running 1\n")
        request.close_connection = True

    snapshot = telemetry(endpoint(cut)).read(1000.0, 60.0, DEADLINE_S)
    assert [sample.value for sample in snapshot.samples] == [0.0]
    assert details(snapshot)[0].startswith("broke off its answer (")


def test_broken_lines_cost_themselves_and_are_named(endpoint: Any, telemetry: Any) -> None:
    text = 'vllm:num_requests_running 2\nvllm:num_requests_waiting{engine="0 3\n???\nvllm:kv_cache_usage_perc 0.5x\n'
    snapshot = telemetry(endpoint(page(text))).read(1000.0, 60.0, DEADLINE_S)
    assert values(snapshot, Signal.UP) == [1.0]
    assert values(snapshot, Signal.RUNNING) == [2.0]
    assert values(snapshot, Signal.WAITING) == []
    assert details(snapshot) == [
        'line 2 is broken (vllm:num_requests_waiting{engine="0 3), as are 2 others; see what writes this page'
    ]


def test_empty_page_is_up_without_series_and_says_so(endpoint: Any, telemetry: Any) -> None:
    snapshot = telemetry(endpoint(page("# nothing\n"))).read(1000.0, 60.0, DEADLINE_S)
    assert [sample.value for sample in snapshot.samples] == [1.0]
    assert details(snapshot)[0].startswith("answered with an empty page")


def test_of_a_series_that_comes_twice_the_first_counts(endpoint: Any, telemetry: Any) -> None:
    text = "vllm:num_requests_running 2\nvllm:num_requests_running 5\n"
    snapshot = telemetry(endpoint(page(text))).read(1000.0, 60.0, DEADLINE_S)
    assert values(snapshot, Signal.RUNNING) == [2.0]
    assert details(snapshot) == ["gave vllm:num_requests_running twice with the same labels: the first one counts"]


def test_openmetrics_is_read_by_its_own_rules(endpoint: Any, telemetry: Any) -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 4 990.5\n"
        "# TYPE vllm:prompt_tokens counter\n"
        'vllm:prompt_tokens_total{engine="0"} 12 # {trace_id="x"} 1\n# EOF\n'
    )
    engine = endpoint(page(text, OPENMETRICS))
    reader = telemetry(engine)
    snapshot = reader.read(1000.0, 60.0, DEADLINE_S)
    assert snapshot.holes == ()
    assert values(snapshot, Signal.RUNNING) == [4.0]
    assert values(snapshot, Signal.HEARTBEAT_AGE_S) == [9.5]
    assert values(reader.read(1015.0, 60.0, DEADLINE_S), Signal.PROMPT_TOKENS_PER_S) == [0.0]


def test_clock_that_was_set_back_is_said_and_survived(endpoint: Any, telemetry: Any) -> None:
    reader = telemetry(endpoint(captured("01_before")))
    reader.read(1000.0, 60.0, DEADLINE_S)
    snapshot = reader.read(940.0, 60.0, DEADLINE_S)
    assert details(snapshot) == ["the clock was set back by 60.0 s: what came later is dropped"]
    assert values(snapshot, Signal.HEARTBEAT_AGE_S) == [0.0]


# ------------------------------------------------------------------------------------------------ labels and policy


def test_target_labels_name_the_replica_and_the_policys_label_names_become_canonical(
    endpoint: Any, telemetry: Any
) -> None:
    engine = endpoint(captured("01_before"))
    listed = {"url": engine.url, "labels": {"kubernetes_pod": "vllm-0", "pool": "a", "job": "engines"}}
    snapshot = telemetry(listed, labels={"pod": "kubernetes_pod"}).read(1000.0, 60.0, DEADLINE_S)
    (running,) = [sample for sample in snapshot.samples if sample.signal is Signal.RUNNING]
    assert dict(running.labels) == {
        "instance": engine.name,
        "job": "engines",
        "kubernetes_pod": "vllm-0",
        "pod": "vllm-0",
        "pool": "a",
    }


def test_url_without_a_path_means_metrics_and_a_password_is_never_shown(
    endpoint: Any, telemetry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    engine = endpoint(page("no", status=401))
    address = f"http://reader:secret@{engine.name}"
    snapshot = telemetry({"url": address}).read(1000.0, 60.0, DEADLINE_S)
    assert engine.asked == ["/metrics"]
    assert engine.headers[0]["authorization"].startswith("Basic ")
    assert "secret" not in repr(snapshot)
    assert "secret" not in caplog.text


def test_proxies_of_the_environment_are_not_used(
    endpoint: Any, telemetry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = endpoint(page("no", status=502))
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{proxy.name}")
    snapshot = telemetry(endpoint(captured("01_before"))).read(1000.0, 60.0, DEADLINE_S)
    assert values(snapshot, Signal.UP) == [1.0]
    assert proxy.asked == []


def test_target_that_is_listed_twice_is_read_once(endpoint: Any, telemetry: Any) -> None:
    engine = endpoint(captured("01_before"))
    snapshot = telemetry(engine, engine).read(1000.0, 60.0, DEADLINE_S)
    assert engine.asked == ["/metrics"]
    assert "listed twice" in details(snapshot)[0]


@pytest.mark.parametrize("url", ["ftp://h/metrics", "h:8000", "http://[::1/metrics", "http://h:99999/metrics"])
def test_address_that_is_none_is_refused_with_its_place(url: str) -> None:
    with pytest.raises(
        TelemetryError, match=r"telemetry\.scrape\.targets: the url of target 1 is no address; write it"
    ):
        ScrapeTelemetry(policy({"url": url}))


def test_policy_without_targets_is_refused() -> None:
    with pytest.raises(TelemetryError, match=r"telemetry\.scrape is missing"):
        ScrapeTelemetry(
            policy({"url": "http://h"}).model_copy(update={"telemetry": FleetPolicy.model_fields["telemetry"].default})
        )


def test_every_signal_has_an_expression(endpoint: Any, telemetry: Any) -> None:
    reader = telemetry(endpoint(captured("01_before")))
    said = dict(reader.expressions(60.0))
    assert "rate(vllm:prompt_tokens_total[60000ms])" in said[Signal.PROMPT_TOKENS_PER_S]
    assert len(said) > 20


def test_reads_from_any_thread_and_closes_twice(endpoint: Any, telemetry: Any) -> None:
    reader = telemetry(endpoint(captured("01_before")))
    snapshots: list[Snapshot] = []
    for number in range(2):
        thread = threading.Thread(target=lambda n=number: snapshots.append(reader.read(1000.0 + n, 60.0, DEADLINE_S)))
        thread.start()
        thread.join(DEADLINE_S)
    snapshots.append(reader.read(1002.0, 60.0, DEADLINE_S))
    assert [values(snapshot, Signal.UP) for snapshot in snapshots] == [[1.0]] * 3
    reader.close()
    reader.close()


def test_hundred_targets_are_read_in_one_round(endpoint: Any, telemetry: Any) -> None:
    engine = endpoint(captured("04_kvpressure_2"))
    targets = [{"url": engine.url, "labels": {"pod": f"vllm-{number}"}} for number in range(100)]
    reader = telemetry(*targets, timeout_s=50)
    reader.read(1000.0, 60.0, 60.0)
    snapshot = reader.read(1015.0, 60.0, 60.0)
    assert values(snapshot, Signal.UP) == [1.0] * 100
    assert len(values(snapshot, Signal.TTFT_BUCKETS_PER_S, le="+Inf")) == 100
