"""The nouns of the mathematics. Every quantity carries its unit in its name.

A stage that does not know says so with `Unknown(reason)`; it never returns a zero, a NaN or an exception instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Unknown:
    """A stage's failure to know, as a value: the reason is a clause that completes "unknown, because ..."."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A 90 % interval with its central value: low <= mid <= high."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class Model:
    """What one replica serves.

    parameters: active parameters per token; bytes_per_parameter: 2 for bf16, 1 for fp8, 0.5 for int4;
    kv_bytes_per_token: KV-cache bytes of one token over all layers.
    """

    name: str
    parameters: float
    bytes_per_parameter: float
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator: memory in GiB, memory bandwidth in GB/s, dense FLOP/s (in 1e12) at the pool's precision."""

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    dense_tflops: float


@dataclass(frozen=True, slots=True)
class Pool:
    """A homogeneous set of replicas, as the mathematics sees it. gpu and model are None where nobody told us.

    max_num_seqs: how many sequences an engine decodes together at most; 256 is what vLLM usually starts with.
    """

    name: str
    service: str
    gpu_type: str
    gpus_per_replica: int
    gpu: Gpu | None
    model: Model | None
    usd_per_gpu_h: float
    replicas_min: int
    replicas_max: int
    cold_start_s: float
    survive_replica: bool
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits at a percentile (0-100) of calls, and the share of tasks that must succeed."""

    ttft_s: float
    tpot_s: float
    percentile: float
    task_success: float


@dataclass(frozen=True, slots=True)
class Barycentric:
    """Shares of the three corners of the triangle: non-negative, sum 1."""

    latency: float
    throughput: float
    cost: float


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives at a pool, and what an average call is made of.

    offered_calls_per_s counts what was shed, not retries; hit_ratio is the token-weighted prefix hit rate (0-1).
    """

    offered_calls_per_s: float
    prompt_tokens_per_call: float
    output_tokens_per_call: float
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Held:
    """What one replica holds and serves: requests running, KV tokens in use (0 where unknown), rates of the window."""

    running: float
    kv_tokens: float
    calls_per_s: float
    prompt_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """A histogram of seconds between uses of a cached block: upper bounds (the last may be inf), weight in each."""

    bounds_s: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


NO_GAPS = Gaps()


@dataclass(frozen=True, slots=True)
class Steps:
    """What the engines of a pool did over one window, averaged over its stepping replicas.

    batch: sequences decoding together, a mean over time; itl_s: mean inter-token latency; prefill_tokens_per_s:
    computed prompt tokens per second of one replica. window_s: what the rates are means over; since_s: how much of it
    is new. held: one entry per replica; gaps: blocks evicted per second, by the gap between their last two uses.
    """

    batch: float
    itl_s: float
    prefill_tokens_per_s: float
    window_s: float = 60.0
    since_s: float = 15.0
    held: tuple[Held, ...] = ()
    gaps: Gaps = NO_GAPS


@dataclass(frozen=True, slots=True)
class Workload:
    """Decayed sums over a pool's recent calls, per replica (see `models.workload`). All zero where nothing was seen.

    seconds: time they span; calls, prompt_tokens, hit_tokens, output_tokens; token_seconds: output tokens times the
    seconds between them; smoothed: each replica's prompt tokens/s over minutes; spread_seconds, squares: time, and
    squared relative deviations of the smoothed rates, times calls. samples, running, running_squares, kv_tokens,
    kv_products: sums over moments with running requests, of 1, r, r*r, K and r*K for K KV tokens in use by r requests.
    """

    seconds: float = 0.0
    calls: float = 0.0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    output_tokens: float = 0.0
    token_seconds: float = 0.0
    smoothed: tuple[float, ...] = ()
    spread_seconds: float = 0.0
    squares: float = 0.0
    samples: float = 0.0
    running: float = 0.0
    running_squares: float = 0.0
    kv_tokens: float = 0.0
    kv_products: float = 0.0
    gaps: Gaps = NO_GAPS


