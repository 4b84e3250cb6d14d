"""One tick's decision: the order of the stages, and nothing else.

    step(policy, state, observation) -> (state, decision)

is a pure, total function: the same values give the same bytes, whatever they are, and nothing is raised. The live
daemon, `trimtab replay`, the demo and every benchmark call this one function. Its stages:

    estimate   what calls are made of, what an engine step costs, what a replica carries    models.capacity
    forecast   offered load at the end of the pool's lead time                              models.demand
    assess     where the pool stands, what a failure would do                               models.triangle, cascade
    plan       replicas for that load, with the binding constraint                          models.plan
    guard      what is left of the plan                                                     controller.guards

Wanted, requested and observed are three things. A move that was recommended or requested is remembered as `Standing`:
it is not made again while it stands (controller.standing says how long that is).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from controller import guards, reasons, standing, whatif
from controller.alarms import Watched, alarms
from controller.decisions import (
    ActionKind,
    Assessment,
    Change,
    ControllerState,
    Decision,
    Expected,
    Hold,
    Mode,
    Move,
    PoolState,
    Quadrant,
    ReplicaMemory,
    Scale,
    Stage,
    Standing,
)
from controller.followed import followed, pool_owner
from controller.freeze import frozen_until
from controller.guards import Context, Ledger, Proposal
from controller.loads import Window, load_of, saturated_calls_per_s, steps_of
from controller.observations import Hole, Known, Observation, PoolObservation, Reading, ReplicaState, Status
from controller.policy import FleetPolicy
from controller.pools import model_pool, model_slo, unobserved
from models import capacity, cascade, demand, plan, triangle
from models.demand import Quantity
from models.types import (
    Capacity,
    Estimate,
    Forecast,
    Load,
    Performance,
    Placement,
    Pool,
    Situation,
    Slo,
    Target,
    Unknown,
    Unloaded,
)

HISTORY_S = 120.0
"""How much load history the first forecast needs."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One pool on its way through the stages."""

    pool: Pool
    slo: Slo
    observation: PoolObservation
    memory: PoolState
    load: Load | Unknown
    assessment: Assessment
    current: int


@dataclass(frozen=True, slots=True)
class _Seeing:
    """One pool as it enters the stages."""

    pool: Pool
    slo: Slo
    observation: PoolObservation
    window: Window


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one pool's stages share."""

    pool: Pool
    slo: Slo
    observation: PoolObservation
    load: Load | Unknown
    estimate: Estimate | None


def step(policy: FleetPolicy, state: ControllerState, observation: Observation) -> tuple[ControllerState, Decision]:
    """The next state and the decision for an observation. Total, deterministic, free of I/O."""
    tick, now_s = state.tick + 1, observation.now_s
    if not isfinite(now_s):
        blind = tuple(Hold(name, ActionKind.SCALE, "the observation has no valid time") for name in policy.pools)
        return replace(state, tick=tick), Decision(tick, now_s, (), (*blind, *_service_holds(policy)), (), ())
    learnt = demand.observe(state.demand, now_s, followed(policy, observation))
    seen = _estimate_and_assess(policy, state, observation, demand.Outlook(learnt))
    seen = _plan(policy, seen)
    ledger = _ledger(policy, seen)
    partial = f"{observation.holes[0].source}: {observation.holes[0].detail}" if observation.holes else None
    frozen = {name: frozen_until(policy.freeze, now_s, name) for name in policy.pools} if policy.freeze else {}
    failed = frozenset(o.move_id for o in observation.outcomes if o.status in {Status.FAILED, Status.REFUSED})
    memories: dict[str, PoolState] = {}
    moves: list[Move] = []
    holds: list[Hold] = []
    for item in sorted(seen, key=_turn):
        pool = policy.pools[item.pool.name]
        context = Context(
            policy,
            pool,
            item.observation,
            item.memory,
            # What the pool promised itself is at its own disposal; what it keeps of that is taken again below.
            ledger.before(_promise(item, item.memory), pool),
            now_s,
            frozen.get(item.pool.name),
            partial,
            failed,
        )
        memory, verdict = _decide(item, context, tick)
        memories[item.pool.name] = memory
        ledger = context.ledger.after(_promise(item, memory), pool)
        if isinstance(verdict, Hold):
            holds.append(verdict)
            continue
        moves.append(verdict)
        if verdict.quadrant is not Quadrant.ADD:
            ledger = replace(ledger, scaling_in=item.pool.name)
    first = state.now_s is None or now_s - state.now_s > observation.window_s
    decision = Decision(
        tick,
        now_s,
        tuple(moves),
        (*holds, *_service_holds(policy)),
        alarms(observation, tuple(_watched(item, first=first) for item in seen), tuple(holds)),
        tuple(replace(item.assessment, standing=memories[item.pool.name].standing) for item in seen),
    )
    return ControllerState(tick, now_s, tuple(memories[item.pool.name] for item in seen), learnt), decision


