"""What the controller's own estimator says of a plant's capacity, by the same `step` and the same telemetry.

One mix of calls is served for an hour or more at some share of what the plant can carry, then another at the same share
of its own: lengths of prompts and answers shift between learning and use. Several policies look at the same telemetry:
their GPUs' figures are right, half, or double.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from controller import observe
from controller.adapters.simulated import EPOCH_S, SimulatedFleet, policy_of
from controller.decisions import ControllerState, PoolState
from controller.policy import FleetPolicy
from controller.pools import model_pool
from controller.step import step
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import ServiceOf
from models.types import NO_GAPS, Capacity, Estimate, Interval, Limit

TICK_S = 15.0
FACTORS = (1.0, 0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Learn on `first` for learn_s, then look at `second` for use_s. Both have one pool, of one kind of replica."""

    first: ServiceOf
    second: ServiceOf
    tpot_s: float
    seed: int
    learn_s: float = 3600.0
    use_s: float = 3600.0
    with_gaps: bool = True


@dataclass(frozen=True, slots=True)
class Said:
    """What one policy's estimator says at the end; None where it does not know. factor: on its GPUs' figures."""

    factor: float
    warm: Interval | None
    cold: Interval | None
    limit: Limit | None
    estimate: Estimate | None


def teach(lesson: Lesson) -> tuple[Said, ...]:
    """Play a lesson; one answer per factor."""
    estimates: dict[float, Estimate | None] = dict.fromkeys(FACTORS)
    for number, (service, run_s) in enumerate(((lesson.first, lesson.learn_s), (lesson.second, lesson.use_s))):
        said = _watch(service, run_s, lesson, number, estimates)
        estimates = {answer.factor: answer.estimate for answer in said}
    return said


def _watch(
    service: ServiceOf, run_s: float, lesson: Lesson, number: int, estimates: dict[float, Estimate | None]
) -> tuple[Said, ...]:
    policy = _policy(service, lesson.tpot_s)
    fleet = SimulatedFleet(Plant((service,), lesson.seed + number), policy, scrape_s=15.0)
    name = service.pools[0].name
    policies = {factor: _misinformed(policy, factor) for factor in estimates}
    states = {
        factor: ControllerState(pools=(PoolState(name, estimate=estimate),)) for factor, estimate in estimates.items()
    }
    capacities = {}
    window_s = policy.telemetry.window_s
    for tick in range(1, int(run_s / TICK_S) + 1):
        now_s = EPOCH_S + tick * TICK_S
        snapshot = fleet.read(now_s, window_s, 1.0)
        if tick * TICK_S < 2 * window_s:
            continue
        cluster = fleet.cluster()
        # What is observed depends on which replicas are remembered, and on no figure of a GPU: one serves all.
        observation = observe.build(policy, states[FACTORS[0]], snapshot, cluster, now_s)
        if not lesson.with_gaps:
            pools = tuple(replace(pool, reuse_gaps=NO_GAPS) for pool in observation.pools)
            observation = replace(observation, pools=pools)
        for factor, state in states.items():
            states[factor], decision = step(policies[factor], state, observation)
            capacities[factor] = decision.assessments[0].capacity
    return tuple(_said(factor, capacities.get(factor), states[factor]) for factor in states)


def _said(factor: float, known: object, state: ControllerState) -> Said:
    estimate = state.pools[0].estimate
    if not isinstance(known, Capacity):
        return Said(factor, None, None, None, estimate)
    return Said(factor, known.warm_calls_per_s, known.cold_calls_per_s, known.limit, estimate)


def _policy(service: ServiceOf, tpot_s: float) -> FleetPolicy:
    policy = policy_of((service,), mode="observe")
    entry = policy.services[service.name]
    slo = entry.slo.model_copy(update={"tpot_s": tpot_s})
    services = {service.name: entry.model_copy(update={"slo": slo})}
    return policy.model_copy(update={"services": services})


def _misinformed(policy: FleetPolicy, factor: float) -> FleetPolicy:
    """The policy with GPUs that are said to be `factor` times as fast as they are."""
    gpus = {}
    for pool_name, pool in policy.pools.items():
        service = next(name for name, entry in policy.services.items() if pool_name in entry.pools)
        gpu = model_pool(policy, pool_name, service).gpu
        assert gpu is not None
        gpus[pool.gpu.type] = policy.gpus[pool.gpu.type].model_copy(
            update={
                "memory_gib": gpu.memory_gib,
                "bandwidth_gb_per_s": gpu.bandwidth_gb_per_s * factor,
                "dense_tflops": gpu.dense_tflops * factor,
            }
        )
    return policy.model_copy(update={"gpus": {**policy.gpus, **gpus}})
