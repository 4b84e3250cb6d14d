"""A first policy from what telemetry shows: which engines there are, grouped into pools. Pure: label sets in, YAML out.

Engines that share a namespace and the first of `IDENTITY` that they carry are one pool, unless they serve different
models. No pool may claim another's engines, so a group whose labels are a part of another's is told apart from it by
its model's name where that helps, and takes it in where not. Everything that telemetry can't show (prices, SLOs, how
many GPUs there are) gets a placeholder and a comment that says so.

Example: two pods with app="chat", model_name="llama-3.1-8b" on 2 GPUs each become one pool of 2 GPUs per replica with
1 to 4 replicas (up to twice of what was seen), that the service "llama-3-1-8b" uses.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import yaml

from controller.errors import PolicyError
from controller.gpus import pod_of
from controller.observations import Labels
from controller.policy_checks import LABEL
from controller.policy_words import quoted
from models import hardware

IDENTITY = ("pool", "app", "app_kubernetes_io_name", "deployment", "service", "container", "job", "model_name")
"""Labels that name what an engine belongs to, the most telling first."""

POD = ("pod", "kubernetes_pod_name", "pod_name", "exported_pod")
NAMESPACE = ("namespace", "kubernetes_namespace", "exported_namespace")
UNKNOWN_GPU = "UNKNOWN-GPU"


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """One engine's series: its labels, vllm or sglang, and the model and number of its pod's GPUs where DCGM knows.

    gpus: 0 where unknown.
    """

    labels: Labels
    engine: str
    gpu_model: str | None
    gpus: int = 0


@dataclass(slots=True)
class _Group:
    """Engines that become one pool."""

    select: dict[str, str]
    engines: list[FoundEngine]


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool as it will be written. seen: replicas."""

    name: str
    select: Mapping[str, str]
    engine: str
    model: str
    models: tuple[str, ...]
    gpu_models: tuple[str, ...]
    gpu_type: str
    gpus_per_replica: int
    seen: int

    @property
    def replicas_max(self) -> int:
        return min(2 * self.seen, 1000)


def engines_from(running: tuple[Labels, ...], gpus: tuple[Labels, ...]) -> tuple[FoundEngine, ...]:
    """Engines from the labels (with `__name__`) of their running-requests series and of DCGM's, matched by pod.

    A data-parallel engine has a series per rank; each is returned, and all of them are the same replica.
    """
    devices: dict[tuple[str, str], dict[tuple[str, ...], str]] = defaultdict(dict)
    for series in gpus:
        labels = dict(series)
        pod = pod_of(labels)
        if pod:
            space = labels.get("exported_namespace") or labels.get("pod_namespace") or labels.get("namespace") or ""
            card = " ".join(filter(None, (labels.get("modelName"), _slice(labels))))
            for key in {(space, pod), ("", pod)}:
                devices[key][_device(labels)] = card
    found = []
    for series in running:
        labels = dict(series)
        kind = "sglang" if labels.pop("__name__", "").startswith("sglang:") else "vllm"
        mine = devices.get((_first(labels, NAMESPACE), _first(labels, POD)), {})
        cards = {card for card in mine.values() if card}
        model = next(iter(cards)) if len(cards) == 1 else None
        found.append(FoundEngine(tuple(sorted(labels.items())), kind, model, len(mine)))
    return tuple(found)


def starter(found: tuple[FoundEngine, ...], url: str) -> str:
    """A commented policy (YAML) for the engines, which `trimtab check` accepts. Raises PolicyError if there are none.

    url: the Prometheus in which they were found.
    """
    if not found:
        raise PolicyError(
            f"{url} has no engine's series (vllm:num_requests_running or sglang:num_running_reqs); see whether it "
            "scrapes the engines' /metrics, and give the address of the Prometheus that does (and --at for old data)."
        )
    groups = _apart(_grouped(found))
    if not groups:
        raise PolicyError(
            f"{url} has engines' series without any label that tells pools apart; let its scrape configuration add "
            "one, such as pool or app."
        )
    pools = _pools(groups)
    return "\n".join([*_head(found, pools, url), *_gpus(pools), *_services(pools), *_pool_lines(pools)]) + "\n"


