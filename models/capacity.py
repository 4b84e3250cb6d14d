"""How fast an engine steps, learnt from its inter-token latency, and the call rate it sustains inside its SLO.

    step time   T = s*(a + b_p*x_p + b_d*x_d + g*K)                 seconds; s a common scale, 1 in the prior

x_p prompt tokens computed in the step, x_d sequences that decode, K KV tokens they read. Single coefficients can't be
told apart from passive telemetry, the scale of their sum can: only s is learnt. The prior is a roofline (as a sum,
which errs to the slow side where memory and compute overlap):

    a = 4 ms + weight bytes/M    g = KV bytes per token/M    b_p = b_d = 2*parameters/F
    M = 0.7*bandwidth*n_eff      F = 0.5*dense FLOP/s*n_eff    n_eff = gpus*0.9^log2(gpus), tensor parallelism

estimate    ln s ~ N(m, v), first N(0, ln(2)^2), or N(0, ln(4)^2) without GPU or model figures. A window of mean
            inter-token latency y at batch B measures ln s = ln(y/(a + b_p*r*y + b_d*B + g*B*c)) with sd 0.15, where
            r is the prefill rate in tokens/s, so that r*y is x_p, and c = L + O/2 the mean context: a Kalman update.
            sd never falls below 0.05: that is the forgetting (memory about 1 + 0.15^2/0.05^2 = 10 windows). A window
            beyond 3.5 sd of what is predicted is rejected, but doubles v, so that a real change is let in after a few.
            The scale is not quite the same at all batches: e = 0.35*|ln(B/B_seen)|, B_seen the largest batch seen, adds
            e^2 to v where B is above B_seen, and to the noise where it is below. Below a third of B_seen a window that
            fits within 2*e, and where v <= e^2, is left out: a quiet night unlearns nothing.
capacity    a decode step carries B/O prefills of L*(1 - h) tokens, so T(B) = s*(a + B*(b_p*L*(1 - h)/O + b_d + g*c))
            B = the largest with T(B) <= TPOT SLO, B <= KV capacity/c, B <= 256
            w = s*b_p*L*(1 - h) + O*T_decode(B)/B = O*T(B)/B,   mu = 1/w calls/s
interval    mu at m and at m +- 1.645 sd, sd^2 = v + e^2 where B is above B_seen, v elsewhere

Warm is at the observed hit ratio h, cold at h = 0 (shared system prompts, which survive a failover, are not known
here). T is a mean: at a p95 SLO, theta has to pay for the spread. Weights of all experts of a mixture are not known
either (parameters are the active ones); s learns what the prior misses.

Worked: 70e9 parameters in fp8 on 4 H100-SXM (n_eff 3.24), 327,680 KV bytes per token: a = 13.21 ms, b = 43.7 us,
g = 43.1 ns. L = 6000, O = 300, h = 0.9, TPOT SLO 0.05 s, s = 1: B = 92.8, mu = 6.19 calls/s warm; B = 31.1, mu = 2.07
cold. With sd 0.05 and no extrapolation the warm interval is 5.53 to 6.91.

Source: linear step time as in llm-d's workload-variant autoscaler (2026) and Vidur (Agrawal et al., MLSys 2024); the
roofline: Williams et al. (2009); the scalar Kalman filter with innovation gate: Bar-Shalom, Li, Kirubarajan (2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.types import Capacity, Estimate, Interval, Limit, Load, Pool, Slo, Steps, StepTime, Unknown, Unloaded

OVERHEAD_S = 0.004  # scheduling, sampling and kernel launches of one step, on the CPU
MEMORY_EFFICIENCY = 0.7
COMPUTE_EFFICIENCY = 0.5
PARALLEL_EFFICIENCY = 0.9  # per doubling of the GPUs of one replica

# The geometric middle between a small model on an L4 and a 70e9 one on four H100: right within a factor of 4 or so.
GENERIC = StepTime(fixed_s=0.025, per_prefill_token_s=8e-5, per_sequence_s=8e-5, per_kv_token_s=5e-8)

PRIOR_SD = math.log(2)
GENERIC_SD = math.log(4)
MEASUREMENT_SD = 0.15  # consecutive windows overlap, so they are worth less than their own noise (2-5 %) says
FLOOR_SD = 0.05
GATE_SD = 3.5
EXTRAPOLATION_SD = 0.35  # per e-fold of batch beyond the largest one seen
QUIET_SHARE = 1 / 3
Z = 1.6449  # standard normal quantile at 95 %

NARROW_RATIO = 3.0
LOG_MAX = 12.0  # a factor of 160,000 from the prior is no step time but a broken reading
TOKENS_MAX = 1e9
GPUS_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Call:
    """A mean call: computed prompt tokens when warm, all prompt tokens, output tokens, mean context while decoding."""

    warm_prefill_tokens: float
    cold_prefill_tokens: float
    output_tokens: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What bounds the batch: the TPOT SLO, and the largest number of sequences that fit, with its reason."""

    tpot_s: float
    sequences: float
    sequences_limit: Limit


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def prior(pool: Pool) -> StepTime:
    """The step time before anything was measured: the roofline, or a generic guess where figures are missing."""
    return _roofline(pool) or GENERIC


