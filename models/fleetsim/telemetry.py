"""What a real fleet exposes, read from the plant: vLLM, DCGM, Envoy and span metrics, one table for every form.

A page is what one scrape target answers at one moment. A dead or starting replica gives none (its scrape fails), one
that is gone is no target. Gauges of an engine are those of its last step, end-to-end histograms know a call once it
has finished, counters begin at zero with each process. A new process is noticed when the pages are read while it
starts, so read them at least that often.

GPU values are collected every 30 s and repeated until then. Over the time dt since the last collection:

    graphics engine active = busy s / dt                  tensor = FLOP of the tokens / (attained FLOP/s * dt)
    DRAM = (steps * weight bytes) / (attained bytes/s * dt)   memory: flat while weights are loaded

Example: 70e9 parameters in one byte, 50 steps/s of 8 tokens each, 3.6e15 FLOP/s and 1e13 bytes/s: tensor 50 * 8 *
1.4e11 / 3.6e15 = 0.016, DRAM 50 * 7e10 / 1e13 = 0.35: bandwidth-bound decoding.

A service is one Envoy cluster (Envoy Gateway makes one of all the backends of a route's rule). Its timeouts are its
callers': the gateway is taken to enforce the deadline that a call carries. It makes no retries of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from models.fleetsim import engine
from models.fleetsim import world as w
from models.fleetsim.plant import STARTING, WITHOUT_GPUS, Plant

Labels = tuple[tuple[str, str], ...]

COLLECT_S = 30.0
OPEN_FILES = 34
"""Files that an idle engine's API server has open (measured on vLLM 0.32)."""
MIB = 1024.0 * 1024.0
STAGES = ("new", "continuing")
ATTEMPTS = ("first", "retry")
RATIOS = (
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
)


@dataclass(frozen=True, slots=True)
class Series:
    """One sample: exposition name, labels sorted by name, value."""

    name: str
    labels: Labels
    value: float


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


@dataclass(frozen=True, slots=True)
class _Collected:
    """GPU ratios of one replica in the order of `RATIOS`, and the totals they were made from."""

    ratios: tuple[float, float, float]
    busy_s: float
    tokens: float
    steps: float


