"""Moves that stand: recommended or requested, and not yet observed. Pure.

A move is remembered until one of these ends it:

    observed     the pool has at least as many replicas as it added up to, or at most as many as it took away down to
    failed       the outcome says that it was refused or failed; the next plan may try again
    expired      a request was not observed within `STANDING_LEADS` lead times: it is written off
    remoded      the policy put the pool into another mode meanwhile
    withdrawn    it stopped being right: more is needed, fewer have been enough for the whole dwell, the policy's
                 maximum fell below it, or data went missing under a recommendation to scale in

While it stands, it is not made again, and what it promised (GPUs, in the ledger) is not promised twice. Whatever ends
it, the dwell of a scale-in starts anew: "fewer are enough" was measured against the promise, not against what is there.
"""

from __future__ import annotations

from dataclasses import replace

from controller import guards, reasons
from controller.decisions import ActionKind, Hold, Mode, PoolState, Standing
from controller.guards import Context, Proposal

STANDING_LEADS = 3.0
"""A requested move that is not observed after so many lead times is written off."""


def promised(memory: PoolState, current: int) -> int:
    """Replicas that are there or may come: what GPUs have to be kept for."""
    return max(current, memory.standing.replicas_after) if memory.standing is not None else current


def wanted(memory: PoolState, current: int) -> int:
    """Replicas that the pool is on its way to."""
    return memory.standing.replicas_after if memory.standing is not None else current


def settle(memory: PoolState, current: int, context: Context) -> PoolState:
    """The memory without a standing move that was observed, failed, expired, or may not stand any longer."""
    standing = memory.standing
    if standing is None:
        return memory
    over = (
        _observed(standing, current)
        or standing.move_id in context.failed
        or (standing.expires_s is not None and context.now_s > standing.expires_s)
        or standing.mode is not context.policy.mode_of(ActionKind.SCALE, memory.name)
        or _dubious(standing, context)
    )
    return replace(memory, standing=None, fewer_since_s=None) if over else memory


def stands(standing: Standing, proposal: Proposal, context: Context) -> Hold | None:
    """Why the standing move still answers the plan; None where it does not, and a new one is due.

    proposal: from the replicas that are there to those that are planned.
    """
    word = "requested" if standing.mode is Mode.ACT else "recommended"
    after = standing.replicas_after
    text = f"{reasons.replicas(after)} {word} at {reasons.clock(standing.since_s)} ({standing.move_id})"

    def hold(why: str) -> Hold:
        return Hold(proposal.pool, ActionKind.SCALE, text + why)

    aim = max(proposal.replicas, context.pool.replicas.min)
    if not _outwards(standing):
        return hold(", not observed yet") if aim <= after else None
    if after > context.pool.replicas.max:
        return None
    if aim == after:
        return hold(", not observed yet")
    if aim > after:
        # What could be had now, from where the pool is: if it is no more than what stands, that is no new move.
        wider = guards.narrow(proposal, context)
        if isinstance(wider, Hold):
            return replace(hold(f"; more can't be had now: {wider.reason}"), alarm=wider.alarm)
        if wider.replicas > after:
            return None
        return hold(f"; more can't be had now: {wider.changes[-1].reason}")
    since_s = context.memory.fewer_since_s
    waited_s = 0.0 if since_s is None else context.now_s - since_s
    hold_s = context.policy.limits.scale_in_hold_s
    if waited_s < hold_s:
        enough = reasons.replicas(aim)
        return hold(f"; {enough} would have done for {waited_s:.0f} s, it is withdrawn after {hold_s:g} s")
    return None


def _outwards(standing: Standing) -> bool:
    return standing.replicas_after > standing.replicas_before


def _observed(standing: Standing, current: int) -> bool:
    after = standing.replicas_after
    return current >= after if _outwards(standing) else current <= after


def _dubious(standing: Standing, context: Context) -> bool:
    """Nobody should follow a recommendation to scale in while data is missing; a request is under way already."""
    if _outwards(standing) or standing.mode is Mode.ACT:
        return False
    return guards.doubted(context.observation, context.partial) is not None
