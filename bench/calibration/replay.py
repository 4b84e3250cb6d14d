"""The plant in the place of a captured engine: the same calls at the same times, read at the same scrapes.

The engine is vLLM's CPU build with one thread and the capture's flags: 400 blocks of 32 tokens (one of them is never
used), 16 sequences, steps of 2,048 tokens, scheduling by priority in three classes,
no captured graphs. The model is a Llama of two layers,
hidden 64, 2 heads of 32, MLP 128, vocabulary 1,000: a token passes 2 * (4*64*64 + 3*64*128) + 64*1000 = 145,920
parameters. Four constants are fitted; one is not: KV memory is read at 10 GB/s, what a core of such a machine has. All
12,800 tokens of KV are 6.6 MB, 0.7 ms, which these loads can't tell from anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from bench.calibration.capture import COUNTERS, LoadRun, Numbers, Totals, totals
from models.fleetsim.build import Size
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import Clients, Engine, Hardware, PoolOf, Profile, ServiceOf

PARAMETERS = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 1000
BLOCKS, BLOCK_TOKENS = 399, 32
KV_BYTES = 2 * 2 * 64 * 2
WEIGHT_BYTES = 2.0 * (PARAMETERS + 64 * 1000)
BYTES_PER_S = 1e10
PATIENT_S = 1e6
COLUMNS = {
    "output": "generated_tokens",
    "finished": "stopped",
    "ttft_sum": "ttft_sum",
    "itl_sum": "itl_sum",
    "queue_sum": "queue_sum",
    "queries": "prefix_queries",
    "hits": "prefix_hits",
    "preemptions": "preemptions",
    "steps": "steps",
}


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted: seconds of a step, for a computed token, for a running sequence; of the API server for a call."""

    step_s: float
    token_s: float
    sequence_s: float
    call_s: float

    def as_array(self) -> Numbers:
        """In the order of the fields."""
        return np.array([getattr(self, one.name) for one in fields(self)])


def plant_of(run: LoadRun, constants: Constants, seed: int) -> Plant:
    """A plant of one such engine, with the load's calls ahead of it."""
    engine = Engine(
        parameters=PARAMETERS,
        weight_bytes=WEIGHT_BYTES,
        layers=2,
        hidden=64,
        kv_heads_size=64,
        block_tokens=BLOCK_TOKENS,
        max_seqs=16,
        token_budget=2048,
        by_priority=True,
        eager=True,
        overhead_s=constants.step_s,
        per_sequence_s=constants.sequence_s,
        frontend_s=constants.call_s,
    )
    memory = WEIGHT_BYTES + (BLOCKS + 0.5) * BLOCK_TOKENS * KV_BYTES
    hardware = Hardware(1, 2 * PARAMETERS / constants.token_s, BYTES_PER_S, memory, 0.0)
    prefixes = ("one", "other") if run.system_tokens else ("none",)
    profile = Profile(
        "", 1.0, run.system_tokens, 1.0, 0.0, 1, run.input_tokens, 0.0, run.output_tokens, 0.0, 1.0, context_max=12_000
    )
    profiles = tuple(replace(profile, name=name) for name in prefixes)
    service = ServiceOf(
        "captured",
        (PoolOf("engine", hardware, 1, 1, engine),),
        (0.0,),
        arrivals_s=tuple(arrivals_s(run, seed).tolist()),
        classes=(1.0, 1.0, 1.0),
        profiles=profiles,
        clients=Clients(PATIENT_S, PATIENT_S, retries=0),
        slo_ttft_s=PATIENT_S,
    )
    return Plant((service,), seed, Size(tasks=2000, calls=2000, chains=4000, events=20_000))


def arrivals_s(run: LoadRun, seed: int) -> Numbers:
    """Times of arrival: uniform within the interval in which a call was first seen; an opening salvo at its start."""
    random = np.random.default_rng(seed)
    placed = []
    for place, count in enumerate(run.arrivals):
        start_s, end_s = run.times_s[place], run.times_s[place + 1]
        at_once = run.opens_at_once and place == int(np.argmax(run.arrivals))
        placed.append(np.full(count, start_s) if at_once else random.uniform(start_s, end_s, count))
    return np.sort(np.concatenate(placed))


def play(run: LoadRun, constants: Constants, seed: int) -> Totals:
    """What the plant counts under a load, read at the capture's scrapes."""
    plant = plant_of(run, constants, seed)
    rows: dict[str, list[float]] = {name: [] for name in COUNTERS}
    ttft, itl = [], []
    for time_s in run.times_s:
        plant.run(float(time_s))
        plant.settle()
        for name, column in COLUMNS.items():
            rows[name].append(float(plant.world.replicas[0][column]))
        ttft.append(plant.world.ttft_counts[0].copy())
        itl.append(plant.world.itl_counts[0].copy())
    counters = {name: np.array(values) for name, values in rows.items()}
    return totals(run.times_s, counters, {"ttft": np.array(ttft), "itl": np.array(itl)})


def mean_replay(run: LoadRun, constants: Constants, seeds: int) -> Totals:
    """The mean over replays that differ in where within their seconds the calls came."""
    several = [play(run, constants, seed) for seed in range(seeds)]
    mean = {one.name: sum(getattr(each, one.name) for each in several) / seeds for one in fields(Totals)}
    return Totals(**mean)
