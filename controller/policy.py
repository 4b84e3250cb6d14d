"""The fleet policy: what is wanted, nothing about how. One YAML file, validated as a whole or refused as a whole.

The models below are the schema (`trimtab schema` prints it as JSON Schema) and judge each value by itself;
controller.policy_checks judges how they fit together, and controller.policy_file reads the file. Types are strict:
"8" is text and 8 a number, so that a wrong quote is found here and not at three in the morning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from controller.decisions import ActionKind, Mode
from controller.freeze import openings

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
"""At most a day: longer times are a slip of the keyboard, and clocks do not reach them."""

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
PositiveCount = Annotated[int, Field(ge=1, le=1_000_000)]


class Strict(BaseModel):
    """Unknown keys are errors (a misspelt key must not be silently ignored), and a policy never changes in place."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PrometheusSource(Strict):
    """A Prometheus-compatible API. Secrets are files, read again for every request, because they rotate."""

    url: str
    flavour: Literal["prometheus", "thanos", "mimir", "victoriametrics"] = "prometheus"
    timeout_s: Seconds = 10
    bearer_token_file: str | None = None
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    tenant: str | None = None
    headers: dict[str, str] = {}


class ScrapeTarget(Strict):
    """One engine's (or exporter's) metrics endpoint, and the labels that its series shall carry."""

    url: str
    labels: dict[str, str] = {}


class ScrapeSource(Strict):
    """Metrics endpoints read directly, without a Prometheus."""

    targets: list[ScrapeTarget] = Field(min_length=1)
    timeout_s: Annotated[float, Field(ge=2, le=86_400, allow_inf_nan=False)] = 5


class LabelNames(Strict):
    """What the scrape configuration calls the labels that name a replica."""

    namespace: str = "namespace"
    pod: str = "pod"


class TaskSource(Strict):
    """A counter of finished tasks (OpenTelemetry span metrics), and the labels of its failed ones."""

    metric: str = "traces_span_metrics_calls_total"
    error: dict[str, str] = {"status_code": "STATUS_CODE_ERROR"}


class TelemetryPolicy(Strict):
    """Where the fleet's telemetry is, and how old or long it may be, in seconds."""

    prometheus: PrometheusSource | None = None
    scrape: ScrapeSource | None = None
    labels: LabelNames = LabelNames()
    tasks: TaskSource = TaskSource()
    interval_s: Annotated[float, Field(ge=0.1, le=86_400, allow_inf_nan=False)] = 15
    window_s: Seconds = 60
    fresh_s: Seconds = 60


class GpuPolicy(Strict):
    """How many GPUs of a type there are, what one costs, and its figures where the catalogue lacks them."""

    count: Count
    usd_per_gpu_hour: NonNegative
    memory_gib: Positive | None = None
    bandwidth_gb_per_s: Positive | None = None
    dense_tflops: Positive | None = None


class SloPolicy(Strict):
    """Latency limits at a percentile of calls, and the share of tasks that must succeed."""

    ttft_s: Positive
    tpot_s: Positive
    percentile: Annotated[float, Field(gt=0, lt=100)] = 95
    task_success: Share = 0.99


class CornerTarget(Strict):
    """A target position on the triangle; the three shares sum to 1."""

    latency: Share
    throughput: Share
    cost: Share


class ClientPolicy(Strict):
    """How the service's clients behave."""

    timeout_s: Seconds = 60
    retries: Count = 2


class ClassPolicy(Strict):
    """One traffic class: the worth of a successful task, its floor of admitted share, its latency budget."""

    value_usd: NonNegative
    floor: Share = 0
    ttft_s: Positive | None = None


class HeaderNames(Strict):
    """Request headers, set or overwritten at the edge, that tell classes, stages, sessions and attempts apart."""

    priority: str | None = None
    stage: str | None = None
    session: str | None = None
    attempt: str | None = None


