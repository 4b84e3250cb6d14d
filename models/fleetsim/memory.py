"""KV memory of one call: the blocks it holds, those it shares, and what stays cached when it lets go of them.

A running call of t tokens holds ceil(t / block) blocks: what it found cached of the system prompt and of its own
session (chains, see `cache`), and blocks of its own for the rest. 4,000 tokens in blocks of 16 are 250 blocks; with
3,200 of them cached, 50 are its own. What it computes of a system prompt it shares as it goes.
"""

from __future__ import annotations

from models.fleetsim import cache
from models.fleetsim.compiled import compiled
from models.fleetsim.world import World


@compiled
def share_system(world: World, index: int) -> None:
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
    share_system(world, index)
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
def blocks_for(tokens: int, size: int) -> int:
    """Blocks of `size` tokens that cover so many tokens."""
    return (tokens + size - 1) // size


@compiled
def held(world: World, index: int) -> int:
    """Blocks that cover a running call's tokens, its own and shared ones together."""
    call = world.calls[index]
    held = call.own_blocks + call.system_held
    if call.chain >= 0:
        held += world.chains[call.chain].blocks
    return held


@compiled
def reserve(world: World, replica: int, steps: int) -> bool:
    """Blocks for `steps` tokens of every running call, only if nobody has to be preempted for them."""
    home = world.replicas[replica]
    size, total = world.pools[home.pool].block_tokens, 0
    for place in range(home.running):
        index = world.running[replica, place]
        total += max(blocks_for(world.calls[index].computed + steps, size) - held(world, index), 0)
    if not cache.take(world, replica, total):
        return False
    for place in range(home.running):
        index = world.running[replica, place]
        call = world.calls[index]
        call.own_blocks += max(blocks_for(call.computed + steps, size) - held(world, index), 0)
    return True
