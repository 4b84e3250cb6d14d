from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from controller.decisions import Mode
from controller.errors import PolicyError
from controller.observations import Labels
from controller.policy import FleetPolicy
from controller.policy_file import LoadedPolicy, parse
from controller.starter import UNKNOWN_GPU, FoundEngine, engines_from, starter

CAPTURE = Path(__file__).resolve().parents[1] / "data" / "vllm_cpu"
URL = "http://prometheus.monitoring:9090"


def labels(**pairs: str) -> Labels:
    return tuple(sorted(pairs.items()))


def running(metric: str = "vllm:num_requests_running", **pairs: str) -> Labels:
    return labels(**{"__name__": metric, "engine": "0", "model_name": "llama-3.1-8b", **pairs})


def dcgm(pod: str, number: int, model: str, **more: str) -> Labels:
    """As Prometheus shows it without honorLabels: pod and namespace are the exporter's own."""
    own = {"pod": "dcgm-exporter-x", "namespace": "gpu-operator", "exported_pod": pod, "exported_namespace": "serving"}
    return labels(**{"UUID": f"GPU-{pod}-{number}", "modelName": model, **own, **more})


def written(*series: Labels, gpus: tuple[Labels, ...] = ()) -> LoadedPolicy:
    return parse(starter(engines_from(series, gpus), URL), "fleet.yaml")


def policy(*series: Labels, gpus: tuple[Labels, ...] = ()) -> FleetPolicy:
    return written(*series, gpus=gpus).policy


def selects(fleet: FleetPolicy) -> dict[str, dict[str, str]]:
    return {name: pool.select for name, pool in fleet.pools.items()}


# ---------------------------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    "place",
    [
        {"pod": "x", "namespace": "y", "exported_pod": "chat-0", "exported_namespace": "serving"},
        {"pod_name": "chat-0", "pod_namespace": "serving", "pod": "dcgm-exporter-x", "namespace": "y"},
        {"pod": "chat-0", "namespace": "serving"},
    ],
)
def test_gpus_are_found_under_every_style_of_pod_labels(place: dict[str, str]) -> None:
    gpus = tuple(labels(UUID=f"GPU-{n}", modelName="NVIDIA H100 80GB HBM3", **place) for n in range(4))
    (engine,) = engines_from((running(pod="chat-0", namespace="serving"),), gpus)
    assert (engine.engine, engine.gpu_model, engine.gpus) == ("vllm", "NVIDIA H100 80GB HBM3", 4)


def test_gpus_of_a_namesake_in_another_namespace_are_not_mixed_up() -> None:
    gpus = (labels(UUID="a", modelName="Tesla T4", pod="chat-0", namespace="other"),)
    (engine,) = engines_from((running(pod="chat-0", namespace="serving"),), gpus)
    assert (engine.gpu_model, engine.gpus) == (None, 0)


def test_gpus_of_two_models_in_one_pod_have_no_model() -> None:
    gpus = dcgm("chat-0", 0, "Tesla T4"), dcgm("chat-0", 1, "NVIDIA L4")
    (engine,) = engines_from((running(pod="chat-0", namespace="serving"),), gpus)
    assert (engine.gpu_model, engine.gpus) == (None, 2)


