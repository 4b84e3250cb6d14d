"""Counts a plant's world from scratch and says what does not add up.

Every number that the plant keeps as it goes is compared with one that is found from the rows alone:

    calls     sent = admitted + limited + overflowed + refused + unroutable, for each class, stage and attempt;
              admitted = finished + timed out + cut + lost + in flight; a service's = the sum of its pools'
    tasks     started = succeeded + failed + live, for each class and profile
    tokens    what engines generated (and prefilled) = what ended tasks spent, good and lost, + what live ones did
    blocks    used = own blocks of running calls + chains in use; idle = chains in the LRU list; used + idle <= all
    places    each call is in one queue or batch of a replica that serves; each row is either in use or free
    events    in order; an engine with work has a step under way, and that step its end
    GPUs      seconds held, from the list of changes of state

Token counts are compared as the plant has them: a jump that is not settled is in neither side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from models.fleetsim import world as w
from models.fleetsim.plant import WITHOUT_GPUS, Plant
from models.fleetsim.world import Rows

SERVES = (w.READY, w.DRAINING)


def recount(plant: Plant) -> tuple[str, ...]:
    """One sentence for each number that does not add up; none if all do. It changes nothing."""
    parts = (_calls, _tasks, _tokens, _blocks, _places, _rows, _events, _gpu_seconds)
    return tuple(sentence for part in parts for sentence in part(plant))


def _differs(what: str, kept: Any, counted: Any) -> Iterator[str]:
    if abs(kept - counted) > 1e-6 * max(abs(kept), abs(counted), 1.0):
        yield f"{what}: {kept:g} is kept, {counted:g} counted"


def _in_flight(plant: Plant) -> list[int]:
    return [int(i) for i in np.flatnonzero(plant.world.calls["state"] != w.FREE)]


def _of_clients(plant: Plant) -> list[int]:
    calls, tasks = plant.world.calls, plant.world.tasks
    return [i for i in _in_flight(plant) if tasks[calls[i]["task"]]["live"] == w.LIVE]


def _calls(plant: Plant) -> Iterator[str]:
    counts = plant.world.counts
    flying = np.zeros(counts.shape)
    active = np.zeros(len(plant.pools))
    for index in _of_clients(plant):
        call = plant.world.calls[index]
        task = plant.world.tasks[call["task"]]
        flying[task["service"], task["klass"], int(task["step"] > 0), int(call["attempt"] > 0)] += 1
        active[plant.world.replicas[call["replica"]]["pool"]] += 1
    for place in np.ndindex(counts.shape):
        c, name = counts[place], f"calls of service, class, stage, attempt {place}"
        answers = c["admitted"] + c["limited"] + c["overflowed"] + c["refused"] + c["unroutable"]
        yield from _differs(f"{name}, sent", c["sent"], answers)
        ends = c["finished"] + c["timed_out"] + c["cut"] + c["lost"] + flying[place]
        yield from _differs(f"{name}, admitted", c["admitted"], ends)
    for row, pool in enumerate(plant.pools):
        yield from _differs(f"calls active in pool {pool.name}", plant.world.pools[row]["active"], active[row])
        c = plant.world.pool_counts[row]
        ends = c["finished"] + c["timed_out"] + c["cut"] + c["lost"] + active[row]
        yield from _differs(f"calls admitted to pool {pool.name}", c["admitted"], ends)
    for number, service in enumerate(plant.services):
        pools = plant.world.pool_counts[plant.world.pools["service"] == number]
        for name in ("admitted", "overflowed", "refused", "timed_out", "cut", "lost", "finished", "in_slo"):
            yield from _differs(f"calls {name} of {service.name}", counts[number][name].sum(), pools[name].sum())


def _tasks(plant: Plant) -> Iterator[str]:
    tallies, tasks = plant.world.tallies, plant.world.tasks
    live = np.zeros(tallies.shape)
    for task in tasks[tasks["live"] == w.LIVE]:
        live[task["service"], task["klass"], task["profile"]] += 1
    for place in np.ndindex(tallies.shape):
        t = tallies[place]
        ends = t["succeeded"] + t["failed"] + live[place]
        yield from _differs(f"tasks of service, class, profile {place}", t["started"], ends)


def _tokens(plant: Plant) -> Iterator[str]:
    world = plant.world
    kinds = (
        ("generated", "generated_tokens", "output", "generated", w.WARMED_OUTPUT),
        ("prefilled", "prefill_tokens", "prompt", "prefilled", w.WARMED_PROMPT),
    )
    unended = world.tasks[np.isin(world.tasks["live"], (w.LIVE, w.WARM_UP))]
    flying = world.calls[_in_flight(plant)]
    for what, counter, kind, of_call, warmed in kinds:
        made = world.replicas[counter].sum() + plant.past[counter].sum()
        spent = world.tallies[f"good_{kind}"].sum() + world.tallies[f"lost_{kind}"].sum()
        spent += unended[f"spent_{kind}"].sum() + flying[of_call].sum() + world.numbers[warmed]
        yield from _differs(f"tokens {what}", made, spent)


def _listed(plant: Plant, replica: int) -> Iterator[int | str]:
    """The chains of a replica's LRU list from the oldest on; a sentence where its links are broken."""
    chains, home = plant.world.chains, plant.world.replicas[replica]
    index, before = int(home["oldest"]), -1
    for _ in range(len(chains)):
        if index < 0:
            break
        if int(chains[index]["older"]) != before:
            yield f"replica {replica}: chain {index} of its LRU list does not link back to chain {before}"
            return
        yield index
        index, before = int(chains[index]["newer"]), index
    if int(home["newest"]) != before:
        yield f"replica {replica}: its LRU list ends with chain {before}, not with its newest, {int(home['newest'])}"