# ------------------------------------------------------------------------------------------- estimate, forecast, assess


def _estimate_and_assess(
    policy: FleetPolicy, state: ControllerState, observation: Observation, outlook: demand.Outlook
) -> list[_Seen]:
    memories = {memory.name: memory for memory in reversed(state.pools)}
    observed = {pool.name: pool for pool in reversed(observation.pools)}
    service_of = {pool: service for service, entry in policy.services.items() for pool in entry.pools}
    seen = []
    for name in policy.pools:
        pool_observation = observed.get(name)
        memory = memories.get(name, PoolState(name))
        if pool_observation is None:
            pool_observation = unobserved(name)
        service = service_of[name]
        pool, slo = model_pool(policy, name, service), model_slo(policy.services[service].slo)
        since_s = observation.window_s if state.now_s is None else observation.now_s - state.now_s
        window = Window(observation.window_s, max(since_s, 0.0))
        item = _assess(_Seeing(pool, slo, pool_observation, window), memory, observation.now_s)
        better = outlook.forecast(demand.series(pool_owner(name), Quantity.CALLS), observation.now_s, pool.cold_start_s)
        if better is not None and isinstance(item.assessment.forecast, Forecast):
            item = replace(item, assessment=replace(item.assessment, forecast=better))
        if name not in observed:
            item = replace(item, memory=replace(item.memory, replicas=memory.replicas))
        seen.append(item)
    return seen


def _assess(seeing: _Seeing, memory: PoolState, now_s: float) -> _Seen:
    pool, slo, observation = seeing.pool, seeing.slo, seeing.observation
    load = load_of(observation, memory.load)
    serving = observation.count(ReplicaState.SERVING)
    offered = _known(observation.offered_calls_per_s)
    estimate = memory.estimate
    if serving == len(observation.replicas):
        # A pool with a dead, stopped or sleeping replica is in a transient, from which nothing general is learnt.
        estimate = capacity.update(estimate, pool, steps_of(observation, seeing.window), load)
    history = demand.update(memory.history, now_s, offered, HISTORY_S)
    carries = capacity.capacity(estimate, pool, slo, load, _known(observation.kv_capacity_tokens))
    served = saturated_calls_per_s(observation, slo)
    full_since_s = None if served is None else now_s if memory.full_since_s is None else min(memory.full_since_s, now_s)
    if full_since_s is not None and now_s - full_since_s >= seeing.window.window_s:
        # Rates are means over the window: only now all of it lies in the time that replicas were full.
        carries = capacity.at_most(carries, served)
    assessment = Assessment(
        pool=pool.name,
        capacity=carries,
        forecast=demand.forecast(history, now_s, pool.cold_start_s),
        placement=_place(_Stage(pool, slo, observation, load, estimate), carries),
        margins=cascade.margins(pool, carries, load, serving),
        target=Unknown("not planned yet"),
    )
    memory = replace(
        memory,
        replicas=_remember(memory.replicas, observation, now_s),
        history=history,
        load=load if isinstance(load, Load) else memory.load,
        estimate=estimate,
        full_since_s=full_since_s,
        scaled_at_s=tuple(min(at_s, now_s) for at_s in memory.scaled_at_s if now_s - at_s < 3600),
    )
    return _Seen(pool, slo, observation, memory, load, assessment, _current(observation))


def _place(seen: _Stage, carries: Capacity | Unknown) -> Placement | Unknown:
    """The pool on its triangle. Where there are no task metrics a call is a task."""
    observation, pool = seen.observation, seen.pool
    unloaded = capacity.unloaded(seen.estimate, pool, seen.load)
    offered, served = _known(observation.offered_calls_per_s), _known(observation.served_calls_per_s)
    good = _known(observation.ttft_good_ratio)
    usd_per_s = pool.usd_per_gpu_h * pool.gpus_per_replica / 3600
    best = usd_per_s / carries.warm_calls_per_s.mid if isinstance(carries, Capacity) else None
    served_well = served * good if served is not None and good is not None else None
    return triangle.place(
        Performance(
            slo=seen.slo,
            ttft_s=_known(observation.ttft_s),
            tpot_s=_known(observation.itl_s),
            unloaded_ttft_s=unloaded.ttft_s if isinstance(unloaded, Unloaded) else None,
            unloaded_tpot_s=unloaded.tpot_s if isinstance(unloaded, Unloaded) else None,
            good_share=min(served_well / offered, 1.0) if served_well is not None and offered else None,
            usd_per_call=usd_per_s * len(observation.replicas) / served_well if served_well else None,
            best_usd_per_call=best,
        )
    )


