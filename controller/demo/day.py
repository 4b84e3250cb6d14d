"""Plays a day on the plant, with or without Trimtab, and keeps what was seen of it, minute by minute.

All runs get the same arrivals, burst and loss. Without Trimtab the plant does what a cluster does by itself: it
replaces lost replicas wherever there is a place. With it, the daemon's own loop runs in act mode over the plant's
telemetry, every 15 s, with the policy of the scenario and no other setting; it begins with the fleet for the mean load
and without any memory.

What is kept is read from the plant's own counters, not from the telemetry that the loop sees. A minute's share within
the SLO is that of the calls that ended in it, answered or not (refused, timed out, cut off): a call counts where its
first token came within the SLO's time and its answer was whole. A fleet is out of its SLO from a minute below `GOAL`
until five minutes in a row are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import numpy as np

from controller import loop
from controller.adapters.simulated import EPOCH_S, SimulatedFleet, loaded_policy_of
from controller.decisions import TickRecord
from controller.demo.scenario import MINUTE_S, NAMES, DayOf, Sizing, services
from controller.demo.story import Story, Told, ToldKind
from controller.errors import TrimtabError
from controller.histogram import histogram, quantile
from controller.metrics import Metrics
from models.fleetsim import world as w
from models.fleetsim.plant import WITHOUT_GPUS, Plant

GOAL = 0.95
STEADY = 5
"""So many good minutes in a row end a time out of the SLO."""
SCRAPE_S = 15.0
PATIENCE_S = 600.0
"""A tick may wait so long for the plant, on any machine: a slow one must not look like an outage of telemetry."""
ENDINGS = ("limited", "overflowed", "refused", "unroutable", "timed_out", "cut", "lost", "finished")


class Side(StrEnum):
    """Which run: a fixed fleet for the peak, a fixed one for the mean, or Trimtab, which begins with the latter."""

    PEAK = "peak"
    MEAN = "mean"
    TRIMTAB = "trimtab"


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of a run, which ends at at_s (virtual s). Per pool, in the scenario's order: ready, held, $ so far.

    calls: sent, ended, in_slo (of those that ended), finished; ttft_p95_s over first tokens that came, None without
    any; hit_ratio over prompts that were looked up, None without any; usd is since the start.
    """

    at_s: float
    sent: int
    ended: int
    in_slo: int
    finished: int
    ttft_p95_s: float | None
    hit_ratio: float | None
    ready: tuple[int, ...]
    held: tuple[int, ...]
    usd: float

    @property
    def good_share(self) -> float:
        """Share of the calls that ended within the SLO (0-1); 1 where none ended."""
        return self.in_slo / self.ended if self.ended else 1.0


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of one kind that ended."""

    kind: str
    succeeded: int
    failed: int


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool's GPU-hours of the whole day, and what one costs."""

    name: str
    gpu_hours: float
    usd_per_gpu_h: float


@dataclass(frozen=True, slots=True)
class Run:
    """All that was seen of one run."""

    side: Side
    minutes: tuple[Minute, ...]
    tasks: tuple[Tasks, ...]
    pools: tuple[Pool, ...]
    told: tuple[Told, ...]
    ticks: int


Heard = Callable[[float, tuple[Told, ...]], None]
"""Hears, as a run goes on, of the virtual seconds that have passed, and of what there is to tell since last time."""