def _blocks(plant: Plant) -> Iterator[str]:
    world = plant.world
    users = np.zeros(len(world.chains), np.int64)
    running = [index for index in _in_flight(plant) if world.calls[index]["state"] == w.RUNNING]
    for index in running:
        for name in ("chain", "uses_system"):
            if world.calls[index][name] >= 0:
                users[world.calls[index][name]] += 1
    for chain in np.flatnonzero((world.chains["replica"] >= 0) & (world.chains["users"] != users)):
        yield f"chain {chain}: {world.chains[chain]['users']} users are kept, {users[chain]} counted"
    for replica in range(len(world.replicas)):
        home = world.replicas[replica]
        batch = world.calls[running]
        own = int(batch["own_blocks"][batch["replica"] == replica].sum())
        here = np.flatnonzero(world.chains["replica"] == replica)
        used = own + int(world.chains["blocks"][here][users[here] > 0].sum())
        idle = here[users[here] == 0]
        yield from _differs(f"used blocks of replica {replica}", home["kv_used"], used)
        yield from _differs(f"idle blocks of replica {replica}", home["kv_idle"], world.chains["blocks"][idle].sum())
        total = int(world.pools[home["pool"]]["kv_blocks"])
        if used + int(home["kv_idle"]) > total:
            yield f"replica {replica}: {used} used and {home['kv_idle']} idle blocks are more than its {total}"
        listed = list(_listed(plant, replica))
        yield from (entry for entry in listed if isinstance(entry, str))
        if sorted(entry for entry in listed if isinstance(entry, int)) != sorted(idle.tolist()):
            yield f"replica {replica}: its LRU list does not hold just the chains that nobody uses"
    yield from _covered(plant, running)


def _covered(plant: Plant, running: list[int]) -> Iterator[str]:
    """Every running call has the blocks that its tokens need."""
    world = plant.world
    for index in running:
        call = world.calls[index]
        size = int(world.pools[world.replicas[call["replica"]]["pool"]]["block_tokens"])
        held = int(call["own_blocks"]) + int(call["system_held"])
        held += int(world.chains[call["chain"]]["blocks"]) if call["chain"] >= 0 else 0
        if held * size < call["computed"]:
            yield f"call {index}: {held} blocks do not hold its {call['computed']} tokens"


