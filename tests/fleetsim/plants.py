"""Small plants for tests, and how to look at them."""

from dataclasses import replace

import numpy as np

from models.fleetsim import world as w
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import (
    CHAT,
    COPILOT,
    H100_X4,
    RESEARCH,
    Clients,
    Engine,
    PoolOf,
    Profile,
    ServiceOf,
    Starts,
)

QUICK = Starts(1.0, 2.0, 3.0, 4.0, 2.0, 1.0, 20.0)
"""Ten seconds from nothing, so that lives fit into a test."""
ONE_STEP = Profile("one", 1.0, 160, 1.0, 0.0, 1, 400.0, 0.0, 20.0, 0.0, 1.0, context_max=8_000)
"""Tasks of one call, all alike."""
ONLY_COPILOT = (replace(COPILOT, share=1.0),)
MIX = (CHAT, COPILOT, RESEARCH)


def pool(name: str = "p", replicas: int = 4, spare: int = 0, **fields: object) -> PoolOf:
    return replace(PoolOf(name, H100_X4, replicas, replicas + spare, starts=QUICK), **fields)  # type: ignore[arg-type]


def engine_with(kv_tokens: int | None = None, **fields: object) -> Engine:
    """An engine whose KV memory holds so many tokens (on H100_X4)."""
    engine = replace(Engine(), **fields)  # type: ignore[arg-type]
    if kv_tokens is None:
        return engine
    kv_bytes = 2 * engine.layers * engine.kv_heads_size * engine.kv_bytes_per_element
    return replace(engine, weight_bytes=H100_X4.memory_bytes - (kv_tokens + 0.5 * engine.block_tokens) * kv_bytes)


def plant(*pools: PoolOf, rate: float = 1.0, seed: int = 1, clients: Clients | None = None, **fields: object) -> Plant:
    service = ServiceOf("s", pools or (pool(),), (rate,), clients=clients or Clients())
    return Plant((replace(service, **fields),), seed)  # type: ignore[arg-type]


def ready(p: Plant, name: str = "p") -> list[int]:
    return [i for i in p.members(name) if p.world.replicas[i]["state"] == w.READY]


def of_all(p: Plant, counter: str) -> float:
    """A counter of all processes that ever were, up to now."""
    p.settle()
    return float(p.world.replicas[counter].sum() + p.past[counter].sum())


def count(p: Plant, name: str) -> float:
    return float(p.world.counts[name].sum())


def tally(p: Plant, name: str) -> float:
    return float(p.world.tallies[name].sum())


def state_bytes(p: Plant) -> bytes:
    """Everything of a world, byte for byte."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in p.world)


def run_checked(p: Plant, until_s: float, pieces: int = 8) -> None:
    """Run, and recount the world now and then."""
    for moment in np.linspace(p.now_s, until_s, pieces + 1)[1:]:
        p.run(float(moment))
        assert recount(p) == ()
