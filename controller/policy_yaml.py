"""The text of a policy file as YAML nodes, by YAML 1.2's core rules, or one sentence about why it is no YAML.

libyaml reads where PyYAML was built with it (5,000 pools, 0.9 MB: 1.6 s, against 9 s); it only delivers events, and
the nodes are composed in Python, because its own composer trusts the depth of what it reads. A text that it refuses is
read again by PyYAML's own parser, whose messages say more and which has the last word.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from controller.errors import PolicyError
from controller.policy_words import shortened

TAG = "tag:yaml.org,2002:"
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Resolver(BaseResolver):
    """YAML 1.2's rules for plain scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


_Resolver.add_implicit_resolver(f"{TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Resolver.add_implicit_resolver(f"{TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Resolver.add_implicit_resolver(f"{TAG}int", re.compile(f"^(?:{INT.pattern})$"), list("-+0123456789"))
_Resolver.add_implicit_resolver(f"{TAG}float", re.compile(f"^(?:{FLOAT.pattern})$"), list("-+.0123456789"))
_Resolver.add_implicit_resolver(f"{TAG}merge", re.compile(r"^<<$"), ["<"])


class Patient(Reader, Scanner, Parser, Composer, _Resolver):
    """PyYAML's own parser, whose messages tell what is wrong and where."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)


PARSERS: tuple[Any, ...] = (Patient,)
"""To be tried in this order."""

if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class Fast(CParser, Composer, _Resolver):
        """libyaml's events, composed as PyYAML's own are."""

        get_single_node = Composer.get_single_node

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            _Resolver.__init__(self)

    PARSERS = (Fast, Patient)


def nodes(parser: Any, text: str) -> yaml.Node | None:
    """The root node by one of the parsers; None where the text is empty. Raises what the parser raises."""
    loader = parser(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
        return root
    finally:
        loader.dispose()


def compose(text: str, name: str) -> yaml.Node | None:
    """The root node; None where the text is empty. Raises PolicyError where the text is no YAML."""
    try:
        for parser in PARSERS[:-1]:
            with contextlib.suppress(yaml.YAMLError, ValueError, OverflowError, IndexError, RecursionError):
                return nodes(parser, text)
        return nodes(PARSERS[-1], text)
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
        raise PolicyError(f"{name}:1: the file is not YAML ({shortened(str(error))}); look for odd escapes.") from error


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
    return f"{name}:{line}: not valid YAML ({shortened(f'{context}{problem}')}); {remedy}."


def line_of(node: yaml.Node) -> int:
    """The line that a node begins on, from 1."""
    return node.start_mark.line + 1 if node.start_mark else 1
