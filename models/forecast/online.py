"""One bin's turn: judge what was said, learn, and say it anew. The order of the stages, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.forecast import errors, experts
from models.forecast.errors import Said
from models.forecast.memory import EXPERTS, Array, Grid, Mask, Memory, Quantiles, Slots, layout, ring_slots
from models.forecast.weights import Statistics, regrets

EXPERT_DISCOUNT = 0.998
REGRESSION_PRIOR = 0.3
"""Regressions have to earn their weight: with few bins they fit noise."""
_PRIOR = np.ones(EXPERTS)
_PRIOR[-2:] = REGRESSION_PRIOR
_PRIOR /= _PRIOR.sum()


def start(grid: Grid, names: tuple[str, ...] = ()) -> Memory:
    """A memory of series that were never seen."""
    return Memory(grid, names, rows=_fresh(grid, len(names)).tobytes())


def with_series(memory: Memory, names: tuple[str, ...]) -> Memory:
    """The memory with exactly these series, in this order: known ones keep what was learnt, new ones start."""
    if names == memory.names:
        return memory
    rows = _fresh(memory.grid, len(names))
    old, place = memory.array(), {name: number for number, name in enumerate(memory.names)}
    for number, name in enumerate(names):
        if name in place:
            rows[number] = old[place[name]]
    return replace(memory, names=names, rows=rows.tobytes())


def update(memory: Memory, at_s: float, values: Array) -> Memory:
    """The memory after the bin that ended at `at_s` (Unix seconds), with one value per series.

    Values that are not finite or below 0 are unknown: their series keep what they know. Bins follow each other; the
    caller passes a bin without values where time has passed without any.
    """
    with np.errstate(all="ignore"):  # what overflows is infinite or NaN, and stays in its own row
        return _update(memory, at_s, values)


def _update(memory: Memory, at_s: float, values: Array) -> Memory:
    grid, tick = memory.grid, memory.ticks + 1
    rows = memory.array().copy()
    fields = layout(grid).views(rows)
    known = np.isfinite(values) & (values >= 0)
    value = np.where(known, values, 0.0)
    slots = ring_slots(grid, tick)
    spans = np.asarray(grid.horizons, np.float64)
    judged = known[:, None] & (fields["said_known"][:, slots] > 0)
    _judge_experts(fields, value, judged, slots)
    errors.learn(fields, _said(fields, slots), value, judged, spans)
    experts.regress(fields, fields["said_features"][:, slots], value, judged)
    experts.learn(fields, value, known)
    experts.learn_profile(fields, value, known, at_s, grid.bin_s)
    seen = experts.features(fields)
    opinions = experts.forecasts(fields, grid, at_s, seen)
    median = (_expert_statistics(fields).weights() * opinions).sum(axis=2)
    said = errors.say(fields, np.stack([median, opinions[..., 0]], axis=2))
    for name, now in (
        ("known", np.repeat((fields["seen"] > 0)[:, None], len(spans), axis=1)),
        ("features", np.repeat(seen[:, None], len(spans), axis=1)),
        ("experts", opinions),
        ("points", said.points),
        ("candidates", said.candidates),
        ("combined", said.combined),
        ("result", said.result),
    ):
        fields[f"said_{name}"][:, slots] = now
    return replace(memory, ticks=tick, at_s=at_s, rows=rows.tobytes())


def skip(memory: Memory, bins: int) -> Memory:
    """The memory after `bins` in which nothing at all was observed: nothing was said in them that could be judged."""
    if bins <= 0:
        return memory
    rows = memory.array().copy()
    said = layout(memory.grid).views(rows)["said_known"]
    for tick in range(memory.ticks + 1, memory.ticks + 1 + min(bins, memory.grid.horizons[-1])):
        said[:, ring_slots(memory.grid, tick)] = 0.0
    return replace(memory, ticks=memory.ticks + bins, rows=rows.tobytes())


def quantiles(memory: Memory) -> Quantiles:
    """The newest forecasts: for the ends of bins `ticks` + h."""
    fields, slots = layout(memory.grid).views(memory.array()), ring_slots(memory.grid, memory.ticks)
    known = fields["said_known"][:, slots, None] > 0
    newest = np.where(fields["seen"] > 0, fields["last"][:, 0], np.nan)
    return Quantiles(np.where(known, fields["said_result"][:, slots], np.nan), fields["judged"], newest)


def _fresh(grid: Grid, series: int) -> Array:
    rows = np.zeros((series, layout(grid).width))
    fields = layout(grid).views(rows)
    experts.prepare(fields)
    errors.prepare(fields)
    return rows


def _said(fields: dict[str, Array], slots: Slots) -> Said:
    names = ("said_points", "said_candidates", "said_combined", "said_result")
    return Said(*(fields[name][:, slots] for name in names))


def _judge_experts(fields: dict[str, Array], value: Array, judged: Mask, slots: Slots) -> None:
    opinions = fields["said_experts"][:, slots]
    median = fields["said_points"][:, slots, :1]
    regret = regrets(value[:, None, None], median, opinions, 0.5)
    _expert_statistics(fields).learn(regret, EXPERT_DISCOUNT, judged[..., None])


def _expert_statistics(fields: dict[str, Array]) -> Statistics:
    regret, variance, range_ = (fields[f"expert_{name}"] for name in ("regret", "variance", "range"))
    return Statistics(regret, variance, range_, _PRIOR, axis=2)
