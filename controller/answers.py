"""What the HTTP API says, as values, and their JSON. Pure: records in, bytes out.

JSON here is strict: a number that is not finite becomes null, and an action says its kind, because the fields alone
don't tell sleeping replicas from waking them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import assert_never

from controller.decisions import (
    Action,
    ActionKind,
    Alarm,
    Assessment,
    Decision,
    Hold,
    Move,
    Scale,
    SetAdmission,
    ShiftWeights,
    Sleep,
    TickRecord,
    Wake,
    WarmCache,
)
from controller.observations import Outcome


@dataclass(frozen=True, slots=True)
class StateAnswer:
    """The body of /api/v1/state."""

    ready: bool
    missing: tuple[str, ...]
    heartbeat_age_s: float | None
    record: TickRecord | None


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """One element of the body of /api/v1/decisions: a record without its observation."""

    tick: int
    now_s: float
    policy_sha256: str
    moves: tuple[Move, ...]
    holds: tuple[Hold, ...]
    alarms: tuple[Alarm, ...]
    assessments: tuple[Assessment, ...]
    outcomes: tuple[Outcome, ...]


def encode(value: object) -> bytes:
    """Strict JSON of a value made of dataclasses, tuples, enums and plain scalars; NaN and infinities become null."""
    return json.dumps(_finite(value), default=_plain, allow_nan=False, separators=(",", ":")).encode()


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_finite(one) for one in value]
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case _:
            return value


def _plain(value: object) -> dict[str, object]:
    """One dataclass as a dict. json asks for it level by level, so Python can let other threads run in between."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    plain = {field.name: _finite(getattr(value, field.name)) for field in fields(value)}
    return {"kind": _kind(value), **plain} if isinstance(value, Action) else plain


def _kind(action: Action) -> ActionKind:
    match action:
        case Scale():
            return ActionKind.SCALE
        case Sleep():
            return ActionKind.SLEEP
        case Wake():
            return ActionKind.WAKE
        case WarmCache():
            return ActionKind.WARM
        case ShiftWeights():
            return ActionKind.WEIGHTS
        case SetAdmission():
            return ActionKind.ADMISSION
        case _:
            assert_never(action)


def _touches(action: Action, pool: str) -> bool:
    match action:
        case Scale() | Sleep() | Wake() | WarmCache():
            return action.pool == pool
        case ShiftWeights():
            return any(weight.pool == pool for weight in (*action.before, *action.after))
        case SetAdmission():
            return False
        case _:
            assert_never(action)


def _about(decision: Decision, pool: str) -> Decision:
    """The part of a decision that concerns one pool."""
    return replace(
        decision,
        moves=tuple(
            move for move in decision.moves if move.target == pool or any(_touches(one, pool) for one in move.actions)
        ),
        holds=tuple(hold for hold in decision.holds if hold.target == pool),
        alarms=tuple(alarm for alarm in decision.alarms if alarm.target.partition("/")[0] == pool),
        assessments=tuple(one for one in decision.assessments if one.pool == pool),
    )


def about(record: TickRecord, pool: str | None) -> TickRecord:
    """A record, whole, or the part of it that concerns one pool."""
    if pool is None:
        return record
    observation = replace(
        record.observation,
        pools=tuple(one for one in record.observation.pools if one.name == pool),
        services=(),
    )
    decision = _about(record.decision, pool)
    ids = {move.id for move in decision.moves}
    outcomes = tuple(one for one in record.outcomes if one.move_id in ids)
    return replace(record, observation=observation, decision=decision, outcomes=outcomes)


def answer(record: TickRecord, pool: str | None) -> DecisionAnswer:
    """A record's decision and outcomes, all of them or the part that concerns one pool."""
    part = about(record, pool)
    decision = part.decision
    return DecisionAnswer(
        tick=decision.tick,
        now_s=decision.now_s,
        policy_sha256=record.policy_sha256,
        moves=decision.moves,
        holds=decision.holds,
        alarms=decision.alarms,
        assessments=decision.assessments,
        outcomes=part.outcomes,
    )


def pools(records: Sequence[TickRecord]) -> list[str]:
    """The names of all pools that the records observed, sorted."""
    return sorted({pool.name for record in records for pool in record.observation.pools})
