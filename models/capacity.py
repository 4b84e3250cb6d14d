"""The call rate that one replica sustains inside its SLOs, warm and with its caches lost.

At lam calls/s per replica and step time T, with U computed prompt tokens per call (see models.steptime, models.workload
for the other symbols; every term carries its learnt scale):

    w = b_p*U + O*(b_d + g*C)        seconds of steps that a call adds, beyond the fixed part of each
    T = a/(1 - lam*w)                processor sharing: B = lam*O*T sequences decode together
    memory: KV cache = S + B*own + lam*left*m(t)         what runs, and what lies idle for less than t

Time t is what the cache affords, and decides U = L - h(t)*L. For a given t the memory equation is quadratic in lam:

    m' = left*m(t), q = O*a*own, K = KV - S:   m'*w*lam^2 - (K*w + m' + q)*lam + K = 0,   the smaller root

More load shortens t, less is found, w grows: above the largest lam over all t there is no balance, and the hit rate
falls until everything fails. That fold is the memory limit. Others at each t: T <= TPOT SLO, B <= max_num_seqs, and a
TTFT, 3*(T + b_p*U/(1 - lam*w)), within its SLO (95 % of an exponential with that mean).

Balance must hold at the load's peaks, not only at its mean: sessions come in clusters, and a fleet at the fold
collapses within minutes of perfect SLO. With c = sqrt(D/(W*lam)), the share by which a replica's load varies for
minutes, the peak is two sd above the mean of a gamma variable, lam*(1 + 2*c + c^2) = (sqrt(lam) + sqrt(D/W))^2. Memory
and batch are held to the peak; TPOT and TTFT are means over long times and are held to lam. This takes the place of a
flat factor of 1.2-1.4 by which the fold overstates.

interval    first order: variance of ln(mu) = G'PG over the scales + e^2 + f^2, e = 0.04 per e-fold of batch beyond the
            largest seen, f = 0.10 for what the model leaves out (0.35 more where memory binds and gaps are a guess)

Warm is at the hit ratio that the cache affords, cold with all but the shared prefix lost. T is a mean over tokens.

Worked (no limit of memory or sequences, all scales 1): 70e9 parameters in fp8 on 4 H100-SXM, L = 6000, O = 300,
h = 0.9, TPOT SLO 0.05 s: w = 26.2 + 92.7 ms = 118.9 ms, mu = (1 - 13.21/50)/w = 6.19 calls/s, B = 92.8; cold, U = 6000:
w = 354.7 ms, mu = 2.07. With 1,024 sequences and D = 20 the peak may be 1024/(300*0.0132 + 1024*0.3547) = 2.79 calls/s
cold, so that mu = (sqrt(2.79) - sqrt(20/300))^2 = 1.99: peaks bind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from models import steptime, workload
from models.types import (
    NO_WORKLOAD,
    Capacity,
    Estimate,
    Interval,
    Limit,
    Load,
    Pool,
    Slo,
    Steps,
    StepTime,
    Unknown,
    Unloaded,
)
from models.workload import EMPTIED, Call, Moment

TAIL = 3.0
EXTRAPOLATION_SD = 0.04
MODEL_SD = 0.10
GUESSED_GAPS_SD = 0.35
NUDGE = 0.02  # share of a scale's mean by which it is varied for the gradient
Z = 1.6449  # standard normal quantile at 95 %
NARROW_RATIO = 3.0
REACH_MAX = 20.0
VARIANCE_MAX = 1e4
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What bounds a replica: SLOs, sequences, KV tokens (inf where unknown)."""

    tpot_s: float
    ttft_s: float
    sequences: float
    kv_tokens: float


@dataclass(frozen=True, slots=True)
class _Rates:
    """Largest rates at one idle time, by what limits them, calls/s."""

    tpot: float
    ttft: float
    sequences: float
    memory: float

    def least(self) -> float:
        """What all of them allow."""
        return min(self.tpot, self.ttft, self.sequences, self.memory)


def update(estimate: Estimate | None, pool: Pool, steps: Steps | Unknown, load: Load | Unknown) -> Estimate | None:
    """The estimate after one window of engine steps; unchanged where steps or call lengths are unknown."""
    if isinstance(steps, Unknown) or isinstance(load, Unknown) or not workload.usable(load):
        return estimate
    known = estimate if estimate is not None and steptime.sane(estimate) else steptime.unlearnt(pool)
    context = load.prompt_tokens_per_call + load.output_tokens_per_call / 2
    if steptime.regressors(steptime.prior(pool), steps, context) is None:
        return estimate
    remembered = known.workload if workload.sane(known.workload) else NO_WORKLOAD
    known = replace(known, workload=workload.remember(remembered, steps, load))
    return steptime.learn(known, pool, steps, context)


