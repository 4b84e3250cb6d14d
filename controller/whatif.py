"""From readings and the policy to the questions that `models.predict` answers. Pure."""

from __future__ import annotations

from dataclasses import replace

from controller.decisions import Expected
from controller.loads import known
from controller.observations import PoolObservation, ReplicaState
from controller.policy import ClientPolicy
from models.predict import Allocation, Clients, Part, Place, Prediction, Seen, predict
from models.types import Estimate, Load, Pool, Slo, Unknown

SETTLED_S = 300.0
"""How long after a move its effect is looked at: sessions that moved are warm again, queues have settled."""


def part_of(
    pool: Pool, slo: Slo, observation: PoolObservation, load: Load | Unknown, estimate: Estimate | None
) -> Part:
    """The pool as it is: what it holds and what is seen of it."""
    seen = Seen(known(observation.ttft_s), known(observation.itl_s), known(observation.hit_ratio))
    kv_tokens = known(observation.kv_capacity_tokens)
    return Part(pool, slo, estimate, load, observation.count(ReplicaState.SERVING), kv_tokens, seen)


def clients_of(policy: ClientPolicy) -> Clients:
    """How the service's callers behave, as the policy has it."""
    return Clients(policy.timeout_s, policy.retries)


def with_replicas(part: Part, replicas: int, clients: Clients) -> Prediction | Unknown:
    """The pool with so many replicas serving, some minutes after the change."""
    return predict((part,), Allocation((Place(replicas, 1.0),)), clients, SETTLED_S)[0]


def foreseen(expected: Expected, now: Prediction | Unknown, then: Prediction | Unknown) -> Expected:
    """The expectation with what the pool does now and then; as it was where either is unknown."""
    if isinstance(now, Unknown) or isinstance(then, Unknown):
        return expected
    return replace(
        expected,
        ttft_before_s=now.ttft_s,
        ttft_after_s=then.ttft_s,
        itl_before_s=now.tpot_s,
        itl_after_s=then.tpot_s,
        hit_ratio_before=now.hit_ratio,
        hit_ratio_after=then.hit_ratio,
        usd_per_call_before=now.usd_per_call,
        usd_per_call_after=then.usd_per_call,
        full_after=then.full,
    )
