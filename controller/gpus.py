"""DCGM samples in, GPU readings out.

DCGM is read for health (XID, memory headroom) and for telling compute-bound from bandwidth-bound; never as the signal
that a pool is sized by: GPU utilisation is pinned near 100 % while decoding and HBM use is flat, because engines
allocate ahead. Its labels lie twice. Which pod a GPU serves stands in `exported_pod` where Prometheus renamed it
(`pod` is then the exporter's own), in `pod_name` with old exporters, else in `pod`. And freshness in Prometheus is
not freshness of the sample: the exporter collects every 30 s, so a value is up to `LAG_S` older than its scrape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite, isnan

from controller.observations import GpuObservation, Hole, Known, Labels, Nothing, Reading, Sample, Signal

LAG_S = 30.0
"""The exporter's own collection interval: added to the age of every value."""

BLANK = 9.2e18
"""Old exporters print DCGM's "no value" sentinels (9223372036854775792 and up) as if they were values."""


def pod_of(labels: Mapping[str, str]) -> str:
    """The pod whose process uses the GPU; empty where the exporter could not map it."""
    return labels.get("exported_pod") or labels.get("pod_name") or labels.get("pod") or ""


def observe_gpus(samples: Iterable[Sample], fresh_s: float) -> tuple[GpuObservation, ...]:
    """Every GPU or MIG instance that is mapped to a pod, ordered by replica and name.

    A value is STALE when its scrape is older than `fresh_s`: the collection lag is part of its age, not a fault.
    """
    gpus: dict[tuple[str, str], dict[Signal, float]] = defaultdict(dict)
    names: dict[Labels, tuple[str, str] | None] = {}
    for sample in samples:
        if sample.labels not in names:
            names[sample.labels] = _name(dict(sample.labels))
        place = names[sample.labels]
        if place is not None and not (isfinite(sample.value) and sample.value >= BLANK):
            gpus[place].setdefault(sample.signal, sample.value)
    return tuple(_observe(replica, name, values, fresh_s) for (replica, name), values in sorted(gpus.items()))


def _name(labels: Mapping[str, str]) -> tuple[str, str] | None:
    pod = pod_of(labels)
    if not pod:
        return None
    host = labels.get("Hostname") or labels.get("hostname") or ""
    device = labels.get("UUID") or f"{host}/{labels.get('gpu', '')}"
    return pod, f"{device}/{labels['GPU_I_ID']}" if labels.get("GPU_I_ID") else device


def _observe(replica: str, name: str, values: Mapping[Signal, float], fresh_s: float) -> GpuObservation:
    scrape_age_s = values.get(Signal.GPU_HEARTBEAT_AGE_S)

    def reading(signal: Signal) -> Reading:
        value = values.get(signal)
        if value is None:
            return Hole(Nothing.ABSENT, f"no series of {signal}")
        if isnan(value) or not isfinite(value) or value < 0:
            return Hole(Nothing.NAN, f"{signal} has the impossible value {value:g}")
        if scrape_age_s is None or isnan(scrape_age_s):
            return Hole(Nothing.STALE, "the age of its scrape is unknown")
        if scrape_age_s > fresh_s:
            return Hole(Nothing.STALE, f"its scrape is {scrape_age_s:.0f} s old, the limit is {fresh_s:g} s")
        return Known(float(f"{value:.6g}"), round(max(scrape_age_s, 0.0) + LAG_S, 1))

    return GpuObservation(
        name=name,
        replica=replica,
        active_ratio=reading(Signal.GPU_ACTIVE_RATIO),
        tensor_ratio=reading(Signal.GPU_TENSOR_RATIO),
        dram_ratio=reading(Signal.GPU_DRAM_RATIO),
        memory_used_bytes=reading(Signal.GPU_MEMORY_USED_BYTES),
        memory_free_bytes=reading(Signal.GPU_MEMORY_FREE_BYTES),
        last_xid=reading(Signal.GPU_LAST_XID),
    )
