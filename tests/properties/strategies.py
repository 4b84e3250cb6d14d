"""Arbitrary well-typed values of the daemon, the ugly ones included.

Numbers are any double: NaN, infinities, negatives, huge and tiny ones. Replicas, pools and services are drawn from few
names, so that some are missing, some come twice, and some are unknown to the policy (pass `pools` to hit a policy's).
"""

from math import inf

from hypothesis import strategies as st

from controller.decisions import (
    ActionKind,
    AdmissionLimit,
    Alarm,
    AlarmKind,
    Assessment,
    Change,
    ControllerState,
    Decision,
    Expected,
    Hold,
    Mode,
    Move,
    PoolState,
    Quadrant,
    ReplicaMemory,
    Scale,
    SetAdmission,
    ShiftWeights,
    Sleep,
    Stage,
    Standing,
    Wake,
    WarmCache,
    Weight,
)
from controller.observations import (
    GpuObservation,
    Hole,
    Known,
    Nothing,
    Observation,
    Outcome,
    PoolFleet,
    PoolObservation,
    Reading,
    ReplicaObservation,
    ReplicaState,
    Sample,
    ServiceObservation,
    Signal,
    Snapshot,
    SourceHole,
    Status,
)
from controller.policy import FleetPolicy
from models.types import (
    Barycentric,
    Bin,
    Capacity,
    Estimate,
    Forecast,
    Gaps,
    Interval,
    Limit,
    Load,
    Margin,
    Placement,
    Quantile,
    Target,
    Unknown,
    Workload,
)

POOLS = ("a", "b", "stranger")
SERVICES = ("chat", "agents")
REPLICAS = ("r0", "r1", "r2", "r3")

numbers = st.one_of(
    st.floats(),
    st.floats(min_value=0, max_value=100),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")]),
)
moments = st.one_of(st.floats(min_value=0, max_value=4e9), st.floats())
counts = st.integers(min_value=-10, max_value=10_000)
ticks = st.integers(min_value=0, max_value=2**53)
texts = st.one_of(st.sampled_from(["", "no calls", "scrape failed"]), st.text(max_size=12))
some_numbers = st.one_of(st.none(), numbers)
unknowns = st.builds(Unknown, texts)


def tuples(items: st.SearchStrategy, most: int = 3) -> st.SearchStrategy:
    """Tuples of up to `most` items."""
    return st.lists(items, max_size=most).map(tuple)


def readings() -> st.SearchStrategy[Reading]:
    """Known values, and the three kinds of nothing."""
    return st.one_of(
        st.builds(Known, numbers, numbers),
        st.builds(Known, st.floats(min_value=0, max_value=1e4), st.floats(min_value=0, max_value=60)),
        st.builds(Hole, st.sampled_from(Nothing), texts),
    )


def _of_readings(kind: type, **given: st.SearchStrategy) -> st.SearchStrategy:
    """Instances of a class whose other fields are readings."""
    left = [name for name in kind.__dataclass_fields__ if name not in given]
    return st.builds(kind, **given, **dict.fromkeys(left, readings()))


def pool_observations(names: tuple[str, ...] = POOLS) -> st.SearchStrategy[PoolObservation]:
    """A pool with up to four replicas (perhaps twice the same one) and their GPUs."""
    replica = _of_readings(
        ReplicaObservation, name=st.sampled_from(REPLICAS), state=st.sampled_from(ReplicaState), detail=texts
    )
    gpu = _of_readings(GpuObservation, name=texts, replica=st.sampled_from(REPLICAS))
    fleet = _of_readings(PoolFleet, pool=st.sampled_from(names))
    return _of_readings(
        PoolObservation,
        name=st.sampled_from(names),
        replicas=tuples(replica, 4),
        gpus=tuples(gpu, 2),
        fleet=fleet,
        reuse_gaps=gaps(),
    )


def gaps() -> st.SearchStrategy[Gaps]:
    """Histograms, sound ones and others."""
    sound = st.builds(Gaps, st.just((1.0, 10.0, inf)), st.tuples(*[st.floats(0, 1e4)] * 3))
    return st.one_of(sound, st.builds(Gaps, tuples(numbers), tuples(numbers)))


def estimates() -> st.SearchStrategy[Estimate]:
    """What might be remembered of engines and calls, from whatever checkpoint."""
    workload = st.builds(Workload, *[numbers] * 6, tuples(numbers), *[numbers] * 7, gaps())
    return st.builds(Estimate, st.tuples(*[numbers] * 4), st.tuples(*[numbers] * 16), numbers, counts, workload)


def outcomes() -> st.SearchStrategy[tuple[Outcome, ...]]:
    """What became of up to three moves."""
    return tuples(st.builds(Outcome, texts, st.sampled_from(Status), moments, texts, texts, texts))


