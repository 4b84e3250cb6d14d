"""Policies of many pools, and the two parsers of their text, which must agree."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from controller import policy_yaml
from controller.errors import PolicyError
from controller.policy_file import parse

ROOT = Path(__file__).parents[2]
TEXTS = sorted(path for path in ROOT.glob("**/*.y*ml") if ".venv" not in path.parts)
libyaml = pytest.mark.skipif(len(policy_yaml.PARSERS) == 1, reason="PyYAML was built without libyaml")


def shape(node: yaml.Node | None) -> object:
    """A node's tags, values and lines."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return node and (node.tag, node.value, node.start_mark.line)
    inside = [shape(part) for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
    return node.tag, node.start_mark.line, inside


def read_by(parser: object, text: str) -> object:
    try:
        return shape(policy_yaml.nodes(parser, text))
    except (yaml.YAMLError, ValueError, OverflowError, IndexError):
        return "refused"


def policy_text(pools: int, select: str = "{{pool: p{n}}}") -> str:
    lines = ["version: 1", "telemetry: {prometheus: {url: 'http://127.0.0.1:9090'}}"]
    lines += [f"gpus: {{H100-SXM: {{count: {4 * pools}, usd_per_gpu_hour: 3}}}}", "services:"]
    for first in range(0, pools, 5):
        served = ", ".join(f"p{n}" for n in range(first, min(first + 5, pools)))
        lines.append(f"  s{first}: {{slo: {{ttft_s: 2, tpot_s: 0.1}}, pools: [{served}]}}")
    lines.append("pools:")
    for n in range(pools):
        lines += [
            f"  p{n}:",
            f"    select: {select.format(n=n)}",
            "    model: {name: llm, parameters: 70e9}",
            "    gpu: {type: H100-SXM, per_replica: 4}",
            "    replicas: {min: 1, max: 6}",
        ]
    return "\n".join(lines) + "\n"


@libyaml
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_both_parsers_read_every_yaml_file_of_this_repository_alike(path: Path) -> None:
    texts = [policy_yaml.nodes(parser, document) for parser in policy_yaml.PARSERS for document in [first(path)]]
    assert shape(texts[0]) == shape(texts[1])


def first(path: Path) -> str:
    """The first document of a file."""
    return path.read_text(encoding="utf-8").removeprefix("---\n").split("\n---\n")[0]


@libyaml
@given(st.text(alphabet=" \n\t:-,[]{}#&*!|>'\"%@`?~ab01.<", max_size=40))
def test_what_libyaml_takes_the_other_parser_takes_alike_or_refuses(text: str) -> None:
    fast, patient = (read_by(parser, text) for parser in policy_yaml.PARSERS)
    assert fast == patient or "refused" in (fast, patient)


def test_five_thousand_pools_are_judged_in_a_few_seconds() -> None:
    text = policy_text(5000)
    began_s = time.process_time()
    loaded = parse(text, "fleet.yaml")
    took_s = time.process_time() - began_s
    assert len(loaded.policy.pools) == 5000
    assert loaded.warnings == ()
    # 4 s on a busy machine with libyaml; some 20 s more where every pool is compared with every other.
    assert took_s < (10.0 if len(policy_yaml.PARSERS) > 1 else 40.0)


def test_pools_that_many_others_rival_are_named_up_to_a_hundred_times() -> None:
    text = policy_text(300, "{{label{n}: x}}")
    warnings = parse(text, "fleet.yaml").warnings
    assert len(warnings) == 100
    assert 'p1.select: and that of pool "p0" have no label with different values' in warnings[0]


def test_a_pool_that_claims_what_one_of_thousands_claims_is_found() -> None:
    text = policy_text(2000).replace("select: {pool: p1999}", "select: {pool: p7, zone: a}")
    with pytest.raises(PolicyError, match=r'pools\.p1999\.select: claims engines that pool "p7" claims too'):
        parse(text, "fleet.yaml")


@pytest.mark.parametrize("text", ["[" * 900_000, "- " * 400_000, "{a: " * 200_000], ids=["flow", "block", "maps"])
def test_text_that_is_nested_without_end_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^fleet.yaml:1: .*nested"):
        parse(text, "fleet.yaml")
