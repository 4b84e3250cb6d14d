"""What a move was said to do, against what it did: TTFT, TPOT, hit rate and cost five minutes later.

    python -m bench.predict [--quick] [--json FILE]

A service with two pools, a fast and a slow one, runs for 25 minutes under the controller's eyes only. Then the world is
copied: one copy goes on as it is, the others each get one random move (a replica more or less, other weights, a limit
on new tasks, the loss of a replica or of a node), and both go on until five minutes after the replicas are as they
should be. Change: ln(after with the move/after without), means over 240 s around that moment; for hits a difference.
Loads, mixes, pools and moves are random. The plant shares no formula with what predicts.

still     what is left to chance: copies that get no move but other chances; their changes' 90 % quantile is the border
          from which a change counts as one
sign      of the changes beyond that border, the share that was said with the right sign (a prediction of no
          change is wrong), away from saturation: where 90 % of the pool's first tokens are in time in both copies
error     median of |predicted - true| over all changes away from saturation; "none" is the error of saying: no change

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
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

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
PATIENCE_S = 600.0
WORLDS = 20
MOVES = 10
STILL = 2
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
    """One quantity of one pool: what was said, what was, and whether the pool was far from saturation."""

    kind: Kind
    name: str
    said: float | None
    true: float
    calm: bool


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
    untouched: dict[float, dict[str, PoolObservation]] = {}
    changes = []
    for number, deed in enumerate(wanted):
        twin, at_s = _moved(scene, deed, number)
        if at_s not in untouched:
            untouched[at_s] = _look(scene.fleet.fork(), scene.policy, at_s)
        changes += _compared(scene, deed, untouched[at_s], _look(twin, scene.policy, at_s))
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


def _moved(scene: _Scene, deed: Deed, number: int) -> tuple[SimulatedFleet, float]:
    """The copy with the move made, and the moment to look at it: five minutes after its replicas are as wanted."""
    twin = scene.fleet.fork()
    plant = twin.plant
    match deed.kind:
        case Kind.STILL:
            plant.world.random[:] = seeded(10_000 + number)
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
    at_s = EPOCH_S + LEARN_S
    if deed.kind in {Kind.MORE, Kind.FEWER}:
        pool = next(pool for pool in scene.service.pools if pool.name == deed.pool)
        starts = pool.starts
        began_s = starts.schedule_s + starts.pull_s + starts.load_s + starts.compile_s
        at_s += began_s if deed.kind is Kind.MORE else starts.drain_s
    return twin, at_s + whatif.SETTLED_S


def _look(fleet: SimulatedFleet, policy: FleetPolicy, at_s: float) -> dict[str, PoolObservation]:
    """Means over the window around that moment."""
    now_s = at_s + HALF_WINDOW_S
    snapshot = fleet.read(now_s, 2 * HALF_WINDOW_S, 1.0)
    observation = observe.build(policy, ControllerState(), snapshot, fleet.cluster(), now_s)
    return {pool.name: pool for pool in observation.pools}


def _compared(
    scene: _Scene, deed: Deed, without: dict[str, PoolObservation], moved: dict[str, PoolObservation]
) -> list[Change]:
    now, clients = present(scene.parts), whatif.clients_of(scene.policy.services[scene.service.name].clients)
    before = _said(scene, now, clients)
    after = _said(scene, _allocation(scene, deed, now), clients)
    changes = []
    for part, first, then in zip(scene.parts, before, after, strict=True):
        calm, true = _true(part, without[part.pool.name], moved[part.pool.name])
        changes += [Change(deed.kind, name, _told(name, first, then), true[name], calm) for name in true]
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
    pairs = {
        "ttft": (before.ttft_s, after.ttft_s),
        "tpot": (before.tpot_s, after.tpot_s),
        "usd": (before.usd_per_call, after.usd_per_call),
    }
    one, other = pairs[name]
    return math.log(other / one) if one and other else None


def _true(part: Part, without: PoolObservation, moved: PoolObservation) -> tuple[bool, dict[str, float]]:
    shares = [known(pool.ttft_good_ratio) for pool in (without, moved)]
    calm = all(share is not None and share >= 0.9 for share in shares)
    values = {}
    for name, reading in (("ttft", "ttft_s"), ("tpot", "itl_s")):
        one, other = known(getattr(without, reading)), known(getattr(moved, reading))
        if one and other:
            values[name] = math.log(other / one)
    hits = [known(pool.hit_ratio) for pool in (without, moved)]
    if hits[0] is not None and hits[1] is not None:
        values["hits"] = hits[1] - hits[0]
    prices = [_usd_per_call(part, pool) for pool in (without, moved)]
    if prices[0] and prices[1]:
        values["usd"] = math.log(prices[1] / prices[0])
    return calm, values


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
    real = [one for one in group if abs(one.true) > border[one.name]]
    right = sum(one.said is not None and one.said * one.true > 0 and abs(one.said) > 1e-3 for one in real)
    return (right / len(real) if real else math.nan), len(real)


def shown(changes: list[Change], border: dict[str, float]) -> Table:
    """Signs and errors by kind of move and by quantity, away from saturation."""
    table = Table(title="Predicted change against true change, away from saturation", width=100)
    table.add_column("move")
    for name in ("TTFT", "TPOT", "hits", "$ per good call"):
        table.add_column(f"{name}: sign (of)", justify="right")
        table.add_column("error, none", justify="right")
    for kind in (*(kind for kind in Kind if kind is not Kind.STILL), None):
        cells = []
        for name in NAMES:
            moved = [one for one in changes if one.kind is not Kind.STILL and one.name == name and one.calm]
            group = [one for one in moved if kind is None or one.kind is kind]
            share, count = sign(group, border)
            cells.append(f"{share:.0%} ({count})" if count else "(0)")
            cells.append(f"{_error(group):.2f}, {_none(group):.2f}" if group else "")
        table.add_row("all" if kind is None else kind.value, *cells, end_section=kind is Kind.NODE)
    return table


def _error(group: list[Change]) -> float:
    return statistics.median(abs((one.said or 0.0) - one.true) for one in group)


def _none(group: list[Change]) -> float:
    return statistics.median(abs(one.true) for one in group)


def main() -> None:
    """Print the table; write JSON where asked."""
    arguments = argparse.ArgumentParser(description="What a move was said to do, against what it did.")
    arguments.add_argument("--quick", action="store_true", help="four worlds, five moves each")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
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
    console.print(shown(changes, border))
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
