"""What a run of the loop has to tell: moves as they are made, alarms as they are raised and as they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from controller import reasons
from controller.decisions import Alarm, AlarmKind, Move, Scale, Stage, TickRecord


class ToldKind(StrEnum):
    """What a line is about."""

    MOVE = "move"
    ALARM = "alarm"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Told:
    """One line: Unix s, about what, and in words (an alarm's begin with its kind)."""

    at_s: float
    kind: ToldKind
    target: str
    text: str


@dataclass(slots=True)
class Span:
    """An alarm from the first tick that raised it to the first that did not (or the last there was), Unix s."""

    alarm: Alarm
    first_s: float
    last_s: float


@dataclass(slots=True)
class Story:
    """What happened so far: moves, alarms that are over, alarms that are raised."""

    moves: list[tuple[float, Move]] = field(default_factory=list)
    over: list[Span] = field(default_factory=list)
    raised: dict[tuple[AlarmKind, str], Span] = field(default_factory=dict)
    ticks: int = 0

    def tell(self, record: TickRecord) -> list[Told]:
        """Take in one tick, and return what a person should read about it."""
        decision = record.decision
        now_s = decision.now_s
        self.ticks += 1
        told = []
        for move in decision.moves:
            self.moves.append((now_s, move))
            told.append(Told(now_s, ToldKind.MOVE, move.target, f"{what(move)}: {why(move)}"))
        seen = {(alarm.kind, alarm.target): alarm for alarm in decision.alarms}
        for key, alarm in seen.items():
            if key in self.raised:
                self.raised[key].last_s = now_s
            else:
                self.raised[key] = Span(alarm, now_s, now_s)
                told.append(Told(now_s, ToldKind.ALARM, alarm.target, f"{alarm.kind.value}: {alarm.detail}"))
        for key in [key for key in self.raised if key not in seen]:
            span = self.raised.pop(key)
            span.last_s = now_s
            self.over.append(span)
            told.append(Told(now_s, ToldKind.OVER, key[1], key[0].value))
        return told

    def alarms(self) -> list[Span]:
        """Every span, by its start."""
        return sorted([*self.over, *self.raised.values()], key=lambda span: span.first_s)


def what(move: Move) -> str:
    """A move's numbers of replicas."""
    return "; ".join(f"{a.before} -> {reasons.replicas(a.after)}" for a in move.actions if isinstance(a, Scale))


def why(move: Move) -> str:
    """The plan's reason, and those of the guards that changed it."""
    planned = [change.reason for change in move.changes if change.stage is Stage.PLANNED]
    guarded = [c.reason for c in move.changes if c.stage is Stage.GUARDED and c.before != c.after]
    return "; ".join(planned + guarded)