# ------------------------------------------------------------------------------------------------------------ grouping


def _grouped(found: Iterable[FoundEngine]) -> list[_Group]:
    """Engines by what selects them; those of different models are told apart by the model's name."""
    by_select: dict[Labels, list[FoundEngine]] = defaultdict(list)
    for engine in sorted(found, key=lambda e: (e.labels, e.engine)):
        by_select[_select(dict(engine.labels))].append(engine)
    groups = []
    for select, engines in by_select.items():
        if not select:
            continue
        by_model: dict[str, list[FoundEngine]] = defaultdict(list)
        for engine in engines:
            by_model[_model(engine)].append(engine)
        if len(by_model) == 1 or "" in by_model:
            groups.append(_Group(dict(select), engines))
        else:
            groups += [_Group({**dict(select), "model_name": model}, part) for model, part in by_model.items()]
    return groups


def _apart(groups: list[_Group]) -> list[_Group]:
    """No group's labels are a part of another's: by the model's name where that tells them apart, else as one group."""
    kept: list[_Group] = []
    for group in sorted(groups, key=lambda g: (len(g.select), sorted(g.select.items()))):
        while (wide := next((k for k in kept if k.select.items() <= group.select.items()), None)) is not None:
            models = {_model(engine) for engine in wide.engines}, {_model(engine) for engine in group.engines}
            ones = [next(iter(names)) for names in models if len(names) == 1]
            if "model_name" not in wide.select and len(set(ones)) == 2 and all(ones):
                wide.select["model_name"], group.select["model_name"] = ones
            else:
                wide.engines += group.engines
                break
        else:
            kept.append(group)
    return kept


def _select(labels: Mapping[str, str]) -> Labels:
    usable = {name: value for name, value in labels.items() if LABEL.fullmatch(name) and _usable(value)}
    space = next((name for name in NAMESPACE if name in usable), None)
    identity = next((name for name in IDENTITY if name in usable), None)
    chosen = [name for name in (space, identity) if name is not None] or sorted(usable)[:1]
    return tuple((name, usable[name]) for name in chosen)


def _usable(value: str) -> bool:
    return bool(value.strip()) and not any("\ud800" <= character <= "\udfff" for character in value)


def _model(engine: FoundEngine) -> str:
    model = dict(engine.labels).get("model_name", "")
    return model if _usable(model) else ""


def _pools(groups: Iterable[_Group]) -> list[_Pool]:
    pools: list[_Pool] = []
    names: set[str] = set()
    for group in groups:
        labels = [dict(engine.labels) for engine in group.engines]
        models = tuple(name for name, _ in Counter(map(_model, group.engines)).most_common() if name)
        cards = tuple(name for name, _ in Counter(e.gpu_model for e in group.engines if e.gpu_model).most_common())
        identity = next((name for name in IDENTITY if name in group.select), next(iter(group.select)))
        words = [group.select[identity]]
        if identity != "model_name" and "model_name" in group.select:
            words.append(group.select["model_name"])
        spaces = [group.select[name] for name in NAMESPACE if name in group.select]
        name = _fresh([_slug(*words, otherwise="pool"), _slug(*spaces, *words, otherwise="pool")], names)
        pools.append(
            _Pool(
                name=name,
                select=group.select,
                engine=Counter(engine.engine for engine in group.engines).most_common(1)[0][0],
                model=models[0] if models else "unknown",
                models=models,
                gpu_models=cards,
                gpu_type=_gpu_type(cards[0]) if cards else UNKNOWN_GPU,
                gpus_per_replica=max(engine.gpus for engine in group.engines),
                seen=len({_replica(one, rank) for rank, one in enumerate(labels)}),
            )
        )
    return pools


