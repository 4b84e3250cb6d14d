"""Arbitrary well-typed values of the daemon, the ugly ones included.

Numbers are any double: NaN, infinities, negatives, huge and tiny ones. Replicas, pools and services are drawn from few
names, so that some are missing, some come twice, and some are unknown to the policy (pass `pools` to hit a policy's).
"""

from hypothesis import strategies as st

from controller.types import (
    ActionKind,
    AdmissionLimit,
    Alarm,
    AlarmKind,
    Assessment,
    Change,
    ControllerState,
    Decision,
    Expected,
    GpuObservation,
    Hold,
    Hole,
    Known,
    Mode,
    Move,
    Nothing,
    Observation,
    Outcome,
    PoolFleet,
    PoolObservation,
    PoolState,
    Quadrant,
    Reading,
    ReplicaMemory,
    ReplicaObservation,
    ReplicaState,
    Scale,
    ServiceObservation,
    SetAdmission,
    ShiftWeights,
    Sleep,
    SourceHole,
    Stage,
    Standing,
    Status,
    Wake,
    WarmCache,
    Weight,
)
from models.types import (
    Barycentric,
    Bin,
    Capacity,
    Estimate,
    Forecast,
    Interval,
    Limit,
    Load,
    Margin,
    Placement,
    Quantile,
    Target,
    Unknown,
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
        PoolObservation, name=st.sampled_from(names), replicas=tuples(replica, 4), gpus=tuples(gpu, 2), fleet=fleet
    )


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
        estimate=st.one_of(st.none(), st.builds(Estimate, numbers, numbers, numbers, counts)),
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
