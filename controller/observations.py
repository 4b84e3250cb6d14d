"""What is observed: samples as telemetry has them, and the readings of replicas, pools and services made of them.

Four kinds of nothing. A reading is `Known` (zero is a value like any other) or a `Hole` that says which kind of
nothing it is: ABSENT (no such series, a failed query, a dead replica), NAN (the series exists and its value is
undefined: a latency without calls, a ratio without a denominator) or STALE (a value older than its limit, or one
that can't be trusted because the engine that published it has stopped). No stage may turn one kind into another,
and none may turn a hole into a number.

What became of an earlier move is observed like everything else: its `Outcome` is part of the next `Observation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from models.types import NO_GAPS, Gaps

Labels = tuple[tuple[str, str], ...]
"""Label pairs, sorted by name, without empty values (Prometheus holds an empty label to be an absent one)."""


class Level(StrEnum):
    """What one sample of a signal is about; it decides which labels name it."""

    REPLICA = "replica"
    GPU = "gpu"
    GATEWAY = "gateway"
    TASKS = "tasks"


class Signal(StrEnum):
    """The canonical signals. Units are in the names; controller.adapters.signals says where each comes from."""

    UP = "up"
    HEARTBEAT_AGE_S = "heartbeat_age_s"
    RUNNING = "requests_running"
    WAITING = "requests_waiting"
    WAITING_GROWTH_PER_S = "requests_waiting_growth_per_s"
    KV_USAGE_RATIO = "kv_cache_usage_ratio"
    KV_BLOCKS = "kv_cache_blocks"
    AWAKE = "engine_awake"
    STEPS_PER_S = "engine_steps_per_s"
    OPEN_FILES_GROWTH_PER_S = "open_files_growth_per_s"
    FIRST_TOKENS_PER_S = "first_tokens_per_s"
    FINISHED_PER_S = "calls_finished_per_s"
    FAILED_PER_S = "calls_failed_per_s"
    REJECTED_PER_S = "calls_rejected_per_s"
    PROMPT_TOKENS_PER_S = "prompt_tokens_per_s"
    GENERATION_TOKENS_PER_S = "generation_tokens_per_s"
    PREFIX_QUERIES_PER_S = "prefix_cache_query_tokens_per_s"
    PREFIX_HITS_PER_S = "prefix_cache_hit_tokens_per_s"
    PREEMPTIONS_PER_S = "preemptions_per_s"
    TTFT_BUCKETS_PER_S = "ttft_buckets_per_s"
    ITL_BUCKETS_PER_S = "itl_buckets_per_s"
    ITL_SUM_PER_S = "itl_sum_s_per_s"
    ITL_COUNT_PER_S = "itl_count_per_s"
    REUSE_GAP_BUCKETS_PER_S = "kv_block_reuse_gap_buckets_per_s"
    GPU_ACTIVE_RATIO = "gpu_active_ratio"
    GPU_TENSOR_RATIO = "gpu_tensor_active_ratio"
    GPU_DRAM_RATIO = "gpu_dram_active_ratio"
    GPU_MEMORY_USED_BYTES = "gpu_memory_used_bytes"
    GPU_MEMORY_FREE_BYTES = "gpu_memory_free_bytes"
    GPU_LAST_XID = "gpu_last_xid"
    GPU_HEARTBEAT_AGE_S = "gpu_heartbeat_age_s"
    GATEWAY_CALLS_PER_S = "gateway_calls_per_s"
    GATEWAY_RETRIES_PER_S = "gateway_retries_per_s"
    GATEWAY_TIMEOUTS_PER_S = "gateway_timeouts_per_s"
    GATEWAY_OVERFLOWS_PER_S = "gateway_overflows_per_s"
    GATEWAY_ERRORS_PER_S = "gateway_errors_per_s"
    TASKS_FINISHED_PER_S = "tasks_finished_per_s"
    TASKS_FAILED_PER_S = "tasks_failed_per_s"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one canonical signal, as a source gave it. `value` may be NaN or infinite: observe judges it.

    Samples of *_BUCKETS_PER_S carry the bucket's upper bound in the label `le`, cumulative as Prometheus has them;
    a sample of KV_BLOCKS carries its numbers in the labels `block_size` and `num_gpu_blocks`.
    """

    signal: Signal
    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class SourceHole:
    """A source that did not answer as it should: a failed or partial query, a broken scrape, duplicate series."""

    source: str
    detail: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a telemetry source said for one instant; a signal named in `failed` was asked for and not answered."""

    samples: tuple[Sample, ...]
    holes: tuple[SourceHole, ...] = ()
    failed: tuple[Signal, ...] = ()


class Nothing(StrEnum):
    """The three kinds of nothing that are not a zero."""

    ABSENT = "absent"
    NAN = "nan"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Known:
    """A value and its age in seconds at the time of the observation."""

    value: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Hole:
    """No value, which kind of nothing it is, and why, as a clause."""

    kind: Nothing
    detail: str


Reading = Known | Hole


class ReplicaState(StrEnum):
    """What telemetry says of one replica. Only SERVING replicas carry load; DOWN and BLIND ones are missing data."""

    SERVING = "serving"
    ASLEEP = "asleep"
    HUNG = "hung"
    DOWN = "down"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class ReplicaObservation:
    """One engine. `detail` says why the state is not SERVING."""

    name: str
    state: ReplicaState
    detail: str
    running: Reading
    waiting: Reading
    kv_usage_ratio: Reading
    steps_per_s: Reading
    first_tokens_per_s: Reading
    generation_tokens_per_s: Reading
    itl_mean_s: Reading
    prompt_tokens_per_s: Reading = Hole(Nothing.ABSENT, "it was not recorded")


@dataclass(frozen=True, slots=True)
class GpuObservation:
    """One GPU (or MIG instance) mapped to a replica. DCGM values are up to 45 s old when they are fresh."""

    name: str
    replica: str
    active_ratio: Reading
    tensor_ratio: Reading
    dram_ratio: Reading
    memory_used_bytes: Reading
    memory_free_bytes: Reading
    last_xid: Reading


@dataclass(frozen=True, slots=True)
class PoolFleet:
    """What the cluster says of a pool's replicas; holes where no cluster is read."""

    pool: str
    wanted: Reading
    ready: Reading
    starting: Reading
    unschedulable: Reading
    draining: Reading


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """One pool over the observation window. Rates are sums over its serving replicas, ratios are of sums.

    offered = first tokens + rejections + growth of the queue (never below zero); ttft_s and itl_s are at the
    service's percentile, ttft_good_ratio is the share of first tokens within the service's TTFT; kv_usage_ratio is the
    largest of the replicas', kv_capacity_tokens the smallest. reuse_gaps: evicted KV blocks per second of a replica by
    the seconds between their last uses; empty where engines do not say (vLLM without --kv-cache-metrics).
    """

    name: str
    replicas: tuple[ReplicaObservation, ...]
    gpus: tuple[GpuObservation, ...]
    fleet: PoolFleet
    offered_calls_per_s: Reading
    served_calls_per_s: Reading
    finished_calls_per_s: Reading
    failed_calls_per_s: Reading
    rejected_calls_per_s: Reading
    running: Reading
    waiting: Reading
    prompt_tokens_per_s: Reading
    computed_prompt_tokens_per_s: Reading
    generation_tokens_per_s: Reading
    hit_ratio: Reading
    preemptions_per_s: Reading
    ttft_s: Reading
    ttft_good_ratio: Reading
    itl_s: Reading
    itl_mean_s: Reading
    kv_usage_ratio: Reading
    kv_capacity_tokens: Reading
    reuse_gaps: Gaps = NO_GAPS

    def count(self, state: ReplicaState) -> int:
        """How many replicas are in the given state."""
        return sum(replica.state is state for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class ServiceObservation:
    """What gateway and task metrics say of a service; holes where the policy names no such source."""

    name: str
    gateway_calls_per_s: Reading
    gateway_retries_per_s: Reading
    gateway_timeouts_per_s: Reading
    gateway_overflows_per_s: Reading
    gateway_errors_per_s: Reading
    tasks_finished_per_s: Reading
    tasks_failed_per_s: Reading


class Status(StrEnum):
    """How an action ended. UNKNOWN may have happened: it stays in flight, neither repeated nor cancelled."""

    DRY_RUN = "dry_run"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the actions of one move. `command` is what was done, or what a human would type."""

    move_id: str
    status: Status
    at_s: float
    detail: str
    command: str
    undo: str


@dataclass(frozen=True, slots=True)
class Observation:
    """The world at `now_s` (Unix seconds), as far as it is known; outcomes are those of the tick before."""

    now_s: float
    window_s: float
    pools: tuple[PoolObservation, ...]
    services: tuple[ServiceObservation, ...]
    holes: tuple[SourceHole, ...]
    outcomes: tuple[Outcome, ...] = ()
