"""Values of a policy file in the words of a sentence: on one line, printable, and not longer than one can read."""

from __future__ import annotations

import json
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def described(value: Json) -> str:
    """What a value is, in words, on one line."""
    match value:
        case None:
            return "empty"
        case bool():
            return f"the truth value {'true' if value else 'false'}"
        case int() | float():
            return f"the number {shortened(_digits(value))}"
        case str():
            return f"the text {quoted(value)}"
        case list():
            return "a list"
        case dict():
            return "a mapping"


def quoted(name: str) -> str:
    """A name in double quotes, on one line, shortened where it is very long."""
    return shortened(json.dumps(name, ensure_ascii=False))


def _digits(number: float) -> str:
    if isinstance(number, int) and number.bit_length() > 1000:
        return "of more than 300 digits"
    return f"{number:g}" if isinstance(number, float) and number.is_integer() else str(number)


def shortened(text: str) -> str:
    """The text on one line, its beginning where it is very long."""
    # JSON leaves the C1 controls, line separators and the like as they are; a terminal or a log might not.
    safe = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return safe if len(safe) <= 80 else f"{safe[:76]}..."
