"""Recordings: the file format, the bundled capture against the database it was made from, and virtual time."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.adapters.recording import (
    VLLM_CPU,
    RecordedSeries,
    Recording,
    RecordingTelemetry,
    VirtualClock,
    load,
    save,
)
from controller.errors import TelemetryError
from controller.observations import Sample, Signal, Snapshot

ROOT = Path(__file__).resolve().parents[2]
HEADER = {
    "format": "trimtab-recording",
    "version": 1,
    "description": "two samples",
    "start_s": 1000.0,
    "end_s": 1010.0,
    "interval_s": 1,
    "target_labels": ["instance"],
}
UP = {"labels": {"__name__": "up", "instance": "a:1"}, "t": [0, 1000, 1000], "v": [1, None, 0]}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes(gzip.compress("\n".join(texts).encode()))
    return path


def values(snapshot: Snapshot, signal: Signal, pod: str) -> list[float]:
    return [s.value for s in snapshot.samples if s.signal is signal and ("pod", pod) in s.labels]


@pytest.fixture(scope="module")
def capture() -> RecordingTelemetry:
    return RecordingTelemetry(VLLM_CPU)


# -------------------------------------------------------------------------------------------------- bundled capture


def test_bundled_capture_names_its_span_and_targets(capture: RecordingTelemetry) -> None:
    assert capture.end_s - capture.start_s == 380.0
    assert capture.interval_s == 1.0
    assert [dict(labels)["pod"] for labels in capture.targets] == ["vllm-0", "vllm-1"]
    assert VLLM_CPU.stat().st_size < 500_000


def test_bundled_capture_shows_each_phase_as_it_was(capture: RecordingTelemetry, phases: dict[str, Any]) -> None:
    idle = capture.read(phases["idle"].end_s - 1, 10.0, 1.0)
    assert values(idle, Signal.GENERATION_TOKENS_PER_S, "vllm-0") == [0.0]
    burst = capture.read(phases["burst"].end_s, 10.0, 1.0)
    assert values(burst, Signal.GENERATION_TOKENS_PER_S, "vllm-0")[0] > 100
    pressure = capture.read(phases["kv_pressure_server0_only"].end_s, 20.0, 1.0)
    assert values(pressure, Signal.PREEMPTIONS_PER_S, "vllm-0")[0] > 0
    killed = capture.read(phases["restart_server1"].end_s - 5, 10.0, 1.0)
    assert values(killed, Signal.UP, "vllm-1") == [0.0]
    assert values(killed, Signal.RUNNING, "vllm-1") == []
    assert values(killed, Signal.GENERATION_TOKENS_PER_S, "vllm-1") == []
    hung = capture.read(phases["sigstop_enginecore"].end_s - 0.5, 10.0, 1.0)
    assert values(hung, Signal.UP, "vllm-0") == [1.0]
    assert values(hung, Signal.STEPS_PER_S, "vllm-0") == [0.0]
    assert values(hung, Signal.HEARTBEAT_AGE_S, "vllm-0")[0] < 1.0


def test_no_rate_is_negative_anywhere_in_the_capture(capture: RecordingTelemetry) -> None:
    for at_s in range(int(capture.start_s) + 1, int(capture.end_s), 3):
        for sample in capture.read(float(at_s), 15.0, 1.0).samples:
            assert sample.value >= 0 or sample.signal.endswith("_growth_per_s")


def test_read_does_not_depend_on_what_was_read_before(capture: RecordingTelemetry) -> None:
    middle_s = (capture.start_s + capture.end_s) / 2
    first = capture.read(middle_s, 10.0, 1.0)
    capture.read(capture.end_s, 10.0, 1.0)
    capture.read(capture.start_s, 10.0, 1.0)
    assert capture.read(middle_s, 10.0, 1.0) == first
    assert RecordingTelemetry(VLLM_CPU).read(middle_s, 10.0, 1.0) == first


def test_nothing_is_known_before_it_happened(tmp_path: Path, capture: RecordingTelemetry) -> None:
    whole = load(VLLM_CPU)
    for offset_s in (60.0, 222.2, 300.0):
        at_s = whole.start_s + offset_s
        cut = []
        for series in whole.series:
            count = sum(time_ms <= at_s * 1000 for time_ms in series.times_ms)
            cut.append(RecordedSeries(series.labels, series.times_ms[:count], series.values[:count]))
        known = Recording("until then", whole.start_s, at_s, 1.0, whole.target_labels, tuple(cut))
        save(tmp_path / "cut.jsonl.gz", known)
        assert RecordingTelemetry(tmp_path / "cut.jsonl.gz").read(at_s, 10.0, 1.0) == capture.read(at_s, 10.0, 1.0)


def test_outside_of_its_span_a_recording_says_that_it_knows_nothing(capture: RecordingTelemetry) -> None:
    before = capture.read(capture.start_s - 10, 10.0, 1.0)
    assert before.samples == ()
    assert before.holes[0].detail.endswith("before its start")
    after = capture.read(capture.end_s + 3600, 10.0, 1.0)
    assert after.samples == ()
    assert after.holes[0].detail.endswith("after its end")
    assert capture.read(capture.end_s, 10.0, 1.0).holes == ()


def test_every_signal_has_an_expression(capture: RecordingTelemetry) -> None:
    said = dict(capture.expressions(10.0))
    assert said[Signal.RUNNING].startswith("sum by (instance, job, pod, pool) (vllm:num_requests_running)")


@pytest.mark.needs("promtool")
def test_bundled_capture_is_what_the_command_makes_of_the_database(tmp_path: Path) -> None:
    out = tmp_path / "made.jsonl.gz"
    tsdb = ROOT / "tests" / "data" / "vllm_cpu" / "tsdb_snapshot"
    command = [sys.executable, "-m", "bench.make_recording", str(tsdb), str(out), "--description"]
    made = subprocess.run([*command, load(VLLM_CPU).description], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "2 series of vllm:num_requests_running" in made.stdout
    assert load(out) == load(VLLM_CPU)
    assert gzip.decompress(out.read_bytes()) == gzip.decompress(VLLM_CPU.read_bytes())


@pytest.mark.needs("promtool")
def test_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.make_recording", str(tmp_path), str(tmp_path / "out.jsonl.gz")]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 1
    assert made.stderr == ""
    assert "no recording made (" in made.stdout
    assert not (tmp_path / "out.jsonl.gz").exists()


# ------------------------------------------------------------------------------------------------------ file format


def test_a_series_ends_at_null_and_comes_back(tmp_path: Path) -> None:
    recording = RecordingTelemetry(written(tmp_path / "r.jsonl.gz", HEADER, UP))
    labels = (("instance", "a:1"),)
    assert recording.read(1000.0, 10.0, 1.0).samples == (Sample(Signal.UP, labels, 1.0),)
    assert recording.read(1001.0, 10.0, 1.0).samples == ()
    assert recording.read(1002.0, 10.0, 1.0).samples == (Sample(Signal.UP, labels, 0.0),)


numbers = st.none() | st.floats(allow_nan=False) | st.integers(-(2**53), 2**53).map(float)
names = st.text(min_size=1).filter(lambda text: text != "__name__")


@given(st.lists(st.tuples(st.dictionaries(names, st.text(min_size=1), max_size=3), st.lists(numbers)), max_size=4))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[dict[str, str], list[float | None]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl.gz"
    series = tuple(
        RecordedSeries(
            tuple(sorted({**labels, "__name__": "m"}.items())),
            tuple(1_000_000 + 7 * index for index in range(len(found))),
            tuple(found),
        )
        for labels, found in drawn
    )
    recording = Recording("d", 1000.0, 2000.0, 1.0, ("instance",), series)
    save(path, recording)
    first = path.read_bytes()
    assert load(path) == recording
    save(path, load(path))
    assert path.read_bytes() == first


def test_nan_is_kept_and_is_not_an_end(tmp_path: Path) -> None:
    series = RecordedSeries((("__name__", "m"),), (1_000_000, 1_001_000), (math.nan, None))
    save(tmp_path / "nan.jsonl.gz", Recording("d", 1000.0, 1001.0, 1.0, (), (series,)))
    (found,) = load(tmp_path / "nan.jsonl.gz").series
    assert found.values[0] is not None
    assert math.isnan(found.values[0])
    assert found.values[1] is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (('{"format": "other"}',), "is not a recording (no trimtab-recording header)"),
        (("",), "is not a recording"),
        (("[1]",), "is not a recording"),
        (({**HEADER, "version": 2},), "is a recording of version 2, and this Trimtab reads version 1"),
        (({**HEADER, "start_s": "soon"},), "has a broken header (start_s: "),
        (({**HEADER, "start_s": math.nan},), "has a broken header (start_s: "),
        (({**HEADER, "interval_s": 0},), "has a broken header (interval_s: "),
        (({**HEADER, "mood": 1},), "has a broken header (mood: "),
        ((HEADER, UP, "{"), "line 3: is not a recorded series"),
        ((HEADER, {**UP, "v": [1]}), "line 2: is not a recorded series (3 times for 1 values)"),
        ((HEADER, {**UP, "t": [0, 0, 1]}), "line 2: is not a recorded series (times do not ascend)"),
        ((HEADER, {**UP, "v": [1, "high", 2]}), "line 2: is not a recorded series"),
        ((HEADER, {**UP, "labels": {"instance": "a"}}), "line 2: is not a recorded series (labels lack __name__)"),
    ],
)
def test_file_that_is_no_recording_is_refused_in_one_sentence(
    tmp_path: Path, lines: tuple[dict[str, Any] | str, ...], words: str
) -> None:
    path = written(tmp_path / "bad.jsonl.gz", *lines)
    with pytest.raises(TelemetryError) as caught:
        RecordingTelemetry(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("body", [b"plain text", b"", gzip.compress(b"x" * 9999)[:-20], gzip.compress(b"\xff\xfe\n")])
def test_file_that_is_not_even_gzip_is_refused_in_one_sentence(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(body)
    with pytest.raises(TelemetryError, match=r"bad\.jsonl\.gz: .*; give a file that"):
        load(path)


def test_file_that_is_absent_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match=r"absent\.jsonl\.gz: can't be read as a recording"):
        load(tmp_path / "absent.jsonl.gz")


# ----------------------------------------------------------------------------------------------------- virtual time


def test_virtual_clock_is_at_once_where_it_is_told_to_be_and_never_goes_back() -> None:
    clock = VirtualClock(100.0)
    assert clock.sleep_until(160.0)
    assert clock.now_s() == 160.0
    assert clock.sleep_until(50.0)
    assert clock.now_s() == 160.0


def test_virtual_clock_ends_with_its_recording_and_when_stopped() -> None:
    clock = VirtualClock(100.0, end_s=200.0)
    assert clock.sleep_until(200.0)
    assert not clock.sleep_until(200.1)
    assert clock.now_s() == 200.0
    stopped = VirtualClock(100.0)
    stopped.stop()
    assert not stopped.sleep_until(101.0)
    assert stopped.now_s() == 100.0
