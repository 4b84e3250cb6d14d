"""The Prometheus adapter against a real Prometheus: the captured TSDB, and texts that a real server scrapes."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from servers import CAPTURE, Reply, prometheus_policy

from controller.adapters.prometheus import PrometheusTelemetry, _matchers
from controller.adapters.promql import promql
from controller.adapters.signals import ENGINES, GPU_LABELS, GPU_SERIES, RUNNING_SERIES, catalogue, tasks
from controller.errors import TelemetryError
from controller.observations import Signal
from controller.policy import PrometheusSource

pytestmark = pytest.mark.needs("prometheus")

WINDOW_S = 10.0
DEADLINE_S = 30.0  # generous: the tests share the machine


@pytest.fixture
def capture(prometheus_server):
    """Telemetry of the captured fleet."""
    telemetry = PrometheusTelemetry(prometheus_policy(prometheus_server().url))
    yield telemetry
    telemetry.close()


def read(telemetry, at_s):
    """(signal, pod) -> value of the samples without a bucket bound; fails on any hole."""
    snapshot = telemetry.read(at_s, WINDOW_S, DEADLINE_S)
    assert snapshot.holes == ()
    assert snapshot.failed == ()
    values = {}
    for sample in snapshot.samples:
        labels = dict(sample.labels)
        assert list(labels) == sorted(labels)
        assert all(labels.values())
        if "le" not in labels:
            assert values.setdefault((sample.signal, labels.get("pod")), sample.value) is sample.value
    return values


def buckets(snapshot, signal, pod):
    found = [dict(s.labels) | {"value": s.value} for s in snapshot.samples if s.signal is signal]
    return sorted((float(labels["le"]), labels["value"]) for labels in found if labels["pod"] == pod)


# --------------------------------------------------------------------------------------------- the captured fleet


def test_every_essential_signal_of_every_live_replica_is_read_in_every_phase(capture, phases):
    essential = {entry.signal for entry in ENGINES["vllm"] if entry.essential}
    for phase in phases.values():
        snapshot = capture.read((phase.start_s + phase.end_s) / 2, WINDOW_S, DEADLINE_S)
        assert (snapshot.holes, snapshot.failed) == ((), ())
        for pod in ("vllm-0", "vllm-1"):
            found = {sample.signal for sample in snapshot.samples if ("pod", pod) in sample.labels}
            if pod == "vllm-1" and phase.name in {"kill9_server1_api", "restart_server1"}:
                assert Signal.UP in found
                assert Signal.RUNNING not in found
            else:
                assert found >= essential, (phase.name, pod)


def test_idle_engines_are_zero_and_not_absent(capture, phases):
    values = read(capture, phases["idle"].end_s - 1)
    for pod in ("vllm-0", "vllm-1"):
        assert values[Signal.UP, pod] == 1
        assert values[Signal.RUNNING, pod] == 0
        assert values[Signal.GENERATION_TOKENS_PER_S, pod] == 0
        assert values[Signal.AWAKE, pod] == 1
        assert 0 <= values[Signal.HEARTBEAT_AGE_S, pod] < 2
    assert (Signal.GPU_ACTIVE_RATIO, None) not in values


def test_a_burst_fills_the_queues_and_the_sleeping_counters_agree(capture, phases):
    values = read(capture, (phases["burst"].start_s + phases["burst"].end_s) / 2)
    for pod in ("vllm-0", "vllm-1"):
        assert values[Signal.WAITING, pod] > 50
        assert values[Signal.WAITING_GROWTH_PER_S, pod] > 5
        assert values[Signal.PROMPT_TOKENS_PER_S, pod] == values[Signal.PREFIX_QUERIES_PER_S, pod] > 1000
        assert 0 < values[Signal.PREFIX_HITS_PER_S, pod] < values[Signal.PREFIX_QUERIES_PER_S, pod]
        assert values[Signal.ITL_SUM_PER_S, pod] / values[Signal.ITL_COUNT_PER_S, pod] == pytest.approx(0.02, rel=0.9)


def test_kv_pressure_is_seen_on_the_engine_that_has_it(capture, phases):
    values = read(capture, (phases["kv_pressure_server0_only"].start_s + phases["kv_pressure_server0_only"].end_s) / 2)
    assert values[Signal.KV_USAGE_RATIO, "vllm-0"] == pytest.approx(1, abs=0.05)
    assert values[Signal.PREEMPTIONS_PER_S, "vllm-0"] > 0
    assert values[Signal.KV_USAGE_RATIO, "vllm-1"] == 0
    assert values[Signal.PREEMPTIONS_PER_S, "vllm-1"] == 0


def test_a_killed_server_is_down_and_its_gauges_are_gone_at_once(capture, phases):
    values = read(capture, phases["restart_server1"].start_s - 2)
    assert values[Signal.UP, "vllm-1"] == 0
    assert (Signal.RUNNING, "vllm-1") not in values
    assert (Signal.HEARTBEAT_AGE_S, "vllm-1") not in values
    assert values[Signal.UP, "vllm-0"] == 1


def test_a_counter_reset_gives_no_absurd_rate(capture, phases):
    healthy = phases["server1_healthy_again"]
    for second in range(int(healthy.end_s - healthy.start_s)):
        values = read(capture, healthy.start_s + second)
        assert 0 <= values.get((Signal.GENERATION_TOKENS_PER_S, "vllm-1"), 0) < 2000


def test_a_stopped_engine_keeps_its_gauges_while_its_steps_end(capture, phases):
    values = read(capture, phases["sigcont_enginecore"].start_s - 0.5)
    assert values[Signal.UP, "vllm-0"] == 1
    assert values[Signal.STEPS_PER_S, "vllm-0"] == 0
    assert values[Signal.STEPS_PER_S, "vllm-1"] > 10


def test_buckets_are_cumulative_and_end_at_the_count(capture, phases):
    at_s = phases["steady"].end_s - 1
    snapshot, values = capture.read(at_s, WINDOW_S, DEADLINE_S), read(capture, at_s)
    for signal, count in (
        (Signal.TTFT_BUCKETS_PER_S, Signal.FIRST_TOKENS_PER_S),
        (Signal.ITL_BUCKETS_PER_S, Signal.ITL_COUNT_PER_S),
    ):
        found = buckets(snapshot, signal, "vllm-0")
        assert [value for _, value in found] == sorted(value for _, value in found)
        assert found[-1] == (math.inf, pytest.approx(values[count, "vllm-0"]))


def test_the_kv_cache_size_comes_as_labels(capture, phases):
    snapshot = capture.read(phases["idle"].end_s, WINDOW_S, DEADLINE_S)
    sizes = [dict(sample.labels) for sample in snapshot.samples if sample.signal is Signal.KV_BLOCKS]
    assert len(sizes) == 2
    assert all(int(size["block_size"]) > 0 and int(size["num_gpu_blocks"]) > 0 for size in sizes)


@pytest.mark.parametrize(
    ("file", "signal"),
    [
        ("up", Signal.UP),
        ("num_requests_running", Signal.RUNNING),
        ("num_requests_waiting", Signal.WAITING),
        ("kv_cache_usage_perc", Signal.KV_USAGE_RATIO),
        ("generation_tokens_rate10s", Signal.GENERATION_TOKENS_PER_S),
    ],
)
def test_reads_what_the_recording_prometheus_answered_itself(capture, file, signal):
    recorded = json.loads((CAPTURE / "range" / f"{file}.json").read_text())["response"]["data"]["result"]
    compared = 0
    for at_s in [float(row[0]) for row in recorded[0]["values"][::30]]:
        values = read(capture, at_s)
        for series in recorded:
            answers = dict(series["values"])
            pod = series["metric"].get("pod")
            if pod is not None and at_s in answers:
                assert values[signal, pod] == pytest.approx(float(answers[at_s]))
                compared += 1
    assert compared > 15


def test_times_outside_the_recording_are_absent_and_not_zero(capture, phases):
    snapshot = capture.read(phases["idle"].start_s - 3600, WINDOW_S, DEADLINE_S)
    assert (snapshot.samples, snapshot.holes, snapshot.failed) == ((), (), ())


def test_series_lists_label_sets_with_their_names(capture, phases):
    at_s = phases["steady"].end_s
    found = capture.series("vllm:num_requests_running", DEADLINE_S, at_s=at_s)
    assert [dict(labels)["pod"] for labels in found] == ["vllm-0", "vllm-1"]
    assert all(("__name__", "vllm:num_requests_running") in labels for labels in found)
    assert capture.series("no_such_metric", DEADLINE_S, at_s=at_s) == ()
    with pytest.raises(TelemetryError, match=r"answered HTTP 400 \(bad_data: .*parse error"):
        capture.series("no such metric", DEADLINE_S)
    with pytest.raises(TelemetryError, match="answered a scalar where a vector was expected"):
        capture.series("1", DEADLINE_S)


def test_engines_are_discovered_without_a_policy(prometheus_server, phases):
    source = PrometheusSource(url=prometheus_server().url)
    at_s = phases["steady"].end_s
    assert [dict(s)["pod"] for s in PrometheusTelemetry.discover(source, RUNNING_SERIES, at_s)] == ["vllm-0", "vllm-1"]
    assert PrometheusTelemetry.discover(source, GPU_SERIES, at_s) == ()


# ----------------------------------------------------------------------------------------- labels and expressions


def test_a_scrape_configuration_with_names_of_its_own_is_read_under_canonical_ones(prometheus_server, phases):
    names = {"labels": {"pod": "instance", "namespace": "pool"}}
    telemetry = PrometheusTelemetry(prometheus_policy(prometheus_server().url, telemetry=names))
    snapshot = telemetry.read(phases["steady"].end_s, WINDOW_S, DEADLINE_S)
    telemetry.close()
    labels = [dict(sample.labels) for sample in snapshot.samples if sample.signal is Signal.RUNNING]
    assert [(found["pod"], found["namespace"]) for found in labels] == [
        ("127.0.0.1:18001", "a"),
        ("127.0.0.1:18002", "a"),
    ]
    # A pool selects by `pool` and duplicates are told apart by `instance`: they stay.
    assert all(found["pool"] == "a" and found["instance"] == found["pod"] for found in labels)


def test_pools_that_select_by_the_engines_own_labels_still_see_up_and_the_kv_cache_size(prometheus_server, phases):
    server = prometheus_server()
    at_s = phases["steady"].end_s
    plain = PrometheusTelemetry(prometheus_policy(server.url))
    (model, *_) = {dict(s)["model_name"] for s in plain.series("vllm:num_requests_running", DEADLINE_S, at_s=at_s)}
    plain.close()
    telemetry = PrometheusTelemetry(prometheus_policy(server.url, selects=({"model_name": model, "engine": "0"},)))
    values = read(telemetry, at_s)
    stranger = PrometheusTelemetry(prometheus_policy(server.url, selects=({"model_name": "of somebody else"},)))
    others = read(stranger, at_s)
    telemetry.close()
    stranger.close()
    for signal in (Signal.UP, Signal.KV_BLOCKS, Signal.RUNNING, Signal.REJECTED_PER_S):
        assert (signal, "vllm-0") in values
    assert (Signal.UP, "vllm-0") in others
    assert (Signal.RUNNING, "vllm-0") not in others


def every_expression():
    task_entries = tasks("traces_span_metrics_calls_total", (("status_code", 'STATUS "ERROR"\\'),))
    fleets = [("vllm",), ("sglang",), ("vllm", "sglang")]
    for engines in fleets:
        for entry in catalogue(engines, gateway=True, task_entries=task_entries):
            for native in (True, False):
                for by in (("pod",), GPU_LABELS, ()):
                    for matchers in ("", 'pool=~"a|b|"'):
                        yield promql(entry, by, 60.0, matchers, native=native)


def test_a_real_prometheus_accepts_every_expression_of_the_catalogue(capture):
    expressions = set(every_expression())
    assert len(expressions) > 300
    for expression in sorted(expressions):
        capture.series(expression, DEADLINE_S)  # raises where the server can't parse it


# ---------------------------------------------------------------------------------- what a real server makes of it


def wait_for(telemetry, signal, *, within_s=30.0):
    """A snapshot in which every target has the signal, as soon as there is one."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        snapshot = telemetry.read(time.time(), WINDOW_S, DEADLINE_S)
        if any(sample.signal is signal for sample in snapshot.samples):
            return snapshot
        time.sleep(0.1)
    pytest.fail(f"no {signal} within {within_s:g} s")


