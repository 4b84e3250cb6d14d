"""The guards: an ordered table of reasons to do less than was planned. Each only narrows, and says why.

A proposal says where a pool's number of replicas should go. A guard may bring it closer to where it is now, or turn
it into a `Hold`; it may never reverse it or push it further, and one guard alone, the floor, may raise it, and only to
the configured floor. `narrow` runs the table and enforces this rule on the guards themselves.

Doubt has a direction (contract 4): missing data never scales in. Scaling out on partial data is allowed, because what
is missing can only be more load.

What one pool takes from a shared budget (GPUs, the one scale-in per tick) must be seen by the next one, so pools are
narrowed one after another over a `Ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from controller import reasons
from controller.decisions import ActionKind, AlarmKind, Change, Hold, Mode, PoolState, Stage
from controller.observations import Known, PoolObservation, Reading, ReplicaState
from controller.policy import FleetPolicy, PoolPolicy


@dataclass(frozen=True, slots=True)
class Proposal:
    """A pool's number of replicas: where it is, where it should go, and the chain of reasons so far."""

    pool: str
    current: int
    replicas: int
    changes: tuple[Change, ...]

    @property
    def out(self) -> bool:
        """Whether it adds replicas."""
        return self.replicas > self.current

    @property
    def inwards(self) -> bool:
        """Whether it removes replicas."""
        return self.replicas < self.current

    def to(self, replicas: int, reason: str) -> Proposal:
        """The proposal with another number of replicas, and the reason on its chain."""
        change = Change(Stage.GUARDED, float(self.replicas), float(replicas), reason)
        return replace(self, replicas=replicas, changes=(*self.changes, change))

    def hold(self, reason: str, alarm: AlarmKind | None = None) -> Hold:
        """The end of the proposal: nothing is done, and why."""
        change = Change(Stage.GUARDED, float(self.replicas), float(self.current), reason)
        return Hold(self.pool, ActionKind.SCALE, reason, (*self.changes, change), alarm)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is left of the shared budgets of this tick: GPUs by type, and whether a pool already scales in."""

    gpus_free: Mapping[str, int]
    scaling_in: str | None

    def after(self, proposal: Proposal, pool: PoolPolicy) -> Ledger:
        """The ledger once the proposal is done. GPUs are given back only when they are seen to be free."""
        if proposal.inwards:
            return replace(self, scaling_in=proposal.pool)
        return self._given(pool, (proposal.current - proposal.replicas) * pool.gpu.per_replica)

    def before(self, proposal: Proposal, pool: PoolPolicy) -> Ledger:
        """The ledger without a proposal that it was written for: what was kept for it is free again."""
        return self._given(pool, max(proposal.replicas - proposal.current, 0) * pool.gpu.per_replica)

    def _given(self, pool: PoolPolicy, gpus: int) -> Ledger:
        return replace(self, gpus_free={**self.gpus_free, pool.gpu.type: self.gpus_free.get(pool.gpu.type, 0) + gpus})


@dataclass(frozen=True, slots=True)
class Context:
    """What is known of a pool while its move is narrowed.

    frozen_until_s: Unix s, None outside freeze windows; partial: what is missing from the whole observation, if
    anything; failed: ids of moves that were refused or failed at the tick before.
    """

    policy: FleetPolicy
    pool: PoolPolicy
    observation: PoolObservation
    memory: PoolState
    ledger: Ledger
    now_s: float
    frozen_until_s: float | None
    partial: str | None
    failed: frozenset[str] = frozenset()


Guard = Callable[[Proposal, Context], Proposal | Hold]


def mode(proposal: Proposal, context: Context) -> Proposal | Hold:
    """A pool in observe mode is only watched."""
    if context.policy.mode_of(ActionKind.SCALE, proposal.pool) is Mode.OBSERVE:
        return proposal.hold("mode observe: the pool is watched, nothing is recommended")
    return proposal


def doubt(proposal: Proposal, context: Context) -> Proposal | Hold:
    """Missing data never scales in."""
    why = doubted(context.observation, context.partial)
    return proposal.hold(f"no scale-in while {why}") if proposal.inwards and why is not None else proposal


def doubted(observation: PoolObservation, partial: str | None) -> str | None:
    """What is missing from the picture of a pool, as a clause; None where it is whole."""
    for replica in observation.replicas:
        if replica.state not in {ReplicaState.SERVING, ReplicaState.ASLEEP}:
            return f"{replica.name} is {replica.state.value} ({replica.detail})"
        if replica.state is ReplicaState.SERVING and not _number(replica.first_tokens_per_s):
            return f"the load of {replica.name} is unknown"
        if replica.state is ReplicaState.SERVING and not _number(replica.waiting):
            return f"the queue of {replica.name} is unknown"
    if not _number(observation.offered_calls_per_s):
        return "the offered load is unknown"
    return None if partial is None else f"telemetry is partial ({partial})"


def _number(reading: Reading) -> bool:
    return isinstance(reading, Known) and isfinite(reading.value)


def frozen(proposal: Proposal, context: Context) -> Proposal | Hold:
    """Nothing is moved inside a freeze window."""
    if context.frozen_until_s is None:
        return proposal
    return proposal.hold(f"frozen by the policy for another {reasons.span(context.frozen_until_s - context.now_s)}")


def dwell(proposal: Proposal, context: Context) -> Proposal | Hold:
    """Scale in one replica at a time, and only after fewer have been enough for a while without interruption."""
    if not proposal.inwards:
        return proposal
    since_s = context.memory.fewer_since_s
    waited_s = 0.0 if since_s is None else context.now_s - since_s
    wanted_s = context.policy.limits.scale_in_hold_s
    if waited_s < wanted_s:
        return proposal.hold(f"fewer replicas have been enough for {waited_s:.0f} s, scale-in waits for {wanted_s:g} s")
    if proposal.replicas < proposal.current - 1:
        return proposal.to(proposal.current - 1, "scale-in removes one replica at a time")
    return proposal


def one_scale_in(proposal: Proposal, context: Context) -> Proposal | Hold:
    """One pool per tick scales in."""
    if proposal.inwards and context.ledger.scaling_in is not None:
        return proposal.hold(f"{context.ledger.scaling_in} scales in at this tick; one pool at a time")
    return proposal


def floor(proposal: Proposal, context: Context) -> Proposal | Hold:
    """The configured minimum: the only guard that may raise, and only to it."""
    lowest = context.pool.replicas.min
    if proposal.replicas < lowest:
        return proposal.to(lowest, f"the policy's minimum is {lowest}")
    return proposal


def ceiling(proposal: Proposal, context: Context) -> Proposal | Hold:
    """The configured maximum."""
    highest = context.pool.replicas.max
    if proposal.out and proposal.replicas > highest:
        return proposal.to(max(highest, proposal.current), f"the policy's maximum is {highest}")
    return proposal


def step_size(proposal: Proposal, context: Context) -> Proposal | Hold:
    """At most so many replicas per step."""
    most = context.policy.limits.replicas_per_step
    if proposal.replicas > proposal.current + most:
        return proposal.to(proposal.current + most, f"at most {most} replicas per step")
    return proposal


def inventory(proposal: Proposal, context: Context) -> Proposal | Hold:
    """GPUs that exist, less those that are held or promised. Never exceeded, not even in the middle of a move."""
    if not proposal.out:
        return proposal
    gpu = context.pool.gpu
    free = max(context.ledger.gpus_free.get(gpu.type, 0), 0)
    possible = proposal.current + free // gpu.per_replica
    if possible <= proposal.current:
        reason = f"no {gpu.type} is free ({free} left, a replica needs {gpu.per_replica})"
        return proposal.hold(reason, AlarmKind.INVENTORY_EXHAUSTED)
    if proposal.replicas > possible:
        return proposal.to(possible, f"{free} {gpu.type} are free, a replica needs {gpu.per_replica}")
    return proposal


def budget(proposal: Proposal, context: Context) -> Proposal | Hold:
    """At most so many changes per hour and pool."""
    most = context.policy.limits.scalings_per_hour
    recent = sum(context.now_s - at_s < 3600 for at_s in context.memory.scaled_at_s)
    if proposal.replicas != proposal.current and recent >= most:
        return proposal.hold(f"{recent} changes in the last hour, the policy allows {most}")
    return proposal


GUARDS: tuple[Guard, ...] = (
    mode,
    frozen,
    floor,
    doubt,
    dwell,
    one_scale_in,
    ceiling,
    step_size,
    inventory,
    budget,
)
"""In this order. `floor` stands before those that limit how fast a pool may get there, and before `doubt`: missing
data must not keep a pool below its minimum."""


def narrow(proposal: Proposal, context: Context) -> Proposal | Hold:
    """Run the proposal through the guards, in order, to what is left of it."""
    for guard in GUARDS:
        verdict = guard(proposal, context)
        if isinstance(verdict, Hold):
            return verdict
        if not _narrower(proposal, verdict, context.pool.replicas.min if guard is floor else None):
            # A guard that widens is a bug; the safe answer to a bug in a safety net is to do nothing.
            return proposal.hold(f"the guard {guard.__name__} tried to widen the move: please report this")
        proposal = verdict
    return proposal


def _narrower(before: Proposal, after: Proposal, lowest: int | None) -> bool:
    if before.current != after.current or before.pool != after.pool:
        return False
    if lowest is not None and after.replicas > before.replicas:
        return after.replicas == lowest
    between = sorted((before.current, before.replicas))
    return between[0] <= after.replicas <= between[1]
