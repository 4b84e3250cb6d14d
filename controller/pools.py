"""From the policy's words to the mathematics' values."""

from __future__ import annotations

from typing import Any

from controller.observations import Hole, Nothing, PoolFleet, PoolObservation
from controller.policy import FleetPolicy, SloPolicy
from models import hardware
from models.types import Model, Pool, Slo


def model_pool(policy: FleetPolicy, name: str, service: str) -> Pool:
    """A pool of the policy as the mathematics sees it; gpu and model are None where nothing is known of them."""
    pool = policy.pools[name]
    stock = policy.gpus.get(pool.gpu.type)
    parameters = pool.model.parameters
    return Pool(
        name=name,
        service=service,
        gpu_type=pool.gpu.type,
        gpus_per_replica=pool.gpu.per_replica,
        gpu=hardware.gpu(
            pool.gpu.type,
            pool.model.precision,
            memory_gib=stock.memory_gib if stock else None,
            bandwidth_gb_per_s=stock.bandwidth_gb_per_s if stock else None,
            dense_tflops=stock.dense_tflops if stock else None,
        ),
        model=None
        if parameters is None
        else Model(
            name=pool.model.name,
            parameters=parameters,
            bytes_per_parameter=hardware.bytes_per_parameter(pool.model.precision),
            kv_bytes_per_token=pool.model.kv_bytes_per_token or hardware.kv_bytes_per_token(parameters),
        ),
        usd_per_gpu_h=stock.usd_per_gpu_hour if stock else 0.0,
        replicas_min=pool.replicas.min,
        replicas_max=pool.replicas.max,
        cold_start_s=pool.start.cold_s,
        survive_replica=bool(pool.survive),
        max_num_seqs=pool.max_num_seqs,
    )


def model_slo(slo: SloPolicy) -> Slo:
    """A service's SLO as the mathematics sees it."""
    return Slo(slo.ttft_s, slo.tpot_s, slo.percentile, slo.task_success)


def no_fleet(name: str) -> PoolFleet:
    """What is known of a pool's replicas where no cluster is read."""
    hole = Hole(Nothing.ABSENT, "no cluster is read")
    return PoolFleet(name, hole, hole, hole, hole, hole)


def unobserved(name: str) -> PoolObservation:
    """A pool of which the observation says nothing at all."""
    hole = Hole(Nothing.ABSENT, "the observation does not contain the pool")
    readings = {field: hole for field in PoolObservation.__slots__ if field not in _NOT_READINGS}
    # A dict that is typed loosely: every field in it is a reading.
    loose: dict[str, Any] = readings
    return PoolObservation(name=name, replicas=(), gpus=(), fleet=no_fleet(name), **loose)


_NOT_READINGS = {"name", "replicas", "gpus", "fleet", "reuse_gaps"}
