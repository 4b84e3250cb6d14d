"""The journal's file: who may open it, how it is told from other files, and what its errors mean to a user.

One process writes: it holds an exclusive lock on `<file>.lock` as long as it lives (the kernel lets go of it with the
process, however that ends). Any number of processes read, also while one writes: the database is in write-ahead mode,
where readers see the last commit. A commit is on the disk before it returns (`synchronous = FULL`), so a power cut
loses nothing that was acted upon.

The file says what it is: `application_id` is "TRMT", `user_version` the version of the tables. Nothing is changed in a
file that says otherwise. Source: SQLite's documentation of pragmas, file format and write-ahead logging.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from controller.errors import JournalError

APPLICATION_ID = int.from_bytes(b"TRMT", "big")
SCHEMA_VERSION = 2
BUSY_S = 5.0
"""How long to wait for another process's short lock (a reader that recovers the log, a checkpoint)."""

PAGE_BYTES = 4096
WAL_PAGES = 256
"""The write-ahead log is written back to the database from so many pages (1 MiB) on."""

RENAME = "name another file with TRIMTAB_JOURNAL"
ELSEWHERE = f"or {RENAME}"

MEMORIES = "CREATE TABLE memories (tick INTEGER PRIMARY KEY, rows BLOB NOT NULL) STRICT;"
"""What version 2 has more than version 1."""

SCHEMA = f"""
{MEMORIES}
CREATE TABLE formats (id INTEGER PRIMARY KEY, layouts TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE policies (sha256 TEXT PRIMARY KEY, text TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE ticks (
  tick INTEGER PRIMARY KEY,
  format INTEGER NOT NULL REFERENCES formats,
  policy_sha256 TEXT NOT NULL REFERENCES policies,
  observation BLOB NOT NULL,
  decision BLOB NOT NULL
) STRICT;
CREATE TABLE outcomes (
  tick INTEGER PRIMARY KEY, format INTEGER NOT NULL REFERENCES formats, outcomes BLOB NOT NULL
) STRICT;
CREATE TABLE snapshots (
  tick INTEGER PRIMARY KEY, format INTEGER NOT NULL REFERENCES formats, state BLOB NOT NULL
) STRICT;
CREATE TABLE checkpoint (
  id INTEGER PRIMARY KEY CHECK (id = 1), tick INTEGER NOT NULL, format INTEGER NOT NULL REFERENCES formats,
  state BLOB NOT NULL
) STRICT;
"""


class WriterLock:
    """The right to write a journal; at most one process (or object) has it."""

    def __init__(self, path: Path) -> None:
        # Two names of one file (a symbolic link) must meet at one lock.
        place = f"{path.resolve()}.lock"
        with speaking(path):
            if os.path.isdir(path):
                raise IsADirectoryError
            self._file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._file, 20, 0).decode("ascii", "replace") or "unknown"
            self.release()
            raise JournalError(
                f"{path}: another Trimtab (process {holder}) already writes this journal; stop it, {ELSEWHERE}"
            ) from None
        except OSError as error:
            self.release()
            raise _judged(path, error) from error

    def release(self) -> None:
        """Let the next one write. The lock's file stays: to remove it would let two processes lock two files."""
        if self._file >= 0:
            # Twice must not close a file that was given the same number meanwhile.
            os.close(self._file)
            self._file = -1


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open the journal for writing, and make it where there is none. Raises JournalError; call with the lock held."""
    with speaking(path), ExitStack() as undo:
        connection = undo.enter_context(closing(_connect(path.resolve().as_uri())))
        version = _identify(path, connection)
        if version == 0:
            _create(connection)
        elif version < SCHEMA_VERSION:
            _apply(connection, MEMORIES)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise JournalError(f"{path}: this file system has no shared memory; choose a local disk, {ELSEWHERE}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_PAGES * PAGE_BYTES}")
        # Old records are no secret: to overwrite them with zeros would double the writing.
        connection.execute("PRAGMA secure_delete = OFF")
        undo.pop_all()
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open the journal for reading, beside its writer or without one. Raises JournalError."""
    with speaking(path), ExitStack() as undo:
        if not path.exists():
            raise JournalError(f"{path}: there is no journal; `trimtab run` writes one, {ELSEWHERE}")
        uri = f"{path.resolve().as_uri()}?mode=ro"
        # Write-ahead mode needs a file of shared memory. Where none can be made and none is, there is no writer either.
        writable = os.access(path.resolve().parent, os.W_OK, effective_ids=True)
        if not writable and not os.path.exists(f"{path.resolve()}-wal"):
            uri += "&immutable=1"
        connection = undo.enter_context(closing(_connect(uri)))
        if _identify(path, connection) == 0:
            raise JournalError(f"{path}: the journal is empty; `trimtab run` fills it, {ELSEWHERE}")
        undo.pop_all()
    return connection


