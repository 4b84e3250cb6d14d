"""What a move was said to do, against what it did: TTFT, TPOT, hit rate and cost five minutes later.

    python -m bench.predict [--quick] [--json FILE]

A service with two pools, a fast and a slow one, runs for 25 minutes under the controller's eyes only. Then the world is
copied: one copy goes on as it is, the others each get one random move (a replica more or less, other weights, a limit
on new tasks, the loss of a replica or of a node), and both go on until five minutes after the replicas are as they
should be. Each copy is played four times with other chances, because the p95 of four minutes of one run says little.
Change: mean ln(with the move) - mean ln(without), over 240 s around that moment; for hits a difference. Loads, mixes,
pools and moves are random. The plant shares no formula with what predicts.

still     what is left to chance: copies without a move against others without one; a change counts as one where it is
          larger than 90 % of theirs, and than two standard errors of its own copies
sign      of the changes that count, the share that was said with the right sign (a prediction of no
          change is wrong), away from saturation: where 90 % of the pool's first tokens are in time in both copies
error     median of |predicted - true| over all changes away from saturation; "none" is the error of saying: no change.
          A pool that is said to be full after the move is said to get slower without end

Goal: sign >= 90 %. Nothing was tuned on these worlds.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.arguments import writable
from controller import observe, whatif
from controller.adapters.simulated import EPOCH_S, SimulatedFleet, policy_of
from controller.decisions import ControllerState
from controller.loads import known
from controller.observations import PoolObservation, ReplicaState
from controller.policy import FleetPolicy
from controller.pools import model_pool, model_slo
from controller.step import step
from models.fleetsim.chance import seeded
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import A100_X4, CHAT, COPILOT, H100_X4, RESEARCH, PoolOf, Profile, ServiceOf, Starts
from models.predict import Allocation, Clients, Part, Place, Prediction, predict, present
from models.types import Unknown

TICK_S = 15.0
LEARN_S = 1500.0
HALF_WINDOW_S = 120.0
WORLDS = 20
MOVES = 10
STILL = 2
COPIES = 4
NAMES = ("ttft", "tpot", "hits", "usd")
FAST, SLOW = "fast", "slow"


class Kind(StrEnum):
    """What is done to the fleet."""

    MORE = "a replica more"
    FEWER = "a replica less"
    WEIGHTS = "other weights"
    ADMISSION = "a limit on new tasks"
    REPLICA = "a replica lost"
    NODE = "a node lost"
    STILL = "nothing"


@dataclass(frozen=True, slots=True)
class Deed:
    """One move: replicas of both pools after it, weight of the fast one, admitted share of new tasks."""

    kind: Kind
    pool: str = FAST
    replicas: int = 0
    weight: float = 0.5
    admitted: float = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity of one pool: what was said, what was, its standard error, and whether it was far from saturation."""

    kind: Kind
    name: str
    said: float | None
    true: float
    error: float
    calm: bool


Cell = Callable[[list[Change]], str]


@dataclass(frozen=True, slots=True)
class World:
    """One random service and its moves."""

    number: int
    moves: int
    still: int


@dataclass(frozen=True, slots=True)
class _Scene:
    """A world at the moment of the moves."""

    fleet: SimulatedFleet
    policy: FleetPolicy
    parts: tuple[Part, ...]
    service: ServiceOf


def service_of(chance: random.Random) -> ServiceOf:
    """A service with random pools, calls and load."""
    chat, copilot, research = (chance.uniform(0.2, 1.0) for _ in range(3))
    profiles: tuple[Profile, ...] = (
        replace(CHAT, share=chat),
        replace(COPILOT, share=copilot),
        replace(RESEARCH, share=0.2 * research),
    )
    share = sum(profile.share for profile in profiles)
    calls_per_task = sum(profile.share * profile.steps_mean for profile in profiles) / share
    fast, slow = chance.randint(2, 6), chance.randint(2, 6)
    starts = Starts(5.0, 10.0, 10.0, 5.0)
    weight = chance.uniform(0.4, 0.8)
    # A replica carries five to eight such calls/s on the fast cards and about a quarter of that on the slow ones.
    calls_per_s = chance.uniform(0.15, 0.85) * min(5.0 * fast / weight, 1.5 * slow / (1 - weight))
    return ServiceOf(
        "assistant",
        (
            PoolOf(FAST, H100_X4, fast, fast + 2, starts=starts, weight=weight, nodes=2),
            PoolOf(SLOW, A100_X4, slow, slow + 2, starts=starts, weight=1 - weight, nodes=2),
        ),
        (calls_per_s / calls_per_task,),
        profiles=profiles,
    )


