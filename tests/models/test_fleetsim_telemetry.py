"""What the plant exposes, held to what a real vLLM exposes and to what the plant itself counts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models import fleetsim
from models.fleetsim.exposition import text
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import COPILOT, H100_X4, Engine, PoolOf, ServiceOf
from models.fleetsim.telemetry import Exporters, FaultKind, FaultyExporters, Kind, Page, TelemetryFault

REAL = Path(__file__).parents[1] / "data" / "vllm_cpu" / "metrics" / "03_after.prom"
TESTS = sorted(Path(__file__).parents[1].glob("**/test_*.py"))
OURS = {"engine", "model_name", "le", "finished_reason", "sleep_state", "reason", "block_size", "num_gpu_blocks"}


def plant(rate: float = 0.5, replicas: int = 2) -> Plant:
    return Plant((ServiceOf("assistant", (PoolOf("h100", H100_X4, replicas, 4),), (rate,)),), seed=7)


def named(pages: tuple[Page, ...], name: str) -> Page:
    return next(page for page in pages if page.name == name)


def value(page: Page, name: str, **labels: str) -> float:
    found = [row.value for row in page.rows or () if row.name == name and labels.items() <= dict(row.labels).items()]
    assert len(found) == 1, (name, found)
    return found[0]


def test_engine_series_have_the_names_types_labels_and_buckets_of_a_real_vllm() -> None:
    real = REAL.read_text()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", real, re.M))
    heads = {re.match(r"[^{ ]+", line)[0] for line in real.splitlines() if line and line[0] != "#"}
    fleet = plant()
    fleet.run(30)
    page = named(Exporters(fleet).pages(), "h100-0")
    for row in page.rows or ():
        assert row.name in heads
        assert {name for name, _ in row.labels} <= OURS
    for family, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text(page.rows or ()), re.M):
        assert kinds[family] == kind, family
    for family in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        bounds = {dict(row.labels)["le"] for row in page.rows or () if row.name == f"vllm:{family}_bucket"}
        assert bounds == set(re.findall(rf'^vllm:{family}_bucket{{.*le="([^"]+)"', real, re.M))


def test_counters_are_those_of_the_plant_and_buckets_are_cumulative() -> None:
    fleet = plant()
    exporters = Exporters(fleet)
    exporters.pages()
    fleet.run(200)
    pages = exporters.pages()
    first = sum(value(named(pages, f"h100-{i}"), "vllm:time_to_first_token_seconds_count") for i in range(2))
    assert first == fleet.world.ttft_counts.sum() > 0
    generated = sum(value(named(pages, f"h100-{i}"), "vllm:generation_tokens_total") for i in range(2))
    assert generated == fleet.world.replicas["generated_tokens"].sum()
    reached = [
        r.value for r in named(pages, "h100-0").rows or () if r.name == "vllm:inter_token_latency_seconds_bucket"
    ]
    assert np.all(np.diff(reached) >= 0)
    counts = fleet.world.counts[0]
    sent = value(
        named(pages, "gateway"),
        "envoy_cluster_upstream_rq_total",
        envoy_cluster_name="httproute/serving/assistant/rule/0",
    )
    assert sent == counts["admitted"].sum()


def test_reading_more_often_changes_nothing_that_happens() -> None:
    seldom, often = plant(), plant()
    exporters = Exporters(often)
    for at_s in range(1, 121):
        often.run(at_s)
        exporters.pages()
    seldom.run(120)
    page = named(Exporters(seldom).pages(), "h100-0")
    assert value(page, "vllm:iteration_tokens_total_count") == value(
        named(exporters.pages(), "h100-0"), "vllm:iteration_tokens_total_count"
    )
    assert seldom.world.tallies.tobytes() == often.world.tallies.tobytes()


def test_a_crashed_replica_has_no_page_and_its_next_process_counts_from_zero() -> None:
    fleet = plant()
    exporters = Exporters(fleet, 1e9)
    fleet.run(100)
    page = named(exporters.pages(), "h100-0")
    before, steps = (
        value(page, f"{name}") for name in ("process_start_time_seconds", "vllm:iteration_tokens_total_count")
    )
    fleet.crash(0)
    assert named(exporters.pages(), "h100-0").rows is None
    fleet.run(100 + 121)
    page = named(exporters.pages(), "h100-0")
    assert value(page, "vllm:iteration_tokens_total_count") < steps
    assert value(page, "process_start_time_seconds") > before
    fleet.scale("h100", 0)
    fleet.run(300)
    assert all(page.name != "h100-1" for page in exporters.pages())


def test_gpu_values_are_repeated_for_30_s_and_follow_the_work() -> None:
    fleet = plant(rate=1.0)
    exporters = Exporters(fleet)
    active = []
    for at_s in (5, 31, 45, 61):
        fleet.run(at_s)
        dcgm = named(exporters.pages(), "dcgm")
        active.append(value(dcgm, "DCGM_FI_PROF_DRAM_ACTIVE", exported_pod="h100-0", gpu="0"))
    assert active[0] == 0.0
    assert active[1] == active[2] != active[3]
    assert 0.0 < active[3] <= 1.0


@pytest.mark.parametrize("kind", list(FaultKind))
def test_faults_last_from_their_start_to_their_end(kind: FaultKind) -> None:
    fleet = plant()
    faulty = FaultyExporters(Exporters(fleet), fleet, (TelemetryFault(kind, 20, 40, ("h100-0",)),))
    fleet.run(10)
    good = named(faulty.pages(), "h100-0")
    fleet.run(30)
    during = [page for page in faulty.pages() if page.name == "h100-0"]
    match kind:
        case FaultKind.PARTIAL:
            assert not during
        case FaultKind.GAP:
            assert during[0].rows is None
        case FaultKind.NAN:
            assert all(math.isnan(row.value) for row in during[0].rows or ())
        case FaultKind.STALE:
            assert during[0] == good
    fleet.run(40)
    assert named(faulty.pages(), "h100-0") != good
    assert all(page.kind is not Kind.REPLICA or page.rows for page in faulty.pages())


@pytest.mark.parametrize(("level", "shown"), [(1, "weights_offloaded"), (2, "discard_all")])
def test_the_level_of_sleep_is_shown_until_the_replica_is_awake(level: int, shown: str) -> None:
    fleet = plant(rate=0.0)
    exporters = Exporters(fleet)

    def state() -> set[str]:
        rows = named(exporters.pages(), "h100-0").rows or ()
        return {dict(r.labels)["sleep_state"] for r in rows if r.name == "vllm:engine_sleep_state" and r.value == 1.0}

    assert state() == {"awake"}
    fleet.sleep(0, level)
    fleet.run(10)
    assert state() == {shown}
    fleet.wake(0)
    assert state() == {shown}
    fleet.run(100)
    assert state() == {"awake"}


def test_a_replica_without_a_place_has_no_gpu_rows() -> None:
    fleet = plant()
    fleet.block("h100", 2)
    fleet.scale("h100", 3)
    fleet.run(40)
    pages = Exporters(fleet).pages()
    assert len([page for page in pages if page.kind is Kind.REPLICA]) == 3
    pods = {dict(row.labels).get("exported_pod") for row in named(pages, "dcgm").rows or ()}
    assert pods == {"h100-0", "h100-1", None}


def test_gpus_that_no_pod_holds_have_rows_without_a_pod_and_lost_ones_have_none() -> None:
    fleet = plant()
    exporters = Exporters(fleet)

    def uuids(pod: str | None) -> set[str]:
        rows = [dict(row.labels) for row in named(exporters.pages(), "dcgm").rows or ()]
        return {labels["UUID"][4:8] for labels in rows if labels.get("exported_pod") == pod}

    assert uuids(None) == {"0002", "0003"}
    fleet.lose([0, 2])
    fleet.run(60)
    assert uuids("h100-0") == set()
    # The one replica that was lost starts in the last free place.
    assert uuids(None) == set()


def test_a_successor_stands_beside_what_its_predecessor_did_until_the_next_sample() -> None:
    fleet = plant(rate=2.0, replicas=4)
    exporters = Exporters(fleet)
    exporters.pages()
    fleet.run(59)
    before = named(exporters.pages(), "dcgm")
    fleet.run(61)
    busy = value(named(exporters.pages(), "dcgm"), "DCGM_FI_PROF_DRAM_ACTIVE", exported_pod="h100-0", gpu="0")
    used = value(before, "DCGM_FI_DEV_FB_USED", exported_pod="h100-0", gpu="0")
    assert busy > 0
    fleet.lose([0])
    fleet.restore([0])
    fleet.run(75)
    (pod,) = {page.name for page in exporters.pages() if page.kind is Kind.REPLICA} - {"h100-1", "h100-2", "h100-3"}
    dcgm = named(exporters.pages(), "dcgm")
    assert pod != "h100-0"
    assert value(dcgm, "DCGM_FI_PROF_DRAM_ACTIVE", exported_pod=pod, gpu="0") == busy
    assert value(dcgm, "DCGM_FI_DEV_FB_USED", exported_pod=pod, gpu="0") == used
    fleet.run(121)
    exporters.pages()
    fleet.run(151)
    dcgm = named(exporters.pages(), "dcgm")
    assert value(dcgm, "DCGM_FI_PROF_DRAM_ACTIVE", exported_pod=pod, gpu="0") == 0.0


def test_gpu_ratios_stay_ratios_when_a_process_begins_anew() -> None:
    fleet = plant(rate=2.0)
    exporters = Exporters(fleet)
    for at_s in range(5, 301, 5):
        fleet.run(at_s)
        if at_s == 100:
            fleet.crash(0)
        for row in named(exporters.pages(), "dcgm").rows or ():
            assert 0.0 <= row.value <= 1.0 or "_FB_" in row.name


def test_each_pool_is_a_cluster_of_the_gateway_beside_the_one_of_its_rule() -> None:
    pools = (
        PoolOf("fast", H100_X4, 2, 2),
        PoolOf("tiny", H100_X4, 1, 1, max_parallel=1),
        PoolOf("none", H100_X4, 0, 1),
    )
    fleet = Plant((ServiceOf("assistant", pools, (3.0,)),), seed=7)
    fleet.run(300)
    gateway = named(Exporters(fleet).pages(), "gateway")
    rule = "httproute/serving/assistant/rule/0"
    clusters = [f"{rule}/backend/{number}" for number in range(3)]

    def of(name: str, cluster: str, **labels: str) -> float:
        return value(gateway, f"envoy_cluster_upstream_rq_{name}", envoy_cluster_name=cluster, **labels)

    for name in ("total", "active", "timeout", "pending_overflow", "retry"):
        assert of(name, rule) == sum(of(name, cluster) for cluster in clusters), name
    for kind in "245":
        answered = [of("xx", cluster, envoy_response_code_class=kind) for cluster in clusters]
        assert of("xx", rule, envoy_response_code_class=kind) == sum(answered), kind
    assert of("total", clusters[0]) > of("total", clusters[1]) > 0
    assert of("pending_overflow", clusters[1]) > 0 == of("pending_overflow", clusters[0])
    assert of("active", clusters[1]) <= 1
    # A cluster without a healthy member answers 503 and sends nothing.
    assert of("total", clusters[2]) == 0 < of("xx", clusters[2], envoy_response_code_class="5")
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text(gateway.rows or ()), re.M))
    assert families["envoy_cluster_upstream_rq_active"] == "gauge"
    assert families["envoy_cluster_upstream_rq_xx"] == "counter"


def test_pods_have_names_of_their_own_over_deployments() -> None:
    fleet = plant(rate=0.0)
    exporters = Exporters(fleet)
    names = [{page.name for page in exporters.pages() if page.kind is Kind.REPLICA}]
    for _ in range(2):
        fleet.roll("h100")
        fleet.run(fleet.now_s + 600)
        names.append({page.name for page in exporters.pages() if page.kind is Kind.REPLICA})
    assert [len(each) for each in names] == [2, 2, 2]
    assert len(set.union(*names)) == 6


def test_a_pod_made_at_time_zero_is_not_taken_for_the_one_before_it() -> None:
    fleet = plant(rate=0.0)
    exporters = Exporters(fleet)
    fleet.lose([0])
    fleet.restore([0])
    assert "h100-0" not in {page.name for page in exporters.pages()}


def test_every_knob_and_series_has_a_test_that_shows_it() -> None:
    text = fleetsim.__doc__ or ""
    knobs, series, shown = (
        [line for line in text.split(head)[1].split("\n\n")[skip].splitlines()[1 - skip :] if line[:1].strip()]
        for head, skip in (("\nKNOB", 0), ("\nSERIES", 0), ("\nThe test that shows each", 1))
    )
    wanted = [line[:20].strip() for line in (*knobs, *series)]
    there = set(re.findall(r"^def (test_\w+)", "".join(path.read_text() for path in TESTS), re.M))
    assert [line[:20].strip() for line in shown] == wanted
    for line in shown:
        tests = re.findall(r"test_\w+", line)
        assert tests, line
        assert set(tests) <= there, line


def test_the_latency_of_a_call_is_known_only_as_it_finishes() -> None:
    fleet = Plant((ServiceOf("assistant", (PoolOf("h100", H100_X4, 1, 1),), (0.0,), arrivals_s=(1.0,)),), seed=7)
    exporters = Exporters(fleet)
    first = "vllm:time_to_first_token_seconds_count"
    late = ("vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count")
    seen = []
    for at_s in np.arange(1.0, 60.0, 0.25):
        fleet.run(float(at_s))
        page = named(exporters.pages(), "h100-0")
        seen.append((value(page, first), *(value(page, name) for name in late)))
        assert value(page, "vllm:request_success_total", finished_reason="stop") == seen[-1][1] == seen[-1][2]
        if seen[-1][1]:
            break
    assert (1.0, 0.0, 0.0) in seen
    assert seen[-1] == (1.0, 1.0, 1.0)


def test_rejections_are_shown_at_once() -> None:
    bounded = PoolOf("h100", H100_X4, 1, 1, engine=Engine(max_seqs=1, max_queued=2))
    fleet = Plant((ServiceOf("assistant", (bounded,), (0.0,), arrivals_s=(1.0,) * 10),), seed=7)
    exporters = Exporters(fleet)
    fleet.run(1.0)
    page = named(exporters.pages(), "h100-0")
    assert value(page, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 7.0


def test_limited_calls_are_counted_by_class_stage_and_attempt() -> None:
    pools = (PoolOf("h100", H100_X4, 2, 2),)
    fleet = Plant((ServiceOf("assistant", pools, (4.0,), classes=(0.5, 0.5)),), seed=7)
    fleet.limit(0, 1, 0, 0, 0.5)
    fleet.limit(0, 1, 0, 1, 0.1)
    fleet.run(120)
    rows = named(Exporters(fleet).pages(), "gateway").rows or ()
    prefix = "envoy_local_http_ratelimit_prefix"
    limited = {
        dict(row.labels)[prefix]: row.value for row in rows if row.name == "envoy_http_local_rate_limit_rate_limited"
    }
    assert {name for name, count in limited.items() if count} == {
        "assistant_class1_new_first",
        "assistant_class1_new_retry",
    }
    assert len(limited) == 8
    assert sum(limited.values()) == fleet.world.counts["limited"].sum()


def test_tasks_are_counted_by_service_and_class_as_they_end() -> None:
    pools = (PoolOf("h100", H100_X4, 2, 2),)
    fleet = Plant((ServiceOf("assistant", pools, (2.0,), classes=(0.5, 0.5)),), seed=7)
    fleet.limit(0, 1, 0, 0, 0.0, final=True)
    fleet.run(300)
    page = named(Exporters(fleet).pages(), "tasks")
    for klass in range(2):
        for field, code in (("succeeded", "STATUS_CODE_UNSET"), ("failed", "STATUS_CODE_ERROR")):
            shown = value(
                page,
                "traces_span_metrics_calls_total",
                service_name="assistant",
                tenant_class=f"class{klass}",
                status_code=code,
            )
            assert shown == fleet.world.tallies[0, klass][field].sum()
    assert value(page, "traces_span_metrics_calls_total", tenant_class="class1", status_code="STATUS_CODE_ERROR") > 50


def test_evicted_blocks_tell_how_long_they_lay_between_their_last_two_uses() -> None:
    profile = replace(COPILOT, share=1.0, gap_mean_s=8.0, gap_sigma=0.0, human_share=0.0)
    pool = PoolOf("h100", H100_X4, 2, 2)
    fleet = Plant((ServiceOf("assistant", (pool,), (0.4,), profiles=(profile,)),), seed=7)
    fleet.run(60)
    early = named(Exporters(fleet).pages(), "h100-0")
    assert value(early, "vllm:kv_block_reuse_gap_seconds_count") == 0, "nothing was evicted yet"
    fleet.run(1800)
    page = named(Exporters(fleet).pages(), "h100-0")
    blocks = value(page, "vllm:kv_block_reuse_gap_seconds_count")
    mean_s = value(page, "vllm:kv_block_reuse_gap_seconds_sum") / blocks
    assert blocks > 10_000
    # The gap itself, and the call before it: its prefill and some 220 tokens.
    assert 9.0 < mean_s < 16.0
    assert value(page, "vllm:kv_block_reuse_gap_seconds_bucket", le="5.0") == 0
