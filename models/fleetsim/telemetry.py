"""What a real fleet exposes, read from the plant: vLLM, DCGM, Envoy and span metrics, one table for every form.

A page is what one scrape target answers at one moment. A dead or starting replica gives none (its scrape fails), one
that is gone is no target. Gauges of an engine are those of its last step, end-to-end histograms know a call once it
has finished, counters begin at zero with each process. A new process is noticed when the pages are read while it
starts, so read them at least that often.

GPUs are in `dcgm`, the gateway's clusters in `envoy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from models.fleetsim import dcgm, envoy, steps
from models.fleetsim import world as w
from models.fleetsim.exposition import Labels, Series
from models.fleetsim.plant import STARTING, Plant

OPEN_FILES = 34
"""Files that an idle engine's API server has open (measured on vLLM 0.32)."""


class Kind(StrEnum):
    """What answers at a target."""

    REPLICA = "replica"
    GPUS = "dcgm"
    GATEWAY = "gateway"
    TASKS = "tasks"


@dataclass(frozen=True, slots=True)
class Page:
    """What a target says; rows is None where its scrape fails. `name` is unique, `labels` are its target labels."""

    kind: Kind
    name: str
    labels: Labels
    rows: tuple[Series, ...] | None


@dataclass(slots=True)
class _Process:
    """One engine process: its pod, and when it was last seen starting (virtual s)."""

    pod: str
    began_s: float


class Exporters:
    """All exporters of one plant. `epoch_s`: Unix seconds of the plant's time 0."""

    def __init__(self, plant: Plant, epoch_s: float = 0.0) -> None:
        self._plant = plant
        self._epoch_s = epoch_s
        self._processes: dict[int, _Process] = {}
        self._gpus = dcgm.GpuExporter(plant, self.pod)
        self._first_pods = sum(pool.replicas for pool in plant.pools)

    def pages(self) -> tuple[Page, ...]:
        """Every target's page at this moment, replicas first."""
        replicas = [index for index in range(len(self._plant.world.replicas)) if self._state(index) != w.GONE]
        for index in list(self._processes):
            if self._state(index) == w.GONE:
                del self._processes[index]
        pages = [self._replica_page(index) for index in replicas]
        own = (("namespace", "monitoring"), ("pod", "dcgm-exporter"))
        return (
            *pages,
            Page(Kind.GPUS, "dcgm", own, self._gpus.rows()),
            Page(Kind.GATEWAY, "gateway", (), tuple(envoy.rows(self._plant))),
            Page(Kind.TASKS, "tasks", (), tuple(self._tasks())),
        )

    def pod(self, replica: int) -> str:
        """The pod's name; a replica that starts anew in the same place is another pod."""
        row = self._plant.world.replicas[replica]
        pool = self._plant.pools[int(row["pool"])].name
        place = self._plant.members(pool).index(replica)
        born = int(row["born"])
        # The plant numbers the pods that it begins with first.
        return f"{pool}-{place}" if born <= self._first_pods else f"{pool}-{place}-{born}"

    def _state(self, index: int) -> int:
        return int(self._plant.world.replicas[index]["state"])

    # ---------------------------------------------------------------------------------------------------- engines

    def _replica_page(self, index: int) -> Page:
        pool = self._plant.pools[int(self._plant.world.replicas[index]["pool"])].name
        pod = self.pod(index)
        labels = (("namespace", "serving"), ("pod", pod), ("pool", pool))
        steps.settle(self._plant.world, index, False)
        process = self._processes.get(index)
        if self._state(index) in STARTING or process is None or process.pod != pod:
            process = self._processes[index] = self._begin(index, pod)
        rows = None if self._state(index) in STARTING else tuple(self._engine(index, process))
        return Page(Kind.REPLICA, pod, labels, rows)

    def _begin(self, index: int, pod: str) -> _Process:
        world = self._plant.world
        fresh = self._plant.now_s == 0.0 or self._state(index) not in STARTING
        return _Process(pod, float(world.replicas[index]["started_s"]) if fresh else self._plant.now_s)

    def _counts(self, histogram: str, index: int) -> w.Shares:
        counts: w.Shares = getattr(self._plant.world, f"{histogram}_counts")[index]
        return counts

    def _engine(self, index: int, process: _Process) -> Iterator[Series]:
        world = self._plant.world
        row, pool = world.replicas[index], world.pools[int(world.replicas[index]["pool"])]
        own: Labels = (("engine", "0"), ("model_name", "llm"))

        def total(counter: str) -> float:
            return float(row[counter])

        def one(name: str, value: float, **more: str) -> Series:
            return Series(f"vllm:{name}", tuple(sorted((*own, *more.items()))), value)

        yield Series("process_start_time_seconds", (), self._epoch_s + process.began_s)
        yield Series(
            "process_open_fds", (), float(OPEN_FILES + int(row["running"]) + int(row["waiting"]) + int(row["arriving"]))
        )
        level = self._plant.sleep_level(index)
        yield one("num_requests_running", float(row["shown_running"]))
        yield one("num_requests_waiting", float(row["shown_waiting"]))
        yield one("kv_cache_usage_perc", float(row["shown_kv"]))
        yield one("engine_sleep_state", float(level == 0), sleep_state="awake")
        yield one("engine_sleep_state", float(level == 1), sleep_state="weights_offloaded")
        yield one("engine_sleep_state", float(level == 2), sleep_state="discard_all")
        blocks, size = str(int(pool["kv_blocks"])), str(int(pool["block_tokens"]))
        yield one("cache_config_info", 1.0, block_size=size, num_gpu_blocks=blocks)
        yield one("prompt_tokens_total", total("prompt_tokens"))
        yield one("generation_tokens_total", total("generated_tokens"))
        yield one("prefix_cache_queries_total", total("prefix_queries"))
        yield one("prefix_cache_hits_total", total("prefix_hits"))
        yield one("num_preemptions_total", total("preemptions"))
        for reason in ("stop", "length", "abort", "error"):
            yield one("request_success_total", total("stopped") if reason == "stop" else 0.0, finished_reason=reason)
        rejected = (("model_name", "llm"), ("reason", "max_num_queued_reqs"))
        yield Series("vllm:admission_rejections_total", rejected, total("rejected"))
        yield one("iteration_tokens_total_count", total("steps"))
        yield one("iteration_tokens_total_sum", total("step_tokens"))
        for name, family, bounds in (
            ("ttft", "time_to_first_token_seconds", w.TTFT_BOUNDS),
            ("itl", "inter_token_latency_seconds", w.ITL_BOUNDS),
            ("e2e", "e2e_request_latency_seconds", w.REQUEST_BOUNDS),
            ("queue", "request_queue_time_seconds", w.REQUEST_BOUNDS),
            ("reuse", "kv_block_reuse_gap_seconds", w.RESIDENCY_BOUNDS),
        ):
            reached = np.cumsum(self._counts(name, index))
            for bound, count in zip((*bounds, math.inf), reached, strict=True):
                yield one(f"{family}_bucket", float(count), le="+Inf" if bound == math.inf else str(bound))
            yield one(f"{family}_count", float(reached[-1]))
            yield one(f"{family}_sum", total(f"{name}_sum"))

    def _tasks(self) -> Iterator[Series]:
        for number, service in enumerate(self._plant.services):
            for klass in range(len(service.classes)):
                tally = self._plant.world.tallies[number, klass]
                for field, code in (("succeeded", "STATUS_CODE_UNSET"), ("failed", "STATUS_CODE_ERROR")):
                    labels: Labels = (
                        ("service_name", service.name),
                        ("span_name", "task"),
                        ("status_code", code),
                        ("tenant_class", f"class{klass}"),
                    )
                    yield Series("traces_span_metrics_calls_total", labels, float(tally[field].sum()))


