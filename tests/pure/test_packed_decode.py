# SPDX-License-Identifier: Apache-2.0
"""The contract of the packed decodes on the NumPy backend."""

from types import ModuleType

import numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_decode_contract import OPERATIONS, OUTPUT_ERROR, STATE_ERROR, PackedDecodeContract
from problems import make_problem, operation, same_bits

import kda_cupy
from kda_cupy.reference import truth


class TestOnNumpy(PackedDecodeContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_geometry_and_any_strides(data: st.DataObject) -> None:
    """Random heads, dims, dtypes, gaps between rows and slots, padding: right, and nothing else is touched."""
    draw = data.draw
    H = draw(st.integers(1, 3))
    HV = H * draw(st.integers(1, 3))
    B, P = draw(st.integers(1, 4)), draw(st.integers(4, 6))
    live = draw(st.permutations(range(P)))
    slots = [draw(st.sampled_from([-1, live[row]])) for row in range(B)]
    problem = make_problem(
        draw(st.sampled_from(["kda", "gdn"])),
        B=B,
        H=H,
        HV=HV,
        K=4 * draw(st.integers(1, 9)),
        V=draw(st.integers(1, 9)),
        P=P,
        slots=slots,
        dtype=draw(st.sampled_from(list(OUTPUT_ERROR))),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        lower_bound=draw(st.sampled_from([None, -5.0])),
        row_padding=draw(st.integers(0, 5)),
        slot_padding=4 * draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
    )
    before = problem["initial_state"].copy()
    want_out, want_state = truth.packed_decode(**problem)
    out, state = OPERATIONS[operation(problem)](**problem)
    assert out.shape == want_out.shape
    # Few elements: less averaging of their rounding, and sums that cancel, whose error is that of their terms.
    kept = (
        sum(np.linalg.norm(want_state[slot]) for slot in slots if slot >= 0)
        * problem["initial_state"].shape[3] ** -0.5
    )
    allowed = 2 * OUTPUT_ERROR[out.dtype.name] * np.linalg.norm(want_out) + STATE_ERROR * kept
    assert np.linalg.norm(out.astype(np.float64) - want_out) <= allowed
    assert truth.relative_error(state, want_state) < STATE_ERROR
    idle = [slot for slot in range(P) if slot not in slots]
    assert same_bits(state[idle], before[idle])


def test_a_flag_is_not_remembered_by_identity() -> None:
    """A tensor that counts as True today and as False tomorrow is refused, and so is a string."""
    for value in (np.array(True), "False", 1, None):
        with pytest.raises(kda_cupy.OperandError, match="must be True or False"):
            kda_cupy.kda_packed_decode(**make_problem("kda", B=1, K=8, V=8), allow_neg_eigval=value)


@pytest.mark.parametrize("option, value", [
    ("scale", 1e300), ("scale", 3.5e38), ("scale", True), ("scale", 1j), ("scale", np.array("2.0")),
    ("lower_bound", -1e300), ("lower_bound", -1e-60), ("lower_bound", -np.inf), ("null_index", np.array([0, -1])),
    ("validate", np.array(["full"])),
], ids=repr)  # fmt: skip
def test_values_that_are_no_float_to_a_kernel(option: str, value: object) -> None:
    with pytest.raises(kda_cupy.OperandError):
        kda_cupy.kda_packed_decode(**make_problem("kda", B=1, K=8, V=8), **{option: value})


def test_errors_of_the_numpy_backend_are_found_by_its_name() -> None:
    kda_cupy.kda_packed_decode(**make_problem("kda", B=1, P=2, slots=[2], K=8, V=8))
    with pytest.raises(kda_cupy.SlotError):
        kda_cupy.check_errors("cpu")


def test_masked_arrays_are_refused_and_memory_maps_are_taken(tmp_path) -> None:
    problem = make_problem("kda", B=1, K=8, V=8, slot_padding=0)
    with pytest.raises(kda_cupy.BridgeError, match="mask"):
        kda_cupy.kda_packed_decode(**{**problem, "b": np.ma.masked_array(problem["b"])})
    want_out, want_state = kda_cupy.kda_packed_decode(
        **{**problem, "initial_state": problem["initial_state"].copy()}
    )
    stored = np.memmap(tmp_path / "pool", np.float32, "w+", shape=problem["initial_state"].shape)
    stored[...] = problem["initial_state"]
    out, state = kda_cupy.kda_packed_decode(**{**problem, "initial_state": stored})
    assert state is stored and same_bits(np.asarray(stored), want_state) and same_bits(out, want_out)


def test_overflow_is_an_answer() -> None:
    """Warnings are errors in this suite: none may stop the NumPy backend half way."""
    problem = make_problem("kda", B=2, K=8, V=8, dtype="float16")
    problem["initial_state"][problem["ssm_state_indices"][0]] *= 1e8
    out, _ = kda_cupy.kda_packed_decode(**problem)
    assert np.isinf(out[0]).any() and np.isfinite(out[1]).all()
