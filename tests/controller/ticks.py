"""One realistic tick, for the tests of what is shown of it."""

from dataclasses import fields

from controller.decisions import (
    ActionKind,
    Alarm,
    AlarmKind,
    Assessment,
    Change,
    Decision,
    Expected,
    Hold,
    Mode,
    Move,
    Quadrant,
    Scale,
    Stage,
    TickRecord,
)
from controller.observations import (
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
    ServiceObservation,
    SourceHole,
    Status,
)
from models.types import (
    Barycentric,
    Capacity,
    Forecast,
    Interval,
    Limit,
    Margin,
    Placement,
    Quantile,
    Target,
)

NOW_S = 1_790_000_000.0
UNNAMED = Hole(Nothing.ABSENT, "no gateway is named")


def replica(name: str, state: ReplicaState = ReplicaState.SERVING) -> ReplicaObservation:
    value = Known(3.0, 4.0)
    return ReplicaObservation(name, state, "", value, value, value, value, value, value, value)


def pool_observation(name: str = "assistant-h100") -> PoolObservation:
    """A pool with three kinds of nothing, two zeros, and numbers for the rest."""
    readings: dict[str, Reading] = {
        field.name: Known(1.0, 12.0) for field in fields(PoolObservation) if field.type == "Reading"
    }
    readings |= {
        "offered_calls_per_s": Known(46.0, 12.0),
        "failed_calls_per_s": Known(0.0, 12.0),
        "rejected_calls_per_s": Hole(Nothing.ABSENT, "the engine does not publish it"),
        "waiting": Known(0, 18.0),
        "hit_ratio": Known(0.91, 12.0),
        "ttft_s": Hole(Nothing.NAN, "no call got a first token in the window"),
        "itl_s": Known(0.041, 12.0),
        "kv_usage_ratio": Hole(Nothing.STALE, "the newest value is 80 s old"),
    }
    return PoolObservation(
        name=name,
        replicas=(replica("r-0"), replica("r-1"), replica("r-2", ReplicaState.HUNG)),
        gpus=(),
        fleet=PoolFleet(name, Known(4, 1), Known(3, 1), Known(1, 1), Known(0, 1), UNNAMED),
        **readings,
    )


def assessment(name: str = "assistant-h100") -> Assessment:
    return Assessment(
        pool=name,
        capacity=Capacity(Interval(6.6, 7.1, 7.6), Interval(1.0, 1.2, 1.4), Limit.DECODE_BANDWIDTH),
        forecast=Forecast(245.3, (Quantile(0.5, 52.3), Quantile(0.9, 57.0))),
        placement=Placement(0.8, 0.6, None, Barycentric(0.5, 0.3, 0.2), 0.7),
        margins=(Margin("replica", 0.1, 3.8, -0.53),),
        target=Target(name, 12, 11.5, 0.7, 57.0, "headroom theta 0.7"),
    )


def tick_record(name: str = "assistant-h100") -> TickRecord:
    move = Move(
        id=f"7-{name}",
        target=name,
        kind=ActionKind.SCALE,
        mode=Mode.RECOMMEND,
        quadrant=Quadrant.ADD,
        actions=(Scale(name, 10, 12),),
        changes=(Change(Stage.PLANNED, 10, 12, "12 = ceil(57.0 / (0.7 * 7.1))"),),
        expected=Expected(NOW_S + 245),
    )
    known = Known(46.0, 3.0)
    return TickRecord(
        observation=Observation(
            now_s=NOW_S,
            window_s=60,
            pools=(pool_observation(name),),
            services=(
                ServiceObservation("assistant", known, Known(0, 3), UNNAMED, UNNAMED, UNNAMED, UNNAMED, UNNAMED),
            ),
            holes=(SourceHole("prometheus: ttft_buckets_per_s", "the query timed out"),),
        ),
        decision=Decision(
            tick=7,
            now_s=NOW_S,
            moves=(move,),
            holds=(Hold("assistant", ActionKind.WEIGHTS, "one pool serves it"),),
            alarms=(
                Alarm(AlarmKind.REPLICA_HUNG, f"{name}/r-2", "it answers and does not work"),
                Alarm(AlarmKind.TELEMETRY_PARTIAL, "prometheus: ttft_buckets_per_s", "the query timed out"),
            ),
            assessments=(assessment(name),),
        ),
        policy_sha256="ab" * 32,
        outcomes=(Outcome(move.id, Status.DRY_RUN, NOW_S, "recommended", "kubectl scale", "kubectl scale"),),
    )
