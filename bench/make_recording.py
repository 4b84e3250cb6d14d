"""Make a recording for `controller.adapters.recording` from the TSDB of a Prometheus that scraped vLLM.

    python -m bench.make_recording TSDB_FOLDER OUT.jsonl.gz [--description TEXT]

Keeps every series that the catalogue names for vLLM, `up` and `process_start_time_seconds`, of the targets that expose
an engine. Needs promtool. promtool prints stale markers and real NaN values alike; a NaN is taken for a stale marker,
which is right for vLLM: none of its raw series is ever NaN.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from controller.adapters.promql import How
from controller.adapters.recording import RecordedSeries, Recording, save
from controller.adapters.series import label_pairs
from controller.adapters.signals import TARGETS, VLLM
from controller.observations import Labels

ENGINE = "vllm:num_requests_running"
TARGET_LABELS = ("instance", "job", "namespace", "pod", "pool")
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def wanted() -> tuple[str, ...]:
    """The exposition names to keep."""
    sources = [source for entry in (*TARGETS, *VLLM) for source in entry.sources]
    names = {f"{source.metric}_bucket" if source.how is How.BUCKETS else source.metric for source in sources}
    return (*sorted(names), "process_start_time_seconds")


def dump(tsdb: Path, names: tuple[str, ...]) -> Iterator[str]:
    """The lines of `promtool tsdb dump`, read from a copy: promtool wants to write beside the blocks."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tsdb"
        shutil.copytree(tsdb, copy, copy_function=shutil.copyfile)
        (copy / "wal").mkdir(exist_ok=True)
        match = f'{{__name__=~"{"|".join(names)}"}}'
        command = ["promtool", "tsdb", "dump", f"--match={match}", str(copy)]
        yield from subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def series_of(lines: Iterator[str]) -> list[RecordedSeries]:
    """Series from lines `{a="b", ...} value time_ms`."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in lines:
        head, _, tail = line.rpartition("} ")
        text, time_ms = tail.split()
        times_ms, values = found.setdefault(head, ([], []))
        times_ms.append(int(time_ms))
        values.append(None if text == "NaN" else float(text))
    return [RecordedSeries(_labels(head), tuple(times_ms), tuple(values)) for head, (times_ms, values) in found.items()]


def _labels(head: str) -> Labels:
    # Go's quoted strings are, escape for escape, Python's.
    return label_pairs((name, str(ast.literal_eval(f'"{text}"'))) for name, text in _PAIR.findall(head))


def recording_of(series: list[RecordedSeries], description: str) -> Recording:
    """The recording of the targets that expose an engine. Raises ValueError where none does."""

    def target(one: RecordedSeries) -> Labels:
        return tuple(pair for pair in one.labels if pair[0] in TARGET_LABELS)

    engines = {target(one) for one in series if ("__name__", ENGINE) in one.labels}
    if not engines:
        raise ValueError(f"no series of {ENGINE} found")
    kept = sorted((one for one in series if target(one) in engines), key=lambda one: one.labels)
    up = [one for one in kept if ("__name__", "up") in one.labels]
    steps_ms = [b - a for one in up for a, b in zip(one.times_ms, one.times_ms[1:], strict=False)]
    return Recording(
        description,
        start_s=min(one.times_ms[0] for one in kept) / 1000,
        end_s=max(one.times_ms[-1] for one in kept) / 1000,
        interval_s=median(steps_ms) / 1000,
        target_labels=tuple(
            name for name in TARGET_LABELS if any(name == pair[0] for one in up for pair in one.labels)
        ),
        series=tuple(kept),
    )


def main() -> int:
    """The command; returns the exit code."""
    arguments = argparse.ArgumentParser(description="Make a recording from a Prometheus TSDB.")
    arguments.add_argument("tsdb", type=Path, help="folder of the TSDB, or of a snapshot of it")
    arguments.add_argument("out", type=Path, help="the recording to write, *.jsonl.gz")
    arguments.add_argument("--description", default="captured vLLM telemetry", help="what was captured, one sentence")
    given = arguments.parse_args()
    try:
        recording = recording_of(series_of(dump(given.tsdb, wanted())), given.description)
        save(given.out, recording)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        print(f"{given.tsdb}: no recording made ({detail}); give a TSDB folder of a Prometheus that scraped vLLM")
        return 1
    counted: dict[str, int] = {}
    for one in recording.series:
        name = dict(one.labels)["__name__"]
        counted[name] = counted.get(name, 0) + 1
    for name in wanted():
        print(f"{counted.get(name, 0):5d} series of {name}")
    samples = sum(len(one.times_ms) for one in recording.series)
    ends = sum(value is None for one in recording.series for value in one.values)
    print(f"{samples} samples, {ends} of them ends of series, over {recording.end_s - recording.start_s:.0f} s")
    print(f"{given.out}: {given.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
