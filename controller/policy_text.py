"""The text of a policy file as plain values, each with the line it stands on.

PyYAML composes the nodes (no object of the file's choosing is ever built); this module turns them into JSON-like
values. Plain scalars follow YAML 1.2's core rules, not PyYAML's 1.1: `70e9` is a number, `no` and `1:30` are text,
dates are text. Names keep their spelling: a pool called 007 or null is called so. Aliases and merge keys (`<<`) work
within `MAX_VALUES`, so that a few lines of nested aliases can't expand into a billion values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import yaml

from controller.errors import PolicyError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of the file to a value."""

MAX_VALUES = 200_000
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a place in the file, as a clause that continues the place's name; `line` where known."""

    path: KeyPath
    text: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """The file's values, the line of every key path, and what was wrong with the text itself."""

    data: dict[str, Json]
    lines: Mapping[KeyPath, int]
    problems: tuple[Problem, ...]

    def line(self, path: KeyPath) -> int:
        """The line of the value, or of the nearest value around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def read(text: str, name: str) -> Document:
    """The document in the text. Raises PolicyError where it is no YAML mapping; lesser faults are `problems`."""
    root = _compose(text, name)
    if root is None or root.tag == f"{_TAG}null":
        line = _line(root) if root else 1
        raise PolicyError(f"{name}:{line}: the file is empty; `trimtab init` writes a policy to start from.")
    values = _Values(name)
    data = values.read(root, ())
    if not isinstance(data, dict):
        raise PolicyError(
            f"{name}:{_line(root)}: the file holds {described(data)}, and a policy is a mapping with the keys version, "
            "gpus, services and pools; `trimtab init` writes one to start from."
        )
    return Document(data, values.lines, tuple(values.problems))


def described(value: Json) -> str:
    """What a value is, in words, on one line."""
    match value:
        case None:
            return "empty"
        case bool():
            return f"the truth value {'true' if value else 'false'}"
        case int() | float():
            return f"the number {_shortened(_digits(value))}"
        case str():
            return f"the text {quoted(value)}"
        case list():
            return "a list"
        case dict():
            return "a mapping"


def quoted(name: str) -> str:
    """A name in double quotes, on one line, shortened where it is very long."""
    return _shortened(json.dumps(name, ensure_ascii=False))


def spelled(path: KeyPath) -> str:
    """A key path as people write it: services.assistant.pools[0]; odd names are quoted."""
    parts = []
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        else:
            plain = re.fullmatch(r"[\w/-]+", part)
            parts.append(f".{part if plain else quoted(part)}")
    return "".join(parts).removeprefix(".")


def _digits(number: float) -> str:
    if isinstance(number, int) and number.bit_length() > 1000:
        return "of more than 300 digits"
    return f"{number:g}" if isinstance(number, float) and number.is_integer() else str(number)


def _shortened(text: str) -> str:
    # JSON leaves the C1 controls, line separators and the like as they are; a terminal or a log might not.
    safe = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return safe if len(safe) <= 80 else f"{safe[:76]}..."


# ------------------------------------------------------------------------------------------------------ YAML nodes


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's rules for plain scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"^<<$"), ["<"])


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PolicyError(
            f"{name}:{line}: the character U+{ord(text[error.position]):04X} is not allowed in YAML; take it out."
        ) from error
    except yaml.MarkedYAMLError as error:
        raise PolicyError(_broken(error, text, name)) from error
    except RecursionError as error:
        raise PolicyError(
            f"{name}:1: the file is nested deeper than YAML can be read; a policy needs 6 levels."
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:
        # PyYAML trips over some escapes ("\UFFFFFFFF") and directives (%YAML 1.<5000 digits>) with errors of Python's.
        raise PolicyError(
            f"{name}:1: the file is not YAML ({_shortened(str(error))}); look for odd escapes."
        ) from error


def _broken(error: yaml.MarkedYAMLError, text: str, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    problem = error.problem or "it can't be read"
    start = error.context_mark.line + 1 if error.context_mark else line
    stood = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "another document" in problem:
        return f"{name}:{line}: a second document begins here; a policy is one document, so take the --- away."
    if "\\t" in problem or "\t" in stood[: len(stood) - len(stood.lstrip())]:
        return f"{name}:{line}: a tab stands here; YAML indents with spaces only, so replace it with spaces."
    if "mapping values are not allowed" in problem:
        remedy = "put text that contains a colon in quotes, and give the keys of one mapping the same indentation"
    elif "undefined alias" in problem:
        remedy = "define it with & above, or put text that begins with a star in quotes"
    elif "cannot start any token" in problem:
        remedy = "put text that begins with such a character in quotes"
    elif start != line:
        remedy = (
            f"what began on line {start} does not end well: look for a missing quote, bracket or comma from there on"
        )
    else:
        remedy = "look at the quotes, brackets and indentation here"
    context = f"{error.context}, " if error.context else ""
    return f"{name}:{line}: not valid YAML ({_shortened(f'{context}{problem}')}); {remedy}."


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 1


@dataclass(slots=True)
class _Values:
    """Reads nodes into values; keeps lines and problems as it goes."""

    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Json:
        self._spend(node, len(path))
        self.lines.setdefault(path, _line(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.read(item, (*path, position)) for position, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            mapping: dict[str, Json] = {}
            for key, key_line, value in self._entries(node, path, 0):
                self.lines[(*path, key)] = key_line
                mapping[key] = self.read(value, (*path, key))
            return mapping
        self._fault(path, f"has the tag {_shortened(node.tag)}, which a policy can't hold; take the tag away", node)
        return None

    def _entries(self, node: yaml.MappingNode, path: KeyPath, merges: int) -> Iterator[tuple[str, int, yaml.Node]]:
        """Keys with their lines and values: the mapping's own, then those that it merges and does not have itself."""
        self._spend(node, len(path) + merges)
        own: dict[str, tuple[int, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                merged.extend(value.value if isinstance(value, yaml.SequenceNode) else [value])
            elif not isinstance(key, yaml.ScalarNode):
                self._fault(path, "has a key that is a list or a mapping; write a plain name", key)
            else:
                text = self._text(key.value, path, key)
                if text in own:
                    again = f"stands here twice, on line {own[text][0]} and again; take one away or rename it"
                    self._fault((*path, text), again, key)
                else:
                    own[text] = (_line(key), value)
        yield from ((key, line, value) for key, (line, value) in own.items())
        taken = set(own)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self._fault(path, "merges (<<) something that is no mapping; name a mapping's alias", source)
                continue
            for key, line, value in self._entries(source, path, merges + 1):
                if key not in taken:
                    taken.add(key)
                    yield key, line, value

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Json:
        text: str = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return self._text(text, path, node)
            case "merge" | "value":
                return text
            case "null":
                return None
            case "bool" if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            case "int" if _INT.fullmatch(text) and len(text) <= 1000:
                return int(text, 10) if text.lstrip("-+").isdigit() else int(text, 0)
            case "float" if _FLOAT.fullmatch(text):
                return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
            case kind if kind in {"bool", "int", "float"}:
                self._fault(path, f"is {described(text)}, which is not of the kind {kind}; correct it", node)
            case _:
                tag = _shortened(node.tag)
                self._fault(path, f"has the tag {tag}, which a policy can't hold; take the tag away", node)
        return None

    def _text(self, text: str, path: KeyPath, node: yaml.Node) -> str:
        if any("\ud800" <= character <= "\udfff" for character in text):
            self._fault(
                path, "holds half a character (\\ud800 to \\udfff); write the whole one as \\U and 8 digits", node
            )
            return re.sub("[\ud800-\udfff]", "\ufffd", text)
        return text

    def _spend(self, node: yaml.Node, depth: int) -> None:
        self.count += 1
        if depth > MAX_DEPTH:
            raise PolicyError(
                f"{self.name}:{_line(node)}: the file is nested more than {MAX_DEPTH} levels deep here; a policy needs "
                "6 (does an alias contain itself?)."
            )
        if self.count > MAX_VALUES:
            raise PolicyError(
                f"{self.name}:{_line(node)}: the file expands to more than {MAX_VALUES:,} values; use fewer aliases."
            )

    def _fault(self, path: KeyPath, text: str, node: yaml.Node) -> None:
        self.problems.append(Problem(path, text, _line(node)))
