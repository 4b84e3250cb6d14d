"""Each guard by itself, and the table of them."""

from dataclasses import replace

import pytest
from captures import fleet
from properties.worlds import PoolTick, pool_observation

from controller import guards
from controller.decisions import AlarmKind, Hold, PoolState, Stage
from controller.guards import Context, Ledger, Proposal
from controller.observations import Hole, Known, Nothing, ReplicaState
from controller.policy import FleetPolicy

NOW_S = 1_790_000_000.0
LONG_AGO_S = NOW_S - 3000


def policy(**limits: object) -> FleetPolicy:
    """Pool "a" of 1 to 6 replicas on a fleet of 8 "CPU"s."""
    return fleet(limits={"scale_in_hold_s": 300, "replicas_per_step": 4, "scalings_per_hour": 3, **limits})


def context(rules: FleetPolicy | None = None, *, free: int = 8, tick: PoolTick | None = None, **known) -> Context:
    """A pool of which everything is known, and whose surplus is old."""
    rules = rules or policy()
    memory = PoolState("a", fewer_since_s=LONG_AGO_S)
    whole = Context(
        policy=rules,
        pool=rules.pools["a"],
        observation=pool_observation("a", 3, tick or PoolTick(10.0)),
        memory=memory,
        ledger=Ledger({"CPU": free}, None),
        now_s=NOW_S,
        frozen_until_s=None,
        partial=None,
    )
    return replace(whole, **known)


def move(current: int, replicas: int) -> Proposal:
    return Proposal("a", current, replicas, ())


def reason(verdict: Proposal | Hold) -> str:
    assert isinstance(verdict, Hold)
    assert verdict.changes[-1].reason == verdict.reason
    return verdict.reason


def went_to(verdict: Proposal | Hold) -> tuple[int, list[str]]:
    assert isinstance(verdict, Proposal)
    assert all(change.stage is Stage.GUARDED for change in verdict.changes)
    return verdict.replicas, [change.reason for change in verdict.changes]


# ------------------------------------------------------------------------------------------------------ one by one


def test_a_pool_in_observe_mode_is_only_watched() -> None:
    rules = fleet(mode="observe")
    assert reason(guards.mode(move(3, 5), context(rules))).startswith("mode observe")
    assert guards.mode(move(3, 5), context()) == move(3, 5)


@pytest.mark.parametrize("state", [ReplicaState.DOWN, ReplicaState.BLIND, ReplicaState.HUNG])
def test_a_replica_that_is_not_seen_to_work_stops_scale_in(state: ReplicaState) -> None:
    verdict = guards.doubt(move(3, 2), context(tick=PoolTick(10.0, fault=state)))
    assert reason(verdict) == f"no scale-in while r0 is {state.value} (as told)"


def test_a_sleeping_replica_is_no_doubt() -> None:
    assert guards.doubt(move(3, 2), context(tick=PoolTick(10.0, fault=ReplicaState.ASLEEP))) == move(3, 2)


def test_a_hole_in_the_load_stops_scale_in() -> None:
    verdict = guards.doubt(move(3, 2), context(tick=PoolTick(10.0, unreadable=True)))
    assert reason(verdict) == "no scale-in while the load of r2 is unknown"


@pytest.mark.parametrize(
    "unknown", [Hole(Nothing.ABSENT, "no series"), Known(float("nan"), 1.0), Known(float("inf"), 1.0)]
)
def test_a_queue_or_an_offered_load_that_nobody_knows_stops_scale_in(unknown) -> None:
    whole = context().observation
    blind = replace(whole, replicas=(replace(whole.replicas[0], waiting=unknown), *whole.replicas[1:]))
    verdict = guards.doubt(move(3, 2), context(observation=blind))
    assert reason(verdict) == "no scale-in while the queue of r0 is unknown"
    verdict = guards.doubt(move(3, 2), context(observation=replace(whole, offered_calls_per_s=unknown)))
    assert reason(verdict) == "no scale-in while the offered load is unknown"


def test_a_hole_in_any_source_stops_scale_in() -> None:
    verdict = guards.doubt(move(3, 2), context(partial="prometheus: timed out"))
    assert reason(verdict) == "no scale-in while telemetry is partial (prometheus: timed out)"


def test_doubt_never_stops_scale_out() -> None:
    doubtful = context(tick=PoolTick(10.0, fault=ReplicaState.DOWN), partial="prometheus: timed out")
    assert guards.doubt(move(3, 5), doubtful) == move(3, 5)


def test_nothing_moves_inside_a_freeze() -> None:
    frozen = context(frozen_until_s=NOW_S + 5400)
    for proposal in (move(3, 5), move(3, 2)):
        assert reason(guards.frozen(proposal, frozen)) == "frozen by the policy for another 90 min"


def test_scale_in_waits_until_fewer_have_been_enough_for_long() -> None:
    waiting = context(memory=PoolState("a", fewer_since_s=NOW_S - 120))
    assert reason(guards.dwell(move(3, 2), waiting)) == (
        "fewer replicas have been enough for 120 s, scale-in waits for 300 s"
    )
    assert "for 0 s" in reason(guards.dwell(move(3, 2), context(memory=PoolState("a"))))
    assert guards.dwell(move(3, 4), waiting) == move(3, 4)


