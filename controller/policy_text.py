"""The text of a policy file as plain values, each with the line it stands on.

PyYAML composes the nodes (no object of the file's choosing is ever built); this module turns them into JSON-like
values. Plain scalars follow YAML 1.2's core rules, not PyYAML's 1.1: `70e9` is a number, `no` and `1:30` are text,
dates are text. Names keep their spelling: a pool called 007 or null is called so. Aliases and merge keys (`<<`) work
within `MAX_VALUES`, so that a few lines of nested aliases can't expand into a billion values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import yaml

from controller.errors import PolicyError
from controller.policy_words import Json, described, quoted, shortened
from controller.policy_yaml import FLOAT, INT, TAG, compose, line_of

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of the file to a value."""

MAX_VALUES = 200_000
MAX_DEPTH = 32

_HALVES = re.compile("[\ud800-\udfff]")


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
    root = compose(text, name)
    if root is None or root.tag == f"{TAG}null":
        line = line_of(root) if root else 1
        raise PolicyError(f"{name}:{line}: the file is empty; `trimtab init` writes a policy to start from.")
    values = _Values(name)
    data = values.read(root, ())
    if not isinstance(data, dict):
        raise PolicyError(
            f"{name}:{line_of(root)}: the file holds {described(data)}, and a policy is a mapping with the keys "
            "version, gpus, services and pools; `trimtab init` writes one to start from."
        )
    return Document(data, values.lines, tuple(values.problems))


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


# ----------------------------------------------------------------------------------------------------- nodes to values


@dataclass(slots=True)
class _Values:
    """Reads nodes into values; keeps lines and problems as it goes."""

    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Json:
        self._spend(node, len(path))
        self.lines.setdefault(path, line_of(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{TAG}seq":
            return [self.read(item, (*path, position)) for position, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{TAG}map":
            mapping: dict[str, Json] = {}
            for key, key_line, value in self._entries(node, path, 0):
                self.lines[(*path, key)] = key_line
                mapping[key] = self.read(value, (*path, key))
            return mapping
        self._fault(path, f"has the tag {shortened(node.tag)}, which a policy can't hold; take the tag away", node)
        return None

    def _entries(self, node: yaml.MappingNode, path: KeyPath, merges: int) -> Iterator[tuple[str, int, yaml.Node]]:
        """Keys with their lines and values: the mapping's own, then those that it merges and does not have itself."""
        self._spend(node, len(path) + merges)
        own: dict[str, tuple[int, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == f"{TAG}merge":
                merged.extend(value.value if isinstance(value, yaml.SequenceNode) else [value])
            elif not isinstance(key, yaml.ScalarNode):
                self._fault(path, "has a key that is a list or a mapping; write a plain name", key)
            else:
                text = self._text(key.value, path, key)
                if text in own:
                    again = f"stands here twice, on line {own[text][0]} and again; take one away or rename it"
                    self._fault((*path, text), again, key)
                else:
                    own[text] = (line_of(key), value)
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
        match node.tag.removeprefix(TAG):
            case "str":
                return self._text(text, path, node)
            case "merge" | "value":
                return text
            case "null":
                return None
            case "bool" if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            case "int" if INT.fullmatch(text) and len(text) <= 1000:
                return int(text, 10) if text.lstrip("-+").isdigit() else int(text, 0)
            case "float" if FLOAT.fullmatch(text):
                return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
            case kind if kind in {"bool", "int", "float"}:
                self._fault(path, f"is {described(text)}, which is not of the kind {kind}; correct it", node)
            case _:
                tag = shortened(node.tag)
                self._fault(path, f"has the tag {tag}, which a policy can't hold; take the tag away", node)
        return None

    def _text(self, text: str, path: KeyPath, node: yaml.Node) -> str:
        if _HALVES.search(text):
            self._fault(
                path, "holds half a character (\\ud800 to \\udfff); write the whole one as \\U and 8 digits", node
            )
            return _HALVES.sub("\ufffd", text)
        return text

    def _spend(self, node: yaml.Node, depth: int) -> None:
        self.count += 1
        if depth > MAX_DEPTH:
            raise PolicyError(
                f"{self.name}:{line_of(node)}: the file is nested more than {MAX_DEPTH} levels deep here; a policy "
                "needs 6 (does an alias contain itself?)."
            )
        if self.count > MAX_VALUES:
            raise PolicyError(
                f"{self.name}:{line_of(node)}: the file expands to more than {MAX_VALUES:,} values; use fewer aliases."
            )

    def _fault(self, path: KeyPath, text: str, node: yaml.Node) -> None:
        self.problems.append(Problem(path, text, line_of(node)))
