"""The plant's H100 engine beside NVIDIA's `aiconfigurator`, which interpolates kernel times measured on real cards.

Llama 3.1 70B in fp8 on four H100 SXM under vLLM is what `Engine()` on `H100_X4` stands for; KV is kept in 16 bits in
both. Two kinds of points:

    batch     one batch: TTFT of a single prompt alone, TPOT of a batch that only decodes (contexts of isl to isl + osl)
    steady    `calls` always under way, each prompt new: prefills and decodes share steps

The batch points compare kernel times. The steady points also compare how steps are composed, and what engines add to
kernels: aiconfigurator's steady TTFT is the step that prefills, plus 0.8 ms of dispatch by the CPU for each layer
(64 ms for 80 of them), times 1 + log2(calls)/8 for waiting, both of which it calibrated on measured vLLM runs. In the
plant a steady point is even arrivals at the rate at which the wanted number of calls is under way: rate = calls / time
of a call, solved by iteration.

Source: aiconfigurator (NVIDIA, Apache-2.0), database mode SILICON, system h100_sxm, backend vllm.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from dataclasses import dataclass, replace

import numpy as np

from models.fleetsim.build import Size
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import H100_X4, Clients, Engine, PoolOf, Profile, ServiceOf

MODEL, SYSTEM, BACKEND, GPUS = "nvidia/Llama-3.1-70B-Instruct-FP8", "h100_sxm", "vllm", 4
TOKEN_BUDGET = 8192
PATIENT_S = 1e6
SMALL = Size(tasks=4000, calls=4000, chains=20_000, events=40_000)


@dataclass(frozen=True, slots=True)
class Point:
    """A load: prompt and output tokens, calls in the batch or under way."""

    steady: bool
    prompt_tokens: int
    output_tokens: int
    calls: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds to the first token and between tokens; None where a point does not ask for it."""

    ttft_s: float | None
    itl_s: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A point, what aiconfigurator says of it, and what the plant does."""

    point: Point
    silicon: Latency
    plant: Latency


POINTS = (
    Point(False, 512, 128, 1),
    Point(False, 1024, 256, 1),
    Point(False, 4096, 256, 1),
    Point(False, 8000, 200, 1),
    Point(False, 1024, 256, 8),
    Point(False, 1024, 256, 32),
    Point(False, 1024, 256, 128),
    Point(False, 8000, 200, 16),
    Point(False, 8000, 200, 64),
    Point(True, 1024, 256, 8),
    Point(True, 1024, 256, 32),
    Point(True, 1024, 256, 64),
    Point(True, 4096, 256, 16),
    Point(True, 8000, 200, 16),
)
QUICK_POINTS = (POINTS[1], POINTS[5])


def installed() -> bool:
    """Whether aiconfigurator can be imported."""
    return importlib.util.find_spec("aiconfigurator") is not None


def version() -> str:
    """Its version, as installed."""
    return importlib.metadata.version("aiconfigurator")


def beside(point: Point) -> Beside:
    """One point of both. Raises what aiconfigurator raises where it has no data for it."""
    return Beside(point, of_silicon(point), steady(point) if point.steady else batch(point))


def of_silicon(point: Point) -> Latency:
    """What aiconfigurator predicts; its remarks on fallback tables are not shown."""
    cli_estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate  # an extra: it may be absent
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = cli_estimate(
                MODEL,
                SYSTEM,
                mode="agg" if point.steady else "static",
                backend_name=BACKEND,
                isl=point.prompt_tokens,
                osl=point.output_tokens,
                batch_size=point.calls,
                kvcache_quant_mode="bfloat16",
                tp_size=GPUS,
            )
    finally:
        logging.disable(logging.NOTSET)
    asks_ttft = point.steady or point.calls == 1
    return Latency(told.ttft / 1000 if asks_ttft else None, told.tpot / 1000)


def _plant(point: Point, arrivals_s: tuple[float, ...], output_tokens: int) -> Plant:
    room = 4 * (point.prompt_tokens + output_tokens)
    profile = Profile(
        "new", 1.0, 0, 1.0, 0.0, 1, point.prompt_tokens, 0.0, output_tokens, 0.0, 1.0, context_max=min(room, 100_000)
    )
    engine = replace(Engine(), token_budget=TOKEN_BUDGET, noise=0.0)
    clients = Clients(PATIENT_S, PATIENT_S, retries=0)
    pool = PoolOf("h100", H100_X4, 1, 1, engine)
    service = ServiceOf("s", (pool,), (0.0,), arrivals_s=arrivals_s, profiles=(profile,), clients=clients)
    return Plant((service,), seed=1, size=SMALL)


def batch(point: Point) -> Latency:
    """All calls at once; the gaps between tokens count from when the last has its first token, `output_tokens` long."""
    plant = _plant(point, (0.0,) * point.calls, 2 * point.output_tokens)
    home, now_s = plant.world.replicas[0], 0.0
    while plant.world.ttft_counts[0].sum() < point.calls:
        now_s += 0.01
        plant.run(now_s)
    plant.settle()
    ttft_s = float(home["ttft_sum"])
    gaps_s, tokens = float(home["itl_sum"]), float(plant.world.itl_counts[0].sum())
    while float(plant.world.itl_counts[0].sum()) - tokens < point.calls * point.output_tokens:
        now_s += 0.01
        plant.run(now_s)
        plant.settle()
    itl_s = (float(home["itl_sum"]) - gaps_s) / (float(plant.world.itl_counts[0].sum()) - tokens)
    return Latency(ttft_s if point.calls == 1 else None, itl_s)


def steady(point: Point) -> Latency:
    """The point at which `calls` are under way; Little's law closes the loop."""
    call_s = 0.02 * point.output_tokens
    latency = Latency(None, call_s)
    for _ in range(12):
        latency = _at_rate(point, point.calls / call_s, call_s)
        took_s = (latency.ttft_s or 0.0) + latency.itl_s * (point.output_tokens - 1)
        if abs(took_s / call_s - 1) < 0.005:
            break
        call_s = (call_s * took_s) ** 0.5  # damped: a call takes longer at a higher rate
    return latency


def _at_rate(point: Point, calls_per_s: float, call_s: float) -> Latency:
    """Means over four times as long as a call takes, after three times as long to settle."""
    until_s = 8 * call_s
    arrivals = tuple(np.arange(0.0, until_s, 1 / calls_per_s).tolist())
    plant = _plant(point, arrivals, point.output_tokens)
    home = plant.world.replicas[0]
    seen = []
    for moment_s in (4 * call_s, until_s):
        plant.run(moment_s)
        plant.settle()
        counted = plant.world.ttft_counts[0].sum(), plant.world.itl_counts[0].sum()
        seen.append((float(home["ttft_sum"]), float(counted[0]), float(home["itl_sum"]), float(counted[1])))
    ttft_s, calls, gaps_s, tokens = (after - before for before, after in zip(*seen, strict=True))
    return Latency(ttft_s / calls, gaps_s / tokens)