def capacity(
    estimate: Estimate | None, pool: Pool, slo: Slo, load: Load | Unknown, kv_capacity_tokens: float | None
) -> Capacity | Unknown:
    """Calls/s that one replica of the pool sustains at its mean call, warm and cold, and what limits it.

    kv_capacity_tokens: size of a replica's KV cache; None where unknown, which then bounds nothing.
    """
    known = known_call(estimate, load)
    if isinstance(known, Unknown):
        return known
    learnt, call = known
    if not (0 < slo.tpot_s < math.inf and 0 < slo.ttft_s < math.inf):
        return Unknown("the latency limits are not positive numbers")
    if kv_capacity_tokens is not None and not kv_capacity_tokens > 0:
        return Unknown("the size of the KV cache is not a positive number")
    kv = math.inf if kv_capacity_tokens is None else kv_capacity_tokens
    bounds = _Bounds(slo.tpot_s, slo.ttft_s, max(1.0, float(pool.max_num_seqs)), kv)
    alone_s = _alone_s(steptime.prior(pool), learnt.scales, call)
    if alone_s > bounds.tpot_s:
        return Unknown(f"a sequence alone takes {alone_s:.3g} s per token, and the SLO allows {bounds.tpot_s:.3g} s")
    if kv < call.context_tokens:
        return Unknown(f"a KV cache of {kv:.0f} tokens is too small for a call of {call.context_tokens:.0f}")
    swing = math.sqrt(call.dispersion / workload.SMOOTH_S)
    replica = _Replica(steptime.prior(pool), learnt, call, bounds, swing)
    warm, limit = replica.sustains(workload.reuse(learnt.workload, call))
    # With all caches lost no TTFT is kept for a while in any case; what counts is what can be worked off.
    emptied = replace(replica, bounds=replace(bounds, ttft_s=math.inf))
    cold, _ = emptied.sustains(EMPTIED)
    if not (warm.mid > 0 and cold.mid > 0):
        return Unknown("no rate keeps the latency limits: a first token alone takes longer than the SLO allows")
    # A cold call takes no less work than a warm one; only its interval can be tighter, being known at smaller batches.
    cold = Interval(min(cold.low, warm.low), min(cold.mid, warm.mid), min(cold.high, warm.high))
    return Capacity(warm, cold, limit)


def known_call(estimate: Estimate | None, load: Load | Unknown) -> tuple[Estimate, Call] | Unknown:
    """What was learnt, and the mean call, where both are known well enough to compute with."""
    if isinstance(load, Unknown):
        return Unknown(f"the load is unknown ({load.reason})")
    if not workload.usable(load):
        return Unknown("no calls were seen that would tell how long prompts and answers are")
    if estimate is None or not steptime.sane(estimate) or estimate.observations < 1:
        return Unknown("no engine step was measured yet")
    call = workload.call(estimate.workload, load)
    if not (0 <= call.prompt_tokens <= workload.TOKENS_MAX and 1e-3 <= call.output_tokens <= workload.TOKENS_MAX):
        return Unknown("no calls were seen that would tell how long prompts and answers are")
    return estimate, call


def _alone_s(step: StepTime, scales: tuple[float, ...], call: Call) -> float:
    """Step time of a lone decoding sequence, in seconds."""
    fixed, _, sequence, kv = scales
    return step.fixed_s * fixed + step.per_sequence_s * sequence + step.per_kv_token_s * kv * call.context_tokens


