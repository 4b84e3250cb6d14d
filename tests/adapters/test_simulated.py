"""The daemon's own loop on a simulated fleet: contract 12, and faults of the hands."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from controller import loop, replay
from controller.adapters.codec import canonical_bytes
from controller.adapters.journal import SqliteJournal, open_reader
from controller.adapters.simulated import (
    EPOCH_S,
    ActionFault,
    ActionFaultKind,
    Faults,
    SimulatedFleet,
    loaded_policy_of,
    policy_of,
)
from controller.decisions import Action, Scale, Sleep, TickRecord, Wake, WarmCache
from controller.errors import ActuationError
from controller.metrics import Metrics
from controller.observations import Known, Signal
from controller.policy_file import parse
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import CHAT, COPILOT, H100_X4, PoolOf, ServiceOf
from models.fleetsim.telemetry import Exporters
from models.fleetsim.world import ASLEEP, DRAINING, GONE, READY

# Sessions of hundreds of steps would outlast the fall of the load.
BRIEF = (replace(CHAT, share=0.7), replace(COPILOT, share=0.3))
HOUR = (
    ServiceOf("assistant", (PoolOf("h100", H100_X4, 1, 8),), (0.2, 1.2, 2.4, 0.3, 0.1), bin_s=720.0, profiles=BRIEF),
)


def simulated(faults: Faults | None = None) -> SimulatedFleet:
    return SimulatedFleet(Plant(HOUR, seed=11), policy_of(HOUR), faults=faults)


def test_the_unmodified_loop_steers_an_hour_and_its_journal_replays(tmp_path: Path) -> None:
    world = simulated()
    text = loaded_policy_of(HOUR).text + "limits: {scale_in_hold_s: 60}\n"
    loaded = parse(text, "scenario.yaml", telemetry_required=False)
    replicas: list[int] = []

    def listen(record: TickRecord) -> None:
        held = int((world.plant.world.replicas["state"] != GONE).sum())
        replicas.append(held)
        assert held * 4 <= loaded.policy.gpus["H100-SXM"].count
        if record.decision.now_s >= EPOCH_S + 3600:
            world.clock.stop()

    with closing(SqliteJournal(tmp_path / "hour.db")) as journal:
        ports = loop.Ports(world.clock, world, world.fleet, world, journal)
        metrics = Metrics()
        daemon = loop.Loop(ports, loaded, lambda _: world, metrics, loop.Shown(metrics, lambda _: ()))
        daemon.run(listen=listen)
    assert len(replicas) == 241
    assert max(replicas) > replicas[0], "it followed the load up"
    assert replicas[-1] < max(replicas), "and down again"
    with closing(open_reader(tmp_path / "hour.db")) as records:
        entries = [replay.Recorded(e.state_before, e.policy_text, e.record) for e in records.replayable()]
        policy = lambda text: parse(text, "journal", telemetry_required=False).policy  # noqa: E731
        replayed = list(replay.replay(entries, policy, canonical_bytes))
    assert len(replayed) == len(replicas)
    assert all(step.same for step in replayed)


def test_a_killed_controller_leaves_the_fleet_serving_and_goes_on_where_it_was(tmp_path: Path) -> None:
    world, loaded = simulated(), loaded_policy_of(HOUR)
    told: list[TickRecord] = []

    def steer(until_s: float) -> None:
        def listen(record: TickRecord) -> None:
            told.append(record)
            if record.decision.now_s >= EPOCH_S + until_s:
                raise KeyboardInterrupt  # nothing is tidied up that a kill would not tidy up

        with closing(SqliteJournal(tmp_path / "killed.db")) as journal:
            ports = loop.Ports(world.clock, world, world.fleet, world, journal)
            metrics = Metrics()
            daemon = loop.Loop(ports, loaded, lambda _: world, metrics, loop.Shown(metrics, lambda _: ()))
            with pytest.raises(KeyboardInterrupt):
                daemon.run(listen=listen)

    steer(1500)
    served, wanted = world.plant.world.ttft_counts.sum(), world.cluster()[0].wanted
    world.clock.sleep_until(EPOCH_S + 2100)
    assert world.cluster()[0].wanted == wanted
    assert world.plant.world.ttft_counts.sum() > served + 100
    steer(2700)
    assert [record.decision.tick for record in told] == list(range(1, len(told) + 1))
    moves = [move.id for record in told for move in record.decision.moves]
    assert len(moves) == len(set(moves)) > 0
    world.plant.settle()
    assert recount(world.plant) == ()


def test_the_same_seed_gives_the_same_samples() -> None:
    assert simulated().read(EPOCH_S + 300, 60, 1) == simulated().read(EPOCH_S + 300, 60, 1)


def test_rates_are_the_plants_own() -> None:
    world = simulated()
    world.advance(EPOCH_S + 240)
    before = world.plant.world.ttft_counts.sum()
    samples = world.read(EPOCH_S + 300, 60, 1).samples
    rate = sum(sample.value for sample in samples if sample.signal is Signal.FIRST_TOKENS_PER_S)
    # 60 s of 5 s scrapes hold 12 samples over 55 s, extrapolated to 60.
    assert rate == pytest.approx((world.plant.world.ttft_counts.sum() - before) / 60, rel=0.25)


@pytest.mark.parametrize(("kind", "at_once", "later"), [("late", 1, 3), ("twice", 3, 3), ("lost", 1, 1)])
def test_an_action_is_late_twice_or_lost(kind: str, at_once: int, later: int) -> None:
    world = simulated(Faults(actions=(ActionFault(ActionFaultKind(kind), 0, 100),)))
    world.clock.sleep_until(EPOCH_S + 10)
    world.perform(Scale("h100", 1, 3), 1)
    assert world.cluster()[0].wanted == Known(float(at_once), 0.0)
    world.clock.sleep_until(EPOCH_S + 60)
    assert world.cluster()[0].wanted == Known(float(later), 0.0)


@pytest.mark.parametrize(("kind", "unknown", "wanted"), [("refused", False, 1.0), ("timed out", True, 3.0)])
def test_an_api_refuses_or_leaves_it_open(kind: str, unknown: bool, wanted: float) -> None:
    world = simulated(Faults(actions=(ActionFault(ActionFaultKind(kind), 0, 100),)))
    with pytest.raises(ActuationError) as raised:
        world.perform(Scale("h100", 1, 3), 1)
    assert raised.value.outcome_unknown is unknown
    assert world.cluster()[0].wanted == Known(wanted, 0.0)


def test_a_late_action_that_cannot_be_done_is_kept_and_time_goes_on() -> None:
    world = simulated(Faults(actions=(ActionFault(ActionFaultKind.LATE, 0, 100),)))
    action = Scale("elsewhere", 1, 3)
    assert world.perform(action, 1) == "accepted"
    world.advance(EPOCH_S + 60)
    assert world.plant.now_s == 60
    (failure,) = world.late_failures
    assert (failure.at_s, failure.action) == (30.0, action)
    assert "no pool elsewhere" in failure.reason


def test_an_action_that_cannot_be_done_is_refused_at_once() -> None:
    with pytest.raises(ActuationError, match="no pool elsewhere"):
        simulated().perform(Scale("elsewhere", 1, 3), 1)


def test_sleep_drains_first() -> None:
    world = simulated()
    place = world.plant.world.replicas
    while place[0]["running"] == 0:
        world.clock.sleep_until(world.clock.now_s() + 1)
        world.cluster()
        assert world.plant.now_s < 600
    world.perform(Sleep("h100", ("h100-0",)), 1)
    assert place[0]["state"] == DRAINING
    assert world.cluster()[0].draining == Known(1.0, 0.0)
    world.clock.sleep_until(world.clock.now_s() + 125)
    fleet = world.cluster()[0]
    assert place[0]["state"] == ASLEEP
    assert (fleet.draining, fleet.ready) == (Known(0.0, 0.0), Known(0.0, 0.0))


def test_warming_a_replica_caches_the_system_prompts_of_its_service() -> None:
    service = ServiceOf("assistant", (PoolOf("h100", H100_X4, 1, 1),), (0.0,))
    world = SimulatedFleet(Plant((service,), seed=1), policy_of((service,)))
    world.perform(WarmCache("h100", "h100-0"), 1)
    world.advance(EPOCH_S + 30)
    replica = world.plant.world.replicas[0]
    assert replica["computed_tokens"] >= sum(profile.system_tokens for profile in service.profiles)
    assert replica["kv_idle"] > 0


@pytest.mark.parametrize(
    "action", [Sleep("h100", ("h100-0", "h100-9")), Wake("h100", ("h100-9",)), WarmCache("h100", "h100-9")]
)
def test_an_action_on_a_replica_that_is_not_there_is_refused_and_nothing_is_done(action: Action) -> None:
    world = simulated()
    with pytest.raises(ActuationError, match="has no replica h100-9; there are: h100-0") as raised:
        world.perform(action, 1)
    assert raised.value.outcome_unknown is False
    assert world.plant.world.replicas[0]["state"] == READY


def test_an_action_on_a_replica_that_does_not_answer_yet_is_refused() -> None:
    world = simulated()
    world.perform(Scale("h100", 1, 2), 1)
    (new,) = (page.name for page in Exporters(world.plant).pages() if page.rows is None)
    for action in (Sleep("h100", (new,)), Wake("h100", (new,)), WarmCache("h100", new)):
        with pytest.raises(ActuationError, match=f"{new} is starting and does not take this call"):
            world.perform(action, 1)


def test_waking_an_engine_that_is_awake_changes_nothing() -> None:
    world = simulated()
    assert world.perform(Wake("h100", ("h100-0",)), 1) == "done"
    assert world.plant.world.replicas[0]["state"] == READY


def test_a_fork_goes_on_as_its_original_would_and_leaves_it_alone() -> None:
    fleet = simulated()
    fleet.read(EPOCH_S + 120.0, 60.0, 1.0)
    fork, untouched = fleet.fork(), fleet.fork()
    fork.plant.scale(fork.plant.pools[0].name, 0)
    goes_on = repr(fleet.read(EPOCH_S + 240.0, 60.0, 1.0))
    assert repr(untouched.read(EPOCH_S + 240.0, 60.0, 1.0)) == goes_on
    assert repr(fork.read(EPOCH_S + 240.0, 60.0, 1.0)) != goes_on
