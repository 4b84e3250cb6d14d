"""From a pool's readings to what the mathematics learns from: its load, and what its engines did. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from controller.observations import Known, PoolObservation, Reading, ReplicaState
from models.types import Held, Load, Slo, Steps, Unknown


@dataclass(frozen=True, slots=True)
class Window:
    """What rates are means over, in seconds, and how much of that is new."""

    window_s: float
    since_s: float


def load_of(observation: PoolObservation, remembered: Load | None) -> Load | Unknown:
    """What arrives, and what a call is made of; an idle pool's next calls will resemble its last ones."""
    offered, served = known(observation.offered_calls_per_s), known(observation.served_calls_per_s)
    prompt, output = known(observation.prompt_tokens_per_s), known(observation.generation_tokens_per_s)
    if offered is None:
        return Unknown("the offered load is unknown")
    if served is not None and served > 0 and prompt is not None and output is not None and output > 0:
        hit_ratio = known(observation.hit_ratio)
        return Load(offered, prompt / served, output / served, min(hit_ratio or 0.0, 1.0))
    if remembered is None:
        return Unknown("no call was served yet, so that nothing is known of its length")
    return replace(remembered, offered_calls_per_s=offered)


def steps_of(observation: PoolObservation, window: Window) -> Steps | Unknown:
    """Mean batch by Little's law: tokens/s of a replica times the seconds between tokens."""
    serving = observation.count(ReplicaState.SERVING)
    itl_s, output = known(observation.itl_mean_s), known(observation.generation_tokens_per_s)
    computed = known(observation.computed_prompt_tokens_per_s)
    if itl_s is None or output is None or computed is None or serving == 0 or output <= 0:
        return Unknown("no output tokens in the window")
    return Steps(
        batch=output * itl_s / serving,
        itl_s=itl_s,
        prefill_tokens_per_s=computed / serving,
        window_s=window.window_s,
        since_s=min(window.since_s, window.window_s),
        held=_held(observation),
        gaps=observation.reuse_gaps,
    )


def saturated_calls_per_s(observation: PoolObservation, slo: Slo) -> float | None:
    """Calls/s that a replica serves, where the pool can't serve more inside its SLO; else None.

    While at least one call per serving replica waits, and first tokens are later than promised, replicas are full.
    """
    serving = observation.count(ReplicaState.SERVING)
    served, waiting, ttft_s = (
        known(reading) for reading in (observation.served_calls_per_s, observation.waiting, observation.ttft_s)
    )
    if served is None or waiting is None or ttft_s is None or not serving:
        return None
    return served / serving if served > 0 and waiting >= serving and ttft_s > slo.ttft_s else None


def _held(observation: PoolObservation) -> tuple[Held, ...]:
    """What each serving replica holds now; replicas whose gauges or rates are unknown are left out."""
    kv = known(observation.kv_capacity_tokens) or 0.0
    held = []
    for replica in observation.replicas:
        running, calls = known(replica.running), known(replica.first_tokens_per_s)
        prompts = known(replica.prompt_tokens_per_s)
        if replica.state is not ReplicaState.SERVING:
            continue
        if running is not None and calls is not None and prompts is not None:
            held.append(Held(running, kv * (known(replica.kv_usage_ratio) or 0.0), calls, prompts))
    return tuple(held)


def known(reading: Reading) -> float | None:
    """A reading's value, None where it has none that is a number."""
    return reading.value if isinstance(reading, Known) and isfinite(reading.value) else None