def has_roofline(pool: Pool) -> bool:
    """Whether the pool's GPU and model figures are known well enough for a prior of its own."""
    return _roofline(pool) is not None


def _roofline(pool: Pool) -> StepTime | None:
    gpu, model, gpus = pool.gpu, pool.model, pool.gpus_per_replica
    if gpu is None or model is None or not 1 <= gpus <= GPUS_MAX:
        return None
    parallel = gpus * PARALLEL_EFFICIENCY ** math.log2(gpus)
    bytes_per_s = gpu.bandwidth_gb_per_s * 1e9 * MEMORY_EFFICIENCY * parallel
    flop_per_s = gpu.dense_tflops * 1e12 * COMPUTE_EFFICIENCY * parallel
    if not (_positive(bytes_per_s) and _positive(flop_per_s)):
        return None
    fixed_s = OVERHEAD_S + model.parameters * model.bytes_per_parameter / bytes_per_s
    token_s = 2 * model.parameters / flop_per_s
    kv_s = model.kv_bytes_per_token / bytes_per_s
    # Figures that lead beyond these bounds are not those of any GPU and model.
    sane = OVERHEAD_S < fixed_s < 1e3 and 1e-15 < token_s < 1e3 and 1e-15 < kv_s < 1e3
    return StepTime(fixed_s, token_s, token_s, kv_s) if sane else None


def update(estimate: Estimate | None, pool: Pool, steps: Steps | Unknown, load: Load | Unknown) -> Estimate | None:
    """The estimate after one window of engine steps; unchanged where steps or call lengths are unknown.

    The estimate is that of the largest batch seen. A rejected window only widens it. A pool's first window is measured
    against the prior.
    """
    if isinstance(steps, Unknown) or isinstance(load, Unknown):
        return estimate
    measured = _measured_log_scale(prior(pool), steps, load)
    if measured is None:
        return estimate
    if estimate is None or not _sane(estimate):
        sd = PRIOR_SD if has_roofline(pool) else GENERIC_SD
        estimate = Estimate(log_scale_mean=0.0, log_scale_variance=sd**2, largest_batch=0.0, observations=0)
    batch, largest = max(1.0, steps.batch), estimate.largest_batch
    mean = estimate.log_scale_mean
    variance = estimate.log_scale_variance + (_extrapolation_sd(largest, batch) ** 2 if largest > 0 else 0.0)
    shape = _extrapolation_sd(batch, largest) ** 2
    noise = MEASUREMENT_SD**2 + shape
    innovation = measured - mean
    if abs(innovation) > GATE_SD * math.sqrt(variance + noise):
        return Estimate(mean, 2 * estimate.log_scale_variance, largest, estimate.observations)
    if batch < QUIET_SHARE * largest and max(variance, innovation**2 / 4) <= shape:
        # The error of shape is the same all night: hundreds of windows are not hundreds of independent measurements.
        return estimate
    gain = variance / (variance + noise)
    return Estimate(
        log_scale_mean=mean + gain * innovation,
        log_scale_variance=max(FLOOR_SD**2, gain * noise),
        largest_batch=max(largest, batch),
        observations=estimate.observations + 1,
    )


