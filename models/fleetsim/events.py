"""The order of events: a binary heap on (time, order of insertion), in arrays of the world.

Events are never taken back. One that no longer means anything (the timeout of a call that ended) carries the serial
number of what it was for, and whoever handles it compares.
"""

from __future__ import annotations

from models.fleetsim.compiled import compiled
from models.fleetsim.world import EVENTS, SERIAL, World


@compiled
def serial(world: World) -> int:
    """A number that was never given before."""
    world.numbers[SERIAL] += 1
    return world.numbers[SERIAL]


@compiled
def _earlier(world: World, a: int, b: int) -> bool:
    if world.event_at[a] != world.event_at[b]:
        return world.event_at[a] < world.event_at[b]
    return world.event_order[a] < world.event_order[b]


@compiled
def _swap(world: World, a: int, b: int) -> None:
    world.event_at[a], world.event_at[b] = world.event_at[b], world.event_at[a]
    world.event_order[a], world.event_order[b] = world.event_order[b], world.event_order[a]
    for column in range(3):
        kept = world.event_what[a, column]
        world.event_what[a, column] = world.event_what[b, column]
        world.event_what[b, column] = kept


@compiled
def push(world: World, at_s: float, kind: int, index: int, mark: int) -> None:
    """Let something happen at `at_s`. Raises IndexError when the heap is full (the plant sizes it amply)."""
    place = world.numbers[EVENTS]
    if place >= world.event_at.shape[0]:
        raise IndexError("too many events: the scenario is larger than the plant was made for")
    world.numbers[EVENTS] = place + 1
    world.event_at[place] = at_s
    world.event_order[place] = serial(world)
    world.event_what[place, 0], world.event_what[place, 1], world.event_what[place, 2] = kind, index, mark
    while place > 0:
        parent = (place - 1) >> 1
        if not _earlier(world, place, parent):
            break
        _swap(world, place, parent)
        place = parent


@compiled
def pop(world: World) -> None:
    """Remove the earliest event, which stands at place 0."""
    last = world.numbers[EVENTS] - 1
    world.numbers[EVENTS] = last
    if last <= 0:
        return
    _swap(world, 0, last)
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            return
        if child + 1 < last and _earlier(world, child + 1, child):
            child += 1
        if not _earlier(world, child, place):
            return
        _swap(world, place, child)
        place = child