class Gauge:
    """Reads a plant at the end of every minute."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._counts = self._total()
        self._ttft = np.zeros_like(plant.world.ttft_counts)
        self._hits = np.zeros((len(plant.world.replicas), 2))
        self._process_s = plant.world.replicas["process_s"].copy()

    def read(self) -> Minute:
        """What happened since the last reading."""
        plant, before = self._plant, self._counts
        plant.settle()
        self._counts = self._total()
        calls = {name: round(self._counts[name] - before[name]) for name in before}
        fresh = plant.world.replicas["process_s"] != self._process_s
        self._process_s = plant.world.replicas["process_s"].copy()
        ttft = self._since(self._ttft, plant.world.ttft_counts, fresh)
        lookups = np.stack((plant.world.replicas["prefix_hits"], plant.world.replicas["prefix_queries"]), axis=1)
        hits, queries = self._since(self._hits, lookups, fresh)
        bounds = zip((*w.TTFT_BOUNDS, math.inf), np.cumsum(ttft).tolist(), strict=True)
        whole = histogram(tuple(bounds))
        return Minute(
            at_s=plant.now_s,
            sent=calls["sent"],
            ended=sum(calls[name] for name in ENDINGS),
            in_slo=calls["in_slo"],
            finished=calls["finished"],
            ttft_p95_s=quantile(whole, 0.95) if whole is not None else None,
            hit_ratio=float(hits / queries) if queries > 0 else None,
            ready=tuple(plant.count(pool.name, w.READY) for pool in plant.pools),
            held=tuple(self._held(pool.name) for pool in plant.pools),
            usd=sum(pool.gpu_hours * pool.usd_per_gpu_h for pool in pools_of(plant)),
        )

    def _total(self) -> dict[str, float]:
        counts = self._plant.world.counts
        return {name: float(counts[name].sum()) for name in ("sent", "in_slo", *ENDINGS)}

    def _held(self, pool: str) -> int:
        states = self._plant.world.replicas["state"][self._plant.members(pool)]
        return int((~np.isin(states, WITHOUT_GPUS)).sum())

    @staticmethod
    def _since(before: w.Shares, now: w.Shares, fresh: w.Rows) -> w.Shares:
        """Increase of counters per replica, summed; those of a new process began at zero. `before` becomes `now`."""
        increase: w.Shares = (now - np.where(fresh[:, None], 0.0, before)).sum(axis=0)
        before[:] = now
        return increase


def pools_of(plant: Plant) -> tuple[Pool, ...]:
    """GPU-hours of each pool until now: of every place, the seconds in which a replica held its GPUs."""
    found = []
    for pool in plant.pools:
        rows = plant.world.replicas[plant.members(pool.name)]
        open_s = np.where(np.isin(rows["state"], WITHOUT_GPUS), 0.0, plant.now_s - rows["held_since_s"])
        held_s = float((rows["held_s"] + open_s).sum())
        found.append(Pool(pool.name, held_s / 3600 * pool.hardware.gpus, pool.hardware.usd_per_gpu_h))
    return tuple(found)


def tasks_of(plant: Plant) -> tuple[Tasks, ...]:
    """Tasks that ended, by kind."""
    found = []
    for place, profile in enumerate(plant.profiles):
        tallies = plant.world.tallies[:, :, place]
        succeeded, failed = round(tallies["succeeded"].sum()), round(tallies["failed"].sum())
        found.append(Tasks(NAMES.get(profile.name, profile.name), succeeded, failed))
    return tuple(found)


def sizing_of(side: Side) -> Sizing:
    """What the fleet that a run begins with is sized for."""
    return Sizing.PEAK if side is Side.PEAK else Sizing.MEAN


class Course:
    """A run under way: one side's plant, its minutes so far, and what there was to tell."""

    def __init__(self, side: Side, day: DayOf, heard: Heard | None = None) -> None:
        self.plant = Plant(services(day, sizing_of(side)), day.seed)
        self.side = side
        self._day = day
        self._heard = heard
        self._gauge = Gauge(self.plant)
        self._lost: list[int] = []
        self._minutes: list[Minute] = []
        self._told: list[Told] = []
        self._fresh: list[Told] = []
        self._good_minutes = STEADY
        self._story = Story()

    def play(self) -> Run:
        """The whole day. Raises TrimtabError where more is alive at once than the plant has room for."""
        try:
            match self.side:
                case Side.PEAK | Side.MEAN:
                    self._alone()
                case Side.TRIMTAB:
                    self._steered()
                case _:
                    assert_never(self.side)
        except IndexError as error:
            raise TrimtabError(
                f"after {self.plant.now_s:.0f} s the simulated fleet has more calls at once than it has room for; "
                "start again with another --seed."
            ) from error
        return Run(
            self.side,
            tuple(self._minutes),
            tasks_of(self.plant),
            pools_of(self.plant),
            tuple(self._told),
            self._story.ticks,
        )

    def _alone(self) -> None:
        loss = self._day.loss
        stops = {*np.arange(0.0, self._day.length_s + 1, MINUTE_S).tolist(), loss.start_s, loss.end_s}
        for stop_s in sorted(stops):
            self.plant.run(stop_s)
            self._pass()

    def _steered(self) -> None:
        loaded = loaded_policy_of(self.plant.services)
        fleet = SimulatedFleet(self.plant, loaded.policy, scrape_s=SCRAPE_S)
        metrics = Metrics()
        shown = loop.Shown(metrics, lambda _: ())
        daemon = loop.Loop(
            loop.Ports(fleet.clock, fleet, fleet.fleet, fleet), loaded, lambda _: fleet, metrics, shown, PATIENCE_S
        )

        def listen(record: TickRecord) -> None:
            self._tell(*self._story.tell(record))
            self._pass()
            if self.plant.now_s >= self._day.length_s:
                fleet.clock.stop()

        daemon.run(listen=listen)

    def _pass(self) -> None:
        """What is due at this moment: a loss, its end, a minute's reading."""
        now_s, loss = self.plant.now_s, self._day.loss
        if now_s == loss.start_s:
            self._lost = self.plant.places(loss.pool, zone=0)
            self.plant.lose(self._lost)
        if now_s == loss.end_s:
            self.plant.restore(self._lost)
        if now_s > 0 and now_s % MINUTE_S == 0:
            self._minutes.append(self._gauge.read())
            self._judge(self._minutes[-1])
        if self._heard is not None:
            self._heard(now_s, tuple(self._fresh))
        self._fresh = []

    def _judge(self, minute: Minute) -> None:
        at_s, good = EPOCH_S + minute.at_s, minute.good_share >= GOAL
        words = f"{minute.good_share:.1%} of calls within the SLO"
        if not good and self._good_minutes >= STEADY:
            self._tell(Told(at_s, ToldKind.ALARM, "callers", words))
        self._good_minutes = self._good_minutes + 1 if good else 0
        if self._good_minutes == STEADY and len(self._minutes) > STEADY:
            self._tell(Told(at_s, ToldKind.OVER, "callers", f"{words}, for {STEADY} minutes"))

    def _tell(self, *told: Told) -> None:
        self._told.extend(told)
        self._fresh.extend(told)
