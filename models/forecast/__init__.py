"""Quantile forecasts of many load series at once, learnt online: one array update per bin, no refit, no training set.

A series is a load per second, averaged over bins of equal width (60 s in the daemon). For each horizon of h bins:

    experts    16 simple forecasts of y(t+h): the last value, smoothed levels, damped trends, the daily profile, and two
               regressions of y(t+h) on smoothed levels, updated recursively (`experts`)
    median     their convex combination, weighted online by pinball loss at .5 (`weights`)
    quantiles  for the median and for the last value, five online trackers of the distribution of their errors with
               memories from minutes to a day, combined online by the pinball loss of each level (`errors`)
    coverage   what is added to the combination so that the share of misses stays at 1 - level, also under drift

Nothing in this package knows what the series mean; `models.demand` does. All of it is deterministic, and a bin that was
not observed (NaN) teaches nothing: its series keeps what it knew.

    memory = forecast.start(Grid(60.0, (2, 5, 10)), ("chat calls/s",))
    memory = forecast.update(memory, at_s, values)          # values: one per series, NaN where unknown
    forecast.quantiles(memory).values                       # series x horizons x levels

Sources: Wintenberger, Optimal learning with Bernstein online aggregation, Machine Learning 106 (2017), for the weights;
Gibbs and Candes, Adaptive conformal inference under distribution shift, NeurIPS 2021, and Angelopoulos, Candes and
Tibshirani, Conformal PID control, NeurIPS 2023, for quantiles tracked online. `bench.forecast` measures it.
"""

from models.forecast.memory import LEVELS, Grid, Memory, Quantiles
from models.forecast.online import quantiles, skip, start, update, with_series

__all__ = ["Grid", "LEVELS", "Memory", "Quantiles", "quantiles", "skip", "start", "update", "with_series"]
