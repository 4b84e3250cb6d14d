"""Quantiles by Prometheus' rule, held against Prometheus itself, and the algebra of merging."""

import json
import subprocess
from math import inf, isclose, isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import require

from controller.histogram import Histogram, histogram, merge, quantile, share_within

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

bounds = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6, unique=True)
rates = st.floats(0, 1000)
histograms = bounds.flatmap(
    lambda finite: st.lists(rates, min_size=len(finite) + 1, max_size=len(finite) + 1).map(
        lambda inside: built(dict(zip([*sorted(finite), inf], inside, strict=True)))
    )
)
levels = st.floats(0.01, 0.99)


def built(inside: dict[float, float]) -> Histogram:
    """A histogram from the rate inside each bucket (not cumulated)."""
    total, pairs = 0.0, []
    for bound, rate in inside.items():
        total += rate
        pairs.append((bound, total))
    made = histogram(pairs)
    assert made is not None
    return made


# ------------------------------------------------------------------------------------------------ as Prometheus does


def test_the_worked_number_of_the_module() -> None:
    whole = histogram([(0.1, 0), (0.25, 8), (inf, 10)])
    assert whole is not None
    assert quantile(whole, 0.5) == pytest.approx(0.19375)


def test_a_quantile_in_the_last_bucket_is_the_highest_finite_bound() -> None:
    whole = histogram([(0.1, 1), (0.25, 2), (inf, 10)])
    assert whole is not None
    assert quantile(whole, 0.95) == 0.25


def test_there_is_no_quantile_without_observations() -> None:
    whole = histogram([(0.1, 0), (inf, 0)])
    assert whole is not None
    assert quantile(whole, 0.5) is None
    assert share_within(whole, 1.0) is None


def test_there_is_no_histogram_without_its_last_bucket() -> None:
    assert histogram([(0.1, 3), (0.25, 8)]) is None
    assert histogram([]) is None
    assert merge([]) is None


def test_torn_and_impossible_buckets_are_mended_or_left_out() -> None:
    torn = histogram([(inf, 10), (0.25, 3), (0.1, 5), (nan, 4), (-inf, 1), (0.5, nan), (0.7, -1), (0.1, 4)])
    assert torn == Histogram((0.1, 0.25, inf), (5, 5, 10))


@pytest.mark.needs("promtool")
def test_prometheus_computes_the_same_quantiles(tmp_path) -> None:
    shapes = {
        "spread": (1, 4, 9, 3, 2, 1, 0, 1),
        "one bucket": (0, 0, 7, 0, 0, 0, 0, 0),
        "all beyond": (0, 0, 0, 0, 0, 0, 0, 3),
        "all below": (5, 0, 0, 0, 0, 0, 0, 0),
        "gaps": (1, 0, 0, 5, 0, 0, 2, 0.5),
    }
    wholes = {name: built(dict(zip([*BOUNDS, inf], inside, strict=True))) for name, inside in shapes.items()}
    fewer = built({0.1: 2.0, 1.0: 3.0, inf: 1.0})
    assert_prometheus_agrees(tmp_path, {**wholes, "fewer": fewer}, (0.05, 0.5, 0.9, 0.95, 0.99))


def assert_prometheus_agrees(folder, wholes: dict[str, Histogram], asked: tuple[float, ...]) -> None:
    series = [
        {
            "series": f'h_bucket{{name="{name}", le="{"+Inf" if bound == inf else bound}"}}',
            "values": f"{rate}x1",
        }
        for name, whole in wholes.items()
        for bound, rate in zip(whole.bounds, whole.cumulative, strict=True)
    ]
    expected = [
        {
            "expr": f"histogram_quantile({level}, h_bucket)",
            "eval_time": "0m",
            "exp_samples": [
                {"labels": f'{{name="{name}"}}', "value": quantile(whole, level)} for name, whole in wholes.items()
            ],
        }
        for level in asked
    ]
    same = [name for name, whole in wholes.items() if whole.bounds == (*BOUNDS, inf)]
    merged = merge([wholes[name] for name in same])
    assert merged is not None
    expected += [
        {
            "expr": f'histogram_quantile({level}, sum by (le) (h_bucket{{name=~"{"|".join(same)}"}}))',
            "eval_time": "0m",
            "exp_samples": [{"labels": "{}", "value": quantile(merged, level)}],
        }
        for level in asked
    ]
    test = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}]}
    (folder / "quantiles.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        [require("promtool"), "test", "rules", "quantiles.yaml"],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --------------------------------------------------------------------------------------------------------- algebra


@given(histograms, levels, levels)
def test_quantiles_ascend_with_their_level(whole, one, other) -> None:
    low, high = sorted((one, other))
    values = quantile(whole, low), quantile(whole, high)
    if values[0] is not None and values[1] is not None:
        assert values[0] <= values[1] or isclose(*values)
        assert 0 <= values[0] <= whole.bounds[-2]


@given(histograms, st.integers(1, 5), levels)
def test_merging_equals_is_scaling(whole, count, level) -> None:
    merged = merge([whole] * count)
    assert merged is not None
    assert merged.total == pytest.approx(count * whole.total)
    one, all_of_them = quantile(whole, level), quantile(merged, level)
    assert (one is None) is (all_of_them is None)
    if one is not None:
        assert share_within(whole, one) == pytest.approx(share_within(merged, one))


@given(st.lists(histograms, min_size=1, max_size=4))
def test_merging_mixed_layouts_loses_nothing_and_invents_nothing(parts) -> None:
    merged = merge(parts)
    assert merged is not None
    assert merged.total == pytest.approx(sum(part.total for part in parts))
    assert list(merged.cumulative) == sorted(merged.cumulative)
    for part in parts:
        assert set(part.bounds) <= set(merged.bounds)


@settings(max_examples=200)
@given(histograms, levels)
def test_the_share_below_a_quantile_is_its_level(whole, level) -> None:
    value, total = quantile(whole, level), whole.total
    if value is None or level * total > whole.cumulative[-2]:
        return  # beyond the last finite bound nothing is known
    if total < 1e-300:
        return  # half of the smallest float is no float: no share of such a total can be told
    assert share_within(whole, value) == pytest.approx(level, abs=1e-6)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=8), levels)
def test_any_buckets_give_a_number_or_nothing(pairs, level) -> None:
    whole = histogram([*pairs, (inf, 3.0)])
    assert whole is not None
    value = quantile(whole, level)
    assert value is None or not isnan(value)
    within = share_within(whole, 1.0)
    assert within is None or 0 <= within <= 1
