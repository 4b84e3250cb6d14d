"""What an explanation reads like."""

from dataclasses import replace

from captures import fleet
from properties.worlds import START_S, PoolTick, WorldTick, play, pool_observation
from ticks import NOW_S, tick_record

from controller import act, explain, reasons
from controller.decisions import ActionKind, Alarm, AlarmKind, Change, Hold, Mode, Stage, TickRecord
from controller.observations import Hole, Nothing, Outcome, Status
from controller.policy import FleetPolicy
from models.types import Slo


def policy(name: str = "assistant-h100", **changes: object) -> FleetPolicy:
    pool = {
        "select": {"app": name},
        "model": {"name": "m", "parameters": 8e9},
        "gpu": {"type": "H100-SXM"},
        "replicas": {"min": 1, "max": 8},
        "scale": {"kind": "Deployment", "namespace": "serving", "name": name},
    }
    return fleet(
        **{
            "gpus": {"H100-SXM": {"count": 6, "usd_per_gpu_hour": 2.0}},
            "services": {"assistant": {"slo": {"ttft_s": 2.0, "tpot_s": 0.05}, "pools": [name]}},
            "pools": {name: pool},
            "limits": {"headroom": 0.7},
            **changes,
        }
    )


def told(rules: FleetPolicy, *happened: PoolTick) -> TickRecord:
    """The last of some ticks, with the outcomes of its moves."""
    *_, played = play(rules, [WorldTick(15.0, False, (tick,)) for tick in happened])
    outcomes = act.perform(played.decision, rules, None, played.decision.now_s)
    return TickRecord(played.observation, played.decision, "", outcomes)


MOVE = """\
14:13:50  assistant-h100  3 -> 6 replicas  (add capacity)                                recommended
  observed   3 of 3 replicas serve; 150 calls/s offered (150 served); hit rate 0.50; signals at most
             2 s old
  estimated  a replica carries 31.6 calls/s warm (26.4-37.8), 19.1 cold; limited by prefill compute;
             1.58 of warm capacity used
  forecast   150 calls/s at 14:17:50 when a start ordered now serves (lead 240 s)
  planned    7 replicas for 150 calls/s at 31.6 each; binding: headroom theta 0.7
  guarded    3 H100-SXM are free, a replica needs 1
  expected   at 14:17:50: TTFT 0.21 s; ITL 28.4 ms; hit rate 0.50 -> 0.50; $ per 1,000 good calls
             0.016 -> 0.022; $ per hour 6.00 -> 12.00; cascade margin -0.57 -> 0.37
  do         kubectl -n serving scale deployment/assistant-h100 --replicas=6
  undo       kubectl -n serving scale deployment/assistant-h100 --replicas=3"""

HOLD = """\
14:13:35  assistant-h100  scale: hold
  observed   3 of 3 replicas serve; 50.0 calls/s offered (50.0 served); hit rate 0.50; signals at
             most 2 s old
  estimated  a replica carries 31.6 calls/s warm (26.6-37.6), 19.1 cold; limited by prefill compute;
             0.53 of warm capacity used
  forecast   50.0 calls/s at 14:17:35 when a start ordered now serves (lead 240 s)
  planned    3 replicas for 50.0 calls/s at 31.6 each; binding: headroom theta 0.7
  hold       3 replicas will do: headroom theta 0.7"""


def test_a_move_reads_as_its_chain_of_reasons_with_what_to_type() -> None:
    record = told(policy(), PoolTick(50.0), PoolTick(150.0))
    assert explain.record_text(record, policy(), "assistant-h100") == MOVE


def test_a_hold_reads_as_the_chain_up_to_what_stopped_it() -> None:
    record = told(policy(), PoolTick(50.0))
    assert explain.record_text(record, policy(), "assistant-h100") == HOLD


def test_what_a_guard_stopped_stands_in_its_hold() -> None:
    record = told(policy(gpus={"H100-SXM": {"count": 3, "usd_per_gpu_hour": 2.0}}), PoolTick(150.0))
    text = explain.record_text(record, policy())
    assert "  guarded    no H100-SXM is free (0 left, a replica needs 1)" in text
    assert "ALARM inventory_exhausted  assistant-h100: no H100-SXM is free" in text


