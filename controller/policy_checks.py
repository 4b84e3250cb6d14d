"""How the values of a policy fit together: one function per rule, each naming place, fault and remedy.

`CHECKS` and `REFERENCES` (names that must exist) are errors: the policy is refused. What is only doubtful is in
controller.policy_cautions.

Inventory is judged at its worst that is certain: the floors of all pools must fit at the same time, that is, for each
GPU type  sum over pools of min * per_replica <= count.  Two pools with 2 replicas of 4 GPUs and 1 of 8 need 16.
Maxima may exceed the inventory: the plan shares out what there is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from controller.decisions import ActionKind, Mode
from controller.policy import CornerTarget, FleetPolicy
from controller.policy_faults import suggestion
from controller.policy_rivals import certain_rivals
from controller.policy_text import KeyPath, Problem
from controller.policy_words import described, quoted

LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
LEAST_WINDOW_S = 4.0
"""A rate needs two scrapes, and nobody scrapes engines more often than every 2 s."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names as the file has them, those of faulty entries included."""

    pools: tuple[str, ...]
    gpus: tuple[str, ...]
    served: frozenset[str]


Check = Callable[[FleetPolicy], Iterator[Problem]]
Reference = Callable[[FleetPolicy, Names], Iterator[Problem]]


def no_source(policy: FleetPolicy) -> Iterator[Problem]:
    """A daemon needs telemetry; the recorded demo brings its own."""
    if policy.telemetry.prometheus is None and policy.telemetry.scrape is None:
        yield Problem(
            ("telemetry",),
            'names no source; add prometheus: {url: "http://your-prometheus:9090"}, or scrape with its targets',
        )


def two_sources(policy: FleetPolicy) -> Iterator[Problem]:
    """Two sources would contradict each other."""
    if policy.telemetry.prometheus is not None and policy.telemetry.scrape is not None:
        yield Problem(("telemetry",), "names two sources; keep prometheus or scrape and take the other away")


def addresses(policy: FleetPolicy) -> Iterator[Problem]:
    """URLs are absolute, and hold neither secrets (the journal keeps the policy's text) nor what adapters add."""
    telemetry = policy.telemetry
    if telemetry.prometheus is not None:
        path: KeyPath = ("telemetry", "prometheus", "url")
        url = telemetry.prometheus.url
        fault = _address_fault(url, "http://prometheus.monitoring:9090")
        if fault is None and "@" in urlsplit(url).netloc:
            fault = "holds a user name, and the policy's text is recorded; use username and password_file instead"
        if fault is None and ("?" in url or "#" in url):
            fault = "has a query or fragment; write the base address only, without ? and #"
        if fault is None and url.rstrip("/").endswith("/api/v1"):
            fault = "ends in /api/v1, which is added to it; write the address without that"
        if fault is not None:
            yield Problem(path, fault)
    for index, target in enumerate(telemetry.scrape.targets if telemetry.scrape else ()):
        fault = _address_fault(target.url, "http://10.0.0.7:8000/metrics")
        if fault is not None:
            yield Problem(("telemetry", "scrape", "targets", index, "url"), fault)


def _address_fault(url: str, example: str) -> str | None:
    shown = described(url)
    if not url.isprintable() or " " in url:
        return f"is {shown}, and an address has no spaces or control characters; take them out"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is {shown}, which is no address ({error}); write one like {example}"
    if parts.scheme not in {"http", "https"} or not host:
        return f"is {shown}, and an http or https address with a host is wanted; write one like {example}"
    return None


def windows(policy: FleetPolicy) -> Iterator[Problem]:
    """A rate needs two samples in its window, and a sample must stay fresh until the next one comes."""
    telemetry = policy.telemetry
    window_s, fresh_s, interval_s = telemetry.window_s, telemetry.fresh_s, telemetry.interval_s
    if window_s < LEAST_WINDOW_S:
        yield Problem(
            ("telemetry", "window_s"),
            f"is {window_s:g}, and no rate can be had from less than {LEAST_WINDOW_S:g} s; make it two scrapes long",
        )
    elif telemetry.scrape is not None and window_s < 2 * interval_s:
        yield Problem(
            ("telemetry", "window_s"),
            f"is {window_s:g} with interval_s {interval_s:g}, and a rate needs two scrapes; "
            f"set it to at least {2 * interval_s:g}",
        )
    if telemetry.scrape is not None and fresh_s < interval_s:
        yield Problem(
            ("telemetry", "fresh_s"),
            f"is {fresh_s:g}, so that values would be stale before the next scrape; set it to at least {interval_s:g}",
        )


