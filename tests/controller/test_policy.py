from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleets import EXAMPLES, NAMES, TEXT, changed

from controller.decisions import ActionKind, Mode
from controller.errors import PolicyError
from controller.policy import FleetPolicy
from controller.policy_file import load, parse, schema_text


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyError) as refused:
        parse(text, "fleet.yaml")
    return str(refused.value).splitlines()


def problem(*pairs: tuple[str, str]) -> str:
    (only,) = problems(changed(*pairs))
    return only


# ----------------------------------------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("name", NAMES)
def test_example_policies_are_valid_and_without_doubt(name: str) -> None:
    loaded = load(EXAMPLES / name)
    assert loaded.warnings == ()
    assert loaded.path == EXAMPLES / name


def test_examples_are_there_and_the_readme_names_them_all() -> None:
    assert {"minimal.yaml", "two-pools.yaml", "scrape-without-prometheus.yaml", "thanos-with-auth.yaml"} <= set(NAMES)
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"({name})" not in readme] == []


def test_schema_file_is_the_models_schema() -> None:
    written = (EXAMPLES / "fleet.schema.json").read_text(encoding="utf-8")
    assert written == schema_text(), "let `trimtab schema` write rules/policies/fleet.schema.json anew"
    assert json.loads(written)["properties"].keys() == FleetPolicy.model_fields.keys()


def test_loaded_policy_keeps_text_hash_and_values() -> None:
    loaded = parse(TEXT, "fleet.yaml")
    assert loaded.text == TEXT
    assert loaded.path == Path("fleet.yaml")
    assert loaded.sha256 == parse(TEXT, "other.yaml").sha256 != parse(TEXT + "\n", "fleet.yaml").sha256
    assert loaded.policy.pools["assistant-h100"].model.parameters == 70e9
    assert loaded.policy.mode_of(ActionKind.SCALE, "assistant-h100") is Mode.RECOMMEND


def test_scalars_follow_yaml_1_2() -> None:
    text = changed(
        ("app: assistant-h100", "app: no"),
        ("app: assistant-l40s", "app: 2024-01-01"),
        ("name: llama", "name: 1:30"),
        ("count: 16", "count: 0x10"),
    )
    policy = parse(text, "fleet.yaml").policy
    assert policy.pools["assistant-h100"].select == {"app": "no"}
    assert policy.pools["assistant-l40s"].select == {"app": "2024-01-01"}
    assert policy.pools["assistant-h100"].model.name == "1:30"
    assert policy.gpus["H100-SXM"].count == 16


def test_names_keep_their_spelling() -> None:
    text = TEXT.replace("assistant-h100", "007").replace("app: 007", "app: x").replace("L40S", "null")
    policy = parse(text.replace("type: null", 'type: "null"').replace("[007,", '["007",'), "fleet.yaml").policy
    assert list(policy.pools) == ["007", "assistant-l40s"]
    assert list(policy.gpus) == ["H100-SXM", "null"]


def test_aliases_and_merge_keys_work() -> None:
    text = changed(
        ("  assistant-h100:\n", "  assistant-h100: &big\n"),
        (
            "    select: {app: assistant-l40s}\n    model: {name: llama, parameters: 70e9, precision: int4}\n",
            "    <<: *big\n",
        ),
        ("{type: L40S, per_replica: 4}", "{type: L40S, per_replica: 4}\n    select: {app: assistant-l40s}"),
    )
    pools = parse(text, "fleet.yaml").policy.pools
    assert pools["assistant-l40s"].model == pools["assistant-h100"].model
    assert pools["assistant-l40s"].select == {"app": "assistant-l40s"}
    assert pools["assistant-l40s"].gpu.type == "L40S"


def test_label_values_are_taken_as_they_stand() -> None:
    policy = parse(changed(("app: assistant-h100", 'app: " a: \\"b\\"\\n"')), "fleet.yaml").policy
    assert policy.pools["assistant-h100"].select == {"app": ' a: "b"\n'}


def test_no_source_is_an_error_only_where_one_is_needed() -> None:
    text = changed(('  prometheus: {url: "http://prometheus:9090"}', "  interval_s: 5"))
    assert parse(text, "fleet.yaml", telemetry_required=False).policy.telemetry.prometheus is None
    assert problems(text) == [
        'fleet.yaml:3: telemetry: names no source; add prometheus: {url: "http://your-prometheus:9090"}, or scrape '
        "with its targets"
    ]


