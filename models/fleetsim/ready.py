"""Compiling the plant ahead of time: everything that Python calls of it, once, to Numba's cache on disk.

    python -m models.fleetsim        takes about 40 s on one core, and a second once it is done

The cache is good for one kind of processor and one state of the sources; `is_compiled` asks it for both.
"""

from __future__ import annotations

from typing import Any

from numba.core.registry import cpu_target

from models.fleetsim import run
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import CHAT, H100_X4, PoolOf, ServiceOf, Starts

COMPILING_S = 40
"""About how long it takes, on one core of a small virtual machine."""


def is_compiled() -> bool:
    """Whether the plant's largest function is in the cache for this processor."""
    largest: Any = run.run
    processor = cpu_target.target_context.codegen().magic_tuple()
    return any(key[1] == processor for key in largest._cache._cache_file._load_index())


def compile_all() -> None:
    """Run a small fleet through everything that Python calls of compiled code; raises nothing that a day would not."""
    starts = Starts(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    pool = PoolOf("p", H100_X4, 2, 3, starts=starts)
    plant = Plant((ServiceOf("s", (pool,), (2.0,), profiles=(CHAT,), arrivals_s=(0.5,)),), seed=1)
    plant.warm(0, 0)
    plant.run(5.0)
    plant.crash(0)
    plant.scale("p", 3)
    plant.run(20.0)
    plant.throttle(0, 2.0)
    plant.sleep(1)
    plant.run(30.0)
    plant.wake(1)
    plant.settle()
