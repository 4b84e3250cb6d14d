"""How predicted moves are scored: what counts as a change, and when its sign is right."""

import math
import random
from dataclasses import replace

import pytest

from bench.predict import NAMES, Change, Kind, borders, deeds, service_of, sign

MOVED = Change(Kind.MORE, "ttft", -0.2, -0.3, 0.05, calm=True)


def test_the_border_is_what_nine_of_ten_copies_without_a_move_stay_below() -> None:
    still = [Change(Kind.STILL, "ttft", 0.0, size / 100 * (-1) ** size, 0.0, calm=True) for size in range(1, 11)]
    restless = Change(Kind.STILL, "ttft", 0.0, 5.0, 0.0, calm=False)
    assert borders([*still, restless, MOVED]) == dict.fromkeys(NAMES, 0.0) | {"ttft": 0.09}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (MOVED, (1.0, 1)),
        (replace(MOVED, said=0.2), (0.0, 1)),
        (replace(MOVED, said=None), (0.0, 1)),
        (replace(MOVED, said=-1e-6), (0.0, 1)),
        (replace(MOVED, said=-math.inf), (1.0, 1)),
    ],
)
def test_a_change_that_was_not_foreseen_is_wrong(change: Change, expected: tuple[float, int]) -> None:
    assert sign([change], {"ttft": 0.1}) == expected


@pytest.mark.parametrize("change", [replace(MOVED, true=0.09), replace(MOVED, error=0.2)])
def test_a_change_that_may_be_chance_does_not_count(change: Change) -> None:
    share, count = sign([change], {"ttft": 0.1})
    assert math.isnan(share)
    assert count == 0


def test_random_moves_leave_both_pools_a_replica_and_a_weight() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        for deed in deeds(service_of(chance), chance, 10):
            assert deed.replicas >= 1
            assert 0.1 <= deed.weight <= 0.9
            assert 0.4 <= deed.admitted <= 1.0
