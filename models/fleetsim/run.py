"""Time: handle events in order until a moment; and the life of replicas."""

from __future__ import annotations

from models.fleetsim import clients, engine, events, frontend, meters, steps
from models.fleetsim.compiled import compiled
from models.fleetsim.world import (
    ARRIVING,
    CLIENT_SENDS,
    EVENTS,
    FRONTEND_ENDS,
    LIFE,
    STEP_ENDS,
    TASK_ARRIVES,
    TOTAL_TIMEOUT,
    TTFT_TIMEOUT,
    Places,
    World,
)


@compiled
def run(world: World, until_s: float, finished: Places) -> bool:
    """Handle events up to and including `until_s`; True where a replica's life event waits for the plant.

    finished: room for the calls that end in one step, int32. Events of replicas' lives are not handled here (Python
    does, they are rare): the clock stops at one, and it stays the first of the heap.
    """
    while world.numbers[EVENTS] > 0 and world.event_at[0] <= until_s:
        kind, index, mark = world.event_what[0, 0], world.event_what[0, 1], world.event_what[0, 2]
        world.clock[0] = world.event_at[0]
        if kind == LIFE:
            return True
        events.pop(world)
        if kind == STEP_ENDS:
            _step_ends(world, index, mark, finished)
        elif kind == FRONTEND_ENDS:
            frontend.pass_on(world, index, mark)
        elif kind == CLIENT_SENDS:
            clients.wake(world, index, mark)
        elif kind == TASK_ARRIVES:
            clients.arrive(world, index, mark)
        elif kind == TTFT_TIMEOUT:
            clients.time_out(world, index, mark, True)
        elif kind == TOTAL_TIMEOUT:
            clients.time_out(world, index, mark, False)
    world.clock[0] = until_s
    return False


@compiled
def _step_ends(world: World, replica: int, mark: int, finished: Places) -> None:
    if not world.replicas[replica].stepping or world.replicas[replica].mark != mark:
        return
    done = steps.end_step(world, replica, finished)
    for place in range(done):
        clients.complete(world, finished[place])
    # Calls that end have left by the time that an engine sets its gauges: one that goes idle says that it runs none.
    meters.publish(world, replica)
    engine.schedule(world, replica)


@compiled
def lose_all(world: World, replica: int) -> None:
    """Every call of a replica is lost, running ones first; what its engine did until now counts."""
    home = world.replicas[replica]
    steps.settle(world, replica, False)
    home.stepping = 0
    while home.running > 0:
        clients.lose(world, world.running[replica, home.running - 1])
    while home.waiting > 0:
        clients.lose(world, world.queues[replica, home.waiting - 1])
    for index in range(world.calls.shape[0] if home.arriving > 0 else 0):
        if world.calls[index].state == ARRIVING and world.calls[index].replica == replica:
            clients.lose(world, index)
    home.frontend_free_s = world.clock[0]
