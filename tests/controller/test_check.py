"""Whether telemetry knows the pools of a policy: what is found, what is missing, and what that means."""

from dataclasses import replace

from captures import fleet, snapshot

from controller import check
from controller.adapters import signals
from controller.check import Findings, PoolFinding, Wanted
from controller.observations import Sample, Signal, Snapshot, SourceHole
from controller.policy import FleetPolicy

BUSY = "02_during_3.prom"
WANTED = {
    engine: tuple(Wanted(entry.signal, entry.about, entry.essential) for entry in entries)
    for engine, entries in signals.ENGINES.items()
}


def real(*pods: str) -> Snapshot:
    """What is known of engines whose pages are captured ones, scraped twice."""
    return snapshot(*((at_s, pod, BUSY) for pod in pods for at_s in (100.0, 108.0)), at_s=109.0)


def found(known: Snapshot, policy: FleetPolicy | None = None) -> Findings:
    return check.findings(policy or fleet(), known, WANTED)


def without(known: Snapshot, *signals_: Signal, pod: str | None = None) -> Snapshot:
    kept = tuple(
        s for s in known.samples if s.signal not in signals_ or (pod is not None and dict(s.labels).get("pod") != pod)
    )
    return replace(known, samples=kept)


def pool(findings: Findings) -> PoolFinding:
    (only,) = findings.pools
    return only


def test_real_engines_have_all_that_is_wanted_of_them() -> None:
    findings = found(real("p0", "p1"))
    assert pool(findings).engines == ("p0", "p1")
    assert not findings.fatal
    assert not [wanted for wanted in pool(findings).missing if wanted.essential]


def test_labels_that_match_no_engine_are_fatal() -> None:
    policy = fleet()
    other = {"a": policy.pools["a"].model_copy(update={"select": {"pool": "b"}})}
    findings = found(real("p0"), policy.model_copy(update={"pools": other}))
    assert pool(findings) == PoolFinding("a", (), (), 0)
    assert findings.fatal


def test_an_essential_signal_that_one_engine_lacks_is_fatal_and_named() -> None:
    findings = found(without(real("p0", "p1"), Signal.STEPS_PER_S, pod="p1"))
    missing = [wanted.signal for wanted in pool(findings).missing]
    assert Signal.STEPS_PER_S in missing
    assert findings.fatal


def test_a_signal_that_can_be_done_without_is_missing_and_not_fatal() -> None:
    findings = found(without(real("p0"), Signal.KV_BLOCKS, Signal.AWAKE, Signal.REJECTED_PER_S))
    missing = {wanted.signal for wanted in pool(findings).missing}
    assert {Signal.KV_BLOCKS, Signal.AWAKE, Signal.REJECTED_PER_S} <= missing
    assert not findings.fatal


def test_a_scrape_that_exposes_nothing_of_an_engine_is_no_engine() -> None:
    up = Sample(Signal.UP, (("instance", "sidecar:9000"), ("pod", "p9"), ("pool", "a")), 1.0)
    known = real("p0")
    assert pool(found(replace(known, samples=(*known.samples, up)))).engines == ("p0",)


def test_a_signal_that_was_asked_for_and_not_answered_is_fatal() -> None:
    findings = found(replace(real("p0"), failed=(Signal.RUNNING,)))
    assert findings.unanswered == (Signal.RUNNING,)
    assert findings.fatal


def test_holes_and_duplicates_are_passed_on() -> None:
    known = real("p0")
    twice = tuple(
        replace(s, labels=tuple((k, "other" if k == "job" else v) for k, v in s.labels)) for s in known.samples
    )
    findings = found(replace(known, samples=known.samples + twice, holes=(SourceHole("prometheus", "a warning"),)))
    assert [hole.source for hole in findings.holes] == ["prometheus", "duplicate series"]


def test_gpus_are_counted_by_the_pod_that_uses_them() -> None:
    known = real("p0")
    gpus = tuple(
        Sample(Signal.GPU_MEMORY_USED_BYTES, (("UUID", f"GPU-{n}"), ("exported_pod", pod), ("pod", "exporter")), 1e9)
        for n, pod in enumerate(("p0", "p0", "stranger"))
    )
    assert pool(found(replace(known, samples=known.samples + gpus))).gpus == 2


def test_series_that_the_policy_names_for_a_service_must_exist() -> None:
    slo = {"ttft_s": 1.0, "tpot_s": 0.05}
    policy = fleet(services={"tiny": {"slo": slo, "pools": ["a"], "gateway": {"cluster": "tiny"}, "tasks": {"s": "t"}}})
    known = real("p0")
    (service,) = found(known, policy).services
    assert (service.gateway, service.tasks, service.fatal) == (False, False, True)
    exist = (
        Sample(Signal.GATEWAY_CALLS_PER_S, (("cluster", "tiny"), ("zone", "z")), 3.0),
        Sample(Signal.TASKS_FINISHED_PER_S, (("s", "t"),), 0.0),
    )
    (service,) = found(replace(known, samples=known.samples + exist), policy).services
    assert (service.gateway, service.tasks, service.fatal) == (True, True, False)
    (unnamed,) = found(known).services
    assert (unnamed.gateway, unnamed.tasks, unnamed.fatal) == (None, None, False)
