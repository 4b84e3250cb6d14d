"""The Prometheus adapter without a Prometheus: what it asks, with which credentials, and how answers are read."""

from __future__ import annotations

import base64
import json
import math
import re
import socket
import ssl
import subprocess
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_replies import DEADLINE_S, EMPTY, EVERY, only_for, the_hole, vector
from servers import Reply, prometheus_policy

from controller.adapters.prometheus import PrometheusTelemetry
from controller.adapters.prometheus_answer import Answer, Bucket, Foreign, Refusal, decode
from controller.adapters.promql import promql
from controller.adapters.signals import DCGM, ENGINES, ENVOY, TARGETS
from controller.errors import TelemetryError
from controller.observations import Sample, Signal
from controller.policy import FleetPolicy

# ------------------------------------------------------------------------------------------------- what is asked


def test_scales_are_exact():
    (entry,) = [entry for entry in DCGM if entry.signal is Signal.GPU_MEMORY_USED_BYTES]
    assert promql(entry, ("UUID",), 60.0).endswith("* 1048576.0")


def test_the_number_of_queries_does_not_grow_with_the_pools(http_server):
    server = http_server(lambda _: Reply(b'{"status": "success", "data": {"resultType": "vector", "result": []}}'))
    asked = []
    for count in (1, 200):
        selects = tuple({"pool": f"pool-{number}", "zone": "z"} for number in range(count))
        telemetry = PrometheusTelemetry(prometheus_policy(server.url, selects=selects))
        before = len(server.requests)
        snapshot = telemetry.read(1e9, 60.0, DEADLINE_S)
        telemetry.close()
        assert snapshot.holes == ()
        asked.append(len(server.requests) - before)
        assert max(len(request.form["query"]) for request in server.requests) <= 8192
    assert asked == [len((*TARGETS, *ENGINES["vllm"], *DCGM))] * 2


def test_gateway_and_tasks_are_asked_for_only_where_a_service_names_their_labels():
    def signals(**service):
        telemetry = PrometheusTelemetry(prometheus_policy("http://127.0.0.1:9", service=service))
        telemetry.close()
        return dict(telemetry.expressions(60.0))

    bare = signals()
    assert not any(signal.value.startswith(("gateway", "tasks")) for signal in bare)
    assert {entry.signal for entry in ENVOY} <= set(signals(gateway={"envoy_cluster_name": "chat"}))
    traced = signals(tasks={"service_name": "agents"})
    assert traced[Signal.TASKS_FAILED_PER_S] == (
        "sum by (service_name) (rate(traces_span_metrics_calls_total"
        '{status_code="STATUS_CODE_ERROR",service_name="agents"}[60000ms]))'
    )


def test_a_label_that_only_some_pools_select_by_groups_but_does_not_narrow():
    telemetry = PrometheusTelemetry(prometheus_policy("http://127.0.0.1:9", selects=({"a": "1", "b": "x"}, {"b": "y"})))
    telemetry.close()
    assert dict(telemetry.expressions(60.0))[Signal.RUNNING] == (
        'sum by (instance, job, pod, namespace, a, b) (vllm:num_requests_running{b=~"x|y|"})'
    )


def test_matchers_that_make_an_expression_too_long_are_left_out():
    selects = tuple({"pool": f"pool-{number:04}" + "x" * 40} for number in range(200))
    telemetry = PrometheusTelemetry(prometheus_policy("http://127.0.0.1:9", selects=selects))
    telemetry.close()
    for _, expression in telemetry.expressions(60.0):
        assert len(expression) < 8192
        assert "pool-" not in expression


def test_a_policy_without_a_prometheus_is_refused():
    bare = prometheus_policy("http://x").model_copy(update={"telemetry": FleetPolicy.model_fields["telemetry"].default})
    with pytest.raises(TelemetryError, match=re.escape("add telemetry.prometheus.url")):
        PrometheusTelemetry(bare)


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://prometheus", "http://", "http://[::1", "http://a:b", ""])
def test_an_url_that_is_none_is_refused_with_an_example(url):
    with pytest.raises(TelemetryError, match="is not an address; write it like http://prometheus:9090"):
        PrometheusTelemetry(prometheus_policy(url))


