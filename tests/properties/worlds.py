"""Fleets that behave: load comes and goes, replicas fail, and people follow recommendations, or do not.

Where `strategies` tries to break the arithmetic, this makes `step` decide: capacities are known, so that nearly every
change of the load leads to a move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from hypothesis import strategies as st

from controller.decisions import ControllerState, Decision, PoolState
from controller.observations import (
    Hole,
    Known,
    Nothing,
    Observation,
    PoolFleet,
    PoolObservation,
    ReplicaObservation,
    ReplicaState,
    SourceHole,
)
from controller.policy import FleetPolicy
from controller.step import step
from models.types import Estimate, Load

START_S = 1_790_000_000.0
ABSENT = Hole(Nothing.ABSENT, "nobody says")
PROMPT_TOKENS, OUTPUT_TOKENS, ITL_S = 1000.0, 100.0, 0.02


@dataclass(frozen=True, slots=True)
class PoolTick:
    """What happens to a pool before a tick. fault: the state of its first replica; follows: whether somebody does
    what was recommended or requested; extra: replicas that come or go by themselves; counted: a cluster is read."""

    offered_calls_per_s: float
    fault: ReplicaState = ReplicaState.SERVING
    unreadable: bool = False
    follows: bool = False
    extra: int = 0
    counted: bool = False


@dataclass(frozen=True, slots=True)
class WorldTick:
    """A tick of all pools after `wait_s`, and whether a source failed to answer."""

    wait_s: float
    partial: bool
    pools: tuple[PoolTick, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """One tick as it went."""

    before: ControllerState
    observation: Observation
    after: ControllerState
    decision: Decision


def pool_ticks() -> st.SearchStrategy[PoolTick]:
    """What may happen to a pool; mostly nothing but load."""
    load = st.one_of(st.sampled_from([0.0, 0.0, 5.0]), st.floats(0, 400))
    fault = st.one_of(st.just(ReplicaState.SERVING), st.just(ReplicaState.SERVING), st.sampled_from(ReplicaState))
    rarely = st.integers(0, 9).map(lambda n: n == 0)
    return st.builds(PoolTick, load, fault, rarely, st.booleans(), st.sampled_from([0, 0, 0, 0, -1, 1]), st.booleans())


def scripts(pools: int, most: int = 16) -> st.SearchStrategy[list[WorldTick]]:
    """Up to `most` ticks of so many pools."""
    rarely = st.integers(0, 9).map(lambda n: n == 0)
    wait_s = st.sampled_from([15.0] * 5 + [60.0] * 3 + [300.0] * 2 + [1200.0, 0.0, -30.0])
    tick = st.builds(WorldTick, wait_s, rarely, st.tuples(*[pool_ticks()] * pools))
    return st.lists(tick, min_size=most // 2, max_size=most)


def learnt(policy: FleetPolicy) -> ControllerState:
    """The memory of a daemon that has known the pools of a policy for long."""
    load = Load(10.0, PROMPT_TOKENS, OUTPUT_TOKENS, 0.5)
    known = Estimate((1.0,) * 4, tuple(0.0025 if i % 5 == 0 else 0.0 for i in range(16)), 256.0, 100)
    return ControllerState(pools=tuple(PoolState(name, load=load, estimate=known) for name in policy.pools))


def play(policy: FleetPolicy, script: Sequence[WorldTick], replicas: int = 3) -> Iterator[Played]:
    """Every tick of a script, with the state carried on; each pool starts with `replicas`."""
    state, now_s = learnt(policy), START_S
    there = dict.fromkeys(policy.pools, replicas)
    for tick in script:
        now_s += tick.wait_s
        pools = []
        for memory, happened in zip(state.pools, tick.pools, strict=True):
            if happened.follows and memory.standing is not None:
                there[memory.name] = memory.standing.replicas_after
            there[memory.name] = max(there[memory.name] + happened.extra, 0)
            pools.append(pool_observation(memory.name, there[memory.name], happened))
        holes = (SourceHole("prometheus", "a query timed out"),) if tick.partial else ()
        observation = Observation(now_s, 60.0, tuple(pools), (), holes)
        before = state
        state, decision = step(policy, state, observation)
        yield Played(before, observation, state, decision)


def pool_observation(name: str, count: int, happened: PoolTick) -> PoolObservation:
    """A pool of `count` replicas, of which the first is as it is said to be and the others serve."""
    states = [happened.fault, *[ReplicaState.SERVING] * (count - 1)][:count]
    offered = happened.offered_calls_per_s
    serving = states.count(ReplicaState.SERVING)
    values = {
        "offered_calls_per_s": offered,
        "served_calls_per_s": offered,
        "prompt_tokens_per_s": offered * PROMPT_TOKENS,
        "computed_prompt_tokens_per_s": offered * PROMPT_TOKENS / 2,
        "generation_tokens_per_s": offered * OUTPUT_TOKENS,
    }
    if offered > 0:
        values |= {"itl_mean_s": ITL_S, "hit_ratio": 0.5}
    readings = {field.name: ABSENT for field in fields(PoolObservation) if field.type == "Reading"}
    if serving:
        readings |= {field: Known(value, 2.0) for field, value in values.items()}
    replicas = [_replica(f"r{n}", state, offered / max(serving, 1)) for n, state in enumerate(states)]
    if happened.unreadable and replicas:
        replicas[-1] = replace(replicas[-1], first_tokens_per_s=ABSENT)
    wanted = Known(float(count), 1.0) if happened.counted else ABSENT
    return PoolObservation(
        name, tuple(replicas), (), PoolFleet(name, wanted, ABSENT, ABSENT, ABSENT, ABSENT), **readings
    )


def _replica(name: str, state: ReplicaState, calls_per_s: float) -> ReplicaObservation:
    readings = {field.name: ABSENT for field in fields(ReplicaObservation) if field.type == "Reading"}
    if state is ReplicaState.SERVING:
        readings |= {"first_tokens_per_s": Known(calls_per_s, 2.0), "waiting": Known(0.0, 2.0)}
    return ReplicaObservation(name, state, "" if state is ReplicaState.SERVING else "as told", **readings)
