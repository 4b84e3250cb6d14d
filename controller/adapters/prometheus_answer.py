"""What a Prometheus-compatible server answered to an instant query, read without losing anything.

The envelope is `{"status", "data": {"resultType", "result"}, "errorType", "error", "warnings", "infos",
"isPartial"}`. Values are strings, "NaN" and "+Inf" among them. Data may come with warnings: those that start with
"PromQL " are about the arithmetic; all others come from storage and mean that data is missing, as VictoriaMetrics'
`isPartial` does. Infos are advice to the query's author and are dropped.

A native histogram stands under `histogram` instead of `value`, as non-empty buckets `[rule, left, right, count]`
beside the total count. It becomes the cumulative buckets of a classic one: one bound per right edge, one more per
left edge that follows a gap (so that interpolation does not reach over the gap), and "+Inf". Worked: the buckets
(0.1, 0.2] with 5 and (0.8, 1.6] with 3 become le 0.1: 0, 0.2: 5, 0.8: 5, 1.6: 8, +Inf: 8.

Source: Prometheus, "HTTP API", format of instant queries and native histograms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf

from controller.observations import Labels

SHOWN_CHARACTERS = 240
"""How much of a server's text is shown to the user."""

SHOWN_WARNINGS = 3


@dataclass(frozen=True, slots=True)
class Bucket:
    """A cumulative bucket: its upper bound as Prometheus writes it, and how much is at or below it."""

    le: str
    value: float


@dataclass(frozen=True, slots=True)
class Point:
    """One element of a vector: a number (maybe NaN or infinite), or the buckets of a native histogram."""

    labels: Labels
    value: float | tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A vector, what is wrong with it (clauses), and whether data is missing from it."""

    points: tuple[Point, ...]
    complaints: tuple[str, ...]
    partial: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server's own error: its kind (`bad_data`, `execution`, `timeout`, ...) and message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something that is not the answer to an instant query, as a clause that completes "the server ...".

    json: whether it was JSON at all.
    """

    detail: str
    json: bool


def decode(body: bytes) -> Answer | Refusal | Foreign:
    """Read a response body, whatever its HTTP status was."""
    try:
        envelope = json.loads(body)
    except (ValueError, RecursionError):
        return Foreign("answered something else than JSON", json=False)
    if not isinstance(envelope, dict):
        return Foreign("answered JSON that is not Prometheus's", json=True)
    if envelope.get("status") == "error" or "error" in envelope:
        return Refusal(shown(envelope.get("errorType", "")), shown(envelope.get("error", "")))
    data = envelope.get("data")
    rows = data.get("result") if isinstance(data, dict) else None
    if envelope.get("status") != "success" or not isinstance(data, dict) or not isinstance(rows, list):
        return Foreign("answered JSON that is not Prometheus's", json=True)
    if data.get("resultType") != "vector":
        return Foreign(f"answered a {shown(data.get('resultType', ''))} where a vector was expected", json=True)
    return _answer(rows, _warnings(envelope.get("warnings")), declared_partial=envelope.get("isPartial") is True)


def shown(text: object) -> str:
    """A server's text as it may stand in a sentence: one line, printable, not too long, no full stop at the end."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split()).rstrip(".")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS].rstrip()}..."


def _answer(rows: list[object], warnings: tuple[str, ...], *, declared_partial: bool) -> Answer:
    points: list[Point] = []
    unreadable: list[object] = []
    for row in rows:
        point = _point(row)
        if point is None:
            unreadable.append(row)
        else:
            points.append(point)
    complaints = [f"the server warned: {shown(warning)}" for warning in warnings[:SHOWN_WARNINGS]]
    if len(warnings) > SHOWN_WARNINGS:
        complaints.append(f"the server warned {len(warnings) - SHOWN_WARNINGS} times more")
    if declared_partial:
        complaints.append("the server declared its answer partial: a storage node did not take part")
    if unreadable:
        first = shown(json.dumps(unreadable[0]))
        complaints.append(f"{len(unreadable)} of {len(rows)} values can't be read, the first is {first}")
    # The order of a vector is not guaranteed; the same world shall make the same snapshot.
    points.sort(key=lambda point: point.labels)
    missing = any(not warning.startswith("PromQL ") for warning in warnings)
    return Answer(tuple(points), tuple(complaints), declared_partial or missing)


def _warnings(raw: object) -> tuple[str, ...]:
    return tuple(str(warning) for warning in raw) if isinstance(raw, list) else ()


def _point(row: object) -> Point | None:
    if not isinstance(row, dict):
        return None
    labels = _labels(row.get("metric"))
    match row:
        case {"value": [_, str(text)]}:
            value: float | tuple[Bucket, ...] | None = _number(text)
        case {"histogram": [_, {"count": str(count), **histogram}]}:
            value = _cumulative(_number(count), histogram.get("buckets", []))
        case _:
            value = None
    return None if labels is None or value is None else Point(labels, value)


def _labels(metric: object) -> Labels | None:
    if not isinstance(metric, dict) or not all(isinstance(text, str) for text in metric.values()):
        return None
    return tuple(sorted((name, text) for name, text in metric.items() if text))


def _number(text: object) -> float | None:
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _cumulative(count: float | None, raw: object) -> tuple[Bucket, ...] | None:
    """Cumulative buckets of a native histogram's, which overlap nowhere; None where something can't be read."""
    if count is None or not isinstance(raw, list):
        return None
    edges: list[tuple[float, float, float]] = []
    for bucket in raw:
        numbers = [_number(text) for text in bucket[1:]] if isinstance(bucket, list) else []
        match numbers:
            case [float(left), float(right), float(amount)]:
                edges.append((left, right, amount))
            case _:
                return None
    buckets: list[Bucket] = []
    below, reached = 0.0, -inf
    for left, right, amount in sorted(edges):
        if left > reached:
            buckets.append(Bucket(repr(left), below))
        below, reached = below + amount, right
        if right < inf:
            buckets.append(Bucket(repr(right), below))
    return (*buckets, Bucket("+Inf", count))