class FaultKind(StrEnum):
    """What goes wrong: no answer, undefined values, an old page again, or only some of the replicas."""

    GAP = "gap"
    NAN = "nan"
    STALE = "stale"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class TelemetryFault:
    """A fault from start_s to end_s (virtual seconds, the end excluded); replicas: which pods (empty: all)."""

    kind: FaultKind
    start_s: float
    end_s: float
    pods: tuple[str, ...] = ()


class FaultyExporters:
    """Exporters of which something is wrong at times."""

    def __init__(self, exporters: Exporters, plant: Plant, faults: tuple[TelemetryFault, ...]) -> None:
        self._exporters = exporters
        self._plant = plant
        self._faults = faults
        self._good: dict[str, Page] = {}

    def pages(self) -> tuple[Page, ...]:
        """The pages as they arrive: a target that PARTIAL hides is not there, one in a GAP fails its scrape."""
        now_s = self._plant.now_s
        active = [fault for fault in self._faults if fault.start_s <= now_s < fault.end_s]
        return tuple(page for each in self._exporters.pages() if (page := self._through(each, active)) is not None)

    def _through(self, page: Page, active: list[TelemetryFault]) -> Page | None:
        kinds = {fault.kind for fault in active if not fault.pods or page.name in fault.pods}
        if FaultKind.PARTIAL in kinds and page.kind is Kind.REPLICA:
            return None
        if FaultKind.GAP in kinds:
            return Page(page.kind, page.name, page.labels, None)
        if FaultKind.STALE in kinds:
            return self._good.get(page.name, page)
        self._good[page.name] = page
        if FaultKind.NAN in kinds and page.rows is not None:
            return Page(page.kind, page.name, page.labels, tuple(Series(r.name, r.labels, math.nan) for r in page.rows))
        return page
