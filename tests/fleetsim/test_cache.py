"""The prefix cache is a least-recently-used list of block hashes: held equal to a plain one, request by request.

Where the plant departs from vLLM by design: a request's last, partly filled block is free at once when it ends (vLLM
keeps it, without a hash, at the end of the same list until it is evicted), a second copy of blocks that two requests
computed at the same time is too, and the blocks of an answer that was given up are forgotten when its step is tried
again.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from plants import count, engine_with, of_all, plant, pool

from models.fleetsim import world as w
from models.fleetsim.plant import Plant
from models.fleetsim.scenario import Clients, Profile

BLOCK = 16
PATIENT = Clients(ttft_timeout_s=1e6, total_timeout_s=1e6)
TALK = Profile("talk", 0.7, 200, 6.0, 0.5, 20, 150.0, 0.8, 40.0, 0.5, 15.0, context_max=2_000)
LONG = Profile("long", 0.3, 500, 3.0, 0.5, 10, 700.0, 0.5, 30.0, 0.5, 40.0, context_max=4_000)


@dataclass
class PlainCache:
    """An LRU over single block hashes, for one request at a time: what is idle, oldest first; what is in use."""

    blocks: int
    idle: OrderedDict[tuple[object, int], None] = field(default_factory=OrderedDict)

    def hit_tokens(self, names: list[tuple[object, int]], tokens: int) -> int:
        hit = 0
        while hit < (tokens - 1) // BLOCK and names[hit] in self.idle:
            hit += 1
        return hit * BLOCK

    def serve(self, names: list[tuple[object, int]], prompt: int, all_tokens: int) -> int:
        """Hit tokens of a request that holds `all_tokens` at its end; its blocks are then freed, the last first."""
        hit = self.hit_tokens(names, prompt)
        full = names[: all_tokens // BLOCK]
        for name in full:
            self.idle.pop(name, None)
        while len(self.idle) > self.blocks - -(-all_tokens // BLOCK):
            self.idle.popitem(last=False)
        for name in reversed(full):
            self.idle[name] = None
        return hit


def served(p: Plant, until_s: float) -> Iterator[tuple[int, int, int, int, int]]:
    """The requests of a replica that serves one at a time: task number, profile, prompt, output, hit tokens."""
    world, last = p.world, -1
    while p.now_s < until_s:
        p.run(p.now_s + 0.01)
        if not world.replicas[0]["running"]:
            continue
        call = world.calls[world.running[0, 0]]
        if call["serial"] != last:
            last = int(call["serial"])
            task = world.tasks[call["task"]]
            yield (
                int(task["serial"]),
                int(task["profile"]),
                int(call["prompt"]),
                int(call["output"]),
                int(call["cached"]),
            )


@pytest.mark.parametrize(("kv_tokens", "least"), [(5_000, 0.1), (12_000, 0.2), (100_000, 0.6)])
def test_hits_are_those_of_a_plain_lru_over_block_hashes(kv_tokens: int, least: float) -> None:
    one = engine_with(kv_tokens=kv_tokens, max_seqs=1)
    p = plant(pool(replicas=1, engine=one), rate=0.12, seed=3, profiles=(TALK, LONG), clients=PATIENT)
    plain = PlainCache(int(p.world.pools[0]["kv_blocks"]))
    lengths: dict[int, int] = {}
    epochs: dict[int, int] = {}
    requests, hits, prompts = 0, 0, 0
    for task, profile, prompt, output, hit in served(p, 1500.0):
        if prompt < lengths.get(task, 0):
            # Its history was cut down: another beginning, other hashes.
            epochs[task] = epochs.get(task, 0) + 1
        lengths[task] = prompt + output
        system = int(p.world.profiles[profile]["system_tokens"]) // BLOCK
        session = (task, epochs.get(task, 0))
        names = [(profile if i < system else session, i) for i in range(-(-(prompt + output) // BLOCK))]
        # The last token's keys and values are never computed.
        assert plain.serve(names, prompt, prompt + output - 1) == hit, (requests, task, prompt)
        requests, hits, prompts = requests + 1, hits + hit, prompts + prompt
    assert requests > 300
    assert least < hits / prompts < 0.95


def test_an_unfinished_prompt_stays_cached_as_far_as_it_was_computed() -> None:
    one = Profile("one", 1.0, 1_600, 1.0, 0.0, 1, 40_000.0, 0.0, 5.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0,), profiles=(one,), clients=Clients(0.8, 60.0, 3))
    p.run(60.0)
    assert count(p, "timed_out") >= 1
    assert of_all(p, "prefix_hits") > 8_000
    assert p.world.tallies["succeeded"].sum() == 1
    assert of_all(p, "prefill_tokens") < 1.5 * 41_600


def test_the_system_prompt_is_one_prompt_for_all_sessions_and_computed_once() -> None:
    one = Profile("one", 1.0, 3_200, 1.0, 0.0, 1, 100.0, 0.0, 5.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=tuple(float(i) for i in range(20)), profiles=(one,))
    p.run(60.0)
    assert of_all(p, "prefill_tokens") == 3_300 + 19 * 100
    assert of_all(p, "prefix_hits") == 19 * 3_200


def test_calls_that_compute_the_same_system_prompt_at_once_each_hold_a_copy() -> None:
    one = Profile("one", 1.0, 3_200, 1.0, 0.0, 1, 160.0, 0.0, 300.0, 0.0, 1.0)
    first = replace(one, name="first", share=0.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.001, 0.001), profiles=(first, one))
    p.warm(0, 0)  # its step is under way when the two arrive, so that the next one takes both
    p.run(1.0)
    both = p.world.calls[p.world.running[0, :2]]
    assert both["system_held"].tolist() == [200, 0]
    assert (both["own_blocks"] >= [10, 210]).all()
    p.run(30.0)
    assert p.world.replicas[0]["kv_used"] == 0
    assert p.world.replicas[0]["kv_idle"] == 200 + 200 + 2 * (459 // 16)


def test_a_flush_forgets_what_is_idle_and_the_next_call_pays_for_it() -> None:
    one = Profile("one", 1.0, 3_200, 1.0, 0.0, 1, 100.0, 0.0, 5.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0, 5.0, 10.0), profiles=(one,))
    p.run(9.0)
    p.flush(0)
    assert p.world.replicas[0]["kv_idle"] == 0
    p.run(20.0)
    assert of_all(p, "prefix_hits") == 3_200


def test_a_warmed_replica_has_the_system_prompt_and_has_paid_for_it() -> None:
    one = Profile("one", 1.0, 3_200, 1.0, 0.0, 1, 100.0, 0.0, 5.0, 0.0, 1.0)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(5.0,), profiles=(one,))
    p.warm(0, 0)
    p.run(4.0)
    assert of_all(p, "prefill_tokens") == 3_200
    assert p.world.numbers[w.WARMED_PROMPT] == 3_200
    assert count(p, "sent") == 0
    p.run(20.0)
    assert of_all(p, "prefix_hits") == 3_200


def test_a_session_that_was_cut_down_finds_only_its_system_prompt() -> None:
    grows = replace(TALK, system_tokens=160, steps_mean=30.0, steps_sigma=0.0, steps_max=30, context_max=1_000)
    p = plant(pool(replicas=1), rate=0.0, arrivals_s=(0.0,), profiles=(grows,), clients=PATIENT)
    least = min(hit for *_, prompt, _output, hit in served(p, 900.0) if prompt > 300 and hit > 0)
    assert least == 160
