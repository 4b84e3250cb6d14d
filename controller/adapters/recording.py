"""Telemetry from captured series, on virtual time: what was known at any instant of a capture.

A recording is gzip'd JSON lines. The first line is the header:

    {"format": "trimtab-recording", "version": 1, "description": "...", "start_s": ..., "end_s": ...,
     "interval_s": 1.0, "target_labels": ["instance", "job", "pod"]}

and each further line one raw series, as it was scraped:

    {"labels": {"__name__": "up", "pod": "vllm-0", ...}, "t": [933, 1000, 1000], "v": [1, null, 0]}

`t` are milliseconds, the first after start_s and each other after its predecessor; `v` are the values, with null where
the series ended (a stale marker: it was missing from that scrape) and "NaN", "+Inf", "-Inf" where JSON has no number.
Example: with start_s = 1796077300.0 the line above says up = 1 at ...300.933, nothing from ...301.933, 0 at ...302.933.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from controller.adapters.promql import Entry, promql
from controller.adapters.series import Grouping, Row, SeriesStore, label_pairs
from controller.adapters.signals import catalogue
from controller.errors import TelemetryError
from controller.observations import Labels, Signal, Snapshot, SourceHole

FORMAT = "trimtab-recording"
VERSION = 1

VLLM_CPU = Path(__file__).parent / "recordings" / "vllm_cpu.jsonl.gz"
"""Two real vLLM engines through idle, ramp, burst, KV pressure, kill -9, restart and a hang, read once per second."""


@dataclass(frozen=True, slots=True)
class RecordedSeries:
    """One raw series: labels with `__name__`, sample times in Unix ms, values; None where the series ended."""

    labels: Labels
    times_ms: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Captured series from start_s to end_s (Unix seconds), read every interval_s; target_labels name the target."""

    description: str
    start_s: float
    end_s: float
    interval_s: float
    target_labels: tuple[str, ...]
    series: tuple[RecordedSeries, ...]


class _Line(BaseModel):
    """What the two kinds of line have in common: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Header(_Line):
    format: str
    version: int
    description: str
    start_s: FiniteFloat
    end_s: FiniteFloat
    interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    target_labels: list[str]


class _SeriesLine(_Line):
    labels: dict[str, str]
    t: list[int]
    v: list[float | str | None]


def load(path: Path) -> Recording:
    """Read a recording. Raises TelemetryError with place and remedy where the file isn't one."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = file.read().removesuffix("\n").split("\n")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TelemetryError(
            f"{path}: can't be read as a recording ({error}); give a file that bench/make_recording.py wrote"
        ) from error
    header = _header(path, lines)
    start_ms = round(header.start_s * 1000)
    series: list[RecordedSeries] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            series.append(_series(_SeriesLine.model_validate_json(line), start_ms))
        except ValueError as error:
            raise TelemetryError(
                f"{path}, line {number}: is not a recorded series ({_first_line(error)}); make the recording again"
            ) from error
    return Recording(
        header.description,
        header.start_s,
        header.end_s,
        header.interval_s,
        tuple(header.target_labels),
        tuple(series),
    )


def save(path: Path, recording: Recording) -> None:
    """Write a recording; the same recording always gives the same bytes."""
    header = _Header(
        format=FORMAT,
        version=VERSION,
        description=recording.description,
        start_s=recording.start_s,
        end_s=recording.end_s,
        interval_s=recording.interval_s,
        target_labels=list(recording.target_labels),
    )
    start_ms = round(recording.start_s * 1000)
    lines = [json.dumps(header.model_dump(), ensure_ascii=False)]
    for series in recording.series:
        steps = [b - a for a, b in zip((start_ms, *series.times_ms), series.times_ms, strict=False)]
        body = {"labels": dict(series.labels), "t": steps, "v": [_plain(value) for value in series.values]}
        lines.append(json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))


