"""Fleets whose telemetry wanders, and the real step's answers: ticks as a daemon would record them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from controller.decisions import ControllerState, TickRecord
from controller.observations import (
    GpuObservation,
    Hole,
    Known,
    Nothing,
    Observation,
    PoolFleet,
    PoolObservation,
    Reading,
    ReplicaObservation,
    ReplicaState,
    ServiceObservation,
)
from controller.policy import FleetPolicy
from controller.step import step

START_S = 1_790_000_000.0
INTERVAL_S = 15.0
POLICY_TEXT = "version: 1  # the text that the policy came from\n"
POLICY_SHA256 = "5e" * 32

UNNAMED = Hole(Nothing.ABSENT, "no cluster is read")


@dataclass(frozen=True, slots=True)
class Tick:
    """A record with the state before and after it."""

    before: ControllerState
    record: TickRecord
    after: ControllerState


def policy(pools: int) -> FleetPolicy:
    """One service per pool, each pool of H100s."""
    names = [f"pool-{n:04d}-h100" for n in range(pools)]
    return FleetPolicy.model_validate(
        {
            "version": 1,
            "gpus": {"H100-SXM": {"count": 8 * pools, "usd_per_gpu_hour": 2.99}},
            "services": {
                f"service-{n:04d}": {"slo": {"ttft_s": 2, "tpot_s": 0.06}, "pools": [name]}
                for n, name in enumerate(names)
            },
            "pools": {
                name: {
                    "select": {"job": name},
                    "model": {"name": "llama-3.1-8b", "parameters": 8e9, "kv_bytes_per_token": 131072},
                    "gpu": {"type": "H100-SXM"},
                    "replicas": {"min": 1, "max": 8},
                }
                for name in names
            },
        }
    )


class _Wanderer:
    """Numbers that follow their last value, as counters' rates and gauges do."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._last: dict[str, float] = {}

    def reading(self, name: str, usual: float, age_s: float) -> Reading:
        value = self._last.get(name, usual) * self._random.lognormvariate(0.0, 0.05)
        self._last[name] = value = 0.9 * value + 0.1 * usual
        return Known(float(f"{value:.6g}"), age_s)

    def whole(self, name: str, usual: float, age_s: float) -> Reading:
        reading = self.reading(name, usual, age_s)
        assert isinstance(reading, Known)
        return Known(float(round(reading.value)), age_s)

    def age_s(self) -> float:
        return float(f"{self._random.uniform(0, 15):.6g}")


USUAL = {
    "offered_calls_per_s": 20.0, "served_calls_per_s": 20.0, "finished_calls_per_s": 20.0, "failed_calls_per_s": 0.02,
    "rejected_calls_per_s": 0.0, "prompt_tokens_per_s": 60_000.0, "computed_prompt_tokens_per_s": 9_000.0,
    "generation_tokens_per_s": 5_000.0, "hit_ratio": 0.85, "preemptions_per_s": 0.01, "ttft_s": 0.6,
    "ttft_good_ratio": 0.98, "itl_s": 0.04, "itl_mean_s": 0.025, "kv_usage_ratio": 0.4,
}  # fmt: skip


def _pool(name: str, replicas: int, wander: _Wanderer) -> PoolObservation:
    engines, gpus = [], []
    for n in range(replicas):
        pod, age_s = f"serving/{name}-7d9f8b6c5-{hash_of(name, n)}", wander.age_s()
        counts = {
            field: wander.whole(f"{pod}.{field}", usual, age_s) for field, usual in (("running", 30), ("waiting", 1))
        }
        rates = {
            field: wander.reading(f"{pod}.{field}", usual, age_s)
            for field, usual in (
                ("kv_usage_ratio", 0.4), ("steps_per_s", 40), ("first_tokens_per_s", 5),
                ("generation_tokens_per_s", 1200), ("itl_mean_s", 0.025),
            )
        }  # fmt: skip
        engines.append(ReplicaObservation(name=pod, state=ReplicaState.SERVING, detail="", **counts, **rates))
        shares = {
            field: wander.reading(f"{pod}.{field}", usual, age_s)
            for field, usual in (("active_ratio", 0.9), ("tensor_ratio", 0.3), ("dram_ratio", 0.6))
        }
        flat = {"memory_used_bytes": 7.7e10, "memory_free_bytes": 5.1e9, "last_xid": 0.0}
        flat_readings = {field: Known(value, age_s) for field, value in flat.items()}
        gpus.append(
            GpuObservation(name=f"GPU-{hash_of(pod, 0)}-{hash_of(pod, 1)}", replica=pod, **shares, **flat_readings)
        )
    age_s = max(engine.running.age_s for engine in engines)
    return PoolObservation(
        name=name,
        replicas=tuple(engines),
        gpus=tuple(gpus),
        fleet=PoolFleet(name, UNNAMED, UNNAMED, UNNAMED, UNNAMED, UNNAMED),
        running=Known(sum(engine.running.value for engine in engines), age_s),
        waiting=Known(sum(engine.waiting.value for engine in engines), age_s),
        kv_capacity_tokens=Known(400_000.0, age_s),
        **{field: wander.reading(f"{name}.{field}", usual, age_s) for field, usual in USUAL.items()},
    )


def hash_of(name: str, number: int) -> str:
    """Five letters as a pod's name ends in, the same in every run."""
    return "".join(random.Random(f"{name}/{number}").choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def ticks(pools: int, replicas: int, count: int, seed: int = 0, state: ControllerState | None = None) -> Iterator[Tick]:
    """`count` consecutive ticks from a state (by default the first of all)."""
    rules, wander, state = policy(pools), _Wanderer(seed), state or ControllerState()
    silent = [field.name for field in fields(ServiceObservation) if field.type == "Reading"]
    services = tuple(ServiceObservation(name, **dict.fromkeys(silent, UNNAMED)) for name in rules.services)
    for _ in range(count):
        now_s = START_S + INTERVAL_S * (state.tick + 1) + round(random.Random(state.tick).random() / 100, 6)
        observed = tuple(_pool(name, replicas, wander) for name in rules.pools)
        observation = Observation(now_s, 60.0, observed, services, ())
        after, decision = step(rules, state, observation)
        yield Tick(state, TickRecord(observation, decision, POLICY_SHA256), after)
        state = after
