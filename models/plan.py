"""How many replicas each pool should have. First stage: every pool by itself.

    n = ceil(lam/(theta*mu))                    calls/s forecast, headroom, calls/s one replica sustains (central value)
    survive   n >= ceil(lam/mu) + 1             the n - 1 that are left carry lam at full mu, warm
    lam = 0   n = 0                             whatever the capacity; the guards raise it to the pool's floor

theta (0.85) is the one headroom knob: what a load that grows while replicas start, and an estimate that errs, may take.
It need not pay for bursts: the capacity is computed at the load's peaks. From 35 % load on it errs by -10 to -16 % in
the median (`bench.capacity`), on the side of more replicas. Planning a high quantile of the demand on top buys nothing
yet, so the median is planned.

Nothing is clamped here to the pool's limits or to what is in stock: guards do, and say so. A pool whose demand or
capacity is unknown, or whose capacity is known too vaguely, gets no target: never "lower bound 0, so all there is".

Worked: 57.0 calls/s, 7.1 calls/s per replica, theta 0.85: 57.0/(0.85*7.1) = 9.44, n = 10.

Source: theta and the choice of the median were found on simulated days, where a higher theta with a higher quantile
cost as much at a worse SLO.
"""

from __future__ import annotations

import math

from models.capacity import narrow
from models.types import Capacity, Forecast, Plan, Situation, Target, Unknown

PLANNED_LEVEL = 0.5
REPLICAS_MAX = 1_000_000
DUST = 1e-9
"""Relative rounding error of floats: 12.000000000000002 replicas are 12."""


def plan(situations: tuple[Situation, ...], theta: float) -> Plan:
    """A target for each situation, in the same order, or why there is none; theta in (0, 1]."""
    return Plan(tuple(_target(situation, theta) for situation in situations))


def _target(situation: Situation, theta: float) -> Target | Unknown:
    if not 0 < theta <= 1:
        return Unknown("theta is not above 0 and at most 1")
    demand, capacity = _demand(situation.demand), _capacity(situation.capacity)
    if demand == 0:
        return Target(situation.pool.name, 0, 0.0, theta, 0.0, "no load")
    if isinstance(demand, Unknown) or isinstance(capacity, Unknown):
        return Unknown("; ".join(known.reason for known in (demand, capacity) if isinstance(known, Unknown)))
    raw = demand / theta / capacity  # in this order no product can round to zero
    if not raw <= REPLICAS_MAX:
        return Unknown(f"{demand:.3g} calls/s would take more than {REPLICAS_MAX:,} replicas of {capacity:.3g} calls/s")
    replicas, binding = _whole(raw), f"headroom theta {theta:g}"
    if situation.pool.survive_replica and _whole(demand / capacity) + 1 > replicas:
        replicas, binding = _whole(demand / capacity) + 1, "survives the loss of one replica"
    return Target(situation.pool.name, replicas, raw, theta, demand, binding)


def _demand(demand: Forecast | Unknown) -> float | Unknown:
    if isinstance(demand, Unknown):
        return Unknown(f"the demand is unknown ({demand.reason})")
    if not demand.quantiles:
        return Unknown("the forecast is empty")
    calls_per_s = demand.at_least(PLANNED_LEVEL).value
    if not (math.isfinite(calls_per_s) and calls_per_s >= 0):
        return Unknown("the forecast is not a number of calls")
    return calls_per_s


def _capacity(capacity: Capacity | Unknown) -> float | Unknown:
    if isinstance(capacity, Unknown):
        return Unknown(f"the capacity is unknown ({capacity.reason})")
    warm = capacity.warm_calls_per_s
    if not narrow(warm):
        return Unknown(
            f"the capacity is known too vaguely yet ({_shown(warm.low)} to {_shown(warm.high)} calls/s per replica)"
        )
    return warm.mid


def _shown(calls_per_s: float) -> str:
    return f"{calls_per_s:,.0f}" if 100 <= calls_per_s < 1e9 else f"{calls_per_s:.3g}"


def _whole(replicas: float) -> int:
    """Rounded up; any load at all takes one."""
    return max(1, math.ceil(replicas * (1 - DUST)))
