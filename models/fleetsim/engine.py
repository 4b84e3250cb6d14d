"""One engine: vLLM V1's scheduler, its KV memory, and how long a step takes.

A step takes every running request in order: one token each for those that decode, a chunk of the prompt for those that
prefill, within the step's token budget. A running request that finds no free block preempts the newest one (by
priority: the newest of the least important class), which loses its blocks (they stay cached as long as the LRU lets
them) and waits at the head of the queue to be recomputed. Then waiting requests are admitted while there are seats,
budget, and room for their whole prompt. What the prefix cache holds of a prompt is not computed again; the last token
always is. The first token comes with the step that ends the prefill.

    step time = max(FLOP / (FLOP/s), bytes / (bytes/s)) + overhead + per-sequence cost, times noise
    FLOP      = flop_per_token * padded tokens + flop_per_pair * sum over chunks of chunk*(context + chunk/2)
    bytes     = weights + kv_bytes * tokens of context that are read

The decode batch is padded to the sizes of captured graphs (1, 2, 4, then multiples of 8). This is not the linear form
that the planning side fits, on purpose: quadratic attention, padding and the maximum are what it has to cope with.
Gauges and counters change when a step ends, as they do in vLLM; a stopped engine keeps showing its last gauges.

Steps in which everybody decodes and nobody waits are taken up to JUMP at a time, as one event of that many equal steps
(the noise of their mean is drawn). Whatever happens to the replica meanwhile first settles the steps that are complete
by then and cuts the jump at the end of the step under way, so that a new call waits for that step and for no more.
(A jump reserves its blocks at its start: memory in use runs ahead by at most two blocks per request.)
"""

from __future__ import annotations

import math

from models.fleetsim import cache, events, meters
from models.fleetsim.chance import lognormal
from models.fleetsim.compiled import compiled
from models.fleetsim.world import (
    DRAINING,
    LIFE,
    READY,
    RUNNING,
    STEP_ENDS,
    WAITING,
    WARM_UP,
    Places,
    World,
)

JUMP = 32


@compiled
def enqueue(world: World, index: int, at_head: bool) -> None:
    """Put a call into its replica's queue: at the head (preempted) or the end, of its priority where that counts."""
    call = world.calls[index]
    replica = call.replica
    home, queue = world.replicas[replica], world.queues[replica]
    if not at_head:
        settle(world, replica, True)
    place = 0 if at_head else home.waiting
    if world.pools[home.pool].by_priority:
        klass = world.tasks[call.task].klass
        while place > 0 and world.tasks[world.calls[queue[place - 1]].task].klass > klass:
            place -= 1
        while place < home.waiting and world.tasks[world.calls[queue[place]].task].klass < klass:
            place += 1
    for later in range(home.waiting, place, -1):
        queue[later] = queue[later - 1]
    queue[place] = index
    home.waiting += 1
    call.state = WAITING


@compiled
def dequeue(world: World, replica: int, place: int) -> None:
    """Take the call at a place out of the queue."""
    home, queue = world.replicas[replica], world.queues[replica]
    for later in range(place, home.waiting - 1):
        queue[later] = queue[later + 1]
    home.waiting -= 1


@compiled
def _unseat(world: World, replica: int, index: int) -> None:
    home, running = world.replicas[replica], world.running[replica]
    place = 0
    while running[place] != index:
        place += 1
    for later in range(place, home.running - 1):
        running[later] = running[later + 1]
    home.running -= 1


