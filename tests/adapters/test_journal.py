"""The journal against real files, real processes that are killed, and disks that are full."""

import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from journal_fleets import POLICY_SHA256, POLICY_TEXT, Tick, policy, ticks
from properties.strategies import decisions, observations, outcomes, states

from controller.adapters.codec import canonical_bytes
from controller.adapters.journal import SNAPSHOT_TICKS, SqliteJournal, open_reader
from controller.adapters.journal_file import SCHEMA_VERSION
from controller.decisions import ControllerState, TickRecord
from controller.errors import JournalError
from controller.observations import Outcome, Status
from controller.ports import Journal
from controller.step import step

DONE = (Outcome("1-a", Status.DRY_RUN, 5.0, "recommended", "kubectl scale", "kubectl scale"),)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "trimtab.db"


def write(journal: SqliteJournal, written) -> list[Tick]:
    done = []
    for tick in written:
        journal.append(tick.record, POLICY_TEXT, tick.after)
        done.append(tick)
    return done


def filled(path: Path, count: int, *, pools: int = 1, replicas: int = 2) -> list[Tick]:
    """A journal with `count` ticks, closed again."""
    with SqliteJournal(path) as journal:
        return write(journal, ticks(pools, replicas, count))


def assert_one_sentence(error: pytest.ExceptionInfo, path: Path, *words: str) -> None:
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert "Traceback" not in text
    for word in words:
        assert word in text


# ---------------------------------------------------------------------------------------------------- remembering


def test_gives_back_what_was_appended(path):
    with SqliteJournal(path) as journal:
        port: Journal = journal
        assert port.load() is None
        assert list(port.tail(5)) == []
        written = write(journal, ticks(3, 2, 12))
        assert port.load() == written[-1].after
        assert list(port.tail(5)) == [tick.record for tick in written[-5:]]
        assert list(port.tail(100)) == [tick.record for tick in written]
        assert list(port.tail(0)) == []
        assert list(journal.records(3, 5)) == [tick.record for tick in written[2:5]]


def test_a_new_process_continues_where_the_last_one_stopped(path):
    first = filled(path, 4)
    with SqliteJournal(path) as journal:
        state = journal.load()
        assert state == first[-1].after
        second = write(journal, ticks(1, 2, 3, state=state))
    with open_reader(path) as reader:
        assert list(reader.records()) == [tick.record for tick in first + second]


def test_outcomes_are_added_and_replaced(path):
    with SqliteJournal(path) as journal:
        (tick,) = write(journal, ticks(1, 1, 1))
        journal.finish(1, ())
        assert next(journal.tail(1)).outcomes == ()
        journal.finish(1, DONE)
        assert next(journal.tail(1)) == replace(tick.record, outcomes=DONE)
        journal.finish(1, (*DONE, *DONE))
        assert next(journal.tail(1)).outcomes == (*DONE, *DONE)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(observations(), decisions(), outcomes(), states())
def test_any_tick_survives(observation, decision, done, state):
    record = TickRecord(observation, decision, POLICY_SHA256, done)
    with tempfile.TemporaryDirectory() as folder, SqliteJournal(Path(folder) / "any.db") as journal:
        journal.append(record, POLICY_TEXT, replace(state, tick=decision.tick))
        assert repr(next(journal.tail(1))) == repr(record)
        assert repr(journal.load()) == repr(replace(state, tick=decision.tick))


def test_keeps_each_policy_text_once_and_as_long_as_it_is_used(path):
    with SqliteJournal(path, max_bytes=1) as journal:
        for tick in ticks(1, 1, 9):
            sha256 = f"{tick.record.decision.tick // 5:064}"
            journal.append(replace(tick.record, policy_sha256=sha256), f"text of {sha256}", tick.after)
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT count(*) FROM policies").fetchone() == (2,)
        assert journal.policy_text(f"{0:064}") == f"text of {0:064}"
        journal.prune()
        with pytest.raises(JournalError) as error:
            journal.policy_text(f"{0:064}")
        assert_one_sentence(error, path, "no more in the journal")


# --------------------------------------------------------------------------------------------------------- refusing


def test_refuses_a_tick_that_is_not_newer(path):
    with SqliteJournal(path) as journal:
        written = write(journal, ticks(1, 1, 2))
        for tick in written:
            with pytest.raises(JournalError, match="this is a bug"):
                journal.append(tick.record, POLICY_TEXT, tick.after)
        assert list(journal.records()) == [tick.record for tick in written]