def _replica(labels: Mapping[str, str], rank: int) -> tuple[str, ...]:
    pod, instance = _first(labels, POD), labels.get("instance", "")
    return (_first(labels, NAMESPACE), pod or instance) if pod or instance else ("", str(rank))


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _device(labels: Mapping[str, str]) -> tuple[str, ...]:
    host = labels.get("Hostname") or labels.get("hostname") or ""
    return labels.get("UUID") or f"{host}/{labels.get('gpu', '')}", labels.get("GPU_I_ID", "")


def _slice(labels: Mapping[str, str]) -> str:
    return f"MIG {labels['GPU_I_PROFILE']}" if labels.get("modelName") and labels.get("GPU_I_PROFILE") else ""


def _gpu_type(model: str) -> str:
    card = hardware.find(model)
    return card.name if card else re.sub(r"[^A-Za-z0-9._]+", "-", model).strip("-")[:100] or UNKNOWN_GPU


def _slug(*words: str, otherwise: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")[:60].rstrip("-") or otherwise


def _fresh(wishes: list[str], taken: set[str]) -> str:
    numbered = (f"{wishes[0]}-{number}" for number in range(2, len(taken) + 3))
    name = next(name for name in [*wishes, *numbered] if name not in taken)
    taken.add(name)
    return name


# ------------------------------------------------------------------------------------------------------------- writing


_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def _yaml(text: str) -> str:
    """The text as a YAML scalar on one line, whatever is in it; plain only where every reader takes it for text."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_/.-]*", text) and text.lower() not in _WORDS:
        return text
    whole = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return str(yaml.safe_dump(whole, default_style='"', allow_unicode=True, width=10**9)).strip()


def _head(found: tuple[FoundEngine, ...], pools: list[_Pool], url: str) -> list[str]:
    seen = f"{_count(sum(pool.seen for pool in pools), 'replica')} in {_count(len(pools), 'pool')}"
    lines = [
        f"# A policy to start from, written from {seen}.",
        '# Read every line marked "check"; then let `trimtab check` say whether the file is in order.',
        "version: 1",
        "mode: recommend # observe, recommend or act: Trimtab only says what it would do until you choose act",
        "telemetry:",
        f"  prometheus: {{url: {_yaml(url)}}}",
    ]
    own = [_most(found, names) for names in (NAMESPACE, POD)]
    if own != ["namespace", "pod"]:
        lines.append("  # What your scrape configuration calls the labels that name a replica.")
        lines.append(f"  labels: {{namespace: {own[0]}, pod: {own[1]}}}")
    return lines


def _most(found: tuple[FoundEngine, ...], names: tuple[str, ...]) -> str:
    carried = [sum(bool(dict(engine.labels).get(name)) for engine in found) for name in names]
    return names[carried.index(max(carried))]


def _gpus(pools: list[_Pool]) -> list[str]:
    lines = ["gpus: # check: how many GPUs of a type there are for these pools, and what you pay for one"]
    needs: Counter[str] = Counter()
    for pool in pools:
        needs[pool.gpu_type] += pool.replicas_max * max(pool.gpus_per_replica, 1)
    for gpu_type, count in needs.items():
        if gpu_type == UNKNOWN_GPU:
            lines.append(
                "  # check: no DCGM series names these engines' GPUs. Write their type here and in the pools below:"
            )
            lines.append(f"  # {', '.join(card.name for card in hardware.CATALOGUE)}")
        elif hardware.find(gpu_type) is None:
            lines.append(
                "  # check: this type is not in the catalogue; add memory_gib, bandwidth_gb_per_s, dense_tflops."
            )
        lines.append(f"  {_yaml(gpu_type)}: {{count: {min(count, 1_000_000)}, usd_per_gpu_hour: 1.00}}")
    return lines


def _services(pools: list[_Pool]) -> list[str]:
    lines = ["services: # what clients call; one for each model, which may have several pools"]
    names: set[str] = set()
    by_model: dict[str, list[_Pool]] = defaultdict(list)
    for pool in pools:
        by_model[pool.model].append(pool)
    for model, serving in by_model.items():
        lines += [
            f"  {_yaml(_fresh([_slug(model, otherwise='service')], names))}:",
            "    # check: what you promise. Seconds to the first token and per token, at this percentile of calls.",
            "    slo: {ttft_s: 2.0, tpot_s: 0.05, percentile: 95, task_success: 0.99}",
            "    target: agents # check: interactive (latency first), agents (balanced) or batch (cost first)",
            f"    pools: [{', '.join(_yaml(pool.name) for pool in serving)}]",
        ]
    return lines


def _pool_lines(pools: list[_Pool]) -> list[str]:
    lines = ["pools:"]
    for pool in pools:
        select = ", ".join(f"{name}: {_yaml(value)}" for name, value in pool.select.items())
        lines += [f"  {_yaml(pool.name)}:", f"    select: {{{select}}} # the labels of its engines' series"]
        lines.append(f"    engine: {pool.engine}")
        if len(pool.models) > 1:
            names = ", ".join(quoted(model) for model in pool.models[1:6])
            lines.append(f"    # check: its engines serve other models too ({names}); a pool should have one.")
        lines += [*_model_lines(pool.model), *_gpu_lines(pool)]
        lines.append(f"    replicas: {{min: 1, max: {pool.replicas_max}}} # {pool.seen} seen; check both limits")
        lines.append("    # To let Trimtab act: scale: {kind: Deployment, namespace: default, name: its-deployment}")
    return lines


def _model_lines(model: str) -> list[str]:
    parameters, precision = _parameters(model), _precision(model)
    if parameters is None:
        comment = (
            "    # check: add parameters (the active ones, such as 8.0e9) and correct precision, to know its capacity."
        )
        return [comment, f"    model: {{name: {_yaml(model)}, precision: {precision}}}"]
    comment = "    # check: parameters (the active ones) and precision are guessed from the name."
    figure = f"{parameters / 1e9:.12g}"
    figure = f"{figure if '.' in figure else f'{figure}.0'}e9"
    return [comment, f"    model: {{name: {_yaml(model)}, parameters: {figure}, precision: {precision}}}"]


def _gpu_lines(pool: _Pool) -> list[str]:
    lines = []
    if len(pool.gpu_models) > 1:
        names = ", ".join(quoted(model) for model in pool.gpu_models[1:6])
        lines.append(f"    # check: its engines run on other GPUs too ({names}); a pool should have one type.")
    count = "" if pool.gpus_per_replica else " # check: how many GPUs one replica holds is not known"
    lines.append(f"    gpu: {{type: {_yaml(pool.gpu_type)}, per_replica: {max(pool.gpus_per_replica, 1)}}}{count}")
    return lines


def _parameters(model: str) -> float | None:
    """The number in names like llama-3.3-70b, the active ones in names like qwen3-30b-a3b; None for 8x7b."""
    name = model.lower()
    active = re.search(r"(?<![a-z0-9.])a(\d{1,4}(?:\.\d{1,3})?)b(?![a-z0-9])", name)
    whole = re.search(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d{1,3})?)b(?![a-z0-9])", name)
    found = active or whole
    return float(found.group(1)) * 1e9 or None if found else None


def _precision(model: str) -> str:
    """The precision that a model's name tells of; engines load most others in bf16."""
    name = model.lower()
    for precision, signs in (
        ("fp8", "fp8"),
        ("fp4", "fp4"),
        ("int4", "int4|awq|gptq|w4a16"),
        ("int8", "int8|w8a8|w8a16"),
    ):
        if re.search(signs, name):
            return precision
    return "bf16"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
