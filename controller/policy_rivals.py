"""Pairs of pools whose selects may match the same engines, found without comparing every pool with every other.

Two selects are told apart by a label that both have, with different values. Where no label does that, the pools are
rivals: for certain where the labels of one are among those of the other (whatever matches the longer select matches
the shorter one as well), else perhaps.

Pools with the same label names are one group, and of two groups only those can be rivals whose values agree on the
names that both groups have; these are looked up. 5,000 pools with one label each cost 5,000 look-ups, not 12 million
comparisons.

    pool            select                         common names      rivals
    a               pool=a                         pool              none
    b               pool=b, zone=1                 pool              none
    c               pool=b                         pool              b, for certain
    d               team=x                         none              a, b and c, perhaps
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.policy import FleetPolicy

Names = tuple[str, ...]


class _Group:
    """Pools with the same label names, by what they have under some of these names."""

    def __init__(self) -> None:
        self._members: list[tuple[int, dict[str, str]]] = []
        self._by_values: dict[Names, dict[Names, list[int]]] = {}

    def agreeing(self, common: Names, select: dict[str, str]) -> list[int]:
        """The members, in order, whose values under the common names are those of the select."""
        if common not in self._by_values:
            index = self._by_values[common] = {}
            for place, of_member in self._members:
                index.setdefault(tuple(of_member[name] for name in common), []).append(place)
        return self._by_values[common].get(tuple(select[name] for name in common), [])

    def add(self, place: int, select: dict[str, str]) -> None:
        self._members.append((place, select))
        for common, index in self._by_values.items():
            index.setdefault(tuple(select[name] for name in common), []).append(place)


def certain_rivals(policy: FleetPolicy) -> Iterator[tuple[str, str]]:
    """Pairs of which one claims what the other claims, the one with more labels first."""
    return _pairs(policy, certain=True)


def likely_rivals(policy: FleetPolicy) -> Iterator[tuple[str, str]]:
    """Pairs of which no label says that they differ, and none that they are the same; more labels first."""
    return _pairs(policy, certain=False)


def _pairs(policy: FleetPolicy, *, certain: bool) -> Iterator[tuple[str, str]]:
    pools, groups = list(policy.pools), dict[Names, _Group]()
    for place, pool in enumerate(pools):
        mine = policy.pools[pool].select
        names = tuple(sorted(mine))
        found: list[int] = []
        for theirs, group in groups.items():
            common = tuple(name for name in names if name in set(theirs))
            if (len(common) == min(len(names), len(theirs))) is certain:
                found += group.agreeing(common, mine)
        for other in sorted(found):
            longer = len(mine) >= len(policy.pools[pools[other]].select)
            yield (pool, pools[other]) if longer else (pools[other], pool)
        groups.setdefault(names, _Group()).add(place, mine)
