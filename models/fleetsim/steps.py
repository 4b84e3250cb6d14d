"""How long a step of an engine takes, and what has happened when it ends.

    step time = max(FLOP / (FLOP/s), bytes / (bytes/s)) + overhead + per-sequence cost, times noise
    FLOP      = flop_per_token * padded tokens + flop_per_pair * sum over chunks of chunk*(context + chunk/2)
    bytes     = weights + kv_bytes * tokens of context that are read

Example: 20 calls decode at 8,000 tokens of context on four H100s (70e9 parameters in one byte, 0.33 MB of KV per
token): (24 * 1.4e11 + 2.6e6 * 160,000) FLOP / 3.6e15 = 1 ms of compute, (7e10 + 3.3e5 * 160,000) bytes / 1.0e13 = 12 ms
of memory, and 4 ms + 20 * 0.02 ms of overhead: 17 ms.

The decode batch is padded to the sizes of captured graphs (1, 2, 4, then multiples of 8) unless the engine runs
eagerly. This is not the linear form that the planning side fits, on purpose: quadratic attention, padding and the
maximum are what it has to cope with.
Gauges and counters change when a step ends, as they do in vLLM; a stopped engine keeps showing its last gauges.

Steps in which everybody decodes and nobody waits are taken up to JUMP at a time, as one event of that many equal steps
(the noise of their mean is drawn). Whatever happens to the replica meanwhile first settles the steps that are complete
by then and cuts the jump at the end of the step under way, so that a new call waits for that step and for no more.
(A jump reserves its blocks at its start: memory in use runs ahead by at most two blocks per request.)
"""

from __future__ import annotations

import math

from models.fleetsim import events, memory, meters
from models.fleetsim.chance import lognormal
from models.fleetsim.compiled import compiled
from models.fleetsim.world import STEP_ENDS, Places, World

JUMP = 32


@compiled
def start(world: World, replica: int) -> None:
    """Begin a step, or a jump of several, of the calls that run; their `in_step` says what each brings into it."""
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
    steps = fewest if home.waiting == 0 and fewest > 1 and memory.reserve(world, replica, fewest) else 1
    padded = decoding if decoding <= 2 or pool.eager else 4 if decoding <= 4 else ((decoding + 7) // 8) * 8
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
            memory.share_system(world, index)
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
