"""What a plant is made of, as values: engines, pools, services, clients. Units are in the names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica's accelerators together, as they are attained, not as a data sheet has them.

    The arithmetic: 70e9 parameters in fp8 on four H100 SXM: FLOP/s = 4 * 1979e12 (fp8 dense) * 0.45 (matrix products
    of serving shapes and the all-reduces between them) = 3.6e15; bytes/s = 4 * 3.35e12 * 0.75 = 1.0e13; memory for KV =
    4 * 80e9 * 0.9 - 70e9 = 2.2e11 bytes.
    """

    gpus: int
    flop_per_s: float
    bytes_per_s: float
    memory_bytes: float
    usd_per_gpu_h: float


@dataclass(frozen=True, slots=True)
class Engine:
    """A model as an engine serves it, and the engine's settings (vLLM's names in brackets).

    layers, hidden, kv_heads_size: attention costs 4*layers*hidden FLOP per pair of tokens; a token's KV takes
    2*layers*kv_heads_size*kv_bytes_per_element bytes. max_queued: --max-num-queued-reqs, -1 for none.
    frontend_s: what its API server takes for a call, one after another, before the engine hears of it.
    eager: --enforce-eager, without captured graphs, so that a decode batch is not padded to the size of one.
    """

    parameters: float = 70e9
    weight_bytes: float = 70e9
    layers: int = 80
    hidden: int = 8192
    kv_heads_size: int = 1024
    kv_bytes_per_element: float = 2.0
    block_tokens: int = 16
    max_seqs: int = 256
    token_budget: int = 8192
    max_queued: int = -1
    by_priority: bool = False
    overhead_s: float = 0.004
    per_sequence_s: float = 2e-5
    frontend_s: float = 0.0
    eager: bool = False
    noise: float = 0.05


@dataclass(frozen=True, slots=True)
class Starts:
    """How long each part of a start takes, in seconds; drain_s: how long a replica may finish what it has.

    wake_s: from sleep level 1 (weights in host memory); from level 2 the weights are loaded again, which takes load_s.
    """

    schedule_s: float = 5.0
    pull_s: float = 30.0
    load_s: float = 60.0
    compile_s: float = 55.0
    wake_s: float = 5.0
    sleep_s: float = 3.0
    drain_s: float = 120.0


@dataclass(frozen=True, slots=True)
class PoolOf:
    """A pool: replicas now and at most, and where they run.

    The place of replica i is on node i modulo the nodes, which is in the zone of that number modulo the zones.
    """

    name: str
    hardware: Hardware
    replicas: int
    replicas_max: int
    engine: Engine = field(default_factory=Engine)
    starts: Starts = field(default_factory=Starts)
    weight: float = 1.0
    max_parallel: int = -1
    zones: int = 1
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of task. Sizes are lognormal with the given mean and sigma (of the logarithm)."""

    name: str
    share: float
    system_tokens: int
    steps_mean: float
    steps_sigma: float
    steps_max: int
    input_mean: float
    input_sigma: float
    output_mean: float
    output_sigma: float
    gap_mean_s: float
    gap_sigma: float = 1.0
    human_share: float = 0.0
    human_gap_s: float = 60.0
    context_max: int = 120_000


CHAT = Profile("chat", 0.6, 1000, 1.0, 0.0, 1, 1500.0, 0.8, 250.0, 0.7, 1.0)
COPILOT = Profile("copilot", 0.3, 4000, 15.0, 0.5, 60, 500.0, 0.8, 220.0, 0.7, 4.0, human_share=0.1)
RESEARCH = Profile("research", 0.1, 3000, 50.0, 0.7, 400, 800.0, 1.0, 300.0, 0.7, 6.0)


@dataclass(frozen=True, slots=True)
class Clients:
    """How callers behave. Timeouts in seconds (the first-token one varies by 20 % from call to call).

    heeds_retry_after: they wait as long as a `Retry-After` of at most a minute says, instead of their backoff.
    """

    ttft_timeout_s: float = 15.0
    total_timeout_s: float = 180.0
    retries: int = 2
    backoff_s: float = 1.0
    heeds_retry_after: bool = False
    resubmit_share: float = 0.0
    resubmit_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ServiceOf:
    """A service: its pools, its traffic, how the gateway routes it, and the TTFT that counts as good.

    tasks_per_s: the rate in each bin of `bin_s` seconds; the bins repeat. arrivals_s: times, in order, at which tasks
    arrive besides (a trace). classes: shares of the tenant classes, the most important first. retry_after_s: what the
    gateway's 429 says in `Retry-After`, 0 for nothing.
    """

    name: str
    pools: tuple[PoolOf, ...]
    tasks_per_s: tuple[float, ...]
    bin_s: float = 60.0
    arrivals_s: tuple[float, ...] = ()
    classes: tuple[float, ...] = (1.0,)
    profiles: tuple[Profile, ...] = (CHAT, COPILOT, RESEARCH)
    clients: Clients = field(default_factory=Clients)
    affinity: bool = True
    spill_waiting: int = 8
    sticky_weights: bool = True
    slo_ttft_s: float = 2.0
    retry_after_s: float = 0.0


H100_X4 = Hardware(4, 3.6e15, 1.0e13, 2.9e11, 3.2)
A100_X4 = Hardware(4, 0.56e15, 6.1e12, 2.9e11, 1.6)
L40S_X4 = Hardware(4, 1.3e15, 2.6e12, 1.7e11, 1.05)
"""H100 SXM as above; A100-80GB: 4 * 312e12 (bf16 dense) * 0.45, 4 * 2.04e12 * 0.75; L40S: 4 * 733e12 (fp8 dense)
* 0.45, 4 * 864e9 * 0.75; memory is 0.9 of the cards'. Prices are list prices per GPU-hour of the order of 2026."""
