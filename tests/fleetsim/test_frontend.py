"""The API server takes calls one after another; a call in it is aborted, lost and drained like any other."""

from plants import ONE_STEP, count, engine_with, of_all, plant, pool, ready

from models.fleetsim import world as w
from models.fleetsim.plant import Plant
from models.fleetsim.recount import recount
from models.fleetsim.scenario import Clients

PATIENT = Clients(ttft_timeout_s=1e6, total_timeout_s=1e6, retries=0)


def served(call_s: float, clients: Clients = PATIENT, calls: int = 40, **fields: object) -> Plant:
    one = pool(replicas=1, engine=engine_with(frontend_s=call_s, noise=0.0), **fields)
    return plant(one, rate=0.0, profiles=(ONE_STEP,), clients=clients, arrivals_s=(1.0,) * calls)


def test_a_burst_waits_in_the_api_server_and_not_in_the_queue() -> None:
    at_once, behind = served(0.0), served(0.1)
    for p in (at_once, behind):
        p.run(100.0)
        assert count(p, "finished") == 40
        assert recount(p) == ()
    # The mean of 0.1, 0.2, ..., 4.0 s, and a prefill, which no other delays now.
    assert 2.05 < of_all(behind, "ttft_sum") / 40 < 2.15
    assert of_all(at_once, "ttft_sum") / 40 < 1.0
    assert of_all(behind, "queue_sum") < 1.0


def test_the_gauges_do_not_show_calls_in_the_api_server() -> None:
    p = served(0.5)
    p.run(1.2)
    assert p.world.replicas[0]["arriving"] == 40
    assert p.world.replicas[0]["shown_waiting"] == 0
    assert recount(p) == ()


def test_calls_in_the_api_server_time_out() -> None:
    p = served(1.0, Clients(ttft_timeout_s=3.0, total_timeout_s=60.0, retries=0))
    p.run(100.0)
    assert count(p, "timed_out") > 30
    assert p.world.replicas[0]["arriving"] == 0
    assert recount(p) == ()


def test_a_crash_loses_the_calls_in_the_api_server() -> None:
    p = served(0.5)
    p.run(2.2)
    p.crash(ready(p)[0])
    assert p.world.replicas[0]["arriving"] == 0
    assert count(p, "lost") + count(p, "cut") >= 37
    assert recount(p) == ()


def test_a_draining_replica_serves_what_its_api_server_holds() -> None:
    p = served(0.2)
    p.run(1.3)
    p.scale("p", 0)
    p.run(5.0)
    assert p.world.replicas[0]["state"] == w.DRAINING
    p.run(60.0)
    assert count(p, "finished") == 40
    assert p.world.replicas[0]["state"] == w.GONE
    assert recount(p) == ()


def test_a_bounded_queue_counts_calls_in_the_api_server() -> None:
    one = pool(replicas=1, engine=engine_with(frontend_s=0.5, max_queued=10))
    p = plant(one, rate=0.0, profiles=(ONE_STEP,), clients=PATIENT, arrivals_s=(1.0,) * 40)
    p.run(1.1)
    assert count(p, "refused") == 30


def test_an_eager_engine_does_not_pad_its_batches() -> None:
    def took_s(eager: bool) -> float:
        one = pool(replicas=1, engine=engine_with(eager=eager, noise=0.0, parameters=70e12))
        p = plant(one, rate=0.0, profiles=(ONE_STEP,), clients=PATIENT, arrivals_s=(1.0,) * 5)
        p.run(2000.0)
        return of_all(p, "itl_sum")

    assert took_s(True) < took_s(False)