class ObjectReference(Strict):
    """A Kubernetes object."""

    kind: str
    name: str
    namespace: str = "default"
    api_version: str | None = None


class ServicePolicy(Strict):
    """What clients call: its SLO, target, classes, and the pools that serve it.

    gateway and tasks are labels that select the service's series among the gateway's and the task metrics.
    """

    slo: SloPolicy
    target: Literal["interactive", "agents", "batch"] | CornerTarget = "agents"
    clients: ClientPolicy = ClientPolicy()
    classes: dict[str, ClassPolicy] = {}
    headers: HeaderNames = HeaderNames()
    pools: list[str] = Field(min_length=1)
    router: ObjectReference | None = None
    admission: ObjectReference | None = None
    gateway: dict[str, str] = {}
    tasks: dict[str, str] = {}


class ModelPolicy(Strict):
    """The model a pool serves. parameters are the active ones; kv_bytes_per_token is derived where it is absent."""

    name: str
    parameters: Positive | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"] = "bf16"
    kv_bytes_per_token: Positive | None = None


class GpuUse(Strict):
    """Which GPUs one replica holds."""

    type: str
    per_replica: PositiveCount = 1


class ReplicaLimits(Strict):
    """How far the number of replicas may move."""

    min: Count = 1
    max: PositiveCount
    sleeping_max: Count = 0


class StartTimes(Strict):
    """Prior lead times from deciding to serving, in seconds; measured from then on."""

    cold_s: Seconds = 240
    wake_s: Seconds = 6


class PoolPolicy(Strict):
    """A homogeneous set of replicas: one model build, one GPU type, one place.

    max_num_seqs is what the engines were started with (vLLM --max-num-seqs).
    """

    select: dict[str, str] = Field(min_length=1)
    engine: Literal["vllm", "sglang"] = "vllm"
    model: ModelPolicy
    gpu: GpuUse
    replicas: ReplicaLimits
    scale: ObjectReference | None = None
    max_num_seqs: PositiveCount = 256
    start: StartTimes = StartTimes()
    survive: list[Literal["replica", "node", "zone", "pool"]] = []
    mode: Mode | None = None
    region: str | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    quality: Share = 1.0


class LimitsPolicy(Strict):
    """How fast Trimtab may move. None of them holds back tightening admission or leaving lost capacity."""

    scalings_per_hour: PositiveCount = 12
    replicas_per_step: PositiveCount = 4
    weight_step: Annotated[float, Field(gt=0, le=1)] = 0.04
    scale_in_hold_s: NonNegative = 300
    headroom: Annotated[float, Field(gt=0, le=1)] = 0.85


class Freeze(Strict):
    """A window in which nothing is moved: it opens at each time of a cron expression (UTC) and lasts `hours`."""

    cron: str
    hours: Annotated[float, Field(gt=0, le=8784)]
    pools: list[str] | None = None

    @field_validator("cron")
    @classmethod
    def _is_a_time(cls, cron: str) -> str:
        openings(cron)
        return cron


class FleetPolicy(Strict):
    """The whole policy file."""

    version: Literal[1]
    mode: Mode = Mode.RECOMMEND
    modes: dict[ActionKind, Mode] = {}
    telemetry: TelemetryPolicy = TelemetryPolicy()
    gpus: dict[str, GpuPolicy]
    services: dict[str, ServicePolicy] = Field(min_length=1)
    pools: dict[str, PoolPolicy] = Field(min_length=1)
    limits: LimitsPolicy = LimitsPolicy()
    freeze: list[Freeze] = []

    def mode_of(self, kind: ActionKind, pool: str | None = None) -> Mode:
        """The mode for one kind of action on a pool: what pool and kind override, the more cautious of the two."""
        chosen = [self.modes.get(kind), self.pools[pool].mode if pool in self.pools else None]
        overrides = [mode for mode in chosen if mode is not None]
        caution = list(Mode)
        return min(overrides, key=caution.index, default=self.mode)