def deeds(service: ServiceOf, chance: random.Random, count: int) -> list[Deed]:
    """Random moves, each kind as likely."""
    made = []
    for _ in range(count):
        kind = chance.choice([kind for kind in Kind if kind is not Kind.STILL])
        pool = chance.choice(service.pools)
        weight, admitted, replicas = service.pools[0].weight, 1.0, pool.replicas
        match kind:
            case Kind.MORE:
                replicas += chance.randint(1, 2)
            case Kind.FEWER | Kind.REPLICA:
                replicas -= 1
            case Kind.NODE:
                replicas -= (pool.replicas + 1) // 2
            case Kind.WEIGHTS:
                weight = min(max(weight + chance.choice((-1, 1)) * chance.uniform(0.1, 0.3), 0.1), 0.9)
            case Kind.ADMISSION:
                admitted = chance.uniform(0.4, 0.8)
        made.append(Deed(kind, pool.name, replicas, weight, admitted))
    return made


def play(world: World) -> list[Change]:
    """Learn, copy, move, compare."""
    chance = random.Random(9000 + world.number)
    scene = _learnt(service_of(chance), world.number)
    if scene is None:
        return []
    wanted = deeds(scene.service, chance, world.moves) + [Deed(Kind.STILL)] * world.still
    untouched: dict[float, list[dict[str, PoolObservation]]] = {}
    changes = []
    for number, deed in enumerate(wanted):
        wait_s = _wait_s(scene, deed)
        if wait_s not in untouched:
            untouched[wait_s] = _played(scene, Deed(Kind.STILL), wait_s, 0)
        changes += _compared(scene, deed, untouched[wait_s], _played(scene, deed, wait_s, number + 1))
    return changes


def _learnt(service: ServiceOf, seed: int) -> _Scene | None:
    policy = policy_of((service,), mode="observe")
    fleet = SimulatedFleet(Plant((service,), seed), policy, scrape_s=TICK_S)
    state, window_s = ControllerState(), policy.telemetry.window_s
    for tick in range(1, int(LEARN_S / TICK_S) + 1):
        now_s = EPOCH_S + tick * TICK_S
        snapshot = fleet.read(now_s, window_s if tick < LEARN_S / TICK_S else 2 * HALF_WINDOW_S, 1.0)
        if tick * TICK_S >= 2 * window_s:
            observation = observe.build(policy, state, snapshot, fleet.cluster(), now_s)
            state, _ = step(policy, state, observation)
    memories = {memory.name: memory for memory in state.pools}
    parts = []
    for pool in observation.pools:
        memory = memories[pool.name]
        load = memory.load or Unknown("nothing was served")
        slo = model_slo(policy.services[service.name].slo)
        known_pool = model_pool(policy, pool.name, service.name)
        parts.append(whatif.part_of(known_pool, slo, pool, load, memory.estimate))
    return _Scene(fleet, policy, tuple(parts), service)


def _wait_s(scene: _Scene, deed: Deed) -> float:
    """Seconds until five minutes after its replicas are as wanted."""
    starts = scene.service.pools[0].starts
    began_s = starts.schedule_s + starts.pull_s + starts.load_s + starts.compile_s
    waits_s = {Kind.MORE: began_s, Kind.FEWER: starts.drain_s}
    return waits_s.get(deed.kind, 0.0) + whatif.SETTLED_S


def _played(scene: _Scene, deed: Deed, wait_s: float, number: int) -> list[dict[str, PoolObservation]]:
    """What is seen of each copy, over the window around that moment."""
    now_s = EPOCH_S + LEARN_S + wait_s + HALF_WINDOW_S
    looks = []
    for copy in range(COPIES):
        fleet = scene.fleet.fork()
        fleet.plant.world.random[:] = seeded(100 * number + copy)
        _make(scene, deed, fleet.plant)
        snapshot = fleet.read(now_s, 2 * HALF_WINDOW_S, 1.0)
        observation = observe.build(scene.policy, ControllerState(), snapshot, fleet.cluster(), now_s)
        looks.append({pool.name: pool for pool in observation.pools})
    return looks


