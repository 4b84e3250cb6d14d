"""What a pool's calls are made of, and how often a prefix is still cached when it is used again.

Sums of a replica's recent calls, decayed with a time constant of 20 minutes: a window of a minute has too few calls to
say how long they are. From them, per mean call:

    L, O, h     prompt tokens, output tokens, hit ratio (of sums, so weighted with tokens)
    own, S      KV tokens that a running request has to itself, and those that all share, from the gauges: a line
                K = S + own*r through moments with r requests running
    L_sys       shared prefix of a call: what it reads (L + O/2) less its own, between 0 and the hits h*L
    p           share of the tokens that calls leave behind (L + O - L_sys each) which a next call finds: hits of
                sessions (h*L - L_sys) over that
    F           distribution of the idle gap of what is found again: vLLM's kv_block_reuse_gap_seconds, which counts
                from use to use, less the time a call takes, mixed with a guess that weighs as much as ten sessions:
                lognormal with median 8 s and sigma 1.2. Without `--kv-cache-metrics` the guess is all there is, and
                the capacity is less certain

LRU by Che: what lies idle longer than a time t is evicted, so at lam calls/s and a time t

    idle tokens = lam*(L + O - L_sys)*m(t),   m(t) = p*E[min(G, t)] + (1 - p)*t,   h(t)*L = L_sys + p*F(t)*(...)

dispersion  D = W*lam*variance/mean^2 of a replica's prompt tokens/s, smoothed over W = 300 s: 1 for a Poisson stream of
equal calls, more where sizes differ or a session sends many, and about the same at every load, because sessions are
independent. So the load of one replica varies by sqrt(D/(W*lam)), as a share, for minutes on end: long enough to fill
a cache. D and F are remembered for an hour.

Worked: L = 9400, O = 220, h = 0.93, own = 5600: L_sys = 9510 - 5600 = 3910; a call leaves 5710 tokens, of which
8742 - 3910 = 4832 are found again, p = 0.85. D = 18 at 4 calls/s: sqrt(18/1200) = 12 %.

Source: Che, Tung, Wang (2002), hierarchical web caching; Fricker, Robert, Roberts (2012) on why it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from models.types import Gaps, Held, Load, Steps, StepTime, Workload

MEMORY_S = 1200.0
LONG_MEMORY_S = 3600.0
SMOOTH_S = 300.0  # an exponential mean of half that time constant varies as much as a mean over a window of this
TOKENS_MAX = 1e9
GUESS_MEDIAN_S = 8.0
GUESS_SIGMA = 1.2
GUESS_SESSIONS = 10.0
BLOCK_TOKENS = 16.0  # vLLM's usual block
DISPERSION_MIN = 1.0
DISPERSION_MAX = 300.0
PRIOR_DISPERSION = 20.0
PRIOR_WINDOWS = 3.0
BOUNDS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
PSEUDO_MOMENTS = 4.0
SQUARE_MAX = 100.0
SUM_MAX = 1e15
CALLS_MIN = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """A mean call: tokens of its prompt, found of it, shared by all, of its answer; KV tokens it holds for itself.

    left_tokens: KV tokens of its own that it leaves in the cache; found_share: of which so much is found by a next one.
    seconds: how long calls took where this was seen; dispersion: see the module.
    """

    prompt_tokens: float
    hit_tokens: float
    shared_tokens: float
    output_tokens: float
    own_tokens: float
    resident_tokens: float
    left_tokens: float
    found_share: float
    seconds: float
    dispersion: float

    @property
    def context_tokens(self) -> float:
        """What a decoding sequence reads, on average."""
        return self.prompt_tokens + self.output_tokens / 2


def usable(load: Load) -> bool:
    """Whether a load's lengths can be those of calls."""
    prompt, output, hit = load.prompt_tokens_per_call, load.output_tokens_per_call, load.hit_ratio
    return 0 <= prompt <= TOKENS_MAX and 1e-3 <= output <= TOKENS_MAX and 0 <= hit <= 1


