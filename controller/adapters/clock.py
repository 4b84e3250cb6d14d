"""Wall time, interruptible: a signal or a test may ask the sleeper to stop."""

from __future__ import annotations

import threading
import time


class WallClock:
    """Unix time of this machine. `stop` ends the present and every later sleep at once."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def now_s(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def sleep_until(self, at_s: float) -> bool:
        """Wait until `at_s`; True when that time came, False when asked to stop."""
        return not self._stopped.wait(max(at_s - time.time(), 0.0))

    def stop(self) -> None:
        """Ask whoever sleeps, now or later, to stop. Safe in a signal handler and from any thread."""
        self._stopped.set()