def _remember(
    memories: tuple[ReplicaMemory, ...], observation: PoolObservation, now_s: float
) -> tuple[ReplicaMemory, ...]:
    """When each replica's telemetry was last fresh; one that is not observed any more is forgotten."""
    there = {replica.name for replica in observation.replicas}
    # A clock that was set back must not make a replica immortal: nothing was seen later than now.
    last = {m.name: min(m.last_seen_s, now_s) for m in memories if m.name in there}
    first = {m.name: m.first_seen_s for m in memories}
    since_s = now_s if memories else 0.0
    missing = {ReplicaState.DOWN, ReplicaState.BLIND}
    last.update({replica.name: now_s for replica in observation.replicas if replica.state not in missing})
    return tuple(ReplicaMemory(name, at_s, first.get(name, since_s)) for name, at_s in sorted(last.items()))


def _current(observation: PoolObservation) -> int:
    """How many replicas there should be now: the cluster's word, else every replica that is known of."""
    wanted = _known(observation.fleet.wanted)
    return round(wanted) if wanted is not None and 0 <= wanted < 1e6 else len(observation.replicas)


# --------------------------------------------------------------------------------------------------------------- plan


def _plan(policy: FleetPolicy, seen: list[_Seen]) -> list[_Seen]:
    situations = tuple(
        Situation(
            pool=item.pool,
            replicas=item.observation.count(ReplicaState.SERVING),
            starting=_starting(item),
            demand=item.assessment.forecast,
            capacity=item.assessment.capacity,
        )
        for item in seen
    )
    targets = plan.plan(situations, policy.limits.headroom).targets
    return [
        replace(item, assessment=replace(item.assessment, target=target))
        for item, target in zip(seen, targets, strict=True)
    ]


def _starting(item: _Seen) -> int:
    ordered = item.memory.standing
    if ordered is None or ordered.mode is not Mode.ACT:
        return 0
    return max(ordered.replicas_after - item.observation.count(ReplicaState.SERVING), 0)


def _ledger(policy: FleetPolicy, seen: list[_Seen]) -> Ledger:
    """GPUs that are neither held nor promised."""
    free = {name: gpu.count for name, gpu in policy.gpus.items()}
    for item in seen:
        replicas = standing.promised(item.memory, item.current)
        free[item.pool.gpu_type] = free.get(item.pool.gpu_type, 0) - replicas * item.pool.gpus_per_replica
    return Ledger(free, None)


def _promise(item: _Seen, memory: PoolState) -> Proposal:
    """From what is there to what stands: replicas that may still come."""
    return Proposal(item.pool.name, item.current, standing.promised(memory, item.current), ())


def _watched(item: _Seen, *, first: bool) -> Watched:
    return Watched(item.observation, item.slo, item.memory, item.pool.cold_start_s, first)


def _turn(item: _Seen) -> tuple[bool, float]:
    """Whose turn it is: pools that need more first, then those that have waited longest to give up a replica."""
    since_s = item.memory.fewer_since_s
    return since_s is not None, since_s if since_s is not None else 0.0


# -------------------------------------------------------------------------------------------------------------- guard