def remember(workload: Workload, steps: Steps, load: Load) -> Workload:
    """The sums after one more window. load: lengths of that window's calls."""
    calls_per_s = sum(held.calls_per_s for held in steps.held) / len(steps.held) if steps.held else 0.0
    since_s = min(max(steps.since_s, 0.0), steps.window_s)
    if not (0 < calls_per_s <= TOKENS_MAX and 0 < since_s <= TOKENS_MAX and usable(load)):
        return workload
    keep, keep_long = math.exp(-since_s / MEMORY_S), math.exp(-since_s / LONG_MEMORY_S)
    calls, output = calls_per_s * since_s, load.output_tokens_per_call
    prompts = calls * load.prompt_tokens_per_call
    mean = (keep * workload.prompt_tokens + prompts) / (keep * workload.seconds + since_s)
    smoothed = _smoothed(workload.smoothed, steps.held, since_s)
    square = sum((rate / mean - 1) ** 2 for rate in smoothed) / len(smoothed) if mean > 0 else 0.0
    moments = [held for held in steps.held if held.running > 0 and 0 < held.kv_tokens <= TOKENS_MAX]
    return Workload(
        seconds=keep * workload.seconds + since_s,
        calls=keep * workload.calls + calls,
        prompt_tokens=keep * workload.prompt_tokens + prompts,
        hit_tokens=keep * workload.hit_tokens + prompts * load.hit_ratio,
        output_tokens=keep * workload.output_tokens + calls * output,
        token_seconds=keep * workload.token_seconds + calls * output * steps.itl_s,
        smoothed=smoothed,
        spread_seconds=keep_long * workload.spread_seconds + since_s,
        squares=keep_long * workload.squares + min(square, SQUARE_MAX) * calls,
        samples=keep * workload.samples + len(moments),
        running=keep * workload.running + sum(held.running for held in moments),
        running_squares=keep * workload.running_squares + sum(held.running**2 for held in moments),
        kv_tokens=keep * workload.kv_tokens + sum(held.kv_tokens for held in moments),
        kv_products=keep * workload.kv_products + sum(held.running * held.kv_tokens for held in moments),
        gaps=_added(workload.gaps, steps.gaps, keep_long, since_s),
    )


def _smoothed(known: tuple[float, ...], held: tuple[Held, ...], since_s: float) -> tuple[float, ...]:
    """Each replica's rate, smoothed; begun anew at their mean where replicas came or went."""
    if len(known) != len(held):
        mean = sum(one.prompt_tokens_per_s for one in held) / len(held)
        return (mean,) * len(held)
    keep = math.exp(-2 * since_s / SMOOTH_S)
    return tuple(keep * old + (1 - keep) * one.prompt_tokens_per_s for old, one in zip(known, held, strict=True))


def _added(known: Gaps, new: Gaps, keep: float, since_s: float) -> Gaps:
    if not new.bounds_s or len(new.bounds_s) != len(new.weights):
        return replace(known, weights=tuple(keep * weight for weight in known.weights)) if known.weights else known
    if known.bounds_s != new.bounds_s:
        known = Gaps(new.bounds_s, (0.0,) * len(new.bounds_s))
    pairs = zip(known.weights, new.weights, strict=True)
    return Gaps(new.bounds_s, tuple(keep * old + since_s * weight for old, weight in pairs))


def sane(workload: Workload) -> bool:
    """Whether the numbers can be sums at all: they may come from an old or damaged checkpoint."""
    gaps = workload.gaps
    sums = all(0 <= float(getattr(workload, name)) <= SUM_MAX for name in _SUMS)
    ascending = all(low < high for low, high in pairwise(gaps.bounds_s)) and all(bound >= 0 for bound in gaps.bounds_s)
    weights = all(0 <= weight <= SUM_MAX for weight in (*gaps.weights, *workload.smoothed))
    return sums and ascending and weights and len(gaps.weights) == len(gaps.bounds_s)


def told(workload: Workload) -> bool:
    """Whether the sums say how long calls are: they are sane, and some calls were seen."""
    enough = workload.calls >= CALLS_MIN and workload.seconds > 0 and workload.output_tokens > 0
    return enough and sane(workload)


_SUMS = (
    "seconds", "calls", "prompt_tokens", "hit_tokens", "output_tokens", "token_seconds", "spread_seconds", "squares",
    "samples", "running", "running_squares", "kv_tokens", "kv_products",
)  # fmt: skip


def call(workload: Workload, load: Load) -> Call:
    """The mean call: of the remembered sums, or of the load where nothing is remembered."""
    if not told(workload):
        prompt, output = load.prompt_tokens_per_call, load.output_tokens_per_call
        hits, dispersion, seconds = prompt * load.hit_ratio, PRIOR_DISPERSION, 0.0
        own = resident = math.nan
    else:
        prompt, output = workload.prompt_tokens / workload.calls, workload.output_tokens / workload.calls
        hits = min(workload.hit_tokens / workload.calls, prompt)
        seconds = workload.token_seconds / workload.calls
        dispersion = _dispersion(workload)
        own, resident = _line(workload)
    context = prompt + output / 2
    own = own if 0 < own < context else context
    shared = min(context - own, hits)
    resident = resident if resident >= 0 else 0.0
    left = max(prompt + output - shared, 0.0)
    found = min((hits - shared) / left, 1.0) if left > 0 else 0.0
    return Call(prompt, hits, shared, output, own, resident, left, found, seconds, dispersion)


