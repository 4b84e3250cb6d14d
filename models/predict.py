"""What if: where a service's pools would be under another allocation. The one place where that is computed.

An allocation (replicas, weights, admitted share) moves sessions; moved sessions are cold; cold calls take more work;
work sets batch and queue, these set latency, timeouts and retries, and retries are load again. Per replica, with the
symbols of `models.capacity` and lam calls/s arriving at it:

    t         the longest idle time for which  B*own + S + lam*left*m(t) <= KV cache  and  B <= max_num_seqs, with
              w = b_p*U(t) + O*(b_d + g*C),  T = a/(1 - lam*w),  B = lam*O*T:  the balance a warm replica is in
    moved     share of calls whose session is new to its replica: 1 - n/n' after growth, 1 - n'/n after loss or
              shrinking, 1 - lam_before/lam_after where weight was gained; the largest of these counts
    cold      c = moved*exp(-horizon/tau), tau the mean reuse gap: a session is warm again from its second call on;
              hits of sessions fall by that share
    TTFT      mean (a + b_p*U)/(1 - lam*w) with U of this call, percentile q of an exponential: -ln(1 - q) times that
    TPOT      T, mean inter-token latency
    timeouts  p = exp(-timeout/mean TTFT); attempts per call (1 - p^(k+1))/(1 - p) for k retries; lam is calls times
              attempts, to a fixed point. success = 1 - p^(k+1)
    good      success times 1 - exp(-TTFT SLO/mean TTFT), a mean that goes with the anchored percentile
    full      without any balance the replica serves the largest rate that has one; success is that share of the calls,
              good at most that, latency unknown: a queue that grows has no mean

Anchored: what is seen now is right, and the model says only by which factor it changes: TTFT and TPOT times after/now,
the share of misses likewise. Where nothing is seen, or now has no balance, the model's own numbers stand.

Worked (70e9 parameters in fp8 on 4 H100-SXM, L = 6000, O = 300, h = 0.9, no limit of memory): 24 calls/s on 6 replicas:
lam = 4, w = 118.9 ms, T = 13.21/(1 - 0.476) = 25.2 ms, B = 30.2; mean TTFT (13.21 + 26.2)/0.524 = 75 ms, p95 225 ms.
With 5 replicas lam = 4.8: T = 30.8 ms, TTFT 275 ms: a sixth less money, a fifth more latency.

Source: processor sharing (Kleinrock, 1976); retries as a geometric series: facts of metastable failures, Bronson et
al., HotOS 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from models import steptime, workload
from models.capacity import known_call
from models.types import Estimate, Load, Pool, Slo, StepTime, Unknown
from models.workload import Call, Moment

HALVINGS = 14
"""Of a piece between two idle times: what is left of it is smaller than what is known of the gaps."""

ROUNDS = 12
"""Of the fixed point of retries; with up to three of them it has settled by then, or the replica is full."""

SHARE_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class Seen:
    """What is measured now; None where it is not. TTFT and TPOT at the SLO's percentile; hits from 0 to 1."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    hit_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A pool of a service as it is: what is known of its engines, the calls/s that arrive, replicas that serve."""

    pool: Pool
    slo: Slo
    estimate: Estimate | None
    load: Load | Unknown
    replicas: int
    kv_tokens: float | None
    seen: Seen = Seen()


