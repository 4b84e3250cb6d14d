"""The chain of reasons in words: each stage's numbers as one clause.

The words are made from values alone, so that the log line, the journal, `trimtab explain` and the page agree. What is
unknown is said to be unknown; no number stands for it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from math import isfinite

from controller.decisions import Assessment, Change, Expected, Stage
from controller.loads import saturated_calls_per_s
from controller.observations import Hole, Known, Nothing, PoolObservation, ReplicaObservation, ReplicaState
from models.capacity import narrow
from models.types import Capacity, Forecast, Slo, Target, Unknown


def clock(at_s: float) -> str:
    """Time of day, UTC."""
    try:
        return f"{datetime.fromtimestamp(at_s, UTC):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def number(value: float) -> str:
    """Three significant digits, and whole numbers from 100 on; no exponent where a person would not use one."""
    size = abs(value)
    if size == 0 or not isfinite(size):
        return f"{value:g}"
    if size >= 1e9 or size < 1e-3:
        return f"{value:.3g}"
    # The borders are those of the rounded value: 9.999 is 10.0.
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.1 else f"{value:.3f}"


def span(seconds: float) -> str:
    """A length of time in the unit that a person would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def replicas(count: int) -> str:
    """A number of replicas, in words that agree."""
    return f"{count} replica" if count == 1 else f"{count} replicas"


def nothing(kind: Nothing) -> str:
    """A kind of nothing in a person's words: a latency without calls is undefined, not "nan"."""
    return "undefined" if kind is Nothing.NAN else kind.value


def links(observation: PoolObservation, assessment: Assessment, slo: Slo, now_s: float) -> tuple[Change, ...]:
    """The links of the chain that come before the guards: observed, estimated, forecast, planned."""
    return (
        Change(Stage.OBSERVED, None, None, observed(observation, slo)),
        Change(Stage.ESTIMATED, None, None, estimated(assessment.capacity, observation, slo)),
        Change(Stage.FORECAST, None, None, forecast(assessment.forecast, now_s)),
        planned(assessment, observation),
    )


def observed(pool: PoolObservation, slo: Slo) -> str:
    """Load, cache and latency of a pool, and the age of the oldest signal among them."""
    serving = pool.count(ReplicaState.SERVING)
    parts = [f"{serving} of {len(pool.replicas)} replicas serve"]
    parts += [f"{replica.name} is {replica.state.value} ({replica.detail})" for replica in _troubled(pool)[:2]]
    offered = pool.offered_calls_per_s
    if isinstance(offered, Hole):
        return "; ".join([*parts, f"offered load is {nothing(offered.kind)}: {offered.detail}"])
    load = f"{number(offered.value)} calls/s offered"
    if isinstance(pool.served_calls_per_s, Known):
        load += f" ({number(pool.served_calls_per_s.value)} served"
        shed = pool.rejected_calls_per_s
        load += f", {number(shed.value)} shed)" if isinstance(shed, Known) else ")"
    parts.append(load)
    if isinstance(pool.waiting, Known) and pool.waiting.value > 0:
        parts.append(f"{pool.waiting.value:g} waiting")
    if isinstance(pool.hit_ratio, Known):
        parts.append(f"hit rate {pool.hit_ratio.value:.2f}")
    if isinstance(pool.ttft_s, Known):
        parts.append(f"TTFT p{slo.percentile:g} {number(pool.ttft_s.value)} s of {slo.ttft_s:g} s")
    if isinstance(pool.itl_s, Known):
        parts.append(f"ITL p{slo.percentile:g} {number(pool.itl_s.value * 1000)} ms of {slo.tpot_s * 1000:g} ms")
    ages = [r.age_s for r in (offered, pool.ttft_s, pool.hit_ratio) if isinstance(r, Known)]
    parts.append(f"signals at most {max(ages):.0f} s old")
    return "; ".join(parts)