@contextmanager
def speaking(path: Path) -> Iterator[None]:
    """Whatever the database or the disk refuses becomes a JournalError: one sentence with place and remedy."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _judged(path, error) from error


def _judged(path: Path, error: sqlite3.Error | OSError) -> JournalError:
    folder = path.absolute().parent
    if os.path.isdir(path):
        return JournalError(f"{path}: this is a folder; name a file in it with TRIMTAB_JOURNAL")
    if isinstance(error, FileNotFoundError):
        return JournalError(f"{path}: there is no folder {folder}; create it, {ELSEWHERE}")
    if isinstance(error, OSError) and error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
        why = error.strerror or str(error)
        return JournalError(f"{path}: no access ({why}); let this user read and write in {folder}, {ELSEWHERE}")
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_FULL if isinstance(error, OSError) else 0)
    match code & 0xFF:
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            text = (
                f"the disk refuses ({error}); free space there (and lower TRIMTAB_JOURNAL_MAX_BYTES), or mend the disk"
            )
        case sqlite3.SQLITE_CORRUPT:
            text = f"the file is damaged ({error}); move it away, and Trimtab starts a new one"
        case sqlite3.SQLITE_NOTADB:
            text = f"this is not a journal but some other file; move it away, {ELSEWHERE}"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            text = f"another program holds the file ({error}); end it and try again"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            text = f"no access ({error}); let this user read and write in {folder}, {ELSEWHERE}"
        case _:
            text = f"the database refuses ({error}); if this stays so, move the file away, and Trimtab starts a new one"
    return JournalError(f"{path}: {text}")


def _connect(uri: str) -> sqlite3.Connection:
    # One connection serves the loop's thread and the server's; their owner serialises them with a lock.
    return sqlite3.connect(uri, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True)


def _identify(path: Path, connection: sqlite3.Connection) -> int:
    """The version of the tables, 0 for a new file. Changes nothing; raises JournalError for a file that is not ours."""
    application_id, version, tables = (
        int(connection.execute(query).fetchone()[0])
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
    )
    if (application_id, version, tables) == (0, 0, 0):
        return 0
    if application_id != APPLICATION_ID:
        raise JournalError(f"{path}: this is another application's database; leave it alone and {RENAME}")
    if version < 1:
        raise JournalError(f"{path}: version {version} of a journal never was, so the file is damaged; {RENAME}")
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"{path}: a newer Trimtab wrote this journal (version {version}, this one knows {SCHEMA_VERSION}); "
            f"upgrade Trimtab, {ELSEWHERE}"
        )
    return version


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    _apply(connection, f"{SCHEMA} PRAGMA application_id = {APPLICATION_ID};")


def _apply(connection: sqlite3.Connection, statements: str) -> None:
    """Make tables, and say that the file is of this version now, at once or not at all."""
    with closing(connection.cursor()) as cursor:
        cursor.executescript(f"BEGIN IMMEDIATE; {statements} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
