"""The signal catalogue: where each canonical signal comes from (controller.adapters.promql says how).

Verified: vLLM 0.32 and DCGM against captures, vLLM 0.9 to 0.33 against the renames read in its wheels. SGLang is
written from its published metric names (0.5.23) only and was never seen live. Sources: vLLM `v1/metrics/loggers.py`,
NVIDIA dcgm-exporter `etc/default-counters.csv`, Envoy cluster statistics, OpenTelemetry span metrics connector.
"""

from __future__ import annotations

from dataclasses import replace

from controller.adapters.promql import Entry, Fold, How, Source, promql
from controller.observations import Level, Signal

__all__ = [
    "DCGM",
    "ENGINES",
    "ENVOY",
    "Entry",
    "Fold",
    "GPU_LABELS",
    "How",
    "SGLANG",
    "Source",
    "TARGETS",
    "VLLM",
    "catalogue",
    "promql",
    "tasks",
]


def value(*metrics: str, fold: Fold = Fold.SUM, scale: float = 1.0) -> tuple[Source, ...]:
    """The newest value of a gauge under any of its names."""
    return tuple(Source(metric, How.VALUE, fold, scale=scale) for metric in metrics)


def rate(*metrics: str, fold: Fold = Fold.SUM) -> tuple[Source, ...]:
    """The per-second increase of a counter under any of its names."""
    return tuple(Source(metric, How.RATE, fold) for metric in metrics)


def buckets(*families: str) -> tuple[Source, ...]:
    """The per-second increase of a histogram's buckets under any of its names."""
    return tuple(Source(family, How.BUCKETS) for family in families)


VLLM_FIRST = "vllm:time_to_first_token_seconds"
VLLM_ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")

