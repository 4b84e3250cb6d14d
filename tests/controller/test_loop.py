"""The loop on virtual time: the captured telemetry, real journals, and everything around a tick that can fail."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from controller import loop
from controller.adapters.codec import canonical_bytes
from controller.adapters.journal import SqliteJournal, open_reader
from controller.adapters.recording import VLLM_CPU, RecordingTelemetry, VirtualClock
from controller.decisions import Action, AlarmKind, ControllerState, PoolState, ReplicaMemory, TickRecord
from controller.errors import JournalError, TelemetryError
from controller.loop import Loop, Ports, Shown
from controller.metrics import Metrics
from controller.observations import Hole, Outcome, PoolFleet, Signal, Snapshot, SourceHole, Status
from controller.policy_file import LoadedPolicy, PolicyWatch, load, parse
from controller.ports import Journal, Telemetry
from controller.replay import Recorded, replay
from controller.step import step

POLICY = VLLM_CPU.parent / "vllm_cpu.yaml"
BURST_S = 130.0
"""Where the burst of the recording begins: it is answered by moves after 4 s and after 24 s."""


@pytest.fixture(scope="module")
def tape() -> RecordingTelemetry:
    return RecordingTelemetry(VLLM_CPU)


@pytest.fixture
def policy() -> LoadedPolicy:
    return load(POLICY, telemetry_required=False)


@pytest.fixture
def journal(tmp_path) -> Iterator[SqliteJournal]:
    with closing(SqliteJournal(tmp_path / "trimtab.db")) as opened:
        yield opened


@dataclass
class Scenes(VirtualClock):
    """Virtual time on which something happens before some ticks: `scenes[3]` before the third one."""

    start_s: float
    end_s: float
    scenes: dict[int, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.start_s, self.end_s)
        self.slept = 0

    def sleep_until(self, at_s: float) -> bool:
        if not super().sleep_until(at_s):
            return False
        self.slept += 1
        self.scenes.get(self.slept, lambda: None)()
        return True


@dataclass
class Daemon:
    """A loop with what it needs, and what it made known."""

    loop: Loop
    shown: Shown
    metrics: Metrics
    heard: list[TickRecord] = field(default_factory=list)

    def run(self) -> list[TickRecord]:
        self.loop.run(listen=self.heard.append)
        return self.heard

    def metric(self, name: str) -> float:
        lines = self.metrics.render()[0].decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def daemon(
    ports: Ports,
    policy: LoadedPolicy,
    reopen: Callable[[object], Telemetry] | None = None,
    deadline_s: float = 10.0,
) -> Daemon:
    metrics = Metrics()
    shown = Shown(metrics, lambda _: ())
    return Daemon(
        Loop(ports, policy, reopen or (lambda _: ports.telemetry), metrics, shown, deadline_s), shown, metrics
    )


def ticking(tape: RecordingTelemetry, ticks: int, **scenes: Callable[[], None]) -> Scenes:
    """A clock for so many ticks of 2 s from the burst on."""
    start_s = tape.start_s + BURST_S
    return Scenes(start_s, start_s + 2 * (ticks - 1), {int(name[1:]): scene for name, scene in scenes.items()})


def first_move(records: list[TickRecord]) -> TickRecord:
    return next(record for record in records if record.decision.moves)


def tick_numbers(records: list[TickRecord]) -> list[int]:
    return [record.decision.tick for record in records]


# -------------------------------------------------------------------------------------------------------- recording


def test_every_tick_is_recorded_and_replays_to_the_same_bytes(tape, policy, journal) -> None:
    records = daemon(Ports(ticking(tape, 30), tape, journal=journal), policy).run()
    assert tick_numbers(records) == list(range(1, 31))
    assert list(journal.tail(100)) == records
    entries = [Recorded(step.state_before, step.policy_text, step.record) for step in journal.replayable()]
    parsed = lambda text: parse(text, "journal", telemetry_required=False).policy  # noqa: E731
    replayed = list(replay(entries, parsed, canonical_bytes))
    assert len(replayed) == 30
    assert all(one.same for one in replayed)


def test_a_recommendation_has_its_dry_run_in_the_journal(tape, policy, journal) -> None:
    records = daemon(Ports(ticking(tape, 30), tape, journal=journal), policy).run()
    (outcome,) = first_move(records).outcomes
    assert outcome.status is Status.DRY_RUN
    assert outcome.command.startswith("kubectl -n default scale deployment/tiny-cpu --replicas=")


@dataclass
class Witness:
    """An actuator that looks into the journal before it acts, and then fails as it is told to."""

    path: Path
    failure: Exception | None = None
    seen: list[TickRecord] = field(default_factory=list)

    def describe(self, action: Action) -> tuple[str, str]:
        return "", ""

    def perform(self, action: Action, deadline_s: float) -> str:
        with closing(open_reader(self.path)) as reader:
            self.seen += reader.tail(1)
        if self.failure is not None:
            raise self.failure
        return "done"


def acting(policy: LoadedPolicy) -> LoadedPolicy:
    return parse(policy.text.replace("mode: recommend", "mode: act"), "acting", telemetry_required=False)


def test_a_tick_is_durable_before_anything_is_done(tape, policy, journal, tmp_path) -> None:
    witness = Witness(tmp_path / "trimtab.db")
    records = daemon(Ports(ticking(tape, 30), tape, actuator=witness, journal=journal), acting(policy)).run()
    moved = first_move(records)
    assert witness.seen[0] == replace(moved, outcomes=()), "decided and recorded, and not yet done"
    assert moved.outcomes[0].status is Status.DONE


def test_the_outcome_is_an_input_of_the_next_tick(tape, policy, journal, tmp_path) -> None:
    witness = Witness(tmp_path / "trimtab.db", failure=ZeroDivisionError("a bug"))
    records = daemon(Ports(ticking(tape, 30), tape, actuator=witness, journal=journal), acting(policy)).run()
    for record, after in itertools.pairwise(records):
        assert after.observation.outcomes == record.outcomes
    assert first_move(records).outcomes[0].status is Status.UNKNOWN, "a broken actuator may have acted"
    assert tick_numbers(records) == list(range(1, 31))


# -------------------------------------------------------------------------------------------------- journals that fail


def test_a_tick_that_a_full_journal_refuses_leaves_no_trace(tape, policy, journal) -> None:
    def pages(most: int) -> Callable[[], None]:
        return lambda: journal._db.execute(f"PRAGMA max_page_count({most})").fetchall()

    tried = ticking(tape, 30, t11=pages(1), t21=pages(10**6))
    told = daemon(Ports(tried, tape, journal=journal), policy)
    records = told.run()
    failed = int(told.metric("trimtab_loop_errors_total"))
    assert 0 < failed <= 10, "some ticks still fitted into the pages that were free"
    assert len(records) == 30 - failed
    assert tick_numbers(records) == list(range(1, 31 - failed)), "no number is lost, none is taken twice"
    assert list(journal.tail(100)) == records
    assert all(after.observation.outcomes == before.outcomes for before, after in itertools.pairwise(records))


def test_nothing_is_done_where_the_decision_can_not_be_recorded(tape, policy, tmp_path) -> None:
    witness, journal = Witness(tmp_path / "trimtab.db"), SqliteJournal(tmp_path / "trimtab.db")
    clock = ticking(tape, 30, t2=journal.close)
    told = daemon(Ports(clock, tape, actuator=witness, journal=journal), acting(policy))
    assert tick_numbers(told.run()) == [1]
    assert witness.seen == []
    assert told.metric("trimtab_loop_errors_total") == 29
    assert told.shown.last() == told.heard[0]


class Forgetful(SqliteJournal):
    """A journal whose disk fills up between a tick and its outcomes, at every third tick."""

    def finish(self, tick: int, outcomes: tuple[Outcome, ...]) -> None:
        if tick % 3 == 0:
            raise JournalError("trimtab.db: the disk refuses; free space there")
        super().finish(tick, outcomes)


def test_outcomes_that_can_not_be_recorded_do_not_stop_the_ticks(tape, policy, tmp_path) -> None:
    with closing(Forgetful(tmp_path / "forgetful.db")) as journal:
        told = daemon(Ports(ticking(tape, 30), tape, journal=journal), policy)
        records = told.run()
        assert tick_numbers(records) == list(range(1, 31))
        assert told.metric("trimtab_loop_errors_total") == 10
        recorded = list(journal.tail(100))
    assert [record.decision for record in recorded] == [record.decision for record in records]
    for before, after in zip(records, recorded[1:], strict=False):
        assert after.observation.outcomes == before.outcomes, "the next observation holds them"


# ------------------------------------------------------------------------------------------------- ports that fail


@dataclass
class Sometimes:
    """The recording, which at some reads does something else first."""

    tape: RecordingTelemetry
    instead: dict[int, Callable[[], None]]
    reads: int = 0
    closed: int = 0

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:
        self.reads += 1
        self.instead.get(self.reads, lambda: None)()
        return self.tape.read(at_s, window_s, deadline_s)

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        return self.tape.expressions(window_s)

    def close(self) -> None:
        self.closed += 1


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_source_that_raises_is_a_hole_and_not_a_crash(tape, policy, journal) -> None:
    source = Sometimes(
        tape, {3: raising(TelemetryError("prometheus: no route to host")), 5: raising(KeyError("le")), 6: lambda: None}
    )
    records = daemon(Ports(ticking(tape, 8), source, journal=journal), policy).run()
    assert tick_numbers(records) == list(range(1, 9))
    assert records[2].observation.holes == (SourceHole("telemetry", "prometheus: no route to host"),)
    assert records[4].observation.holes == (
        SourceHole("telemetry", "its adapter broke (KeyError: 'le'); please report this bug"),
    )
    for blind in (records[2], records[4]):
        assert blind.decision.moves == ()
        assert {AlarmKind.TELEMETRY_BLIND, AlarmKind.TELEMETRY_PARTIAL} <= {a.kind for a in blind.decision.alarms}
        offered = blind.observation.pools[0].offered_calls_per_s
        assert isinstance(offered, Hole)
    assert records[5].observation.holes == ()


def test_a_source_that_hangs_is_a_hole_within_the_deadline(tape, policy) -> None:
    released = threading.Event()
    source = Sometimes(tape, {2: released.wait})
    try:
        records = daemon(Ports(ticking(tape, 4), source), policy, deadline_s=0.2).run()
    finally:
        released.set()
    assert [bool(record.observation.holes) for record in records] == [False, True, False, False]
    assert records[1].observation.holes[0].detail == "no answer within the deadline"


@dataclass
class Cluster:
    """A cluster that wants three replicas of the pool, and breaks at its second read."""

    reads: int = 0

    def read(self, deadline_s: float) -> tuple[tuple[PoolFleet, ...], tuple[SourceHole, ...]]:
        self.reads += 1
        if self.reads == 2:
            raise OSError("connection reset")
        return (), (SourceHole("cluster", "is not asked for pools yet"),)


def test_a_cluster_that_breaks_is_a_hole_beside_the_telemetry(tape, policy) -> None:
    records = daemon(Ports(ticking(tape, 3), tape, fleet=Cluster()), policy).run()
    details = [record.observation.holes[0].detail for record in records]
    assert details[0] == details[2] == "is not asked for pools yet"
    assert "OSError: connection reset" in details[1]
    assert all(record.observation.pools[0].replicas for record in records)


# ------------------------------------------------------------------------------------------------------ restarting


def stopped_after(count: int, tape, policy: LoadedPolicy, path: Path) -> list[TickRecord]:
    with closing(SqliteJournal(path)) as journal:
        return daemon(Ports(ticking(tape, count), tape, journal=journal), policy).run()


def test_a_restart_continues_the_count_and_repeats_no_move(tape, policy, tmp_path) -> None:
    path = tmp_path / "trimtab.db"
    whole = daemon(Ports(ticking(tape, 30), tape), policy).run()
    moved = first_move(whole).decision.tick
    before = stopped_after(moved, tape, policy, path)
    clock = ticking(tape, 30)
    clock.sleep_until(clock.start_s + 2 * moved)
    with closing(SqliteJournal(path)) as journal:
        after = daemon(Ports(clock, tape, journal=journal), policy).run()
    both = before + after
    assert tick_numbers(both) == list(range(1, 31))
    ids = [move.id for record in both for move in record.decision.moves]
    assert ids == [move.id for record in whole for move in record.decision.moves], "as if nothing had happened"
    assert after[0].observation.outcomes == before[-1].outcomes


@pytest.mark.parametrize(("mode", "status"), [("recommend", Status.DRY_RUN), ("act", Status.UNKNOWN)])
def test_a_process_that_died_before_its_outcome_leaves_it_to_the_next(tape, policy, tmp_path, mode, status) -> None:
    path = tmp_path / "trimtab.db"
    rules = policy if mode == "recommend" else acting(policy)
    clock, state = ticking(tape, 30), ControllerState()
    with closing(SqliteJournal(path)) as journal:
        ports = Ports(clock, tape, journal=journal)
        state, record = loop.decide(ports, rules, state, (), 10.0)
        while not record.decision.moves and clock.sleep_until(clock.now_s() + 2):
            state, record = loop.decide(ports, rules, state, (), 10.0)
        # Here the process died: after recording, before doing.
    with closing(SqliteJournal(path)) as journal:
        resumed, outcomes = loop.resume(journal, clock.now_s())
        assert resumed == state
        assert [(outcome.move_id, outcome.status) for outcome in outcomes] == [(record.decision.moves[0].id, status)]
        assert "stopped before the outcome was recorded" in outcomes[0].detail
        assert next(journal.tail(1)).outcomes == outcomes
        assert loop.resume(journal, clock.now_s() + 60) == (resumed, outcomes), "and nothing changes the second time"


def test_a_new_journal_starts_from_nothing(journal) -> None:
    port: Journal = journal
    assert loop.resume(port, 1.0) == (ControllerState(), ())


# ------------------------------------------------------------------------------------------------------------ time


@dataclass
class Jumps:
    """A clock that is so much later (or earlier) than it should be after some ticks, for ten ticks."""

    jumps: dict[int, float]
    at_s: float = 1_796_077_400.0
    due: list[float] = field(default_factory=list)

    def now_s(self) -> float:
        return self.at_s

    def sleep_until(self, at_s: float) -> bool:
        self.due.append(at_s)
        self.at_s = max(self.at_s, at_s)
        self.at_s += self.jumps.get(len(self.due), 0.0)
        return len(self.due) <= 10


def steps(clock: Jumps) -> list[float]:
    return [round(b - a, 3) for a, b in zip(clock.due, clock.due[1:], strict=False)]


def test_a_slow_tick_does_not_shift_the_others(tape, policy) -> None:
    clock = Jumps({3: 1.5, 6: 3.9})
    daemon(Ports(clock, tape), policy).run()
    assert steps(clock) == [2.0] * 10


def test_ticks_that_are_late_by_more_than_an_interval_count_anew(tape, policy) -> None:
    clock = Jumps({3: 4.1})
    daemon(Ports(clock, tape), policy).run()
    assert steps(clock) == [2.0, 2.0, 6.1, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_a_clock_that_is_set_back_does_not_stop_the_ticks(tape, policy) -> None:
    clock = Jumps({3: -3600.0})
    records = daemon(Ports(clock, tape), policy).run()
    assert steps(clock) == [2.0, 2.0, 2.0 - 3600, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert len(records) == 10


def test_intervals_that_are_no_whole_seconds_are_never_late(tape, policy) -> None:
    rules = parse(policy.text.replace("interval_s: 2", "interval_s: 0.3"), "short", telemetry_required=False)
    clock = VirtualClock(tape.start_s + 10, tape.start_s + 13)
    records = daemon(Ports(clock, tape), rules).run()
    times = [record.decision.now_s for record in records]
    assert times == pytest.approx([tape.start_s + 10 + 0.3 * n for n in range(len(times))], abs=0.002)
    assert len(times) in {10, 11}


# ----------------------------------------------------------------------------------------------- reloading, timed work


@pytest.fixture
def file(tmp_path, policy) -> Path:
    written = tmp_path / "fleet.yaml"
    written.write_text(policy.text)
    return written


def reloading(tape, file: Path, texts: dict[int, str], reopen: Callable[[object], Telemetry] | None = None) -> Daemon:
    """A daemon of 8 ticks that looks at its policy file before each, where the texts are written at some ticks."""
    loaded = load(file, telemetry_required=False)
    watch = PolicyWatch(loaded, telemetry_required=False)
    clock = ticking(tape, 8)
    told = daemon(Ports(clock, tape), loaded, reopen)

    def scene(number: int) -> Callable[[], None]:
        def happen() -> None:
            if number in texts:
                file.write_text(texts[number])
            told.loop.post(lambda: told.loop.reload(watch))

        return happen

    clock.scenes.update({number: scene(number) for number in range(1, 9)})
    return told


def shas(records: list[TickRecord]) -> list[str]:
    return [record.policy_sha256[:6] for record in records]


def test_a_good_policy_is_taken_whole_at_the_next_tick(tape, policy, file) -> None:
    told = reloading(tape, file, {4: policy.text.replace("max: 6", "max: 5")})
    records = told.run()
    assert len(set(shas(records)[:3])) == len(set(shas(records)[3:])) == 1
    assert records[2].policy_sha256 != records[3].policy_sha256
    assert told.metric('trimtab_policy_reloads_total{result="success"}') == 2


@pytest.mark.parametrize("bad", ["version: 1\n", "max: [", "", "version: 1\nunknown: 5\n"])
def test_a_bad_policy_keeps_the_old_one_and_says_so_once(tape, policy, file, bad: str) -> None:
    told = reloading(tape, file, {4: bad})
    records = told.run()
    assert shas(records) == [policy.sha256[:6]] * 8
    assert told.metric('trimtab_policy_reloads_total{result="failure"}') == 1


def test_a_mended_policy_is_taken(tape, policy, file) -> None:
    told = reloading(tape, file, {2: "max: [", 5: policy.text.replace("max: 6", "max: 5")})
    records = told.run()
    assert shas(records)[:4] == [policy.sha256[:6]] * 4
    assert records[4].policy_sha256 != policy.sha256
    assert told.metric('trimtab_policy_reloads_total{result="success"}') == 2


def test_an_absent_policy_file_keeps_the_old_one(tape, policy, file) -> None:
    loaded = load(file, telemetry_required=False)
    watch, told = PolicyWatch(loaded, telemetry_required=False), daemon(Ports(ticking(tape, 3), tape), loaded)
    file.unlink()
    told.loop.reload(watch)
    assert shas(told.run()) == [policy.sha256[:6]] * 3
    assert watch.problem is not None


def test_telemetry_is_reopened_only_where_something_else_is_asked_of_it(tape, policy, file) -> None:
    opened: list[Sometimes] = []

    def reopen(_: object) -> Telemetry:
        opened.append(Sometimes(tape, {}))
        return opened[-1]

    texts = {
        3: policy.text.replace("max: 6", "max: 5"),
        5: policy.text.replace("window_s: 10", "window_s: 12"),
        7: policy.text.replace("window_s: 10", "window_s: 14"),
    }
    records = reloading(tape, file, texts, reopen).run()
    assert [record.observation.window_s for record in records] == [10, 10, 10, 10, 12, 12, 14, 14]
    assert [(source.reads, source.closed) for source in opened] == [(2, True), (2, True)], (
        "each once: replaced, or stopped"
    )


def test_a_policy_whose_telemetry_can_not_be_opened_waits_until_it_can(tape, policy, file) -> None:
    attempts: list[object] = []

    def reopen(asked: object) -> Telemetry:
        attempts.append(asked)
        if len(attempts) < 3:
            raise TelemetryError("ca.pem: there is no such file")
        return tape

    told = reloading(tape, file, {3: policy.text.replace("window_s: 10", "window_s: 12")}, reopen)
    records = told.run()
    assert [record.observation.window_s for record in records] == [10, 10, 10, 10, 12, 12, 12, 12]
    assert told.metric('trimtab_policy_reloads_total{result="failure"}') == 1


def test_timed_work_is_done_between_ticks_and_may_fail(tape, policy) -> None:
    clock, done = ticking(tape, 4), []
    told = daemon(Ports(clock, tape), policy)
    clock.scenes[2] = lambda: told.loop.post(lambda: done.append(len(told.heard)))
    clock.scenes[3] = lambda: (
        told.loop.post(raising(JournalError("the disk refuses"))),
        told.loop.post(raising(IndexError("a bug"))),
        told.loop.post(lambda: done.append(len(told.heard))),
    )
    assert len(told.run()) == 4
    assert done == [1, 2]
    assert told.metric("trimtab_loop_errors_total") == 2


# ----------------------------------------------------------------------------------------------------------- showing


def test_what_is_shown_is_the_newest_tick(tape, policy) -> None:
    told = daemon(Ports(ticking(tape, 3), tape), policy)
    assert not told.shown.ticked()
    assert not told.shown.policy_loaded()
    assert told.shown.heartbeat_age_s() is None
    records = told.run()
    assert told.shown.ticked()
    assert told.shown.policy_loaded()
    assert told.shown.last() == records[-1]
    age_s = told.shown.heartbeat_age_s()
    assert age_s is not None
    assert 0 <= age_s < 60
    assert told.metric("trimtab_ticks_total") == 3


def test_a_stopped_clock_ends_the_run(tape, policy) -> None:
    clock = ticking(tape, 100)
    clock.scenes[5] = clock.stop
    assert len(daemon(Ports(clock, tape), policy).run()) == 5


def test_what_is_missing_is_gone_when_a_person_says_so(tape: RecordingTelemetry, policy: LoadedPolicy) -> None:
    memory = PoolState(
        "tiny-cpu", replicas=(ReplicaMemory("vllm-0", tape.start_s), ReplicaMemory("vllm-9", tape.start_s))
    )
    state = ControllerState(tick=1, now_s=tape.start_s, pools=(memory,))
    ports = loop.Ports(VirtualClock(tape.start_s + 60), tape)
    _, kept = loop.decide(ports, policy, state, (), 10)
    assert "vllm-9" in {replica.name for replica in kept.observation.pools[0].replicas}
    after, record = loop.decide(ports, policy, state, (), 10, forget_missing=True)
    assert "vllm-9" not in {replica.name for replica in record.observation.pools[0].replicas}
    assert "vllm-9" not in {replica.name for replica in after.pools[0].replicas}
    assert step(policy.policy, state, record.observation)[0] == after, "a replay needs the observation alone"
