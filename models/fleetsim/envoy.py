"""What an Envoy gateway says of the plant's calls, per cluster, with the statistics' own names.

An Envoy Gateway makes one cluster of a route's rule, `httproute/NAMESPACE/ROUTE/rule/N`, or, where the weights are of
clusters (backends with filters of their own, mixed addresses), one of each backend, `.../rule/N/backend/M`; plain Envoy
with weighted_clusters has one per pool as well. The page has both, so that either kind of policy can be tried: the
pools' clusters sum up to the rule's, but for calls that no pool could be chosen for, which no cluster counts. Read one
of the two, never their sum.

    upstream_rq_total     calls sent to an engine, those that its full queue refused included
    _pending_overflow     calls that the circuit breaker refused: not in _total (Envoy: before a stream is made)
    _timeout              deadlines, the callers': the gateway is taken to enforce what a call carries
    _xx{class}            answers: 5 of engines that refuse, of the breaker, and of clusters without a healthy member;
                          2 of streams that began and ended, cut ones included (their status was sent already)
    _retry                0: the gateway makes no retries of its own
    _active               gauge: calls that engines have now
"""

from __future__ import annotations

from collections.abc import Iterator

from models.fleetsim import world as w
from models.fleetsim.exposition import Series
from models.fleetsim.plant import Plant

STAGES = ("new", "continuing")
ATTEMPTS = ("first", "retry")
CLUSTER = "envoy_cluster_upstream_rq"


def rule(service: str) -> str:
    """The cluster of a service's route, over all its pools."""
    return f"httproute/serving/{service}/rule/0"


def rows(plant: Plant) -> Iterator[Series]:
    """The gateway's whole page."""
    place = 0
    for number, service in enumerate(plant.services):
        pools = range(place, place + len(service.pools))
        place += len(service.pools)
        counts = plant.world.counts[number]
        active = float(plant.world.pools["active"][list(pools)].sum())
        yield from _cluster(rule(service.name), {name: float(counts[name].sum()) for name in w.COUNTS.names or ()})
        yield from _active(rule(service.name), active)
        for backend, pool in enumerate(pools):
            name = f"{rule(service.name)}/backend/{backend}"
            yield from _cluster(name, {key: float(plant.world.pool_counts[pool][key]) for key in w.COUNTS.names or ()})
            yield from _active(name, float(plant.world.pools[pool]["active"]))
        for klass in range(len(service.classes)):
            for stage, stage_name in enumerate(STAGES):
                for attempt, attempt_name in enumerate(ATTEMPTS):
                    prefix = f"{service.name}_class{klass}_{stage_name}_{attempt_name}"
                    yield Series(
                        "envoy_http_local_rate_limit_rate_limited",
                        (("envoy_local_http_ratelimit_prefix", prefix),),
                        float(counts[klass, stage, attempt]["limited"]),
                    )


def _active(cluster: str, calls: float) -> Iterator[Series]:
    yield Series(f"{CLUSTER}_active", (("envoy_cluster_name", cluster),), calls)


def _cluster(name: str, total: dict[str, float]) -> Iterator[Series]:
    own = ("envoy_cluster_name", name)
    yield Series(f"{CLUSTER}_total", (own,), total["admitted"] + total["refused"])
    yield Series(f"{CLUSTER}_retry", (own,), 0.0)
    yield Series(f"{CLUSTER}_timeout", (own,), total["timed_out"])
    yield Series(f"{CLUSTER}_pending_overflow", (own,), total["overflowed"])
    answered = {
        "2": total["finished"] + total["cut"],
        "4": 0.0,
        "5": total["refused"] + total["overflowed"] + total["unroutable"],
    }
    for kind, value in answered.items():
        yield Series(f"{CLUSTER}_xx", (own, ("envoy_response_code_class", kind)), value)
