"""What one tick decides, told as the stories of a pool: its load changes, somebody follows or nobody does."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import inf, nan

import pytest
from captures import fleet
from properties.worlds import (
    START_S,
    Played,
    PoolTick,
    WorldTick,
    learnt,
    play,
    pool_observation,
)

from controller.decisions import (
    AlarmKind,
    ControllerState,
    Decision,
    Hold,
    Mode,
    PoolState,
    ReplicaMemory,
    Scale,
    Stage,
    Standing,
)
from controller.observations import (
    Hole,
    Known,
    Nothing,
    Observation,
    Outcome,
    Reading,
    ReplicaState,
    Signal,
    Snapshot,
    SourceHole,
    Status,
)
from controller.observe import build
from controller.policy import FleetPolicy
from controller.step import step

PER_REPLICA = 20.0
"""Calls/s that a replica of these pools carries with headroom (22 to be precise)."""


def policy(pools: str = "a", **changes: object) -> FleetPolicy:
    """Pools of 1 to 8 replicas of one H100 each, of which there are 16; scale-in waits for 60 s."""
    replicas = changes.pop("replicas", {"min": 1, "max": 8})
    entry = {
        "model": {"name": "m", "parameters": 8e9},
        "gpu": {"type": "H100-SXM"},
        "replicas": replicas,
        "start": {"cold_s": 60},
    }
    return fleet(
        **{
            "gpus": {"H100-SXM": {"count": 16, "usd_per_gpu_hour": 2.0}},
            "services": {"chat": {"slo": {"ttft_s": 2.0, "tpot_s": 0.05}, "pools": list(pools)}},
            "pools": {name: {"select": {"app": name}, **entry} for name in pools},
            "limits": {"scale_in_hold_s": 60, "headroom": 0.7},
            **changes,
        }
    )


def load(*replicas_worth: float, wait_s: float = 15.0, partial: bool = False, **happened: object) -> WorldTick:
    """A tick at which each pool is offered what so many replicas carry."""
    return WorldTick(wait_s, partial, tuple(PoolTick(n * PER_REPLICA, **happened) for n in replicas_worth))


def story(rules: FleetPolicy, script: Sequence[WorldTick], replicas: int = 3) -> list[str]:
    """What was decided about each pool, in words: a move as `a 3->5`, a hold by its reason; ticks in order."""
    return [line for played in play(rules, script, replicas) for line in lines(played.decision)]


def lines(decision: Decision) -> list[str]:
    told = {}
    for move in decision.moves:
        (action,) = move.actions
        assert isinstance(action, Scale)
        told[move.target] = f"{move.target} {action.before}->{action.after}"
    for hold in decision.holds:
        if hold.kind == "scale":
            told[hold.target] = f"{hold.target}: {hold.reason}"
    return [told[name] for name in sorted(told)]


def last(rules: FleetPolicy, script: Sequence[WorldTick], replicas: int = 3) -> Played:
    return list(play(rules, script, replicas))[-1]


def again(count: int, tick: WorldTick) -> list[WorldTick]:
    return list(repeat(tick, count))


# ------------------------------------------------------------------------------------------------- knowing, moving


def test_holds_until_the_capacity_is_known() -> None:
    state, told = ControllerState(), []
    for number, calls_per_s in enumerate((0.0, 0.0, 300.0)):
        observed = pool_observation("a", 3, PoolTick(calls_per_s))
        state, decision = step(policy(), state, Observation(START_S + 15 * number, 60.0, (observed,), (), ()))
        told += lines(decision)
    assert ["->" in line for line in told] == [False, False, True], "the first window of steps tells enough"


def test_an_unloaded_pool_of_unknown_capacity_is_left_at_its_size_for_the_dwell() -> None:
    observed = pool_observation("a", 3, PoolTick(0.0))
    _, decision = step(policy(), ControllerState(), Observation(START_S, 60.0, (observed,), (), ()))
    assert lines(decision) == ["a: fewer replicas have been enough for 0 s, scale-in waits for 60 s"]


def test_more_load_adds_replicas_with_the_whole_chain_of_reasons() -> None:
    (move,) = last(policy(), [load(3), load(5)]).decision.moves
    assert move.actions == (Scale("a", 3, 5),)
    assert [change.stage for change in move.changes] == [
        Stage.OBSERVED,
        Stage.ESTIMATED,
        Stage.FORECAST,
        Stage.PLANNED,
        Stage.GUARDED,
        Stage.EXPECTED,
    ]
    assert move.expected.at_s == START_S + 30 + 60
    assert (move.expected.usd_per_h_before, move.expected.usd_per_h_after) == (6.0, 10.0)


def test_enough_is_left_alone_and_says_why() -> None:
    assert story(policy(), [load(3)]) == ["a: 3 replicas will do: headroom theta 0.7"]


def test_surviving_a_replica_takes_one_more() -> None:
    rules = policy()
    pools = {"a": rules.pools["a"].model_copy(update={"survive": ["replica"]})}
    assert story(rules.model_copy(update={"pools": pools}), [load(2)], replicas=3) == [
        "a: 3 replicas will do: survives the loss of one replica"
    ]


def test_every_decision_is_counted_on() -> None:
    played = list(play(policy(), again(3, load(3))))
    assert [one.decision.tick for one in played] == [1, 2, 3]
    assert played[-1].after.tick == 3


# ------------------------------------------------------------------------------------------------------- standing


def test_a_recommendation_is_made_once_and_stands() -> None:
    told = story(policy(), again(4, load(5)))
    assert told[0] == "a 3->5"
    assert told[1:] == ["a: 5 replicas recommended at 14:13:35 (1-a), not observed yet"] * 3


def test_a_larger_need_replaces_a_standing_move() -> None:
    assert story(policy(), [load(4), load(6)]) == ["a 3->4", "a 3->6"]


def test_a_move_at_the_step_limit_is_not_made_again_for_wanting_more() -> None:
    told = story(policy(), again(3, load(9)))
    assert told[0] == "a 3->7"
    assert (
        told[1:]
        == ["a: 7 replicas recommended at 14:13:35 (1-a); more can't be had now: at most 4 replicas per step"] * 2
    )


def test_a_pool_may_use_what_it_promised_itself() -> None:
    # 5 GPUs: 3 are held, 1 is promised to the standing move; the larger one takes that and the last.
    rules = policy(gpus={"H100-SXM": {"count": 5, "usd_per_gpu_hour": 2.0}})
    assert story(rules, [load(4), load(8)]) == ["a 3->4", "a 3->5"]


def test_what_one_pool_was_promised_is_not_promised_to_another() -> None:
    rules = policy("ab", gpus={"H100-SXM": {"count": 8, "usd_per_gpu_hour": 2.0}})
    script = [load(5, 3), load(5, 5)]
    assert story(rules, script) == [
        "a 3->5",
        "b: 3 replicas will do: headroom theta 0.7",
        "a: 5 replicas recommended at 14:13:35 (1-a), not observed yet",
        "b: no H100-SXM is free (0 left, a replica needs 1)",
    ]
    decision = last(rules, script).decision
    assert [alarm.kind for alarm in decision.alarms] == [AlarmKind.INVENTORY_EXHAUSTED]


def test_a_followed_move_is_observed_and_over() -> None:
    played = list(play(policy(), [load(5), load(5, follows=True)]))
    assert lines(played[-1].decision) == ["a: 5 replicas will do: headroom theta 0.7"]
    assert played[-1].after.pools[0].standing is None


def test_more_than_was_asked_for_is_observed_too() -> None:
    # A human went from 3 to 7 where 5 were recommended: that is respected, and the surplus is shed in its time.
    told = story(policy(), [load(5), load(5, extra=4)])
    assert told[-1] == "a: fewer replicas have been enough for 0 s, scale-in waits for 60 s"


def test_a_move_that_is_not_needed_any_more_is_withdrawn_after_the_hold() -> None:
    told = story(policy(), [load(5), *again(5, load(3))])
    assert told[1] == (
        "a: 5 replicas recommended at 14:13:35 (1-a); 3 replicas would have done for 0 s, it is withdrawn after 60 s"
    )
    assert all("recommended at" in line for line in told[1:5])
    assert told[5] == "a: 3 replicas will do: headroom theta 0.7"


def test_a_withdrawn_move_does_not_lend_its_dwell_to_a_scale_in() -> None:
    # 4 would have done for 60 s; that 2 would do is new.
    told = story(policy(), [load(5), *again(4, load(4)), load(2), load(2)])
    assert told[5] == "a: fewer replicas have been enough for 0 s, scale-in waits for 60 s"
    assert told[6] == told[5], "it starts to count only now"


def test_a_move_that_returns_to_being_right_stands_on() -> None:
    told = story(policy(), [load(5), load(3), load(5), *again(4, load(3))])
    assert told[2] == "a: 5 replicas recommended at 14:13:35 (1-a), not observed yet"
    assert all("recommended at" in line for line in told[1:]), "the clock of the withdrawal started anew"


def test_a_maximum_that_falls_below_a_standing_move_replaces_it() -> None:
    *_, played = play(policy(), [load(6)])
    observed = replace(played.observation, now_s=START_S + 30)
    _, decision = step(policy(replicas={"min": 1, "max": 4}), played.after, observed)
    assert lines(decision) == ["a 3->4"]


def test_another_mode_starts_over() -> None:
    *_, played = play(policy(), [load(5)])
    _, decision = step(policy(mode="act"), played.after, replace(played.observation, now_s=START_S + 30))
    assert lines(decision) == ["a 3->5"]
    assert decision.moves[0].mode is Mode.ACT


# ------------------------------------------------------------------------------------------------------ mode: act


def test_a_request_that_is_never_observed_is_written_off_after_three_lead_times() -> None:
    told = story(policy(mode="act"), again(15, load(5)))
    moves = [index for index, line in enumerate(told) if line.startswith("a 3->")]
    assert moves == [0, 13], "13 ticks of 15 s are the first that are more than 3 * 60 s"
    assert told[1] == "a: 5 replicas requested at 14:13:35 (1-a), not observed yet"


@pytest.mark.parametrize("status", [Status.FAILED, Status.REFUSED])
def test_a_request_that_failed_is_made_again_and_a_human_is_called(status: Status) -> None:
    *_, played = play(policy(mode="act"), [load(5)])
    failed = Outcome("1-a", status, START_S + 15, "the quota is exhausted", "", "")
    _, decision = step(
        policy(mode="act"), played.after, replace(played.observation, now_s=START_S + 30, outcomes=(failed,))
    )
    assert lines(decision) == ["a 3->5"]
    assert decision.moves[0].id == "2-a"
    alarm = next(alarm for alarm in decision.alarms if alarm.kind is AlarmKind.CANNOT_ACT)
    assert (alarm.target, alarm.detail) == ("a", "the quota is exhausted")


def test_a_request_of_unknown_outcome_is_neither_repeated_nor_cancelled() -> None:
    *_, played = play(policy(mode="act"), [load(5)])
    unknown = Outcome("1-a", Status.UNKNOWN, START_S + 15, "timed out", "", "")
    after, decision = step(
        policy(mode="act"), played.after, replace(played.observation, now_s=START_S + 30, outcomes=(unknown,))
    )
    assert lines(decision) == ["a: 5 replicas requested at 14:13:35 (1-a), not observed yet"]
    assert after.pools[0].standing == played.after.pools[0].standing


def test_attempts_that_fail_for_ever_end_with_the_hourly_budget() -> None:
    rules = policy(mode="act", limits={"scalings_per_hour": 4, "headroom": 0.7})
    state, told = learnt(rules), []
    outcomes: tuple[Outcome, ...] = ()
    for number in range(6):
        observed = pool_observation("a", 3, PoolTick(5 * PER_REPLICA))
        state, decision = step(rules, state, Observation(START_S + 15 * number, 60.0, (observed,), (), (), outcomes))
        outcomes = tuple(Outcome(move.id, Status.FAILED, 0.0, "no", "", "") for move in decision.moves)
        told += lines(decision)
    assert told == ["a 3->5"] * 4 + ["a: 4 changes in the last hour, the policy allows 4"] * 2


# --------------------------------------------------------------------------------------------------------- scale-in


def test_zero_traffic_shrinks_to_the_floor_one_by_one_after_each_dwell() -> None:
    told = story(policy(), again(14, load(0, follows=True)), replicas=3)
    assert [line for line in told if "->" in line] == ["a 3->2", "a 2->1"]
    assert told[-1] == "a: 0 replicas would do, but the guards leave 1"


def test_a_pool_may_be_emptied_where_the_policy_lets_it() -> None:
    told = story(policy(replicas={"min": 0, "max": 8}), again(12, load(0, follows=True)), replicas=1)
    assert [line for line in told if "->" in line] == ["a 1->0"]


@pytest.mark.parametrize(
    "doubt",
    [
        load(2, fault=ReplicaState.BLIND),
        load(2, fault=ReplicaState.DOWN),
        load(2, fault=ReplicaState.HUNG),
        load(2, unreadable=True),
        load(2, partial=True),
    ],
)
def test_doubt_starts_the_dwell_anew(doubt: WorldTick) -> None:
    told = story(policy(), [*again(4, load(2)), doubt, *again(5, load(2))], replicas=3)
    assert "no scale-in while" in told[4]
    assert told[5] == "a: fewer replicas have been enough for 0 s, scale-in waits for 60 s"
    assert told[9] == "a 3->2"


def test_a_recommendation_to_scale_in_is_withdrawn_when_data_goes_missing() -> None:
    script = [*again(5, load(2)), load(2, partial=True)]
    told, after = story(policy(), script), last(policy(), script).after
    assert told[4] == "a 3->2"
    assert told[5] == "a: no scale-in while telemetry is partial (prometheus: a query timed out)"
    assert after.pools[0].standing is None


def test_a_request_to_scale_in_is_under_way_whatever_is_missing() -> None:
    told = story(policy(mode="act"), [*again(5, load(2)), load(2, partial=True)])
    assert told[5] == "a: 2 replicas requested at 14:14:35 (5-a), not observed yet"


def test_load_that_returns_withdraws_a_scale_in() -> None:
    told = story(policy(), [*again(5, load(2)), load(3)])
    assert told[4:] == ["a 3->2", "a: 3 replicas will do: headroom theta 0.7"]


def test_the_pool_that_waited_longest_scales_in_first() -> None:
    rules = policy("ab")
    told = story(rules, [load(3, 2), *again(4, load(2, 2)), load(2, 2)])
    assert [line for line in told if "->" in line] == ["b 3->2", "a 3->2"]
    both = story(rules, again(6, load(2, 2)))
    assert both[8:10] == ["a 3->2", "b: a scales in at this tick; one pool at a time"]
    assert both[11] == "b 3->2"


def test_pools_that_need_more_are_served_before_those_that_need_less() -> None:
    rules = policy("ab")
    *_, played = play(rules, [load(2, 3), load(2, 5)])
    assert [one.target for one in (*played.decision.moves, *played.decision.holds)][:2] == ["b", "a"]


# ------------------------------------------------------------------------------------------------------------ doubt


def test_a_load_that_is_unknown_now_is_not_guessed_from_the_past() -> None:
    *_, played = play(policy(), [load(3)])
    pool = replace(played.observation.pools[0], offered_calls_per_s=Hole(Nothing.ABSENT, "the query failed"))
    fewer = replace(pool, replicas=pool.replicas[:1])
    _, decision = step(policy(), played.after, replace(played.observation, pools=(fewer,), now_s=START_S + 30))
    assert lines(decision) == ["a: the offered load is unknown: the query failed"]
    assert [alarm.kind for alarm in decision.alarms] == [AlarmKind.TELEMETRY_BLIND]


def test_a_pool_without_any_signal_is_held_and_called_for() -> None:
    *_, played = play(policy(), [load(3)])
    after, decision = step(policy(), played.after, replace(played.observation, pools=(), now_s=START_S + 30))
    assert lines(decision) == ["a: no usable signal: the observation does not contain the pool"]
    assert [alarm.kind for alarm in decision.alarms] == [AlarmKind.TELEMETRY_BLIND]
    assert after.pools[0].replicas == played.after.pools[0].replicas, "it is remembered who was there"


@pytest.mark.parametrize(
    ("wanted", "state", "kinds"),
    [
        (Known(0.0, 0.0), None, []),
        (Known(0.0, 0.0), ReplicaState.DOWN, []),
        (Known(0.0, 0.0), ReplicaState.BLIND, [AlarmKind.TELEMETRY_BLIND]),
        (Known(1.0, 0.0), None, [AlarmKind.TELEMETRY_BLIND]),
        (Known(1.0, 0.0), ReplicaState.DOWN, [AlarmKind.TELEMETRY_BLIND, AlarmKind.REPLICA_DOWN]),
        (Hole(Nothing.ABSENT, "no cluster is read"), None, [AlarmKind.TELEMETRY_BLIND]),
    ],
)
def test_a_pool_that_is_wanted_empty_and_is_empty_is_not_missed(
    wanted: Reading, state: ReplicaState | None, kinds: list[AlarmKind]
) -> None:
    *_, played = play(policy(replicas={"min": 0, "max": 8}), [load(3)])
    pool = played.observation.pools[0]
    hole = Hole(Nothing.ABSENT, "no engine's series carry the labels that it selects")
    replicas = () if state is None else (replace(pool.replicas[0], state=state, detail="it is silent"),)
    unseen = replace(pool, replicas=replicas, offered_calls_per_s=hole, ttft_s=hole, itl_s=hole)
    empty = replace(unseen, fleet=replace(pool.fleet, wanted=wanted))
    observation = replace(played.observation, pools=(empty,), now_s=START_S + 30)
    _, decision = step(policy(replicas={"min": 0, "max": 8}), played.after, observation)
    assert [alarm.kind for alarm in decision.alarms] == kinds


@pytest.mark.parametrize("now_s", [nan, inf, -inf])
def test_a_time_that_is_none_holds_everything(now_s: float) -> None:
    *_, played = play(policy(), [load(5)])
    after, decision = step(policy(), played.after, replace(played.observation, now_s=now_s))
    assert decision.moves == ()
    assert {(hold.target, hold.kind.value) for hold in decision.holds} == {
        ("a", "scale"),
        ("chat", "weights"),
        ("chat", "admission"),
    }
    assert after == replace(played.after, tick=2)


def test_a_clock_that_is_set_back_makes_nothing_last_for_ever() -> None:
    ahead_s = START_S + 1e6
    memory = PoolState(
        "a",
        replicas=(ReplicaMemory("r0", ahead_s), ReplicaMemory("gone", START_S - 601)),
        fewer_since_s=ahead_s,
        scaled_at_s=(ahead_s, START_S - 3600),
    )
    observed = pool_observation("a", 1, PoolTick(0.0, fault=ReplicaState.DOWN))
    after, _ = step(policy(), ControllerState(pools=(memory,)), Observation(START_S, 60.0, (observed,), (), ()))
    assert after.pools[0].replicas == (ReplicaMemory("r0", START_S),)
    assert after.pools[0].scaled_at_s == (START_S,)


@pytest.mark.parametrize(
    ("found", "states"),
    [
        (Snapshot(()), []),
        (Snapshot((), failed=tuple(Signal)), [ReplicaState.BLIND]),
        (Snapshot((), holes=(SourceHole("prometheus", "a query timed out"),)), [ReplicaState.DOWN]),
    ],
)
def test_a_replica_that_was_to_go_is_gone_unless_the_source_may_just_not_see_it(found, states) -> None:
    going = Standing("1-a", Mode.RECOMMEND, 1, 0, START_S, None)
    memory = PoolState("a", replicas=(ReplicaMemory("r0", START_S),), standing=going)
    observed = build(policy(), ControllerState(pools=(memory,)), found, (), START_S + 15)
    assert [replica.state for replica in observed.pools[0].replicas] == states


def test_the_clusters_word_counts_before_what_is_seen() -> None:
    # 5 are wanted already, of which 3 serve: what is starting is not ordered again.
    observed = pool_observation("a", 3, PoolTick(5 * PER_REPLICA))
    observed = replace(observed, fleet=replace(observed.fleet, wanted=Known(5.0, 1.0)))
    rules = policy()
    _, decision = step(rules, learnt(rules), Observation(START_S, 60.0, (observed,), (), ()))
    assert lines(decision) == ["a: 5 replicas will do: headroom theta 0.7"]


def test_a_checkpoint_with_absurd_promises_takes_no_gpus_from_nowhere() -> None:
    rules = policy("ab")
    absurd = Standing("9-a", Mode.RECOMMEND, 1, 10_000, START_S, None)
    known = learnt(rules)
    state = replace(known, pools=(replace(known.pools[0], standing=absurd), known.pools[1]))
    observed = tuple(pool_observation(name, 3, PoolTick(5 * PER_REPLICA)) for name in "ab")
    _, decision = step(rules, state, Observation(START_S, 60.0, observed, (), ()))
    assert [line for line in lines(decision) if line.startswith("a")] == ["a 3->5"], "it is above the maximum"


def test_learns_nothing_while_a_replica_is_missing() -> None:
    learnt_from = {}
    for fault in (ReplicaState.SERVING, ReplicaState.DOWN, ReplicaState.ASLEEP):
        observed = pool_observation("a", 3, PoolTick(100.0, fault=fault))
        after, _ = step(policy(), ControllerState(), Observation(START_S, 60.0, (observed,), (), ()))
        learnt_from[fault] = after.pools[0].estimate is not None
    assert learnt_from == {ReplicaState.SERVING: True, ReplicaState.DOWN: False, ReplicaState.ASLEEP: False}


def test_holds_are_answers_too() -> None:
    decision = last(policy("ab"), [load(3, 3)]).decision
    assert {hold.target for hold in decision.holds} == {"a", "b", "chat"}
    assert all(isinstance(hold, Hold) and hold.reason for hold in decision.holds)
