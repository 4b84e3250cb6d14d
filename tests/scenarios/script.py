"""Scenarios: what happens to a fleet, and what Trimtab says to it, in a text that a person can read.

    # What the scenario proves.

    fleet  16 gpus, hold 60 s                 the policy; later on, a reload of it
    chat   3 replicas, 6 calls/s              a pool, as it is from now on
    tick   x4                                 so many ticks, 15 s apart (or: tick x4 every 60 s)
        12:00:00  chat  hold: ...             what was decided and what was called for: written by the test

Of ticks that say the same but for their numbers, the first and the last are shown; `..` is what is between. Words:

    fleet    N gpus | mode recommend | hold N s | step N | budget N | frozen CRON for N h | not frozen
    POOL     N replicas | N calls/s | min N | max N | rN serves, down, gone, hung, blind or asleep
    source   fails | answers
    restart  the process is killed and starts again from its journal (or: restart after 90 s)

The samples are made here; observation, decision, journal, restart and replay are the real ones. A replica carries about
3 calls/s, 2 with headroom, and holds one GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from controller import explain, loop
from controller.adapters.codec import canonical_bytes
from controller.adapters.journal import SqliteJournal
from controller.adapters.recording import VirtualClock
from controller.decisions import Alarm, ControllerState, Scale, Stage, TickRecord
from controller.observations import Outcome, Sample, Signal, Snapshot, SourceHole
from controller.policy_file import LoadedPolicy, parse
from controller.reasons import clock
from controller.replay import Recorded, replay

NOON_S = 1_789_992_000.0
"""Monday, 21 September 2026, 12:00 UTC."""

INTERVAL_S = 15.0
PROMPT_TOKENS, OUTPUT_TOKENS, HIT_RATIO = 1000.0, 200.0, 0.5
INDENT = "    "


@dataclass
class Pool:
    """A pool as the script has it: how many replicas, their troubles, what is offered, and its limits."""

    replicas: int = 0
    calls_per_s: float = 0.0
    least: int = 1
    most: int = 8
    troubles: dict[str, str] = field(default_factory=dict)

    def samples(self, name: str) -> Iterator[Sample]:
        """What the engines of the pool publish."""
        states = {f"r{n}": self.troubles.get(f"r{n}", "serves") for n in range(self.replicas)}
        serving = sum(state == "serves" for state in states.values())
        for replica, state in states.items():
            for signal, value in _engine(state, self.calls_per_s / max(serving, 1)).items():
                yield Sample(signal, (("app", name), ("instance", f"{replica}:8000"), ("pod", replica)), value)


def _engine(state: str, calls_per_s: float) -> dict[Signal, float]:
    """One engine's signals. Its inter-token latency grows with its batch, which is what it serves by Little's law."""
    if state == "gone":
        return {}
    if state == "down":
        return {Signal.UP: 0.0}
    busy = calls_per_s if state in {"serves", "blind"} else 0.0
    tokens_per_s = busy * OUTPUT_TOKENS
    itl_s = 0.02 / (1 - 0.0003 * tokens_per_s)
    return {
        Signal.UP: 1.0,
        Signal.HEARTBEAT_AGE_S: 200.0 if state == "blind" else 2.0,
        Signal.RUNNING: 4.0 if state == "hung" else round(tokens_per_s * itl_s),
        Signal.WAITING: 0.0,
        Signal.WAITING_GROWTH_PER_S: 0.0,
        Signal.KV_USAGE_RATIO: 0.3,
        Signal.AWAKE: 0.0 if state == "asleep" else 1.0,
        Signal.STEPS_PER_S: 0.0 if state == "hung" else 1 / itl_s,
        Signal.FIRST_TOKENS_PER_S: busy,
        Signal.FINISHED_PER_S: busy,
        Signal.PROMPT_TOKENS_PER_S: busy * PROMPT_TOKENS,
        Signal.GENERATION_TOKENS_PER_S: tokens_per_s,
        Signal.PREFIX_QUERIES_PER_S: busy * PROMPT_TOKENS,
        Signal.PREFIX_HITS_PER_S: busy * PROMPT_TOKENS * HIT_RATIO,
        Signal.PREEMPTIONS_PER_S: 0.0,
        Signal.ITL_SUM_PER_S: tokens_per_s * itl_s,
        Signal.ITL_COUNT_PER_S: tokens_per_s,
    }


@dataclass
class World:
    """The fleet as the script has it: a source of telemetry, and the policy's numbers."""

    pools: dict[str, Pool] = field(default_factory=dict)
    gpus: int = 16
    mode: str = "recommend"
    limits: dict[str, float] = field(default_factory=lambda: {"scale_in_hold_s": 60, "headroom": 0.7})
    freeze: list[dict[str, object]] = field(default_factory=list)
    failing: bool = False

    def read(self, at_s: float, window_s: float, deadline_s: float) -> Snapshot:
        """`ports.Telemetry`."""
        if self.failing:
            return Snapshot((), (SourceHole("prometheus", "connection refused"),), tuple(Signal))
        return Snapshot(tuple(sample for name, pool in self.pools.items() for sample in pool.samples(name)))

    def expressions(self, window_s: float) -> tuple[tuple[Signal, str], ...]:
        """Nothing can be checked by hand."""
        return ()

    def close(self) -> None:
        """Nothing is open."""

    def policy(self) -> LoadedPolicy:
        """The policy that these numbers make, by way of its text."""
        text = {
            "version": 1,
            "mode": self.mode,
            "gpus": {"H100-SXM": {"count": self.gpus, "usd_per_gpu_hour": 3.0}},
            "services": {f"{name}-service": _service(name) for name in self.pools},
            "pools": {
                name: {
                    "select": {"app": name},
                    "model": {"name": "llama-3.1-8b", "parameters": 8.0e9},
                    "gpu": {"type": "H100-SXM"},
                    "max_num_seqs": 16,
                    "replicas": {"min": pool.least, "max": pool.most},
                    "scale": {"kind": "Deployment", "namespace": "serving", "name": name},
                    "start": {"cold_s": 120},
                }
                for name, pool in self.pools.items()
            },
            "limits": self.limits,
            "freeze": self.freeze,
        }
        return parse(yaml.safe_dump(text, sort_keys=False), "fleet.yaml", telemetry_required=False)


