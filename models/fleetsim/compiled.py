"""How the plant's inner loops are compiled.

Without Numba's reference counting: no compiled function allocates or keeps an array (they all live in the `World` that
Python holds for as long as it runs them), and counting took four fifths of the time. With Numba's cache on disk,
because compiling takes most of a minute: it is kept per source file, and a function keeps a copy of those it calls, so
a change in one file would leave stale code in the caches of others. The stamp of every function is therefore that of
all the sources.

Once for each function, not for each kind of integer that its callers happen to have: Numba would compile `push` eleven
times, for 32 and 64 bits and for every literal kind of event. All integers go in as 64 bits.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit, types

SOURCES = (
    "world", "chance", "events", "cache", "meters", "memory", "steps", "engine", "frontend", "gateway", "clients",
    "run", "compiled",
)  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


def _stamp() -> tuple[str, int]:
    texts = [pkgutil.get_data("models.fleetsim", f"{name}.py") or b"" for name in SOURCES]
    return hashlib.sha256(b"\0".join(texts)).hexdigest(), len(texts)


STAMP = _stamp()


def _wide(argument: Any) -> Any:
    """The type that stands for an argument's: no literals, and 64 bits for every signed integer."""
    known: Any = types
    plain = known.unliteral(argument)
    return known.int64 if isinstance(plain, known.Integer) and plain.signed else plain


def compiled(function: F) -> F:
    """Compile a function of worlds and numbers to machine code."""
    compiler: Any = njit
    made = compiler(cache=True, _nrt=False)(function)
    made._cache._cache_file._source_stamp = STAMP
    called = made.get_call_template
    made.get_call_template = lambda args, kws: called(tuple(_wide(arg) for arg in args), kws)
    done: F = made
    return done