# --------------------------------------------------------------------------------------- values, warnings, partial


RUNNING = "(vllm:num_requests_running"


def test_nan_and_infinities_are_kept_as_the_server_gave_them(read_prometheus):
    body = vector(*(({"pod": pod}, value) for pod, value in zip("abcd", ("NaN", "+Inf", "-Inf", "0"), strict=True)))
    snapshot = read_prometheus(only_for(f"sum by (instance, job, pod, namespace, pool) {RUNNING}", Reply(body)))
    values = [sample.value for sample in snapshot.samples if sample.signal is Signal.RUNNING]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 0.0]
    assert (snapshot.holes, snapshot.failed) == ((), ())


def test_empty_labels_are_absent_and_order_does_not_matter(read_prometheus):
    rows = [({"pod": "b", "job": ""}, "1"), ({"pod": "a", "__name__": "x"}, "2")]
    snapshots = [
        read_prometheus(
            only_for("sum by (instance, job, pod, namespace, pool) (vllm:num_requests_waiting", Reply(vector(*each)))
        )
        for each in (rows, rows[::-1])
    ]
    assert snapshots[0] == snapshots[1]
    assert snapshots[0].samples == (
        Sample(Signal.WAITING, (("pod", "a"),), 2.0),
        Sample(Signal.WAITING, (("pod", "b"),), 1.0),
    )


def test_an_info_is_no_hole(read_prometheus):
    body = vector(({"pod": "a"}, "1"), infos=["PromQL info: metric might not be a counter"])
    snapshot = read_prometheus(lambda _: Reply(body))
    assert not any("might not" in hole.detail for hole in snapshot.holes)
    assert Signal.RUNNING not in snapshot.failed


def test_a_warning_about_the_arithmetic_is_a_hole_that_leaves_the_signal_answered(read_prometheus):
    body = vector(({"pod": "a"}, "1"), warnings=["PromQL warning: encountered a mix of histograms and floats"])
    snapshot = read_prometheus(only_for("vllm:num_preemptions", Reply(body)))
    assert snapshot.failed == ()
    assert re.match(r"preemptions_per_s: the server warned: PromQL warning", the_hole(snapshot))
    assert [sample.value for sample in snapshot.samples] == [1.0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"isPartial": True}, "declared its answer partial"),
        ({"warnings": ["fetch series: no store matched"]}, "the server warned: fetch series"),
        ({"warnings": ["results truncated due to limit"]}, "truncated"),
    ],
)
def test_a_partial_answer_is_kept_and_its_signal_failed(read_prometheus, more, said):
    snapshot = read_prometheus(only_for("vllm:num_preemptions", Reply(vector(({"pod": "a"}, "1"), **more))))
    assert snapshot.failed == (Signal.PREEMPTIONS_PER_S,)
    assert said in the_hole(snapshot)
    assert len(snapshot.samples) == 1


def test_a_list_of_series_that_is_partial_is_refused(http_server):
    server = http_server(lambda _: Reply(vector(({"pod": "a"}, "1"), isPartial=True)))
    with pytest.raises(TelemetryError, match=r"answered in part only .*; try again when it is whole"):
        PrometheusTelemetry.discover(prometheus_policy(server.url).telemetry.prometheus, "up")


def test_values_that_cannot_be_read_are_counted_in_a_hole_and_the_others_stay(read_prometheus):
    rows = [({"pod": "a"}, "1"), ({"pod": "b"}, "much"), ({"pod": "c"}, None), ({"pod": 4}, "1")]
    snapshot = read_prometheus(only_for("vllm:num_preemptions", Reply(vector(*rows))))
    assert [dict(sample.labels)["pod"] for sample in snapshot.samples] == ["a"]
    assert "preemptions_per_s" in the_hole(snapshot)
    assert "3 of 4 values can't be read" in the_hole(snapshot)
    assert snapshot.failed == ()


NATIVE = {
    "count": "9",
    "sum": "4.2",
    "buckets": [[0, "0.8", "1.6", "3"], [0, "0.1", "0.2", "5"], [3, "0", "0", "1"]],
}