def _places(plant: Plant) -> Iterator[str]:
    world = plant.world
    seen: dict[int, int] = {}
    for replica, home in enumerate(world.replicas):
        batch = world.running[replica, : home["running"]].tolist()
        queue = world.queues[replica, : home["waiting"]].tolist()
        if (batch or queue) and home["state"] not in SERVES:
            yield f"replica {replica} has {len(batch) + len(queue)} calls in state {home['state']}"
        for index, state in [(i, w.RUNNING) for i in batch] + [(i, w.WAITING) for i in queue]:
            if world.calls[index]["state"] != state or world.calls[index]["replica"] != replica or index in seen:
                yield f"call {index} is not where replica {replica} has it"
            seen[index] = replica
        arriving = [i for i in _in_flight(plant) if _arrives_at(plant, i, replica)]
        seen.update(dict.fromkeys(arriving, replica))
        yield from _differs(f"calls in the API server of replica {replica}", home["arriving"], len(arriving))
    flying = set(_in_flight(plant))
    if flying != set(seen):
        yield f"{len(flying)} calls are in flight, {len(seen)} in queues and batches"
    for index in flying:
        if world.tasks[world.calls[index]["task"]]["call"] != index:
            yield f"call {index} is not the one its task waits for"


def _arrives_at(plant: Plant, index: int, replica: int) -> bool:
    call = plant.world.calls[index]
    return int(call["state"]) == w.ARRIVING and int(call["replica"]) == replica


def _rows(plant: Plant) -> Iterator[str]:
    world = plant.world
    kinds: tuple[tuple[str, Rows, Rows, int], ...] = (
        ("call", world.calls["state"] == w.FREE, world.free_calls, w.CALLS_LEFT),
        ("task", world.tasks["live"] == w.NO_TASK, world.free_tasks, w.TASKS_LEFT),
        ("chain", world.chains["replica"] < 0, world.free_chains, w.CHAINS_LEFT),
    )
    for name, free, listed, left in kinds:
        if sorted(listed[: world.free_left[left]].tolist()) != np.flatnonzero(free).tolist():
            yield f"{name}s: {world.free_left[left]} rows are listed as free, {free.sum()} are free, or others"


def _events(plant: Plant) -> Iterator[str]:
    world = plant.world
    count = int(world.numbers[w.EVENTS])
    keys = list(zip(world.event_at[:count].tolist(), world.event_order[:count].tolist(), strict=True))
    if any(keys[place] < keys[(place - 1) >> 1] for place in range(1, count)):
        yield "events: the heap is not in order"
    if keys and min(keys)[0] < plant.now_s:
        yield f"events: one is due at {min(keys)[0]:g} s, before now, {plant.now_s:g} s"
    ends = {tuple(row) for row in world.event_what[:count].tolist() if row[0] == w.STEP_ENDS}
    for replica, home in enumerate(world.replicas):
        if home["stepping"] and (w.STEP_ENDS, replica, int(home["mark"])) not in ends:
            yield f"replica {replica}: its step has no end"
        if home["state"] in SERVES and home["running"] + home["waiting"] and not home["stepping"]:
            yield f"replica {replica}: it has work and does nothing"


def _gpu_seconds(plant: Plant) -> Iterator[str]:
    since: dict[int, float] = {}
    held_s = np.zeros(len(plant.world.replicas))
    for change in plant.changes:
        if change.after in WITHOUT_GPUS:
            held_s[change.replica] += change.at_s - since.pop(change.replica, change.at_s)
        else:
            since.setdefault(change.replica, change.at_s)
    for replica, at_s in since.items():
        held_s[replica] += plant.now_s - at_s
    for pool in plant.pools:
        counted = held_s[plant.members(pool.name)].sum() * pool.hardware.gpus
        yield from _differs(f"GPU-seconds of pool {pool.name}", plant.gpu_s(pool.name), counted)
