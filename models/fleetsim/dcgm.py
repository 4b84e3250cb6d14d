"""What a DCGM exporter says of the plant's GPUs.

Every GPU of a place that is not lost has rows, also one that nobody uses. Values are sampled every 30 s and repeated
until then; the pod is looked up anew at each scrape (the exporter asks the kubelet while it answers), and a GPU that no
pod holds has no pod labels. So up to 30 s after a replica was replaced its successor's pod stands beside what its
predecessor did: that is how the real exporter behaves, and nothing in its page tells. What a sample covers is the time
since the last one, whoever ran meanwhile:

    graphics engine active = busy s / dt                  tensor = FLOP of the tokens / (attained FLOP/s * dt)
    DRAM = (steps * weight bytes) / (attained bytes/s * dt)   memory: flat while weights are loaded

Example: 70e9 parameters in one byte, 50 steps/s of 8 tokens each, 3.6e15 FLOP/s and 1e13 bytes/s: tensor 50 * 8 *
1.4e11 / 3.6e15 = 0.016, DRAM 50 * 7e10 / 1e13 = 0.35: bandwidth-bound decoding.

Source: NVIDIA dcgm-exporter, internal/pkg/server (gathers and maps pods per request), 30 s by default (-c).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.fleetsim import world as w
from models.fleetsim.exposition import Labels, Series
from models.fleetsim.plant import WITHOUT_GPUS, Plant

COLLECT_S = 30.0
MIB = 1024.0 * 1024.0
RATIOS = (
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
)
LOADED = (w.COMPILING, w.READY, w.DRAINING)
"""States in which a replica has its weights and KV memory on the GPU."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The GPUs of one place: ratios in the order of `RATIOS`, memory in use, and the totals the ratios are from."""

    ratios: tuple[float, float, float]
    used_mib: int
    busy_s: float
    tokens: float
    steps: float


class GpuExporter:
    """The GPUs of a whole plant; `pod` names the pod of a place."""

    def __init__(self, plant: Plant, pod: Callable[[int], str]) -> None:
        self._plant = plant
        self._pod = pod
        self._sampled: dict[int, _Sampled] = {}
        self._sampled_s = -math.inf
        self._next_s = 0.0

    def rows(self) -> tuple[Series, ...]:
        """Every GPU's rows at this moment."""
        places = [place for place in range(len(self._plant.world.replicas)) if place not in self._plant.lost]
        if self._plant.now_s >= self._next_s:
            self._sample(places)
            self._next_s = (math.floor(self._plant.now_s / COLLECT_S) + 1) * COLLECT_S
        return tuple(row for place in places for row in self._of_place(place))

    def _sample(self, places: list[int]) -> None:
        passed_s, self._sampled_s = self._plant.now_s - self._sampled_s, self._plant.now_s
        before, self._sampled = self._sampled, {}
        for place in places:
            row, past = self._plant.world.replicas[place], self._plant.past[place]
            pool = self._plant.world.pools[int(row["pool"])]
            # GPUs outlive the processes that count.
            busy_s = float(row["busy_s"])
            tokens, steps = (float(row[name] + past[name]) for name in ("step_tokens", "steps"))
            last, ratios = before.get(place), (0.0, 0.0, 0.0)
            if last is not None:
                flop = (tokens - last.tokens) * float(pool["flop_per_token"])
                moved = (steps - last.steps) * float(pool["weight_bytes"])
                ratios = (
                    min((busy_s - last.busy_s) / passed_s, 1.0),
                    min(flop / float(pool["flop_per_s"]) / passed_s, 1.0),
                    min(moved / float(pool["bytes_per_s"]) / passed_s, 1.0),
                )
            loaded = int(row["state"]) in LOADED
            used_mib = round(self._usable_mib(place) * (1.0 if loaded else 0.02))
            self._sampled[place] = _Sampled(ratios, used_mib, busy_s, tokens, steps)

    def _usable_mib(self, place: int) -> float:
        hardware = self._plant.pools[int(self._plant.world.replicas[place]["pool"])].hardware
        return hardware.memory_bytes / hardware.gpus / MIB

    def _of_place(self, place: int) -> Iterator[Series]:
        sampled = self._sampled.get(place)
        if sampled is None:  # its node has come back since
            return
        row = self._plant.world.replicas[place]
        held = int(row["state"]) not in WITHOUT_GPUS
        pod: Labels = (("exported_namespace", "serving"), ("exported_pod", self._pod(place))) if held else ()
        card_mib = round(self._usable_mib(place) / 0.9)
        for gpu in range(self._plant.pools[int(row["pool"])].hardware.gpus):
            labels: Labels = (
                ("Hostname", f"node-{place}"),
                ("UUID", f"GPU-{place:04d}-{gpu}"),
                ("device", f"nvidia{gpu}"),
                *pod,
                ("gpu", str(gpu)),
                ("modelName", "simulated"),
            )
            for name, value in zip(RATIOS, sampled.ratios, strict=True):
                yield Series(name, labels, value)
            yield Series("DCGM_FI_DEV_FB_USED", labels, float(sampled.used_mib))
            yield Series("DCGM_FI_DEV_FB_FREE", labels, float(card_mib - sampled.used_mib))