def _decide(item: _Seen, context: Context, tick: int) -> tuple[PoolState, Move | Hold]:
    chain = reasons.links(item.observation, item.assessment, item.slo, context.now_s)
    target = item.assessment.target
    name, current = item.pool.name, item.current
    memory = standing.settle(item.memory, current, context)
    offered = item.observation.offered_calls_per_s
    if _known(offered) is None:
        blind = not item.observation.count(ReplicaState.SERVING)
        why = offered.detail if isinstance(offered, Hole) else "its value is impossible"
        reason = f"no usable signal: {why}" if blind else f"the offered load is unknown: {why}"
        return replace(memory, fewer_since_s=None), Hold(name, ActionKind.SCALE, reason)
    if isinstance(target, Unknown):
        return replace(memory, fewer_since_s=None), Hold(name, ActionKind.SCALE, target.reason)
    aim = max(target.replicas, context.pool.replicas.min)
    fewer_since_s = None
    if aim < standing.wanted(memory, current) and guards.doubted(item.observation, context.partial) is None:
        fewer_since_s = context.now_s if memory.fewer_since_s is None else min(memory.fewer_since_s, context.now_s)
    memory = replace(memory, fewer_since_s=fewer_since_s)
    context = replace(context, memory=memory)
    planned = Proposal(name, current, target.replicas, chain[-1:])
    if memory.standing is not None:
        verdict = standing.stands(memory.standing, planned, context)
        if verdict is not None:
            return memory, verdict
        memory = replace(memory, standing=None, fewer_since_s=None)
        context = replace(context, memory=memory)
    proposal = guards.narrow(planned, context)
    if isinstance(proposal, Hold):
        return memory, replace(proposal, changes=proposal.changes[1:])
    if proposal.replicas == current:
        return memory, Hold(name, ActionKind.SCALE, _enough(target, current), proposal.changes[1:])
    move = _move(item, proposal, (*chain, *proposal.changes[1:]), context, tick)
    return _after(memory, move, context), move


def _enough(target: Target, current: int) -> str:
    if target.replicas == current:
        return f"{reasons.replicas(current)} will do: {target.binding}"
    return f"{reasons.replicas(target.replicas)} would do, but the guards leave {current}"


def _move(item: _Seen, proposal: Proposal, chain: tuple[Change, ...], context: Context, tick: int) -> Move:
    name, before, after = item.pool.name, item.current, proposal.replicas
    if len(chain) == 4:
        chain = (*chain, Change(Stage.GUARDED, float(after), float(after), "no guard objected"))
    expected = _expected(item, before, after, context)
    return Move(
        id=f"{tick}-{name}",
        target=name,
        kind=ActionKind.SCALE,
        mode=context.policy.mode_of(ActionKind.SCALE, name),
        quadrant=Quadrant.ADD if after > before else Quadrant.SHARE,
        actions=(Scale(name, before, after),),
        changes=(*chain, Change(Stage.EXPECTED, float(before), float(after), reasons.expected(expected))),
        expected=expected,
    )


def _expected(item: _Seen, before: int, after: int, context: Context) -> Expected:
    """What the move should do, some minutes after its replicas serve or are gone."""
    usd_per_replica_h = item.pool.usd_per_gpu_h * item.pool.gpus_per_replica

    def margin(replicas: int) -> float | None:
        found = cascade.margins(item.pool, item.assessment.capacity, item.load, replicas)
        return None if isinstance(found, Unknown) else min((m.margin for m in found), default=None)

    part = whatif.part_of(item.pool, item.slo, item.observation, item.load, item.memory.estimate)
    clients = whatif.clients_of(context.policy.services[item.pool.service].clients)
    now = whatif.with_replicas(part, part.replicas, clients)
    then = whatif.with_replicas(part, after, clients)
    expected = Expected(
        at_s=context.now_s + (item.pool.cold_start_s if after > before else 0.0),
        usd_per_h_before=before * usd_per_replica_h,
        usd_per_h_after=after * usd_per_replica_h,
        margin_before=margin(before),
        margin_after=margin(after),
    )
    return whatif.foreseen(expected, now, then)


def _after(memory: PoolState, move: Move, context: Context) -> PoolState:
    scale = move.actions[0]
    if not isinstance(scale, Scale):
        return memory
    lead_s = context.pool.start.cold_s
    expires_s = context.now_s + standing.STANDING_LEADS * lead_s if move.mode is Mode.ACT else None
    stands = Standing(move.id, move.mode, scale.before, scale.after, context.now_s, expires_s)
    return replace(memory, standing=stands, fewer_since_s=None, scaled_at_s=(*memory.scaled_at_s, context.now_s))


def _service_holds(policy: FleetPolicy) -> tuple[Hold, ...]:
    """What is not decided is said: silence would read as consent."""
    holds = []
    for name, service in policy.services.items():
        why = "one pool serves it" if len(service.pools) == 1 else "no law for weights is in force"
        holds.append(Hold(name, ActionKind.WEIGHTS, f"weights stay as they are: {why}"))
        holds.append(Hold(name, ActionKind.ADMISSION, "limits stay as they are: no law for admission is in force"))
    return tuple(holds)


def _known(reading: Reading) -> float | None:
    return reading.value if isinstance(reading, Known) and isfinite(reading.value) else None
