"""The journal: every tick whole, and the state to start from, in one SQLite file that survives the process.

One transaction per tick writes observation, decision and intents, the policy's text where it is new, and the state
after the tick, which replaces the one before it (the checkpoint). So what was recorded and what is remembered never
disagree, and a tick that could not be recorded did not happen. Outcomes follow in a transaction of their own.

Replay needs the state before a tick. The first tick of each process and every `SNAPSHOT_TICKS`-th keep it (a
snapshot); from there, `step` itself makes the states in between.

What the demand forecaster has learnt is large (17 kB per series), and changes once a minute: its rows lie beside the
states, written where they changed, once for the checkpoint and once for each snapshot.

Size. A fleet of 100 pools with 4 replicas of one GPU each, all of whose values change at every tick, writes about
51 kB per tick: 290 MB per day at ticks of 15 s, and 10 MB of rows per hour if each pool is a service of its own (600
series). With 1,000 pools it is ten times that, with one 12 MB per day. `prune` holds the file below `max_bytes`: from
90 % on it drops whole stretches between snapshots, the oldest first, until 80 % are left, and gives the file's end back
to the file system. The write-ahead log beside it takes about 1 MiB more, or one tick.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from controller.adapters.codec import Codec, Undecodable
from controller.adapters.journal_file import WriterLock, connect_reader, connect_writer, speaking
from controller.decisions import ControllerState, Decision, TickRecord
from controller.errors import JournalError
from controller.observations import Observation, Outcome

T = TypeVar("T")

SNAPSHOT_TICKS = 240
"""A replay can start at every so many ticks (an hour at 15 s)."""

DEFAULT_MAX_BYTES = 2 * 1024**3
HIGH_WATER, LOW_WATER = 0.9, 0.8
"""Shares of `max_bytes`: what `prune` starts at leaves room for the ticks until its next run."""

FETCHED_TICKS = 8
VACUUM_PAGES, VACUUM_PAGES_AT_ONCE = 65_536, 4_096
"""Pages that one `prune` gives back at most (256 MiB take seconds, and the loop waits), and in one transaction."""


@dataclass(frozen=True, slots=True)
class _Outcomes:
    outcomes: tuple[Outcome, ...]


OBSERVATIONS, DECISIONS, STATES, OUTCOMES = (
    Codec(Observation),
    Codec(Decision),
    Codec(ControllerState),
    Codec(_Outcomes),
)


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One recorded tick with what is needed to repeat it.

    state_before is None where the state is the one that the step before this one led to.
    """

    state_before: ControllerState | None
    policy_text: str
    record: TickRecord


@dataclass(frozen=True, slots=True)
class _Layouts:
    """The layouts that the blobs of one format were written under."""

    observation: str
    decision: str
    state: str
    outcomes: str


_OURS = json.dumps([OBSERVATIONS.layout, DECISIONS.layout, STATES.layout, OUTCOMES.layout])


