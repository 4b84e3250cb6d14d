"""What the policy's models refuse, in plain English: what stands there, what is wanted, and what to write instead.

The models stop at the first level that is wrong, and the checks of how values fit together need whole models. So that
one look at the file finds everything, `judge` sets faulty values aside (an optional key falls back to its default, a
pool without its required key is left out) and judges the rest again.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from controller.policy import CornerTarget, FleetPolicy
from controller.policy_text import Document, Json, KeyPath, Problem, described, quoted

ROUNDS = 8
"""Setting aside climbs at least one level of the file per round, and it has six."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The policy, as far as it is usable; what is wrong with single values; and the paths that were set aside."""

    policy: FleetPolicy | None
    problems: tuple[Problem, ...]
    aside: tuple[KeyPath, ...]


def judge(document: Document) -> Judgement:
    """Every value against its model."""
    data = copy.deepcopy(document.data)
    problems: list[Problem] = list(document.problems)
    unread = {problem.path for problem in document.problems}
    aside: list[KeyPath] = []
    for _ in range(ROUNDS):
        try:
            # JSON's strict mode is the one in which "8" is no number while "act" is still a Mode.
            policy = FleetPolicy.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            faults = [fault for raw in error.errors(include_url=False) for fault in _fault(raw, data)]
            fresh = [f for f in faults if f.path not in unread and not any(overlap(f.path, path) for path in aside)]
            # A missing key of the whole file overlaps with everything: it is only news in the first round.
            problems.extend(f for f in fresh if f.path or not aside)
            for fault in faults:
                place = fault.path[: next((i for i, part in enumerate(fault.path) if isinstance(part, int)), None)]
                if not _set_aside(data, place):
                    return Judgement(None, tuple(problems), ())
                aside.extend([fault.path, place])
        else:
            return Judgement(policy, tuple(problems), (*aside, *(path for path in unread if path)))
    return Judgement(None, tuple(problems), ())


def overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one path is the other, or leads to it."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def suggestion(word: str, known: Iterable[str]) -> str:
    """'did you mean "x"?' where a known word is close, else the known words."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {quoted(close[0])}?"
    listed = ", ".join(quoted(choice) for choice in choices[:20])
    return f"there are {listed}{' and others' if len(choices) > 20 else ''}" if choices else "there are none"


def _set_aside(data: dict[str, Json], path: KeyPath) -> bool:
    """Take the value away; False where nothing sensible is left then. The version goes back to the only one."""
    if path in {(), ("version",)}:
        absent = data.get("version") != 1
        data["version"] = 1
        return absent
    inside: Json = data
    for part in path[:-1]:
        inside = _inside(inside, part)
    if isinstance(inside, dict):
        inside.pop(str(path[-1]), None)
    return True


def _inside(value: Json, part: str | int) -> Json:
    if isinstance(value, dict) and isinstance(part, str):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


# ------------------------------------------------------------------------------------------- pydantic's errors in words


def _fault(raw: ErrorDetails, data: dict[str, Json]) -> list[Problem]:
    """One error of the models as a problem; none for the branch of a choice that the value does not belong to."""
    path: KeyPath = ()
    value: Json = data
    is_choice = False
    for part in raw["loc"][:-1] if raw["type"] == "missing" else raw["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            path, value = (*path, part), _inside(value, part)
        elif part != "[key]":
            # pydantic names the branch of a union here; a target is one of some words, or a mapping.
            is_choice = part != CornerTarget.__name__
            if is_choice == isinstance(value, dict):
                return []
    if raw["loc"][-1:] == ("[key]",):
        return [Problem(path, f"is not a known key here; {suggestion(str(path[-1]), _expected(raw))}")]
    text = _text(raw, path, value)
    return [Problem(path, text.replace(" is wanted", " or a mapping of shares is wanted", 1) if is_choice else text)]


def _text(raw: ErrorDetails, path: KeyPath, value: Json) -> str:
    match raw["type"]:
        case "missing":
            return f"has no {raw['loc'][-1]}; add the key {raw['loc'][-1]} here"
        case "extra_forbidden":
            return f"is not a known key here; {suggestion(str(path[-1]), _keys(path[:-1]))}"
        case "value_error":
            return f"{quoted(str(value))} {raw['ctx']['error']}"
        case _:
            return f"is {described(value)}, and {_wanted(raw, path)} is wanted{_remedy(raw, value)}"


_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
}


def _wanted(raw: ErrorDetails, path: KeyPath) -> str:
    match raw["type"]:
        case kind if kind in _KINDS:
            return _KINDS[kind]
        case "model_type":
            return f"a mapping with keys such as {', '.join(list(_keys(path))[:4])}"
        case "literal_error" | "enum":
            expected = _expected(raw)
            return f"one of {', '.join(expected)}" if len(expected) > 1 else expected[0]
        case "too_short":
            return f"at least {raw['ctx']['min_length']} entry"
        case _:
            return _range(raw)


def _range(raw: ErrorDetails) -> str:
    for name, words in (("gt", "more than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most")):
        if name in raw.get("ctx", {}):
            return f"{words} {raw['ctx'][name]:,g}"
    # A kind of fault that no model has today: pydantic's own words are better than none.
    return f"something else ({raw['msg'][:1].lower()}{raw['msg'][1:]})"


def _remedy(raw: ErrorDetails, value: Json) -> str:
    match raw["type"], value:
        case _, None:
            return "; give it a value or take the key away"
        case "string_type", bool() | int() | float():
            return "; put it in quotes"
        case (("int_type" | "float_type"), str()) if re.fullmatch(
            r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value.strip().lower()
        ):
            return "; take the quotes away"
        case "list_type", str():
            return "; put it in square brackets"
        case (("literal_error" | "enum"), str()) if close := difflib.get_close_matches(value, _expected(raw), n=1):
            return f"; did you mean {close[0]}?"
        case _:
            return ""


def _expected(raw: ErrorDetails) -> list[str]:
    text = str(raw.get("ctx", {}).get("expected", ""))
    return re.findall(r"'([^']*)'", text) or [text]


def _keys(path: KeyPath) -> Iterable[str]:
    """The keys that a mapping at this place of a policy may have; none where any name goes."""
    kind: object = FleetPolicy
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            known = kind.model_fields.get(str(part))
            kind = _mapping(known.annotation) if known else None
        else:
            kind = _mapping(get_args(kind)[-1]) if get_args(kind) else None
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


def _mapping(annotation: object) -> object:
    """The member of a union that is a model or a collection; the annotation itself where it is no union."""
    if get_origin(annotation) is Annotated:
        return _mapping(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        members = [_mapping(member) for member in get_args(annotation)]
        return next((m for m in members if get_origin(m) in {dict, list} or isinstance(m, type(BaseModel))), None)
    return annotation
