# SPDX-License-Identifier: Apache-2.0
"""Tokens whose activations round the same way in float32 as in float64, so that errors can be measured.

The convolution's result is rounded to the activation dtype. Where it lies in the middle between two numbers, float32
may take the one and float64 the other; one such element moves a state by 1e-4, more than all other errors together.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

ROUNDS: Final = 200
#: Relative to the terms: eight times the rounding of one float32 operation, for four products, their sums and a SiLU.
ROUNDING: Final = 5e-7


def settle(x: Any, history: Any, taps: Any, rng: np.random.Generator) -> None:
    """Draw numbers of ``x`` again, in place, until every activation is clear.

    x: [requests, t, C], of the activation dtype. history: [requests, 3, C]. taps: [C, 4]. Nothing to do in float32.
    """
    if x.dtype == np.float32:
        return
    t = x.shape[1]
    weights = np.asarray(taps, np.float64).T
    for _ in range(ROUNDS):
        window = np.concatenate([history, x], axis=1).astype(np.float64)
        terms = [weight * window[:, tap : tap + t] for tap, weight in enumerate(weights)]
        y = np.sum(terms, axis=0)
        sigmoid = 1 / (1 + np.exp(-y))
        activation = y * sigmoid
        slope = np.abs(sigmoid * (1 + y * (1 - sigmoid)))
        error = ROUNDING * (slope * np.sum(np.abs(terms), axis=0) + np.abs(activation))
        unclear = (activation - error).astype(x.dtype) != (activation + error).astype(x.dtype)
        if not unclear.any():
            return
        unclear &= (
            unclear.cumsum(axis=1) == 1
        )  # the first of a channel: another one there changes those behind it
        x[unclear] = rng.standard_normal(int(unclear.sum())).astype(x.dtype)
    raise RuntimeError(f"activations are not clear after {ROUNDS} draws")