def credentials(policy: FleetPolicy) -> Iterator[Problem]:
    """Who Trimtab says that it is: one way, completely."""
    source = policy.telemetry.prometheus
    if source is None:
        return
    path: KeyPath = ("telemetry", "prometheus")
    if source.username is not None and source.password_file is None:
        yield Problem((*path, "username"), "stands without a password; add password_file, a file that holds it")
    if source.password_file is not None and source.username is None:
        yield Problem((*path, "password_file"), "stands without a username; add username")
    if source.cert_file is not None and source.key_file is None:
        yield Problem((*path, "cert_file"), "stands without its key; add key_file")
    if source.key_file is not None and source.cert_file is None:
        yield Problem((*path, "key_file"), "stands without its certificate; add cert_file")
    if source.bearer_token_file is not None and (source.username or source.password_file) is not None:
        yield Problem((*path, "bearer_token_file"), "excludes username and password_file; keep one of the two ways")
    for name, value in source.headers.items():
        if not HEADER.fullmatch(name) or not value.isprintable():
            yield Problem((*path, "headers", name), "is no HTTP header; letters, digits and dashes, text on one line")
        elif name.lower() == "authorization":
            yield Problem(
                (*path, "headers", name),
                "would put a secret into the recorded policy; use bearer_token_file, or username with password_file",
            )


def labels(policy: FleetPolicy) -> Iterator[Problem]:
    """Names of labels and metrics are Prometheus's, and an empty label value means "has no such label" there."""
    for path, pairs in _label_sets(policy):
        for name, value in pairs.items():
            if not LABEL.fullmatch(name):
                yield Problem((*path, name), f"is no label name; write letters, digits and _, like {_label(name)}")
            elif not value.strip():
                yield Problem((*path, name), "is empty, and would match what lacks the label; give a value")
    for key, name in (("namespace", policy.telemetry.labels.namespace), ("pod", policy.telemetry.labels.pod)):
        if not LABEL.fullmatch(name):
            yield Problem(
                ("telemetry", "labels", key), f"is {described(name)}, which is no label name; write like {_label(name)}"
            )
    metric = policy.telemetry.tasks.metric
    if not METRIC.fullmatch(metric):
        yield Problem(
            ("telemetry", "tasks", "metric"),
            f"is {described(metric)}, which is no metric name; write letters, digits, _ and :",
        )


def _label_sets(policy: FleetPolicy) -> Iterator[tuple[KeyPath, dict[str, str]]]:
    telemetry = policy.telemetry
    yield ("telemetry", "tasks", "error"), telemetry.tasks.error
    for index, target in enumerate(telemetry.scrape.targets if telemetry.scrape else ()):
        yield ("telemetry", "scrape", "targets", index, "labels"), target.labels
    for name, service in policy.services.items():
        yield ("services", name, "gateway"), service.gateway
        yield ("services", name, "tasks"), service.tasks
    for name, pool in policy.pools.items():
        yield ("pools", name, "select"), pool.select


def _label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", re.sub(r"^(?![a-zA-Z_])", "_", name))[:60]


def plain_names(policy: FleetPolicy) -> Iterator[Problem]:
    """Names become labels of metrics and words of sentences."""
    groups = (("gpus", policy.gpus), ("services", policy.services), ("pools", policy.pools))
    for kind, group in groups:
        for name in group:
            if not name or not name.isprintable() or name != name.strip() or len(name) > 253:
                yield Problem(
                    (kind, name), "is no name; write up to 253 printable characters without spaces at the ends"
                )


def served_pools(policy: FleetPolicy, names: Names) -> Iterator[Problem]:
    """Every service's pools exist, and a pool belongs to one service."""
    owner: dict[str, str] = {}
    known = frozenset(names.pools)
    for name, service in policy.services.items():
        for index, pool in enumerate(service.pools):
            path: KeyPath = ("services", name, "pools", index)
            if pool not in known:
                yield Problem(
                    path, f"names pool {quoted(pool)}, which is not under pools; {suggestion(pool, names.pools)}"
                )
            elif owner.setdefault(pool, name) != name:
                yield Problem(
                    path,
                    f"names pool {quoted(pool)}, which service {quoted(owner[pool])} has already; a pool serves one "
                    "service, so take it away from one of them",
                )
            elif pool in service.pools[:index]:
                yield Problem(path, f"names pool {quoted(pool)} a second time; take it away")