VLLM: tuple[Entry, ...] = (
    Entry(
        Signal.HEARTBEAT_AGE_S,
        Level.REPLICA,
        (Source("vllm:num_requests_running", How.AGE, Fold.MAX),),
        essential=True,
        about="age of the last scrape",
    ),
    Entry(Signal.RUNNING, Level.REPLICA, value("vllm:num_requests_running"), True, "running requests"),
    Entry(Signal.WAITING, Level.REPLICA, value("vllm:num_requests_waiting"), True, "waiting requests"),
    Entry(
        Signal.WAITING_GROWTH_PER_S,
        Level.REPLICA,
        (Source("vllm:num_requests_waiting", How.DELTA),),
        essential=True,
        about="growth of the queue",
    ),
    Entry(
        Signal.KV_USAGE_RATIO,
        Level.REPLICA,
        value("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", fold=Fold.MAX),
        essential=True,
        about="KV-cache usage (a fraction, in spite of its name)",
    ),
    Entry(
        Signal.KV_BLOCKS,
        Level.REPLICA,
        (Source("vllm:cache_config_info", How.VALUE, Fold.MAX, keep=("block_size", "num_gpu_blocks")),),
        essential=False,
        about="size of the KV cache",
    ),
    Entry(
        Signal.AWAKE,
        Level.REPLICA,
        (Source("vllm:engine_sleep_state", How.VALUE, Fold.MIN, where=(("sleep_state", "awake"),)),),
        essential=False,
        about="sleep state (vLLM 0.11.2 and newer)",
    ),
    Entry(
        Signal.STEPS_PER_S,
        Level.REPLICA,
        rate("vllm:iteration_tokens_total_count"),
        essential=True,
        about="engine steps: the counter that proves the gauges alive",
    ),
    Entry(
        Signal.FIRST_TOKENS_PER_S,
        Level.REPLICA,
        rate(f"{VLLM_FIRST}_count"),
        essential=True,
        about="calls that got their first token",
    ),
    Entry(
        Signal.FINISHED_PER_S,
        Level.REPLICA,
        (Source("vllm:request_success_total", How.RATE, where_not=(("finished_reason", "error"),)),),
        essential=True,
        about="finished calls",
    ),
    Entry(
        Signal.FAILED_PER_S,
        Level.REPLICA,
        (Source("vllm:request_success_total", How.RATE, where=(("finished_reason", "error"),)),),
        essential=False,
        about="calls that ended in an error (vLLM 0.13 and newer)",
    ),
    Entry(
        Signal.REJECTED_PER_S,
        Level.REPLICA,
        rate("vllm:admission_rejections_total"),
        essential=False,
        about="calls rejected by a full queue (vLLM 0.32 and newer)",
    ),
    Entry(
        Signal.PROMPT_TOKENS_PER_S,
        Level.REPLICA,
        rate("vllm:prompt_tokens_total"),
        essential=True,
        about="prompt tokens, cached ones included",
    ),
    Entry(
        Signal.GENERATION_TOKENS_PER_S,
        Level.REPLICA,
        rate("vllm:generation_tokens_total"),
        essential=True,
        about="output tokens",
    ),
    Entry(
        Signal.PREFIX_QUERIES_PER_S,
        Level.REPLICA,
        rate("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        essential=False,
        about="tokens looked up in the prefix cache",
    ),
    Entry(
        Signal.PREFIX_HITS_PER_S,
        Level.REPLICA,
        rate("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        essential=False,
        about="tokens found in the prefix cache",
    ),
    Entry(
        Signal.PREEMPTIONS_PER_S,
        Level.REPLICA,
        rate("vllm:num_preemptions_total"),
        essential=True,
        about="preemptions: the KV cache is too small",
    ),
    Entry(Signal.TTFT_BUCKETS_PER_S, Level.REPLICA, buckets(VLLM_FIRST), True, "time to first token"),
    Entry(Signal.ITL_BUCKETS_PER_S, Level.REPLICA, buckets(*VLLM_ITL), True, "inter-token latency"),
    Entry(
        Signal.ITL_SUM_PER_S,
        Level.REPLICA,
        rate(*(f"{name}_sum" for name in VLLM_ITL)),
        essential=True,
        about="inter-token latency, sum",
    ),
    Entry(
        Signal.ITL_COUNT_PER_S,
        Level.REPLICA,
        rate(*(f"{name}_count" for name in VLLM_ITL)),
        essential=True,
        about="inter-token latency, count",
    ),
    Entry(
        Signal.REUSE_GAP_BUCKETS_PER_S,
        Level.REPLICA,
        buckets("vllm:kv_block_reuse_gap_seconds"),
        essential=False,
        about="time between uses of cached blocks (--kv-cache-metrics): how much load the cache can take",
    ),
)

SGLANG: tuple[Entry, ...] = (
    Entry(
        Signal.HEARTBEAT_AGE_S,
        Level.REPLICA,
        (Source("sglang:num_running_reqs", How.AGE, Fold.MAX),),
        essential=True,
        about="age of the last scrape",
    ),
    Entry(Signal.RUNNING, Level.REPLICA, value("sglang:num_running_reqs"), True, "running requests"),
    Entry(Signal.WAITING, Level.REPLICA, value("sglang:num_queue_reqs"), True, "waiting requests"),
    Entry(
        Signal.WAITING_GROWTH_PER_S,
        Level.REPLICA,
        (Source("sglang:num_queue_reqs", How.DELTA),),
        essential=True,
        about="growth of the queue",
    ),
    Entry(
        Signal.KV_USAGE_RATIO,
        Level.REPLICA,
        value("sglang:token_usage", fold=Fold.MAX),
        essential=True,
        about="KV-cache usage",
    ),
    # SGLang publishes no step counter; the inter-token observations advance with every decode step.
    Entry(
        Signal.STEPS_PER_S,
        Level.REPLICA,
        rate("sglang:inter_token_latency_seconds_count"),
        essential=True,
        about="inter-token observations: the counter that proves the gauges alive",
    ),
    Entry(
        Signal.FIRST_TOKENS_PER_S,
        Level.REPLICA,
        rate("sglang:time_to_first_token_seconds_count"),
        essential=True,
        about="calls that got their first token",
    ),
    Entry(Signal.FINISHED_PER_S, Level.REPLICA, rate("sglang:num_requests_total"), True, "finished calls"),
    Entry(
        Signal.FAILED_PER_S,
        Level.REPLICA,
        rate("sglang:num_aborted_requests_total"),
        essential=False,
        about="aborted calls",
    ),
    Entry(
        Signal.PROMPT_TOKENS_PER_S,
        Level.REPLICA,
        rate("sglang:prompt_tokens_total"),
        essential=True,
        about="prompt tokens, cached ones included",
    ),
    Entry(
        Signal.GENERATION_TOKENS_PER_S,
        Level.REPLICA,
        rate("sglang:generation_tokens_total"),
        essential=True,
        about="output tokens",
    ),
    Entry(
        Signal.PREFIX_QUERIES_PER_S,
        Level.REPLICA,
        rate("sglang:prompt_tokens_total"),
        essential=False,
        about="tokens looked up in the prefix cache",
    ),
    Entry(
        Signal.PREFIX_HITS_PER_S,
        Level.REPLICA,
        rate("sglang:cached_tokens_total"),
        essential=False,
        about="tokens found in the prefix cache",
    ),
    Entry(
        Signal.TTFT_BUCKETS_PER_S,
        Level.REPLICA,
        buckets("sglang:time_to_first_token_seconds"),
        essential=True,
        about="time to first token",
    ),
    Entry(
        Signal.ITL_BUCKETS_PER_S,
        Level.REPLICA,
        buckets("sglang:inter_token_latency_seconds"),
        essential=True,
        about="inter-token latency",
    ),
    Entry(
        Signal.ITL_SUM_PER_S,
        Level.REPLICA,
        rate("sglang:inter_token_latency_seconds_sum"),
        essential=True,
        about="inter-token latency, sum",
    ),
    Entry(
        Signal.ITL_COUNT_PER_S,
        Level.REPLICA,
        rate("sglang:inter_token_latency_seconds_count"),
        essential=True,
        about="inter-token latency, count",
    ),
)

TARGETS: tuple[Entry, ...] = (
    Entry(Signal.UP, Level.REPLICA, value("up", fold=Fold.MAX), False, "whether the last scrape succeeded"),
    # Not with several API servers in one process group: those publish no process metrics.
    Entry(
        Signal.OPEN_FILES_GROWTH_PER_S,
        Level.REPLICA,
        (Source("process_open_fds", How.EARLIER),),
        essential=False,
        about="connections opened in the older half of the window: unanswered where no engine step followed",
    ),
)

MIB = 1024.0 * 1024.0
DCGM: tuple[Entry, ...] = (
    Entry(
        Signal.GPU_HEARTBEAT_AGE_S,
        Level.GPU,
        (
            Source("DCGM_FI_DEV_FB_USED", How.AGE, Fold.MAX),
            Source("DCGM_FI_PROF_GR_ENGINE_ACTIVE", How.AGE, Fold.MAX),
        ),
        essential=False,
        about="age of the last scrape (the value itself is up to 30 s older)",
    ),
    Entry(
        Signal.GPU_ACTIVE_RATIO,
        Level.GPU,
        (
            Source("DCGM_FI_PROF_GR_ENGINE_ACTIVE", How.VALUE, Fold.MAX),
            Source("DCGM_FI_DEV_GPU_UTIL", How.VALUE, Fold.MAX, scale=0.01),
        ),
        essential=False,
        about="share of time with a kernel running: not a capacity signal",
    ),
    Entry(
        Signal.GPU_TENSOR_RATIO,
        Level.GPU,
        value("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", fold=Fold.MAX),
        essential=False,
        about="tensor pipe activity: high in prefill",
    ),
    Entry(
        Signal.GPU_DRAM_RATIO,
        Level.GPU,
        value("DCGM_FI_PROF_DRAM_ACTIVE", fold=Fold.MAX),
        essential=False,
        about="memory activity: high in decode",
    ),
    Entry(
        Signal.GPU_MEMORY_USED_BYTES,
        Level.GPU,
        value("DCGM_FI_DEV_FB_USED", fold=Fold.MAX, scale=MIB),
        essential=False,
        about="HBM in use: flat, vLLM allocates ahead",
    ),
    Entry(
        Signal.GPU_MEMORY_FREE_BYTES,
        Level.GPU,
        value("DCGM_FI_DEV_FB_FREE", fold=Fold.MAX, scale=MIB),
        essential=False,
        about="HBM that is free",
    ),
    Entry(
        Signal.GPU_LAST_XID,
        Level.GPU,
        value("DCGM_FI_DEV_XID_ERRORS", fold=Fold.MAX),
        essential=False,
        about="code of the last XID error; it does not clear by itself",
    ),
)

ENVOY: tuple[Entry, ...] = (
    Entry(
        Signal.GATEWAY_CALLS_PER_S,
        Level.GATEWAY,
        rate("envoy_cluster_upstream_rq_total"),
        essential=True,
        about="calls sent to the engines, the gateway's own retries included",
    ),
    Entry(
        Signal.GATEWAY_RETRIES_PER_S,
        Level.GATEWAY,
        rate("envoy_cluster_upstream_rq_retry"),
        essential=False,
        about="the gateway's own retries",
    ),
    Entry(
        Signal.GATEWAY_TIMEOUTS_PER_S,
        Level.GATEWAY,
        rate("envoy_cluster_upstream_rq_timeout"),
        essential=False,
        about="timeouts",
    ),
    Entry(
        Signal.GATEWAY_OVERFLOWS_PER_S,
        Level.GATEWAY,
        rate("envoy_cluster_upstream_rq_pending_overflow"),
        essential=False,
        about="calls refused by the circuit breaker",
    ),
    Entry(
        Signal.GATEWAY_ERRORS_PER_S,
        Level.GATEWAY,
        (Source("envoy_cluster_upstream_rq_xx", How.RATE, where=(("envoy_response_code_class", "5"),)),),
        essential=False,
        about="answers of class 5xx",
    ),
)


def tasks(metric: str, error: tuple[tuple[str, str], ...]) -> tuple[Entry, ...]:
    """Task signals from a counter of finished spans, of which those with the labels `error` failed."""
    return (
        Entry(
            Signal.TASKS_FINISHED_PER_S,
            Level.TASKS,
            (Source(metric, How.RATE),),
            essential=True,
            about="finished tasks",
        ),
        Entry(
            Signal.TASKS_FAILED_PER_S,
            Level.TASKS,
            (Source(metric, How.RATE, where=error),),
            essential=False,
            about="failed tasks",
        ),
    )


ENGINES: dict[str, tuple[Entry, ...]] = {"vllm": VLLM, "sglang": SGLANG}

RUNNING_SERIES = "vllm:num_requests_running or sglang:num_running_reqs"
"""PromQL of one series per engine (or data-parallel rank) that is there, with all its labels."""

GPU_SERIES = "DCGM_FI_DEV_FB_USED or DCGM_FI_PROF_GR_ENGINE_ACTIVE"
"""PromQL of one series per GPU that is there, with all its labels."""

GPU_LABELS = (
    "Hostname",
    "hostname",
    "gpu",
    "UUID",
    "GPU_I_ID",
    "exported_pod",
    "exported_namespace",
    "pod",
    "namespace",
    "pod_name",
    "pod_namespace",
)


def catalogue(engines: tuple[str, ...], *, gateway: bool, task_entries: tuple[Entry, ...] = ()) -> tuple[Entry, ...]:
    """One entry per signal for a fleet of the given engines: its alternatives are those of all its engines in turn."""
    merged: dict[Signal, Entry] = {}
    used = [entry for engine in engines for entry in ENGINES[engine]]
    for entry in [*TARGETS, *used, *DCGM, *(ENVOY if gateway else ()), *task_entries]:
        known = merged.get(entry.signal)
        merged[entry.signal] = entry if known is None else replace(known, sources=known.sources + entry.sources)
    return tuple(merged.values())
