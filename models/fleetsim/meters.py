"""What an engine counts, and when: its Prometheus series, with vLLM's habits.

Token counters and gauges change as a step ends; TTFT and the gaps between tokens as the token comes; the time a request
waited and took only as it ends normally, so that a request that was aborted is in no histogram of requests.
"""

from __future__ import annotations

from models.fleetsim.compiled import compiled
from models.fleetsim.world import ITL_BOUNDS, REQUEST_BOUNDS, RESIDENCY_BOUNDS, TTFT_BOUNDS, World


@compiled
def bucket(bounds: tuple[float, ...], value: float) -> int:
    """The place of the first bound that is not below the value; the number of bounds where all are."""
    low, high = 0, len(bounds)
    while low < high:
        middle = (low + high) >> 1
        if bounds[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def publish(world: World, replica: int) -> None:
    """Set the gauges."""
    home = world.replicas[replica]
    home.shown_running, home.shown_waiting = home.running, home.waiting
    home.shown_kv = home.kv_used / world.pools[home.pool].kv_blocks


@compiled
def gaps(world: World, replica: int, gap_s: float, tokens: float) -> None:
    """Count `tokens` that came `gap_s` after the ones before them."""
    world.replicas[replica].itl_sum += tokens * gap_s
    world.itl_counts[replica, bucket(ITL_BOUNDS, gap_s)] += tokens


@compiled
def reused(world: World, replica: int, gap_s: float, blocks: float) -> None:
    """Count evicted blocks by the gap between their last two hits: with --kv-cache-metrics, only now, as in vLLM.

    vLLM samples one block in a hundred and counts up to three gaps of each; here every block counts its last one.
    """
    world.replicas[replica].reuse_sum += blocks * gap_s
    world.reuse_counts[replica, bucket(RESIDENCY_BOUNDS, gap_s)] += blocks


@compiled
def first_token(world: World, index: int) -> None:
    """Count a request's first token, and its prompt."""
    call = world.calls[index]
    home = world.replicas[call.replica]
    now_s = world.clock[0]
    call.first_s = now_s
    home.ttft_sum += now_s - call.sent_s
    world.ttft_counts[call.replica, bucket(TTFT_BOUNDS, now_s - call.sent_s)] += 1
    home.prompt_tokens += call.prompt
    home.computed_tokens += call.prompt - call.cached


@compiled
def finished(world: World, index: int) -> None:
    """Count a request that ended normally: only now, however long it took."""
    call = world.calls[index]
    replica, now_s = call.replica, world.clock[0]
    home = world.replicas[replica]
    home.stopped += 1
    home.e2e_sum += now_s - call.sent_s
    home.queue_sum += call.admitted_s - call.queued_s
    world.e2e_counts[replica, bucket(REQUEST_BOUNDS, now_s - call.sent_s)] += 1
    world.queue_counts[replica, bucket(REQUEST_BOUNDS, call.admitted_s - call.queued_s)] += 1
