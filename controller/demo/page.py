"""The demo's report: one HTML file that needs no network, with the runs overlaid and the day's events marked.

Plots over the day's clock: calls sent and answered, ready replicas of each pool, calls within the SLO, TTFT p95 against
the SLO, prefix hit rate, and what was spent. The table is the terminal's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from controller.adapters.simulated import EPOCH_S
from controller.demo.day import GOAL, Minute, Run, Side
from controller.demo.scenario import DayOf, Sizing, services
from controller.demo.story import ToldKind

MARK = "trimtab-demo-report"
"""What tells a report of ours from a file that must not be overwritten."""
COLOURS = {Side.PEAK: "#7a7a7a", Side.MEAN: "#c0651a", Side.TRIMTAB: "#1f6fb4"}
NAMES = {Side.PEAK: "fixed, for the peak", Side.MEAN: "fixed, for the mean", Side.TRIMTAB: "Trimtab"}
DASHES = ("solid", "dash", "dot")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em 1em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}p.intro{white-space:pre-line}li{margin:.1em 0}details{margin:1em 0}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what, and a cell for each run, in the order of `Side`."""

    what: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Panel:
    """One plot: its title, its unit, and a minute's value (None is a gap)."""

    title: str
    unit: str
    value: Callable[[Minute], float | None]


PANELS = (
    _Panel("Calls answered (dotted: calls sent)", "calls/s", lambda m: m.finished / 60),
    _Panel("Calls within the SLO", "%", lambda m: 100 * m.good_share),
    _Panel("TTFT p95 of first tokens that came (line: SLO)", "s", lambda m: m.ttft_p95_s),
    _Panel("Prefix cache hit rate", "%", lambda m: None if m.hit_ratio is None else 100 * m.hit_ratio),
    _Panel("Spent so far", "$", lambda m: m.usd),
)
POOLS_ROW = 2
"""Where the plot of replicas stands among the others, counted from 1."""


def html(runs: tuple[Run, ...], rows: tuple[Row, ...], day: DayOf, introduction: str) -> str:
    """The whole report."""
    head = "".join(f"<th>{NAMES[run.side]}</th>" for run in runs)
    table = "".join(
        f"<tr><td>{escape(row.what)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>"
        for row in rows
    )
    told = "".join(f"<li>{escape(line)}</li>" for run in runs for line in _lines(run))
    plot = figure(runs, day).to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{MARK}">'
        f"<title>Trimtab: a day with and without</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        f"<h1>A day with and without Trimtab</h1><p class=intro>{escape(introduction)}</p>"
        f"<table><tr><th></th>{head}</tr>{table}</table>"
        f"{plot}<details><summary>What happened, line by line</summary><ul>{told}</ul></details></body></html>\n"
    )


def figure(runs: tuple[Run, ...], day: DayOf) -> go.Figure:
    """Every panel, one above the other, over the day's clock."""
    titles = [panel.title for panel in PANELS]
    titles.insert(POOLS_ROW - 1, "Ready replicas (dashed: the slower pool)")
    count = len(titles)
    shown = make_subplots(rows=count, cols=1, shared_xaxes=True, vertical_spacing=0.035, subplot_titles=titles)
    for run in runs:
        _add_run(shown, run, day)
    for number, panel in enumerate(PANELS, 1):
        shown.update_yaxes(title_text=panel.unit, rangemode="tozero", row=_row(number), col=1)
    shown.update_yaxes(title_text="replicas", rangemode="tozero", row=POOLS_ROW, col=1)
    (service,) = services(day, Sizing.PEAK)
    shown.add_hline(y=100 * GOAL, line={"color": "#888", "width": 1}, row=_row(2), col=1)
    shown.add_hline(y=service.slo_ttft_s, line={"color": "#888", "width": 1}, row=_row(3), col=1)
    for start_s, end_s, word in (
        (day.burst.start_s, day.burst.end_s, "burst"),
        (day.loss.start_s, day.loss.end_s, "half a pool lost"),
    ):
        shown.add_vrect(x0=_at(start_s), x1=_at(end_s), fillcolor="#d33", opacity=0.08, line_width=0)
        shown.add_annotation(
            x=_at(start_s), y=1.0, yref="paper", yanchor="top", xanchor="left", text=word, showarrow=False
        )
    shown.update_layout(height=230 * count, template="plotly_white", hovermode="x unified", margin={"t": 60, "b": 40})
    shown.update_xaxes(tickformat="%H:%M")
    return shown


def _add_run(shown: go.Figure, run: Run, day: DayOf) -> None:
    clock = [_at(minute.at_s) for minute in run.minutes]
    colour = COLOURS[run.side]

    def line(row: int, values: list[float | None], name: str, dash: str, *, legend: bool = False) -> None:
        trace = go.Scatter(
            x=clock, y=values, name=name, mode="lines", showlegend=legend, line={"color": colour, "dash": dash}
        )
        shown.add_trace(trace, row=row, col=1)

    for number, panel in enumerate(PANELS, 1):
        values = [panel.value(minute) for minute in run.minutes]
        line(_row(number), values, NAMES[run.side], "solid", legend=number == 1)
    line(1, [minute.sent / 60 for minute in run.minutes], f"{NAMES[run.side]}, sent", "dot")
    (service,) = services(day, Sizing.PEAK)
    for place, pool in enumerate(service.pools):
        ready: list[float | None] = [float(minute.ready[place]) for minute in run.minutes]
        line(POOLS_ROW, ready, f"{NAMES[run.side]}, {pool.name}", DASHES[place % len(DASHES)])
    moves = [told for told in run.told if told.kind is ToldKind.MOVE]
    if moves:
        texts = [f"{told.target} {told.text}" for told in moves]
        places = [_at(told.at_s - EPOCH_S) for told in moves]
        marks = go.Scatter(
            x=places, y=[0.0] * len(moves), text=texts, name="moves", mode="markers", hoverinfo="text+x",
            marker={"symbol": "triangle-up", "color": colour, "size": 8},
        )  # fmt: skip
        shown.add_trace(marks, row=POOLS_ROW, col=1)


def _row(panel: int) -> int:
    """The row of a panel, counted from 1; the plot of replicas stands in between."""
    return panel if panel < POOLS_ROW else panel + 1


def _at(at_s: float) -> datetime:
    return datetime.fromtimestamp(EPOCH_S + at_s, UTC).replace(tzinfo=None)


def _lines(run: Run) -> list[str]:
    return [
        f"{_at(told.at_s - EPOCH_S):%H:%M:%S} {run.side.value}: {told.target}, {told.kind.value}, {told.text}"
        for told in run.told
    ]
