"""Fixtures of the end-to-end tests; whatever they start they end, by its pid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rig import Daemon


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[[Path, Path], Daemon]]:
    """Starts daemons: start_daemon(policy, journal)."""
    with ExitStack() as running:

        def start(policy: Path, journal: Path) -> Daemon:
            daemon = Daemon(tmp_path, policy, journal)
            running.callback(daemon.kill)
            return daemon

        yield start
