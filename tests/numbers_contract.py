# SPDX-License-Identifier: Apache-2.0
"""Numbers at the edges, whatever runs them: subnormal, zero, NaN, and many tokens in a row.

tests/pure runs this on NumPy, tests/gpu on CUDA. The other edges (gates at both ends, inf * 0) stand in the contracts.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aftermath import AFTER, differences
from drift_model import WAYS, drift
from guarded import Buffer
from mtp_problems import make_mtp
from problems import make_problem, same_bits
from step_problems import make_step, out_of

import kda_cupy

SUBNORMAL = 1e-40
"""Of float32: kernels take it for zero, NumPy does not, and the floor of an error is above it."""
KEEPS = {
    "kda_packed_decode": "kda",
    "gdn_packed_decode": "gdn",
    "kda_decode_step": "kda",
    "gdn_decode_step": "gdn",
}
OPERATIONS = pytest.mark.parametrize("operation", [*KEEPS, "kda_decode_mtp"])


def make(operation: str, **options: Any) -> dict[str, Any]:
    """A call in fp32 of three rows."""
    options = {"H": 1, "HV": 2, "dtype": "float32", "lower_bound": -5.0, "seed": 4} | options
    if operation.endswith("packed_decode"):
        problem = make_problem(operation[:3], B=3, K=64, V=24, **options)
        shape: tuple[int, ...] = (3, 1, 2, 24)
    elif operation.endswith("decode_step"):
        problem = make_step(operation[:3], B=3, **options)
        shape = out_of(problem).shape
    else:
        problem = make_mtp(N=3, t=3, mode="snapshots", **options)
        shape = problem["x_v"].shape
    return problem | {"out": np.full(shape, np.nan, np.float32)}


def projections(problem: dict[str, Any]) -> list[str]:
    return [name for name in ("mixed_qkv", "x_q", "x_k", "x_v") if name in problem]


def memories(problem: dict[str, Any]) -> list[str]:
    names = ("initial_state", "recurrent_state", "conv_state", "cs_q", "cs_k", "cs_v")
    return [name for name in names if name in problem]


class NumbersContract:
    """Subclasses say where to run by a fixture ``library`` (numpy or cupy)."""

    TOKENS = 1000

    @pytest.fixture(autouse=True)
    def _no_errors_left_behind(self, library: ModuleType) -> Any:
        self.library = library
        kda_cupy.check_errors()
        yield
        kda_cupy.check_errors()

    def run(self, operation: str, problem: dict[str, Any]) -> dict[str, Any]:
        """Call it between guards; every array afterwards."""
        buffers = {
            name: Buffer(each, self.library) for name, each in problem.items() if isinstance(each, np.ndarray)
        }
        getattr(kda_cupy, operation)(**{**problem, **{name: each.array for name, each in buffers.items()}})
        return {name: each.seen_in(each.now(), each.array) for name, each in buffers.items()}

    def judge(self, operation: str, problem: dict[str, Any]) -> dict[str, Any]:
        got = self.run(operation, problem)
        for name, left in AFTER[operation](problem).items():
            assert not differences(name, got[name], left)
        return got

    @OPERATIONS
    def test_subnormal_inputs(self, operation: str) -> None:
        problem = make(operation)
        for name in projections(problem):
            problem[name][...] = np.copysign(SUBNORMAL, problem[name])
        for name in memories(problem)[1:]:
            problem[name][...] = 0
        self.judge(operation, problem)

    @OPERATIONS
    def test_a_subnormal_state(self, operation: str) -> None:
        problem = make(operation)
        state = problem[memories(problem)[0]]
        state[...] = SUBNORMAL
        self.judge(operation, problem)

    @OPERATIONS
    def test_rows_of_zeros(self, operation: str) -> None:
        """Nothing is divided by their norm of zero; the state decays, and the output is zero."""
        problem = make(operation, **({} if operation.endswith("packed_decode") else {"bias": False}))
        for name in projections(problem):
            problem[name][...] = 0
        for name in memories(problem)[1:]:
            problem[name][...] = 0
        got = self.judge(operation, problem)
        assert not got["out"].any()

    @OPERATIONS
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_what_is_not_finite_stays_in_the_row_that_owns_it(self, operation: str, value: float) -> None:
        """In a projection, a gate, a state or a history: every other row and slot has the bits it has without it."""
        clean = self.run(operation, make(operation))
        row_axis = {"mixed_qkv": 0, "a": 0, "b": 0}
        slots = make(operation)["ssm_state_indices"]
        tokens = slice(3, 6) if operation == "kda_decode_mtp" else slice(1, 2)
        for name in [
            *projections(clean),
            *[each for each in ("a", "b", "g", "beta") if each in clean],
            *memories(clean),
        ]:
            problem = make(operation)
            if name in memories(clean):
                problem[name][slots[1], ..., 1] = value
            else:
                np.moveaxis(problem[name], row_axis.get(name, 1), 0)[tokens, ..., 1] = value
            got = self.run(operation, problem)
            out, want = got["out"], clean["out"]
            rows = out if operation.endswith("packed_decode") or operation == "gdn_decode_step" else out[0]
            others = np.setdiff1d(np.arange(len(rows)), np.arange(tokens.start, tokens.stop))
            wanted_rows = want if rows is out else want[0]
            assert same_bits(rows[others], wanted_rows[others]), name
            idle = np.setdiff1d(np.arange(len(got[memories(got)[0]])), slots[1])
            for each in memories(got):
                assert same_bits(got[each][idle], clean[each][idle]), (name, each)

    def test_a_nan_leaves_with_allocate(self) -> None:
        device = "cpu" if self.library is np else 0
        pool = kda_cupy.StatePool(3, 2, 8, 4, device=device, activation_dtype="float16")
        slots = pool.allocate(3)
        for array in (pool.state, pool.conv):
            array[...] = np.nan
        pool.release(slots[1])
        again = pool.allocate()
        assert again == slots[1]
        for array in (pool.state, pool.conv):
            assert not array[:, again].any()
            assert np.isnan(float(array[:, int(slots[0])].sum()))

    @pytest.mark.parametrize("way", WAYS)
    def test_a_state_does_not_drift(self, way: str) -> None:
        """scripts/drift.py runs 100,000 tokens; what is measured there stands in docs/reliability.md."""
        for state, output in drift(self.library, self.TOKENS, way).values():
            assert state < 1e-6 and output < 2e-6
