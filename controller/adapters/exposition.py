"""Pages in the Prometheus text format or in OpenMetrics, as rows: the wanted ones, and what was wrong with the others.

Names and labels are read by prometheus_client's parser, each distinct `name{labels}` once: it is the same text in the
next scrape and mostly in the next target, and reading it takes far longer than looking it up. A broken line costs
that line and not the page. A page of which no line is a sample is no metrics page. OpenMetrics is strict: there one
broken line makes the page unreadable.

Times that a target gives itself (milliseconds in the text format, seconds in OpenMetrics) are kept as `Row.at_s`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_fd_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from controller.adapters.series import Row, label_pairs
from controller.observations import Labels

WANTED_MOST = 10_000
"""How many wanted samples a page may have; a vLLM engine has 100, a gateway 5 per cluster. Reading so many that are new
takes one to two seconds."""

OPENMETRICS_LINES = 50_000
"""How many lines an OpenMetrics page may have: its parser takes about 50 microseconds for each, wanted or not."""

MEMORY = 200_000
"""How many distinct `name{labels}` are remembered before all are forgotten: labels that churn must not fill memory."""

SHOWN = 60
"""How much of a broken line a fault shows, in characters."""

_TOO_MANY = f"answered with more than {WANTED_MOST:,} wanted series; see whether this is one target's own page"
_NUMBER = r"[-+]?(?:\.?[0-9][0-9a-fA-FxXpP.+-]*|[iI][nN][fF](?:inity)?|[nN][aA][nN])"
_SAMPLE = re.compile(
    r"(?P<head>(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)?(?:[ \t]*\{.*\}[ \t]*|[ \t]+))"
    rf"(?P<value>{_NUMBER})(?:[ \t]+(?P<time>-?[0-9]{1, 18}))?[ \t]*"
)


@dataclass(frozen=True, slots=True)
class Page:
    """The wanted rows of a page, None where it isn't a readable metrics page; faults are clauses about it."""

    rows: tuple[Row, ...] | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Identity:
    name: str
    labels: Labels


class PageReader:
    """Reads pages; `wants` tells the exposition names whose rows are kept."""

    def __init__(self, wants: Callable[[str], bool]) -> None:
        self._wants = wants
        self._known: dict[str, _Identity] = {}

    def read(self, text: str, content_type: str) -> Page:
        """The page's wanted rows, in its order."""
        if content_type.strip().lower().startswith("application/openmetrics-text"):
            return self._openmetrics(text)
        return self._text(text)

    def _text(self, text: str) -> Page:
        rows: list[Row] = []
        broken: list[str] = []
        samples = 0
        for number, line in enumerate(text.split("\n"), start=1):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            found = _SAMPLE.fullmatch(stripped)
            row = None
            try:
                if found is not None and found["name"] and self._wants(found["name"]):
                    row = self._row(found)
            except ValueError:
                found = None
            if found is None:
                broken.append(f"line {number} is broken ({_shown(stripped)})")
            else:
                samples += 1
            if row is not None:
                rows.append(row)
                if len(rows) > WANTED_MOST:
                    return Page(None, (_TOO_MANY,))
        if broken and not samples:
            return Page(None, (f"did not answer with a metrics page ({broken[0]}); see whether the path is right",))
        if not samples:
            return Page((), ("answered with an empty page; see whether the engine's statistics are switched off",))
        if broken:
            more = f", as are {len(broken) - 1} others" if len(broken) > 1 else ""
            return Page(tuple(rows), (f"{broken[0]}{more}; see what writes this page",))
        return Page(tuple(rows))

    def _row(self, found: re.Match[str]) -> Row:
        identity = self._identity(found["head"].strip())
        at_s = int(found["time"]) / 1000 if found["time"] else None
        return Row(identity.name, identity.labels, float(found["value"]), at_s)

    def _identity(self, head: str) -> _Identity:
        """Name and labels of `name{labels}`. Raises ValueError where it is broken."""
        known = self._known.get(head)
        if known is None:
            # The value 0 stands in for the one that changes; a head that holds more than name and labels shows here.
            samples = [sample for family in text_string_to_metric_families(f"{head} 0") for sample in family.samples]
            if len(samples) != 1 or samples[0].timestamp is not None or samples[0].value != 0:
                raise ValueError("not one sample")
            known = _Identity(samples[0].name, label_pairs(samples[0].labels.items()))
            if len(self._known) >= MEMORY:
                self._known.clear()
            self._known[head] = known
        return known

    def _openmetrics(self, text: str) -> Page:
        if text.count("\n") > OPENMETRICS_LINES:
            return Page(None, (f"gave more than {OPENMETRICS_LINES:,} lines of OpenMetrics; serve the page as text",))
        lines = _Lines(text)
        rows: list[Row] = []
        try:
            for family in openmetrics_families(lines):  # type: ignore[no-untyped-call]  # the library has no types
                for sample in family.samples:
                    if self._wants(sample.name):
                        at_s = math.nan if sample.timestamp is None else float(sample.timestamp)
                        labels = label_pairs(sample.labels.items())
                        rows.append(
                            Row(sample.name, labels, float(sample.value), at_s if math.isfinite(at_s) else None)
                        )
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            reason = _shown(str(error)) or type(error).__name__
            return Page(
                None, (f"gave OpenMetrics that is broken at line {lines.number} ({reason}); see what writes it",)
            )
        return Page(tuple(rows))


class _Lines:
    """The lines of a text, and the number of the one that was read last."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in io.StringIO(self._text):
            self.number += 1
            yield line


def _shown(text: str) -> str:
    """The text on one line and short enough for a sentence."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) <= SHOWN else f"{plain[:SHOWN]}..."