def test_scale_in_takes_one_replica_at_a_time() -> None:
    assert went_to(guards.dwell(move(6, 2), context())) == (5, ["scale-in removes one replica at a time"])
    assert guards.dwell(move(6, 5), context()) == move(6, 5)


def test_one_pool_scales_in_at_a_time() -> None:
    busy = context(ledger=Ledger({"CPU": 8}, "b"))
    assert reason(guards.one_scale_in(move(3, 2), busy)) == "b scales in at this tick; one pool at a time"
    assert guards.one_scale_in(move(3, 4), busy) == move(3, 4)


def test_the_floor_raises_to_the_minimum_and_no_further() -> None:
    assert went_to(guards.floor(move(3, 0), context())) == (1, ["the policy's minimum is 1"])
    assert went_to(guards.floor(move(0, 0), context())) == (1, ["the policy's minimum is 1"])
    assert guards.floor(move(3, 2), context()) == move(3, 2)


def test_scale_out_ends_at_the_maximum_and_never_turns_into_scale_in() -> None:
    assert went_to(guards.ceiling(move(3, 9), context())) == (6, ["the policy's maximum is 6"])
    assert went_to(guards.ceiling(move(8, 9), context())) == (8, ["the policy's maximum is 6"])


def test_a_step_adds_so_many_replicas_at_most() -> None:
    assert went_to(guards.step_size(move(1, 6), context())) == (5, ["at most 4 replicas per step"])
    assert guards.step_size(move(6, 1), context()) == move(6, 1)


def test_a_move_takes_the_gpus_that_are_free_and_no_more() -> None:
    assert went_to(guards.inventory(move(3, 6), context(free=2))) == (5, ["2 CPU are free, a replica needs 1"])
    assert guards.inventory(move(3, 2), context(free=0)) == move(3, 2)


def test_no_free_gpu_is_an_alarm() -> None:
    for free in (0, -3):
        verdict = guards.inventory(move(3, 6), context(free=free))
        assert reason(verdict) == "no CPU is free (0 left, a replica needs 1)"
        assert isinstance(verdict, Hold)
        assert verdict.alarm is AlarmKind.INVENTORY_EXHAUSTED


def test_a_replica_is_not_added_on_a_part_of_its_gpus() -> None:
    big = fleet()
    pool = big.pools["a"].model_copy(update={"gpu": big.pools["a"].gpu.model_copy(update={"per_replica": 4})})
    assert went_to(guards.inventory(move(1, 4), context(pool=pool, free=7)))[0] == 2
    assert "needs 4" in reason(guards.inventory(move(1, 4), context(pool=pool, free=3)))


def test_changes_per_hour_are_limited_in_both_directions() -> None:
    spent = context(memory=PoolState("a", fewer_since_s=LONG_AGO_S, scaled_at_s=(NOW_S - 3599, NOW_S - 60, NOW_S)))
    for proposal in (move(3, 4), move(3, 2)):
        assert reason(guards.budget(proposal, spent)) == "3 changes in the last hour, the policy allows 3"
    older = replace(spent, memory=replace(spent.memory, scaled_at_s=(NOW_S - 3600, NOW_S - 60, NOW_S)))
    assert guards.budget(move(3, 4), older) == move(3, 4)


# ------------------------------------------------------------------------------------------------------- together


def test_guards_leave_a_good_move_alone() -> None:
    assert guards.narrow(move(3, 5), context()) == move(3, 5)
    assert guards.narrow(move(3, 2), context()) == move(3, 2)


def test_every_guard_that_narrows_is_on_the_chain_in_order() -> None:
    assert went_to(guards.narrow(move(1, 30), context(free=3))) == (
        4,
        ["the policy's maximum is 6", "at most 4 replicas per step", "3 CPU are free, a replica needs 1"],
    )


def test_missing_data_does_not_keep_a_pool_below_its_minimum() -> None:
    rules = policy()
    pool = rules.pools["a"].model_copy(update={"replicas": rules.pools["a"].replicas.model_copy(update={"min": 4})})
    doubtful = context(rules, pool=pool, tick=PoolTick(10.0, fault=ReplicaState.DOWN))
    assert went_to(guards.narrow(move(3, 1), doubtful)) == (4, ["the policy's minimum is 4"])


def test_a_guard_that_widens_is_stopped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def generous(proposal: Proposal, _: Context) -> Proposal:
        return proposal.to(proposal.replicas + 1, "more is more")

    monkeypatch.setattr(guards, "GUARDS", (*guards.GUARDS, generous))
    assert "generous tried to widen the move" in reason(guards.narrow(move(3, 5), context()))


def test_a_promise_is_kept_in_the_ledger_and_can_be_taken_back() -> None:
    pool = policy().pools["a"]
    ledger = Ledger({"CPU": 5}, None)
    assert ledger.after(move(3, 5), pool) == Ledger({"CPU": 3}, None)
    assert ledger.after(move(3, 5), pool).before(move(3, 5), pool) == ledger
    assert ledger.after(move(3, 2), pool) == Ledger({"CPU": 5}, "a"), (
        "GPUs are given back when they are seen to be free"
    )