def test_refuses_a_state_of_another_tick(path):
    with SqliteJournal(path) as journal:
        tick = next(ticks(1, 1, 1))
        with pytest.raises(JournalError, match="state after tick 0"):
            journal.append(tick.record, POLICY_TEXT, tick.before)
        assert journal.load() is None


def test_refuses_outcomes_of_an_unknown_tick(path):
    with SqliteJournal(path) as journal, pytest.raises(JournalError, match="no tick 7"):
        journal.finish(7, DONE)


def test_a_second_writer_is_refused_and_readers_are_not(path):
    with SqliteJournal(path) as journal:
        written = write(journal, ticks(1, 1, 3))
        with pytest.raises(JournalError) as error:
            SqliteJournal(path)
        assert_one_sentence(error, path, str(os.getpid()), "TRIMTAB_JOURNAL")
        link = path.with_name("link.db")
        link.symlink_to(path)
        with pytest.raises(JournalError, match="already writes this journal"):
            SqliteJournal(link)
        with open_reader(path) as reader:
            reading = reader.records()
            assert next(reading) == written[0].record
            written += write(journal, ticks(1, 1, 1, state=written[-1].after))
            assert next(reader.tail(1)) == written[-1].record
            assert list(reading) == [tick.record for tick in written[1:3]]
    SqliteJournal(path).close()


def text_file(path: Path) -> None:
    path.write_text("version: 1\nservices: {}\n" * 100)


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")


def newer_journal(path: Path) -> None:
    filled(path, 1)
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def journal_of_no_version(path: Path) -> None:
    filled(path, 1)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = -3")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (journal_of_no_version, "never was"),
        (text_file, "not a journal"),
        (foreign_database, "another application"),
        (newer_journal, "a newer Trimtab"),
        (Path.mkdir, "a folder"),
    ],
)
@pytest.mark.parametrize("opening", [SqliteJournal, open_reader])
def test_leaves_what_is_no_journal_of_ours_alone(path, make, words, opening):
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    for _ in range(2):  # a refused journal must not stay locked
        with pytest.raises(JournalError) as error:
            opening(path)
        assert_one_sentence(error, path, words, "TRIMTAB_JOURNAL")
    assert before == (path.read_bytes() if path.is_file() else b"")


@pytest.mark.parametrize("opening", [SqliteJournal, open_reader])
def test_says_that_a_folder_is_missing(tmp_path, opening):
    path = tmp_path / "nowhere" / "trimtab.db"
    with pytest.raises(JournalError) as error:
        opening(path)
    assert_one_sentence(error, path, "there is no")


def test_a_reader_says_that_nothing_was_written_yet(path):
    with pytest.raises(JournalError, match="there is no journal"):
        open_reader(path)
    path.touch()
    with pytest.raises(JournalError, match="the journal is empty"):
        open_reader(path)
    SqliteJournal(path).close()
    with open_reader(path) as reader:
        assert reader.load() is None
        assert list(reader.replayable()) == []


@pytest.fixture
def readonly_folder():
    """A folder in which this process may not write, with a journal in it; root becomes nobody meanwhile."""
    folder = Path(tempfile.mkdtemp())
    written = filled(folder / "trimtab.db", 2)
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder, written
    os.seteuid(user)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_reads_and_refuses_to_write_in_a_readonly_folder(readonly_folder):
    folder, written = readonly_folder
    for name in ("trimtab.db", "new.db"):
        with pytest.raises(JournalError) as error:
            SqliteJournal(folder / name)
        assert_one_sentence(error, folder / name, "no access", str(folder), "TRIMTAB_JOURNAL")
    with open_reader(folder / "trimtab.db") as reader:
        assert list(reader.records()) == [tick.record for tick in written]


def test_damage_is_said_and_not_guessed_at(path):
    filled(path, 40, pools=4)
    data = bytearray(path.read_bytes())
    scribble = random.Random(1)
    for start in range(12 * 4096, len(data), 4096):
        data[start : start + 2000] = scribble.randbytes(2000)
    path.write_bytes(data)
    with pytest.raises(JournalError) as error, open_reader(path) as reader:
        list(reader.records())
    assert_one_sentence(error, path, "move")


@pytest.mark.parametrize("layouts", ["garbage", "[1]", "{}", "7", ""])
def test_a_damaged_format_is_damage_and_no_bug(path, layouts):
    filled(path, 3)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE formats SET layouts = ?", (layouts,))
    with pytest.raises(JournalError) as error, open_reader(path) as reader:
        list(reader.records())
    assert_one_sentence(error, path, "damaged", "move it away")


