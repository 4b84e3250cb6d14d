"""What scripted servers of the Prometheus adapter's tests answer."""

from __future__ import annotations

import json
from collections.abc import Callable

from servers import Reply, Request

from controller.adapters.signals import DCGM, ENGINES, TARGETS
from controller.observations import Snapshot

DEADLINE_S = 30.0  # generous: the tests share the machine
EVERY = (*TARGETS, *ENGINES["vllm"], *DCGM)


def vector(*rows: tuple[dict[str, object], object], **more: object) -> bytes:
    """The body of an answer; a row is (labels, value) or (labels, {native histogram})."""
    result = [
        {"metric": labels, "histogram" if isinstance(value, dict) else "value": [1e9, value]} for labels, value in rows
    ]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}, **more}).encode()


EMPTY = vector()


def only_for(part: str, reply: Reply) -> Callable[[Request], Reply]:
    """A server that answers `reply` to queries that contain `part`, and an empty vector to all others."""
    return lambda request: reply if part in request.form["query"] else Reply(EMPTY)


def the_hole(snapshot: Snapshot) -> str:
    """The detail of the only hole."""
    (hole,) = snapshot.holes
    assert "\n" not in hole.detail
    assert "Traceback" not in hole.detail
    return hole.detail