def test_lines_fit_the_width_however_long_a_name_is() -> None:
    name = "assistant-with-a-name-as-long-as-kubernetes-lets-it-be-63-chars"
    record = told(policy(name), PoolTick(50.0), PoolTick(150.0))
    (move,) = record.decision.moves
    lines = explain.move_text(move, record).splitlines()
    assert all(len(line) <= explain.WIDTH for line in lines if line.split()[0] not in {"do", "undo"})
    assert lines[0].startswith(f"14:13:50  {name}  3 -> 6 replicas")
    assert lines[1] == " " * 10 + "capacity) recommended"


def test_an_outcome_that_is_more_than_words_is_told() -> None:
    record = tick_record()
    (move,) = record.decision.moves
    failed = Outcome(move.id, Status.FAILED, NOW_S, "403 from the API server", "kubectl scale ...", "kubectl undo ...")
    text = explain.move_text(move, replace(record, outcomes=(failed,)))
    assert text.splitlines()[-3:] == [
        "  do         kubectl scale ...",
        "  undo       kubectl undo ...",
        "  failed     403 from the API server",
    ]
    assert explain.headline(replace(move, mode=Mode.ACT), NOW_S).endswith("   requested")


def test_one_pool_is_told_without_the_others() -> None:
    record = tick_record()
    strange = Hold("other", ActionKind.SCALE, "it is another pool")
    both = replace(record, decision=replace(record.decision, holds=(*record.decision.holds, strange)))
    assert "another pool" in explain.record_text(both, policy())
    assert "another pool" not in explain.record_text(both, policy(), "assistant-h100")
    assert "weights" not in explain.record_text(both, policy()), "what has no law yet is not told unless asked for"
    assert "assistant  weights: hold" in explain.record_text(both, policy(), "assistant")


def test_alarms_of_a_pools_replicas_are_told_with_the_pool() -> None:
    text = explain.record_text(tick_record(), policy(), "assistant-h100")
    assert "ALARM replica_hung  assistant-h100/r-2: it answers and does not work" in text
    assert "telemetry_partial" not in text
    assert explain.alarm_line(Alarm(AlarmKind.CANNOT_ACT, "a", "no")) == "ALARM cannot_act  a: no"


def test_a_hold_of_a_pool_that_left_the_policy_keeps_its_own_chain() -> None:
    hold = Hold("gone", ActionKind.SCALE, "frozen", (Change(Stage.GUARDED, 3, 3, "frozen by the policy"),))
    text = explain.hold_text(hold, tick_record(), policy())
    assert "frozen by the policy" in text


# ------------------------------------------------------------------------------------------------------------ words


def test_numbers_read_as_a_person_would_write_them() -> None:
    values = (0.0, 1234.5, 12.34, 1.234, 0.1234, 0.01234, 1e12, 1e-5, float("nan"), -12.34, 9.9999, 99.99)
    assert [reasons.number(value) for value in values] == [
        "0", "1,234", "12.3", "1.23", "0.12", "0.012", "1e+12", "1e-05", "nan", "-12.3", "10.0", "100",
    ]  # fmt: skip


def test_lengths_of_time_have_the_unit_of_their_size() -> None:
    assert [reasons.span(seconds) for seconds in (15, 119.6, 1800, 9000, 5e5)] == [
        "15 s", "120 s", "30 min", "2.5 h", "138.9 h",
    ]  # fmt: skip


def test_what_is_unknown_is_said_to_be() -> None:
    pool = pool_observation("a", 2, PoolTick(10.0))
    blind = replace(pool, offered_calls_per_s=Hole(Nothing.ABSENT, "the query failed"))
    assert reasons.observed(blind, Slo(2.0, 0.05, 95, 0.99)) == (
        "2 of 2 replicas serve; offered load is absent: the query failed"
    )


def test_times_that_are_none_are_dashes() -> None:
    assert reasons.clock(START_S) == "14:13:20"
    assert [reasons.clock(at_s) for at_s in (float("nan"), float("inf"), 1e300)] == ["--:--:--"] * 3
