"""The contracts of the decision, held over arbitrary observations and states, and over fleets that behave."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from math import isfinite

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties.strategies import (
    decisions,
    moments,
    observations,
    outcomes,
    policies,
    snapshots,
    states,
    texts,
    tuples,
)
from properties.worlds import Played, play, pool_observation, pool_ticks, scripts

from controller import explain, guards, observe
from controller.adapters.codec import canonical_bytes
from controller.decisions import ActionKind, Decision, Hold, Mode, Move, PoolState, Scale, TickRecord
from controller.guards import Context, Ledger, Proposal
from controller.observations import Hole, Known, Nothing, Observation, PoolObservation, Reading, ReplicaState
from controller.step import step

ugly = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
behaving = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def scale(move: Move) -> Scale:
    (action,) = move.actions
    assert isinstance(action, Scale)
    return action


def squeezed(text: str) -> str:
    """A text without its spaces and line breaks."""
    return "".join(text.split())


# ---------------------------------------------------------------------------- 1: total, deterministic; 2: explained


@ugly
@given(policies(), states(), st.lists(observations(), min_size=1, max_size=3))
def test_step_never_raises_and_gives_the_same_bytes_twice(policy, state, sequence):
    for observation in sequence:
        once, again = step(policy, state, observation), step(policy, state, observation)
        assert canonical_bytes(once) == canonical_bytes(again)
        state, decision = once
        assert_explained(policy, TickRecord(observation, decision, ""))


@ugly
@given(policies(), states(), st.lists(st.tuples(observations(), st.sampled_from([0.0, 1.0, 3600.0, 1e8])), max_size=3))
def test_step_survives_clocks_that_go_backwards(policy, state, sequence):
    now_s = 1.79e9
    for observation, back_s in sequence:
        now_s -= back_s
        state, decision = step(policy, state, replace(observation, now_s=now_s))
        assert_answered(policy, decision)


@behaving
@given(policies(lively=True), scripts(2, most=12))
def test_every_move_has_its_reasons_and_every_target_its_answer(policy, script):
    for played in play(policy, script):
        assert_explained(policy, TickRecord(played.observation, played.decision, ""))


def assert_answered(policy, decision: Decision) -> None:
    """Every pool has one answer about its replicas, every service one about weights and one about admission."""
    asked = Counter({(name, ActionKind.SCALE): 1 for name in policy.pools})
    asked.update((name, kind) for name in policy.services for kind in (ActionKind.WEIGHTS, ActionKind.ADMISSION))
    assert Counter((one.target, one.kind) for one in (*decision.moves, *decision.holds)) == asked
    assert all(hold.reason for hold in decision.holds)


def assert_explained(policy, record: TickRecord) -> None:
    assert_answered(policy, record.decision)
    for move in record.decision.moves:
        assert move.actions
        assert move.changes
        assert all(change.reason for change in move.changes)
        text = explain.move_text(move, record)
        assert all(squeezed(change.reason) in squeezed(text) for change in move.changes)
        assert max(map(len, text.splitlines())) <= explain.WIDTH
    text = explain.record_text(record, policy)
    for hold in record.decision.holds:
        if hold.kind is ActionKind.SCALE:
            assert squeezed(hold.reason) in squeezed(text)


@ugly
@given(policies(), observations(), decisions(), outcomes())
def test_explain_prints_whatever_was_recorded(policy, observation, decision, done):
    record = TickRecord(observation, decision, "", done)
    for name in (None, "a", "nobody"):
        explain.record_text(record, policy, name)
    for move in decision.moves:
        text = squeezed(explain.move_text(move, record))
        assert all(squeezed(change.reason) in text for change in move.changes)


# --------------------------------------------------------------------------------------------- 3, 4: kinds of nothing


def hollow(value: Reading) -> Reading:
    return value if isinstance(value, Hole) else Hole(Nothing.STALE, "too old")


def emptied(observation: Observation) -> Observation:
    """The observation with every reading gone."""

    def empty(part):
        known = {f.name: hollow(getattr(part, f.name)) for f in fields(part) if f.type == "Reading"}
        return replace(part, **known)

    pools = [
        replace(empty(pool), replicas=tuple(map(empty, pool.replicas)), fleet=empty(pool.fleet), gpus=())
        for pool in observation.pools
    ]
    return replace(observation, pools=tuple(pools))


@ugly
@given(policies(), states(), observations())
def test_holds_when_everything_is_stale_or_absent(policy, state, observation):
    _, decision = step(policy, state, emptied(observation))
    assert decision.moves == ()
    assert_answered(policy, decision)


@behaving
@given(policies(lively=True), scripts(2))
def test_holds_when_everything_is_stale_or_absent_whatever_was_known_before(policy, script):
    for played in play(policy, script):
        _, decision = step(policy, played.before, emptied(played.observation))
        assert decision.moves == ()
        _, decision = step(policy, played.before, replace(played.observation, pools=()))
        assert decision.moves == ()


def missing(pool: PoolObservation, observation: Observation) -> bool:
    """Whether the picture of a pool has a hole, by contract 4."""
    lost = {ReplicaState.DOWN, ReplicaState.BLIND, ReplicaState.HUNG}
    serving = [replica for replica in pool.replicas if replica.state is ReplicaState.SERVING]
    loads = [pool.offered_calls_per_s, *(replica.first_tokens_per_s for replica in serving)]
    return (
        bool(observation.holes)
        or any(replica.state in lost for replica in pool.replicas)
        or any(isinstance(reading, Hole) or not isfinite(reading.value) for reading in loads)
    )


def assert_missing_data_scales_nothing_in(observation: Observation, decision: Decision) -> None:
    pools = {pool.name: pool for pool in reversed(observation.pools)}
    for move in decision.moves:
        assert move.kind is ActionKind.SCALE, "weights and admission have no law yet"
        if scale(move).after < scale(move).before:
            assert not missing(pools[move.target], observation)


@ugly
@given(policies(), states(), observations(("a", "b")))
def test_missing_data_never_scales_in(policy, state, observation):
    _, decision = step(policy, state, observation)
    assert_missing_data_scales_nothing_in(observation, decision)


@behaving
@given(policies(lively=True), scripts(2))
def test_missing_data_never_scales_in_over_time_and_withdraws_what_was_recommended(policy, script):
    for played in play(policy, script):
        assert_missing_data_scales_nothing_in(played.observation, played.decision)
        for pool, memory in zip(played.observation.pools, played.after.pools, strict=True):
            if missing(pool, played.observation):
                assert memory.fewer_since_s is None
                stands = memory.standing
                assert stands is None or stands.mode is Mode.ACT or stands.replicas_after > stands.replicas_before


# -------------------------------------------------------------------------------------------- 5: guards only narrow


def rarely(values: st.SearchStrategy) -> st.SearchStrategy:
    """One of the values every third time, else None."""
    return st.one_of(st.none(), st.none(), values)


def case(*, policy, observation, ledger, since_s, past_s, now_s, frozen_until_s, partial, count):
    """A proposal for pool "a" (from `count` to wherever `count` goes), and what is known meanwhile."""
    context = Context(
        policy=policy,
        pool=policy.pools["a"],
        observation=observation,
        memory=PoolState("a", fewer_since_s=since_s, scaled_at_s=past_s),
        ledger=ledger,
        now_s=now_s,
        frozen_until_s=frozen_until_s,
        partial=partial,
    )
    return Proposal("a", *count, ()), context


free_gpus = st.fixed_dictionaries({}, optional={kind: st.integers(-5, 40) for kind in ("H100", "L40S")})
cases = st.builds(
    case,
    policy=policies(),
    observation=st.builds(pool_observation, st.just("a"), st.integers(0, 4), pool_ticks()),
    ledger=st.builds(Ledger, free_gpus, rarely(st.just("b"))),
    since_s=st.one_of(st.none(), st.floats(0, 1e4), moments),
    past_s=tuples(st.one_of(st.floats(0, 1e4), moments), 6),
    now_s=st.floats(0, 1e4),
    frozen_until_s=rarely(moments),
    partial=rarely(texts),
    count=st.tuples(st.integers(0, 30), st.integers(-2, 40)),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(cases)
def test_guards_only_narrow(proposed):
    proposal, context = proposed
    limits, rules = context.pool.replicas, context.policy.limits
    verdict = guards.narrow(proposal, context)
    if isinstance(verdict, Hold):
        assert verdict.target == proposal.pool
        assert verdict.changes[-1].reason == verdict.reason
        assert "report this" not in verdict.reason
        return
    assert verdict.pool == proposal.pool
    assert verdict.current == proposal.current
    aim = max(proposal.replicas, limits.min)  # the floor, and nothing else, may raise
    assert min(proposal.current, aim) <= verdict.replicas <= max(proposal.current, aim)
    if verdict.out:
        assert verdict.replicas <= limits.max
        assert verdict.replicas - verdict.current <= rules.replicas_per_step
        free = context.ledger.gpus_free.get(context.pool.gpu.type, 0)
        assert (verdict.replicas - verdict.current) * context.pool.gpu.per_replica <= max(free, 0)
    if verdict.inwards:
        assert verdict.replicas == verdict.current - 1 >= limits.min
        assert guards.doubted(context.observation, context.partial) is None
        assert context.ledger.scaling_in is None
        since_s = context.memory.fewer_since_s
        assert (0.0 if since_s is None else context.now_s - since_s) >= rules.scale_in_hold_s
    if verdict.replicas != verdict.current:
        assert context.frozen_until_s is None
        assert context.policy.mode_of(ActionKind.SCALE, proposal.pool) is not Mode.OBSERVE
        recent = sum(context.now_s - at_s < 3600 for at_s in context.memory.scaled_at_s)
        assert recent < rules.scalings_per_hour


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(cases)
def test_each_guard_says_what_it_changed(proposed):
    proposal, context = proposed
    for guard in guards.GUARDS:
        verdict = guard(proposal, context)
        if isinstance(verdict, Hold):
            assert verdict.reason
        elif verdict != proposal:
            assert len(verdict.changes) == len(proposal.changes) + 1
            assert verdict.changes[-1].reason


@behaving
@given(policies(lively=True), scripts(2))
def test_a_tick_stays_within_its_limits(policy, script):
    for played in play(policy, script):
        scales = [scale(move) for move in played.decision.moves]
        assert sum(one.after < one.before for one in scales) <= 1
        for one in scales:
            limits = policy.pools[one.pool].replicas
            assert one.after != one.before
            assert one.after - one.before <= policy.limits.replicas_per_step
            if one.after > one.before:
                assert one.after <= limits.max
            else:
                assert one.after == one.before - 1 >= limits.min


@behaving
@given(policies(lively=True), scripts(2, most=30))
def test_changes_per_hour_stay_within_the_policy(policy, script):
    script = [replace(tick, wait_s=abs(tick.wait_s)) for tick in script]
    at_s: dict[str, list[float]] = {name: [] for name in policy.pools}
    for played in play(policy, script):
        for move in played.decision.moves:
            at_s[move.target].append(played.decision.now_s)
    for times in at_s.values():
        for last in times:
            recent = [earlier for earlier in times if last - 3600 < earlier <= last]
            assert len(recent) <= policy.limits.scalings_per_hour


# ----------------------------------------------------------------- 6: one move at a time; 7: GPUs are never exceeded


@behaving
@given(policies(lively=True), scripts(2))
def test_a_standing_move_is_not_made_again(policy, script):
    for played in play(policy, script):
        stood = {memory.name: memory.standing for memory in played.before.pools if memory.standing is not None}
        for move in played.decision.moves:
            earlier, now = stood.get(move.target), scale(move)
            if earlier is None or (earlier.expires_s is not None and played.decision.now_s > earlier.expires_s):
                continue
            same_way = (earlier.replicas_after > earlier.replicas_before) is (now.after > now.before)
            assert not (same_way and earlier.replicas_after == now.after)


def taken(policy, played: Played, after: bool) -> Counter[str]:
    """GPUs by type that are held or promised, with the promises before or after the tick."""
    memories = {memory.name: memory for memory in (played.after if after else played.before).pools}
    gpus: Counter[str] = Counter()
    for pool in played.observation.pools:
        wanted, stands = pool.fleet.wanted, memories[pool.name].standing
        current = round(wanted.value) if isinstance(wanted, Known) else len(pool.replicas)
        use = policy.pools[pool.name].gpu
        gpus[use.type] += max(current, stands.replicas_after if stands else 0) * use.per_replica
    return gpus


@behaving
@given(policies(lively=True), scripts(2))
def test_gpus_held_and_promised_never_exceed_the_inventory(policy, script):
    for played in play(policy, script):
        before, after = taken(policy, played, after=False), taken(policy, played, after=True)
        for kind, gpus in after.items():
            # What is there without our doing (or by an old promise) may be over; no tick adds to that.
            assert gpus <= max(policy.gpus[kind].count, before[kind])
        added: Counter[str] = Counter()
        for move in played.decision.moves:
            use = policy.pools[move.target].gpu
            added[use.type] += max(scale(move).after - scale(move).before, 0) * use.per_replica
        for kind, gpus in (+added).items():
            held = sum(
                (round(p.fleet.wanted.value) if isinstance(p.fleet.wanted, Known) else len(p.replicas))
                * policy.pools[p.name].gpu.per_replica
                for p in played.observation.pools
                if policy.pools[p.name].gpu.type == kind
            )
            assert gpus <= policy.gpus[kind].count - held


@behaving
@given(policies(lively=True), scripts(2))
def test_move_ids_never_repeat(policy, script):
    ids = [move.id for played in play(policy, script) for move in played.decision.moves]
    assert len(ids) == len(set(ids))


# --------------------------------------------------------------------------------------------------- what is observed


def readings(value: object) -> Iterator[Known]:
    if isinstance(value, Known):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from readings(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from readings(getattr(value, field.name))


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(policies(), states(), snapshots(), moments)
def test_whatever_a_source_says_makes_an_observation_of_finite_numbers(policy, state, snapshot, now_s):
    observation = observe.build(policy, state, snapshot, (), now_s)
    assert [pool.name for pool in observation.pools] == list(policy.pools)
    for known in readings(observation):
        assert isfinite(known.value)
        assert isfinite(known.age_s)
    assert repr(observe.build(policy, state, snapshot, (), now_s)) == repr(observation)
    _, decision = step(policy, state, observation)
    assert_explained(policy, TickRecord(observation, decision, ""))