class Exporters:
    """All exporters of one plant. `epoch_s`: Unix seconds of the plant's time 0."""

    def __init__(self, plant: Plant, epoch_s: float = 0.0) -> None:
        self._plant = plant
        self._epoch_s = epoch_s
        self._processes: dict[int, _Process] = {}
        self._collected: dict[int, _Collected] = {}
        self._collected_s = -math.inf
        self._first_pods = sum(pool.replicas for pool in plant.pools)

    def pages(self) -> tuple[Page, ...]:
        """Every target's page at this moment, replicas first."""
        replicas = [index for index in range(len(self._plant.world.replicas)) if self._state(index) != w.GONE]
        for index in list(self._processes):
            if self._state(index) == w.GONE:
                del self._processes[index]
        pages = [self._replica_page(index) for index in replicas]
        holding = [index for index in replicas if self._state(index) not in WITHOUT_GPUS]
        self._collect(holding)
        gpus = tuple(row for index in holding for row in self._gpus(index))
        own = (("namespace", "monitoring"), ("pod", "dcgm-exporter"))
        return (
            *pages,
            Page(Kind.GPUS, "dcgm", own, gpus),
            Page(Kind.GATEWAY, "gateway", (), tuple(self._gateway())),
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
        engine.settle(self._plant.world, index, False)
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
        yield Series("process_open_fds", (), float(OPEN_FILES + int(row["running"]) + int(row["waiting"])))
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

    # ------------------------------------------------------------------------------------------------------- GPUs

    def _collect(self, replicas: list[int]) -> None:
        now_s = self._plant.now_s
        due = math.floor(now_s / COLLECT_S) > self._collected_s // COLLECT_S if self._collected else True
        if not due:
            return
        passed_s, self._collected_s = now_s - self._collected_s, now_s
        before, self._collected = self._collected, {}
        for index in replicas:
            row = self._plant.world.replicas[index]
            pool = self._plant.world.pools[int(row["pool"])]
            busy_s, tokens, steps = float(row["busy_s"]), float(row["step_tokens"]), float(row["steps"])
            last, ratios = before.get(index), (0.0, 0.0, 0.0)
            if last is not None and 0.0 < passed_s < math.inf:
                flop = (tokens - last.tokens) * float(pool["flop_per_token"])
                moved = (steps - last.steps) * float(pool["weight_bytes"])
                shares = (busy_s - last.busy_s, flop / float(pool["flop_per_s"]), moved / float(pool["bytes_per_s"]))
                ratios = (
                    min(shares[0] / passed_s, 1.0),
                    min(shares[1] / passed_s, 1.0),
                    min(shares[2] / passed_s, 1.0),
                )
            self._collected[index] = _Collected(ratios, busy_s, tokens, steps)

    def _gpus(self, index: int) -> Iterator[Series]:
        collected = self._collected.get(index)
        if collected is None:
            return
        hardware = self._plant.pools[int(self._plant.world.replicas[index]["pool"])].hardware
        card_mib = hardware.memory_bytes / hardware.gpus / MIB
        loaded = self._state(index) not in {*STARTING, w.ASLEEP, w.WAKING} or self._state(index) == w.COMPILING
        used_mib = round(card_mib * (1.0 if loaded else 0.02))
        for gpu in range(hardware.gpus):
            labels: Labels = (
                ("Hostname", f"node-{index}"),
                ("UUID", f"GPU-{index:04d}-{gpu}"),
                ("device", f"nvidia{gpu}"),
                ("exported_namespace", "serving"),
                ("exported_pod", self.pod(index)),
                ("gpu", str(gpu)),
                ("modelName", "simulated"),
            )
            for name, value in zip(RATIOS, collected.ratios, strict=True):
                yield Series(name, labels, value)
            yield Series("DCGM_FI_DEV_FB_USED", labels, float(used_mib))
            yield Series("DCGM_FI_DEV_FB_FREE", labels, float(round(card_mib / 0.9) - used_mib))

    # ---------------------------------------------------------------------------------------------- gateway, tasks

    def _gateway(self) -> Iterator[Series]:
        for number, service in enumerate(self._plant.services):
            counts = self._plant.world.counts[number]
            total = {name: float(counts[name].sum()) for name in w.COUNTS.names or ()}
            cluster = ("envoy_cluster_name", f"httproute/serving/{service.name}/rule/0")
            name = "envoy_cluster_upstream_rq"
            yield Series(f"{name}_total", (cluster,), total["admitted"] + total["refused"])
            yield Series(f"{name}_retry", (cluster,), 0.0)
            yield Series(f"{name}_timeout", (cluster,), total["timed_out"])
            yield Series(f"{name}_pending_overflow", (cluster,), total["overflowed"])
            answered = {
                "2": total["finished"] + total["cut"],
                "4": 0.0,
                "5": total["refused"] + total["overflowed"] + total["unroutable"],
            }
            for kind, value in answered.items():
                yield Series(f"{name}_xx", (cluster, ("envoy_response_code_class", kind)), value)
            for klass in range(len(service.classes)):
                for stage, stage_name in enumerate(STAGES):
                    for attempt, attempt_name in enumerate(ATTEMPTS):
                        prefix = f"{service.name}_class{klass}_{stage_name}_{attempt_name}"
                        yield Series(
                            "envoy_http_local_rate_limit_rate_limited",
                            (("envoy_local_http_ratelimit_prefix", prefix),),
                            float(counts[klass, stage, attempt]["limited"]),
                        )

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


def text(page: Page) -> str:
    """The page in the Prometheus text format, one TYPE line per family; empty where its scrape fails."""
    lines: list[str] = []
    typed = ""
    for row in page.rows or ():
        family, kind = _family(row.name)
        if family != typed:
            lines.append(f"# TYPE {family} {kind}")
            typed = family
        labels = ",".join(f'{name}="{value}"' for name, value in row.labels)
        lines.append(f"{row.name}{{{labels}}} {row.value!r}" if labels else f"{row.name} {row.value!r}")
    return "".join(f"{line}\n" for line in lines)


def _family(name: str) -> tuple[str, str]:
    stem, _, part = name.rpartition("_")
    if part in {"bucket", "count", "sum"} and name.startswith("vllm:"):
        return stem, "histogram"
    counts = name.endswith("_total") or name.startswith(("envoy_cluster_upstream_rq", "envoy_http_local_rate_limit"))
    return name, "counter" if counts else "gauge"


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
