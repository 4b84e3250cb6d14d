"""A replica's API server: what a call costs before its engine hears of it.

vLLM parses, tokenises and checks a request in one process beside the engine, one request after another (an event loop
holds one core). Its time is part of what clients and `time_to_first_token_seconds` see, and of no other histogram:
`request_queue_time_seconds` begins in the engine.

    leaves the API server = max(arrival, the call before it leaves) + frontend_s * slow

Worked: 120 calls sent at once to a server that takes 9 ms for each: the last reaches its engine after 1.08 s, the mean
one after 0.54 s (a burst at a real engine showed 0.54 s and 0.59 s). With 0 s, the default, calls pass at once.
"""

from __future__ import annotations

from models.fleetsim import engine, events
from models.fleetsim.compiled import compiled
from models.fleetsim.world import ARRIVING, FRONTEND_ENDS, World


@compiled
def receive(world: World, index: int) -> None:
    """A call reaches its replica: queued at the engine at once, or when the API server is done with it."""
    call = world.calls[index]
    home = world.replicas[call.replica]
    cost_s = world.pools[home.pool].frontend_s
    if cost_s <= 0.0:
        engine.enqueue(world, index, False)
        engine.schedule(world, call.replica)
        return
    home.frontend_free_s = max(home.frontend_free_s, world.clock[0]) + cost_s * home.slow
    home.arriving += 1
    call.state = ARRIVING
    events.push(world, home.frontend_free_s, FRONTEND_ENDS, index, call.serial)


@compiled
def pass_on(world: World, index: int, mark: int) -> None:
    """The API server is done with a call, unless it was aborted or lost meanwhile."""
    call = world.calls[index]
    if call.state != ARRIVING or call.serial != mark:
        return
    world.replicas[call.replica].arriving -= 1
    call.queued_s = world.clock[0]
    engine.enqueue(world, index, False)
    engine.schedule(world, call.replica)
