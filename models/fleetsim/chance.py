"""Random numbers inside compiled code: xoshiro256** (Blackman and Vigna 2018), seeded, the same bytes everywhere.

Numba's own generator is a global of the process; here the state is part of the world, so that a world can be saved,
compared and continued.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from models.fleetsim.compiled import compiled

State = NDArray[np.uint64]


def seeded(seed: int) -> State:
    """A state from a seed, well mixed (NumPy's SeedSequence)."""
    return np.random.SeedSequence(seed).generate_state(4, np.uint64).astype(np.uint64)


@compiled
def bits(state: State) -> np.uint64:
    """64 random bits."""
    product = state[1] * np.uint64(5)
    result = ((product << np.uint64(7)) | (product >> np.uint64(57))) * np.uint64(9)
    shifted = state[1] << np.uint64(17)
    state[2] ^= state[0]
    state[3] ^= state[1]
    state[1] ^= state[2]
    state[0] ^= state[3]
    state[2] ^= shifted
    state[3] = (state[3] << np.uint64(45)) | (state[3] >> np.uint64(19))
    return result


@compiled
def uniform(state: State) -> float:
    """In [0, 1)."""
    return float(bits(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def exponential(state: State) -> float:
    """Mean 1."""
    return -math.log(1.0 - uniform(state))


@compiled
def normal(state: State) -> float:
    """Mean 0, standard deviation 1 (Box and Muller)."""
    radius = math.sqrt(2.0 * exponential(state))
    return radius * math.cos(2.0 * math.pi * uniform(state))


@compiled
def lognormal(state: State, mean: float, sigma: float) -> float:
    """Positive with the given mean; sigma is the standard deviation of its logarithm."""
    if sigma <= 0.0:
        return mean
    return mean * math.exp(sigma * normal(state) - 0.5 * sigma * sigma)


@compiled
def mixed(value: np.uint64) -> np.uint64:
    """A hash of 64 bits (the finaliser of splitmix64)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