@dataclass(frozen=True, slots=True)
class Clients:
    """How callers behave: seconds until they give up on a first token, and how often they try again."""

    timeout_s: float = math.inf
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a part gets: replicas that serve, and its share (0-1) of the service's calls."""

    replicas: int
    weight: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """One place per part, in the parts' order; the share of calls that is admitted."""

    places: tuple[Place, ...]
    admitted_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A part under an allocation. calls_per_s: admitted, without retries; success_share: of these, not given up.

    ttft_s (at the SLO's percentile) and tpot_s are None where the replicas are full. good_share: calls whose first
    token is in time, of those admitted (at most, where full); usd_per_call: of a good one, None where there is none.
    utilisation: share of a replica's time that is not spare; cold_share: calls that find nothing of their session.
    """

    calls_per_s: float
    hit_ratio: float
    cold_share: float
    batch: float
    utilisation: float
    ttft_s: float | None
    tpot_s: float | None
    success_share: float
    good_share: float
    usd_per_h: float
    usd_per_call: float | None
    full: bool


def present(parts: tuple[Part, ...]) -> Allocation:
    """The allocation that is: replicas as they are, weights as the calls fall."""
    rates = [part.load.offered_calls_per_s if isinstance(part.load, Load) else 0.0 for part in parts]
    total = sum(rates)
    shares = [rate / total if total > 0 else 1 / len(parts) for rate in rates]
    return Allocation(tuple(Place(part.replicas, share) for part, share in zip(parts, shares, strict=True)))


def predict(
    parts: tuple[Part, ...], allocation: Allocation, clients: Clients, horizon_s: float
) -> tuple[Prediction | Unknown, ...]:
    """One prediction per part, `horizon_s` seconds after the allocation takes effect, or why there is none.

    ValueError where the allocation does not fit the parts: that is the caller's mistake, not the world's.
    """
    if len(allocation.places) != len(parts):
        raise ValueError(f"{len(parts)} parts, but {len(allocation.places)} places for them")
    loads = [part.load for part in parts if isinstance(part.load, Load)]
    total = sum(load.offered_calls_per_s for load in loads) * allocation.admitted_share
    whole = sum(max(place.weight, 0.0) for place in allocation.places)
    if not (math.isfinite(total) and total >= 0 and horizon_s >= 0):
        return (Unknown("the offered load is not a number of calls"),) * len(parts)
    answers: list[Prediction | Unknown] = []
    for part, place in zip(parts, allocation.places, strict=True):
        unknown = next((one.load for one in parts if isinstance(one.load, Unknown)), None)
        if unknown is not None or isinstance(part.load, Unknown):
            answers.append(Unknown(f"the load is unknown ({unknown.reason if unknown else ''})"))
            continue
        share = max(place.weight, 0.0) / whole if whole > 0 else 0.0
        answers.append(_predict(part, part.load, _Given(place.replicas, share * total, clients, horizon_s)))
    return tuple(answers)


@dataclass(frozen=True, slots=True)
class _Given:
    """What one part gets."""

    replicas: int
    calls_per_s: float
    clients: Clients
    horizon_s: float


def _predict(part: Part, load: Load, given: _Given) -> Prediction | Unknown:
    known = known_call(part.estimate, load)
    if isinstance(known, Unknown):
        return known
    if given.replicas < 1 and given.calls_per_s > 0:
        return Unknown(f"no replica of {part.pool.name} serves")
    if part.kv_tokens is not None and not part.kv_tokens > 0:
        return Unknown("the size of the KV cache is not a positive number")
    learnt, call = known
    times = workload.reuse(learnt.workload, call)
    kv = math.inf if part.kv_tokens is None else part.kv_tokens
    replica = _Replica(
        steptime.prior(part.pool), learnt.scales, call, times, kv, max(1.0, float(part.pool.max_num_seqs))
    )
    cold = _moved(part, load, given) * math.exp(-given.horizon_s / max(times[-1].mean_s, 1.0))
    now = _settled(replica, load.offered_calls_per_s / max(part.replicas, 1), 0.0, given.clients)
    after = _settled(replica, given.calls_per_s / max(given.replicas, 1), cold, given.clients)
    usd_per_h = given.replicas * part.pool.gpus_per_replica * part.pool.usd_per_gpu_h
    tail = -math.log(max(1 - part.slo.percentile / 100, SHARE_MIN))
    ttft_s = _anchored(now, after, (now.ttft_s * tail, after.ttft_s * tail), part.seen.ttft_s)
    good = after.success_share * (1.0 if ttft_s is None else _within(part.slo.ttft_s * tail, ttft_s))
    good_per_h = given.calls_per_s * good * 3600
    return Prediction(
        calls_per_s=given.calls_per_s,
        hit_ratio=_hits(now, after, part.seen.hit_ratio),
        cold_share=cold,
        batch=after.batch,
        utilisation=after.utilisation,
        ttft_s=ttft_s,
        tpot_s=_anchored(now, after, (now.tpot_s, after.tpot_s), part.seen.tpot_s),
        success_share=after.success_share,
        good_share=good,
        usd_per_h=usd_per_h,
        usd_per_call=usd_per_h / good_per_h if good_per_h > 0 else None,
        full=after.full,
    )


def _moved(part: Part, load: Load, given: _Given) -> float:
    """Share of the calls after whose sessions are new to their replica."""
    if part.replicas < 1 or given.replicas < 1:
        return 1.0
    gained = 1 - load.offered_calls_per_s / given.calls_per_s if given.calls_per_s > 0 else 0.0
    return max(1 - min(part.replicas, given.replicas) / max(part.replicas, given.replicas), gained, 0.0)


def _anchored(now: _State, after: _State, values: tuple[float, float], seen: float | None) -> float | None:
    if after.full:
        return None
    return values[1] if seen is None or now.full or not values[0] > 0 else seen * values[1] / values[0]


def _within(limit_s: float, mean_s: float) -> float:
    """Share of an exponential that is within a limit."""
    return 1 - math.exp(-limit_s / mean_s) if mean_s > 0 else 1.0


def _hits(now: _State, after: _State, seen: float | None) -> float:
    if seen is None or now.full or not now.misses > 0:
        return 1 - after.misses
    return min(max(1 - (1 - seen) * after.misses / now.misses, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class _State:
    """One replica in balance, or full."""

    misses: float
    batch: float
    utilisation: float
    ttft_s: float
    tpot_s: float
    success_share: float
    full: bool


@dataclass(frozen=True, slots=True)
class _Replica:
    step: StepTime
    scales: tuple[float, ...]
    call: Call
    times: tuple[Moment, ...]
    kv_tokens: float
    sequences: float

    def balance(self, rate: float, cold_share: float) -> Moment | None:
        """What the cache gives at a rate: the longest idle time that fits; None where none does."""
        longer = None
        for moment in reversed(self.times):
            if self._fits(rate, moment, cold_share):
                return moment if longer is None else self._between(rate, moment, longer, cold_share)
            longer = moment
        return None

    def _between(self, rate: float, fits: Moment, longer: Moment, cold_share: float) -> Moment:
        for _ in range(HALVINGS):
            middle = Moment(*((a + b) / 2 for a, b in zip(_parts(fits), _parts(longer), strict=True)))
            if self._fits(rate, middle, cold_share):
                fits = middle
            else:
                longer = middle
        return fits

    def _fits(self, rate: float, moment: Moment, cold_share: float) -> bool:
        fixed_s, _, work_s = self.work(moment, cold_share)
        free = 1 - rate * work_s
        if free <= 0:
            return False
        batch = rate * self.call.output_tokens * fixed_s / free
        room = max(self.kv_tokens - self.call.resident_tokens, self.call.own_tokens)
        idle = rate * workload.idle_tokens(self.call, moment)
        return batch <= self.sequences and batch * self.call.own_tokens + idle <= room

    def work(self, moment: Moment, cold_share: float) -> workload.Work:
        """What a call takes where so many of them find nothing of their session."""
        thinned = Moment(moment.at_s, moment.share * (1 - cold_share), moment.mean_s) if cold_share > 0 else moment
        return workload.work(self.step, self.scales, self.call, thinned)

    def state(self, rate: float, moment: Moment, cold_share: float, timeout_s: float) -> _State:
        """Latency and the rest in a balance; success_share: of attempts."""
        call = self.call
        fixed_s, prefill_s, work_s = self.work(moment, cold_share)
        free = 1 - rate * work_s
        found = call.shared_tokens + (call.hit_tokens - call.shared_tokens) * moment.share * (1 - cold_share)
        ttft_s, tpot_s = (fixed_s + prefill_s) / free, fixed_s / free
        return _State(
            misses=1 - found / call.prompt_tokens if call.prompt_tokens > 0 else 0.0,
            batch=rate * call.output_tokens * tpot_s,
            utilisation=rate * work_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            success_share=_within(timeout_s, ttft_s),
            full=False,
        )

    def largest(self, rate: float, cold_share: float) -> float:
        """The largest rate up to the given one that has a balance."""
        low, high = 0.0, rate
        for _ in range(2 * HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.balance(middle, cold_share) else (low, middle)
        return low


def _parts(moment: Moment) -> tuple[float, float, float]:
    return moment.at_s, moment.share, moment.mean_s


def _settled(replica: _Replica, calls_per_s: float, cold_share: float, clients: Clients) -> _State:
    """The replica at so many calls/s, their retries included."""
    rate, tries = calls_per_s, max(clients.retries, 0) + 1
    for _ in range(ROUNDS):
        moment = replica.balance(rate, cold_share)
        if moment is None:
            return _full(replica, calls_per_s, cold_share)
        state = replica.state(rate, moment, cold_share, clients.timeout_s)
        p = 1 - state.success_share
        again = calls_per_s * sum(p**attempt for attempt in range(tries))
        if again <= rate * (1 + 1e-6):
            break
        rate = again
    return replace(state, success_share=1 - p**tries)


def _full(replica: _Replica, calls_per_s: float, cold_share: float) -> _State:
    """More arrives than is served: so much of it is."""
    rate = replica.largest(calls_per_s, cold_share)
    moment = replica.balance(rate, cold_share) or replica.times[0]
    state = replica.state(rate, moment, cold_share, math.inf)
    return replace(state, success_share=rate / calls_per_s if calls_per_s > 0 else 0.0, utilisation=1.0, full=True)
