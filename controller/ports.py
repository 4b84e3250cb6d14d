"""What the daemon needs from the world, as protocols. Adapters implement them; controller.commands chooses which.

Every call gets a deadline in seconds and returns a value: a source that fails says so in the value it returns
(`SourceHole`, `Outcome`), because a failure of the outside is data. Only a bug raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from controller.decisions import Action, ControllerState, TickRecord
from controller.observations import Outcome, PoolFleet, Signal, Snapshot, SourceHole


class Clock(Protocol):
    """Time. Wall time in production, virtual time in recordings and simulations."""

    def now_s(self) -> float:
        """Unix time in seconds."""
        ...

    def sleep_until(self, at_s: float) -> bool:
        """Wait until `at_s`; True when that time came, False when somebody asked to stop."""
        ...


class Telemetry(Protocol):
    """A source of canonical signals."""

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:
        """Every signal's samples at `at_s`, rates over `window_s`, within `deadline_s` of wall time."""
        ...

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        """What the source is asked for each signal, for people who check a policy by hand."""
        ...

    def close(self) -> None:
        """Release connections and threads."""
        ...


class Fleet(Protocol):
    """The cluster's view of the pools, and the hands that resize them."""

    def read(self, deadline_s: float) -> tuple[tuple[PoolFleet, ...], tuple[SourceHole, ...]]:
        """Wanted, ready, starting, unschedulable and draining replicas of each pool."""
        ...


class Actuator(Protocol):
    """Carries out one kind of thing: replicas, weights or admission; or only says what it would do."""

    def describe(self, action: Action) -> tuple[str, str]:
        """The command a human would type to do the action, and the one to undo it."""
        ...

    def perform(self, action: Action, deadline_s: float) -> str:
        """Do it and return what was done. Raises ActuationError when refused, failed, or of unknown outcome."""
        ...


class Journal(Protocol):
    """The memory that survives: records before acting, outcomes after, and the state to start from."""

    def load(self) -> ControllerState | None:
        """The last checkpoint; None where there is none."""
        ...

    def append(self, record: TickRecord, policy_text: str, state: ControllerState) -> None:
        """Record a tick and its state durably, in one transaction. Raises JournalError."""
        ...

    def finish(self, tick: int, outcomes: tuple[Outcome, ...]) -> None:
        """Add the outcomes of a tick that was appended. Raises JournalError."""
        ...

    def tail(self, count: int) -> Iterator[TickRecord]:
        """The newest records, oldest first."""
        ...

    def close(self) -> None:
        """Write what is buffered and let go of the file."""
        ...