def estimated(capacity: Capacity | Unknown, pool: PoolObservation, slo: Slo) -> str:
    """What a replica carries, and how much of it is used."""
    match capacity:
        case Unknown(reason):
            return f"capacity unknown: {reason}"
        case Capacity(warm, cold, limit):
            text = (
                f"a replica carries {number(warm.mid)} calls/s warm ({number(warm.low)}-{number(warm.high)}), "
                f"{number(cold.mid)} cold; limited by {limit.value}"
            )
            served = saturated_calls_per_s(pool, slo)
            if served is not None and warm.high <= served:
                text += "; no more than it serves now, since calls wait beyond the SLO"
            serving = pool.count(ReplicaState.SERVING)
            if isinstance(pool.offered_calls_per_s, Known) and serving and warm.mid > 0 and narrow(warm):
                text += f"; {pool.offered_calls_per_s.value / (serving * warm.mid):.2f} of warm capacity used"
            return text


def forecast(value: Forecast | Unknown, now_s: float) -> str:
    """The demand to plan for, and when it counts."""
    match value:
        case Unknown(reason):
            return f"demand unknown: {reason}"
        case Forecast(_, ()):
            return "demand unknown: the forecast is empty"
        case Forecast(horizon_s, quantiles):
            text = f"{number(quantiles[0].value)} calls/s at {clock(now_s + horizon_s)}"
            text += f" when a start ordered now serves (lead {horizon_s:g} s)"
            more = [f"{q.level * 100:g} %: {number(q.value)}" for q in quantiles[1:]]
            return "; ".join([text, *more])


def planned(assessment: Assessment, pool: PoolObservation) -> Change:
    """The planned number of replicas, and what fixed it."""
    before = float(len(pool.replicas))
    match assessment.target:
        case Unknown(reason):
            return Change(Stage.PLANNED, before, None, f"no plan: {reason}")
        case Target() as target:
            text = f"{replicas(target.replicas)} for {number(target.demand_calls_per_s)} calls/s"
            if isinstance(assessment.capacity, Capacity) and target.replicas > 0:
                text += f" at {number(assessment.capacity.warm_calls_per_s.mid)} each"
            text += f"; binding: {target.binding}"
            return Change(Stage.PLANNED, before, float(target.replicas), text)


def expected(effect: Expected) -> str:
    """What a move should do: latency, money, margin, as far as they can be said."""
    parts = []
    if effect.ttft_after_s is not None:
        parts.append("TTFT " + _from_to(effect.ttft_before_s, effect.ttft_after_s) + " s")
    if effect.itl_after_s is not None:
        before_s = effect.itl_before_s
        parts.append("ITL " + _from_to(before_s and before_s * 1000, effect.itl_after_s * 1000) + " ms")
    if effect.full_after:
        parts.append("more would still arrive than is served")
    if effect.hit_ratio_before is not None and effect.hit_ratio_after is not None:
        parts.append(f"hit rate {effect.hit_ratio_before:.2f} -> {effect.hit_ratio_after:.2f}")
    if effect.usd_per_call_before is not None and effect.usd_per_call_after is not None:
        prices = (effect.usd_per_call_before * 1000, effect.usd_per_call_after * 1000)
        parts.append(f"$ per 1,000 good calls {number(prices[0])} -> {number(prices[1])}")
    if effect.usd_per_h_before is not None and effect.usd_per_h_after is not None:
        parts.append(f"$ per hour {effect.usd_per_h_before:.2f} -> {effect.usd_per_h_after:.2f}")
    if effect.margin_before is not None and effect.margin_after is not None:
        parts.append(f"cascade margin {effect.margin_before:.2f} -> {effect.margin_after:.2f}")
    return f"at {clock(effect.at_s)}: " + ("; ".join(parts) or "nothing that can be said yet")


def _from_to(before: float | None, after: float) -> str:
    return number(after) if before is None else f"{number(before)} -> {number(after)}"


def _troubled(pool: PoolObservation) -> list[ReplicaObservation]:
    return [replica for replica in pool.replicas if replica.state is not ReplicaState.SERVING]
