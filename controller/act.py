"""From moves to the world: one exhaustive dispatch of actions to actuators, and its twin that only tells.

Dry-run is the same code with another dispatcher, so what it prints is what acting would have done. An outcome is a
value: an actuator that refuses, fails, or leaves it open whether the change happened (a timeout after the request was
sent) is data for the next tick, not an exception. A move of unknown outcome is neither repeated nor cancelled: it
stays in flight until it is observed or expires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from controller import reasons
from controller.decisions import Action, Decision, Mode, Move, Scale, SetAdmission, ShiftWeights, Sleep, Wake, WarmCache
from controller.errors import ActuationError
from controller.observations import Outcome, Status
from controller.policy import FleetPolicy, ObjectReference
from controller.ports import Actuator

ACT_DEADLINE_S = 10.0
"""How long one action may take before its outcome counts as unknown."""

Dispatcher = Callable[[Move, FleetPolicy, float], Outcome]


def perform(decision: Decision, policy: FleetPolicy, actuator: Actuator | None, now_s: float) -> tuple[Outcome, ...]:
    """Carry out the moves of a decision, in order: really in mode act, else as a dry run."""
    outcomes = []
    for move in decision.moves:
        if move.mode is Mode.ACT:
            outcomes.append(_really(move, policy, actuator, now_s))
        else:
            outcomes.append(dry_run(move, policy, now_s))
    return tuple(outcomes)


def dry_run(move: Move, policy: FleetPolicy, now_s: float) -> Outcome:
    """What acting would do, as commands a human can type."""
    do, undo = commands(move, policy)
    return Outcome(move.id, Status.DRY_RUN, now_s, "recommended, nothing was changed", do, undo)


def _really(move: Move, policy: FleetPolicy, actuator: Actuator | None, now_s: float) -> Outcome:
    do, undo = commands(move, policy)
    if actuator is None:
        detail = f"mode is act for {move.target}, and nothing here can act; set `mode: recommend`, or run the command"
        return Outcome(move.id, Status.REFUSED, now_s, detail, do, undo)
    done: list[str] = []
    for action in move.actions:
        try:
            done.append(actuator.perform(action, ACT_DEADLINE_S))
        except ActuationError as error:
            status = Status.UNKNOWN if error.outcome_unknown else Status.FAILED
            return Outcome(move.id, status, now_s, "; ".join([*done, str(error)]), do, undo)
        except Exception as error:  # a bug in an actuator, after which anything may have happened
            broke = f"the actuator broke ({type(error).__name__}: {error}); please report this bug"
            return Outcome(move.id, Status.UNKNOWN, now_s, "; ".join([*done, broke]), do, undo)
    return Outcome(move.id, Status.DONE, now_s, "; ".join(done), do, undo)


def commands(move: Move, policy: FleetPolicy) -> tuple[str, str]:
    """The commands that do a move and undo it, one line each; the actions are undone in reverse order."""
    pairs = [_commands(action, policy) for action in move.actions]
    return " && ".join(do for do, _ in pairs), " && ".join(undo for _, undo in reversed(pairs))


def _commands(action: Action, policy: FleetPolicy) -> tuple[str, str]:
    match action:
        case Scale(pool, before, after):
            target = policy.pools[pool].scale if pool in policy.pools else None
            return _scale(target, pool, after), _scale(target, pool, before)
        case Sleep(pool, replicas):
            names = ", ".join(replicas)
            return (
                f"# drain {names} of {pool}, then POST /sleep?level=1&mode=wait to each",
                f"# POST /wake_up to {names}",
            )
        case Wake(pool, replicas):
            names = ", ".join(replicas)
            return (
                f"# POST /wake_up to {names} of {pool}",
                f"# drain {names}, then POST /sleep?level=1&mode=wait to each",
            )
        case WarmCache(pool, replica):
            return f"# send the hottest prefixes to {replica} of {pool}", "# nothing to undo: cached prefixes age out"
        case ShiftWeights(service, before, after):
            return (
                f"# {service}: weights " + ", ".join(f"{w.pool} {w.share:.2f}" for w in after),
                f"# {service}: weights " + ", ".join(f"{w.pool} {w.share:.2f}" for w in before),
            )
        case SetAdmission(service, before, after, _):
            return f"# {service}: {len(after)} admission limits", f"# {service}: the {len(before)} limits from before"
        case _:
            assert_never(action)


def _scale(target: ObjectReference | None, pool: str, replicas: int) -> str:
    if target is None:
        return f"# set {pool} to {reasons.replicas(replicas)} (the policy names no `scale` object for it)"
    return f"kubectl -n {target.namespace} scale {target.kind.lower()}/{target.name} --replicas={replicas}"
