"""Clients and their tasks: arrivals, steps, timeouts, retries, and what a failure costs.

A task is a session of some steps. Each step sends the system prompt, the history so far and some new input; the answer
joins the history; a tool or a human takes a while; the next step follows. A step that gets no first token in time, or
no end in time, is aborted and tried again after a backoff, as is one that was refused, unless it was told not to. A
stream that is cut after its first token can't simply be sent again: the step is lost. When a step fails for good, the
task has failed and everything it spent is waste; some users then begin it anew.
"""

from __future__ import annotations

import math
from typing import Any

from models.fleetsim import cache, engine, events, frontend, gateway, meters
from models.fleetsim.chance import bits, exponential, lognormal, uniform
from models.fleetsim.compiled import compiled
from models.fleetsim.world import (
    CALLS_LEFT,
    CLIENT_SENDS,
    CONTINUING,
    FIRST,
    FREE,
    LIVE,
    NEW,
    NO_TASK,
    RETRY,
    TASK_ARRIVES,
    TASKS_LEFT,
    TO_BEGIN_ANEW,
    TOTAL_TIMEOUT,
    TTFT_TIMEOUT,
    WARM_UP,
    WARMED_OUTPUT,
    WARMED_PROMPT,
    Shares,
    World,
)


@compiled
def next_arrival(world: World, service: int) -> float:
    """When the next task of a service arrives: a Poisson process whose rate is constant within each bin, exactly."""
    width, bins = world.services[service].rate_bin_s, world.services[service].bins
    work, at_s, period = exponential(world.random), world.clock[0], 0.0
    for place in range(bins):
        period += world.rates[service, place] * width
    if period <= 0.0:
        return math.inf
    whole = int(work / period)
    work -= whole * period
    at_s += whole * bins * width
    for _ in range(2 * bins + 2):
        place = int(at_s / width + 1e-9)
        rate, end_s = world.rates[service, place % bins], (place + 1) * width
        if rate * (end_s - at_s) > work:
            return at_s + work / rate
        work -= rate * (end_s - at_s)
        at_s = end_s
    return at_s


@compiled
def arrive(world: World, service: int, number: int) -> None:
    """A task arrives, and the next arrival is set. number: its place in the trace, -1 of the random ones."""
    begin(world, service, -1, -1, 0)
    if number >= 0:
        if number + 1 < world.traces.shape[1] and world.traces[service, number + 1] < math.inf:
            events.push(world, world.traces[service, number + 1], TASK_ARRIVES, service, number + 1)
        return
    at_s = next_arrival(world, service)
    if at_s < math.inf:
        events.push(world, at_s, TASK_ARRIVES, service, -1)


@compiled
def _drawn(world: World, shares: Shares) -> int:
    point, chosen = uniform(world.random), 0
    for index in range(len(shares)):
        if shares[index] > 0.0:
            chosen = index
            point -= shares[index]
            if point < 0.0:
                break
    return chosen


@compiled
def _new_task(world: World, service: int, state: int) -> int:
    """A row for a task, empty but for its state, its service and the hash of its session."""
    left = world.free_left[TASKS_LEFT] - 1
    if left < 0:
        raise IndexError("too many tasks at once: the scenario is larger than the plant was made for")
    world.free_left[TASKS_LEFT] = left
    index = world.free_tasks[left]
    task = world.tasks[index]
    task.live, task.serial, task.service, task.profile, task.klass = state, events.serial(world), service, 0, 0
    task.step, task.steps, task.attempt, task.resubmits = 0, 1, 0, 0
    task.history, task.input, task.output, task.call, task.chains = 0, 0, 0, -1, -1
    task.began_s, task.spent_prompt, task.spent_output = world.clock[0], 0.0, 0.0
    task.home = bits(world.random)
    return index


@compiled
def begin(world: World, service: int, profile: int, klass: int, resubmits: int) -> None:
    """Begin a task, of a given profile and class or of drawn ones; it sends its first step at once."""
    index = _new_task(world, service, LIVE)
    task = world.tasks[index]
    task.resubmits = resubmits
    task.profile = profile if profile >= 0 else _drawn(world, world.profile_share[service])
    task.klass = klass if klass >= 0 else _drawn(world, world.class_share[service])
    kind = world.profiles[task.profile]
    steps = int(lognormal(world.random, kind.steps_mean, kind.steps_sigma) + 0.5)
    task.steps = min(max(steps, 1), kind.steps_max)
    world.tallies[service, task.klass, task.profile].started += 1
    if resubmits > 0:
        world.tallies[service, task.klass, task.profile].resubmitted += 1
    _prepare(world, index)
    send(world, index)