def _dispersion(workload: Workload) -> float:
    """Shrunk towards what sessions of a dozen calls have, until a few windows have been seen."""
    windows = workload.spread_seconds / SMOOTH_S
    seen = SMOOTH_S * workload.squares / workload.spread_seconds if workload.spread_seconds > 0 else 0.0
    shrunk = (windows * seen + PRIOR_WINDOWS * PRIOR_DISPERSION) / (windows + PRIOR_WINDOWS)
    return min(max(shrunk, DISPERSION_MIN), DISPERSION_MAX)


def _line(workload: Workload) -> tuple[float, float]:
    """(own, shared) KV tokens by least squares, with some moments at nothing added; NaN where none was seen."""
    if workload.samples <= 0 or workload.running <= 0:
        return math.nan, math.nan
    moments = workload.samples + PSEUDO_MOMENTS
    spread = workload.running_squares - workload.running**2 / moments
    if not spread > 0:
        return math.nan, math.nan
    own = (workload.kv_products - workload.running * workload.kv_tokens / moments) / spread
    return own, (workload.kv_tokens - own * workload.running) / workload.samples


@dataclass(frozen=True, slots=True)
class Moment:
    """What a cache gives that keeps what lies idle for `at_s` seconds.

    share: how much it finds of what is found again by an endless cache; mean_s: of min(gap, at_s).
    """

    at_s: float
    share: float
    mean_s: float


EMPTIED = (Moment(0.0, 0.0, 0.0),)
"""A cache that keeps nothing."""


class Work(NamedTuple):
    """Seconds of engine steps: the fixed part of each, what prefill adds per call, and all that a call adds."""

    fixed_s: float
    prefill_s: float
    call_s: float


def work(step: StepTime, scales: tuple[float, ...], call: Call, moment: Moment) -> Work:
    """What a call costs where the cache gives `moment`; scales: learnt factors on the terms of the step time."""
    found = call.shared_tokens + (call.hit_tokens - call.shared_tokens) * moment.share
    prefill_s = scales[1] * step.per_prefill_token_s * (call.prompt_tokens - found)
    decode_s = scales[2] * step.per_sequence_s + scales[3] * step.per_kv_token_s * call.context_tokens
    return Work(scales[0] * step.fixed_s, prefill_s, prefill_s + call.output_tokens * decode_s)


def idle_tokens(call: Call, moment: Moment) -> float:
    """KV tokens per call/s that lie in a cache which keeps what idles for `moment`."""
    return call.left_tokens * (call.found_share * moment.mean_s + (1 - call.found_share) * moment.at_s)


def guessed_share(workload: Workload, call: Call) -> float:
    """How much of what is taken for the gaps is a guess (0-1)."""
    return _guess_blocks(call) / (_guess_blocks(call) + (sum(workload.gaps.weights) if told(workload) else 0.0))


def _guess_blocks(call: Call) -> float:
    return GUESS_SESSIONS * max(call.left_tokens / BLOCK_TOKENS, 1.0)


def reuse(workload: Workload, call: Call) -> tuple[Moment, ...]:
    """How soon what is cached is used again, in order of idle time: gaps less the time a call takes, and the guess."""
    if not workload.gaps.bounds_s or not told(workload):
        return _guessed()
    return _moments(workload.gaps, call.seconds, _guess_blocks(call))


@lru_cache(maxsize=1)
def _guessed() -> tuple[Moment, ...]:
    return _moments(Gaps(BOUNDS_S, (0.0,) * len(BOUNDS_S)), 0.0, 1.0)


def _moments(gaps: Gaps, busy_s: float, guess: float) -> tuple[Moment, ...]:
    times, shares, below = [0.0], [0.0], 0.0
    whole = sum(gaps.weights) + guess
    for bound, weight in zip(gaps.bounds_s, gaps.weights, strict=True):
        below += weight
        idle_s = bound - busy_s
        if idle_s <= 0:
            shares[0] = below / whole
        elif math.isfinite(bound):
            times.append(idle_s)
            shares.append((below + guess * _guess(idle_s)) / whole)
    # What is beyond the last bound is taken to come back within twice that time.
    return _refined((*times, 2 * max(times[-1], 1.0)), (*shares, 1.0))


def _guess(idle_s: float) -> float:
    return 0.5 * math.erfc(-math.log(idle_s / GUESS_MEDIAN_S) / (GUESS_SIGMA * math.sqrt(2)))


def _refined(times: tuple[float, ...], shares: tuple[float, ...]) -> tuple[Moment, ...]:
    """With a point in the middle of each piece: shares are linear between bounds, so that means are exact there."""
    last = Moment(times[0], shares[0], 0.0)
    moments = [last]
    for (t0, f0), (t1, f1) in pairwise(zip(times, shares, strict=True)):
        for at_s, share in ((0.5 * (t0 + t1), 0.5 * (f0 + f1)), (t1, f1)):
            mean_s = last.mean_s + (at_s - last.at_s) * (1 - (share + last.share) / 2)
            last = Moment(at_s, share, mean_s)
            moments.append(last)
    return tuple(moments)
