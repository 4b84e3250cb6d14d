"""Demand traces as `NAME_<bin>s.csv.gz`: t_s, then loads per second, and where there is one a column `gap`.

A gap is a stretch that was not collected and is interpolated: it is fed like any bin, and not scored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]

LOADS = ("req_s", "ptok_s", "otok_s", "uncached_ptok_s", "clients")
MINUTES = (2, 5, 10)
LONG_BINS = 1000
HOUR_S = 7200.0
_NAME = re.compile(r"(?P<trace>.+)_(?P<bin>\d+)s\.csv(\.gz)?")


@dataclass(frozen=True, slots=True)
class Trace:
    """One load of one trace: means over bins of `bin_s` seconds; gap: bins not to be scored."""

    trace: str
    column: str
    bin_s: int
    load: Array
    gap: NDArray[np.bool_]

    @property
    def name(self) -> str:
        """Trace, bin width and column: one series."""
        return f"{self.trace}_{self.bin_s}s/{self.column}"

    @property
    def kind(self) -> str:
        """What the README of the traces calls it; by name, so that traces kept back fall into the same kinds."""
        if self.bin_s >= 600:
            return "real counts, 600 s"
        if "semiflat" in self.trace or "semisyn" in self.trace or "agentfleet" in self.trace:
            return f"semi-synthetic, {self.bin_s} s"
        if "synth" in self.trace:
            return "built"
        return f"real, {self.bin_s} s"

    @property
    def long(self) -> bool:
        """Whether coverage can be judged on it."""
        return len(self.load) >= LONG_BINS

    def horizons(self) -> dict[int, int]:
        """Minutes to bins, of the horizons that are whole bins."""
        return {m: m * 60 // self.bin_s for m in MINUTES if m * 60 % self.bin_s == 0 and m * 60 >= self.bin_s}

    def targets(self, bins: int) -> Array:
        """The load `bins` later, per origin; NaN beyond the end, and where origin or target lies in a gap."""
        target = np.full(len(self.load), np.nan)
        target[:-bins] = np.where(self.gap[bins:], np.nan, self.load[bins:]) if bins < len(self.load) else np.nan
        target[self.gap] = np.nan
        return target


def read(folder: Path, longest: int | None = None) -> list[Trace]:
    """All loads of all traces in a folder, the first `longest` bins of each; empty where there are none.

    A load without a value is unknown there. Raises ValueError where a file is no table of numbers.
    """
    found: list[Trace] = []
    for file in sorted(folder.glob("*_*s.csv*")):
        match = _NAME.fullmatch(file.name)
        if match is None:
            continue
        try:
            table = pd.read_csv(file).iloc[:longest]
            loads = {column: table[column].astype(np.float64) for column in LOADS if column in table}
        except (ValueError, UnicodeDecodeError, EOFError, OSError) as error:
            raise ValueError(f"{file}: not a trace ({str(error).splitlines()[0]}); mend it or take it away") from error
        impossible = [column for column, load in loads.items() if not ((load >= 0) | load.isna()).all()]
        impossible += [column for column, load in loads.items() if np.isinf(load).any()]
        if impossible:
            raise ValueError(f"{file}: {impossible[0]} has loads that can't be (below zero or infinite); mend it")
        if int(match["bin"]) == 0:
            raise ValueError(f"{file}: bins of 0 s; name the file by the seconds of its bins")
        if "gap" in table and not table["gap"].isin([0, 1]).all():
            raise ValueError(f"{file}: gap has values other than 0 and 1; mend it")
        gap = table["gap"].to_numpy(bool) if "gap" in table else np.zeros(len(table), bool)
        found.extend(
            Trace(match["trace"], column, int(match["bin"]), load.to_numpy(), gap) for column, load in loads.items()
        )
    return found
