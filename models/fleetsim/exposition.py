"""Samples of an exposition, and pages of them in the Prometheus text format.

Example: Series("up", (("pod", "h100-0"),), 1.0) is the line `up{pod="h100-0"} 1.0`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]

GAUGES = ("envoy_cluster_upstream_rq_active",)
COUNTERS = ("envoy_cluster_upstream_rq", "envoy_http_local_rate_limit")
"""Beginnings of the names of counters that do not end in _total, and the gauges among them."""


@dataclass(frozen=True, slots=True)
class Series:
    """One sample: exposition name, labels sorted by name, value."""

    name: str
    labels: Labels
    value: float


def text(rows: Iterable[Series]) -> str:
    """The rows in the Prometheus text format, one TYPE line per family; empty where there are none."""
    lines: list[str] = []
    families: dict[str, list[str]] = {}
    for row in rows:
        family, kind = _family(row.name)
        if family not in families:
            families[family] = [f"# TYPE {family} {kind}"]
        labels = ",".join(f'{name}="{value}"' for name, value in row.labels)
        families[family].append(f"{row.name}{{{labels}}} {row.value!r}" if labels else f"{row.name} {row.value!r}")
    for family_lines in families.values():
        lines += family_lines
    return "".join(f"{line}\n" for line in lines)


def _family(name: str) -> tuple[str, str]:
    stem, _, part = name.rpartition("_")
    if part in {"bucket", "count", "sum"} and name.startswith("vllm:"):
        return stem, "histogram"
    counts = name.endswith("_total") or (name.startswith(COUNTERS) and name not in GAUGES)
    return name, "counter" if counts else "gauge"