def _make(scene: _Scene, deed: Deed, plant: Plant) -> None:
    match deed.kind:
        case Kind.WEIGHTS:
            plant.set_weight(FAST, deed.weight)
            plant.set_weight(SLOW, 1 - deed.weight)
        case Kind.ADMISSION:
            rate = deed.admitted * scene.service.tasks_per_s[0]
            for attempt in range(plant.world.buckets.shape[3]):
                plant.limit(0, 0, 0, attempt, rate if attempt == 0 else 0.0)
        case Kind.REPLICA | Kind.NODE:
            places = plant.members(deed.pool)
            lost = places[:1] if deed.kind is Kind.REPLICA else plant.places(deed.pool, node=0)
            plant.scale(deed.pool, deed.replicas)
            plant.lose(lost)
        case Kind.MORE | Kind.FEWER:
            plant.scale(deed.pool, deed.replicas)
        case Kind.STILL:
            pass


def _compared(
    scene: _Scene, deed: Deed, without: list[dict[str, PoolObservation]], moved: list[dict[str, PoolObservation]]
) -> list[Change]:
    now, clients = present(scene.parts), whatif.clients_of(scene.policy.services[scene.service.name].clients)
    before = _said(scene, now, clients)
    after = _said(scene, _allocation(scene, deed, now), clients)
    changes = []
    for part, first, then in zip(scene.parts, before, after, strict=True):
        calm, true = _true(part, *([look[part.pool.name] for look in looks] for looks in (without, moved)))
        changes += [Change(deed.kind, name, _told(name, first, then), *true[name], calm) for name in true]
    return changes


def _said(scene: _Scene, allocation: Allocation, clients: Clients) -> tuple[Prediction | Unknown, ...]:
    return predict(scene.parts, allocation, clients, whatif.SETTLED_S)


def _allocation(scene: _Scene, deed: Deed, now: Allocation) -> Allocation:
    places = []
    for part, place in zip(scene.parts, now.places, strict=True):
        replicas = deed.replicas if deed.pool == part.pool.name and deed.replicas else place.replicas
        weight = place.weight
        if deed.kind is Kind.WEIGHTS:
            # Shares of calls are as they are measured: weights change them by the factor by which they change.
            first = scene.service.pools[0].weight
            old, new = (first, deed.weight) if part.pool.name == FAST else (1 - first, 1 - deed.weight)
            weight *= new / old
        places.append(Place(replicas, weight))
    return Allocation(tuple(places), deed.admitted)


def _told(name: str, before: Prediction | Unknown, after: Prediction | Unknown) -> float | None:
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        return None
    if name == "hits":
        return after.hit_ratio - before.hit_ratio
    if after.full and not before.full and name != "usd":
        return math.inf
    pairs = {
        "ttft": (before.ttft_s, after.ttft_s),
        "tpot": (before.tpot_s, after.tpot_s),
        "usd": (before.usd_per_call, after.usd_per_call),
    }
    one, other = pairs[name]
    return math.log(other / one) if one and other else None


