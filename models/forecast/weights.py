"""Convex weights learnt online from losses: Bernstein online aggregation with the gradient trick, discounted.

The combination u = sum_e w_e*u_e is judged by the pinball loss of its level q, max(q*(y - u), (q - 1)*(y - u)), whose
slope in u is g = 1[y < u] - q. Each member has the linear regret r_e = g*(u - u_e): positive where moving towards it
would have helped. With regrets summed and discounted by gamma per bin,

    R_e <- gamma*R_e + r_e*(1 - eta_e*r_e)    V_e <- gamma*V_e + r_e^2    M_e <- max(0.999*M_e, |r_e|)
    eta_e = min(1/(2*M_e), sqrt(ln E/V_e))    w_e ~ prior_e*eta_e*exp(eta_e*R_e)

so that the combination does about as well as the best fixed convex combination of the recent past. A small share of the
prior is mixed in, so that no member is lost for good. All is free of scale: y in other units gives the same weights.

Worked: two members at 0 and 10, prior 1/2 each, level .5, so that u = 5; y = 8: g = -.5, r = (-2.5, 2.5),
M = 2.5, V = 6.25, eta = min(.2, .333) = .2, R = (-3.75, 1.25), w ~ (exp(-.75), exp(.25)) = (.269, .731).

Source: Wintenberger, Machine Learning 106 (2017), algorithm with multiple learning rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.forecast.memory import Array, Mask

KEPT = 0.001
"""Share of the prior in the weights."""
FLOOR = 1e-3
"""No member's range counts as less than this share of the largest: a lucky start would outweigh all the others."""
TINY = 1e-200
DUST = 1e-9


@dataclass(frozen=True, slots=True)
class Statistics:
    """Views of regret, variance and range of the members: any shape with the members on one axis; updated in place."""

    regret: Array
    variance: Array
    range: Array
    prior: Array
    axis: int

    def rates(self) -> Array:
        """Learning rate of each member, in 1/(unit of loss)."""
        members = self.regret.shape[self.axis]
        range_ = np.maximum(self.range, FLOOR * self.range.max(axis=self.axis, keepdims=True)) + TINY
        variance = np.maximum(self.variance, FLOOR**2 * self.variance.max(axis=self.axis, keepdims=True)) + TINY
        rates: Array = np.minimum(0.5 / range_, np.sqrt(np.log(members) / variance))
        return rates

    def weights(self) -> Array:
        """Weights of the members, summing to 1 over their axis."""
        rates = self.rates()
        logs = np.log(self.prior * rates) + rates * self.regret
        weights: Array = np.exp(logs - logs.max(axis=self.axis, keepdims=True))
        weights /= weights.sum(axis=self.axis, keepdims=True)
        return weights * (1 - KEPT) + KEPT * self.prior

    def learn(self, regret: Array, gamma: float, known: Mask) -> None:
        """Takes in the regrets of one bin where `known` is true (shaped to broadcast); discounts by gamma per bin."""
        np.copyto(self.range, np.maximum(0.999 * self.range, np.abs(regret)), where=known)
        np.copyto(self.variance, gamma * self.variance + regret**2, where=known)
        np.copyto(self.regret, gamma * self.regret + regret * (1 - self.rates() * regret), where=known)


def regrets(value: Array, combined: Array, members: Array, level: Array | float) -> Array:
    """Linear regret of each member; arrays broadcast. Differences that only rounding made are none."""
    slope = np.where(value < combined, 1.0, 0.0) - level
    apart = combined - members
    return slope * np.where(np.abs(apart) > DUST * np.abs(combined), apart, 0.0)