def test_native_histograms_become_cumulative_buckets_with_bounds_around_gaps(read_prometheus):
    snapshot = read_prometheus(
        only_for("vllm:time_to_first_token_seconds_bucket", Reply(vector(({"pod": "a"}, NATIVE))))
    )
    found = [(dict(sample.labels)["le"], sample.value) for sample in snapshot.samples]
    assert found == [("0.0", 0.0), ("0.0", 1.0), ("0.1", 1.0), ("0.2", 6.0), ("0.8", 6.0), ("1.6", 9.0), ("+Inf", 9.0)]
    assert (snapshot.holes, snapshot.failed) == ((), ())


def test_a_histogram_where_a_number_belongs_is_a_hole_and_the_other_way_round(read_prometheus):
    snapshot = read_prometheus(
        lambda request: Reply(vector(({"pod": "a"}, NATIVE if "preempt" in request.form["query"] else "1")))
    )
    details = " ".join(hole.detail for hole in snapshot.holes)
    assert "preemptions_per_s: " in details
    assert "1 series are histograms instead of a number" in details
    assert "ttft_buckets_per_s, itl_buckets_per_s, kv_block_reuse_gap_buckets_per_s: " in details
    assert "1 series are numbers instead of a histogram" in details


@given(
    st.binary()
    | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_any_body_is_read_as_something(body):
    assert isinstance(decode(body), Answer | Refusal | Foreign)


@given(
    st.dictionaries(
        st.sampled_from(["status", "data", "error", "errorType", "warnings", "isPartial"]),
        st.sampled_from(
            ["success", "error", "", 1, None, True, [1], {"resultType": "vector", "result": [1, {}, None]}]
        ),
    )
)
def test_any_envelope_is_read_as_something(envelope):
    assert isinstance(decode(json.dumps(envelope).encode()), Answer | Refusal | Foreign)


@given(st.lists(st.tuples(st.floats(0.001, 1e3), st.floats(1.0, 2.0), st.floats(0, 1e6)), max_size=8))
def test_buckets_of_native_histograms_never_decrease(raw):
    edges, buckets = 0.0, []
    for gap, factor, amount in raw:
        left = edges + gap
        buckets.append([0, repr(left), repr(left * factor), repr(amount)])
        edges = left * factor
    total = sum(amount for _, _, amount in raw)
    decoded = decode(vector(({}, {"count": repr(total), "sum": "0", "buckets": buckets})))
    assert isinstance(decoded, Answer)
    (point,) = decoded.points
    assert isinstance(point.value, tuple)
    assert point.value[-1] == Bucket("+Inf", total)
    assert [bucket.value for bucket in point.value[:-1]] == sorted(bucket.value for bucket in point.value[:-1])
    bounds = [float(bucket.le) for bucket in point.value]
    assert bounds == sorted(bounds)


# ------------------------------------------------------------------------------------- authentication and flavours


def headers_of(http_server, **source):
    server = http_server(lambda _: Reply(EMPTY))
    telemetry = PrometheusTelemetry(prometheus_policy(server.url, **source))
    assert telemetry.read(1e9, 60.0, DEADLINE_S).holes == ()
    telemetry.close()
    return server.requests[-1].headers


def test_a_rotated_bearer_token_is_read_again_for_every_request(http_server, tmp_path):
    token = tmp_path / "token"
    server = http_server(lambda _: Reply(EMPTY))
    telemetry = PrometheusTelemetry(prometheus_policy(server.url, bearer_token_file=str(token)))
    for secret in ("first", "second"):
        token.write_text(f"{secret}\n")
        server.requests.clear()
        assert telemetry.read(1e9, 60.0, DEADLINE_S).holes == ()
        assert {request.headers["Authorization"] for request in server.requests} == {f"Bearer {secret}"}
    token.unlink()
    gone = telemetry.read(1e9, 60.0, DEADLINE_S)
    token.write_text("")
    empty = telemetry.read(1e9, 60.0, DEADLINE_S)
    token.write_bytes(b"\xff\xfe")
    binary = telemetry.read(1e9, 60.0, DEADLINE_S)
    telemetry.close()
    assert f"bearer_token_file {token} can't be read: No such file or directory; correct the path" in the_hole(gone)
    assert f"bearer_token_file {token} does not hold a secret in one line" in the_hole(empty)
    assert f"bearer_token_file {token} can't be read: it is not text" in the_hole(binary)


def test_basic_authentication_takes_its_password_from_a_file(http_server, tmp_path):
    password = tmp_path / "password"
    password.write_text("pä:ss\n", encoding="utf-8")
    found = headers_of(http_server, username="ann", password_file=str(password))
    assert base64.b64decode(found["Authorization"].removeprefix("Basic ")).decode() == "ann:pä:ss"


def test_a_netrc_file_does_not_put_other_credentials_on_requests(http_server, tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login stray password stray\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert "Authorization" not in headers_of(http_server)


def test_tenant_and_further_headers_reach_the_server(http_server):
    found = headers_of(http_server, tenant="a|b", headers={"X-Scope": "x"}, flavour="mimir")
    assert found["X-Scope-OrgID"] == "a|b"
    assert found["X-Scope"] == "x"


def test_a_header_that_cannot_be_sent_is_a_hole(read_prometheus):
    detail = the_hole(read_prometheus(lambda _: Reply(EMPTY), headers={"X-Bad": "a\nb"}))
    assert "can't be asked" in detail
    assert "check telemetry.prometheus: its url, headers and files" in detail


@pytest.mark.parametrize(
    ("flavour", "fields"),
    [
        ("prometheus", {}),
        ("mimir", {}),
        ("thanos", {"dedup": "true", "partial_response": "false", "max_source_resolution": "0s"}),
        ("victoriametrics", {"nocache": "1", "latency_offset": "1ms", "deny_partial_response": "1"}),
    ],
)
def test_each_flavour_gets_its_own_form_fields_in_a_posted_body(http_server, flavour, fields):
    server = http_server(lambda _: Reply(EMPTY))
    telemetry = PrometheusTelemetry(prometheus_policy(f"{server.url}/base/", flavour=flavour, timeout_s=7))
    telemetry.read(1234567890.1234, 60.0, DEADLINE_S)
    telemetry.close()
    for request in server.requests:
        assert (request.method, request.path) == ("POST", "/base/api/v1/query")
        common = {"time": "1234567890.123", "timeout": "7000ms"}
        assert {name: text for name, text in request.form.items() if name != "query"} == {**fields, **common}
        assert ("histogram_" in request.form["query"]) <= (flavour != "victoriametrics")


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder with an authority (ca.pem) and certificates of a server and of a client, each with its key."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(folder, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


@pytest.mark.needs("openssl")
def test_mutual_tls_needs_the_authority_and_the_clients_certificate(http_server, certificates, monkeypatch):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    server = http_server(lambda _: Reply(EMPTY), tls=context)

    def holes(**source):
        telemetry = PrometheusTelemetry(
            prometheus_policy(server.url, **{key: str(certificates / file) for key, file in source.items()})
        )
        snapshot = telemetry.read(1e9, 60.0, DEADLINE_S)
        telemetry.close()
        return " ".join(hole.detail for hole in snapshot.holes)

    whole = {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key"}
    assert holes(**whole) == ""
    assert re.search(r"TLS with https://127.0.0.1:\d+ failed \(.*verify failed.*\); check .* ca_file", holes())
    assert re.search(r"TLS with|broke off", holes(ca_file="ca.pem"))
    assert "absent.key" in holes(**{**whole, "key_file": "absent.key"})
    assert "absent.pem" in holes(**{**whole, "ca_file": "absent.pem"})
    # What the policy says counts, and not a variable of the environment.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates / "client.pem"))
    assert holes(**whole) == ""


def test_a_server_that_speaks_no_http_is_a_hole(read_prometheus):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        snapshot = read_prometheus(None, url=f"http://127.0.0.1:{port}")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert "broke off" in snapshot.holes[0].detail
    assert len(snapshot.failed) == len(EVERY)