def _extrapolation_sd(known_batch: float, batch: float) -> float:
    """How much less ln(scale) is known at a batch than at the smaller one where it was measured; 0 the other way."""
    return EXTRAPOLATION_SD * math.log(max(1.0, batch / max(1.0, known_batch)))


def _sane(estimate: Estimate) -> bool:
    """Whether the numbers can be an estimate at all: it may come from an old or damaged checkpoint."""
    mean, variance, batch = estimate.log_scale_mean, estimate.log_scale_variance, estimate.largest_batch
    return abs(mean) <= LOG_MAX and 0 < variance <= LOG_MAX**2 and 0 <= batch <= TOKENS_MAX


def _measured_log_scale(step: StepTime, steps: Steps, load: Load) -> float | None:
    """ln(observed step time / prior step time) of a window, or None where its numbers can't be those of a window."""
    call = _call(load)
    rate = steps.prefill_tokens_per_s
    if call is None or not (0 < steps.itl_s <= 1e6 and 0 <= steps.batch <= 1e6 and 0 <= rate <= TOKENS_MAX):
        return None
    # The gauge's mean counts moments between calls, and can be 0; an engine that steps has at least one sequence.
    batch = max(1.0, steps.batch)
    decode_s = step.fixed_s + batch * (step.per_sequence_s + step.per_kv_token_s * call.context_tokens)
    expected_s = decode_s + step.per_prefill_token_s * rate * steps.itl_s
    log_scale = math.log(steps.itl_s) - math.log(expected_s)
    return log_scale if abs(log_scale) <= LOG_MAX else None


def _call(load: Load) -> _Call | None:
    prompt, output, hit = load.prompt_tokens_per_call, load.output_tokens_per_call, load.hit_ratio
    if not (0 <= prompt <= TOKENS_MAX and 1e-3 <= output <= TOKENS_MAX and 0 <= hit <= 1):
        return None
    return _Call(prompt * (1 - hit), prompt, output, prompt + output / 2)


def capacity(
    estimate: Estimate | None, pool: Pool, slo: Slo, load: Load | Unknown, kv_capacity_tokens: float | None
) -> Capacity | Unknown:
    """Calls/s that one replica of the pool sustains at the load's mean call, warm and cold, and what limits it.

    kv_capacity_tokens: size of a replica's KV cache; None where unknown, which then bounds nothing.
    """
    if isinstance(load, Unknown):
        return Unknown(f"the load is unknown ({load.reason})")
    call = _call(load)
    if call is None:
        return Unknown("no calls were seen that would tell how long prompts and answers are")
    if estimate is None or not _sane(estimate) or estimate.observations < 1:
        return Unknown("no engine step was measured yet")
    if not _positive(slo.tpot_s):
        return Unknown("the TPOT limit is not a positive number")
    bounds = _bounds(slo, call, kv_capacity_tokens, max(1.0, float(pool.max_num_seqs)))
    if isinstance(bounds, Unknown):
        return bounds
    step, scale = prior(pool), math.exp(estimate.log_scale_mean)
    alone_s = scale * _alone_s(step, call)
    if alone_s > bounds.tpot_s:
        return Unknown(f"a sequence alone takes {alone_s:.3g} s per token, and the SLO allows {bounds.tpot_s:.3g} s")
    warm = _interval(step, estimate, call, call.warm_prefill_tokens, bounds)
    cold = _interval(step, estimate, call, call.cold_prefill_tokens, bounds)
    # A cold call takes no less work than a warm one; only its interval can be tighter, being known at smaller batches.
    cold = Interval(min(cold.low, warm.low), min(cold.mid, warm.mid), min(cold.high, warm.high))
    return Capacity(warm, cold, _limit(step, scale, call, bounds, warm.mid))


def _bounds(slo: Slo, call: _Call, kv_capacity_tokens: float | None, batch_max: float) -> _Bounds | Unknown:
    if kv_capacity_tokens is None:
        return _Bounds(slo.tpot_s, batch_max, Limit.BATCH_SIZE)
    if not kv_capacity_tokens > 0:
        return Unknown("the size of the KV cache is not a positive number")
    fitting = kv_capacity_tokens / call.context_tokens
    if fitting < 1:
        return Unknown(
            f"a KV cache of {kv_capacity_tokens:.0f} tokens is too small for a call of {call.context_tokens:.0f}"
        )
    return _Bounds(slo.tpot_s, min(fitting, batch_max), Limit.KV_MEMORY if fitting < batch_max else Limit.BATCH_SIZE)