def observations(
    pools: tuple[str, ...] = POOLS, services: tuple[str, ...] = SERVICES
) -> st.SearchStrategy[Observation]:
    """Observations of a fleet whose pools and services have the given names, or miss, or come twice."""
    return st.builds(
        Observation,
        now_s=moments,
        window_s=numbers,
        pools=tuples(pool_observations(pools)),
        services=tuples(_of_readings(ServiceObservation, name=st.sampled_from(services)), 2),
        holes=tuples(st.builds(SourceHole, texts, texts), 2),
        outcomes=outcomes(),
    )


def standings() -> st.SearchStrategy[Standing]:
    """Moves that are not observed yet."""
    return st.builds(Standing, texts, st.sampled_from(Mode), counts, counts, moments, st.one_of(st.none(), moments))


def pool_states(names: tuple[str, ...] = POOLS) -> st.SearchStrategy[PoolState]:
    """What might be remembered of a pool."""
    return st.builds(
        PoolState,
        name=st.sampled_from(names),
        replicas=tuples(st.builds(ReplicaMemory, st.sampled_from(REPLICAS), moments)),
        history=tuples(st.builds(Bin, moments, numbers), 4),
        load=st.one_of(st.none(), st.builds(Load, numbers, numbers, numbers, numbers)),
        estimate=st.one_of(st.none(), estimates()),
        standing=st.one_of(st.none(), standings()),
        fewer_since_s=st.one_of(st.none(), moments),
        scaled_at_s=tuples(moments),
    )


def states(pools: tuple[str, ...] = POOLS) -> st.SearchStrategy[ControllerState]:
    """Any memory of the daemon."""
    return st.builds(ControllerState, ticks, st.one_of(st.none(), moments), tuples(pool_states(pools)))


def actions() -> st.SearchStrategy:
    """Every kind of action; several kinds have fields of equal names and values."""
    pool = st.sampled_from(POOLS)
    weights = tuples(st.builds(Weight, pool, numbers))
    limits = tuples(st.builds(AdmissionLimit, texts, texts, texts, some_numbers))
    return st.one_of(
        st.builds(Scale, pool, counts, counts),
        st.builds(Sleep, pool, tuples(st.sampled_from(REPLICAS))),
        st.builds(Wake, pool, tuples(st.sampled_from(REPLICAS))),
        st.builds(WarmCache, pool, st.sampled_from(REPLICAS)),
        st.builds(ShiftWeights, st.sampled_from(SERVICES), weights, weights),
        st.builds(SetAdmission, st.sampled_from(SERVICES), limits, limits, st.booleans()),
    )


def changes() -> st.SearchStrategy[tuple[Change, ...]]:
    """Chains of reasons."""
    return tuples(st.builds(Change, st.sampled_from(Stage), some_numbers, some_numbers, texts))


def assessments() -> st.SearchStrategy[Assessment]:
    """What the stages made of a pool, or why they made nothing."""
    interval = st.builds(Interval, numbers, numbers, numbers)
    position = st.one_of(st.none(), st.builds(Barycentric, numbers, numbers, numbers))
    return st.builds(
        Assessment,
        pool=st.sampled_from(POOLS),
        capacity=st.one_of(unknowns, st.builds(Capacity, interval, interval, st.sampled_from(Limit))),
        forecast=st.one_of(unknowns, st.builds(Forecast, numbers, tuples(st.builds(Quantile, numbers, numbers)))),
        placement=st.one_of(
            unknowns, st.builds(Placement, some_numbers, some_numbers, some_numbers, position, some_numbers)
        ),
        margins=st.one_of(unknowns, tuples(st.builds(Margin, texts, numbers, numbers, numbers))),
        target=st.one_of(unknowns, st.builds(Target, texts, counts, numbers, numbers, numbers, texts)),
    )


def decisions() -> st.SearchStrategy[Decision]:
    """Any decision, sensible or not."""
    target = st.sampled_from(POOLS + SERVICES)
    kind = st.sampled_from(ActionKind)
    expected = st.builds(
        Expected, moments, some_numbers, some_numbers, some_numbers, some_numbers, some_numbers, some_numbers
    )
    move = st.builds(
        Move,
        texts,
        target,
        kind,
        st.sampled_from(Mode),
        st.sampled_from(Quadrant),
        tuples(actions()),
        changes(),
        expected,
    )
    return st.builds(
        Decision,
        tick=ticks,
        now_s=moments,
        moves=tuples(move, 2),
        holds=tuples(st.builds(Hold, target, kind, texts, changes()), 2),
        alarms=tuples(st.builds(Alarm, st.sampled_from(AlarmKind), texts, texts), 2),
        assessments=tuples(assessments(), 2),
    )


