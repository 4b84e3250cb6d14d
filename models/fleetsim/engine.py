"""One engine: vLLM V1's scheduler and its queue. `memory` has its blocks, `steps` how long a step takes.

A step takes every running request in order: one token each for those that decode, a chunk of the prompt for those that
prefill, within the step's token budget. A running request that finds no free block preempts the newest one (by
priority: the newest of the least important class), which loses its blocks (they stay cached as long as the LRU lets
them) and waits at the head of the queue to be recomputed. Then waiting requests are admitted while there are seats,
budget, and room for their whole prompt. What the prefix cache holds of a prompt is not computed again; the last token
always is. The first token comes with the step that ends the prefill. With a budget of 8,192 tokens, 20 requests that
decode leave 8,172 for prompts: one of 12,000 tokens takes two steps.
"""

from __future__ import annotations

from models.fleetsim import cache, events, memory, steps
from models.fleetsim.compiled import compiled
from models.fleetsim.world import ARRIVING, DRAINING, LIFE, READY, RUNNING, WAITING, WARM_UP, World


@compiled
def enqueue(world: World, index: int, at_head: bool) -> None:
    """Put a call into its replica's queue: at the head (preempted) or the end, of its priority where that counts."""
    call = world.calls[index]
    replica = call.replica
    home, queue = world.replicas[replica], world.queues[replica]
    if not at_head:
        steps.settle(world, replica, True)
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
def leave(world: World, index: int) -> None:
    """Take a call off its replica, wherever it is: finished, aborted, or lost."""
    call = world.calls[index]
    replica = call.replica
    home = world.replicas[replica]
    steps.settle(world, replica, True)
    if call.state == RUNNING:
        memory.free_blocks(world, index)
        _unseat(world, replica, index)
    elif call.state == WAITING:
        place = 0
        while world.queues[replica, place] != index:
            place += 1
        dequeue(world, replica, place)
    elif call.state == ARRIVING:
        home.arriving -= 1
    if world.tasks[call.task].live != WARM_UP:
        world.pools[home.pool].active -= 1


@compiled
def _preempt(world: World, index: int) -> None:
    call = world.calls[index]
    memory.free_blocks(world, index)
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
        need = memory.blocks_for(call.computed + tokens, size) - memory.held(world, index)
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
    need = max(memory.blocks_for(call.target, size) - cached - of_session, 0)
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
        if home.state == DRAINING and home.arriving == 0:
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
    steps.start(world, replica)
