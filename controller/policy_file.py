"""The policy file: read, judged as a whole, taken or refused as a whole, and watched for changes.

`parse` is pure: text in, policy out, or PolicyError with every problem on a line of its own:

    fleet.yaml:14: services.assistant.pools[1]: names pool "assistent-l40s", which is not under pools; did you mean ...

There is no substitution of environment variables: the file says what is wanted, to people as well, and the journal
keeps its text. Secrets are files that the policy only names.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from controller.errors import PolicyError
from controller.policy import FleetPolicy
from controller.policy_cautions import CAUTIONS
from controller.policy_checks import CHECKS, REFERENCES, Check, Names, no_source
from controller.policy_faults import judge, overlap
from controller.policy_text import Document, Problem, read, spelled
from controller.policy_words import Json

MAX_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A valid policy, the text it was read from with that text's SHA-256 (hex), and what is doubtful about it."""

    policy: FleetPolicy
    text: str
    sha256: str
    path: Path
    warnings: tuple[str, ...]


def load(path: Path, *, telemetry_required: bool = True) -> LoadedPolicy:
    """The policy in a file. Raises PolicyError, a line per problem."""
    return _decoded(_bytes(path), path, telemetry_required)


def parse(text: str, name: str, *, telemetry_required: bool = True) -> LoadedPolicy:
    """The policy in a text that is called `name` in messages. Raises PolicyError, a line per problem.

    telemetry_required: whether a policy without a telemetry source is refused.
    """
    document = read(text, name)
    judgement = judge(document)
    problems, warnings = list(judgement.problems), list[Problem]()
    if judgement.policy is not None:
        names = _names(document.data)
        checks = (no_source, *CHECKS) if telemetry_required else CHECKS
        # A place that is faulty already says nothing more: what was set aside there is not what was written.
        found = _found(checks, judgement.policy)
        found += [problem for refers in REFERENCES for problem in refers(judgement.policy, names)]
        problems.extend(p for p in found if not any(overlap(p.path, path) for path in judgement.aside))
        warnings.extend(_found(CAUTIONS, judgement.policy) if not problems else ())
    if problems or judgement.policy is None:
        raise PolicyError("\n".join(_lines(problems, document, name)))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LoadedPolicy(judgement.policy, text, digest, Path(name), tuple(_lines(warnings, document, name)))


def schema_text() -> str:
    """The JSON Schema of the policy file, for editors and for checks before a commit."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **FleetPolicy.model_json_schema()}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


class PolicyWatch:
    """Notices when the file's content changes; a bad, half-written or absent file leaves the old policy in force.

    Content is compared, not times: Kubernetes swaps a symbolic link to publish a changed ConfigMap.
    """

    def __init__(self, current: LoadedPolicy, *, telemetry_required: bool = True) -> None:
        self._current = current
        self._telemetry_required = telemetry_required
        self._judged: bytes | None = current.text.encode()
        self._unfinished: bytes | None = None
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the file as it is now is not in force, a line per problem; None where it is."""
        return self._problem

    def poll(self) -> LoadedPolicy | None:
        """The new policy if the file has changed into another valid one, else None; never raises."""
        try:
            content = _bytes(self._current.path)
        except PolicyError as error:
            self._judged, self._problem = None, str(error)
            return None
        plain = content.removeprefix(b"\xef\xbb\xbf")
        if plain == self._current.text.encode():
            self._judged, self._problem = plain, None
            return None
        if plain == self._judged or self._is_unfinished(plain):
            return None
        self._judged = plain
        try:
            fresh = _decoded(content, self._current.path, self._telemetry_required)
        except PolicyError as error:
            self._problem = str(error)
            return None
        self._current, self._problem = fresh, None
        return fresh

    def _is_unfinished(self, content: bytes) -> bool:
        # The first half of a policy can be a policy. Text that does not end with its line is believed once it rests.
        waits = not content.endswith(b"\n") and content != self._unfinished
        self._unfinished = content if waits else None
        return waits


# ------------------------------------------------------------------------------------------------------------- parts


def _bytes(path: Path) -> bytes:
    try:
        # Without O_NONBLOCK a pipe in the file's place would hold the loop up until somebody writes to it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PolicyError(f"{path}: this is no file; name the policy file.")
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise PolicyError(
            f"{path}: there is no such file; name the policy with --policy, or let `trimtab init` write one."
        ) from error
    except IsADirectoryError as error:
        raise PolicyError(f"{path}: this is a directory; name the policy file in it.") from error
    except PermissionError as error:
        raise PolicyError(f"{path}: may not be read by this user; give it read permission.") from error
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"{path}: can't be read ({error}); see whether the path and its disk are in order."
        ) from error
    if len(content) > MAX_BYTES:
        raise PolicyError(f"{path}: is larger than {MAX_BYTES // 1024**2} MiB; this is hardly a policy, name another.")
    return content


def _decoded(content: bytes, path: Path, telemetry_required: bool) -> LoadedPolicy:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{path}:{line}: the text is not UTF-8 from here on; save the file as UTF-8.") from error
    return parse(text, str(path), telemetry_required=telemetry_required)


def _names(data: dict[str, Json]) -> Names:
    services, pools, gpus = (_mapping(data.get(key)) for key in ("services", "pools", "gpus"))
    lists = [_mapping(service).get("pools") for service in services.values()]
    # A single name where a list belongs is one fault, and no reason to call its pool unused.
    served = [pool for pools in lists for pool in (pools if isinstance(pools, list) else [pools])]
    return Names(tuple(pools), tuple(gpus), frozenset(pool for pool in served if isinstance(pool, str)))


def _mapping(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _found(checks: Iterable[Check], policy: FleetPolicy) -> list[Problem]:
    return [problem for check in checks for problem in check(policy)]


def _lines(problems: Iterable[Problem], document: Document, name: str) -> list[str]:
    """Problems as lines, in the order of the file, each once."""
    placed = [(problem.line or document.line(problem.path), problem) for problem in problems]
    ordered = sorted(placed, key=lambda entry: entry[0])
    texts = (f"{name}:{line}: {_place(problem)}{problem.text}" for line, problem in ordered)
    return list(dict.fromkeys(texts))


def _place(problem: Problem) -> str:
    return f"{spelled(problem.path)}: " if problem.path else "the file "