def _service(pool: str) -> dict[str, object]:
    return {"slo": {"ttft_s": 2.0, "tpot_s": 0.05}, "pools": [pool]}


@dataclass
class Process:
    """One life of the daemon: its journal, and what it remembers."""

    journal: SqliteJournal
    ports: loop.Ports
    state: ControllerState
    outcomes: tuple[Outcome, ...]

    @classmethod
    def start(cls, path: Path, world: World, now: VirtualClock) -> Process:
        """A process that starts, or starts again, from the journal at `path`."""
        journal = SqliteJournal(path)
        state, outcomes = loop.resume(journal, now.now_s())
        return cls(journal, loop.Ports(now, world, journal=journal), state, outcomes)

    def tick(self, policy: LoadedPolicy) -> TickRecord:
        """One tick of the real loop."""
        self.state, record = loop.tick(self.ports, policy, self.state, self.outcomes, 10.0)
        self.outcomes = record.outcomes
        return record


class Story:
    """What was said at each tick, as lines; ticks that differ by numbers only are told by their first and last."""

    def __init__(self) -> None:
        self.records: list[TickRecord] = []
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._shape: list[str] = []
        self._skipped: list[str] = []
        self._more = False

    def begin(self) -> None:
        """The next tick is told, whatever it says."""
        self._shape = []

    def tell(self, record: TickRecord) -> list[str]:
        """The lines of one tick, and of those before it that were kept back."""
        self.records.append(record)
        lines, news = _decided(record), self._called(record)
        shape = [re.sub(r"\d+(\.\d+)?", "#", line) for line in lines]
        stamped = _stamped(record.decision.now_s, lines + news)
        if shape == self._shape and not news and not record.decision.moves:
            self._more = bool(self._skipped)
            self._skipped = stamped
            return []
        self._shape = shape
        return self.rest() + stamped

    def rest(self) -> list[str]:
        """The newest tick, where it was kept back."""
        lines = [INDENT + "..", *self._skipped] if self._more else self._skipped
        self._skipped, self._more = [], False
        return lines

    def _called(self, record: TickRecord) -> list[str]:
        raised = {(alarm.kind.value, alarm.target): alarm for alarm in record.decision.alarms}
        lines = [
            f"{a.target}  alarm {a.kind.value}: {a.detail}" for key, a in raised.items() if key not in self._alarms
        ]
        lines += [f"{target}  alarm {kind} is over" for kind, target in self._alarms if (kind, target) not in raised]
        self._alarms = raised
        return lines


def _decided(record: TickRecord) -> list[str]:
    lines = []
    for move in record.decision.moves:
        (action,) = move.actions
        assert isinstance(action, Scale)
        planned = [change.reason for change in move.changes if change.stage is Stage.PLANNED]
        guarded = [c.reason for c in move.changes if c.stage is Stage.GUARDED and c.before != c.after]
        word = {"recommend": "recommended", "act": "requested"}[move.mode.value]
        lines.append(f"{move.target}  {action.before} -> {action.after} {word}: {'; '.join(planned + guarded)}")
    lines += [f"{hold.target}  hold: {hold.reason}" for hold in record.decision.holds if hold.kind.value == "scale"]
    return lines


def _stamped(at_s: float, lines: list[str]) -> list[str]:
    stamps = [clock(at_s), *[" " * 8] * (len(lines) - 1)]
    return [f"{INDENT}{stamp}  {line}" for stamp, line in zip(stamps, lines, strict=True)]