@compiled
def warm(world: World, service: int, profile: int, replica: int) -> None:
    """The controller sends a replica a profile's system prompt and asks for one token; no gateway, no client."""
    index = _new_task(world, service, WARM_UP)
    task = world.tasks[index]
    task.profile, task.output = profile, 1
    number = _new_call(world, index)
    world.free_left[CALLS_LEFT] -= 1
    task.call = number
    world.calls[number].replica = replica
    frontend.receive(world, number)


@compiled
def _prepare(world: World, index: int) -> None:
    """Draw the next step's input and output; a history that grew too long is cut down to half."""
    task = world.tasks[index]
    kind = world.profiles[task.profile]
    task.input = max(int(lognormal(world.random, kind.input_mean, kind.input_sigma)), 1)
    task.output = max(int(lognormal(world.random, kind.output_mean, kind.output_sigma)), 1)
    task.attempt = 0
    room = kind.context_max - kind.system_tokens
    task.input, task.output = min(task.input, room // 4), min(task.output, room // 4)
    if task.history + task.input + task.output > room:
        task.history = room // 2 - task.input - task.output
        # Another beginning, other hashes: nothing of the session that is cached will be found again.
        cache.orphan(world, index)


@compiled
def _new_call(world: World, index: int) -> int:
    """Fill a free row with the present step of a task. The row is the caller's only once it lowers `free_left`."""
    left = world.free_left[CALLS_LEFT] - 1
    if left < 0:
        raise IndexError("too many calls at once: the scenario is larger than the plant was made for")
    number = world.free_calls[left]
    task, call = world.tasks[index], world.calls[number]
    call.serial, call.task, call.attempt = events.serial(world), index, task.attempt
    call.prompt = world.profiles[task.profile].system_tokens + task.history + task.input
    call.output, call.target = task.output, call.prompt
    call.computed, call.generated, call.in_step, call.own_blocks, call.preempted, call.cached = 0, 0, 0, 0, 0, 0
    call.system_held, call.prefilled, call.starved_s = 0, 0, -1.0
    call.chain, call.uses_system, call.first_s = -1, -1, -1.0
    call.sent_s, call.queued_s, call.admitted_s = world.clock[0], world.clock[0], world.clock[0]
    return number


@compiled
def send(world: World, index: int) -> None:
    """Send the present step of a task to the gateway."""
    task = world.tasks[index]
    service = world.services[task.service]
    stage, attempt = NEW if task.step == 0 else CONTINUING, FIRST if task.attempt == 0 else RETRY
    counts = world.counts[task.service, task.klass, stage, attempt]
    counts.sent += 1
    verdict = gateway.passes(world, task.service, task.klass, stage, attempt)
    if verdict != gateway.ADMITTED:
        counts.limited += 1
        _try_again(world, index, verdict != gateway.LIMITED_FOR_GOOD, service.retry_after_s)
        return
    number = _new_call(world, index)
    call = world.calls[number]
    verdict = gateway.route(world, number, task.home)
    if verdict == gateway.ADMITTED:
        world.free_left[CALLS_LEFT] -= 1
        task.call = number
        counts.admitted += 1
        patience = service.ttft_timeout_s * (0.8 + 0.4 * uniform(world.random))
        events.push(world, call.sent_s + patience, TTFT_TIMEOUT, number, call.serial)
        events.push(world, call.sent_s + service.total_timeout_s, TOTAL_TIMEOUT, number, call.serial)
        return
    call.state = FREE
    if verdict == gateway.OVERFLOWED:
        counts.overflowed += 1
    elif verdict == gateway.REFUSED:
        counts.refused += 1
    else:
        counts.unroutable += 1
    _try_again(world, index, True, 0.0)


@compiled
def _try_again(world: World, index: int, may: bool, retry_after_s: float) -> None:
    """After a refusal or a timeout: send again after a backoff, or give the task up.

    A client that heeds `Retry-After` waits as long as it says instead, if that is at most a minute (as SDKs do).
    """
    task = world.tasks[index]
    service = world.services[task.service]
    if not may or task.attempt >= service.retries:
        fail(world, index)
        return
    wait_s = service.backoff_s * 2.0**task.attempt * (0.5 + uniform(world.random))
    if service.heeds_retry_after and 0.0 < retry_after_s <= 60.0:
        wait_s = retry_after_s
    task.attempt += 1
    events.push(world, world.clock[0] + wait_s, CLIENT_SENDS, index, task.serial)


@compiled
def _hang_up(world: World, number: int) -> None:
    """The call ends for its client; what was spent on it counts, and its row is free again."""
    call = world.calls[number]
    task = world.tasks[call.task]
    task.spent_prompt += call.prefilled
    task.spent_output += call.generated
    task.call = -1
    call.state = FREE
    world.free_calls[world.free_left[CALLS_LEFT]] = number
    world.free_left[CALLS_LEFT] += 1


@compiled
def _end_warm_up(world: World, number: int) -> bool:
    """End a warm-up that is done or lost; False where the call is a client's."""
    index = world.calls[number].task
    if world.tasks[index].live != WARM_UP:
        return False
    engine.leave(world, number)
    _hang_up(world, number)
    world.numbers[WARMED_PROMPT] += int(world.tasks[index].spent_prompt)
    world.numbers[WARMED_OUTPUT] += int(world.tasks[index].spent_output)
    _end(world, index)
    return True


@compiled
def counts_of(world: World, number: int) -> Any:
    """The gateway's counters for a call's class, stage and attempt."""
    call = world.calls[number]
    task = world.tasks[call.task]
    stage, attempt = NEW if task.step == 0 else CONTINUING, FIRST if call.attempt == 0 else RETRY
    return world.counts[task.service, task.klass, stage, attempt]


@compiled
def _of_pool(world: World, number: int) -> Any:
    """The gateway's counters for the pool that a call went to."""
    return world.pool_counts[world.replicas[world.calls[number].replica].pool]


@compiled
def time_out(world: World, number: int, mark: int, only_before_first: bool) -> None:
    """A client's patience ends: the call is aborted at its engine, and tried again or given up."""
    call = world.calls[number]
    if call.state == FREE or call.serial != mark or (only_before_first and call.generated > 0):
        return
    counts_of(world, number).timed_out += 1
    _of_pool(world, number).timed_out += 1
    index, replica = call.task, call.replica
    engine.leave(world, number)
    _hang_up(world, number)
    engine.schedule(world, replica)
    _try_again(world, index, True, 0.0)


@compiled
def lose(world: World, number: int) -> None:
    """A call's engine is gone. Without a first token the client tries again; a cut stream loses the step."""
    if _end_warm_up(world, number):
        return
    call = world.calls[number]
    index, cut = call.task, call.generated > 0
    if cut:
        counts_of(world, number).cut += 1
        _of_pool(world, number).cut += 1
    else:
        counts_of(world, number).lost += 1
        _of_pool(world, number).lost += 1
    engine.leave(world, number)
    _hang_up(world, number)
    if cut:
        fail(world, index)
    else:
        _try_again(world, index, True, 0.0)


@compiled
def complete(world: World, number: int) -> None:
    """A call has all its tokens: the next step after a gap, or the task has succeeded."""
    meters.finished(world, number)
    if _end_warm_up(world, number):
        return
    call = world.calls[number]
    index = call.task
    task = world.tasks[index]
    counts, of_pool = counts_of(world, number), _of_pool(world, number)
    counts.finished += 1
    of_pool.finished += 1
    if call.first_s - call.sent_s <= world.services[task.service].slo_ttft_s:
        counts.in_slo += 1
        of_pool.in_slo += 1
    engine.leave(world, number)
    _hang_up(world, number)
    task.history += task.input + task.output
    task.step += 1
    if task.step >= task.steps:
        tally = world.tallies[task.service, task.klass, task.profile]
        tally.succeeded += 1
        tally.good_prompt += task.spent_prompt
        tally.good_output += task.spent_output
        _end(world, index)
        return
    kind = world.profiles[task.profile]
    human = uniform(world.random) < kind.human_share
    gap_s = lognormal(world.random, kind.human_gap_s if human else kind.gap_mean_s, kind.gap_sigma)
    _prepare(world, index)
    events.push(world, world.clock[0] + gap_s, CLIENT_SENDS, index, task.serial)


@compiled
def fail(world: World, index: int) -> None:
    """A step has failed for good, and the task with it; the user may begin anew later."""
    task = world.tasks[index]
    service = world.services[task.service]
    tally = world.tallies[task.service, task.klass, task.profile]
    tally.failed += 1
    tally.lost_prompt += task.spent_prompt
    tally.lost_output += task.spent_output
    if uniform(world.random) < service.resubmit_share:
        # The row itself waits, as a task that is not live, to be begun anew.
        task.live = TO_BEGIN_ANEW
        cache.orphan(world, index)
        wait_s = service.resubmit_after_s * exponential(world.random)
        events.push(world, world.clock[0] + wait_s, CLIENT_SENDS, index, task.serial)
        return
    _end(world, index)


@compiled
def _end(world: World, index: int) -> None:
    cache.orphan(world, index)
    world.tasks[index].live = NO_TASK
    world.free_tasks[world.free_left[TASKS_LEFT]] = index
    world.free_left[TASKS_LEFT] += 1


@compiled
def wake(world: World, index: int, mark: int) -> None:
    """A client's timer: send the step, or begin a failed task anew."""
    task = world.tasks[index]
    if task.serial != mark or task.live == NO_TASK:
        return
    if task.live == TO_BEGIN_ANEW:
        service, profile, klass, resubmits = task.service, task.profile, task.klass, task.resubmits + 1
        _end(world, index)
        begin(world, service, profile, klass, resubmits)
        return
    send(world, index)
