"""A small policy for tests, and ways to change it."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "rules" / "policies"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))

TEXT = """\
version: 1
mode: recommend
telemetry:
  prometheus: {url: "http://prometheus:9090"}
gpus:
  H100-SXM: {count: 16, usd_per_gpu_hour: 3.2}
  L40S: {count: 8, usd_per_gpu_hour: 1.05}
services:
  assistant:
    slo: {ttft_s: 2.0, tpot_s: 0.05}
    target: agents
    pools: [assistant-h100, assistant-l40s]
pools:
  assistant-h100:
    select: {app: assistant-h100}
    model: {name: llama, parameters: 70e9, precision: fp8}
    gpu: {type: H100-SXM, per_replica: 4}
    replicas: {min: 2, max: 12}
  assistant-l40s:
    select: {app: assistant-l40s}
    model: {name: llama, parameters: 70e9, precision: int4}
    gpu: {type: L40S, per_replica: 4}
    replicas: {min: 1, max: 2}
"""


def changed(*pairs: tuple[str, str]) -> str:
    text = TEXT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text
