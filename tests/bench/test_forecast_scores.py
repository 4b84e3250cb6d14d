"""Traces are read as they are, and forecasts are scored on the origins that the bench says."""

from pathlib import Path

import numpy as np
import pytest

from bench import rivals
from bench.forecast import figures, ours, score
from bench.traces import Trace, read
from models.forecast import LEVELS


def trace(load: np.ndarray, gap: np.ndarray | None = None, name: str = "made") -> Trace:
    return Trace(name, "req_s", 60, load, np.zeros(len(load), bool) if gap is None else gap)


def wandering(bins: int) -> np.ndarray:
    return 20 + np.cumsum(np.random.default_rng(3).normal(0, 0.3, bins))


def test_reads_loads_and_gaps_and_leaves_other_columns_and_files(tmp_path: Path) -> None:
    (tmp_path / "some_trace_60s.csv").write_text("t_s,req_s,hits,gap\n0,1,9,False\n60,,9,True\n120,3,9,False\n")
    (tmp_path / "README.md").write_text("no trace")
    (one,) = read(tmp_path)
    assert (one.trace, one.column, one.bin_s, one.name) == ("some_trace", "req_s", 60, "some_trace_60s/req_s")
    np.testing.assert_array_equal(one.load, [1, np.nan, 3])
    np.testing.assert_array_equal(one.gap, [False, True, False])


@pytest.mark.parametrize(
    "text", ["t_s,req_s\n0,-5\n", "t_s,req_s\n0,inf\n", "t_s,req_s,gap\n0,1,no\n", "t_s,req_s,gap\n0,1,\n"]
)
def test_loads_and_gaps_that_can_not_be_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad_60s.csv").write_text(text)
    with pytest.raises(ValueError, match=r"bad_60s\.csv: .*; mend it"):
        read(tmp_path)


def test_bins_of_no_length_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad_0s.csv").write_text("t_s,req_s\n0,1\n")
    with pytest.raises(ValueError, match=r"bad_0s\.csv: bins of 0 s"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["t_s,req_s\n0,many\n", "", "t_s,req_s\n0,1\n0,1,2,3\n"])
def test_a_file_that_is_no_table_of_numbers_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad_60s.csv").write_text(text)
    with pytest.raises(ValueError, match=r"bad_60s\.csv: not a trace"):
        read(tmp_path)


def test_the_yardstick_scores_one_and_the_truth_zero() -> None:
    made = trace(wandering(300))
    yardstick = rivals.last_value(made.load, 5, 60)
    itself = score(made, 5, yardstick)
    assert itself is not None
    assert itself.ratios == (1.0, 1.0, 1.0)
    assert itself.origins == 300 - 5 - 5 - (rivals.ERRORS_MIN - 1)
    truth = score(made, 5, np.repeat(made.targets(5)[:, None], 3, axis=1))
    assert truth is not None
    assert truth.ratios == (0.0, 0.0, 0.0)


def test_targets_beyond_the_end_and_in_gaps_are_not_scored() -> None:
    gap = np.zeros(20, bool)
    gap[10] = True
    made = trace(np.arange(20.0), gap)
    unknown = np.flatnonzero(np.isnan(made.targets(2)))
    np.testing.assert_array_equal(unknown, [8, 10, 18, 19])


def test_every_trace_is_forecast_as_if_it_were_alone() -> None:
    long, short = trace(wandering(120), name="long"), trace(wandering(40), name="short")
    together, alone = ours([short, long]), ours([short])
    for minutes in (2, 5, 10):
        np.testing.assert_array_equal(together[short.name, minutes], alone[short.name, minutes])
        assert together[long.name, minutes].shape == (120, len(LEVELS))


def test_figures_have_the_keys_that_machines_read() -> None:
    made = trace(wandering(1200))
    said = ours([made])
    scores = [score(made, minutes, said[made.name, minutes]) for minutes in (2, 5, 10)]
    found = figures([s for s in scores if s is not None], [], 0.1)
    assert set(found["pinball90_vs_last"]) == {"2", "5", "10"}
    assert all(value < 1.2 for value in found["pinball90_vs_last"].values())
    assert 0 <= found["coverage90_error_mean"] <= found["coverage90_error_max"] < 0.05
    assert found["worst_long_ratio"] == max(found["pinball90_vs_last"].values())
    assert found["tick_s_1000_series"] == 0.1


def test_rivals_that_are_installed_say_quantiles_that_ascend() -> None:
    for name in rivals.installed():
        if name.startswith("statsmodels"):
            said = rivals.refitted(name, wandering(120), 10)
            assert said.shape == (10, len(LEVELS))
            assert (np.diff(said, axis=1) >= 0).all()