class JournalReader:
    """Reads a journal, also while a daemon writes it. Every method raises JournalError; any thread may call."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self._path = path
        self._lock = threading.RLock()
        self._layouts: dict[int, _Layouts] = {}

    def load(self) -> ControllerState | None:
        """The last checkpoint: the state after the newest tick; None where there is none."""
        row = next(iter(self._fetch("SELECT tick, format, state FROM checkpoint")), None)
        return None if row is None else self._state(*row)

    def tail(self, count: int) -> Iterator[TickRecord]:
        """The newest `count` records, oldest first."""
        if count <= 0:
            return iter(())
        row = self._fetch("SELECT tick FROM ticks ORDER BY tick DESC LIMIT 1 OFFSET ?", count - 1)
        return self.records(first_tick=row[0][0] if row else None)

    def records(self, first_tick: int | None = None, last_tick: int | None = None) -> Iterator[TickRecord]:
        """The records of the given ticks (both included; None is the journal's end), oldest first.

        No lock is held between two records, so a slow reader hinders nobody; what is pruned meanwhile is skipped.
        """
        bounds = self._fetch("SELECT min(tick), max(tick) FROM ticks")[0]
        if bounds[0] is None:
            return
        at = bounds[0] if first_tick is None else max(first_tick, bounds[0])
        last = bounds[1] if last_tick is None else min(last_tick, bounds[1])
        while rows := self._fetch(
            "SELECT tick, t.format, policy_sha256, observation, decision, o.format, outcomes "
            "FROM ticks t LEFT JOIN outcomes o USING (tick) WHERE tick BETWEEN ? AND ? ORDER BY tick LIMIT ?",
            at,
            last,
            FETCHED_TICKS,
        ):
            for tick, layout, sha256, observation, decision, outcomes_layout, outcomes in rows:
                layouts = self._layout(layout)
                done: tuple[Outcome, ...] = ()
                if outcomes is not None:
                    under = self._layout(outcomes_layout).outcomes
                    done = self._decoded(OUTCOMES, outcomes, under, tick).outcomes
                yield TickRecord(
                    self._decoded(OBSERVATIONS, observation, layouts.observation, tick),
                    self._decoded(DECISIONS, decision, layouts.decision, tick),
                    sha256,
                    done,
                )
            at = rows[-1][0] + 1

    def replayable(self, first_tick: int | None = None, last_tick: int | None = None) -> Iterator[ReplayStep]:
        """The records from the newest snapshot at or before `first_tick` on (else from the first snapshot after it).

        Each snapshot comes with its state, so that an error in a replay doesn't spread beyond it. A record that neither
        has a snapshot nor follows another one is left out: the state before it is not known.
        """
        asked = 0 if first_tick is None else first_tick
        start = self._fetch(
            "SELECT coalesce((SELECT max(tick) FROM snapshots WHERE tick <= ?), (SELECT min(tick) FROM snapshots))",
            asked,
        )[0][0]
        if start is None:
            return
        before: int | None = None
        policy = ("", "")
        for record in self.records(start, last_tick):
            tick = record.decision.tick
            row = self._fetch("SELECT tick - 1, format, state FROM snapshots WHERE tick = ?", tick)
            state = self._state(*row[0]) if row else None
            if state is None and before != tick - 1:
                continue
            if policy[0] != record.policy_sha256:
                policy = (record.policy_sha256, self.policy_text(record.policy_sha256))
            yield ReplayStep(state, policy[1], record)
            before = tick

    def policy_text(self, sha256: str) -> str:
        """The text of a policy that a record names."""
        row = self._fetch("SELECT text FROM policies WHERE sha256 = ?", sha256)
        if not row:
            raise JournalError(f"{self._path}: the policy {sha256[:12]} is no more in the journal; name a later tick")
        return str(row[0][0])

    def close(self) -> None:
        """Let go of the file. What was appended is on the disk already."""
        with self._lock, speaking(self._path):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._lock, speaking(self._path):
            return self._db.execute(query, values).fetchall()

    def _layout(self, number: int) -> _Layouts:
        if number not in self._layouts:
            row = self._fetch("SELECT layouts FROM formats WHERE id = ?", number)
            try:
                self._layouts[number] = _Layouts(*json.loads(row[0][0]))
            except (IndexError, TypeError, ValueError) as error:
                raise JournalError(
                    f"{self._path}: the format {number} of its records is missing or broken, so the file is damaged; "
                    "move it away, and Trimtab starts a new one"
                ) from error
        return self._layouts[number]

    def _state(self, after: int, layout: int, data: bytes) -> ControllerState:
        """The state after a tick, with the rows of its demand memory."""
        state = self._decoded(STATES, data, self._layout(layout).state, after)
        if state.demand is None:
            return state
        row = self._fetch("SELECT rows FROM memories WHERE tick <= ? ORDER BY tick DESC LIMIT 1", after)
        memory = replace(state.demand, rows=row[0][0] if row else b"")
        if row and not memory.whole():
            raise JournalError(
                f"{self._path}: the forecaster's memory after tick {after} is not whole, so the file is damaged; "
                "move it away, and Trimtab starts a new one"
            )
        return replace(state, demand=memory)

    def _decoded(self, codec: Codec[T], data: bytes, layout: str, tick: int) -> T:
        try:
            return codec.decode(data, layout)
        except Undecodable as error:
            raise JournalError(
                f"{self._path}: tick {tick} can't be read: {error}; use the Trimtab that wrote it, or move the file "
                "away, and Trimtab starts a new one"
            ) from error


class SqliteJournal(JournalReader):
    """The daemon's journal (`ports.Journal`). Opening takes the writer's lock; raises JournalError."""

    def __init__(self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """max_bytes: size that `prune` holds the file below."""
        self._writer = WriterLock(path)
        try:
            super().__init__(connect_writer(path), path)
            self._inode = os.stat(path).st_ino
        except BaseException:
            self._writer.release()
            raise
        self._max_bytes = max_bytes
        self._rows: bytes | None = None
        """The rows of the demand memory that were written last."""
        self._snapshot_tick: int | None = None
        """The last tick of this process that kept the state before it; None: the next one that can does."""

    def append(self, record: TickRecord, policy_text: str, state: ControllerState) -> None:
        """Record a tick and the state after it durably, in one transaction. Raises JournalError: then nothing was."""
        tick = record.decision.tick
        if state.tick != tick:
            raise JournalError(f"{self._path}: tick {tick} comes with the state after tick {state.tick}; this is a bug")
        observation, decision = OBSERVATIONS.encode(record.observation), DECISIONS.encode(record.decision)
        memory = state.demand
        after = STATES.encode(state if memory is None else replace(state, demand=replace(memory, rows=b"")))
        if not self._still_there():
            raise JournalError(
                f"{self._path}: the file was removed or replaced under the daemon; what is written now would be lost. "
                "Restart the daemon (it begins a new journal where there is none)"
            )
        with self._transaction():
            newest = self._db.execute("SELECT tick FROM checkpoint").fetchone()
            if newest is not None and tick <= newest[0]:
                raise JournalError(f"{self._path}: tick {tick} comes after tick {newest[0]}; this is a bug")
            number = self._format()
            snapshot = self._snapshot(tick, 0 if newest is None else newest[0], number)
            self._db.execute("INSERT OR IGNORE INTO policies VALUES (?, ?)", (record.policy_sha256, policy_text))
            self._db.execute(
                "INSERT INTO ticks VALUES (?, ?, ?, ?, ?)", (tick, number, record.policy_sha256, observation, decision)
            )
            self._put_outcomes(tick, record.outcomes, number)
            self._db.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?)", (tick, number, after))
            if memory is not None and memory.rows is not self._rows:
                self._remember(tick, memory.rows)
        self._rows = None if memory is None else memory.rows
        if snapshot:
            self._snapshot_tick = tick

    def _still_there(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def finish(self, tick: int, outcomes: tuple[Outcome, ...]) -> None:
        """Write the outcomes of a tick that was appended, in place of those it has. Raises JournalError."""
        with self._transaction():
            if self._db.execute("SELECT 1 FROM ticks WHERE tick = ?", (tick,)).fetchone() is None:
                raise JournalError(f"{self._path}: there is no tick {tick} that could have outcomes; this is a bug")
            self._db.execute("DELETE FROM outcomes WHERE tick = ?", (tick,))
            self._put_outcomes(tick, outcomes, self._format())

    def prune(self) -> None:
        """Hold the file below `max_bytes`: drop the oldest ticks and give space back. Raises JournalError.

        The newest tick and the checkpoint stay in any case. The oldest tick that stays has a snapshot, except in a
        journal too small for two of them: there replays start at the next tick.
        """
        with self._lock, speaking(self._path):
            page = self._pragma("page_size")
            low, high = (int(share * self._max_bytes) // page for share in (LOW_WATER, HIGH_WATER))
            used = self._pragma("page_count") - self._pragma("freelist_count")
            if used > high:
                while used > low and self._drop_oldest():
                    used = self._pragma("page_count") - self._pragma("freelist_count")
                with self._transaction():
                    self._db.execute("DELETE FROM policies WHERE sha256 NOT IN (SELECT policy_sha256 FROM ticks)")
            self._give_back(self._pragma("page_count") - high)

    def close(self) -> None:
        """Let go of the file and of the right to write it."""
        try:
            super().close()
        finally:
            self._writer.release()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, speaking(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled back already.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _format(self) -> int:
        """The number under which the layouts of this process's blobs are kept."""
        self._db.execute("INSERT OR IGNORE INTO formats (layouts) VALUES (?)", (_OURS,))
        return int(self._db.execute("SELECT id FROM formats WHERE layouts = ?", (_OURS,)).fetchone()[0])

    def _snapshot(self, tick: int, newest: int, number: int) -> bool:
        """Keep the state before `tick` where it is time and that state is known; True where it was kept."""
        if tick != newest + 1 or (self._snapshot_tick is not None and tick < self._snapshot_tick + SNAPSHOT_TICKS):
            return False
        if newest == 0:
            start = STATES.encode(ControllerState())
            self._db.execute("INSERT INTO snapshots VALUES (?, ?, ?)", (tick, number, start))
        else:
            self._db.execute("INSERT INTO snapshots SELECT ?, format, state FROM checkpoint", (tick,))
        return True

    def _remember(self, tick: int, rows: bytes) -> None:
        """Write rows of the demand memory; those before them stay only where a snapshot needs them."""
        newest = self._db.execute("SELECT max(tick) FROM memories").fetchone()[0]
        if newest is not None and not self._db.execute("SELECT 1 FROM snapshots WHERE tick > ?", (newest,)).fetchone():
            self._db.execute("DELETE FROM memories WHERE tick = ?", (newest,))
        self._db.execute("INSERT INTO memories VALUES (?, ?)", (tick, rows))

    def _put_outcomes(self, tick: int, outcomes: tuple[Outcome, ...], number: int) -> None:
        if outcomes:
            data = OUTCOMES.encode(_Outcomes(outcomes))
            self._db.execute("INSERT INTO outcomes VALUES (?, ?, ?)", (tick, number, data))

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _drop_oldest(self) -> bool:
        """Drop the ticks before the second snapshot, else the older quarter; False where one tick is left."""
        with self._transaction():
            oldest, newest = self._db.execute("SELECT min(tick), max(tick) FROM ticks").fetchone()
            if oldest is None or oldest == newest:
                return False
            row = self._db.execute("SELECT min(tick) FROM snapshots WHERE tick > ?", (oldest,)).fetchone()
            end = row[0]
            if end is None:
                end = min(oldest + max((newest - oldest) // 4, 1), newest)
                self._snapshot_tick = None
            for table in ("ticks", "outcomes", "snapshots"):
                self._db.execute(f"DELETE FROM {table} WHERE tick < ?", (end,))  # noqa: S608 - one of our tables
            self._db.execute(
                "DELETE FROM memories WHERE tick < (SELECT max(tick) FROM memories WHERE tick < ?)", (end,)
            )
        return True

    def _give_back(self, pages: int) -> None:
        """Shorten the file by `pages`, as far as they are free; then empty the write-ahead log."""
        left = min(pages, self._pragma("freelist_count"), VACUUM_PAGES)
        while left > 0:
            # It frees a page per step and has no columns, for which `execute` takes one step only.
            self._db.executescript(f"PRAGMA incremental_vacuum({min(left, VACUUM_PAGES_AT_ONCE)})")
            left -= VACUUM_PAGES_AT_ONCE
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def open_reader(path: Path) -> JournalReader:
    """A journal for reading, beside the daemon that writes it or without one. Raises JournalError."""
    return JournalReader(connect_reader(path), path)