def test_two_metrics_of_one_gpu_are_one_gpu() -> None:
    gpus = (
        dcgm("chat-0", 0, "NVIDIA L4", __name__="DCGM_FI_DEV_FB_USED"),
        dcgm("chat-0", 0, "NVIDIA L4", __name__="DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    )
    assert engines_from((running(pod="chat-0", namespace="serving"),), gpus)[0].gpus == 1


def test_engines_are_vllm_or_sglang_by_their_series() -> None:
    found = engines_from((running(), running("sglang:num_running_reqs", app="x")), ())
    assert [engine.engine for engine in found] == ["vllm", "sglang"]
    assert found[0] == FoundEngine(labels(engine="0", model_name="llama-3.1-8b"), "vllm", None)


# ----------------------------------------------------------------------------------------------------------- pools


def test_no_engines_is_a_clear_sentence() -> None:
    with pytest.raises(
        PolicyError, match=r"prometheus\.monitoring:9090 has no engine's series .*; see whether it scrapes"
    ):
        starter((), URL)


def test_engines_without_labels_are_a_clear_sentence() -> None:
    with pytest.raises(PolicyError, match="without any label that tells pools apart"):
        starter((FoundEngine((), "vllm", None),), URL)


def test_captured_engines_become_a_policy() -> None:
    answer = json.loads((CAPTURE / "range" / "num_requests_running.json").read_text())
    series = tuple(labels(**entry["metric"]) for entry in answer["response"]["data"]["result"])
    fleet = policy(*series)
    assert fleet.mode is Mode.RECOMMEND
    assert {pool.model.name for pool in fleet.pools.values()} == {"tiny"}
    assert sorted(select["pool"] for select in selects(fleet).values()) == sorted({dict(one)["pool"] for one in series})


def test_pods_of_one_app_are_one_pool_with_room_to_grow() -> None:
    series = [running(namespace="serving", app="chat", pod=f"chat-{n}", job="vllm") for n in range(3)]
    gpus = tuple(dcgm(f"chat-{n}", card, "NVIDIA H100 80GB HBM3") for n in range(3) for card in range(2))
    loaded = written(*series, gpus=gpus)
    (pool,) = loaded.policy.pools.values()
    assert pool.select == {"namespace": "serving", "app": "chat"}
    assert (pool.replicas.min, pool.replicas.max) == (1, 6)
    assert (pool.gpu.type, pool.gpu.per_replica) == ("H100-SXM", 2)
    assert loaded.policy.gpus["H100-SXM"].count == 12
    assert (pool.model.name, pool.model.parameters) == ("llama-3.1-8b", 8e9)
    assert loaded.policy.services["llama-3-1-8b"].pools == ["chat"]
    assert loaded.warnings == ()


def test_data_parallel_ranks_of_one_pod_are_one_replica() -> None:
    series = [running(app="chat", pod="chat-0", engine=str(rank)) for rank in range(4)]
    assert policy(*series).pools["chat"].replicas.max == 2


def test_unknown_gpus_get_a_placeholder_and_a_comment() -> None:
    text = starter(engines_from((running(app="chat", pod="chat-0"),), ()), URL)
    assert UNKNOWN_GPU in parse(text, "fleet.yaml").policy.gpus
    assert "# check: no DCGM series names these engines' GPUs." in text


def test_a_slice_of_a_card_is_not_the_card() -> None:
    gpus = (dcgm("chat-0", 0, "NVIDIA A100-SXM4-80GB", GPU_I_ID="1", GPU_I_PROFILE="1g.10gb"),)
    fleet = policy(running(namespace="serving", app="chat", pod="chat-0"), gpus=gpus)
    assert list(fleet.gpus) == ["NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"]


@pytest.mark.parametrize(
    ("carried", "chosen"),
    [
        ({"pool": "a", "app": "b", "job": "c"}, "pool"),
        ({"app": "b", "job": "c"}, "app"),
        ({"app_kubernetes_io_name": "b", "deployment": "d", "job": "c"}, "app_kubernetes_io_name"),
        ({"service": "b", "container": "d", "job": "c"}, "service"),
        ({"app": " ", "job": "c"}, "job"),
        ({"instance": "10.0.0.1:8000"}, "model_name"),
    ],
)
def test_most_telling_label_names_the_pool(carried: dict[str, str], chosen: str) -> None:
    (select,) = selects(policy(running(namespace="serving", **carried))).values()
    assert select.keys() == {"namespace", chosen}


def test_models_of_one_app_are_told_apart() -> None:
    fleet = policy(running(app="chat", model_name="a"), running(app="chat", model_name="b"))
    assert selects(fleet) == {
        "chat-a": {"app": "chat", "model_name": "a"},
        "chat-b": {"app": "chat", "model_name": "b"},
    }
    assert {name: service.pools for name, service in fleet.services.items()} == {"a": ["chat-a"], "b": ["chat-b"]}


def test_pools_of_one_model_serve_one_service() -> None:
    fleet = policy(running(app="big"), running(app="small"))
    assert {name: service.pools for name, service in fleet.services.items()} == {"llama-3-1-8b": ["big", "small"]}


def test_engines_with_fewer_labels_never_claim_those_with_more() -> None:
    other = policy(running(app="chat", model_name="a"), running(app="chat", namespace="n", model_name="b"))
    assert sorted(map(len, selects(other).values())) == [2, 3]
    same = policy(running(app="chat", pod="x"), running(app="chat", namespace="n", pod="y"))
    assert selects(same) == {"chat": {"app": "chat"}}
    assert same.pools["chat"].replicas.max == 4


def test_same_name_in_two_namespaces_gives_two_names() -> None:
    fleet = policy(running(namespace="one", app="chat"), running(namespace="two", app="chat"))
    assert set(fleet.pools) == {"chat", "two-chat"}


def test_other_label_names_of_the_scrape_configuration_are_written_down() -> None:
    fleet = policy(running(kubernetes_namespace="n", kubernetes_pod_name="p", app="chat"))
    assert (fleet.telemetry.labels.namespace, fleet.telemetry.labels.pod) == (
        "kubernetes_namespace",
        "kubernetes_pod_name",
    )
    assert fleet.pools["chat"].select == {"kubernetes_namespace": "n", "app": "chat"}


@pytest.mark.parametrize(
    ("model", "parameters", "precision"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 70e9, "bf16"),
        ("RedHatAI/Qwen2.5-0.5B-FP8-dynamic", 0.5e9, "fp8"),
        ("Qwen3-30B-A3B-GPTQ-Int4", 3e9, "int4"),
        ("Mixtral-8x7B-AWQ", None, "int4"),
        ("nvidia/DeepSeek-R1-NVFP4", None, "fp4"),
        ("phi-4", None, "bf16"),
        ("zero-0b", None, "bf16"),
    ],
)
def test_size_and_precision_are_guessed_from_the_name(model: str, parameters: float | None, precision: str) -> None:
    (pool,) = policy(running(app="chat", model_name=model)).pools.values()
    assert (pool.model.name, pool.model.parameters, pool.model.precision) == (model, parameters, precision)


# ------------------------------------------------------------------------------------------------------- properties


HOSTILE = st.sampled_from(
    [
        "",
        " ",
        "no",
        "null",
        "007",
        "1e3",
        'a: "b"',
        "it's",
        "#x",
        "{a}",
        "a\nb: c",
        "*a",
        "\t",
        "\x85\u2028",
        "é😀",
        "\ud800",
    ]
) | st.text(max_size=20)
LABELS = st.dictionaries(
    st.sampled_from(
        ["namespace", "pool", "app", "job", "pod", "instance", "model_name", "engine", "kubernetes_pod_name"]
    )
    | st.text(alphabet=string.ascii_letters + "._-", min_size=1, max_size=8),
    HOSTILE,
    max_size=7,
)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(LABELS, st.sampled_from(["vllm", "sglang"]), st.none() | HOSTILE, st.integers(0, 8)),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_labels_say_the_policy_is_valid_and_selects_them(
    engines: list[tuple[dict[str, str], str, str | None, int]],
) -> None:
    found = tuple(FoundEngine(tuple(sorted(one.items())), kind, card, gpus) for one, kind, card, gpus in engines)
    try:
        text = starter(found, URL)
    except PolicyError as error:
        assert "without any label" in str(error)  # noqa: PT017 - the only refusal that may happen here
        return
    selected = [pool.select.items() for pool in parse(text, "fleet.yaml").policy.pools.values()]
    for engine in found:
        usable = {
            name: value
            for name, value in engine.labels
            if value.strip() and "\ud800" not in value and re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        }
        assert not usable or any(select <= usable.items() for select in selected)


def test_captured_metrics_page_gives_one_engine() -> None:
    page = (CAPTURE / "metrics" / "02_during_1.prom").read_text()
    series = tuple(
        labels(__name__=sample.name, **sample.labels)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:num_requests_running"
    )
    (pool,) = policy(*series).pools.values()
    assert pool.select == {"model_name": pool.model.name}
