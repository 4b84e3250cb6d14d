"""The exported gauges: their names, and how the record of the last tick becomes their values. Pure.

A value that is not known is an absent series, never a zero or a NaN: `Hole` and `Unknown` become series of their own
(`trimtab_reading_hole`, `trimtab_stage_unknown`) that say what is missing. Labels are names from the policy or words
from closed sets; a horizon, which is measured and drifts, is a value (`trimtab_pool_forecast_horizon_seconds`) and not
a label. Names and units follow the Prometheus naming rules; `promtool check metrics` is one of the tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from prometheus_client.core import GaugeMetricFamily, Metric

from controller.decisions import Alarm, AlarmKind, Assessment, TickRecord
from controller.observations import Known, PoolObservation, Reading, ReplicaState, ServiceObservation
from models.types import Capacity, Forecast, Interval, Margin, Placement, Target, Unknown


@dataclass(frozen=True, slots=True)
class Gauge:
    """One exported gauge: its name, the text of its HELP line, its label names in order."""

    name: str
    about: str
    labels: tuple[str, ...] = ("pool",)


POOL_READINGS: dict[str, Gauge] = {
    "offered_calls_per_s": Gauge(
        "trimtab_pool_offered_calls_per_second", "Calls that arrive at the pool, rejected ones included."
    ),
    "served_calls_per_s": Gauge("trimtab_pool_served_calls_per_second", "Calls that got their first token."),
    "finished_calls_per_s": Gauge("trimtab_pool_finished_calls_per_second", "Calls that ended well."),
    "failed_calls_per_s": Gauge("trimtab_pool_failed_calls_per_second", "Calls that ended in an error."),
    "rejected_calls_per_s": Gauge("trimtab_pool_rejected_calls_per_second", "Calls that a full queue turned away."),
    "running": Gauge("trimtab_pool_running_calls", "Calls that are being decoded."),
    "waiting": Gauge("trimtab_pool_waiting_calls", "Calls that wait in the engines' queues."),
    "prompt_tokens_per_s": Gauge(
        "trimtab_pool_prompt_tokens_per_second", "Prompt tokens, those found in the prefix cache included."
    ),
    "computed_prompt_tokens_per_s": Gauge(
        "trimtab_pool_computed_prompt_tokens_per_second", "Prompt tokens that had to be computed."
    ),
    "generation_tokens_per_s": Gauge("trimtab_pool_generation_tokens_per_second", "Output tokens."),
    "hit_ratio": Gauge("trimtab_pool_prefix_hit_ratio", "Share of prompt tokens found in the prefix cache."),
    "preemptions_per_s": Gauge("trimtab_pool_preemptions_per_second", "Preempted calls: the KV cache is too small."),
    "ttft_s": Gauge("trimtab_pool_ttft_seconds", "Time to first token at the percentile of the service's SLO."),
    "ttft_good_ratio": Gauge(
        "trimtab_pool_ttft_good_ratio", "Share of first tokens within the time to first token of the service's SLO."
    ),
    "itl_s": Gauge("trimtab_pool_itl_seconds", "Inter-token latency at the percentile of the service's SLO."),
    "itl_mean_s": Gauge("trimtab_pool_itl_mean_seconds", "Mean inter-token latency."),
    "kv_usage_ratio": Gauge("trimtab_pool_kv_usage_ratio", "KV-cache usage of the fullest replica."),
    "kv_capacity_tokens": Gauge("trimtab_pool_kv_capacity_tokens", "KV-cache size of the smallest replica."),
}
"""The gauge of each reading of a `PoolObservation`, by the reading's name there."""

SERVICE_READINGS: dict[str, Gauge] = {
    f"{name}_per_s": Gauge(f"trimtab_service_{name}_per_second", about, ("service",))
    for name, about in (
        ("gateway_calls", "Calls that the gateway sent to the engines, its own retries included."),
        ("gateway_retries", "The gateway's own retries."),
        ("gateway_timeouts", "Calls that timed out at the gateway."),
        ("gateway_overflows", "Calls that the gateway's circuit breaker refused."),
        ("gateway_errors", "Calls that the gateway answered with a status of class 5xx."),
        ("tasks_finished", "Workflows that ended, failed ones included."),
        ("tasks_failed", "Workflows that failed."),
    )
}
"""The gauge of each reading of a `ServiceObservation`, by the reading's name there."""

FLEET_READINGS = ("wanted", "ready", "starting", "unschedulable", "draining")