def test_a_damaged_memory_of_the_forecaster_is_damage_and_not_forgotten(path):
    filled(path, 3)
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute("UPDATE memories SET rows = x'0102'").rowcount > 0
    with pytest.raises(JournalError) as error, open_reader(path) as reader:
        reader.load()
    assert_one_sentence(error, path, "damaged", "move it away")


def test_a_closed_journal_says_so(path):
    journal = SqliteJournal(path)
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.load()


# ---------------------------------------------------------------------------------------------------------- replay


def replay(reader, pools: int, first_tick: int | None = None) -> list[int]:
    """Repeat every replayable tick; the decisions must come out byte for byte. Returns the ticks."""
    repeated, state = [], None
    for one in reader.replayable(first_tick):
        assert one.policy_text == POLICY_TEXT
        if state is not None and one.state_before is not None and one.state_before.tick == state.tick:
            assert one.state_before == state
        state, decision = step(policy(pools), one.state_before or state, one.record.observation)
        assert canonical_bytes(decision) == canonical_bytes(one.record.decision)
        repeated.append(decision.tick)
    return repeated


def test_replay_repeats_every_decision_over_restarts(path):
    state = None
    for _ in range(3):
        with SqliteJournal(path) as journal:
            state = write(journal, ticks(2, 2, 5, state=state))[-1].after
    with open_reader(path) as reader:
        assert [one.state_before is not None for one in reader.replayable()] == [True, *[False] * 4] * 3
        assert replay(reader, 2) == list(range(1, 16))


def test_replay_starts_at_the_snapshot_before_the_tick_that_is_asked_for(path):
    count = 2 * SNAPSHOT_TICKS + 10
    filled(path, count, replicas=1)
    with open_reader(path) as reader:
        assert replay(reader, 1, first_tick=SNAPSHOT_TICKS + 7) == list(range(SNAPSHOT_TICKS + 1, count + 1))


def test_replay_leaves_out_ticks_whose_state_is_unknown(path):
    written = list(ticks(1, 1, 9))
    with SqliteJournal(path) as journal:
        # Tick 4 is lost, so nobody knows the state before tick 5.
        write(journal, [*written[:3], *written[4:]])
        assert replay(journal, 1) == [1, 2, 3]
    with SqliteJournal(path) as journal:
        write(journal, ticks(1, 1, 2, state=journal.load()))
        assert replay(journal, 1) == [1, 2, 3, 10, 11]


# ------------------------------------------------------------------------------------------------------------ size


def test_a_day_of_a_hundred_pools_takes_what_the_docstring_says(path):
    written = list(ticks(100, 4, 60))
    with SqliteJournal(path) as journal:
        write(journal, written[:10])
    before = path.stat().st_size
    with SqliteJournal(path) as journal:
        write(journal, written[10:])
    grown, rows = path.stat().st_size - before, len(written[-1].after.demand.rows)
    assert rows == pytest.approx(10e6, rel=0.1)  # 600 series
    # The memory that the one snapshot needs stands beside the newest; there are 24 a day instead of one in 50 ticks.
    assert (grown - rows) / 50 * 86_400 / 15 < 310e6
    assert (grown - rows) / 50 * 86_400 / 15 + 24 * rows < 560e6


def test_prune_holds_the_file_below_its_limit_and_keeps_it_replayable(path):
    limit = 4 * 1024**2  # a tenth of it holds the rows of one pool's demand memory, twice
    with SqliteJournal(path, max_bytes=limit) as journal:
        for number, tick in enumerate(ticks(1, 2, 16 * SNAPSHOT_TICKS)):
            journal.append(tick.record, POLICY_TEXT, tick.after)
            if number % 40 == 0:
                journal.prune()
            assert path.stat().st_size <= limit
        last = tick.record.decision.tick
        assert journal.load() == tick.after
        kept = [record.decision.tick for record in journal.records()]
        assert kept == list(range(kept[0], last + 1))
        assert kept[0] > 1
        assert replay(journal, 1) == kept