NO_WORKLOAD = Workload()


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a pool's engines and of its calls.

    scales: mean factors on the four terms of the prior step time (see `StepTime`, in its order), and covariance:
    theirs, row by row (16 numbers). largest_batch: the largest batch that ever taught something (knowledge beyond it
    is extrapolation); observations: accepted windows; workload: what calls are made of.
    """

    scales: tuple[float, ...]
    covariance: tuple[float, ...]
    largest_batch: float
    observations: int
    workload: Workload = NO_WORKLOAD


@dataclass(frozen=True, slots=True)
class StepTime:
    """T = fixed + per_prefill_token*x_p + per_sequence*x_d + per_kv_token*K: what one engine step takes, in seconds.

    x_p: prompt tokens computed in the step; x_d: sequences that decode; K: resident KV tokens that they read.
    """

    fixed_s: float
    per_prefill_token_s: float
    per_sequence_s: float
    per_kv_token_s: float


class Limit(StrEnum):
    """What bounds a replica's sustainable rate."""

    PREFILL_COMPUTE = "prefill compute"
    DECODE_BANDWIDTH = "decode bandwidth"
    KV_MEMORY = "KV memory"
    BATCH_SIZE = "batch size"
    QUEUEING = "queueing"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Calls/s that one replica sustains inside its SLOs, warm and with the caches lost, and what limits it."""

    warm_calls_per_s: Interval
    cold_calls_per_s: Interval
    limit: Limit


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What a lone call meets on an idle, awake replica: seconds to its first token, and per token after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Quantile:
    """One quantile of a forecast: level in (0, 1), value in the series' unit."""

    level: float
    value: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Offered calls/s at one horizon; quantiles ascend in level and value."""

    horizon_s: float
    quantiles: tuple[Quantile, ...]

    def at_least(self, level: float) -> Quantile:
        """The lowest quantile whose level is at least `level`; the highest one where there is none."""
        return next((q for q in self.quantiles if q.level >= level), self.quantiles[-1])


@dataclass(frozen=True, slots=True)
class Bin:
    """One observed bin of a load history: the time of its end in seconds and the offered calls/s in it."""

    at_s: float
    calls_per_s: float


@dataclass(frozen=True, slots=True)
class Margin:
    """Cascade margin of one failure domain: 1 - rho_cold/rho*; negative means vulnerable, not doomed."""

    domain: str
    lost_share: float
    cold_load_ratio: float
    margin: float


@dataclass(frozen=True, slots=True)
class Performance:
    """What a pool achieves against the best it could; None where unknown.

    ttft_s and tpot_s are at the percentile of the SLO; good_share is the share (0-1) of what was offered that ended
    well inside the SLO; usd_per_call is the price of a successful call now, best_usd_per_call the lowest attainable.
    """

    slo: Slo
    ttft_s: float | None = None
    tpot_s: float | None = None
    unloaded_ttft_s: float | None = None
    unloaded_tpot_s: float | None = None
    good_share: float | None = None
    usd_per_call: float | None = None
    best_usd_per_call: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pool stands on the triangle: scores in [0, 1] (None where unknown), position, magnitude."""

    latency_score: float | None
    throughput_score: float | None
    cost_score: float | None
    position: Barycentric | None
    magnitude: float | None


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the plan needs to know of one pool.

    replicas: how many serve now; starting: how many are ordered and not yet serving (they count once, for
    scale-out only); demand: the forecast at the end of the lead time.
    """

    pool: Pool
    replicas: int
    starting: int
    demand: Forecast | Unknown
    capacity: Capacity | Unknown


@dataclass(frozen=True, slots=True)
class Target:
    """The planned number of replicas of one pool and the constraint that fixed it."""

    pool: str
    replicas: int
    raw_replicas: float
    theta: float
    demand_calls_per_s: float
    binding: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One entry per situation, in the same order: a target, or why there is none."""

    targets: tuple[Target | Unknown, ...]