def _alone_s(step: StepTime, call: _Call) -> float:
    """Step time of a lone decoding sequence at scale 1, in seconds."""
    return step.fixed_s + step.per_sequence_s + step.per_kv_token_s * call.context_tokens


def _per_sequence_s(step: StepTime, call: _Call, prefill_tokens: float) -> float:
    """What one more sequence adds to a step at scale 1, with its share of the prefills that keep the batch full."""
    prefill_s = step.per_prefill_token_s * prefill_tokens / call.output_tokens
    return prefill_s + step.per_sequence_s + step.per_kv_token_s * call.context_tokens


def _slo_batch(step: StepTime, scale: float, slope_s: float, tpot_s: float) -> float:
    """The batch at which the step time meets the SLO; 0 where the fixed part alone exceeds it."""
    return max(0.0, (tpot_s / scale - step.fixed_s) / slope_s)


def _rate(step: StepTime, scale: float, call: _Call, prefill_tokens: float, bounds: _Bounds) -> tuple[float, float]:
    """Calls/s at the largest batch within the bounds, and that batch; both 0 where a lone sequence breaks the SLO."""
    if scale * _alone_s(step, call) > bounds.tpot_s:
        return 0.0, 0.0
    slope_s = _per_sequence_s(step, call, prefill_tokens)
    batch = min(bounds.sequences, _slo_batch(step, scale, slope_s, bounds.tpot_s))
    return batch / (call.output_tokens * scale * (step.fixed_s + slope_s * batch)), batch


def _interval(step: StepTime, estimate: Estimate, call: _Call, prefill_tokens: float, bounds: _Bounds) -> Interval:
    mean = estimate.log_scale_mean
    mid, batch = _rate(step, math.exp(mean), call, prefill_tokens, bounds)
    reach = Z * math.sqrt(estimate.log_scale_variance + _extrapolation_sd(estimate.largest_batch, batch) ** 2)
    low, _ = _rate(step, math.exp(mean + reach), call, prefill_tokens, bounds)
    high, _ = _rate(step, math.exp(mean - reach), call, prefill_tokens, bounds)
    return Interval(low, mid, high)


def _limit(step: StepTime, scale: float, call: _Call, bounds: _Bounds, calls_per_s: float) -> Limit:
    # A replica that is full spends this share of its time on prefill.
    if scale * step.per_prefill_token_s * call.warm_prefill_tokens * calls_per_s > 0.5:
        return Limit.PREFILL_COMPUTE
    slope_s = _per_sequence_s(step, call, call.warm_prefill_tokens)
    if _slo_batch(step, scale, slope_s, bounds.tpot_s) < bounds.sequences:
        return Limit.DECODE_BANDWIDTH
    return bounds.sequences_limit


def unloaded(estimate: Estimate | None, pool: Pool, load: Load | Unknown) -> Unloaded | Unknown:
    """Latency of a lone warm call, by the estimate: its whole prefill in one step, then a token per step."""
    if isinstance(load, Unknown):
        return Unknown(f"the load is unknown ({load.reason})")
    call = _call(load)
    if call is None:
        return Unknown("no calls were seen that would tell how long prompts and answers are")
    if estimate is None or not _sane(estimate) or estimate.observations < 1:
        return Unknown("no engine step was measured yet")
    step, scale = prior(pool), math.exp(estimate.log_scale_mean)
    first_s = step.fixed_s + step.per_prefill_token_s * call.warm_prefill_tokens
    return Unloaded(ttft_s=scale * first_s, tpot_s=scale * _alone_s(step, call))


def narrow(interval: Interval) -> bool:
    """Whether a capacity is known well enough to act on: its high end is at most three times its low end."""
    return 0 < interval.low <= interval.mid <= interval.high <= NARROW_RATIO * interval.low < math.inf
