"""What accelerators can do, and how large models are in memory: the figures behind the prior of the step time.

Memory is in GiB, bandwidth in GB/s, compute in dense TFLOP/s (TOP/s for int8): data sheets often print twice that,
"with sparsity", and the halves stand here. Sizes are the sheets' round ones; with ECC on GDDR6 the driver shows up to
6 % less. A precision without tensor cores of its own is a storage format: weights are widened on the fly, so int4
weights, fp8 on Ampere or fp4 on Hopper compute at the 16-bit rate. A T4 has no bf16, engines run it in fp16. fp32 is
the rate of the vector units, because engines leave TF32 off.

KV cache of a token, where nobody says:  k = 47,000 B * (P / 1e9)^0.44  at 16 bits, P = active parameters.
A least-squares fit on the published configurations (2 * layers * KV heads * head size * 2 B) of Llama 3.2 1B and 3B,
Llama 3.1 8B, 70B and 405B, Mistral 7B, Mixtral 8x7B, Qwen2.5 7B, 32B and 72B, Qwen3 8B, 32B, 30B-A3B and 235B-A22B:
all within a factor of 2, ten of the fourteen within 25 %. It does not hold for multi-head attention without grouping
(Llama 2 7B has four to five times as much) nor for latent attention (DeepSeek V3 has about a third).

Worked: Llama 3.1 8B has 2 * 32 * 8 * 128 * 2 = 131,072 B per token; the rule says 47,000 * 8.03^0.44 = 117,536 B.

Sources: NVIDIA data sheets of T4 (2019), A10 and A100 80GB (2021), H100 (2022), L4, L40, L40S (2023), H200 (2024) and
HGX B200 (2025); NVIDIA A10G figures as AWS publishes them for G5 (2021); AMD data sheets of Instinct MI300X (2023)
and MI325X (2024).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, assert_never

from models.types import Gpu

Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]

KV_BYTES_AT_1E9 = 47_000.0
KV_EXPONENT = 0.44


@dataclass(frozen=True, slots=True)
class Card:
    """One line of the catalogue. fp8, int8 and fp4 are None where the card has no such tensor cores.

    `spellings` are the ways to write its name, after `_words` has taken vendor and memory technology away; its size of
    memory may be added to each.
    """

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    fp32_tflops: float
    half_tflops: float
    fp8_tflops: float | None
    int8_tops: float | None
    fp4_tflops: float | None
    spellings: tuple[str, ...]

    def dense_tflops(self, precision: Precision) -> float:
        """Dense TFLOP/s when the weights are kept in this precision."""
        match precision:
            case "fp32":
                return self.fp32_tflops
            case "bf16" | "fp16" | "int4":
                return self.half_tflops
            case "fp8":
                return self.fp8_tflops or self.half_tflops
            case "int8":
                return self.int8_tops or self.half_tflops
            case "fp4":
                return self.fp4_tflops or self.half_tflops
            case _:
                assert_never(precision)


# A bare "A100" is the 80 GB one and a bare "H100" the SXM one, as most fleets have them; GKE's "tesla-a100" has 40 GB.
CATALOGUE: tuple[Card, ...] = (
    Card("T4", 16, 320, 8.1, 65, None, 130, None, ("t4", "tesla t4")),
    Card("A10", 24, 600, 31.2, 125, None, 250, None, ("a10", "a10 pcie")),
    Card("A10G", 24, 600, 31.5, 70, None, 140, None, ("a10g",)),
    Card("L4", 24, 300, 30.3, 121, 242.5, 242.5, None, ("l4",)),
    Card("L40", 48, 864, 90.5, 181, 362, 362, None, ("l40",)),
    Card("L40S", 48, 864, 91.6, 362, 733, 733, None, ("l40s",)),
    Card(
        "A100-40GB",
        40,
        1555,
        19.5,
        312,
        None,
        624,
        None,
        ("tesla a100", "a100 40gb", "a100 sxm 40gb", "a100 pcie 40gb"),
    ),
    Card("A100-80GB", 80, 2039, 19.5, 312, None, 624, None, ("a100", "a100 sxm")),
    Card("A100-80GB-PCIe", 80, 1935, 19.5, 312, None, 624, None, ("a100 pcie",)),
    Card("H100-SXM", 80, 3350, 67, 989, 1979, 1979, None, ("h100", "h100 sxm", "h100 mega")),
    Card("H100-PCIe", 80, 2000, 51, 756, 1513, 1513, None, ("h100 pcie",)),
    Card("H100-NVL", 94, 3938, 60, 835, 1671, 1671, None, ("h100 nvl",)),
    Card("H200", 141, 4800, 67, 989, 1979, 1979, None, ("h200", "h200 sxm")),
    Card("H200-NVL", 141, 4800, 60, 835, 1671, 1671, None, ("h200 nvl",)),
    Card("B200", 180, 7700, 75, 2250, 4500, 4500, 9000, ("b200", "b200 sxm", "b200 192gb")),
    Card("MI300X", 192, 5300, 163.4, 1307, 2615, 2615, None, ("mi300x",)),
    Card("MI325X", 256, 6000, 163.4, 1307, 2615, 2615, None, ("mi325x",)),
)

NOISE = frozenset({"nvidia", "amd", "instinct", "radeon", "gpu", "hbm2", "hbm2e", "hbm3", "hbm3e", "hgx", "dgx", "oam"})


def _words(type_name: str) -> frozenset[str]:
    """The words of a name that tell cards apart: order, case, separators and socket generations do not."""
    name = re.sub(r"(sxm)\d?|(pcie|nvl)", r" \1\2 ", type_name.lower())
    words = (re.sub(r"^(\d+)gi?b?$", r"\1gb", word) for word in re.findall(r"[a-z0-9]+", name))
    return frozenset(word for word in words if word not in NOISE)


_BY_WORDS = {
    _words(spelling) | size: card
    for card in CATALOGUE
    for spelling in card.spellings
    for size in (frozenset[str](), frozenset({f"{card.memory_gib:g}gb"}))
}


def find(type_name: str) -> Card | None:
    """The catalogue's card of that name, or None.

    It knows policy names ("H100-SXM"), DCGM's modelName ("NVIDIA H100 80GB HBM3"), Kubernetes product labels
    ("NVIDIA-A100-SXM4-80GB") and cloud names ("nvidia-tesla-t4"). A slice or a share of a card ("... MIG 1g.5gb",
    "...-SHARED") is not that card, and is None.
    """
    return _BY_WORDS.get(_words(type_name))


def gpu(
    type_name: str,
    precision: Precision,
    memory_gib: float | None = None,
    bandwidth_gb_per_s: float | None = None,
    dense_tflops: float | None = None,
) -> Gpu | None:
    """The accelerator as the step-time prior needs it; figures that are given override the catalogue's.

    None where a figure is neither given (positive and finite) nor in the catalogue.
    """
    card = find(type_name)
    memory = _given(memory_gib) or (card.memory_gib if card else None)
    bandwidth = _given(bandwidth_gb_per_s) or (card.bandwidth_gb_per_s if card else None)
    compute = _given(dense_tflops) or (card.dense_tflops(precision) if card else None)
    if memory is None or bandwidth is None or compute is None:
        return None
    return Gpu(card.name if card else type_name, memory, bandwidth, compute)


def _given(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) and figure > 0 else None


def bytes_per_parameter(precision: Precision) -> float:
    """Bytes that one parameter takes in memory; the scales of block formats (3-13 % of fp4 and int4) are left out."""
    match precision:
        case "fp32":
            return 4.0
        case "bf16" | "fp16":
            return 2.0
        case "fp8" | "int8":
            return 1.0
        case "fp4" | "int4":
            return 0.5
        case _:
            assert_never(precision)


def kv_bytes_per_token(parameters: float) -> float:
    """KV-cache bytes of one token over all layers, by the rule of thumb above; NaN unless 1 <= parameters < inf."""
    if not 1 <= parameters < math.inf:
        return math.nan
    return KV_BYTES_AT_1E9 * float((parameters / 1e9) ** KV_EXPONENT)
