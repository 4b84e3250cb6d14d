"""What the policy's models refuse, in plain English: what stands there, what is wanted, and what to write instead.

The models stop at the first level that is wrong, and the checks of how values fit together need whole models. So that
one look at the file finds everything, `judge` sets faulty values aside (an optional key falls back to its default, a
required one to a harmless value) and judges the rest again.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from controller.policy import CornerTarget, FleetPolicy
from controller.policy_text import Document, KeyPath, Problem
from controller.policy_words import Json, described, quoted

ROUNDS = 8
"""More than enough: what is set aside once is in order the next time, or its default is."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The policy, as far as it is usable; what is wrong with single values; and the paths that were set aside."""

    policy: FleetPolicy | None
    problems: tuple[Problem, ...]
    aside: tuple[KeyPath, ...]


def judge(document: Document) -> Judgement:
    """Every value against its model."""
    data = document.data
    problems: list[Problem] = list(document.problems)
    unread = {problem.path for problem in document.problems}
    aside: list[KeyPath] = []
    for _ in range(ROUNDS):
        try:
            # JSON's strict mode is the one in which "8" is no number while "act" is still a Mode.
            policy = FleetPolicy.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            faults = [fault for raw in error.errors(include_url=False) for fault in _faults(raw, data)]
            known = list(aside)
            data = copy.deepcopy(data) if data is document.data else data
            for fault in faults:
                if fault.at not in unread and not any(overlap(fault.at, path) for path in known):
                    problems.append(fault.problem)
                aside.append(_set_aside(data, fault.at))
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


@dataclass(frozen=True, slots=True)
class _Fault:
    """A problem, and the path of the value that has to be set aside: of the absent one, where one is absent."""

    problem: Problem
    at: KeyPath


def _set_aside(data: dict[str, Json], path: KeyPath) -> KeyPath:
    """Take the value away, or put a harmless one in its place where it is required; returns the path of the change."""
    path = path[: next((position for position, part in enumerate(path) if isinstance(part, int)), None)]
    inside: Json = data
    for part in path[:-1]:
        inside = _inside(inside, part)
    if isinstance(inside, dict) and path:
        key, owner = str(path[-1]), _kind(path[:-1])
        known = owner.model_fields.get(key) if _is_model(owner) else None
        harmless = None if known is not None and not known.is_required() else _harmless(_kind(path))
        if harmless is None:
            inside.pop(key, None)
        else:
            inside[key] = harmless
    return path


_HARMLESS: dict[object, Json] = {int: 1_000_000, float: 1.0, str: "x"}


def _harmless(kind: object) -> Json:
    """A value of the kind that no check of the whole objects to: numbers are ample."""
    if _is_model(kind):
        fields = kind.model_fields.items()
        return {name: _harmless(_member(field.annotation)) for name, field in fields if field.is_required()}
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is dict:
            return {"x": _harmless(_member(arguments[1]))}
        case origin if origin is list:
            return [_harmless(_member(arguments[0]))]
        case origin if origin is Literal:
            first: Json = arguments[0]
            return first
        case _:
            return _HARMLESS.get(kind)


def _inside(value: Json, part: str | int) -> Json:
    if isinstance(value, dict) and isinstance(part, str):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


# ------------------------------------------------------------------------------------------- pydantic's errors in words


def _faults(raw: ErrorDetails, data: dict[str, Json]) -> list[_Fault]:
    """One error of the models; none for the branch of a choice that the value does not belong to."""
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
        text = f"is not a known key here; {suggestion(str(path[-1]), _expected(raw))}"
    else:
        text = _text(raw, path, value)
    if is_choice:
        text = text.replace(" is wanted", " or a mapping of shares is wanted", 1)
    return [_Fault(Problem(path, text), (*path, raw["loc"][-1]) if raw["type"] == "missing" else path)]


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
            limit = raw["ctx"][name]
            return f"{words} {int(limit) if limit == int(limit) else limit:,}"
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
    kind = _kind(path)
    return kind.model_fields if _is_model(kind) else ()


def _kind(path: KeyPath) -> object:
    """What belongs at this place of a policy: a model, a collection, a plain type; None where nothing does."""
    kind: object = FleetPolicy
    for part in path:
        if _is_model(kind):
            known = kind.model_fields.get(str(part))
            kind = _member(known.annotation) if known else None
        else:
            kind = _member(get_args(kind)[-1]) if get_origin(kind) in {dict, list} else None
    return kind


def _member(annotation: object) -> object:
    """Of a union the model or collection, else its first member; the annotation itself where it is no union."""
    if get_origin(annotation) is Annotated:
        return _member(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        members = [_member(member) for member in get_args(annotation)]
        return next((m for m in members if get_origin(m) in {dict, list} or _is_model(m)), members[0])
    return annotation


def _is_model(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel)
