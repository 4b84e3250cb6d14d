"""What can't be is refused with its place, before it can break the counting of a plant."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from plants import ONE_STEP, QUICK, pool

from models.fleetsim.build import Size
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import H100_X4, Clients, Engine, PoolOf, ServiceOf

UNPLAYABLE = [
    lambda: pool(weight=float("nan")),
    lambda: pool(weight=-1.0),
    lambda: pool(hardware=replace(H100_X4, flop_per_s=0.0)),
    lambda: pool(hardware=replace(H100_X4, memory_bytes=float("inf"))),
    lambda: pool(hardware=replace(H100_X4, gpus=-1)),
    lambda: pool(engine=replace(Engine(), block_tokens=0)),
    lambda: pool(engine=replace(Engine(), max_seqs=-1)),
    lambda: pool(engine=replace(Engine(), noise=float("nan"))),
    lambda: pool(starts=replace(QUICK, pull_s=-1.0)),
]


@pytest.mark.parametrize("make", UNPLAYABLE)
def test_a_pool_that_can_not_be_is_refused_with_its_place(make: Callable[[], PoolOf]) -> None:
    with pytest.raises(ValueError, match=r"^s: p: .*; it is"):
        Plant((ServiceOf("s", (make(),), (1.0,), profiles=(ONE_STEP,)),), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"bin_s": float("nan")},
        {"bin_s": float("inf")},
        {"arrivals_s": (float("nan"), 1.0)},
        {"classes": (2.0, -1.0)},
        {"tasks_per_s": (float("nan"),)},
        {"clients": Clients(ttft_timeout_s=float("nan"))},
        {"clients": Clients(retries=-1)},
        {"clients": Clients(resubmit_share=1.5)},
        {"profiles": (replace(ONE_STEP, gap_mean_s=float("nan")),)},
        {"profiles": (replace(ONE_STEP, steps_max=0),)},
        {"slo_ttft_s": float("nan")},
    ],
)
def test_a_service_that_can_not_be_is_refused_with_its_place(fields: dict[str, object]) -> None:
    service = replace(ServiceOf("s", (pool(),), (1.0,), profiles=(ONE_STEP,)), **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^s: .*; it is"):
        Plant((service,), 1)


WRONG_TURNS: list[Callable[[Plant], object]] = [
    lambda plant: plant.run(float("nan")),
    lambda plant: plant.run(float("inf")),
    lambda plant: plant.run(1.0),
    lambda plant: plant.flush(99),
    lambda plant: plant.throttle(99, 2.0),
    lambda plant: plant.throttle(0, float("nan")),
    lambda plant: plant.crash(-4),
    lambda plant: plant.sleep(-4),
    lambda plant: plant.sleep(0, 7),
    lambda plant: plant.wake(99),
    lambda plant: plant.warm(0, 99),
    lambda plant: plant.warm(99, 0),
    lambda plant: plant.lose([0, 99]),
    lambda plant: plant.restore([-1]),
    lambda plant: plant.limit(9, 0, 0, 0, 1.0),
    lambda plant: plant.limit(-1, 0, 0, 0, 1.0),
    lambda plant: plant.limit(0, 0, 0, 0, float("nan")),
    lambda plant: plant.scale("p", -1),
    lambda plant: plant.scale("p", 2.5),  # type: ignore[arg-type]  (what a caller without types may do)
    lambda plant: plant.scale("p", float("nan")),  # type: ignore[arg-type]
    lambda plant: plant.block("p", float("inf")),  # type: ignore[arg-type]
    lambda plant: plant.scale("q", 1),
    lambda plant: plant.wanted("q"),
    lambda plant: plant.block("p", -1),
]


@pytest.mark.parametrize("turn", WRONG_TURNS)
def test_a_knob_that_is_not_there_is_refused_and_nothing_is_changed(turn: Callable[[Plant], object]) -> None:
    plant = Plant((ServiceOf("s", (pool(),), (1.0,), profiles=(ONE_STEP,)),), 1)
    plant.run(30)
    with pytest.raises(ValueError, match=r"^(there is no|p: a number|time does not|a factor on|vLLM sleeps|a rate is)"):
        turn(plant)
    plant.run(60)
    assert not recount(plant)
    assert plant.now_s == 60


def test_a_plant_that_was_too_small_does_not_go_on() -> None:
    plant = Plant((ServiceOf("s", (pool(),), (50.0,), profiles=(ONE_STEP,)),), 1, Size(calls=5))
    for _ in range(2):
        with pytest.raises(IndexError, match="too many calls at once"):
            plant.run(60)