OLD_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}
RENAMED = {
    Signal.KV_USAGE_RATIO,
    Signal.PREFIX_QUERIES_PER_S,
    Signal.PREFIX_HITS_PER_S,
    Signal.ITL_BUCKETS_PER_S,
    Signal.ITL_SUM_PER_S,
    Signal.ITL_COUNT_PER_S,
}


def texts():
    """The newest names, those of vLLM 0.9, and both at once (the old ones with other values and bucket bounds)."""
    new = (CAPTURE / "metrics" / "04_kvpressure_4.prom").read_text()
    old = new
    for current, former in OLD_NAMES.items():
        old = old.replace(current, former)
    olds = [line for line in old.splitlines() if any(name in line for name in OLD_NAMES.values())]
    doubled = [re.sub(r'le="([0-9.]+)"', r'le="7\1"', re.sub(r" [0-9.e+]+$", " 77777.0", line)) for line in olds]
    return new, old, new + "\n".join(doubled) + "\n"


def test_old_names_and_both_at_once_read_like_the_new_ones(prometheus_server, http_server):
    servers = [http_server(lambda _, text=text: Reply(text.encode(), content_type="text/plain")) for text in texts()]
    server = prometheus_server(targets=[each.address for each in servers], interval_s=0.2)
    telemetry = PrometheusTelemetry(prometheus_policy(server.url))

    def by_pod():
        snapshot = wait_for(telemetry, Signal.ITL_COUNT_PER_S)
        found = {f"engine-{number}": {} for number in range(3)}
        for sample in snapshot.samples:
            labels = dict(sample.labels)
            if labels.get("pod") in found and sample.signal in RENAMED:
                found[labels["pod"]][sample.signal, labels.get("le")] = sample.value
        return found

    deadline_s = time.monotonic() + 30
    found = by_pod()
    while not all({signal for signal, _ in each} >= RENAMED for each in found.values()):
        assert time.monotonic() < deadline_s, found
        found = by_pod()
    telemetry.close()
    assert found["engine-0"] == found["engine-1"] == found["engine-2"]
    assert found["engine-0"][Signal.KV_USAGE_RATIO, None] > 0.5


