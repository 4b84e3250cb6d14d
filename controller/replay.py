"""Replay: recorded observations through the real step must give the recorded decisions, byte for byte.

The journal holds every input of `step` (policy, observation with the outcomes of the tick before) and, at the start of
each process and now and then, the state. From such a state on, the state is carried by step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from controller.decisions import ControllerState, Decision, TickRecord
from controller.policy import FleetPolicy
from controller.step import step


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded tick: the state before it where it was recorded, else None; the policy's text."""

    state: ControllerState | None
    policy_text: str
    record: TickRecord


@dataclass(frozen=True, slots=True)
class Replayed:
    """One tick, replayed: what was recorded, what came out now, and whether both are the same bytes."""

    record: TickRecord
    decision: Decision
    same: bool


def replay(
    entries: Iterable[Recorded], parse: Callable[[str], FleetPolicy], encode: Callable[[Decision], bytes]
) -> Iterator[Replayed]:
    """Every entry again; entries before the first recorded state can't be replayed and are passed over."""
    state: ControllerState | None = None
    policies: dict[str, FleetPolicy] = {}
    for entry in entries:
        state = entry.state or state
        if state is None:
            continue
        policy = policies.get(entry.record.policy_sha256)
        if policy is None:
            policy = policies[entry.record.policy_sha256] = parse(entry.policy_text)
        state, decision = step(policy, state, entry.record.observation)
        yield Replayed(entry.record, decision, encode(decision) == encode(entry.record.decision))
