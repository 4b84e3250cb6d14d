"""Prefix cache and KV memory of one replica: an LRU over block hashes, kept as chains.

vLLM's prefix cache is an LRU list of blocks, each named by a hash of itself and all before it. When a request ends, its
blocks are freed in reverse order, so that eviction eats the tail of the least recently used prefix first. A session's
cached blocks are therefore always an unbroken prefix, and one number, how many blocks are cached, describes them. That
is a chain: one per session and replica, and one per system prompt and replica, which its sessions share. Chains in use
are not in the LRU list; a session's chain is freed before the system prompt's, so that the prompt outlives it.

Memory of a replica, in blocks: used (held by running requests: their own and the chains they use, each once) + idle
(cached, evictable) + free = all of it. `tests` hold this module equal to a plain LRU over single block hashes.
"""

from __future__ import annotations

from models.fleetsim import meters
from models.fleetsim.compiled import compiled
from models.fleetsim.world import CHAINS_LEFT, World


@compiled
def new_chain(world: World, replica: int, task: int, system: int) -> int:
    """An empty chain, linked to its task if it has one."""
    left = world.free_left[CHAINS_LEFT] - 1
    if left < 0:
        raise IndexError("too many cached sessions: the scenario is larger than the plant was made for")
    world.free_left[CHAINS_LEFT] = left
    index = world.free_chains[left]
    chain = world.chains[index]
    chain.replica, chain.task, chain.system = replica, task, system
    chain.blocks, chain.users, chain.older, chain.newer, chain.next_of_task = 0, 0, -1, -1, -1
    chain.touched_s, chain.gap_s = -1.0, -1.0
    if task >= 0:
        chain.next_of_task = world.tasks[task].chains
        world.tasks[task].chains = index
    return index


@compiled
def drop_chain(world: World, index: int) -> None:
    """Give a chain's row back; it must be out of the LRU list."""
    chain = world.chains[index]
    if chain.task >= 0:
        task = world.tasks[chain.task]
        if task.chains == index:
            task.chains = chain.next_of_task
        else:
            before = task.chains
            while world.chains[before].next_of_task != index:
                before = world.chains[before].next_of_task
            world.chains[before].next_of_task = chain.next_of_task
    if chain.system >= 0:
        world.systems[chain.replica, chain.system] = -1
    chain.replica = -1
    world.free_chains[world.free_left[CHAINS_LEFT]] = index
    world.free_left[CHAINS_LEFT] += 1


@compiled
def orphan(world: World, task: int) -> None:
    """A task has ended: its chains stay cached until they are evicted, but nobody will ask for them."""
    index = world.tasks[task].chains
    while index >= 0:
        following = world.chains[index].next_of_task
        world.chains[index].task = -1
        world.chains[index].next_of_task = -1
        index = following
    world.tasks[task].chains = -1


@compiled
def chain_of(world: World, replica: int, task: int) -> int:
    """The chain of a task on a replica, -1 where there is none."""
    index = world.tasks[task].chains
    while index >= 0 and world.chains[index].replica != replica:
        index = world.chains[index].next_of_task
    return index


@compiled
def link(world: World, index: int) -> None:
    """Put a chain at the new end of its replica's LRU list."""
    chain = world.chains[index]
    home = world.replicas[chain.replica]
    chain.older, chain.newer = home.newest, -1
    if home.newest >= 0:
        world.chains[home.newest].newer = index
    else:
        home.oldest = index
    home.newest = index


@compiled
def unlink(world: World, index: int) -> None:
    """Take a chain out of its replica's LRU list."""
    chain = world.chains[index]
    home = world.replicas[chain.replica]
    if chain.older >= 0:
        world.chains[chain.older].newer = chain.newer
    else:
        home.oldest = chain.newer
    if chain.newer >= 0:
        world.chains[chain.newer].older = chain.older
    else:
        home.newest = chain.older
    chain.older, chain.newer = -1, -1


@compiled
def use(world: World, index: int) -> None:
    """One more running request holds a chain."""
    chain = world.chains[index]
    chain.users += 1
    if chain.blocks > 0:
        if chain.touched_s >= 0.0:
            chain.gap_s = world.clock[0] - chain.touched_s
        chain.touched_s = world.clock[0]
    if chain.users == 1 and chain.blocks > 0:
        unlink(world, index)
        home = world.replicas[chain.replica]
        home.kv_idle -= chain.blocks
        home.kv_used += chain.blocks


@compiled
def release(world: World, index: int) -> None:
    """One running request fewer holds a chain; without any it is idle, and gone if it is empty."""
    chain = world.chains[index]
    chain.users -= 1
    if chain.users > 0:
        return
    if chain.blocks == 0:
        drop_chain(world, index)
        return
    home = world.replicas[chain.replica]
    home.kv_used -= chain.blocks
    home.kv_idle += chain.blocks
    link(world, index)


@compiled
def take(world: World, replica: int, blocks: int) -> bool:
    """Make room for `blocks` more used blocks, evicting idle ones as needed; False (and nothing done) if impossible."""
    home = world.replicas[replica]
    total = world.pools[home.pool].kv_blocks
    if total - home.kv_used < blocks:
        return False
    missing = blocks - (total - home.kv_used - home.kv_idle)
    while missing > 0:
        index = home.oldest
        eaten = min(missing, world.chains[index].blocks)
        if world.chains[index].gap_s >= 0.0:
            meters.reused(world, replica, world.chains[index].gap_s, float(eaten))
        world.chains[index].blocks -= eaten
        home.kv_idle -= eaten
        missing -= eaten
        if world.chains[index].blocks == 0:
            unlink(world, index)
            drop_chain(world, index)
    home.kv_used += blocks
    return True


@compiled
def shorten(world: World, index: int, blocks: int) -> None:
    """Forget the blocks of an idle chain behind the first `blocks`."""
    chain = world.chains[index]
    if chain.users > 0 or chain.blocks <= blocks:
        return
    world.replicas[chain.replica].kv_idle -= chain.blocks - blocks
    chain.blocks = blocks
    if blocks == 0:
        unlink(world, index)
        drop_chain(world, index)


@compiled
def flush(world: World, replica: int) -> None:
    """Forget every idle block (a reset of the prefix cache; a restart forgets the used ones with their requests)."""
    home = world.replicas[replica]
    while home.oldest >= 0:
        index = home.oldest
        home.kv_idle -= world.chains[index].blocks
        world.chains[index].blocks = 0
        unlink(world, index)
        drop_chain(world, index)