# ------------------------------------------------------------------------------------------------ what is refused, how


def test_every_problem_is_listed_in_the_order_of_the_file() -> None:
    found = problems(
        changed(
            ("mode: recommend", "mode: recomend"),
            ("prometheus:9090", "prometheus:port"),
            ("count: 8", 'count: "8"'),
            ("tpot_s: 0.05", "tpott_s: 0.05"),
            ("assistant-l40s]", "assistent-l40s]"),
            ("min: 2", "min: 20"),
            ("type: L40S", "type: L40"),
        )
    )
    assert [line.split(" ")[:3] for line in found] == [
        ["fleet.yaml:2:", "mode:", "is"],
        ["fleet.yaml:4:", "telemetry.prometheus.url:", "is"],
        ["fleet.yaml:6:", "gpus.H100-SXM.count:", "is"],
        ["fleet.yaml:7:", "gpus.L40S.count:", "is"],
        ["fleet.yaml:10:", "services.assistant.slo:", "has"],
        ["fleet.yaml:10:", "services.assistant.slo.tpott_s:", "is"],
        ["fleet.yaml:12:", "services.assistant.pools[1]:", "names"],
        ["fleet.yaml:18:", "pools.assistant-h100.replicas.min:", "is"],
        ["fleet.yaml:19:", "pools.assistant-l40s:", "is"],
        ["fleet.yaml:22:", "pools.assistant-l40s.gpu.type:", "is"],
    ]
    assert found[6].endswith('is not under pools; did you mean "assistant-l40s"?')
    assert found[4].endswith("has no tpot_s; add the key tpot_s here")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("version: 1", "version: 2", "fleet.yaml:1: version: is the number 2, and 1 is wanted"),
        ("version: 1\n", "", "fleet.yaml:1: the file has no version; add the key version here"),
        ("mode: recommend", "mode:", "fleet.yaml:2: mode: is empty"),
        ("mode: recommend", "mode: recommend\nmode: act", "fleet.yaml:3: mode: stands here twice, on line 2 and again"),
        (
            "mode: recommend",
            "modes: {scal: act}",
            'fleet.yaml:2: modes.scal: is not a known key here; did you mean "scale"?',
        ),
        ("mode: recommend", "mode: !!python/name:os.system x", "fleet.yaml:2: mode: has the tag"),
        ("count: 16", "count: 16.5", "H100-SXM.count: is the number 16.5, and a whole number is wanted"),
        ("count: 16", "count: true", "H100-SXM.count: is the truth value true, and a whole number is wanted"),
        ("count: 16", "count: -1", "H100-SXM.count: is the number -1, and at least 0 is wanted"),
        (
            "count: 16",
            "count: 1" + "0" * 400,
            "H100-SXM.count: is the number of more than 300 digits, and at most 1,000,000",
        ),
        ("hour: 3.2", "hour: .nan", "usd_per_gpu_hour: is the number nan, and a finite number is wanted"),
        ("hour: 3.2", "hour: 1e999", "usd_per_gpu_hour: is the number inf, and a finite number is wanted"),
        ("app: assistant-h100", "port: 8000", "select.port: is the number 8000, and text is wanted; put it in quotes"),
        ("{app: assistant-h100}", "{}", "assistant-h100.select: is a mapping, and at least 1 entry is wanted"),
        (
            "{app: assistant-h100}",
            "[app]",
            "assistant-h100.select: is a list, and a mapping of names to values is wanted",
        ),
        (
            "target: agents",
            "target: agent",
            "interactive, agents, batch or a mapping of shares is wanted; did you mean agents?",
        ),
        ("target: agents", "target: {latency: 1, cost: 0}", "services.assistant.target: has no throughput"),
        (
            "target: agents",
            "target: {latency: 1, cost: 1, throughput: 1}",
            "target: has shares that sum to 3; make them",
        ),
        ("[assistant-h100, assistant-l40s]", "assistant-h100", "a list is wanted; put it in square brackets"),
        ("    slo:", "    slow:", 'services.assistant.slow: is not a known key here; did you mean "slo"?'),
        ("prometheus: {", "prometeus: {", 'telemetry.prometeus: is not a known key here; did you mean "prometheus"?'),
        ("http://prometheus:9090", "prometheus:9090", "an http or https address with a host is wanted"),
        ("http://prometheus:9090", "http://[::1", "which is no address"),
        ("http://prometheus:9090", "http:// p", "an address has no spaces"),
        ("http://prometheus:9090", "http://me:secret@p", "use username and password_file instead"),
        ("http://prometheus:9090", "http://p/api/v1/", "ends in /api/v1"),
        ("http://prometheus:9090", "http://p?x=1", "has a query or fragment"),
        ('9090"', '9090", username: me', "prometheus.username: stands without a password; add password_file"),
        ('9090"', '9090", password_file: /p', "prometheus.password_file: stands without a username"),
        ('9090"', '9090", cert_file: /c', "prometheus.cert_file: stands without its key; add key_file"),
        ('9090"', '9090", key_file: /c', "prometheus.key_file: stands without its certificate; add cert_file"),
        (
            '9090"',
            '9090", username: u, password_file: /p, bearer_token_file: /t',
            "excludes username and password_file",
        ),
        ('9090"', '9090", headers: {"a b": c}', 'headers."a b": is no HTTP header'),
        ('9090"', '9090", headers: {Authorization: c}', "headers.Authorization: would put a secret into the recorded"),
        (
            "telemetry:",
            "telemetry:\n  window_s: 3",
            "telemetry.window_s: is 3, and no rate can be had from less than 4 s",
        ),
        ("telemetry:", "telemetry:\n  labels: {pod: a-b}", 'labels.pod: is the text "a-b", which is no label name'),
        ("telemetry:", "telemetry:\n  tasks: {metric: a-b}", "telemetry.tasks.metric"),
        ("app: assistant-h100", "a.b: c", 'select."a.b": is no label name; write letters, digits and _, like a_b'),
        ("app: assistant-h100", 'app: ""', "select.app: is empty, and would match what lacks the label"),
        ("assistant-l40s]", "assistant-l40s, assistant-h100]", 'pools[2]: names pool "assistant-h100" a second time'),
        ("min: 2", "min: 13", "assistant-h100.replicas.min: is 13, more than max 12"),
        ("max: 12", "max: 12, sleeping_max: 13", "replicas.sleeping_max: is 13, more than max 12"),
        ("min: 2", "min: 5", 'gpus.H100-SXM.count: is 16, and the minima of the pools need 20 ("assistant-h100" 20)'),
        ("app: assistant-l40s", "app: assistant-h100", "assistant-l40s.select: claims the very engines that pool"),
        (
            "app: assistant-l40s",
            "app: assistant-h100, x: y",
            'assistant-l40s.select: claims engines that pool "assistant-h100"',
        ),
        (
            "select: {app: assistant-h100}",
            "mode: act\n    select: {app: h}",
            "pools.assistant-h100: is in mode act and names nothing",
        ),
        ("gpus:", 'freeze: [{cron: "0 22 * 5", hours: 1}]\ngpus:', 'freeze[0].cron: "0 22 * 5" has 4 fields'),
        (
            "gpus:",
            'freeze: [{cron: "0 22 * * 5", hours: 9999}]\ngpus:',
            "freeze[0].hours: is the number 9999, and at most 8,784",
        ),
        ("gpus:", 'freeze: [{cron: "0 22 * * 5", hours: 1, pools: [x]}]\ngpus:', 'freeze[0].pools[0]: names pool "x"'),
        (
            "    target:",
            "    classes: {a: {value_usd: 1, floor: 0.6}, b: {value_usd: 1, floor: 0.6}}\n    target:",
            "sum to 1.2",
        ),
    ],
)
def test_each_fault_is_named_with_place_and_remedy(old: str, new: str, line: str) -> None:
    found = problems(changed((old, new)))
    assert any(line in problem for problem in found), found