def test_a_lower_limit_gives_space_back(path):
    filled(path, 2 * SNAPSHOT_TICKS, pools=2)
    before = path.stat().st_size
    with SqliteJournal(path, max_bytes=before // 2) as journal:
        journal.prune()
        assert path.stat().st_size <= before // 2
        assert not path.with_name("trimtab.db-wal").stat().st_size


def test_the_newest_tick_and_the_checkpoint_stay_below_any_limit(path):
    with SqliteJournal(path, max_bytes=1) as journal:
        written = write(journal, ticks(1, 1, 5))
        journal.prune()
        journal.prune()
        assert list(journal.records()) == [written[-1].record]
        assert journal.load() == written[-1].after
        # Its only snapshot is gone with its tick: the next tick has one again.
        write(journal, ticks(1, 1, 2, state=written[-1].after))
        assert replay(journal, 1) == [6, 7]


def test_a_slow_reader_skips_what_is_pruned_meanwhile(path):
    with SqliteJournal(path, max_bytes=1) as journal:
        write(journal, ticks(1, 1, 30))
        with open_reader(path) as reader:
            reading = reader.records()
            assert next(reading).decision.tick == 1
            journal.prune()
            assert [record.decision.tick for record in reading][-1] == 30


# -------------------------------------------------------------------------------------------------------- accidents

WRITER = """
import sys
from pathlib import Path
from controller.adapters.journal import SqliteJournal
from controller.observations import Outcome, Status
from journal_fleets import POLICY_TEXT, ticks

with SqliteJournal(Path(sys.argv[1]), max_bytes=400 * 1024) as journal:
    for tick in ticks(3, 4, 10**6, state=journal.load()):
        number = tick.record.decision.tick
        journal.append(tick.record, POLICY_TEXT, tick.after)
        print(number, flush=True)
        journal.finish(number, (Outcome("m", Status.DRY_RUN, 0.0, "", "", ""),))
        if number % 50 == 0:
            journal.prune()
"""

FULL = """
import resource, sys
from pathlib import Path
from controller.adapters.journal import SqliteJournal
from controller.errors import JournalError
from journal_fleets import POLICY_TEXT, ticks

most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with SqliteJournal(Path(sys.argv[1])) as journal:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 1024**2, most))
    written = ticks(3, 4, 10**6)
    for tick in written:
        try:
            journal.append(tick.record, POLICY_TEXT, tick.after)
        except JournalError as error:
            print(error)
            break
    assert journal.load() == tick.before
    assert [record.decision.tick for record in journal.records()][-1] == tick.before.tick
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    journal.append(tick.record, POLICY_TEXT, tick.after)
    print(tick.after.tick)
"""


def child(program: str, path: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def assert_whole(path: Path, at_least: int) -> int:
    """No damage, no gap, no tick twice, state and ticks agree; returns the newest tick."""
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with open_reader(path) as reader:
        kept = [record.decision.tick for record in reader.records()]
        assert kept == list(range(kept[0], kept[-1] + 1))
        assert kept[-1] >= at_least
        state = reader.load()
        assert state is not None
        assert state.tick == kept[-1]
        # Whatever was cut off, the state is the one that the last decision led to.
        *_, last = itertools.chain([None], reader.replayable(first_tick=kept[-1]))
        assert last is not None
        assert last.record.decision.tick == kept[-1]
    return kept[-1]


def test_killed_at_any_moment_it_loses_nothing_that_was_acknowledged(path):
    chance = random.Random(20)
    for _ in range(12):
        with child(WRITER, path) as process:
            for _ in range(chance.randint(1, 60)):
                assert process.stdout.readline()
            try:
                process.wait(timeout=chance.uniform(0.0, 0.02))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            said, complaint = process.communicate()
        assert process.returncode == -signal.SIGKILL, complaint.decode()
        whole_lines = said[: said.rfind(b"\n") + 1].split()
        assert_whole(path, int(whole_lines[-1]) if whole_lines else 1)
    with SqliteJournal(path) as journal:
        state = journal.load()
        write(journal, ticks(3, 4, 1, state=state))
        assert replay(journal, 3)[-1] == state.tick + 1


def test_a_full_disk_is_said_and_hurts_nothing(path):
    with child(FULL, path) as process:
        said, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint.decode()
    sentence, last = said.decode().splitlines()
    assert sentence.startswith(f"{path}: the disk refuses")
    assert "free space" in sentence
    assert assert_whole(path, 1) == int(last)


def test_an_unwritten_state_is_the_first_one(path):
    with SqliteJournal(path) as journal:
        write(journal, ticks(1, 1, 1))
        assert next(journal.replayable()).state_before == ControllerState()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "j.db")
    journal.close()
    journal.close()
    SqliteJournal(tmp_path / "j.db").close()


def test_a_file_that_was_removed_under_the_daemon_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with SqliteJournal(path) as journal:
        first, second = ticks(1, 1, 2)
        journal.append(first.record, POLICY_TEXT, first.after)
        path.unlink()
        with pytest.raises(JournalError, match="removed or replaced"):
            journal.append(second.record, POLICY_TEXT, second.after)