class Player:
    """Reads a script line by line, and writes it again with what happens now."""

    def __init__(self, folder: Path) -> None:
        self.world = World()
        self.story = Story()
        self._path = folder / "trimtab.db"
        self._time = VirtualClock(NOON_S)
        self._first = True
        self._process: Process | None = None

    def play(self, text: str) -> str:
        """The script with the lines that its ticks give."""
        written: list[str] = []
        try:
            for number, line in enumerate(text.splitlines(), start=1):
                if line.startswith(INDENT):
                    continue
                written.append(line)
                if line and not line.startswith("#"):
                    written += self._do(line, number)
        finally:
            if self._process is not None:
                self._process.journal.close()
        return "\n".join(written) + "\n"

    def _do(self, line: str, number: int) -> list[str]:
        subject, _, rest = line.partition(" ")
        facts = [fact.strip() for fact in rest.split(", ")]
        match subject:
            case "tick":
                return self._tick(rest.strip(), number)
            case "restart":
                self._restart(rest.strip(), number)
            case "source":
                self.world.failing = _one_of(facts[0], ("fails", "answers"), number) == "fails"
            case "fleet":
                for fact in facts:
                    self._fleet(fact, number)
            case _:
                for fact in facts:
                    self._pool(self.world.pools.setdefault(subject, Pool()), fact, number)
        return []

    def _tick(self, rest: str, number: int) -> list[str]:
        found = _match(r"(?:x(\d+))?(?: ?every ([\d.]+) s)?", rest, number)
        count, every_s = int(found[1] or 1), float(found[2] or INTERVAL_S)
        policy, lines = self.world.policy(), []
        if self._process is None:
            self._process = Process.start(self._path, self.world, self._time)
        self.story.begin()
        for _ in range(count):
            self._time.sleep_until(self._time.now_s() + (0.0 if self._first else every_s))
            self._first = False
            record = self._process.tick(policy)
            assert_explained(record)
            lines += self.story.tell(record)
        return lines + self.story.rest()

    def _restart(self, rest: str, number: int) -> None:
        found = _match(r"(?:after ([\d.]+) s)?", rest, number)
        if self._process is not None:
            self._process.journal.close()
        self._time.sleep_until(self._time.now_s() + float(found[1] or 0.0))
        self._process = Process.start(self._path, self.world, self._time)

    def _fleet(self, fact: str, number: int) -> None:
        match fact.split():
            case [count, "gpus"]:
                self.world.gpus = int(count)
            case ["mode", mode]:
                self.world.mode = mode
            case ["hold", seconds, "s"]:
                self.world.limits["scale_in_hold_s"] = float(seconds)
            case ["step", count]:
                self.world.limits["replicas_per_step"] = int(count)
            case ["budget", count]:
                self.world.limits["scalings_per_hour"] = int(count)
            case ["not", "frozen"]:
                self.world.freeze = []
            case ["frozen", *cron, "for", hours, "h"]:
                self.world.freeze = [{"cron": " ".join(cron), "hours": float(hours)}]
            case _:
                raise ValueError(f"line {number}: a fleet has no {fact!r}")

    def _pool(self, pool: Pool, fact: str, number: int) -> None:
        match fact.split():
            case [count, "replicas" | "replica"]:
                pool.replicas = int(count)
            case [load, "calls/s"]:
                pool.calls_per_s = float(load)
            case ["min", count]:
                pool.least = int(count)
            case ["max", count]:
                pool.most = int(count)
            case [replica, state]:
                states = ("serves", "down", "gone", "hung", "blind", "asleep")
                pool.troubles[replica] = _one_of(state, states, number)
            case _:
                raise ValueError(f"line {number}: a pool has no {fact!r}")

    def assert_replayed(self) -> None:
        """The journal, replayed, decides the same: whatever happened, including restarts and reloads."""
        with closing(SqliteJournal(self._path)) as journal:
            entries = [Recorded(s.state_before, s.policy_text, s.record) for s in journal.replayable()]
        replayed = list(replay(entries, _parsed, canonical_bytes))
        assert [one.record for one in replayed] == self.story.records
        assert all(one.same for one in replayed)


def _parsed(text: str) -> object:
    return parse(text, "the journal", telemetry_required=False).policy


def assert_explained(record: TickRecord) -> None:
    """Every move prints all its reasons and what to type."""
    for move in record.decision.moves:
        text = "".join(explain.move_text(move, record).split())
        assert all("".join(change.reason.split()) in text for change in move.changes)
        assert "kubectl-nservingscale" in text


def _match(pattern: str, text: str, number: int) -> re.Match[str]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise ValueError(f"line {number}: can't be read at {text!r}")
    return found


def _one_of(word: str, words: tuple[str, ...], number: int) -> str:
    if word not in words:
        raise ValueError(f"line {number}: {word!r} is none of {', '.join(words)}")
    return word
