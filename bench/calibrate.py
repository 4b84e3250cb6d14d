"""How far the plant is from real engines: fitted to one part of a capture, it predicts the rest; and beside NVIDIA's.

    python -m bench.calibrate [--quick] [--json FILE] [--capture FOLDER]

First: two real vLLM engines on a CPU (tests/data/vllm_cpu). Four constants of the plant's engine (seconds of a step,
for a computed token, for a running sequence; of the API server for a call) are fitted by least squares to the ramp and
the burst. With these the plant is run on the arrivals of the other loads, which the fit never sees: KV pressure,
steady load, and the kill and restart of one engine. Hit ratio, preemptions, queues and percentiles are fitted nowhere.
Aims: ITL and throughput within 10 %, TTFT within 25 %.

Second: the plant's H100 engine beside aiconfigurator (extra `bench`), which interpolates kernel times that NVIDIA
measured. Nothing is fitted there; its median errors are over the points shown.

Needs promtool. --quick replays each load once instead of six times and takes two points of aiconfigurator's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.arguments import writable
from bench.calibration import silicon
from bench.calibration.capture import LoadRun, Part, read
from bench.calibration.compare import Compared, Errors, errors, itl_p95_s, tokens_per_s, ttft_p95_s
from bench.calibration.fit import Fit, fit, mean_itl_s, mean_ttft_s, median_ttft_s
from bench.calibration.replay import mean_replay
from bench.calibration.silicon import Beside

CAPTURE = Path(__file__).resolve().parents[1] / "tests" / "data" / "vllm_cpu"
REPLAYS, QUICK_REPLAYS = 6, 1
FIT_REPLAYS, QUICK_FIT_REPLAYS = 3, 1
AIMS = {"itl": 0.10, "throughput": 0.10, "ttft": 0.25}
NAMES = {
    "itl": "ITL, mean",
    "itl_p95": "ITL, p95",
    "ttft": "TTFT, mean",
    "ttft_median": "TTFT, median",
    "ttft_p95": "TTFT, p95",
    "throughput": "tokens per busy second",
    "hit_ratio": "prefix hit ratio (absolute)",
    "preemptions": "preemptions",
    "twin_itl": "ITL, twin engines apart",
    "twin_ttft": "TTFT, twin engines apart",
}


def compare(console: Console, runs: Sequence[LoadRun], found: Fit, replays: int) -> list[Compared]:
    """Every load, measured and replayed with the fitted constants."""
    shown = track(runs, "replaying", console=console, transient=True)
    return [Compared(run, mean_replay(run, found.constants, replays)) for run in shown]


def constants_table(found: Fit) -> Table:
    """The fitted constants and how well the loads tell them."""
    table = Table(title=f"Fitted to {found.loads} loads of single engines", width=100)
    for column in ("a step", "a computed token", "a running sequence", "a call in the API server"):
        table.add_column(column, justify="right")
    values, spread = asdict(found.constants), asdict(found.spread)
    table.add_row(*(f"{1e3 * values[name]:.3g} ms, +-{spread[name]:.0%}" for name in values))
    return table


def loads_table(part: Part, compared: Sequence[Compared]) -> Table:
    """Measured / predicted, one engine under one load per row; milliseconds."""
    table = Table(title=f"{part.value} part: measured / plant", width=100, box=None, padding=(0, 1, 0, 0))
    table.add_column("load")
    table.add_column("calls", justify="right")
    for column in ("ITL ms", "p95", "TTFT ms", "p50", "p95", "tok/s", "hits %", "preempt"):
        table.add_column(column, justify="right")
    for one in compared:
        both = (one.run.measured, one.predicted)
        table.add_row(
            f"{one.run.name} {one.run.pod[-1]}",
            f"{one.run.measured.calls:.0f}",
            "/".join(f"{1e3 * mean_itl_s(done):.1f}" for done in both),
            "/".join(f"{1e3 * itl_p95_s(done):.0f}" for done in both),
            "/".join(f"{1e3 * mean_ttft_s(done):.0f}" for done in both),
            "/".join(f"{1e3 * median_ttft_s(done):.0f}" for done in both),
            "/".join(f"{1e3 * ttft_p95_s(done):.0f}" for done in both),
            "/".join(f"{tokens_per_s(done):.0f}" for done in both),
            "/".join(f"{100 * done.hits / done.queries:.0f}" for done in both),
            "/".join(f"{done.preemptions:.0f}" for done in both),
        )
    return table


def errors_table(fitted: Errors, predicted: Errors) -> Table:
    """The errors of both parts, and which aims the predicted one meets."""
    table = Table(title="Errors (load by load, weighted; see bench/calibration/compare.py)", width=100)
    for column in ("", "fitted", "predicted", "aim"):
        table.add_column(column, justify="left" if column == "" else "right")
    seen, left = asdict(fitted), asdict(predicted)
    for name, label in NAMES.items():
        aim, value = AIMS.get(name), left[name]
        verdict = "" if aim is None or value is None else f"{aim:.0%}, {'met' if value <= aim else 'MISSED'}"
        table.add_row(label, *("" if one is None else f"{one:.1%}" for one in (seen[name], value)), verdict)
    return table


def silicon_table(rows: Sequence[Beside]) -> Table:
    """Each point of both, with the plant's error."""
    title = f"{silicon.MODEL}, {silicon.GPUS} x H100 SXM: aiconfigurator {silicon.version()} / plant"
    table = Table(title=title, width=100)
    for column in ("point", "prompt", "output", "calls", "TTFT ms", "error", "ITL ms", "error"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for row in rows:
        ttfts = row.silicon.ttft_s, row.plant.ttft_s
        itl = row.plant.itl_s / row.silicon.itl_s - 1
        first = ("", "")
        if ttfts[0] is not None and ttfts[1] is not None:
            first = f"{1e3 * ttfts[0]:.0f} / {1e3 * ttfts[1]:.0f}", f"{ttfts[1] / ttfts[0] - 1:+.0%}"
        table.add_row(
            "steady" if row.point.steady else "batch",
            f"{row.point.prompt_tokens:,}",
            f"{row.point.output_tokens:,}",
            f"{row.point.calls}",
            *first,
            f"{1e3 * row.silicon.itl_s:.1f} / {1e3 * row.plant.itl_s:.1f}",
            f"{itl:+.0%}",
        )
    return table


def silicon_errors(rows: Sequence[Beside]) -> dict[str, float]:
    """Median absolute errors, over all points and over those of each kind."""

    def itl(some: Sequence[Beside]) -> list[float]:
        return [abs(row.plant.itl_s / row.silicon.itl_s - 1) for row in some]

    def ttft(some: Sequence[Beside]) -> list[float]:
        pairs = [(row.plant.ttft_s, row.silicon.ttft_s) for row in some]
        return [abs(ours / theirs - 1) for ours, theirs in pairs if ours is not None and theirs is not None]

    kinds = {
        "": rows,
        "batch_": [row for row in rows if not row.point.steady],
        "steady_": [row for row in rows if row.point.steady],
    }
    found = {
        f"aiconfigurator_{kind}{name}_error": of(some)
        for kind, some in kinds.items()
        for name, of in (("itl", itl), ("ttft", ttft))
    }
    return {name: statistics.median(each) for name, each in found.items() if each}


def of_capture(console: Console, folder: Path, quick: bool) -> dict[str, object]:
    """The first half; its figures. Raises OSError, ValueError or CalledProcessError where the capture can't be read."""
    runs = read(folder)
    with console.status("fitting"):
        found = fit([run for run in runs if run.part is Part.FITTED], QUICK_FIT_REPLAYS if quick else FIT_REPLAYS)
    compared = compare(console, runs, found, QUICK_REPLAYS if quick else REPLAYS)
    by_part = {part: [one for one in compared if one.run.part is part] for part in Part}
    fitted, predicted = errors(by_part[Part.FITTED]), errors(by_part[Part.PREDICTED])
    console.print(constants_table(found))
    for part, some in by_part.items():
        console.print(loads_table(part, some))
    console.print(errors_table(fitted, predicted))
    names = {"itl": "itl_error", "throughput": "throughput_error", "ttft": "ttft_error"}
    names |= {"hit_ratio": "hit_ratio_error", "preemptions": "preemption_error"}
    return {
        **{key: getattr(predicted, name) for name, key in names.items()},
        "predicted": asdict(predicted),
        "fitted": asdict(fitted),
        "constants": asdict(found.constants),
        "constants_log_standard_error": asdict(found.spread),
    }


def of_silicon(console: Console, quick: bool) -> dict[str, object]:
    """The second half; its figures, none where aiconfigurator is absent."""
    if not silicon.installed():
        console.print(
            "aiconfigurator is not installed, so nothing is said of H100s; get it by: pip install '.[bench]'",
            markup=False,
        )
        return {}
    points = silicon.QUICK_POINTS if quick else silicon.POINTS
    rows = [silicon.beside(point) for point in track(points, "estimating", console=console, transient=True)]
    console.print(silicon_table(rows))
    medians = silicon_errors(rows)
    console.print(
        "; ".join(f"median {name.removeprefix('aiconfigurator_')} {one:.1%}" for name, one in medians.items())
    )
    return {**medians, "aiconfigurator_version": silicon.version()}


def main() -> int:
    """Print the tables; write JSON where asked. Returns the exit code."""
    arguments = argparse.ArgumentParser(description="How far the plant is from real engines.")
    arguments.add_argument("--quick", action="store_true", help="one replay per load, two points of aiconfigurator's")
    arguments.add_argument("--json", type=writable, metavar="FILE", help="write the figures here")
    arguments.add_argument("--capture", type=Path, default=CAPTURE, metavar="FOLDER", help="another capture like it")
    chosen = arguments.parse_args()
    console = Console(width=100)
    try:
        figures = of_capture(console, chosen.capture, chosen.quick)
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        print(f"{chosen.capture}: nothing to calibrate by ({detail}); give one like tests/data/vllm_cpu, and promtool")
        return 1
    figures |= of_silicon(console, chosen.quick)
    console.print(f"{os.cpu_count()} cores, {platform.machine()}, {platform.python_implementation()}.")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
