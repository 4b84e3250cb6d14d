"""Decisions as sentences: the chain of reasons of a move, the reason of a hold. Pure; the words come from `reasons`.

14:32:15  assistant-h100  10 -> 12 replicas  (add capacity)                      recommended
  observed   46.0 calls/s offered (45.6 served, 0.4 shed); hit rate 0.91; ...
  ...
  do         kubectl -n serving scale deployment/assistant-h100 --replicas=12
  undo       kubectl -n serving scale deployment/assistant-h100 --replicas=10
"""

from __future__ import annotations

import textwrap

from controller.decisions import ActionKind, Alarm, Change, Hold, Mode, Move, Scale, TickRecord
from controller.observations import Outcome, Status
from controller.policy import FleetPolicy
from controller.pools import model_slo
from controller.reasons import clock, links, replicas

WIDTH = 100
_WORD = {Mode.OBSERVE: "observed", Mode.RECOMMEND: "recommended", Mode.ACT: "requested"}


def headline(move: Move, at_s: float) -> str:
    """A move in one line."""
    what = "; ".join(
        f"{action.before} -> {replicas(action.after)}" if isinstance(action, Scale) else type(action).__name__
        for action in move.actions
    )
    left = f"{clock(at_s)}  {move.target}  {what}  ({move.quadrant.value})"
    return f"{left:<{WIDTH - 12}}{_WORD[move.mode]:>12}"


def move_text(move: Move, record: TickRecord) -> str:
    """A move with its whole chain, its command and its undo."""
    lines = textwrap.wrap(headline(move, record.decision.now_s), WIDTH, subsequent_indent=" " * 10)
    lines += [_link(change) for change in move.changes]
    for outcome in record.outcomes:
        if outcome.move_id == move.id:
            lines += _outcome(outcome)
    return "\n".join(lines)


def hold_text(hold: Hold, record: TickRecord, policy: FleetPolicy) -> str:
    """A hold with the chain that led to it, rebuilt from what was recorded."""
    lines = [f"{clock(record.decision.now_s)}  {hold.target}  {hold.kind.value}: hold"]
    lines += [_link(change) for change in _chain(hold, record, policy)]
    lines.append(_row("hold", hold.reason))
    return "\n".join(lines)


def alarm_line(alarm: Alarm) -> str:
    """An alarm in one line."""
    return f"ALARM {alarm.kind.value}  {alarm.target}: {alarm.detail}"


def record_text(record: TickRecord, policy: FleetPolicy, pool: str | None = None) -> str:
    """Everything that was decided at one tick, about one pool or about all."""
    decision = record.decision
    parts = [move_text(move, record) for move in decision.moves if pool in {None, move.target}]
    parts += [
        hold_text(hold, record, policy)
        for hold in decision.holds
        if pool == hold.target or (pool is None and hold.kind is ActionKind.SCALE)
    ]
    parts += [alarm_line(alarm) for alarm in decision.alarms if pool is None or alarm.target.partition("/")[0] == pool]
    return "\n".join(parts)


def _chain(hold: Hold, record: TickRecord, policy: FleetPolicy) -> tuple[Change, ...]:
    observation = next((p for p in record.observation.pools if p.name == hold.target), None)
    assessment = next((a for a in record.decision.assessments if a.pool == hold.target), None)
    service = next((s for s in policy.services.values() if hold.target in s.pools), None)
    if hold.kind is not ActionKind.SCALE or observation is None or assessment is None or service is None:
        return hold.changes
    return (*links(observation, assessment, model_slo(service.slo), record.decision.now_s), *hold.changes)


def _outcome(outcome: Outcome) -> list[str]:
    lines = [_row("do", outcome.command, wrap=False), _row("undo", outcome.undo, wrap=False)]
    if outcome.status is not Status.DRY_RUN:
        lines.append(_row(outcome.status.value, outcome.detail))
    return lines


def _link(change: Change) -> str:
    return _row(change.stage.value, change.reason)


def _row(name: str, text: str, *, wrap: bool = True) -> str:
    first = f"  {name:<10} "
    if not wrap:
        return first + text
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
