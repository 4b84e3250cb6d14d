"""Windows of made-up engines, for tests of what is learnt from them."""

from dataclasses import replace

from models.capacity import update
from models.hardware import gpu
from models.steptime import prior
from models.types import NO_GAPS, Estimate, Gaps, Held, Load, Model, Pool, Slo, Steps

POOL = Pool(
    name="assistant",
    service="assistant",
    gpu_type="H100-SXM",
    gpus_per_replica=4,
    gpu=gpu("H100-SXM", "fp8"),
    model=Model("llama-3.3-70b", 70e9, 1.0, 327_680),
    usd_per_gpu_h=3.2,
    replicas_min=1,
    replicas_max=12,
    cold_start_s=240,
    survive_replica=False,
    max_num_seqs=1024,
)
BARE = replace(POOL, gpu=None, model=None)
SLO = Slo(ttft_s=2.0, tpot_s=0.05, percentile=95, task_success=0.99)
LOAD = Load(offered_calls_per_s=46, prompt_tokens_per_call=6000, output_tokens_per_call=300, hit_ratio=0.9)
CONTEXT_TOKENS = 6150.0
LEARNT = Estimate((1.0,) * 4, tuple(0.0025 if i % 5 == 0 else 0.0 for i in range(16)), 100, 20)


def steps(scale: float, batch: float, prefill_tokens_per_s: float = 0.0, pool: Pool = POOL) -> Steps:
    """What an engine whose every coefficient is `scale` times the prior's would show at that batch."""
    step = prior(pool)
    decode_s = scale * (step.fixed_s + (1 + batch) * (step.per_sequence_s + step.per_kv_token_s * CONTEXT_TOKENS))
    itl_s = decode_s / (1 - scale * step.per_prefill_token_s * prefill_tokens_per_s)
    return Steps(batch, itl_s, prefill_tokens_per_s)


def learn(estimate: Estimate | None, windows: list[Steps], pool: Pool = POOL, load: Load = LOAD) -> Estimate:
    """The estimate after so many windows."""
    for window in windows:
        estimate = update(estimate, pool, window, load)
    assert estimate is not None
    return estimate


def served(calls_per_s: float, running: float, shared: float, own: float, gaps: Gaps = NO_GAPS) -> Steps:
    """A window of two replicas whose running requests hold `own` KV tokens each, and share others."""
    held = tuple(
        Held(running + more, shared + own * (running + more), calls_per_s, calls_per_s * LOAD.prompt_tokens_per_call)
        for more in (-1.0, 1.0)
    )
    return replace(steps(1.0, running, calls_per_s * 600), held=held, gaps=gaps)
