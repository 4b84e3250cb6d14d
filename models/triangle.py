"""Where a pool stands between latency, throughput and cost. It explains; the plan decides.

    s_L = min over TTFT and TPOT of (ln SLO - ln q)/(ln SLO - ln q0), clipped to [0, 1]; 0 where q >= SLO
    s_T = good calls / offered calls
    s_C = c_min / c, clipped to [0, 1]
    position b = s/(s_L + s_T + s_C);  x = b_T + b_C/2,  y = sqrt(3)/2*b_C      latency (0, 0), throughput (1, 0)
    magnitude g = (s_L*s_T*s_C)^(1/3)

q is the latency at the SLO's percentile, q0 what a lone call meets, c the price of a successful call in USD, c_min
the lowest attainable. All scores are ratios without unit. An SLO that not even a lone call meets (q0 >= SLO) gives no
scale to measure on: its term is unknown. A term that is unknown makes s_L unknown, unless the other one is 0 already.

Worked: TTFT 0.5 s of 2.0 s, 0.125 s unloaded: ln 4/ln 16 = 0.5. TPOT 0.02 s of 0.05 s, 0.01 s unloaded: 0.569.
s_L = 0.5. With 99 % good calls and 0.002 USD for a call that could cost 0.001: s = (0.5, 0.99, 0.5),
b = (0.251, 0.497, 0.251), g = 0.628.

Source: the construction is Trimtab's; barycentric coordinates after Moebius (1827).
"""

from __future__ import annotations

import math

from models.types import Barycentric, Performance, Placement, Unknown


def place(performance: Performance) -> Placement | Unknown:
    """The pool's scores, and its position and magnitude where all three scores are known.

    The position is also None where all scores are 0: it leans to no corner. Unknown where there is no score at all.
    """
    slo = performance.slo
    latency = _least(
        _latency_score(slo.ttft_s, performance.ttft_s, performance.unloaded_ttft_s),
        _latency_score(slo.tpot_s, performance.tpot_s, performance.unloaded_tpot_s),
    )
    throughput = performance.good_share
    if throughput is not None and not 0 <= throughput <= 1:
        throughput = None
    cost = _cost_score(performance.usd_per_call, performance.best_usd_per_call)
    if latency is None and throughput is None and cost is None:
        return Unknown("neither latency, nor the share of good calls, nor the cost of a call is known")
    if latency is None or throughput is None or cost is None:
        return Placement(latency, throughput, cost, None, None)
    total = latency + throughput + cost
    position = Barycentric(latency / total, throughput / total, cost / total) if total > 0 else None
    return Placement(latency, throughput, cost, position, math.cbrt(latency * throughput * cost))


def _latency_score(slo_s: float, now_s: float | None, unloaded_s: float | None) -> float | None:
    if now_s is None or not (now_s >= 0 and math.isfinite(slo_s) and slo_s > 0):
        return None
    if now_s >= slo_s:
        return 0.0
    if unloaded_s is None or not 0 < unloaded_s < slo_s:
        return None
    if now_s <= unloaded_s:
        return 1.0
    scale = math.log(slo_s) - math.log(unloaded_s)
    # Neighbouring floats can have equal logarithms: then there is no scale either.
    return min(1.0, max(0.0, (math.log(slo_s) - math.log(now_s)) / scale)) if scale > 0 else None


def _least(one: float | None, other: float | None) -> float | None:
    if one == 0 or other == 0:
        return 0.0
    return None if one is None or other is None else min(one, other)


def _cost_score(now_usd: float | None, best_usd: float | None) -> float | None:
    if now_usd is None or best_usd is None:
        return None
    if not (0 < now_usd < math.inf and 0 < best_usd < math.inf):
        return None
    return min(1.0, best_usd / now_usd)