REPLICAS = Gauge(
    "trimtab_pool_replicas",
    "Replicas by what their telemetry says; absent where no replica was ever seen.",
    ("pool", "state"),
)
FLEET_REPLICAS = Gauge("trimtab_pool_fleet_replicas", "Replicas by what the cluster says.", ("pool", "state"))
READING_AGE = Gauge("trimtab_pool_reading_age_seconds", "Age of the pool's oldest reading that was used.")
HOLE = Gauge(
    "trimtab_reading_hole",
    "1 for each reading of a pool that has no value, by the kind of nothing.",
    ("pool", "reading", "kind"),
)
UNKNOWN = Gauge("trimtab_stage_unknown", "1 for each stage that could not say anything of a pool.", ("pool", "stage"))
FORECAST = Gauge(
    "trimtab_pool_forecast_calls_per_second",
    "Offered calls expected at the forecast's horizon, by quantile level.",
    ("pool", "level"),
)
HORIZON = Gauge("trimtab_pool_forecast_horizon_seconds", "How far ahead the forecast looks: the pool's lead time.")
CAPACITY = Gauge(
    "trimtab_replica_capacity_calls_per_second",
    "Calls that one replica sustains inside its SLOs, with its prefix cache warm or lost; low to high is 90 %.",
    ("pool", "cache", "bound"),
)
LIMIT = Gauge("trimtab_replica_capacity_limit", "1 for what limits a replica's capacity.", ("pool", "limit"))
TARGET = Gauge("trimtab_pool_target_replicas", "Replicas that the plan wants, before the guards.")
PLANNED = Gauge("trimtab_pool_planned_calls_per_second", "Offered calls that the plan provides for.")
HEADROOM = Gauge("trimtab_pool_target_load_ratio", "Share of its warm capacity that the plan lets a replica carry.")
RECOMMENDED = Gauge(
    "trimtab_pool_recommended_replicas",
    "Replicas that the last move of this pool recommended or requested since the daemon started.",
)
RECOMMENDED_AT = Gauge("trimtab_pool_recommended_timestamp_seconds", "When that move was decided, in Unix time.")
SCORE = Gauge("trimtab_pool_triangle_score_ratio", "Score at a corner of the triangle, 0 to 1.", ("pool", "corner"))
POSITION = Gauge(
    "trimtab_pool_triangle_position_ratio",
    "Share of a corner in the pool's position; they sum to 1.",
    ("pool", "corner"),
)
MAGNITUDE = Gauge("trimtab_pool_triangle_magnitude_ratio", "How much of the triangle's qualities the pool has at all.")
MARGIN = Gauge(
    "trimtab_pool_cascade_margin_ratio",
    "Cascade margin after the loss of one failure domain; below 0 the pool is vulnerable.",
    ("pool", "domain"),
)
COLD_LOAD = Gauge(
    "trimtab_pool_cold_load_ratio",
    "Load over cold capacity of what remains after the loss of one failure domain.",
    ("pool", "domain"),
)
ALARM = Gauge(
    "trimtab_alarm", "1 while an alarm stands for a pool (one of its replicas included) or source.", ("kind", "target")
)
LAST_TICK = Gauge("trimtab_last_tick_timestamp_seconds", "Time of the last recorded tick, in Unix time.", ())
RELOADED = Gauge("trimtab_policy_reload_success", "1 if the last load of the policy was accepted, 0 if refused.", ())
BUILD = Gauge("trimtab_build_info", "1, with the version that runs.", ("version",))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The last move that named a number of replicas for a pool, and when it was decided, in Unix seconds."""

    pool: str
    replicas: int
    at_s: float


@dataclass(frozen=True, slots=True)
class LastTick:
    """What the gauges are made of. It is replaced whole, so that a scrape never sees half a tick."""

    record: TickRecord
    recommended: tuple[Recommendation, ...]


class Sheet:
    """Values by gauge and labels. Each labelled value is there once: a repeated series would void the whole scrape."""

    def __init__(self) -> None:
        self._values: dict[Gauge, dict[tuple[str, ...], float]] = {}

    def put(self, gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
        """Take a value; None, NaN and infinities are left out, the last of two with the same labels stays."""
        if value is not None and math.isfinite(value):
            # A lone surrogate (YAML can escape one into a name) has no UTF-8 form and would break the scrape.
            clean = tuple(label.encode("utf-8", "replace").decode("utf-8") for label in labels)
            self._values.setdefault(gauge, {})[clean] = float(value)

    def read(self, gauge: Gauge, labels: tuple[str, ...], reading: Reading) -> None:
        """Take a reading's value; a hole is left out."""
        self.put(gauge, labels, reading.value if isinstance(reading, Known) else None)

    def families(self) -> Iterator[Metric]:
        """The gauges that have a value, for prometheus_client."""
        for gauge, values in self._values.items():
            family = GaugeMetricFamily(gauge.name, gauge.about, labels=gauge.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def _put_pool(sheet: Sheet, pool: PoolObservation) -> None:
    ages_s = []
    for name, gauge in POOL_READINGS.items():
        reading: Reading = getattr(pool, name)
        sheet.read(gauge, (pool.name,), reading)
        if isinstance(reading, Known):
            ages_s.append(reading.age_s)
        else:
            sheet.put(HOLE, (pool.name, name, reading.kind), 1)
    sheet.put(READING_AGE, (pool.name,), max(ages_s, default=None))
    for name in FLEET_READINGS:
        sheet.read(FLEET_REPLICAS, (pool.name, name), getattr(pool.fleet, name))
    if pool.replicas:  # where no replica is known, "none serve" would be a claim
        for state in ReplicaState:
            sheet.put(REPLICAS, (pool.name, state), pool.count(state))


def _put_service(sheet: Sheet, service: ServiceObservation) -> None:
    for name, gauge in SERVICE_READINGS.items():
        sheet.read(gauge, (service.name,), getattr(service, name))


def _put_assessment(sheet: Sheet, assessment: Assessment) -> None:
    pool = assessment.pool
    for stage in ("capacity", "forecast", "placement", "margins", "target"):
        _put_stage(sheet, pool, stage, getattr(assessment, stage))


def _put_stage(
    sheet: Sheet,
    pool: str,
    stage: str,
    result: Capacity | Forecast | Placement | tuple[Margin, ...] | Target | Unknown,
) -> None:
    match result:
        case Unknown():
            sheet.put(UNKNOWN, (pool, stage), 1)
        case Capacity():
            _put_interval(sheet, (pool, "warm"), result.warm_calls_per_s)
            _put_interval(sheet, (pool, "cold"), result.cold_calls_per_s)
            sheet.put(LIMIT, (pool, result.limit), 1)
        case Forecast():
            sheet.put(HORIZON, (pool,), result.horizon_s)
            for quantile in result.quantiles:
                sheet.put(FORECAST, (pool, f"{quantile.level:g}"), quantile.value)
        case Placement():
            _put_placement(sheet, pool, result)
        case Target():
            sheet.put(TARGET, (pool,), result.replicas)
            sheet.put(PLANNED, (pool,), result.demand_calls_per_s)
            sheet.put(HEADROOM, (pool,), result.theta)
        case tuple():
            # The worst domain last: where two share a name, it is the one that stays.
            for margin in sorted(result, key=lambda one: one.margin, reverse=True):
                sheet.put(MARGIN, (pool, margin.domain), margin.margin)
                sheet.put(COLD_LOAD, (pool, margin.domain), margin.cold_load_ratio)
        case _:
            assert_never(result)


def _put_interval(sheet: Sheet, labels: tuple[str, str], interval: Interval) -> None:
    sheet.put(CAPACITY, (*labels, "low"), interval.low)
    sheet.put(CAPACITY, (*labels, "mid"), interval.mid)
    sheet.put(CAPACITY, (*labels, "high"), interval.high)


def _put_placement(sheet: Sheet, pool: str, placement: Placement) -> None:
    sheet.put(SCORE, (pool, "latency"), placement.latency_score)
    sheet.put(SCORE, (pool, "throughput"), placement.throughput_score)
    sheet.put(SCORE, (pool, "cost"), placement.cost_score)
    sheet.put(MAGNITUDE, (pool,), placement.magnitude)
    if placement.position is not None:
        sheet.put(POSITION, (pool, "latency"), placement.position.latency)
        sheet.put(POSITION, (pool, "throughput"), placement.position.throughput)
        sheet.put(POSITION, (pool, "cost"), placement.position.cost)


def _alarm_target(alarm: Alarm) -> str:
    """The pool of an alarm about one of its replicas (named "pool/replica"), or the bounded word for a source."""
    if alarm.kind is AlarmKind.TELEMETRY_PARTIAL:
        return source_word(alarm.target)
    return alarm.target.partition("/")[0]


def source_word(source: str) -> str:
    """What kind of source it is: the words before the first colon, "other" where they are none.

    A Prometheus server is named by its address, scrape targets by "scrape:" and theirs: an address is no label, or
    every target that ever failed would stay in the metrics.
    """
    head = source.partition(":")[0].strip().lower().replace(" ", "_")
    if head in {"http", "https"}:
        return "prometheus"
    return head if re.fullmatch(r"[a-z][a-z_]{0,63}", head) else "other"


def fill(sheet: Sheet, last: LastTick) -> None:
    """Put all that one tick says on the sheet."""
    decision = last.record.decision
    sheet.put(LAST_TICK, (), decision.now_s)
    for pool in last.record.observation.pools:
        _put_pool(sheet, pool)
    for service in last.record.observation.services:
        _put_service(sheet, service)
    for assessment in decision.assessments:
        _put_assessment(sheet, assessment)
    for one in last.recommended:
        sheet.put(RECOMMENDED, (one.pool,), one.replicas)
        sheet.put(RECOMMENDED_AT, (one.pool,), one.at_s)
    for alarm in decision.alarms:
        sheet.put(ALARM, (alarm.kind, _alarm_target(alarm)), 1)