def test_pool_of_two_services_is_refused() -> None:
    second = "  other:\n    slo: {ttft_s: 1, tpot_s: 1}\n    pools: [assistant-l40s]\npools:\n"
    assert problem(("pools:\n  assistant", f"{second}  assistant")) == (
        'fleet.yaml:15: services.other.pools[0]: names pool "assistant-l40s", which service "assistant" has already; a '
        "pool serves one service, so take it away from one of them"
    )


def test_two_sources_are_refused() -> None:
    scrape = '9090"}\n  scrape: {targets: [{url: "http://a:1"}]}'
    assert problem(('9090"}', scrape)).startswith("fleet.yaml:3: telemetry: names two sources")


def test_windows_of_direct_scrapes_hold_two_of_them() -> None:
    source = 'prometheus: {url: "http://prometheus:9090"}'
    found = problems(
        changed((source, 'scrape: {targets: [{url: "ftp://a"}]}\n  interval_s: 30\n  window_s: 45\n  fresh_s: 20'))
    )
    assert [line.split(",")[0] for line in found] == [
        'fleet.yaml:4: telemetry.scrape.targets[0].url: is the text "ftp://a"',
        "fleet.yaml:6: telemetry.window_s: is 45 with interval_s 30",
        "fleet.yaml:7: telemetry.fresh_s: is 20",
    ]


