"""The series store against a real Prometheus on captured telemetry, and properties that no scrape may break."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.adapters.promql import Entry, Fold, How, Source, promql
from controller.adapters.recording import VLLM_CPU, Recording, load
from controller.adapters.series import (
    LOOKBACK_S,
    PROMETHEUS_2,
    PROMETHEUS_3,
    Grouping,
    Row,
    Rules,
    SeriesStore,
    label_pairs,
    merged,
)
from controller.adapters.signals import ENVOY, TARGETS, VLLM
from controller.observations import Labels, Level, Sample, Signal

BY = ("instance", "job", "pod", "pool")
TARGET: Labels = (("instance", "a:1"),)
COUNTER = "vllm:prompt_tokens_total"
GAUGE = "vllm:num_requests_waiting"


def entry(signal: Signal, *sources: Source) -> Entry:
    return Entry(signal, Level.REPLICA, sources, essential=True, about="of this test")


RATE = entry(Signal.PROMPT_TOKENS_PER_S, Source(COUNTER, How.RATE))
WAITING = entry(Signal.WAITING, Source(GAUGE, How.VALUE))
GROWTH = entry(Signal.WAITING_GROWTH_PER_S, Source(GAUGE, How.DELTA))
AGE = entry(Signal.HEARTBEAT_AGE_S, Source(GAUGE, How.AGE, Fold.MAX))


def store_of(*entries: Entry) -> SeriesStore:
    return SeriesStore(entries, Grouping(replica=("instance",)))


def rate_of(
    points: list[tuple[float, float]], at_s: float, window_s: float, rules: Rules = PROMETHEUS_3
) -> float | None:
    store = store_of(RATE)
    for t_s, value in points:
        store.append(t_s, TARGET, Row(COUNTER, (), value))
    samples = store.evaluate(at_s, window_s, rules)
    return samples[0].value if samples else None


# ------------------------------------------------------------------------------------- equal to a real Prometheus


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load(VLLM_CPU)


@pytest.fixture(scope="module")
def captured(recording: Recording) -> SeriesStore:
    store = SeriesStore((*TARGETS, *VLLM), Grouping(replica=BY))
    for series in recording.series:
        name = dict(series.labels)["__name__"]
        labels = tuple(pair for pair in series.labels if pair[0] != "__name__")
        for time_ms, value in zip(series.times_ms, series.values, strict=True):
            if value is None:
                store.end(time_ms / 1000, (), name, labels)
            else:
                store.append(time_ms / 1000, (), Row(name, labels, value))
    return store


Answers = dict[tuple[Signal, Labels, int], float]
"""A value for each signal, label set and instant in ms; what is absent from it, is absent."""


def asked(client: httpx.Client, instants_ms: range, window_s: float) -> Answers:
    """What Prometheus answers for every entry at every instant."""
    answers: Answers = {}
    for one in (*TARGETS, *VLLM):
        form = {
            "query": promql(one, BY, window_s, 'job="vllm"'),
            "start": f"{instants_ms[0] / 1000:.3f}",
            "end": f"{instants_ms[-1] / 1000:.3f}",
            "step": f"{instants_ms.step / 1000:.3f}",
        }
        reply = client.post("/api/v1/query_range", data=form)
        body = reply.json()
        assert body["status"] == "success", body
        for series in body["data"]["result"]:
            labels = label_pairs(series["metric"].items())
            answers |= {(one.signal, labels, round(t * 1000)): float(text) for t, text in series["values"]}
    return answers


def evaluated(store: SeriesStore, instants_ms: range, window_s: float, rules: Rules) -> Answers:
    return {
        (sample.signal, sample.labels, at_ms): sample.value
        for at_ms in instants_ms
        for sample in store.evaluate(at_ms / 1000, window_s, rules)
    }


def differences(ours: Answers, theirs: Answers) -> list[str]:
    holes = [f"{key}: only one of both has a value" for key in sorted(ours.keys() ^ theirs.keys())]
    return holes + [
        f"{key}: {ours[key]} instead of {theirs[key]}"
        for key in sorted(ours.keys() & theirs.keys())
        # Prometheus subtracts times as Unix seconds, whose last digit as a float is worth 0.24 microseconds.
        if not math.isclose(
            ours[key], theirs[key], rel_tol=1e-6, abs_tol=1e-6 if key[0] is Signal.HEARTBEAT_AGE_S else 1e-12
        )
    ]


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize(
    ("first_ms", "step_ms", "window_s"),
    [
        pytest.param(0, 1000, 10.0, id="windows that begin and end exactly at samples"),
        pytest.param(241, 3700, 10.0, id="window of 10 s"),
        pytest.param(517, 5300, 60.0, id="window of 60 s"),
        pytest.param(399, 2900, 2.5, id="window of two or three samples"),
    ],
)
def test_equals_prometheus_for_every_signal_over_the_whole_capture(
    prometheus_server: Callable[[], Any],
    recording: Recording,
    captured: SeriesStore,
    first_ms: int,
    step_ms: int,
    window_s: float,
) -> None:
    start_ms, end_ms = round(recording.start_s * 1000), round(recording.end_s * 1000)
    # The instants run on for some seconds after the last scrape: the lookback holds there, the windows empty.
    instants_ms = range(start_ms + first_ms, end_ms + 15_000, step_ms)
    assert len(instants_ms) >= 60
    with httpx.Client(base_url=prometheus_server().url, trust_env=False, timeout=30) as client:
        version = client.get("/api/v1/status/buildinfo").json()["data"]["version"]
        theirs = asked(client, instants_ms, window_s)
    # Late releases of version 2 already limit the extrapolation as version 3 does.
    late_2 = Rules(left_open=False, zero_point_first=False)
    candidates = [PROMETHEUS_2, late_2] if version.startswith("2.") else [PROMETHEUS_3]
    found = min((differences(evaluated(captured, instants_ms, window_s, r), theirs) for r in candidates), key=len)
    assert not found, f"{len(found)} differences from Prometheus {version}: {found[:5]}"
    assert {signal for signal, _, _ in theirs} == {one.signal for one in (*TARGETS, *VLLM)}


# --------------------------------------------------------------------------------------------------- what is known


def test_example_of_the_module_docstring() -> None:
    points = [(1.0, 100.0), (4.0, 130.0), (7.0, 10.0), (10.0, 40.0)]
    assert rate_of(points, 10.0, 10.0) == pytest.approx(7.78, abs=0.005)


def test_one_sample_gives_no_rate_and_not_zero() -> None:
    assert rate_of([(1.0, 5.0)], 1.0, 10.0) is None


def test_window_excludes_a_sample_at_its_left_edge() -> None:
    points = [(0.0, 0.0), (10.0, 50.0)]
    assert rate_of(points, 10.0, 10.0) is None
    assert rate_of(points, 10.0, 10.0, PROMETHEUS_2) == pytest.approx(5.0)


def test_series_is_gone_at_the_scrape_that_misses_it_and_back_when_seen_again() -> None:
    store = store_of(WAITING)
    store.scraped(0.0, TARGET, (Row(GAUGE, (), 3.0),))
    store.scraped(1.0, TARGET, ())
    assert store.evaluate(0.9, 10.0) == (Sample(Signal.WAITING, TARGET, 3.0),)
    assert store.evaluate(1.0, 10.0) == ()
    store.scraped(2.0, TARGET, (Row(GAUGE, (), 0.0),))
    assert store.evaluate(2.0, 10.0) == (Sample(Signal.WAITING, TARGET, 0.0),)
    assert store.evaluate(1.5, 10.0) == ()


def test_rate_spans_a_gap_as_in_prometheus() -> None:
    store = store_of(RATE)
    for t_s, rows in ((0.0, 1), (1.0, 0), (2.0, 1)):
        store.scraped(t_s, TARGET, (Row(COUNTER, (), 10 * t_s),) * rows)
    assert store.evaluate(2.0, 2.5)[0].value > 0


def test_unscraped_target_keeps_its_last_value_for_the_lookback_and_its_age_grows() -> None:
    store = store_of(WAITING, AGE)
    store.scraped(0.0, TARGET, (Row(GAUGE, (), 3.0),))
    assert [sample.value for sample in store.evaluate(LOOKBACK_S - 1, 10.0)] == [3.0, LOOKBACK_S - 1]
    assert store.evaluate(LOOKBACK_S, 10.0) == ()
    assert len(store.evaluate(LOOKBACK_S, 10.0, PROMETHEUS_2)) == 2


def test_nan_is_a_value_and_not_an_absence() -> None:
    store = store_of(WAITING)
    store.scraped(0.0, TARGET, (Row(GAUGE, (), math.nan),))
    (sample,) = store.evaluate(0.0, 10.0)
    assert math.isnan(sample.value)


def test_restart_is_a_reset_even_where_the_counter_has_regrown_past_its_old_value() -> None:
    for restarted, rate in ((False, 1.0), (True, 11.0)):
        store = store_of(RATE)
        store.scraped(1.0, TARGET, (Row(COUNTER, (), 100.0),))
        store.scraped(11.0, TARGET, (Row(COUNTER, (), 110.0),), restarted=restarted)
        (sample,) = store.evaluate(11.0, 11.0)
        assert sample.value == pytest.approx(rate)


def test_restart_that_the_values_show_anyway_is_counted_once() -> None:
    store = store_of(RATE)
    store.scraped(0.0, TARGET, (Row(COUNTER, (), 100.0),))
    store.scraped(5.0, TARGET, (Row(COUNTER, (), 20.0),), restarted=True)
    (sample,) = store.evaluate(5.0, 10.0)
    assert sample.value == pytest.approx(20.0 * (5 + 5) / 5 / 10)


def test_first_alternative_that_answers_is_taken_for_each_target_by_itself() -> None:
    both = entry(Signal.KV_USAGE_RATIO, Source("new", How.VALUE, Fold.MAX), Source("old", How.VALUE, Fold.MAX))
    store = store_of(both)
    other: Labels = (("instance", "b:1"),)
    store.scraped(0.0, TARGET, (Row("old", (), 0.1), Row("new", (), 0.2)))
    store.scraped(0.0, other, (Row("old", (), 0.3),))
    assert [sample.value for sample in store.evaluate(0.0, 10.0)] == [0.2, 0.3]


def test_buckets_of_two_histograms_are_never_mixed() -> None:
    both = entry(Signal.ITL_BUCKETS_PER_S, Source("new", How.BUCKETS), Source("old", How.BUCKETS))
    store = store_of(both)
    for t_s in (1.0, 2.0):
        store.scraped(
            t_s,
            TARGET,
            (
                Row("new_bucket", (("le", "+Inf"),), t_s),
                Row("old_bucket", (("le", "+Inf"),), t_s),
                Row("old_bucket", (("le", "0.5"),), t_s),
            ),
        )
    assert [dict(sample.labels)["le"] for sample in store.evaluate(2.0, 10.0)] == ["+Inf"]


def test_conditions_on_labels_hold_an_absent_label_to_be_empty() -> None:
    finished = entry(Signal.FINISHED_PER_S, Source(GAUGE, How.VALUE, where_not=(("reason", "error"),)))
    failed = entry(Signal.FAILED_PER_S, Source(GAUGE, How.VALUE, where=(("reason", "error"),)))
    store = store_of(finished, failed)
    store.scraped(
        0.0,
        TARGET,
        (Row(GAUGE, (), 1.0), Row(GAUGE, (("reason", "stop"),), 2.0), Row(GAUGE, (("reason", "error"),), 4.0)),
    )
    assert [sample.value for sample in store.evaluate(0.0, 10.0)] == [3.0, 4.0]


def test_gateway_samples_are_grouped_by_the_gateway_labels() -> None:
    store = SeriesStore(ENVOY, Grouping(replica=("instance",), gateway=("route",)))
    for t_s in (1.0, 2.0):
        rows = [Row("envoy_cluster_upstream_rq_total", (("cluster", c), ("route", "chat")), 3 * t_s) for c in "ab"]
        store.scraped(t_s, TARGET, rows)
    (sample,) = store.evaluate(2.0, 2.0)
    assert sample.labels == (("route", "chat"),)
    assert sample.value == pytest.approx(6.0)


def test_own_label_that_collides_with_the_targets_is_renamed() -> None:
    target: Labels = (("exported_pod", "y"), ("pod", "exporter"))
    assert merged(target, (("gpu", "0"), ("pod", "engine"))) == (
        ("exported_exported_pod", "engine"),
        ("exported_pod", "y"),
        ("gpu", "0"),
        ("pod", "exporter"),
    )


def test_clock_set_back_drops_what_was_stamped_later() -> None:
    store = store_of(RATE, WAITING)
    for t_s in (0.0, 10.0, 20.0, 12.0):
        store.scraped(t_s, TARGET, (Row(COUNTER, (), t_s), Row(GAUGE, (), t_s)))
    rate, waiting = store.evaluate(12.0, 15.0)
    assert waiting.value == 12.0
    assert rate.value == pytest.approx((12.0) * (12 + 0 + 0) / 12 / 15)


def test_old_samples_and_dead_series_are_forgotten() -> None:
    store = store_of(WAITING, RATE)
    for number in range(100):
        store.scraped(float(number), TARGET, (Row(GAUGE, (("adapter", str(number)),), 1.0), Row(COUNTER, (), number)))
        store.forget(number - 10.0)
    remembered = store._targets[TARGET]
    assert len(remembered) == 12
    assert max(len(series.times_ms) for series in remembered.values()) == 11
    assert sum(sample.value for sample in store.evaluate(99.0, 10.0) if sample.signal is Signal.WAITING) == 1.0


def test_time_that_a_target_gives_itself_is_kept_but_never_lies_in_the_future() -> None:
    store = store_of(AGE)
    store.scraped(
        100.0, TARGET, (Row(GAUGE, (("r", "1"),), 1.0, at_s=70.0), Row(GAUGE, (("r", "2"),), 1.0, at_s=170.0))
    )
    (sample,) = store.evaluate(100.0, 10.0)
    assert sample.value == 30.0


def test_hundred_replicas_are_evaluated_well_within_a_second(recording: Recording) -> None:
    store = SeriesStore((*TARGETS, *VLLM), Grouping(replica=BY))
    first = [series for series in recording.series if ("pod", "vllm-0") in series.labels]
    rows = [
        (
            dict(series.labels)["__name__"],
            tuple(p for p in series.labels if p[0] not in {*BY, "__name__"}),
            series.values,
        )
        for series in first
    ]
    for step in range(60):
        page = [Row(name, labels, values[step] or 0.0) for name, labels, values in rows if store.wants(name)]
        for number in range(100):
            target = label_pairs({"instance": f"{number}:8000", "job": "j", "pod": f"p{number}", "pool": "a"}.items())
            store.scraped(float(step), target, page)
    started_s = time.perf_counter()
    samples = store.evaluate(59.0, 60.0)
    took_s = time.perf_counter() - started_s
    assert len(samples) > 100 * 50
    assert took_s < 1.0


# ------------------------------------------------------------------------------------------------------- properties

steps_s = st.lists(st.floats(0.002, 40.0), min_size=0, max_size=12)
counts = st.floats(0.0, 1e12)


@st.composite
def points(draw: st.DrawFn) -> list[tuple[float, float]]:
    t_s = 1000.0
    found = []
    for step_s in draw(steps_s):
        t_s += step_s
        found.append((t_s, draw(counts)))
    return found


@given(points(), st.floats(0.1, 120.0), st.floats(0.0, 50.0), st.sampled_from([PROMETHEUS_2, PROMETHEUS_3]))
def test_rate_of_a_counter_is_never_negative_nor_absurd(
    found: list[tuple[float, float]], window_s: float, later_s: float, rules: Rules
) -> None:
    at_s = (found[-1][0] if found else 1000.0) + later_s
    rate = rate_of(found, at_s, window_s, rules)
    if rate is None:
        return
    assert rate >= 0
    # Each sample adds at most its value, and extrapolation at most 1.1 intervals on each side: thrice the change.
    assert rate <= 3.2 * sum(value for _, value in found) / window_s + 1e-9


@given(points(), st.floats(0.1, 120.0))
def test_counter_that_only_resets_to_zero_never_counts_down(found: list[tuple[float, float]], window_s: float) -> None:
    falling = [(t_s, 0.0 if index else 1e9) for index, (t_s, _) in enumerate(found)]
    rate = rate_of(falling, falling[-1][0] if falling else 0.0, window_s)
    assert rate in (None, 0.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1e6)), max_size=20), st.randoms(use_true_random=False))
def test_order_of_series_and_of_entries_does_not_matter(given_rows: list[tuple[int, float]], random: Any) -> None:
    rows = [
        Row(name, (("engine", str(index)), ("le", "+Inf")), engine + value)
        for index, (engine, value) in enumerate(given_rows)
        for name in (COUNTER, GAUGE)
    ]
    shuffled = list(rows)
    random.shuffle(shuffled)
    results = []
    for order in (rows, shuffled):
        store = store_of(RATE, WAITING, GROWTH, AGE)
        for t_s in (1.0, 2.0):
            store.scraped(t_s, TARGET, [Row(row.name, row.labels, row.value * t_s) for row in order])
        results.append(store.evaluate(2.0, 10.0))
    assert results[0] == results[1]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_of_repeated_rows_the_first_counts_and_the_others_are_named(values: list[float]) -> None:
    store = store_of(WAITING)
    rows = [Row(GAUGE, (), value) for value in values]
    assert store.scraped(0.0, TARGET, rows) == tuple(rows[1:])
    assert store.evaluate(0.0, 10.0)[0].value == values[0]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(allow_nan=True)), max_size=30), st.floats(0.5, 400.0))
def test_no_sequence_of_scrapes_and_times_breaks_the_store(scrapes: list[tuple[float, float]], window_s: float) -> None:
    store = store_of(RATE, WAITING, GROWTH, AGE)
    for t_s, value in scrapes:
        store.scraped(t_s, TARGET, [Row(COUNTER, (), value), Row(GAUGE, (), value)][: int(t_s) % 3])
        store.forget(t_s - window_s)
        for sample in store.evaluate(t_s, window_s):
            assert isinstance(sample.value, float)