def policies(names: tuple[str, ...] = ("a", "b"), *, lively: bool = False) -> st.SearchStrategy[FleetPolicy]:
    """Valid policies of pools that share GPUs, with any limits, modes and freezes that the schema allows.

    lively: nothing is frozen or only observed, and there is room to move.
    """
    modes = ["recommend", "act"] if lively else ["observe", "recommend", "act"]
    return st.builds(
        _policy,
        pools=st.fixed_dictionaries(dict.fromkeys(names, _pools(modes, least_max=6 if lively else 1))),
        gpus=st.fixed_dictionaries({kind: st.integers(12 if lively else 0, 40) for kind in ("H100", "L40S")}),
        limits=st.fixed_dictionaries(
            {
                "scalings_per_hour": st.integers(1, 20),
                "replicas_per_step": st.integers(1, 10),
                "scale_in_hold_s": st.sampled_from([0, 15, 60, 300]),
                "headroom": st.floats(min_value=0.01, max_value=1),
            }
        ),
        modes=st.fixed_dictionaries({}, optional={"scale": st.sampled_from(modes)}),
        mode=st.sampled_from(modes),
        freeze=st.lists(
            st.fixed_dictionaries(
                {"cron": st.sampled_from(["0 22 * * 5", "*/7 * * * *", "5 4 1 1 *"]), "hours": st.floats(0.01, 100)},
                optional={"pools": st.lists(st.sampled_from(names), max_size=2)},
            ),
            max_size=0 if lively else 1,
        ),
    )


def _pools(modes: list[str], least_max: int) -> st.SearchStrategy[dict]:
    limits = st.tuples(st.integers(0, 12 - least_max), st.integers(least_max, 12)).map(
        lambda pair: {"min": min(pair), "max": max(pair)},
    )
    return st.fixed_dictionaries(
        {
            "gpu": st.fixed_dictionaries({"type": st.sampled_from(["H100", "L40S"]), "per_replica": st.integers(1, 4)}),
            "replicas": limits,
            "survive": st.sampled_from([[], ["replica"]]),
            "max_num_seqs": st.sampled_from([1, 16, 256]),
            "start": st.fixed_dictionaries({"cold_s": st.sampled_from([0.5, 45, 240])}),
        },
        optional={"mode": st.sampled_from(modes)},
    )


def _policy(pools: dict, gpus: dict, **rest: object) -> FleetPolicy:
    services = {"chat": [*pools][:1], "agents": [*pools][1:]}
    return FleetPolicy.model_validate(
        {
            "version": 1,
            "gpus": {kind: {"count": count, "usd_per_gpu_hour": 2.0} for kind, count in gpus.items()},
            "services": {
                name: {"slo": {"ttft_s": 2.0, "tpot_s": 0.05}, "pools": served}
                for name, served in services.items()
                if served
            },
            "pools": {
                name: {"select": {"app": name}, "model": {"name": "m", "parameters": 8e9}, **pool}
                for name, pool in pools.items()
            },
            **rest,
        }
    )


def snapshots() -> st.SearchStrategy[Snapshot]:
    """What a source might say: any signal with any labels and any value, again and again."""
    words = st.sampled_from(["", "a", "b", "r0", "r1", "1", "0.5", "+Inf", "-Inf", "NaN", "no number"])
    names = st.sampled_from(
        ["app", "pod", "instance", "job", "le", "block_size", "num_gpu_blocks", "UUID", "exported_pod", "service"]
    )
    labels = st.dictionaries(names, words, max_size=5)
    engine = st.fixed_dictionaries({"app": st.sampled_from(["a", "b"]), "pod": st.sampled_from(REPLICAS)})
    bucket = st.fixed_dictionaries(
        {"app": st.just("a"), "pod": st.just("r0"), "le": st.sampled_from(["0.1", "1", "-1", "-Inf", "NaN", "+Inf"])}
    )
    sample = st.builds(
        lambda signal, pairs, value: Sample(signal, tuple(sorted((k, v) for k, v in pairs.items() if v)), value),
        st.sampled_from(Signal),
        st.one_of(labels, engine, bucket),
        numbers,
    )
    fresh = tuple(Sample(Signal.HEARTBEAT_AGE_S, (("app", "a"), ("pod", name)), 1.0) for name in REPLICAS[:2])
    return st.builds(
        lambda samples, more, holes, failed: Snapshot((*samples, *more), holes, failed),
        tuples(sample, 40),
        st.sampled_from([(), fresh]),
        tuples(st.builds(SourceHole, texts, texts), 2),
        tuples(st.sampled_from(Signal)),
    )
