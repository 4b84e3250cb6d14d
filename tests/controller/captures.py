"""Snapshots made of captured /metrics texts, as the scrape adapter would make them."""

from pathlib import Path

from controller.adapters.exposition import PageReader
from controller.adapters.series import Grouping, Row, SeriesStore
from controller.adapters.signals import catalogue
from controller.observations import Snapshot
from controller.policy import FleetPolicy

METRICS = Path(__file__).parents[1] / "data" / "vllm_cpu" / "metrics"
GROUPING = Grouping(("instance", "job", "pod", "namespace", "pool"))


def fleet(**changes: object) -> FleetPolicy:
    """One service of one pool of engines with the label pool="a"."""
    return FleetPolicy.model_validate(
        {
            "version": 1,
            "telemetry": {"interval_s": 5, "window_s": 10, "fresh_s": 15},
            "gpus": {"CPU": {"count": 8, "usd_per_gpu_hour": 1.0}},
            "services": {"tiny": {"slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "pools": ["a"]}},
            "pools": {
                "a": {
                    "select": {"pool": "a"},
                    "model": {"name": "tiny"},
                    "gpu": {"type": "CPU"},
                    "replicas": {"min": 1, "max": 6},
                }
            },
        }
        | changes
    )


def snapshot(*texts: tuple[float, str, str], at_s: float, window_s: float = 10, up: bool = True) -> Snapshot:
    """What is known at `at_s` after scrapes of (time, pod, text or name of a captured file)."""
    store = SeriesStore(catalogue(("vllm",), gateway=False), GROUPING)
    reader = PageReader(store.wants)
    for t_s, pod, text in texts:
        page = reader.read((METRICS / text).read_text() if text.endswith(".prom") else text, "text/plain")
        target = (("instance", f"{pod}:8000"), ("job", "vllm"), ("pod", pod), ("pool", "a"))
        rows = [*(page.rows or ()), Row("up", (), 1.0)] if up else page.rows or ()
        store.scraped(t_s, target, rows)
    return Snapshot(store.evaluate(at_s, window_s))
