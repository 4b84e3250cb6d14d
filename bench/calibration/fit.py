"""Least squares of the plant's constants on what a real engine showed.

    residuals  r = ln(plant / measured), of each load's mean ITL, of its median TTFT, and, where there was a queue
               in the engine, of the mean time in it and of the mean time to the first token outside it
    counted    s*sign(r)*sqrt(2*(sqrt(1 + (r/s)^2) - 1)), s = 0.3: a square near zero, linear far from it, because a
               machine that stalls for a second multiplies a load's mean without telling anything of the engine (for
               the same reason the median of TTFT, a thing of few calls; of ITL the buckets tell none)
    weighted   with the root of the load's share of all tokens (ITL) or calls (the others)
    unknowns   the logarithms of `Constants`, normal around `START` with a standard deviation of ln 3; against them a
               load's residuals have one of `noise`, so that a constant which noisy loads can't tell stays near what
               arithmetic says, and loads without noise decide alone

The plant itself is the model: it is run on the load for every trial, always with the same seeds. One set of constants
serves all loads and both engines. `spread` is the standard error of each logarithm, from the Jacobian at the end and
the residuals that are left: 0.1 is about 10 %, 1 and more means that these loads hardly tell that constant.

START: a step of some thirty PyTorch operators and the scheduler in Python takes 2 ms; 2 * 145,920 FLOP per token at 10
GFLOP/s of one core are 0.03 ms; sampling and bookkeeping of a sequence 0.3 ms; tokenising and parsing a call 5 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from bench.calibration.capture import LoadRun, Numbers, Totals, percentile
from bench.calibration.replay import Constants, mean_replay
from models.fleetsim.world import TTFT_BOUNDS

START = Constants(step_s=0.002, token_s=3e-5, sequence_s=3e-4, call_s=0.005)
LOW, HIGH = 1e-2, 1e2
"""How far from the start a constant may go, as factors."""
SOFT = 0.3
PRIOR_SD = math.log(3)
NOISE = 0.3
"""What two equal engines under the same load differ by in the capture, from their mean: 0.16 in ITL, 0.27 in TTFT."""
QUEUED_S = 0.05
"""Below this mean there was no queue to speak of, and its logarithm says nothing."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The constants, the standard errors of their logarithms, and how many loads told them."""

    constants: Constants
    spread: Constants
    loads: int


def mean_itl_s(done: Totals) -> float:
    """Seconds between a token and the next, over all tokens."""
    return done.itl_sum_s / float(done.itl_counts.sum())


def mean_ttft_s(done: Totals) -> float:
    """Seconds to the first token, over all calls."""
    return done.ttft_sum_s / done.calls


def median_ttft_s(done: Totals) -> float:
    """The median time to the first token."""
    return percentile(done.ttft_counts, TTFT_BOUNDS, 0.5)


def mean_queue_s(done: Totals) -> float:
    """Seconds in the engine's queue, over the calls that finished."""
    return done.queue_sum_s / done.finished


def fit(runs: Sequence[LoadRun], seeds: int, noise: float = NOISE) -> Fit:
    """Fit the constants to loads whose means scatter by `noise` (of the logarithm).

    Raises ValueError where there is no load.
    """
    if not runs:
        raise ValueError("there is no load to fit the constants to")
    start = np.log(START.as_array())

    def residuals(logs: Numbers) -> Numbers:
        return np.append(_residuals(runs, Constants(*np.exp(logs)), seeds), noise / PRIOR_SD * (logs - start))

    found = least_squares(
        residuals,
        start,
        bounds=(start + math.log(LOW), start + math.log(HIGH)),
        diff_step=np.full(len(start), 0.01),
        xtol=1e-3,
        ftol=1e-3,
        max_nfev=15,
    )
    jacobian = np.asarray(found.jac, dtype=np.float64)
    left = 2 * found.cost / max(len(found.fun) - len(start), 1)
    errors = np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * left)
    return Fit(Constants(*np.exp(found.x)), Constants(*errors), len(runs))


def _residuals(runs: Sequence[LoadRun], constants: Constants, seeds: int) -> Numbers:
    tokens = sum(run.measured.output_tokens for run in runs)
    calls = sum(run.measured.calls for run in runs)
    residuals = []
    for run in runs:
        done, seen = mean_replay(run, constants, seeds), run.measured
        by_tokens, by_calls = math.sqrt(seen.output_tokens / tokens), math.sqrt(seen.calls / calls)
        residuals.append(by_tokens * _softened(mean_itl_s(done) / mean_itl_s(seen)))
        residuals.append(by_calls * _softened(median_ttft_s(done) / median_ttft_s(seen)))
        if mean_queue_s(seen) > QUEUED_S:
            outside = (mean_ttft_s(done) - mean_queue_s(done)) / (mean_ttft_s(seen) - mean_queue_s(seen))
            residuals.append(by_calls * _softened(mean_queue_s(done) / mean_queue_s(seen)))
            residuals.append(by_calls * _softened(outside))
    return np.array(residuals)


def _softened(ratio: float) -> float:
    """The residual of a ratio, squared by least squares where it is small, linear where it is large."""
    residual = math.log(max(ratio, 1e-6))
    return math.copysign(SOFT * math.sqrt(2 * (math.hypot(1, residual / SOFT) - 1)), residual)