UGLY = [
    "a|b",
    "a.b",
    "a\\b",
    'say "x"',
    "(",
    "[a-z]+",
    "^x$",
    "a{2}",
    "ü ✓",
    "a\nb",
    "-",
    "*",
    "a\tb",
    "'",
    "`",
    "${x}",
]


def test_a_matcher_passes_exactly_the_values_it_names(prometheus_server, http_server):
    def escaped(value):
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    text = "".join(f'vllm:num_requests_running{{zone="{escaped(value)}"}} 1\n' for value in [*UGLY, "aXb", "other"])
    engine = http_server(
        lambda _: Reply((text + "vllm:num_requests_running 2\n").encode(), content_type="text/plain; charset=utf-8")
    )
    server = prometheus_server(targets=[engine.address], interval_s=0.2)
    telemetry = PrometheusTelemetry(prometheus_policy(server.url))
    wait_for(telemetry, Signal.RUNNING)

    def passed(selects, *, lenient):
        matchers = _matchers(selects, lenient=lenient)
        found = telemetry.series(f"vllm:num_requests_running{{{matchers}}}", DEADLINE_S)
        return {dict(labels).get("zone", "") for labels in found}

    for value in UGLY:
        assert passed([{"zone": value}], lenient=False) == {value}
        assert passed([{"zone": value}], lenient=True) == {value, ""}
        assert passed([{"zone": value}, {"zone": "other"}], lenient=False) == {value, "other"}
    assert passed([{"zone": value} for value in UGLY], lenient=True) == {*UGLY, ""}
    telemetry.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4))
@example(values=["\x00", "\x7f", "\u2028", "\U0001f600"])
def test_any_label_value_makes_an_expression_that_a_real_prometheus_accepts(capture, values):
    capture.series(f"up{{{_matchers([{'zone': value} for value in values], lenient=True)}}}", DEADLINE_S)
