"""`trimtab demo` as a person and a machine see it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from controller.demo import show
from controller.demo.day import Side
from controller.demo.page import MARK
from controller.demo.scenario import short_day
from controller.demo.story import Told, ToldKind
from controller.errors import TrimtabError
from models.fleetsim.ready import compile_all, is_compiled

TRIMTAB = (sys.executable, "-m", "controller")

pytestmark = pytest.mark.timeout(900)  # two short demos, on machines that are busy with other work


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Once, so that every command of these tests starts at once."""
    compile_all()


def spawn(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*TRIMTAB, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=cwd, check=False)


@dataclass(frozen=True, slots=True)
class Demo:
    """The words, the JSON, and the reports of two runs of the short demo, one for people and one for machines."""

    said: subprocess.CompletedProcess[str]
    json: dict
    report: str
    second_report: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    said = spawn("demo", "--short", "--seed", "4", cwd=folder)
    second = spawn("demo", "--short", "--seed", "4", "--json", "--report", "other.html", cwd=folder)
    assert (second.returncode, second.stderr) == (0, "")
    reports = [(folder / name).read_text() for name in ("trimtab-demo.html", "other.html")]
    return Demo(said, json.loads(second.stdout), *reports)


def test_it_tells_the_day_in_order_and_prints_the_table(demo: Demo) -> None:
    assert (demo.said.returncode, demo.said.stderr) == (0, "")
    for word in ("a burst: 1.5 times", "are lost", "trimtab  assistant-h100", "tasks that succeeded", "GPU-hours"):
        assert word in demo.said.stdout
    times = re.findall(r"^(\d\d:\d\d:\d\d)  ", demo.said.stdout, re.M)
    assert len(times) > 5
    assert times == sorted(times)
    lines = demo.said.stdout.splitlines()
    assert lines[-1].startswith("The plots: ")
    assert max(map(len, lines[:-1])) <= 100


def test_json_holds_both_the_table_and_the_minutes(demo: Demo) -> None:
    answer = demo.json
    assert set(answer) == {"version", "day", "scores", "runs", "report"}
    assert (answer["version"], answer["report"], answer["day"]["seed"]) == (1, "other.html", 4)
    assert [column["side"] for column in answer["scores"]] == ["peak", "mean", "trimtab"]
    assert [run["side"] for run in answer["runs"]] == ["peak", "mean", "trimtab"]
    for column, run in zip(answer["scores"], answer["runs"], strict=True):
        assert len(run["minutes"]) == 30
        found = column["score"]
        cost = sum(pool["gpu_hours"] * pool["usd_per_gpu_h"] for pool in run["pools"])
        assert found["usd"] == pytest.approx(cost)
        assert f"${found['usd']:,.2f}" in demo.said.stdout
        assert f"{100 * found['task_success']:.2f} %" in demo.said.stdout


class _Fetches(HTMLParser):
    """Every address that a browser would fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in {"src", "href", "srcset", "data"}]


def test_the_report_needs_no_network(demo: Demo) -> None:
    parser = _Fetches()
    parser.feed(demo.report)
    assert parser.found == []
    assert "@import" not in demo.report
    assert not re.search(r"url\(\s*['\"]?https?:", demo.report)
    assert len(demo.report) > 1_000_000, "the plotting library is inside"
    for word in ("fixed, for the peak", "Trimtab", "Prefix cache hit rate", "half a pool lost", "assistant-l40s"):
        assert word in demo.report


def test_the_same_seed_gives_the_same_report(demo: Demo) -> None:
    def without_ids(text: str) -> str:
        return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "id", text)

    assert without_ids(demo.report) == without_ids(demo.second_report)


def test_a_file_that_is_no_report_of_ours_is_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    with pytest.raises(TrimtabError, match="exists already"):
        show.check_place(mine)
    mine.write_text(f"<meta {MARK}>")
    show.check_place(mine)
    for place in (tmp_path, tmp_path / "nowhere" / "report.html"):
        with pytest.raises(TrimtabError, match="can't be written"):
            show.check_place(place)


@pytest.mark.parametrize("arguments", [("--recorded", "--short"), ("--journal", "demo.db")])
def test_options_of_the_other_demo_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    said = spawn("demo", *arguments, cwd=tmp_path)
    assert said.returncode == 2
    assert re.fullmatch(r"trimtab: .*--recorded.*\n", said.stderr)


def test_lines_of_one_moment_are_told_together_and_in_the_days_order() -> None:
    day = short_day(1)
    lines = show.Lines(day)
    epoch = 1_800_000_000.0
    down = [Told(epoch + 500, ToldKind.ALARM, f"pool/{n}", "replica_down: its scrape fails [up]") for n in range(3)]
    lines.add(Side.TRIMTAB, down)
    lines.add(Side.MEAN, [Told(epoch + 490, ToldKind.ALARM, "callers", "50 % of calls within the SLO")])
    assert lines.until(480.0) == ["[bold]08:08:00[/]  [yellow]the day[/]  a burst: 1.5 times the traffic"]
    first, second = lines.until(550.0)
    assert "mean     [red]alarm[/] callers" in first
    assert "pool/0 and 2 more  replica_down: its scrape fails \\[up]" in second
    assert lines.until(550.0) == []


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Where the tests run in the background, a shell has them ignore SIGINT, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_ctrl_c_ends_it_with_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TRIMTAB, "demo", "--short"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "trimtab: stopped; no report was written\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [("schema >&-", 0, ""), ("demo --short >/dev/full", 2, "No space left"), ("demo --short | true", 0, "")],
)
def test_an_output_that_takes_nothing_is_no_bug(tmp_path: Path, command: str, code: int, words: str) -> None:
    script = f"set -o pipefail; {' '.join(TRIMTAB)} {command}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == (1 if words else 0)


def test_what_was_compiled_is_known_to_be() -> None:
    assert is_compiled()