def test_a_faulty_pool_is_not_said_to_be_absent() -> None:
    found = problems(changed(("type: H100-SXM", "type: [H100-SXM]"), ("max: 2}", "max: 0}")))
    assert [line.split(" is ")[0] for line in found] == [
        "fleet.yaml:17: pools.assistant-h100.gpu.type:",
        "fleet.yaml:23: pools.assistant-l40s.replicas.max:",
    ]


def test_doubts_are_warnings_with_their_lines() -> None:
    text = changed(
        ("L40S: {", "MYSTERY: {count: 1, usd_per_gpu_hour: 0}\n  L40S: {"),
        ("ttft_s: 2.0", "ttft_s: 99"),
        ("    target:", "    classes: {gold: {value_usd: 1}}\n    target:"),
        ("app: assistant-l40s", "zone: b"),
        ("parameters: 70e9, precision: int4", "precision: int4"),
    )
    assert [" ".join(line.split(" ")[:2]) for line in parse(text, "fleet.yaml").warnings] == [
        "fleet.yaml:7: gpus.MYSTERY:",
        "fleet.yaml:7: gpus.MYSTERY:",
        "fleet.yaml:10: services.assistant.clients.timeout_s:",
        "fleet.yaml:12: services.assistant.classes:",
        "fleet.yaml:22: pools.assistant-l40s.select:",
        "fleet.yaml:23: pools.assistant-l40s.model:",
    ]


# ------------------------------------------------------------------------------------------------- text that is no YAML


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", "f:1: the file is empty"),
        ("# only a comment\n", "f:1: the file is empty"),
        ("---\n...\n", "f:2: the file is empty"),
        ("hello", 'f:1: the file holds the text "hello", and a policy is a mapping'),
        ("\n- a\n", "f:2: the file holds a list"),
        ("a:\n\t- b\n", "f:2: a tab stands here"),
        ("a:\n  b: 1\n\tc: 2\n", "f:3: a tab stands here"),
        ("a: b: c\n", "f:1: not valid YAML (mapping values are not allowed here); put text that contains a colon"),
        ("a: [1,\nb\n", "what began on line 1 does not end well"),
        ("a: 'x\n\n", "what began on line 1 does not end well"),
        ("a: *b\n", "f:1: not valid YAML (found undefined alias 'b'); define it"),
        ("a: @b\n", "put text that begins with such a character in quotes"),
        ("a: 1\n---\nb: 1\n", "f:2: a second document begins here"),
        ("a: 1\nb: \x00\n", "f:2: the character U+0000 is not allowed"),
        ("a: \ud800\n", "f:1: the character U+D800 is not allowed"),
        ('a: "\\ud800"\n', "f:1: a: holds half a character"),
        ('a: "\\UFFFFFFFF"\n', "f:1: the file is not YAML"),
        ("{{ .Values.fleet }}\n", "has a key that is a list or a mapping"),
        ("a: &a [*a]\n", "nested more than 32 levels"),
        ("a: &a\n  <<: *a\n", "nested more than 32 levels"),
        ("[" * 5000, "f:1: the file is nested deeper than YAML can be read"),
        ("a: !!int x\n", 'f:1: a: is the text "x", which is not of the kind int'),
        ("a: !!set {b}\n", "f:1: a: has the tag"),
        ("<<: 5\n", "f:1: the file merges (<<) something that is no mapping"),
    ],
)
def test_text_that_is_no_policy_is_refused_in_one_clear_line_each(text: str, start: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse(text, "f")
    assert any(start in line for line in str(refused.value).splitlines()), str(refused.value)


def test_a_billion_values_of_nested_aliases_are_refused() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "expands to more than 200,000 values" in problems("\n".join(rows))[0]


def test_odd_names_and_values_stay_on_one_line() -> None:
    (line,) = problems(changed(("    target: agents", '    "a\\nb\\u2028\\e": 1\n    target: agents')))
    assert line.isprintable()
    assert '"a\\nb\\u2028\\u001b"' in line