@compiled
def _share_system(world: World, index: int) -> None:
    """What a call has computed of its system prompt belongs to everybody, unless somebody else was first."""
    call = world.calls[index]
    chain = world.chains[call.uses_system]
    size = world.pools[world.replicas[call.replica].pool].block_tokens
    full = world.profiles[world.tasks[call.task].profile].system_tokens // size
    more = min(call.computed // size, full) - chain.blocks
    if more > 0 and call.system_held == chain.blocks and call.own_blocks >= more:
        chain.blocks += more
        call.system_held += more
        call.own_blocks -= more


@compiled
def free_blocks(world: World, index: int) -> None:
    """A request lets go of its memory; its full blocks stay cached, the session's freed before the system prompt's."""
    call = world.calls[index]
    home = world.replicas[call.replica]
    size = world.pools[home.pool].block_tokens
    system_blocks = world.profiles[world.tasks[call.task].profile].system_tokens // size
    _share_system(world, index)
    home.kv_used -= call.own_blocks
    call.own_blocks = 0
    if call.chain >= 0:
        chain = world.chains[call.chain]
        # Without all of the system prompt before it nothing of a session can be found again.
        if world.chains[call.uses_system].blocks >= system_blocks:
            more = call.computed // size - system_blocks - chain.blocks
            if more > 0:
                home.kv_used += more
                chain.blocks += more
        cache.release(world, call.chain)
        call.chain = -1
    cache.release(world, call.uses_system)
    call.uses_system = -1
    call.system_held = 0


@compiled
def leave(world: World, index: int) -> None:
    """Take a call off its replica, wherever it is: finished, aborted, or lost."""
    call = world.calls[index]
    replica = call.replica
    home = world.replicas[replica]
    settle(world, replica, True)
    if call.state == RUNNING:
        free_blocks(world, index)
        _unseat(world, replica, index)
    elif call.state == WAITING:
        place = 0
        while world.queues[replica, place] != index:
            place += 1
        dequeue(world, replica, place)
    if world.tasks[call.task].live != WARM_UP:
        world.pools[home.pool].active -= 1


@compiled
def _blocks(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


@compiled
def _held(world: World, index: int) -> int:
    """Blocks that cover a running call's tokens, its own and shared ones together."""
    call = world.calls[index]
    held = call.own_blocks + call.system_held
    if call.chain >= 0:
        held += world.chains[call.chain].blocks
    return held


@compiled
def _preempt(world: World, index: int) -> None:
    call = world.calls[index]
    free_blocks(world, index)
    _unseat(world, call.replica, index)
    call.computed, call.in_step = 0, 0
    call.preempted += 1
    if call.generated > 0 and call.starved_s < 0.0:
        call.starved_s = world.clock[0]
    world.replicas[call.replica].preemptions += 1
    enqueue(world, index, True)


@compiled
def _to_preempt(world: World, replica: int) -> int:
    """The newest running call; by priority, the newest of the least important class."""
    home, running = world.replicas[replica], world.running[replica]
    chosen = running[home.running - 1]
    if world.pools[home.pool].by_priority:
        for place in range(home.running - 2, -1, -1):
            if world.tasks[world.calls[running[place]].task].klass > world.tasks[world.calls[chosen].task].klass:
                chosen = running[place]
    return chosen


@compiled
def _grow(world: World, index: int, tokens: int) -> bool:
    """Blocks for `tokens` more of a running call; preempts other calls if need be. False where it was so itself."""
    call = world.calls[index]
    replica = call.replica
    size = world.pools[world.replicas[replica].pool].block_tokens
    while True:
        need = _blocks(call.computed + tokens, size) - _held(world, index)
        if need <= 0:
            return True
        if cache.take(world, replica, need):
            call.own_blocks += need
            return True
        chosen = _to_preempt(world, replica)
        _preempt(world, chosen)
        if chosen == index:
            return False


@compiled
def _admit(world: World, index: int) -> bool:
    """Seat the call at the head of the queue if its whole prompt has room; what is cached of it counts as computed."""
    call = world.calls[index]
    replica = call.replica
    home, task = world.replicas[replica], world.tasks[call.task]
    size = world.pools[home.pool].block_tokens
    system_blocks = world.profiles[task.profile].system_tokens // size
    usable = (call.target - 1) // size
    system, chain = world.systems[replica, task.profile], cache.chain_of(world, replica, call.task)
    cached, of_session, idle = 0, 0, 0
    if system >= 0:
        cached = world.chains[system].blocks
        idle += cached if world.chains[system].users == 0 else 0
    if chain >= 0:
        # A step that is tried again has another answer: what is cached of the last one is of no use.
        cache.shorten(world, chain, max(call.target // size - system_blocks, 0))
        chain = cache.chain_of(world, replica, call.task)
    if chain >= 0:
        of_session = world.chains[chain].blocks
        idle += of_session
    need = max(_blocks(call.target, size) - cached - of_session, 0)
    if world.pools[home.pool].kv_blocks - home.kv_used - idle < need:
        return False
    if system < 0:
        system = cache.new_chain(world, replica, -1, task.profile)
        world.systems[replica, task.profile] = system
    if chain < 0:
        chain = cache.new_chain(world, replica, call.task, -1)
    cache.use(world, system)
    cache.use(world, chain)
    cache.take(world, replica, need)
    hit = min(cached + of_session if cached >= system_blocks else cached, usable)
    call.chain, call.uses_system, call.system_held, call.own_blocks = chain, system, cached, need
    call.computed = hit * size
    if call.preempted == 0:
        home.prefix_queries += call.prompt
        home.prefix_hits += call.computed
        call.cached = call.computed
        call.admitted_s = world.clock[0]
    return True


@compiled
def schedule(world: World, replica: int) -> None:
    """Start the next step of an idle engine, if it has anything to do."""
    home = world.replicas[replica]
    if home.stepping or home.state not in (READY, DRAINING):
        return
    if home.running + home.waiting == 0:
        if home.state == DRAINING:
            events.push(world, world.clock[0], LIFE, replica, home.life)
        return
    pool = world.pools[home.pool]
    running = world.running[replica]
    left, place, preemptions = pool.token_budget, 0, home.preemptions
    while place < home.running:
        index = running[place]
        call = world.calls[index]
        wanted = min(max(call.target - call.computed, 1), left)
        call.in_step = 0
        if wanted > 0 and _grow(world, index, wanted):
            call.in_step = wanted
            left -= wanted
        if place < home.running and running[place] == index:
            place += 1
    while home.waiting > 0 and home.running < pool.max_seqs and left > 0:
        # A step that preempts admits nobody, unless it preempted everybody.
        if home.preemptions != preemptions and home.running > 0:
            break
        index = world.queues[replica, 0]
        if not _admit(world, index):
            break
        dequeue(world, replica, 0)
        call = world.calls[index]
        running[home.running] = index
        home.running += 1
        call.state = RUNNING
        call.in_step = min(call.target - call.computed, left)
        left -= call.in_step
    _start_step(world, replica)


@compiled
def _start_step(world: World, replica: int) -> None:
    home = world.replicas[replica]
    if home.running == 0:
        return
    pool = world.pools[home.pool]
    decoding, prefill, pairs, read, fewest = 0, 0, 0.0, 0.0, JUMP
    for place in range(home.running):
        call = world.calls[world.running[replica, place]]
        if call.in_step == 0:
            if call.generated > 0 and call.starved_s < 0.0:
                call.starved_s = world.clock[0]
            fewest = 1
            continue
        if call.generated > 0 and call.in_step == 1 and call.computed + 1 == call.target:
            decoding += 1
            pairs += call.computed
            fewest = 1 if call.starved_s >= 0.0 else min(fewest, call.output - call.generated)
        else:
            prefill += call.in_step
            pairs += call.in_step * (call.computed + 0.5 * call.in_step)
            fewest = 1
        read += call.computed
    steps = fewest if home.waiting == 0 and fewest > 1 and _reserve(world, replica, fewest) else 1
    padded = decoding if decoding <= 2 else 4 if decoding <= 4 else ((decoding + 7) // 8) * 8
    flop = pool.flop_per_token * (padded + prefill) + pool.flop_per_pair * pairs
    moved = pool.weight_bytes + pool.kv_bytes * (read + 0.5 * (steps - 1) * decoding)
    took_s = max(flop / pool.flop_per_s, moved / pool.bytes_per_s) + pool.overhead_s
    took_s += pool.per_seq_s * home.running
    took_s *= home.slow * lognormal(world.random, 1.0, pool.noise / math.sqrt(steps))
    _begin(world, replica, steps, took_s, world.clock[0])


@compiled
def _begin(world: World, replica: int, steps: int, step_s: float, at_s: float) -> None:
    home = world.replicas[replica]
    home.stepping, home.jump, home.settled, home.step_s, home.step_began_s = 1, steps, 0, step_s, at_s
    home.mark = events.serial(world)
    events.push(world, at_s + steps * step_s, STEP_ENDS, replica, home.mark)


@compiled
def _reserve(world: World, replica: int, steps: int) -> bool:
    """Blocks for `steps` tokens of every running call, only if nobody has to be preempted for them."""
    home = world.replicas[replica]
    size, total = world.pools[home.pool].block_tokens, 0
    for place in range(home.running):
        index = world.running[replica, place]
        total += max(_blocks(world.calls[index].computed + steps, size) - _held(world, index), 0)
    if not cache.take(world, replica, total):
        return False
    for place in range(home.running):
        index = world.running[replica, place]
        call = world.calls[index]
        call.own_blocks += max(_blocks(call.computed + steps, size) - _held(world, index), 0)
    return True


@compiled
def settle(world: World, replica: int, cut: bool) -> None:
    """Apply the steps of a jump that are complete by now; `cut`: let it end with the step under way.

    Without `cut` (to read the counters) nothing that happens later changes, not by a rounding error.
    """
    home = world.replicas[replica]
    if not home.stepping or home.jump <= 1:
        return
    complete = int((world.clock[0] - home.step_began_s) / home.step_s)
    done = min(complete - home.settled, home.jump - 1)
    if done > 0:
        _decode(world, replica, done)
        home.settled += done
        home.jump -= done
        meters.publish(world, replica)
    if cut and home.jump > 1:
        _begin(world, replica, 1, home.step_s, home.step_began_s + home.settled * home.step_s)


@compiled
def _decode(world: World, replica: int, steps: int) -> None:
    """Every running call has decoded `steps` tokens."""
    home = world.replicas[replica]
    tokens = float(steps * home.running)
    for place in range(home.running):
        call = world.calls[world.running[replica, place]]
        call.computed += steps
        call.generated += steps
        call.target = call.computed + 1
    home.busy_s += steps * home.step_s
    home.steps += steps
    home.step_tokens += tokens
    home.generated_tokens += tokens
    meters.gaps(world, replica, home.step_s, tokens)


@compiled
def end_step(world: World, replica: int, finished: Places) -> int:
    """Apply what is left of a step or jump. Writes the finished calls to `finished`, returns their number."""
    home = world.replicas[replica]
    home.stepping = 0
    if home.jump > 1:
        _decode(world, replica, home.jump)
    else:
        _mixed_step(world, replica)
    done = 0
    for place in range(home.running):
        index = world.running[replica, place]
        if world.calls[index].generated >= world.calls[index].output:
            finished[done] = index
            done += 1
    return done


@compiled
def _mixed_step(world: World, replica: int) -> None:
    home = world.replicas[replica]
    home.busy_s += home.step_s
    home.steps += 1
    punctual = 0
    for place in range(home.running):
        index = world.running[replica, place]
        call = world.calls[index]
        if call.in_step == 0:
            continue
        home.step_tokens += call.in_step
        if call.generated == 0 or call.in_step > 1 or call.computed + 1 < call.target:
            home.prefill_tokens += call.in_step
            call.prefilled += call.in_step
            call.computed += call.in_step
            _share_system(world, index)
        else:
            call.computed += 1
        if call.computed < call.target:
            continue
        # The prompt is computed (or one more token is): this step samples a token.
        call.generated += 1
        call.target = call.computed + 1
        home.generated_tokens += 1
        if call.generated == 1:
            meters.first_token(world, index)
        elif call.starved_s >= 0.0:
            meters.gaps(world, replica, world.clock[0] - call.starved_s, 1.0)
        else:
            punctual += 1
        call.starved_s = -1.0
    if punctual > 0:
        meters.gaps(world, replica, home.step_s, float(punctual))
