"""Four kinds of nothing, and every way in which a real engine's telemetry lies."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from captures import METRICS, fleet, snapshot
from conftest import Phase

from controller import observe
from controller.adapters.exposition import PageReader
from controller.adapters.recording import VLLM_CPU, RecordingTelemetry
from controller.adapters.series import Grouping, SeriesStore
from controller.adapters.signals import DCGM
from controller.decisions import ControllerState, PoolState, ReplicaMemory
from controller.observations import (
    Hole,
    Known,
    Nothing,
    PoolObservation,
    ReplicaState,
    Sample,
    Signal,
    Snapshot,
    SourceHole,
)
from controller.pools import no_fleet


@pytest.fixture(scope="module")
def tape() -> RecordingTelemetry:
    return RecordingTelemetry(VLLM_CPU)


def seen(tape: RecordingTelemetry, at_s: float, state: ControllerState | None = None) -> PoolObservation:
    """The pool of the capture at one instant, observed over 10 s."""
    return build(tape.read(at_s, 10, 10), at_s, state)


def build(found: Snapshot, at_s: float, state: ControllerState | None = None) -> PoolObservation:
    return observe.build(fleet(), state or ControllerState(), found, (), at_s).pools[0]


def known(reading: object) -> float:
    assert isinstance(reading, Known), reading
    return reading.value


def test_an_idle_engine_offers_zero_calls_and_has_no_latency(
    tape: RecordingTelemetry, phases: dict[str, Phase]
) -> None:
    pool = seen(tape, phases["idle"].end_s - 1)
    assert pool.count(ReplicaState.SERVING) == 2
    assert known(pool.offered_calls_per_s) == 0
    assert known(pool.waiting) == 0
    for undefined in (pool.ttft_s, pool.itl_s, pool.itl_mean_s, pool.hit_ratio, pool.ttft_good_ratio):
        assert isinstance(undefined, Hole)
        assert undefined.kind is Nothing.NAN


def test_a_burst_shows_its_queue_as_offered_load(tape: RecordingTelemetry, phases: dict[str, Phase]) -> None:
    pool = seen(tape, phases["burst"].start_s + 3)
    assert known(pool.waiting) > 0
    assert known(pool.offered_calls_per_s) > known(pool.served_calls_per_s) + 1


def test_kv_pressure_shows_preemptions_and_a_full_cache(tape: RecordingTelemetry, phases: dict[str, Phase]) -> None:
    pool = seen(tape, phases["kv_pressure_server0_only"].start_s + 12)
    assert known(pool.preemptions_per_s) > 0
    assert known(pool.kv_usage_ratio) > 0.8
    assert known(pool.kv_capacity_tokens) == 12800


def test_a_killed_replica_is_down_and_not_zero(tape: RecordingTelemetry, phases: dict[str, Phase]) -> None:
    at_s = phases["kill9_server1_api"].start_s + 5
    pool = seen(tape, at_s)
    down = next(r for r in pool.replicas if r.name == "vllm-1")
    assert down.state is ReplicaState.DOWN
    assert isinstance(down.running, Hole)
    assert known(pool.offered_calls_per_s) > 0, "the surviving replica is still read"


def test_a_counter_reset_is_not_a_burst(tape: RecordingTelemetry, phases: dict[str, Phase]) -> None:
    start_s = phases["server1_healthy_again"].start_s
    rates = [known(seen(tape, start_s + second).served_calls_per_s) for second in range(15)]
    assert max(rates) < 10, "the load was about 4 calls/s"


def test_an_engine_that_hangs_between_calls_is_found_by_the_connections_it_leaves_open(
    tape: RecordingTelemetry, phases: dict[str, Phase]
) -> None:
    pool = seen(tape, phases["sigcont_enginecore"].start_s - 1)
    hung = next(r for r in pool.replicas if r.name == "vllm-0")
    assert hung.state is ReplicaState.HUNG
    assert "more open connections and no engine step" in hung.detail
    assert known(hung.running) == 0, "its gauges froze between two calls, at zero"
    assert known(hung.steps_per_s) == 0
    assert hung.waiting == Hole(Nothing.STALE, f"hung: {hung.detail}")
    assert pool.count(ReplicaState.SERVING) == 1


@pytest.mark.parametrize("window_s", [10, 60])
def test_no_engine_is_taken_for_hung_that_was_not(
    tape: RecordingTelemetry, phases: dict[str, Phase], window_s: int
) -> None:
    hang = phases["sigstop_enginecore"].start_s, phases["sigcont_enginecore"].end_s
    policy = fleet(telemetry={"window_s": window_s, "fresh_s": 15})
    for at_s in range(int(tape.start_s) + window_s, int(tape.end_s)):
        if not hang[0] <= at_s <= hang[1]:
            pool = observe.build(policy, ControllerState(), tape.read(at_s, window_s, 10), (), at_s).pools[0]
            assert not pool.count(ReplicaState.HUNG), at_s


def test_an_engine_that_hangs_with_calls_is_found_by_its_steps_not_by_its_gauges() -> None:
    busy = "04_kvpressure_4.prom"
    pool = build(snapshot((100, "p", busy), (104, "p", busy), (108, "p", busy), at_s=109), 109)
    assert pool.replicas[0].state is ReplicaState.HUNG
    assert pool.replicas[0].detail == "11 running and 11 waiting and no engine step in 10 s"
    assert known(pool.replicas[0].running) == 11
    assert isinstance(pool.replicas[0].kv_usage_ratio, Hole)
    assert pool.replicas[0].kv_usage_ratio.kind is Nothing.STALE


def test_a_sleeping_engine_with_hanging_requests_does_not_read_as_idle() -> None:
    found = snapshot(
        (100, "p", "06_after_reset_prefix_cache.prom"), (105, "p", "07_sleeping_with_5_pending.prom"), at_s=105
    )
    pool = build(found, 105)
    assert pool.replicas[0].state is ReplicaState.ASLEEP
    assert isinstance(pool.replicas[0].waiting, Hole)
    assert pool.replicas[0].waiting.kind is Nothing.STALE
    assert isinstance(pool.offered_calls_per_s, Hole), "nothing serves; 5 requests hang uncounted"


def test_rejections_that_answer_200_are_offered_load() -> None:
    before = "09_admission_rejections.prom"
    pool = build(snapshot((95, "p", _without_counts(before)), (105, "p", before), at_s=105, window_s=11), 105)
    assert known(pool.rejected_calls_per_s) == pytest.approx(8.0, rel=0.1), "80 in 10 s"
    assert known(pool.offered_calls_per_s) == pytest.approx(
        known(pool.rejected_calls_per_s) + known(pool.served_calls_per_s)
    )


def _without_counts(name: str) -> str:
    """The captured text with every counter at zero: the same engine before its first call."""
    lines = (METRICS / name).read_text().splitlines()
    return (
        "\n".join(
            line if line.startswith("#") or not line.startswith("vllm:") else line.rpartition(" ")[0] + " 0.0"
            for line in lines
        )
        + "\n"
    )


def test_a_counter_that_was_seen_once_gives_no_rate_and_not_zero() -> None:
    pool = build(snapshot((105, "p", "02_during_1.prom"), at_s=105), 105)
    assert pool.replicas[0].state is ReplicaState.SERVING
    assert isinstance(pool.served_calls_per_s, Hole)
    assert pool.served_calls_per_s.kind is Nothing.ABSENT


def test_a_scrape_beyond_the_limit_is_stale() -> None:
    found = snapshot((95, "p", "02_during_1.prom"), (100, "p", "02_during_2.prom"), at_s=120, window_s=30)
    pool = build(found, 120)
    assert pool.replicas[0].state is ReplicaState.BLIND
    assert "20 s old, the limit is 15 s" in pool.replicas[0].detail
    assert isinstance(pool.offered_calls_per_s, Hole)
    assert pool.offered_calls_per_s.kind is Nothing.STALE


def test_a_failed_query_makes_replicas_blind_not_down() -> None:
    state = ControllerState(pools=(PoolState("a", replicas=(ReplicaMemory("p", 100.0),)),))
    pool = build(Snapshot((), (SourceHole("prometheus", "refused"),), tuple(Signal)), 110, state)
    assert [r.state for r in pool.replicas] == [ReplicaState.BLIND]
    pool = build(Snapshot(()), 110, state)
    assert [r.state for r in pool.replicas] == [ReplicaState.DOWN]


LABELS = (("instance", "p:8000"), ("job", "vllm"), ("pod", "p"), ("pool", "a"))
ALIVE = (Sample(Signal.HEARTBEAT_AGE_S, LABELS, 1.0), Sample(Signal.FIRST_TOKENS_PER_S, LABELS, 2.0))


def test_time_alone_removes_no_replica() -> None:
    state = ControllerState(pools=(PoolState("a", replicas=(ReplicaMemory("q", 100.0), ReplicaMemory("p", 90_000.0))),))
    pool = build(Snapshot(ALIVE), 90_000, state)
    assert [(r.name, r.state) for r in pool.replicas] == [("p", ReplicaState.SERVING), ("q", ReplicaState.DOWN)]
    assert "--forget-missing" in pool.replicas[1].detail


def test_a_replica_that_another_one_replaced_is_gone_after_ten_minutes() -> None:
    state = ControllerState(
        pools=(PoolState("a", replicas=(ReplicaMemory("old", 1000.0), ReplicaMemory("p", 1590.0, 950.0))),)
    )
    assert len(build(Snapshot(ALIVE), 1600, state).replicas) == 2
    assert [r.name for r in build(Snapshot(ALIVE), 1601, state).replicas] == ["p"]


@pytest.mark.parametrize(("wanted", "there"), [(1.0, ["p"]), (2.0, ["p", "q", "r"]), (0.0, ["p", "q", "r"])])
def test_nobody_misses_a_replica_where_as_many_speak_as_the_cluster_wants(wanted: float, there: list[str]) -> None:
    """q has vanished; of r there are only the last rates of a replica that is no scrape target any more."""
    left = (("instance", "r:8000"), ("job", "vllm"), ("pod", "r"), ("pool", "a"))
    memories = tuple(ReplicaMemory(name, 95.0) for name in "pqr")
    state = ControllerState(pools=(PoolState("a", replicas=memories),))
    cluster = replace(no_fleet("a"), wanted=Known(wanted, 0.0))
    found = Snapshot((*ALIVE, Sample(Signal.FIRST_TOKENS_PER_S, left, 1.0)))
    pool = observe.build(fleet(), state, found, (cluster,), 100).pools[0]
    assert [replica.name for replica in pool.replicas] == there


@pytest.mark.parametrize("value", [nan, inf, -inf, -1.0, 1e308])
@pytest.mark.parametrize("signal", [Signal.RUNNING, Signal.FIRST_TOKENS_PER_S])
def test_a_replica_whose_load_can_not_be_is_blind_and_not_left_out_of_the_sum(signal: Signal, value: float) -> None:
    others = tuple(sample for sample in ALIVE if sample.signal is not signal)
    pool = build(Snapshot((*others, Sample(signal, LABELS, value))), 100)
    assert pool.replicas[0].state is ReplicaState.BLIND
    assert signal.value in pool.replicas[0].detail


@pytest.mark.parametrize("value", [nan, inf, -inf, -1.0])
def test_impossible_values_are_holes(value: float) -> None:
    pool = build(Snapshot((*ALIVE, Sample(Signal.WAITING, LABELS, value))), 100)
    assert isinstance(pool.waiting, Hole)
    assert pool.waiting.kind is Nothing.NAN
    assert known(pool.offered_calls_per_s) == 2


def test_a_pod_scraped_by_two_jobs_counts_once_and_says_so() -> None:
    twice = tuple(replace(s, labels=tuple(sorted({**dict(s.labels), "job": "other"}.items()))) for s in ALIVE)
    observation = observe.build(fleet(), ControllerState(), Snapshot((*ALIVE, *twice)), (), 100)
    assert known(observation.pools[0].offered_calls_per_s) == 2
    assert [hole.source for hole in observation.holes] == ["duplicate series"]


def test_data_parallel_ports_of_one_pod_are_added() -> None:
    second = tuple(replace(s, labels=tuple(sorted({**dict(s.labels), "instance": "p:8001"}.items()))) for s in ALIVE)
    pool = build(Snapshot((*ALIVE, *second)), 100)
    assert len(pool.replicas) == 1
    assert known(pool.offered_calls_per_s) == 4


def test_up_without_the_selected_label_still_finds_its_replica() -> None:
    up = Sample(Signal.UP, (("instance", "p:8000"), ("job", "vllm"), ("pod", "p")), 0.0)
    state = ControllerState(pools=(PoolState("a", replicas=(ReplicaMemory("p", 95.0),)),))
    pool = build(Snapshot((up,)), 100, state)
    assert pool.replicas[0].detail == "its scrape fails (up = 0)"


GPU_LABELS = (("UUID", "GPU-1"), ("exported_pod", "p"), ("pod", "dcgm-exporter-x"))


def test_dcgm_values_are_as_old_as_their_scrape_and_their_collection() -> None:
    found = Snapshot(
        (
            *ALIVE,
            Sample(Signal.GPU_HEARTBEAT_AGE_S, GPU_LABELS, 15.0),
            Sample(Signal.GPU_LAST_XID, GPU_LABELS, 79.0),
            Sample(Signal.GPU_MEMORY_USED_BYTES, GPU_LABELS, 9223372036854775794.0),
        )
    )
    gpu = build(found, 100).gpus[0]
    assert gpu.replica == "p", "exported_pod names the engine, pod the exporter"
    assert gpu.last_xid == Known(79.0, 45.0)
    assert isinstance(gpu.memory_used_bytes, Hole)
    assert gpu.memory_used_bytes.kind is Nothing.ABSENT, "DCGM's blank sentinel is no value"


def test_a_real_gpu_without_a_pod_is_nobodys(shared: Path) -> None:
    text = (shared / "telemetry_samples" / "dcgm_4x_t4_idle_rafay_ai_conformance.prom").read_text()
    store = SeriesStore(DCGM, Grouping(("instance",)))
    store.scraped(100, (("instance", "node:9400"),), PageReader(store.wants).read(text, "text/plain").rows or ())
    samples = store.evaluate(100, 10)
    assert {s.signal for s in samples} >= {Signal.GPU_ACTIVE_RATIO, Signal.GPU_MEMORY_FREE_BYTES}
    assert not build(Snapshot((*ALIVE, *samples)), 100).gpus
