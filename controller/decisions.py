"""What is decided: actions, the moves that they make up and why, alarms, what is remembered, and the tick's record.

Wanted, requested and observed are three things: `Target` in the plan, `Standing` in the state, `PoolObservation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from controller.observations import Observation, Outcome
from models.forecast import Memory
from models.types import Bin, Capacity, Estimate, Forecast, Load, Margin, Placement, Target, Unknown


class Mode(StrEnum):
    """How far Trimtab may go: only watch, recommend, or act."""

    OBSERVE = "observe"
    RECOMMEND = "recommend"
    ACT = "act"


class ActionKind(StrEnum):
    """Kinds of action, each with a mode of its own in the policy."""

    SCALE = "scale"
    SLEEP = "sleep"
    WAKE = "wake"
    WARM = "warm"
    WEIGHTS = "weights"
    ADMISSION = "admission"


class Quadrant(StrEnum):
    """What a move does about work: avoid it, share it, move it, delay it; or it adds capacity."""

    AVOID = "avoid"
    SHARE = "share"
    MOVE = "move"
    DELAY = "delay"
    ADD = "add capacity"


class Stage(StrEnum):
    """The links of a chain of reasons, in order."""

    OBSERVED = "observed"
    ESTIMATED = "estimated"
    FORECAST = "forecast"
    PLANNED = "planned"
    GUARDED = "guarded"
    EXPECTED = "expected"


@dataclass(frozen=True, slots=True)
class Change:
    """One link of a chain of reasons: what a stage made of the number, and why, as a clause."""

    stage: Stage
    before: float | None
    after: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Set the number of replicas of a pool."""

    pool: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Put replicas of a pool to sleep, drained from their endpoints first."""

    pool: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake sleeping replicas of a pool."""

    pool: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WarmCache:
    """Send a service's hottest prefixes to a replica before it gets weight."""

    pool: str
    replica: str


@dataclass(frozen=True, slots=True)
class Weight:
    """A pool's share of its service's new traffic (0-1)."""

    pool: str
    share: float


@dataclass(frozen=True, slots=True)
class ShiftWeights:
    """Set the shares of a service's pools; both tuples name the same pools and sum to 1."""

    service: str
    before: tuple[Weight, ...]
    after: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class AdmissionLimit:
    """Admitted calls/s of one class, stage (new, continuing) and attempt (first, retry); None is unlimited."""

    klass: str
    stage: str
    attempt: str
    calls_per_s: float | None


@dataclass(frozen=True, slots=True)
class SetAdmission:
    """Set a service's admission limits. Tightening is never held back by budgets or freezes."""

    service: str
    before: tuple[AdmissionLimit, ...]
    after: tuple[AdmissionLimit, ...]
    tightens: bool


Action = Scale | Sleep | Wake | WarmCache | ShiftWeights | SetAdmission


@dataclass(frozen=True, slots=True)
class Expected:
    """What a move should do, so that the next ticks can compare; None where nothing can say yet.

    ttft and itl are at the SLO's percentile; usd_per_call is the price of a call whose first token is in time; full:
    more would arrive than can be served, so that calls queue without end.
    """

    at_s: float
    ttft_before_s: float | None = None
    ttft_after_s: float | None = None
    itl_before_s: float | None = None
    itl_after_s: float | None = None
    hit_ratio_before: float | None = None
    hit_ratio_after: float | None = None
    usd_per_call_before: float | None = None
    usd_per_call_after: float | None = None
    full_after: bool = False
    usd_per_h_before: float | None = None
    usd_per_h_after: float | None = None
    margin_before: float | None = None
    margin_after: float | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A group of actions that are done together or not at all, with the chain of reasons that led to them.

    id is unique over restarts: "<tick>-<target>".
    """

    id: str
    target: str
    kind: ActionKind
    mode: Mode
    quadrant: Quadrant
    actions: tuple[Action, ...]
    changes: tuple[Change, ...]
    expected: Expected


@dataclass(frozen=True, slots=True)
class Hold:
    """A decision to leave a target as it is, and why, as a clause; with the chain up to the point that stopped it.

    alarm: what a human should be called for, where the reason is not the fleet's own good.
    """

    target: str
    kind: ActionKind
    reason: str
    changes: tuple[Change, ...] = ()
    alarm: AlarmKind | None = None


class AlarmKind(StrEnum):
    """What the daemon calls for help about."""

    TELEMETRY_BLIND = "telemetry_blind"
    TELEMETRY_PARTIAL = "telemetry_partial"
    REPLICA_HUNG = "replica_hung"
    REPLICA_DOWN = "replica_down"
    GPU_XID = "gpu_xid"
    SLO_BROKEN = "slo_broken"
    CAPACITY_UNKNOWN = "capacity_unknown"
    CANNOT_ACT = "cannot_act"
    INVENTORY_EXHAUSTED = "inventory_exhausted"
    NOT_OBSERVED = "not_observed"


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something a human should know, about a target, as a sentence."""

    kind: AlarmKind
    target: str
    detail: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """What the stages made of one pool, and which move stands; published as metrics and shown by the page."""

    pool: str
    capacity: Capacity | Unknown
    forecast: Forecast | Unknown
    placement: Placement | Unknown
    margins: tuple[Margin, ...] | Unknown
    target: Target | Unknown
    standing: Standing | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of one step: for every pool and service either moves or holds, never silence."""

    tick: int
    now_s: float
    moves: tuple[Move, ...]
    holds: tuple[Hold, ...]
    alarms: tuple[Alarm, ...]
    assessments: tuple[Assessment, ...]


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """A replica that was seen: when its telemetry was last fresh, and since when it has been known.

    first_seen_s is 0 for replicas that were there when the pool was first observed.
    """

    name: str
    last_seen_s: float
    first_seen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A move that was recommended or requested and is not yet observed; in flight until observed or expired.

    A recommendation does not expire (expires_s is None): it stands until it is followed, replaced or withdrawn.
    """

    move_id: str
    mode: Mode
    replicas_before: int
    replicas_after: int
    since_s: float
    expires_s: float | None


@dataclass(frozen=True, slots=True)
class PoolState:
    """What is remembered of one pool between ticks.

    load: what the last calls were made of (an idle pool's next calls will resemble them);
    fewer_since_s: since when, without interruption, fewer replicas would have been enough (None: they would not);
    scaled_at_s: times of past moves that change the number of replicas, for the budget per hour;
    full_since_s: since when, without interruption, calls have waited beyond the SLO (None: they don't).
    """

    name: str
    replicas: tuple[ReplicaMemory, ...] = ()
    history: tuple[Bin, ...] = ()
    load: Load | None = None
    estimate: Estimate | None = None
    standing: Standing | None = None
    fewer_since_s: float | None = None
    scaled_at_s: tuple[float, ...] = ()
    full_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class ControllerState:
    """All the memory of the daemon. It is a value: written with every tick, read at the start.

    demand: what the forecaster learnt of every load that is followed.
    """

    tick: int = 0
    now_s: float | None = None
    pools: tuple[PoolState, ...] = ()
    demand: Memory | None = None


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One tick, whole: enough to replay it. `outcomes` is empty until the intents were recorded and carried out."""

    observation: Observation
    decision: Decision
    policy_sha256: str
    outcomes: tuple[Outcome, ...] = field(default=())