def _header(path: Path, lines: list[str]) -> _Header:
    try:
        found = json.loads(lines[0])
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise TelemetryError(
            f"{path}: is not a recording (no {FORMAT} header); give a file that bench/make_recording.py wrote"
        )
    if found.get("version") != VERSION:
        raise TelemetryError(
            f"{path}: is a recording of version {found.get('version')}, and this Trimtab reads version {VERSION}; "
            "make the recording again"
        )
    try:
        return _Header.model_validate(found)
    except ValidationError as error:
        raise TelemetryError(f"{path}: has a broken header ({_first_line(error)}); make the recording again") from error


def _series(line: _SeriesLine, start_ms: int) -> RecordedSeries:
    """A validated line as a series. Raises ValueError where the line contradicts itself."""
    if "__name__" not in line.labels:
        raise ValueError("labels lack __name__")
    if len(line.t) != len(line.v):
        raise ValueError(f"{len(line.t)} times for {len(line.v)} values")
    if any(step <= 0 for step in line.t[1:]):
        raise ValueError("times do not ascend")
    times_ms: list[int] = []
    for step in line.t:
        times_ms.append((times_ms[-1] if times_ms else start_ms) + step)
    values = tuple(None if value is None else float(value) for value in line.v)
    return RecordedSeries(label_pairs(line.labels.items()), tuple(times_ms), values)


def _plain(value: float | None) -> float | str | None:
    """A value as JSON has it; whole numbers without their `.0`, which is most of a recording."""
    if value is None:
        return None
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _first_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return str(error)


class RecordingTelemetry:
    """Telemetry that plays a recording: `read(at_s, ...)` gives what was known at `at_s`, in any order of times."""

    def __init__(self, path: Path, entries: tuple[Entry, ...] | None = None) -> None:
        recording = load(path)
        self.path = path
        self.start_s = recording.start_s
        self.end_s = recording.end_s
        self.interval_s = recording.interval_s
        self.description = recording.description
        self.targets = _targets(recording)
        self._entries = catalogue(("vllm", "sglang"), gateway=True) if entries is None else entries
        self._grouping = Grouping(replica=recording.target_labels)
        self._store = SeriesStore(self._entries, self._grouping)
        for series in recording.series:
            self._fill(series)

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:  # noqa: ARG002  (nothing to wait for)
        """Every signal's samples at `at_s` (Unix seconds, inside the recording), rates over `window_s`."""
        holes: tuple[SourceHole, ...] = ()
        if not self.start_s <= at_s <= self.end_s:
            place = "before its start" if at_s < self.start_s else "after its end"
            holes = (SourceHole(f"recording:{self.path.name}", f"says nothing of {at_s:.0f} s, {place}"),)
        return Snapshot(self._store.evaluate(at_s, window_s), holes)

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        """The PromQL that each signal is equal to."""
        return tuple((entry.signal, promql(entry, self._grouping.of(entry.level), window_s)) for entry in self._entries)

    def close(self) -> None:
        """Nothing to release."""

    def _fill(self, series: RecordedSeries) -> None:
        name = dict(series.labels)["__name__"]
        labels = tuple(pair for pair in series.labels if pair[0] != "__name__")
        for time_ms, value in zip(series.times_ms, series.values, strict=True):
            if value is None:
                self._store.end(time_ms / 1000, (), name, labels)
            else:
                self._store.append(time_ms / 1000, (), Row(name, labels, value))


def _targets(recording: Recording) -> tuple[Labels, ...]:
    """The labels of each target, from the series of `up`."""
    return tuple(
        label_pairs(pair for pair in series.labels if pair[0] in recording.target_labels)
        for series in recording.series
        if ("__name__", "up") in series.labels
    )


class VirtualClock:
    """A clock that is where it is told to be: sleeping moves it at once, up to `end_s` if there is an end."""

    def __init__(self, start_s: float, end_s: float = math.inf) -> None:
        self._now_s = start_s
        self._end_s = end_s
        self._stopped = False

    def now_s(self) -> float:
        """Virtual Unix time in seconds."""
        return self._now_s

    def sleep_until(self, at_s: float) -> bool:
        """Move to `at_s`, never back; False after `stop`, or where `at_s` is past the end: the clock stays then."""
        if self._stopped or at_s > self._end_s:
            return False
        self._now_s = max(self._now_s, at_s)
        return True

    def stop(self) -> None:
        """Let every later sleep end at once with False."""
        self._stopped = True