@dataclass(frozen=True, slots=True)
class _Replica:
    step: StepTime
    learnt: Estimate
    call: Call
    bounds: _Bounds
    swing: float  # sqrt(D/W)

    def sustains(self, times: tuple[Moment, ...]) -> tuple[Interval, Limit]:
        """The rate at the best of the idle times, with its interval, and what limits it there."""
        scales = self.learnt.scales
        # Every second time first: the rate has one hump, and the other ones matter only beside its top.
        rates = {place: self._rates(scales, times[place]) for place in range(0, len(times), 2)}
        top = max(rates, key=lambda place: rates[place].least())
        rates |= {place: self._rates(scales, times[place]) for place in (top - 1, top + 1) if 0 <= place < len(times)}
        place = max(rates, key=lambda place: rates[place].least())
        mid = rates[place].least()
        if not 0 < mid < math.inf:
            return Interval(0.0, 0.0, 0.0), Limit.QUEUEING
        best = times[place]
        limit = self._limit(rates[place], mid)
        variance = self._variance(best, mid) + MODEL_SD**2
        batch = self._batch(mid, best)
        variance += (EXTRAPOLATION_SD * math.log(max(1.0, batch / max(1.0, self.learnt.largest_batch)))) ** 2
        if limit is Limit.KV_MEMORY:
            # Where little of what calls leave is ever found again it matters little how soon.
            guessed = workload.guessed_share(self.learnt.workload, self.call) * self.call.found_share
            variance += (GUESSED_GAPS_SD * guessed) ** 2
        reach = math.exp(min(Z * math.sqrt(variance), REACH_MAX))
        return Interval(mid / reach, mid, mid * reach), limit

    def _variance(self, best: Moment, mid: float) -> float:
        """Of ln(mu) by that of the scales, to first order; the best idle time moves only to second order."""
        scales, cells = self.learnt.scales, self.learnt.covariance
        gradient = []
        for term, scale in enumerate(scales):
            varied = (*scales[:term], scale * (1 + NUDGE), *scales[term + 1 :])
            rate = max(self._rates(varied, best).least(), TINY)
            gradient.append((math.log(rate) - math.log(mid)) / (NUDGE * scale))
        size = len(gradient)
        variance = sum(gradient[i] * cells[size * i + j] * gradient[j] for i in range(size) for j in range(size))
        return min(max(variance, 0.0), VARIANCE_MAX)

    def _rates(self, scales: tuple[float, ...], moment: Moment) -> _Rates:
        call, bounds = self.call, self.bounds
        fixed_s, prefill_s, work_s = workload.work(self.step, scales, call, moment)
        # 3*(a + b_p*U)/(1 - rho) <= TTFT SLO
        ttft = max(1 - TAIL * (fixed_s + prefill_s) / bounds.ttft_s, 0.0) / work_s
        tpot = max(1 - fixed_s / bounds.tpot_s, 0.0) / work_s
        sequences = bounds.sequences / (call.output_tokens * fixed_s + bounds.sequences * work_s)
        memory = math.inf
        if bounds.kv_tokens < math.inf:
            room = max(bounds.kv_tokens - call.resident_tokens, call.own_tokens)
            idle = workload.idle_tokens(call, moment)
            half = room * work_s + idle + call.output_tokens * call.own_tokens * fixed_s
            memory = 2 * room / (half + math.sqrt(max(half * half - 4 * idle * work_s * room, 0.0)))
        return _Rates(tpot, ttft, self._mean_of_peak(sequences), self._mean_of_peak(memory))

    def _mean_of_peak(self, peak: float) -> float:
        """The mean rate whose peaks reach `peak`."""
        root = math.sqrt(peak) - self.swing
        return root * root if root > 0 else 0.0

    def _batch(self, rate: float, moment: Moment) -> float:
        fixed_s, _, work_s = workload.work(self.step, self.learnt.scales, self.call, moment)
        free = 1 - rate * work_s
        return rate * self.call.output_tokens * fixed_s / free if free > 0 else 0.0

    def _limit(self, rates: _Rates, mid: float) -> Limit:
        least = {
            Limit.KV_MEMORY: rates.memory,
            Limit.BATCH_SIZE: rates.sequences,
            Limit.QUEUEING: rates.ttft,
            Limit.DECODE_BANDWIDTH: rates.tpot,
        }
        limit = min(least, key=lambda name: least[name])
        computed = self.call.prompt_tokens - self.call.hit_tokens
        prefill_s = self.learnt.scales[1] * self.step.per_prefill_token_s * computed
        # A replica that is full spends this share of its time on prefill: then seats are what it runs out of last.
        prefills = limit in {Limit.DECODE_BANDWIDTH, Limit.BATCH_SIZE} and mid * prefill_s > 0.5
        return Limit.PREFILL_COMPUTE if prefills else limit


def unloaded(estimate: Estimate | None, pool: Pool, load: Load | Unknown) -> Unloaded | Unknown:
    """Latency of a lone warm call, by the estimate: its whole prefill in one step, then a token per step."""
    known = known_call(estimate, load)
    if isinstance(known, Unknown):
        return known
    learnt, call = known
    step, (fixed, prefill, _, _) = steptime.prior(pool), learnt.scales
    computed = call.prompt_tokens - call.hit_tokens
    first_s = fixed * step.fixed_s + prefill * step.per_prefill_token_s * computed
    return Unloaded(ttft_s=first_s, tpot_s=_alone_s(step, learnt.scales, call))


def at_most(capacity: Capacity | Unknown, served_calls_per_s: float | None) -> Capacity | Unknown:
    """The capacity where a full replica was seen to serve so many calls/s: it carries no more, however vague the rest.

    None changes nothing; a capacity that is unknown stays so.
    """
    if isinstance(capacity, Unknown) or served_calls_per_s is None or not 0 < served_calls_per_s < math.inf:
        return capacity

    def cut(interval: Interval) -> Interval:
        return Interval(*(min(end, served_calls_per_s) for end in (interval.low, interval.mid, interval.high)))

    return replace(
        capacity, warm_calls_per_s=cut(capacity.warm_calls_per_s), cold_calls_per_s=cut(capacity.cold_calls_per_s)
    )


def narrow(interval: Interval) -> bool:
    """Whether a capacity is known well enough to act on: its high end is at most three times its low end."""
    return 0 < interval.low <= interval.mid <= interval.high <= NARROW_RATIO * interval.low < math.inf