def unserved_pools(policy: FleetPolicy, names: Names) -> Iterator[Problem]:
    """Every pool is used."""
    for name in policy.pools:
        if name not in names.served:
            yield Problem(("pools", name), "is in no service; name it under the pools of a service, or take it away")


def gpu_types(policy: FleetPolicy, names: Names) -> Iterator[Problem]:
    """Every pool's GPU type is in the inventory."""
    for name, pool in policy.pools.items():
        if pool.gpu.type not in names.gpus:
            yield Problem(
                ("pools", name, "gpu", "type"),
                f"is {quoted(pool.gpu.type)}, which is not under gpus; {suggestion(pool.gpu.type, names.gpus)}",
            )


def replica_limits(policy: FleetPolicy) -> Iterator[Problem]:
    """Limits are in order."""
    for name, pool in policy.pools.items():
        limits = pool.replicas
        path: KeyPath = ("pools", name, "replicas")
        if limits.min > limits.max:
            yield Problem((*path, "min"), f"is {limits.min}, more than max {limits.max}; lower min or raise max")
        if limits.sleeping_max > limits.max:
            yield Problem(
                (*path, "sleeping_max"), f"is {limits.sleeping_max}, more than max {limits.max}; lower it or raise max"
            )


def inventory(policy: FleetPolicy) -> Iterator[Problem]:
    """The floors of all pools fit into the GPUs there are."""
    needs: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, pool in policy.pools.items():
        needs[pool.gpu.type].append((name, pool.replicas.min * pool.gpu.per_replica))
    for gpu_type, stock in policy.gpus.items():
        needed = sum(gpus for _, gpus in needs[gpu_type])
        if needed > stock.count:
            by_need = sorted(((name, gpus) for name, gpus in needs[gpu_type] if gpus), key=lambda need: -need[1])
            share = ", ".join(f"{quoted(name)} {gpus}" for name, gpus in by_need[:5])
            more = ", ..." if len(by_need) > 5 else ""
            yield Problem(
                ("gpus", gpu_type, "count"),
                f"is {stock.count}, and the minima of the pools need {needed} ({share}{more}); lower a replicas.min or "
                "raise count",
            )


def rival_selects(policy: FleetPolicy) -> Iterator[Problem]:
    """No engine's series may match two pools for certain."""
    for narrow, wide in certain_rivals(policy):
        same = "the very engines" if policy.pools[wide].select == policy.pools[narrow].select else "engines"
        yield Problem(
            ("pools", narrow, "select"),
            f"claims {same} that pool {quoted(wide)} claims too; add a label to each that tells them apart",
        )


def shares(policy: FleetPolicy) -> Iterator[Problem]:
    """Shares are of one whole."""
    for name, service in policy.services.items():
        target = service.target
        if isinstance(target, CornerTarget):
            total = target.latency + target.throughput + target.cost
            if not math.isclose(total, 1.0, abs_tol=1e-6, rel_tol=0.0):
                yield Problem(("services", name, "target"), f"has shares that sum to {total:g}; make them sum to 1")
        floors = sum(klass.floor for klass in service.classes.values())
        if floors > 1 + 1e-6:
            yield Problem(
                ("services", name, "classes"), f"has floors that sum to {floors:g}; lower them to 1 or less in all"
            )


def frozen_pools(policy: FleetPolicy, names: Names) -> Iterator[Problem]:
    """Freezes name pools that exist."""
    for index, freeze in enumerate(policy.freeze):
        for position, pool in enumerate(freeze.pools or ()):
            if pool not in names.pools:
                yield Problem(
                    ("freeze", index, "pools", position),
                    f"names pool {quoted(pool)}, which is not under pools; {suggestion(pool, names.pools)}",
                )


def hands(policy: FleetPolicy) -> Iterator[Problem]:
    """To act on a pool's size, something must be named that has it."""
    for name, pool in policy.pools.items():
        if pool.scale is None and policy.mode_of(ActionKind.SCALE, name) is Mode.ACT:
            yield Problem(
                ("pools", name),
                "is in mode act and names nothing to scale; add scale: {kind: Deployment, namespace: ..., name: ...}, "
                "or set its mode to recommend",
            )


CHECKS: tuple[Check, ...] = (
    two_sources,
    addresses,
    windows,
    credentials,
    labels,
    plain_names,
    replica_limits,
    inventory,
    rival_selects,
    shares,
    hands,
)

REFERENCES: tuple[Reference, ...] = (served_pools, unserved_pools, gpu_types, frozen_pools)
