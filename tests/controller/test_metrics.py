import dataclasses
import json
import math
import subprocess
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from ticks import NOW_S, assessment, pool_observation, tick_record

from controller.decisions import ActionKind, Alarm, AlarmKind, Assessment, TickRecord
from controller.gauges import FLEET_READINGS, POOL_READINGS, SERVICE_READINGS
from controller.metrics import Metrics
from controller.observations import Known, PoolFleet, PoolObservation, ServiceObservation, SourceHole
from models.types import (
    Barycentric,
    Forecast,
    Margin,
    Placement,
    Quantile,
    Unknown,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(metrics: Metrics) -> Samples:
    """Every sample of the exposition; fails on a repeated one, for which Prometheus rejects the whole scrape."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            key = (sample.name, frozenset((name, text) for name, text in sample.labels.items() if text))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


def published(*records: TickRecord) -> Samples:
    metrics = Metrics()
    for record in records:
        metrics.publish(record, tick_duration_s=0.2)
    return parse(metrics)


def test_every_reading_of_the_observations_has_a_gauge():
    def readings(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind) if field.type == "Reading"}

    assert set(POOL_READINGS) == readings(PoolObservation)
    assert set(SERVICE_READINGS) == readings(ServiceObservation)
    assert set(FLEET_READINGS) == readings(PoolFleet)


def test_a_tick_is_exported_with_its_numbers():
    samples = published(tick_record())
    pool = {"pool": "assistant-h100"}
    assert value(samples, "trimtab_pool_offered_calls_per_second", **pool) == 46.0
    assert value(samples, "trimtab_pool_replicas", state="serving", **pool) == 2
    assert value(samples, "trimtab_pool_replicas", state="hung", **pool) == 1
    assert value(samples, "trimtab_pool_replicas", state="asleep", **pool) == 0
    assert value(samples, "trimtab_pool_fleet_replicas", state="starting", **pool) == 1
    assert value(samples, "trimtab_pool_reading_age_seconds", **pool) == 18.0
    assert value(samples, "trimtab_pool_forecast_calls_per_second", level="0.9", **pool) == 57.0
    assert value(samples, "trimtab_pool_forecast_horizon_seconds", **pool) == 245.3
    assert value(samples, "trimtab_replica_capacity_calls_per_second", cache="cold", bound="mid", **pool) == 1.2
    assert value(samples, "trimtab_replica_capacity_limit", limit="decode bandwidth", **pool) == 1
    assert value(samples, "trimtab_pool_target_replicas", **pool) == 12
    assert value(samples, "trimtab_pool_recommended_replicas", **pool) == 12
    assert value(samples, "trimtab_pool_triangle_score_ratio", corner="throughput", **pool) == 0.6
    assert value(samples, "trimtab_pool_triangle_position_ratio", corner="cost", **pool) == 0.2
    assert value(samples, "trimtab_pool_cascade_margin_ratio", domain="replica", **pool) == -0.53
    assert value(samples, "trimtab_service_gateway_calls_per_second", service="assistant") == 46.0
    assert value(samples, "trimtab_last_tick_timestamp_seconds") == NOW_S
    assert value(samples, "trimtab_ticks_total") == 1
    assert value(samples, "trimtab_tick_duration_seconds_count") == 1
    assert value(samples, "trimtab_moves_total", kind="scale", mode="recommend", **pool) == 1
    assert value(samples, "trimtab_holds_total", kind="weights") == 1
    assert value(samples, "trimtab_outcomes_total", status="dry_run") == 1
    assert value(samples, "trimtab_telemetry_holes_total", source="prometheus") == 1


def test_zero_is_a_value_and_a_hole_is_an_absent_series_that_says_which_nothing_it_is():
    samples = published(tick_record())
    pool = {"pool": "assistant-h100"}
    assert value(samples, "trimtab_pool_waiting_calls", **pool) == 0
    assert value(samples, "trimtab_service_gateway_retries_per_second", service="assistant") == 0
    for gauge in ("rejected_calls_per_second", "ttft_seconds", "kv_usage_ratio"):
        assert f"trimtab_pool_{gauge}" not in names(samples)
    assert "trimtab_service_tasks_failed_per_second" not in names(samples)
    assert value(samples, "trimtab_pool_fleet_replicas", state="draining", **pool) is None
    assert value(samples, "trimtab_reading_hole", reading="rejected_calls_per_s", kind="absent", **pool) == 1
    assert value(samples, "trimtab_reading_hole", reading="ttft_s", kind="nan", **pool) == 1
    assert value(samples, "trimtab_reading_hole", reading="kv_usage_ratio", kind="stale", **pool) == 1
    assert sum(name == "trimtab_reading_hole" for name, _ in samples) == 3


def test_an_unknown_stage_is_named_and_leaves_no_numbers():
    why = Unknown("no call was seen yet")
    record = tick_record()
    blank = Assessment("assistant-h100", why, why, why, why, why)
    samples = published(replace(record, decision=replace(record.decision, assessments=(blank,))))
    for stage in ("capacity", "forecast", "placement", "margins", "target"):
        assert value(samples, "trimtab_stage_unknown", pool="assistant-h100", stage=stage) == 1
    assert not {name for name in names(samples) if "forecast" in name or "capacity_calls" in name or "target" in name}


def test_a_pool_without_any_known_replica_claims_no_count():
    record = tick_record()
    empty = replace(record.observation.pools[0], replicas=())
    samples = published(replace(record, observation=replace(record.observation, pools=(empty,))))
    assert "trimtab_pool_replicas" not in names(samples)


def test_a_pool_removed_from_the_policy_vanishes_from_the_gauges():
    samples = published(tick_record("old"), tick_record("new"))
    left = {name for name, labels in samples if ("pool", "old") in labels}
    assert left == {"trimtab_moves_total"}
    assert value(samples, "trimtab_pool_recommended_replicas", pool="new") == 12


def test_the_last_recommendation_stays_until_the_next_one():
    first = tick_record()
    quiet = replace(first, decision=replace(first.decision, moves=(), now_s=NOW_S + 15))
    samples = published(first, quiet)
    assert value(samples, "trimtab_pool_recommended_replicas", pool="assistant-h100") == 12
    assert value(samples, "trimtab_pool_recommended_timestamp_seconds", pool="assistant-h100") == NOW_S
    assert value(samples, "trimtab_last_tick_timestamp_seconds") == NOW_S + 15


def test_alarms_name_the_pool_or_the_kind_of_source_and_go_when_they_are_over():
    metrics = Metrics()
    record = tick_record()
    twice = (*record.decision.alarms, Alarm(AlarmKind.REPLICA_HUNG, "assistant-h100/r-1", "it does not work either"))
    metrics.publish(replace(record, decision=replace(record.decision, alarms=twice)), tick_duration_s=0.1)
    samples = parse(metrics)
    assert value(samples, "trimtab_alarm", kind="replica_hung", target="assistant-h100") == 1
    assert value(samples, "trimtab_alarm", kind="telemetry_partial", target="prometheus") == 1
    assert sum(name == "trimtab_alarm" for name, _ in samples) == 2
    metrics.publish(replace(record, decision=replace(record.decision, alarms=())), tick_duration_s=0.1)
    assert "trimtab_alarm" not in names(parse(metrics))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("http://monitoring:9090/prometheus", "prometheus"),
        ("scrape:http://10.0.0.1:8000/metrics", "scrape"),
        ("cluster", "cluster"),
        ("duplicate series", "duplicate_series"),
        ("10.0.0.1:8000", "other"),
        ("", "other"),
    ],
)
def test_a_source_that_fails_is_counted_under_its_kind_and_never_under_its_address(source, word):
    record = tick_record()
    holes = (SourceHole(source, "refused"), SourceHole(source, "refused again"))
    samples = published(replace(record, observation=replace(record.observation, holes=holes)))
    assert value(samples, "trimtab_telemetry_holes_total", source=word) == 2


def test_service_moves_are_counted_under_their_service():
    record = tick_record()
    move = replace(record.decision.moves[0], target="assistant", kind=ActionKind.WEIGHTS, actions=())
    samples = published(replace(record, decision=replace(record.decision, moves=(move,))))
    assert value(samples, "trimtab_moves_total", service="assistant", kind="weights", mode="recommend") == 1


def test_counters_with_known_labels_start_at_zero_and_a_policy_never_loaded_is_unknown():
    metrics = Metrics()
    samples = parse(metrics)
    assert value(samples, "trimtab_loop_errors_total") == 0
    assert value(samples, "trimtab_outcomes_total", status="failed") == 0
    assert value(samples, "trimtab_policy_reloads_total", result="failure") == 0
    assert "trimtab_policy_reload_success" not in names(samples)
    assert "trimtab_last_tick_timestamp_seconds" not in names(samples)
    assert not any(name.endswith("_created") for name in names(samples))
    metrics.policy_reload(ok=True)
    metrics.policy_reload(ok=False)
    metrics.loop_error()
    samples = parse(metrics)
    assert value(samples, "trimtab_policy_reload_success") == 0
    assert value(samples, "trimtab_policy_reloads_total", result="success") == 1
    assert value(samples, "trimtab_policy_reloads_total", result="failure") == 1
    assert value(samples, "trimtab_loop_errors_total") == 1


def test_two_instances_share_nothing():
    one, other = Metrics(), Metrics()
    one.publish(tick_record(), tick_duration_s=0.2)
    assert value(parse(other), "trimtab_ticks_total") == 0


def test_of_two_margins_of_one_domain_the_worse_is_exported():
    record = tick_record()
    margins = (Margin("replica", 0.1, 3.8, -0.5), Margin("replica", 0.1, 2.0, 0.2))
    item = replace(assessment(), margins=margins)
    samples = published(replace(record, decision=replace(record.decision, assessments=(item,))))
    assert value(samples, "trimtab_pool_cascade_margin_ratio", pool="assistant-h100", domain="replica") == -0.5


@given(number=st.floats(), name=st.text(max_size=12), duration_s=st.floats())
def test_any_number_and_any_name_give_an_exposition_without_nan_or_infinity(number, name, duration_s):
    record = tick_record(name)
    pool = replace(record.observation.pools[0], ttft_s=Known(number, number), offered_calls_per_s=Known(number, 1.0))
    odd = replace(
        assessment(name),
        margins=(Margin(name, number, number, number),),
        forecast=Forecast(number, (Quantile(number, number),)),
        placement=Placement(number, number, number, Barycentric(number, number, number), number),
    )
    record = replace(
        record,
        observation=replace(record.observation, pools=(pool,)),
        decision=replace(record.decision, now_s=number, assessments=(odd,)),
    )
    metrics = Metrics()
    metrics.publish(record, tick_duration_s=duration_s)
    samples = parse(metrics)
    assert all(math.isfinite(one) for one in samples.values())


@pytest.mark.needs("promtool")
def test_promtool_has_no_complaint():
    metrics = Metrics()
    record = tick_record()
    everything = replace(
        record,
        observation=replace(
            record.observation,
            pools=(replace(pool_observation(), **{name: Known(1.0, 1.0) for name in POOL_READINGS}),),
            services=(ServiceObservation("assistant", *([Known(1.0, 1.0)] * len(SERVICE_READINGS))),),
        ),
        decision=replace(
            record.decision,
            assessments=(assessment(), replace(assessment("other"), capacity=Unknown("no call was seen yet"))),
        ),
    )
    metrics.publish(everything, tick_duration_s=0.2)
    metrics.publish(record, tick_duration_s=0.2)
    metrics.policy_reload(ok=True)
    for one in (everything, record):
        metrics.publish(one, tick_duration_s=0.2)
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=metrics.render()[0], capture_output=True, timeout=30, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_scrapes_during_publishing_see_whole_ticks():
    metrics = Metrics()
    records = [tick_record(f"pool-{index}") for index in range(2)]
    over = threading.Event()
    faults: list[str] = []

    def scrape() -> None:
        while not over.is_set():
            samples = parse(metrics)
            pools = {text for name, labels in samples for key, text in labels if key == "pool" and "_total" not in name}
            if len(pools) > 1:
                faults.append(json.dumps(sorted(pools)))

    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(200):
        metrics.publish(records[index % 2], tick_duration_s=0.01)
    over.set()
    for thread in threads:
        thread.join(30)
    assert not faults
    assert value(parse(metrics), "trimtab_ticks_total") == 200
