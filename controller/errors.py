"""The errors a user can meet. Each reads as one sentence with the place and the remedy; anything else is a bug."""

from __future__ import annotations


class TrimtabError(Exception):
    """Something outside Trimtab is wrong, and the message says where and what to do about it."""


class PolicyError(TrimtabError):
    """The policy file is wrong; the message lists every problem with file, line and remedy."""


class TelemetryError(TrimtabError):
    """A telemetry source can't be used at all, as far as the user's request goes."""


class ActuationError(TrimtabError):
    """A change was refused or failed; `outcome_unknown` where it may have happened all the same."""

    def __init__(self, message: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown


class JournalError(TrimtabError):
    """The journal can't be read or written: wrong file, full disk, or damage."""
