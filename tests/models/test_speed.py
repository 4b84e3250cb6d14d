"""A tick has to be affordable for large fleets in plain Python."""

import time

from models.capacity import capacity, unloaded, update
from models.cascade import margins
from models.demand import forecast
from models.demand import update as remember
from models.hardware import gpu
from models.plan import plan
from models.triangle import place
from models.types import Bin, Capacity, Estimate, Load, Model, Performance, Pool, Situation, Slo, Steps, Target

POOLS = 10_000


def test_ten_thousand_pools_take_a_few_seconds_of_processor_time() -> None:
    slo = Slo(2.0, 0.05, 95, 0.99)
    card = gpu("H100-SXM", "fp8")
    pool = Pool("p", "s", "H100-SXM", 4, card, Model("m", 70e9, 1, 327_680), 3.2, 1, 12, 240.0, survive_replica=True)
    load = Load(46, 6000, 300, 0.9)
    history = tuple(Bin(15.0 * index, 40.0) for index in range(240))
    estimate = Estimate((1.0,) * 4, tuple(0.0025 if i % 5 == 0 else 0.0 for i in range(16)), 60, 9)
    situations = []
    start_s = time.process_time()
    for index in range(POOLS):
        learnt = update(estimate, pool, Steps(40 + index % 20, 0.03, 900), load)
        known = capacity(learnt, pool, slo, load, 1.2e6)
        unloaded(learnt, pool, load)
        remembered = remember(history, 3600.0, 46.0, 3600.0)
        place(Performance(slo, 0.5, 0.03, 0.1, 0.01, 0.99, 0.002, 0.001))
        margins(pool, known, load, 10)
        situations.append(Situation(pool, 10, 0, forecast(remembered, 3610.0, 240.0), known))
        assert isinstance(known, Capacity)
    targets = plan(tuple(situations), 0.7).targets
    # Of the goal of 1 s for a step of 1,000 pools the mathematics may take 0.7 s.
    assert time.process_time() - start_s < 7
    assert all(isinstance(target, Target) for target in targets)
