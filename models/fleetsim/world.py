"""The plant's memory: flat arrays that compiled code reads and writes, allocated once, so that memory stays flat.

Every entity is a row of a structured array and is named by its index; -1 is "none". Rows of calls, tasks and chains are
taken from free lists and given back. Counters are what a real engine or gateway counts; gauges (`shown_*`) are written
only when an engine steps, as vLLM's are.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Replica states. Only READY serves; DRAINING finishes what it has; the starting ones hold their GPUs.
GONE: Final = 0
UNSCHEDULABLE: Final = 1
SCHEDULING: Final = 2
PULLING: Final = 3
LOADING: Final = 4
COMPILING: Final = 5
READY: Final = 6
DRAINING: Final = 7
ASLEEP: Final = 8
WAKING: Final = 9

# Call states.
FREE: Final = 0
WAITING: Final = 1
RUNNING: Final = 2
ARRIVING: Final = 3  # in its replica's API server, not yet in the engine's queue

# Task states. A failed task whose user will begin anew keeps its row; a warm-up is the controller's own request.
NO_TASK: Final = 0
LIVE: Final = 1
TO_BEGIN_ANEW: Final = 2
WARM_UP: Final = 3

# Stages and attempts, as the gateway can tell them apart by headers.
NEW: Final = 0
CONTINUING: Final = 1
FIRST: Final = 0
RETRY: Final = 1

# Events.
STEP_ENDS: Final = 0
TASK_ARRIVES: Final = 1
CLIENT_SENDS: Final = 2
TTFT_TIMEOUT: Final = 3
TOTAL_TIMEOUT: Final = 4
LIFE: Final = 5
FRONTEND_ENDS: Final = 6

TTFT_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

RESIDENCY_BOUNDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1200.0, 1800.0,
)  # fmt: skip

POOL = np.dtype(
    [
        ("service", "i4"),
        ("gpus", "i4"),
        ("max_seqs", "i4"),
        ("token_budget", "i4"),
        ("max_queued", "i4"),
        ("block_tokens", "i4"),
        ("kv_blocks", "i8"),
        ("by_priority", "i4"),
        ("max_parallel", "i4"),
        ("active", "i4"),
        ("flop_per_token", "f8"),
        ("flop_per_pair", "f8"),
        ("flop_per_s", "f8"),
        ("weight_bytes", "f8"),
        ("kv_bytes", "f8"),
        ("bytes_per_s", "f8"),
        ("overhead_s", "f8"),
        ("per_seq_s", "f8"),
        ("frontend_s", "f8"),
        ("eager", "i4"),
        ("noise", "f8"),
        ("weight", "f8"),
    ]
)

REPLICA = np.dtype(
    [
        ("pool", "i4"),
        ("state", "i4"),
        ("life", "i8"),
        ("stepping", "i4"),
        ("mark", "i8"),
        ("jump", "i4"),  # steps of the event under way that are still to be applied
        ("settled", "i4"),  # those that are applied
        ("step_s", "f8"),
        ("running", "i4"),
        ("waiting", "i4"),
        ("arriving", "i4"),  # calls in its API server
        ("frontend_free_s", "f8"),
        ("step_began_s", "f8"),
        ("slow", "f8"),
        ("kv_used", "i8"),
        ("kv_idle", "i8"),
        ("oldest", "i4"),
        ("newest", "i4"),
        ("shown_running", "f8"),
        ("shown_waiting", "f8"),
        ("shown_kv", "f8"),
        ("started_s", "f8"),  # its pod was made
        ("process_s", "f8"),  # its process began: counters count from here
        ("born", "i8"),  # the number of its pod
        ("restarts", "i8"),
        ("prompt_tokens", "f8"),
        ("computed_tokens", "f8"),
        ("generated_tokens", "f8"),
        ("prefix_queries", "f8"),
        ("prefix_hits", "f8"),
        ("preemptions", "f8"),
        ("steps", "f8"),
        ("step_tokens", "f8"),
        ("prefill_tokens", "f8"),
        ("stopped", "f8"),
        ("rejected", "f8"),
        ("ttft_sum", "f8"),
        ("itl_sum", "f8"),
        ("e2e_sum", "f8"),
        ("queue_sum", "f8"),
        ("reuse_sum", "f8"),
        ("busy_s", "f8"),
        ("held_s", "f8"),
        ("held_since_s", "f8"),
    ]
)

CALL = np.dtype(
    [
        ("state", "i4"),
        ("serial", "i8"),
        ("task", "i4"),
        ("replica", "i4"),
        ("prompt", "i4"),
        ("output", "i4"),
        ("computed", "i4"),
        ("generated", "i4"),
        ("target", "i4"),
        ("in_step", "i4"),
        ("own_blocks", "i4"),
        ("system_held", "i4"),
        ("prefilled", "i8"),
        ("chain", "i4"),
        ("uses_system", "i4"),
        ("preempted", "i4"),
        ("attempt", "i4"),
        ("cached", "i4"),
        ("sent_s", "f8"),
        ("queued_s", "f8"),  # it reached the engine's queue
        ("admitted_s", "f8"),
        ("first_s", "f8"),
        ("starved_s", "f8"),  # since when its next token waits, -1 while every step brings one
    ]
)

TASK = np.dtype(
    [
        ("live", "i4"),
        ("serial", "i8"),
        ("service", "i4"),
        ("profile", "i4"),
        ("klass", "i4"),
        ("client", "i4"),
        ("steps", "i4"),
        ("step", "i4"),
        ("attempt", "i4"),
        ("history", "i4"),
        ("input", "i4"),
        ("output", "i4"),
        ("call", "i4"),
        ("chains", "i4"),
        ("resubmits", "i4"),
        ("home", "u8"),
        ("began_s", "f8"),
        ("spent_prompt", "f8"),
        ("spent_output", "f8"),
    ]
)

CHAIN = np.dtype(
    [
        ("replica", "i4"),
        ("task", "i4"),
        ("system", "i4"),
        ("blocks", "i4"),
        ("users", "i4"),
        ("older", "i4"),
        ("newer", "i4"),
        ("next_of_task", "i4"),
        ("touched_s", "f8"),  # its last hit, -1 before the first
        ("gap_s", "f8"),  # between its last two hits, -1 before the second
    ]
)

SERVICE = np.dtype(
    [
        ("affinity", "i4"),
        ("spill_waiting", "i4"),
        ("sticky_weights", "i4"),
        ("ttft_timeout_s", "f8"),
        ("total_timeout_s", "f8"),
        ("retries", "i4"),
        ("backoff_s", "f8"),
        ("heeds_retry_after", "i4"),
        ("retry_after_s", "f8"),
        ("resubmit_share", "f8"),
        ("resubmit_after_s", "f8"),
        ("rate_bin_s", "f8"),
        ("bins", "i4"),
        ("slo_ttft_s", "f8"),
    ]
)

PROFILE = np.dtype(
    [
        ("system_tokens", "i4"),
        ("steps_mean", "f8"),
        ("steps_sigma", "f8"),
        ("steps_max", "i4"),
        ("input_mean", "f8"),
        ("input_sigma", "f8"),
        ("output_mean", "f8"),
        ("output_sigma", "f8"),
        ("gap_mean_s", "f8"),
        ("gap_sigma", "f8"),
        ("human_share", "f8"),
        ("human_gap_s", "f8"),
        ("context_max", "i4"),
    ]
)

BUCKET = np.dtype([("rate", "f8"), ("depth", "f8"), ("level", "f8"), ("at_s", "f8"), ("final", "i4")])

COUNTS = np.dtype(
    [
        ("sent", "f8"),
        ("admitted", "f8"),
        ("limited", "f8"),
        ("overflowed", "f8"),
        ("refused", "f8"),
        ("unroutable", "f8"),
        ("timed_out", "f8"),
        ("cut", "f8"),
        ("lost", "f8"),
        ("finished", "f8"),
        ("in_slo", "f8"),
    ]
)

TALLY = np.dtype(
    [
        ("started", "f8"),
        ("succeeded", "f8"),
        ("failed", "f8"),
        ("resubmitted", "f8"),
        ("good_prompt", "f8"),
        ("good_output", "f8"),
        ("lost_prompt", "f8"),
        ("lost_output", "f8"),
    ]
)

Rows = NDArray[Any]
Places = NDArray[np.int32]
Shares = NDArray[np.float64]


class World(NamedTuple):
    """Everything that changes. Shapes: R replicas, Q queue places, S running places, P profiles."""

    pools: Rows
    replicas: Rows
    calls: Rows
    tasks: Rows
    chains: Rows
    services: Rows
    profiles: Rows
    buckets: Rows  # [service, class, stage, attempt]
    counts: Rows  # [service, class, stage, attempt]
    pool_counts: Rows  # [pool] of the calls that came as far as a pool: nothing is sent or limited here
    tallies: Rows  # [service, class, profile]
    class_share: NDArray[np.float64]  # [service, class]
    profile_share: NDArray[np.float64]  # [service, profile]
    rates: NDArray[np.float64]  # [service, bin] tasks/s; a service's bins repeat
    traces: NDArray[np.float64]  # [service, n] times of arrival, inf after the last
    queues: NDArray[np.int32]  # [R, Q] calls, in order
    running: NDArray[np.int32]  # [R, S] calls, in order
    systems: NDArray[np.int32]  # [R, P] the chain of a profile's system prompt
    ttft_counts: NDArray[np.float64]  # [R, bounds + 1]
    itl_counts: NDArray[np.float64]
    reuse_counts: NDArray[np.float64]
    e2e_counts: NDArray[np.float64]
    queue_counts: NDArray[np.float64]
    free_calls: NDArray[np.int32]
    free_tasks: NDArray[np.int32]
    free_chains: NDArray[np.int32]
    free_left: NDArray[np.int64]  # calls, tasks, chains
    event_at: NDArray[np.float64]
    event_what: NDArray[np.int64]  # [events, 3] kind, index, serial
    event_order: NDArray[np.int64]
    numbers: NDArray[np.int64]  # see below
    clock: NDArray[np.float64]  # [1] seconds
    random: NDArray[np.uint64]  # [4] xoshiro256** state


EVENTS: Final = 0
SERIAL: Final = 1
WARMED_PROMPT: Final = 2
WARMED_OUTPUT: Final = 3
"""Places in `World.numbers`: events in the heap, the last serial number, tokens that ended warm-ups took."""
CALLS_LEFT: Final = 0
TASKS_LEFT: Final = 1
CHAINS_LEFT: Final = 2
