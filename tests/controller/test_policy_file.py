from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from fleets import EXAMPLES, NAMES, TEXT, changed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from controller.decisions import Mode
from controller.errors import PolicyError
from controller.policy import CornerTarget
from controller.policy_file import MAX_BYTES, LoadedPolicy, PolicyWatch, load, parse


def test_files_that_can_not_be_read_say_why(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(PolicyError) as refused:
            load(path)
        return str(refused.value)

    assert "there is no such file" in refusal(tmp_path / "absent.yaml")
    assert "is a directory" in refusal(tmp_path)
    assert "can't be read" in refusal(Path("a\0b"))
    (tmp_path / "latin.yaml").write_bytes("a: 1\nb: é\n".encode("latin-1"))
    assert "latin.yaml:2: the text is not UTF-8" in refusal(tmp_path / "latin.yaml")
    (tmp_path / "wide.yaml").write_bytes(TEXT.encode("utf-16"))
    assert "not UTF-8" in refusal(tmp_path / "wide.yaml")
    (tmp_path / "huge.yaml").write_text("#" * (MAX_BYTES + 1))
    assert "larger than 1 MiB" in refusal(tmp_path / "huge.yaml")


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    loaded = load(path)
    assert loaded.policy == parse(TEXT, "fleet.yaml").policy
    assert PolicyWatch(loaded).poll() is None
    path.write_bytes(TEXT.replace("version: 1", "version: 3").replace("\n", "\r\n").encode())
    with pytest.raises(PolicyError, match=r"fleet\.yaml:1: version: "):
        load(path)


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Path, PolicyWatch]:
    path = tmp_path / "fleet.yaml"
    path.write_text(TEXT)
    return path, PolicyWatch(load(path))


def test_watch_returns_a_changed_policy_once(watched: tuple[Path, PolicyWatch]) -> None:
    path, watch = watched
    assert watch.poll() is None
    path.write_text(changed(("mode: recommend", "mode: observe")))
    fresh = watch.poll()
    assert isinstance(fresh, LoadedPolicy)
    assert fresh.policy.mode is Mode.OBSERVE
    assert watch.poll() is None
    path.write_text(TEXT)
    back = watch.poll()
    assert back is not None
    assert back.policy.mode is Mode.RECOMMEND


def test_watch_keeps_the_old_policy_on_a_bad_file_and_says_so(watched: tuple[Path, PolicyWatch]) -> None:
    path, watch = watched
    path.write_text(changed(("mode: recommend", "mode: go")))
    assert watch.poll() is None
    assert watch.problem is not None
    assert f"{path}:2: mode: " in watch.problem
    assert watch.poll() is None
    assert watch.problem is not None
    path.write_text(TEXT)
    assert watch.poll() is None
    assert watch.problem is None


def test_watch_bridges_an_absent_an_empty_and_a_half_written_file(watched: tuple[Path, PolicyWatch]) -> None:
    path, watch = watched
    path.unlink()
    assert watch.poll() is None
    assert "no such file" in str(watch.problem)
    path.write_text("")
    assert watch.poll() is None
    whole = changed(("mode: recommend", "mode: observe")) + "limits: {headroom: 0.65}"
    path.write_text(whole[:-2])
    assert watch.poll() is None
    path.write_text(whole + "\n")
    fresh = watch.poll()
    assert fresh is not None
    assert fresh.policy.limits.headroom == 0.65
    assert watch.problem is None


def test_watch_believes_text_without_a_last_line_end_once_it_rests(watched: tuple[Path, PolicyWatch]) -> None:
    path, watch = watched
    path.write_text(changed(("mode: recommend", "mode: observe")) + "limits: {headroom: 0.6}")
    assert watch.poll() is None
    fresh = watch.poll()
    assert fresh is not None
    assert fresh.policy.limits.headroom == 0.6


def test_watch_follows_a_swapped_symbolic_link(tmp_path: Path) -> None:
    # As Kubernetes publishes a ConfigMap: fleet.yaml -> ..data/fleet.yaml, and ..data is swapped by rename.
    for version, mode in (("one", "recommend"), ("two", "observe")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "fleet.yaml").write_text(changed(("mode: recommend", f"mode: {mode}")))
        os.utime(tmp_path / version / "fleet.yaml", (0, 0))
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "fleet.yaml").symlink_to("..data/fleet.yaml")
    watch = PolicyWatch(load(tmp_path / "fleet.yaml"))
    assert watch.poll() is None
    (tmp_path / "..next").symlink_to("two")
    (tmp_path / "..next").rename(tmp_path / "..data")
    fresh = watch.poll()
    assert fresh is not None
    assert fresh.policy.mode is Mode.OBSERVE


# ---------------------------------------------------------------------------------------------------------- properties


def only_policy_errors(text: str) -> None:
    try:
        parse(text, "fleet.yaml")
    except PolicyError as error:
        lines = str(error).splitlines()
        assert lines
        assert all(line.startswith("fleet.yaml:") and line.isprintable() for line in lines), lines


@settings(deadline=None, derandomize=True)
@given(st.text() | st.text(alphabet="ab:-?[]{}<>,&*!|>'\"%@`#\\ \n\t012.~=<", max_size=60))
@example("? ")
@example("a: !!timestamp 2001-01-01")
@example("%YAML 1.1\n---\na: 1")
@example("%YAML " + "9" * 5000 + ".1\n---\na: 1")
@example("=: 1")
@example("a: =")
@example("a: !<tag:yaml.org,2002:int> 0o9")
@example("version: 0x")
@example("!!map a")
@example("!!seq {}")
@example("!!str []")
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    only_policy_errors(text)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_damage_to_a_policy_is_a_policy_or_a_policy_error(data: st.DataObject) -> None:
    text = (EXAMPLES / data.draw(st.sampled_from(NAMES))).read_text(encoding="utf-8")
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(start + data.draw(st.integers(0, 12)), len(text))
        text = (
            text[:start]
            + data.draw(st.text(max_size=8) | st.sampled_from(["\t", ": ", "- ", "{", "*x", "<<: "]))
            + text[end:]
        )
    only_policy_errors(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_value_in_any_place_is_a_policy_or_a_policy_error(data: st.DataObject) -> None:
    tree = yaml.safe_load((EXAMPLES / data.draw(st.sampled_from(NAMES))).read_text(encoding="utf-8"))
    for _ in range(data.draw(st.integers(1, 3))):
        inside = tree
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(inside[key], dict | list) and inside[key] and data.draw(st.integers(0, 4)):
                inside = inside[key]
                continue
            if isinstance(inside, dict) and data.draw(st.booleans()):
                inside[data.draw(st.text(max_size=8) | st.sampled_from(["pools", "mode", "CornerTarget", "[key]"]))] = (
                    data.draw(VALUES)
                )
            else:
                inside[key] = data.draw(VALUES)
            break
    only_policy_errors(yaml.safe_dump(tree))


@settings(deadline=None, derandomize=True)
@given(st.floats(0, 1), st.floats(0, 1))
def test_three_shares_of_one_whole_are_accepted(one: float, two: float) -> None:
    low, high = sorted((one, two))
    shares = {"latency": low, "throughput": high - low, "cost": 1 - high}
    policy = parse(changed(("target: agents", f"target: {json.dumps(shares)}")), "fleet.yaml").policy
    assert policy.services["assistant"].target == CornerTarget(**shares)


def test_a_pipe_in_the_files_place_is_refused_and_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fleet.yaml")
    with pytest.raises(PolicyError, match=r"fleet\.yaml: this is no file"):
        load(tmp_path / "fleet.yaml")
