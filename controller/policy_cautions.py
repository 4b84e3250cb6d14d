"""What is doubtful about a policy that is in order: it works, but maybe not as it was meant. Each names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from controller import policy_rivals
from controller.policy import FleetPolicy
from controller.policy_checks import Check
from controller.policy_text import Problem
from controller.policy_words import quoted
from models import hardware

MOST_RIVALS = 100
"""Pairs of pools that are named: who has more has one mistake that they share."""


def unknown_hardware(policy: FleetPolicy) -> Iterator[Problem]:
    """Without the card's figures the first capacity estimate is wide; it narrows with traffic."""
    for name, stock in policy.gpus.items():
        if hardware.gpu(name, "bf16", stock.memory_gib, stock.bandwidth_gb_per_s, stock.dense_tflops) is None:
            yield Problem(
                ("gpus", name),
                "is not in the catalogue of GPUs, so that capacity is unknown until traffic has been seen; add "
                "memory_gib, bandwidth_gb_per_s and dense_tflops",
            )


def unused_hardware(policy: FleetPolicy) -> Iterator[Problem]:
    """A misspelt or forgotten type."""
    used = {pool.gpu.type for pool in policy.pools.values()}
    for name in policy.gpus:
        if name not in used:
            yield Problem(("gpus", name), "is used by no pool; name it in a pool's gpu.type, or take it away")


def unknown_models(policy: FleetPolicy) -> Iterator[Problem]:
    """As for hardware: the prior needs the model's size."""
    for name, pool in policy.pools.items():
        if pool.model.parameters is None:
            yield Problem(
                ("pools", name, "model"),
                "has no parameters, so that capacity is unknown until traffic has been seen; add their number, "
                "such as 70.0e9",
            )


def one_class(policy: FleetPolicy) -> Iterator[Problem]:
    """Classes that no header tells apart are one."""
    for name, service in policy.services.items():
        if service.classes and service.headers.priority is None:
            yield Problem(
                ("services", name, "classes"),
                "can't be told apart without headers.priority, so that the service is planned as one class; name the "
                "request header that carries the class",
            )


def hasty_clients(policy: FleetPolicy) -> Iterator[Problem]:
    """An SLO beyond the clients' patience can't be kept."""
    for name, service in policy.services.items():
        if service.clients.timeout_s <= service.slo.ttft_s:
            yield Problem(
                ("services", name, "clients", "timeout_s"),
                f"is {service.clients.timeout_s:g} s, no more than slo.ttft_s {service.slo.ttft_s:g} s: clients give "
                "up while the SLO is still kept; correct one of them",
            )


def likely_rivals(policy: FleetPolicy) -> Iterator[Problem]:
    """Selects without a common label may or may not match the same engines."""
    for one, other in islice(policy_rivals.likely_rivals(policy), MOST_RIVALS):
        yield Problem(
            ("pools", one, "select"),
            f"and that of pool {quoted(other)} have no label with different values, so that both may claim the "
            "same engines; give both a label that tells them apart",
        )


CAUTIONS: tuple[Check, ...] = (
    unknown_hardware,
    unused_hardware,
    unknown_models,
    one_class,
    hasty_clients,
    likely_rivals,
)
