"""How long an engine step takes: a roofline before anything was measured, and what inter-token latency teaches.

    step time   T = k_a*a + k_p*b_p*x_p + k_d*b_d*x_d + k_g*g*K     seconds; all k are 1 in the prior

x_p prompt tokens computed in the step, x_d sequences that decode, K KV tokens they read. The prior is a roofline (as a
sum, which errs to the slow side where memory and compute overlap):

    a = 4 ms + weight bytes/M    g = KV bytes per token/M    b_p = b_d = 2*parameters/F
    M = 0.7*bandwidth*n_eff      F = 0.5*dense FLOP/s*n_eff    n_eff = gpus*0.9^log2(gpus), tensor parallelism

estimate    k ~ N(m, P), first m = 1 and P = c^2 on all pairs (one common error: efficiency) + d^2 on the diagonal
            (errors of single terms); c = 0.7, d = 0.2, or c = 3 without GPU or model figures. A window of mean
            inter-token latency y teaches y = z.k + noise of 0.15*y, with

                z = (a, b_p*r*y, b_d*B', g*B'*C)    B' = 1 + B, C = L + O/2, r prefill tokens/s

            B is a mean over time; a token sees the others, and itself: 1 + B for arrivals at random. r*y is what is
            prefilled during its step. A Kalman update; then every k is kept above 0.05. Before each, P grows by
            (0.005*prior)^2, never above the prior: that is the forgetting. A window beyond 3.5 sd is rejected, but
            makes P twice as wide, so that a real change is let in after a few.

Single terms can't be told apart from passive telemetry; their sum near what was seen can, and that is all that is used.

Worked: 70e9 parameters in fp8 on 4 H100-SXM (n_eff 3.24), 327,680 KV bytes per token: a = 13.21 ms, b = 43.7 us,
g = 43.1 ns. A window with B = 40, r = 900, L = 6000, O = 300 predicts y = 13.2 + 43.7e-3*(0.9*y + 41) + 10.9 ms, so
y = 26.9 ms.

Source: linear step time as in llm-d's workload-variant autoscaler (2026) and Vidur (Agrawal et al., MLSys 2024); the
roofline: Williams et al. (2009); the Kalman form and the innovation gate: Bar-Shalom, Li, Kirubarajan (2001).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from models.types import Estimate, Pool, Steps, StepTime

OVERHEAD_S = 0.004  # scheduling, sampling and kernel launches of one step, on the CPU
MEMORY_EFFICIENCY = 0.7
COMPUTE_EFFICIENCY = 0.5
PARALLEL_EFFICIENCY = 0.9  # per doubling of the GPUs of one replica

# The geometric middle between a small model on an L4 and a 70e9 one on four H100: right within a factor of 4 or so.
GENERIC = StepTime(fixed_s=0.025, per_prefill_token_s=8e-5, per_sequence_s=8e-5, per_kv_token_s=5e-8)

TERMS = 4
COMMON_SD = 0.7
GENERIC_SD = 3.0
TERM_SD = 0.2
MEASUREMENT_SD = 0.15  # consecutive windows overlap, so they are worth less than their own noise (2-5 %) says
DRIFT = 0.005  # per window, as a share of the prior's sd
GATE_SD = 3.5
SCALE_MIN = 0.05
SCALE_MAX = 1e5  # a factor of 100,000 from the prior is no step time but a broken reading
TOKENS_MAX = 1e9
GPUS_MAX = 4096


@lru_cache(maxsize=4096)
def prior(pool: Pool) -> StepTime:
    """The step time before anything was measured: the roofline, or a generic guess where figures are missing."""
    return _roofline(pool) or GENERIC


def has_roofline(pool: Pool) -> bool:
    """Whether the pool's GPU and model figures are known well enough for a prior of its own."""
    return _roofline(pool) is not None


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


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


@lru_cache(maxsize=4096)
def unlearnt(pool: Pool) -> Estimate:
    """The estimate before the first window."""
    common = COMMON_SD if has_roofline(pool) else GENERIC_SD
    cells = (common**2 + (TERM_SD**2 if i == j else 0.0) for i in range(TERMS) for j in range(TERMS))
    return Estimate((1.0,) * TERMS, tuple(cells), 0.0, 0)


def sane(estimate: Estimate) -> bool:
    """Whether the numbers can be an estimate at all: it may come from an old or damaged checkpoint."""
    scales, cells = estimate.scales, estimate.covariance
    if len(scales) != TERMS or len(cells) != TERMS**2 or not 0 <= estimate.largest_batch <= TOKENS_MAX:
        return False
    diagonal = cells[:: TERMS + 1]
    return (
        all(0 < scale <= SCALE_MAX for scale in scales)
        and all(0 < cell <= SCALE_MAX**2 for cell in diagonal)
        and all(abs(cell) <= SCALE_MAX**2 for cell in cells)
    )


def learn(estimate: Estimate, pool: Pool, steps: Steps, context_tokens: float) -> Estimate:
    """The estimate after one window; context_tokens: what a decoding sequence reads. Its workload stays.

    A window whose numbers can't be those of a window changes nothing, a rejected one only widens.
    """
    row = regressors(prior(pool), steps, context_tokens)
    if row is None:
        return estimate
    first = unlearnt(pool).covariance
    wide = tuple(
        min(cell + DRIFT**2 * top, max(top, cell)) for cell, top in zip(estimate.covariance, first, strict=True)
    )
    gained = tuple(sum(wide[TERMS * i + j] * row[j] for j in range(TERMS)) for i in range(TERMS))
    variance = sum(r * g for r, g in zip(row, gained, strict=True))
    noise = (MEASUREMENT_SD * steps.itl_s) ** 2
    innovation = steps.itl_s - sum(r * k for r, k in zip(row, estimate.scales, strict=True))
    total = variance + noise
    if not 0 < total < math.inf or variance < 0:
        return estimate
    if abs(innovation) > GATE_SD * math.sqrt(total):
        doubled = tuple(2 * cell for cell in estimate.covariance)
        return replace(estimate, covariance=doubled) if max(doubled) < SCALE_MAX**2 else estimate
    scales = tuple(
        min(max(k + g * innovation / total, SCALE_MIN), SCALE_MAX) for k, g in zip(estimate.scales, gained, strict=True)
    )
    cells = tuple(wide[TERMS * i + j] - gained[i] * gained[j] / total for i in range(TERMS) for j in range(TERMS))
    if min(cells[:: TERMS + 1]) <= 0:
        return estimate
    batch = max(estimate.largest_batch, steps.batch)
    return replace(
        estimate, scales=scales, covariance=cells, largest_batch=batch, observations=estimate.observations + 1
    )


def regressors(step: StepTime, steps: Steps, context_tokens: float) -> tuple[float, float, float, float] | None:
    """What each scale is multiplied with in a window, in seconds; None where its numbers can't be a window's."""
    rate = steps.prefill_tokens_per_s
    possible = 0 < steps.itl_s <= 1e6 and 0 <= steps.batch <= 1e6 and 0 <= rate <= TOKENS_MAX
    if not (possible and 0 <= context_tokens <= TOKENS_MAX):
        return None
    # The gauge's mean counts moments between calls; a token is decoded in a batch that has at least its own sequence.
    batch = 1.0 + steps.batch
    prefill_s = step.per_prefill_token_s * rate * steps.itl_s
    row = (step.fixed_s, prefill_s, step.per_sequence_s * batch, step.per_kv_token_s * batch * context_tokens)
    return row if 1 / SCALE_MAX < steps.itl_s / sum(row) < SCALE_MAX else None
