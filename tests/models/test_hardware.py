"""The catalogue is found under the names fleets use, and the rules of thumb hold on published configurations."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.hardware import CATALOGUE, Precision, bytes_per_parameter, find, gpu, kv_bytes_per_token

PRECISIONS = get_args(Precision)

# name, active parameters, layers, KV heads, head size, as published with the models
CONFIGURATIONS = [
    ("Llama 3.2 1B", 1.24e9, 16, 8, 64),
    ("Llama 3.2 3B", 3.21e9, 28, 8, 128),
    ("Llama 3.1 8B", 8.03e9, 32, 8, 128),
    ("Llama 3.1 70B", 70.6e9, 80, 8, 128),
    ("Llama 3.1 405B", 405.9e9, 126, 8, 128),
    ("Mistral 7B", 7.25e9, 32, 8, 128),
    ("Mixtral 8x7B", 12.9e9, 32, 8, 128),
    ("Qwen2.5 7B", 7.62e9, 28, 4, 128),
    ("Qwen2.5 32B", 32.8e9, 64, 8, 128),
    ("Qwen2.5 72B", 72.7e9, 80, 8, 128),
    ("Qwen3 8B", 8.19e9, 36, 8, 128),
    ("Qwen3 32B", 32.8e9, 64, 8, 128),
    ("Qwen3 30B-A3B", 3.3e9, 48, 4, 128),
    ("Qwen3 235B-A22B", 22e9, 94, 4, 128),
]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100-SXM", "H100-SXM"),
        ("H100", "H100-SXM"),
        ("h100sxm5", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM"),
        ("nvidia-h100-mega-80gb", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("nvidia-l40s", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("nvidia-tesla-t4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("nvidia-tesla-a100", "A100-40GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("nvidia-a100-80gb", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H200", "H200"),
        ("nvidia-h200-141gb", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD_Instinct_MI325X", "MI325X"),
    ],
)
def test_finds_a_card_under_the_names_that_fleets_use(spelling: str, name: str) -> None:
    card = find(spelling)
    assert card is not None
    assert card.name == name


@pytest.mark.parametrize(
    "stranger",
    [
        "",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb",
        "NVIDIA-L4-SHARED",
        "NVIDIA RTX A1000",
        "NVIDIA T400 4GB",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GH200 480GB",
        "UNKNOWN-GPU",
    ],
)
def test_does_not_take_a_slice_or_a_stranger_for_a_card(stranger: str) -> None:
    assert find(stranger) is None


def test_every_card_is_found_by_its_own_name() -> None:
    assert [find(card.name) for card in CATALOGUE] == list(CATALOGUE)


def test_no_spelling_names_two_cards() -> None:
    spellings = [spelling for card in CATALOGUE for spelling in card.spellings]
    assert len(spellings) == len(set(spellings))
    for card in CATALOGUE:
        assert all(find(spelling) is card for spelling in card.spellings)


def test_computes_at_the_16_bit_rate_where_a_card_has_no_tensor_cores_for_a_precision() -> None:
    for card in CATALOGUE:
        assert card.dense_tflops("int4") == card.dense_tflops("bf16") == card.dense_tflops("fp16")
        assert card.dense_tflops("fp32") < card.dense_tflops("bf16")
    a100, b200 = find("A100"), find("B200")
    assert a100 is not None
    assert b200 is not None
    assert a100.dense_tflops("fp8") == a100.dense_tflops("fp4") == 312
    assert a100.dense_tflops("int8") == 624
    assert b200.dense_tflops("fp4") == 2 * b200.dense_tflops("fp8") == 4 * b200.dense_tflops("bf16")


def test_given_figures_override_the_catalogue() -> None:
    known = gpu("NVIDIA H100 80GB HBM3", "fp8", bandwidth_gb_per_s=3000)
    assert known is not None
    assert (known.name, known.memory_gib, known.bandwidth_gb_per_s, known.dense_tflops) == ("H100-SXM", 80, 3000, 1979)


def test_a_card_outside_the_catalogue_needs_all_its_figures() -> None:
    assert gpu("in-house", "bf16", memory_gib=32, bandwidth_gb_per_s=1000) is None
    own = gpu("in-house", "bf16", memory_gib=32, bandwidth_gb_per_s=1000, dense_tflops=200)
    assert own is not None
    assert own.name == "in-house"


@given(st.text(), st.sampled_from(PRECISIONS), *[st.none() | st.floats()] * 3)
def test_gpu_is_total_and_has_only_usable_figures(
    name: str, precision: Precision, memory: float | None, bandwidth: float | None, compute: float | None
) -> None:
    found = gpu(name, precision, memory, bandwidth, compute)
    if found is not None:
        assert all(0 < figure < math.inf for figure in (found.memory_gib, found.bandwidth_gb_per_s, found.dense_tflops))


def test_bytes_per_parameter_follow_the_bits() -> None:
    assert {precision: bytes_per_parameter(precision) for precision in PRECISIONS} == {
        "fp32": 4,
        "bf16": 2,
        "fp16": 2,
        "fp8": 1,
        "int8": 1,
        "fp4": 0.5,
        "int4": 0.5,
    }


def test_kv_rule_is_within_its_stated_error_on_published_configurations() -> None:
    errors = []
    for _, parameters, layers, heads, head_size in CONFIGURATIONS:
        errors.append(kv_bytes_per_token(parameters) / (2 * layers * heads * head_size * 2))
    assert all(1 / 2.05 < error < 2.05 for error in errors)
    assert sum(1 / 1.25 <= error <= 1.25 for error in errors) >= 10


def test_kv_rule_gives_the_worked_number() -> None:
    assert kv_bytes_per_token(8.03e9) == pytest.approx(117_536, rel=1e-5)


@given(st.floats())
def test_kv_rule_is_total(parameters: float) -> None:
    answer = kv_bytes_per_token(parameters)
    assert math.isnan(answer) if not 1 <= parameters < math.inf else answer > 0