def _true(
    part: Part, without: list[PoolObservation], moved: list[PoolObservation]
) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Whether all of it was far from saturation, and the changes, with standard errors, of what every copy knows."""
    shares = [known(pool.ttft_good_ratio) or 0.0 for pool in (*without, *moved)]
    values: dict[str, tuple[float, float]] = {}
    for name in NAMES:
        one, other = ([_value(part, pool, name) for pool in looks] for looks in (without, moved))
        before, after = [value for value in one if value is not None], [value for value in other if value is not None]
        if len(before) == len(after) == COPIES:
            error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / COPIES)
            values[name] = statistics.mean(after) - statistics.mean(before), error
    return min(shares) >= 0.9, values


def _value(part: Part, pool: PoolObservation, name: str) -> float | None:
    """One quantity of one copy, as its logarithm; hits as they are."""
    if name == "hits":
        return known(pool.hit_ratio)
    readings = {"ttft": known(pool.ttft_s), "tpot": known(pool.itl_s), "usd": _usd_per_call(part, pool)}
    value = readings[name]
    return math.log(value) if value else None


def _usd_per_call(part: Part, pool: PoolObservation) -> float | None:
    served, good = known(pool.served_calls_per_s), known(pool.ttft_good_ratio)
    if not served or not good:
        return None
    usd_per_s = part.pool.usd_per_gpu_h * part.pool.gpus_per_replica / 3600
    return usd_per_s * pool.count(ReplicaState.SERVING) / (served * good)


def borders(changes: list[Change]) -> dict[str, float]:
    """From which size on a change is one: nine of ten changes of copies without a move are smaller."""
    found = {}
    for name in NAMES:
        sizes = sorted(abs(one.true) for one in changes if one.kind is Kind.STILL and one.name == name and one.calm)
        found[name] = sizes[math.ceil(0.9 * len(sizes)) - 1] if sizes else 0.0
    return found


def sign(group: list[Change], border: dict[str, float]) -> tuple[float, int]:
    """Share with the right sign of the changes beyond the border, and how many these are."""
    real = [one for one in group if abs(one.true) > max(border[one.name], 2 * one.error)]
    right = sum(one.said is not None and one.said * one.true > 0 and abs(one.said) > 1e-3 for one in real)
    return (right / len(real) if real else math.nan), len(real)


def shown(changes: list[Change], cell: Cell, title: str) -> Table:
    """One table by kind of move and by quantity, away from saturation."""
    table = Table(title=title, width=100)
    table.add_column("move")
    for name in ("TTFT", "TPOT", "hits", "$ per good call"):
        table.add_column(name, justify="right")
    calm = [one for one in changes if one.kind is not Kind.STILL and one.calm]
    for kind in (*(kind for kind in Kind if kind is not Kind.STILL), None):
        rows = [[one for one in calm if one.name == name and (kind is None or one.kind is kind)] for name in NAMES]
        table.add_row(
            "all" if kind is None else kind.value,
            *(cell(group) if group else "" for group in rows),
            end_section=kind is Kind.NODE,
        )
    return table


def _signs(group: list[Change], border: dict[str, float]) -> str:
    share, count = sign(group, border)
    return f"{share:.0%} of {count}" if count else "none moved"


def _errors(group: list[Change]) -> str:
    return f"{_error(group):.3f} ({_none(group):.3f})"


def _error(group: list[Change]) -> float:
    return statistics.median(abs((one.said or 0.0) - one.true) for one in group)


def _none(group: list[Change]) -> float:
    return statistics.median(abs(one.true) for one in group)


def main() -> None:
    """Print the table; write JSON where asked."""
    arguments = argparse.ArgumentParser(description="What a move was said to do, against what it did.")
    arguments.add_argument("--quick", action="store_true", help="four worlds, five moves each")
    arguments.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    chosen = arguments.parse_args()
    worlds = [World(n, 5, 1) for n in range(4)] if chosen.quick else [World(n, MOVES, STILL) for n in range(WORLDS)]
    errors = Console(stderr=True)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        played = track(pool.imap_unordered(play, worlds), "worlds", total=len(worlds), console=errors)
        changes = sorted((one for group in played for one in group), key=repr)
    moved = [one for one in changes if one.kind is not Kind.STILL]
    calm, border = [one for one in moved if one.calm], borders(changes)
    share, count = sign(calm, border)
    full, many = sign([one for one in moved if not one.calm], border)
    console = Console(width=100)
    console.print(
        shown(changes, lambda group: _signs(group, border), "Changes said with the right sign, away from saturation")
    )
    console.print(shown(changes, _errors, "Median error of the change (error of saying: none)"))
    console.print("Borders: " + ", ".join(f"{name} {border[name]:.3f}" for name in NAMES) + " (ln, hits as they are).")
    console.print(f"Sign right away from saturation: {share:.1%} of {count} changes (goal 90 %).")
    console.print(f"Near saturation: {full:.1%} of {many} changes. {sum(one.said is None for one in moved)} unknown.")
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}.")
    if chosen.json:
        figures = {
            "sign_right": share,
            "changes": count,
            "sign_right_near_saturation": full,
            "error": {name: _error([one for one in calm if one.name == name]) for name in NAMES},
            "error_of_no_change": {name: _none([one for one in calm if one.name == name]) for name in NAMES},
        }
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
