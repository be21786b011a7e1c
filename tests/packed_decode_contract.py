# SPDX-License-Identifier: Apache-2.0
"""What both packed decodes promise, whatever runs them. tests/pure runs this on NumPy, tests/gpu on CUDA.

Everything is compared with kda_cupy.reference.truth (float64, shares no code with a backend). Errors are
norm(got - reference) / norm(reference).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from problems import POISON, make_problem, np_dtype, out_shape, same_bits, to, to_host, to_library

import kda_cupy
from kda_cupy.reference import truth

#: One token. fp32: sums of K products in fp32, measured 1.5e-7 and 3e-8. fp16, bf16: the output's own rounding
#: is 2.0e-4 and 1.6e-3 on such data.
OUTPUT_ERROR = {"float32": 2e-6, "float16": 3e-4, "bfloat16": 3e-3}
STATE_ERROR = 2e-6
#: 16 tokens in a row.
CHAINED_ERROR = 1e-5

OPERATIONS = {"kda": kda_cupy.kda_packed_decode, "gdn": kda_cupy.gdn_packed_decode}


class Case(NamedTuple):
    name: str
    problem: dict[str, Any]


def _cases() -> list[Case]:
    cases = []
    for op in ("kda", "gdn"):
        for gate, lower_bound in (("softplus", None), ("bounded", -5.0)):
            cases += [
                Case(f"{op}-{gate}-{dtype}", {"op": op, "lower_bound": lower_bound, "dtype": dtype})
                for dtype in OUTPUT_ERROR
            ]
        cases += [
            Case(f"{op}-K{K}-V{V}", {"op": op, "K": K, "V": V, "dtype": "float32"})
            for K, V in (
                (64, 64),
                (256, 256),
                (100, 100),
                (4, 3),
                (32, 200),
                (512, 8),
                (128, 20),
                (64, 24),
                (36, 128),
            )
        ]
        cases += [
            Case(f"{op}-H{H}-HV{HV}", {"op": op, "H": H, "HV": HV, "B": 2, "dtype": "float32"})
            for H, HV in ((1, 1), (3, 3), (6, 6), (8, 8), (12, 12), (2, 8), (3, 12), (16, 32), (96, 96))
        ]
    cases += [
        Case("fp32-gates", {"dtype": "bfloat16", "a_dtype": "float32", "b_dtype": "float32"}),
        Case("mixed-gates", {"dtype": "float16", "a_dtype": "float32"}),
        Case("bf16-parameters", {"gate_dtype": "bfloat16", "dtype": "float32"}),
        Case("fp16-parameters", {"gate_dtype": "float16", "dtype": "float32"}),
        Case("no-A_log", {"A_log": False, "lower_bound": -5.0, "dtype": "float32"}),
        Case("gdn-no-A_log", {"op": "gdn", "A_log": False, "lower_bound": -2.5, "dtype": "float32"}),
        Case("wider-projection", {"row_padding": 64, "dtype": "bfloat16"}),
        Case("odd-row-stride", {"row_padding": 3, "dtype": "bfloat16"}),
        Case("int64-slots", {"index_dtype": "int64"}),
        Case("dense-pool", {"slot_padding": 0}),
    ]
    return cases


CASES = _cases()


def reference(problem: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    return truth.packed_decode(**{**problem, **options})


class PackedDecodeContract:
    """Subclasses say where to run by a fixture ``library`` (numpy or cupy)."""

    @pytest.fixture(autouse=True)
    def _no_errors_left_behind(self, library: ModuleType) -> Any:
        self.library = library
        kda_cupy.check_errors()
        yield
        kda_cupy.check_errors()

    def run(self, problem: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        """Call the operation on copies in the library, with a poisoned output; returns NumPy arrays."""
        options = {key: value for key, value in options.items() if key != "op"}
        moved = to(problem, self.library)
        op = OPERATIONS["gdn" if problem["a"].shape[1] == problem["b"].shape[1] else "kda"]
        if "out" not in options:
            dtype = problem["mixed_qkv"].dtype
            options["out"] = to_library(np.full(out_shape(problem), np.nan, dtype), self.library)
        out, state = op(**moved, **options)
        assert out is options["out"] and state is moved["initial_state"]
        return to_host(out), to_host(state)

    # ---- numbers ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_agrees_with_the_float64_reference(self, case: Case) -> None:
        problem = make_problem(**case.problem)
        want_out, want_state = reference(problem)
        out, state = self.run(problem)
        assert truth.relative_error(out, want_out) < OUTPUT_ERROR[problem["mixed_qkv"].dtype.name]
        slots = problem["ssm_state_indices"]
        assert truth.relative_error(state[slots], want_state[slots]) < STATE_ERROR
        idle = np.setdiff1d(np.arange(len(state)), slots)
        assert same_bits(state[idle], problem["initial_state"][idle])

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    @pytest.mark.parametrize("options", [
        {"scale": 0.25},
        {"use_qk_l2norm_in_kernel": False},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5, "scale": 1.0, "allow_neg_eigval": True},
    ], ids=str)  # fmt: skip
    def test_options(self, op: str, options: dict[str, Any]) -> None:
        problem = make_problem(op, dtype="float32", H=2, HV=4, K=64, V=64)
        if not options.get("use_qk_l2norm_in_kernel", True):
            problem["mixed_qkv"] *= 0.1
        want_out, want_state = reference(problem, **options)
        out, state = self.run(problem, **options)
        assert truth.relative_error(out, want_out) < OUTPUT_ERROR["float32"]
        assert truth.relative_error(state, want_state) < STATE_ERROR

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("A_log", [-10.0, 0.0, 5.0])
    @pytest.mark.parametrize("raw", [-1e4, -200.0, -20.0, 0.0, 19.9999, 20.0, 20.0001, 89.0, 100.0, 1e4])
    def test_gates_at_the_extremes(
        self, op: str, lower_bound: float | None, A_log: float, raw: float
    ) -> None:
        """B7: softplus must not overflow, and a branch-free blend must not make 0 * inf."""
        problem = make_problem(op, dtype="float32", B=2, H=1, HV=2, lower_bound=lower_bound)
        problem["a"][:] = raw
        problem["dt_bias"][:] = 0
        problem["A_log"][:] = A_log
        want_out, want_state = reference(problem)
        out, state = self.run(problem)
        assert truth.relative_error(out, want_out) < OUTPUT_ERROR["float32"]
        assert truth.relative_error(state, want_state) < STATE_ERROR

    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    def test_infinite_rate_times_zero_is_no_nan(self, lower_bound: float | None) -> None:
        problem = make_problem("kda", dtype="float32", B=1, lower_bound=lower_bound)
        problem["A_log"][:] = 200.0  # exp overflows in fp32
        problem["a"][:] = -1e4 if lower_bound is None else 0.0  # softplus(-1e4) = 0, and sigmoid's argument 0
        problem["dt_bias"][:] = 0
        want_out, want_state = reference(problem)
        out, state = self.run(problem)
        assert truth.relative_error(out, want_out) < OUTPUT_ERROR["float32"]
        assert truth.relative_error(state, want_state) < STATE_ERROR

    def test_bounded_gate_is_no_clamp(self) -> None:
        """B4: raw 0, A_log 0, lower bound -5 decays by exp(-2.5) = 0.0821; the clamped softplus by 0.5."""
        problem = make_problem("kda", dtype="float32", B=1, lower_bound=-5.0)
        for name in ("a", "dt_bias", "A_log", "mixed_qkv"):
            problem[name][:] = 0
        _, state = self.run(problem)
        slot = problem["ssm_state_indices"][0]
        assert truth.relative_error(state[slot], np.exp(-2.5) * problem["initial_state"][slot]) < 1e-6

    @pytest.mark.parametrize("raw", [-8.0, -0.5, 0.0, 0.5, 8.0])
    @pytest.mark.parametrize("dtype", list(OUTPUT_ERROR))
    def test_beta_stays_fp32_and_is_one_sigmoid(self, raw: float, dtype: str) -> None:
        """B1, B2: from a zero state, S = beta * v * k; beta rounded to bf16 or passed through sigmoid twice shows."""
        problem = make_problem("kda", dtype=dtype, B=1, H=1, HV=1, K=64, V=64)
        problem["initial_state"][:] = 0
        problem["b"][:] = raw
        _, state = self.run(problem)
        k, v = (problem["mixed_qkv"][0, 64 * i : 64 * (i + 1)].astype(np.float64) for i in (1, 2))
        beta = 1 / (1 + np.exp(-np.float64(np_dtype(dtype).type(raw))))
        want = beta * np.outer(v, k / np.sqrt(np.sum(k * k) + 1e-6))
        assert truth.relative_error(state[problem["ssm_state_indices"][0], 0], want) < 1e-6

    @pytest.mark.parametrize("amplitude", [1.0, 1e-2, 1e-4, 0.0])
    def test_epsilon_is_added_to_the_sum(self, amplitude: float) -> None:
        """B6: every k element 1e-4 at K = 128 gives 0.0662 each; added to the mean, 0.0088. Zero gives zero."""
        problem = make_problem("kda", dtype="float32", B=1, H=1, HV=1)
        problem["mixed_qkv"][:, : 2 * 128] = amplitude
        want_out, want_state = reference(problem)
        out, state = self.run(problem)
        assert truth.relative_error(state, want_state) < STATE_ERROR
        if amplitude:
            assert truth.relative_error(out, want_out) < OUTPUT_ERROR["float32"]
        else:
            assert not out.any()
        if amplitude == 1e-4:
            assert truth.l2_normalized(problem["mixed_qkv"][0, 128:256].astype(np.float64))[
                0
            ] == pytest.approx(0.0662, abs=1e-4)

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    def test_rows_are_values_and_columns_are_keys(self, op: str) -> None:
        """C1, C3: at 128 x 128 a transposed state has the same shape, so it is checked by value."""
        problem = make_problem(op, dtype="float32", B=1, H=1, HV=1, lower_bound=-5.0)
        slot = problem["ssm_state_indices"][0]
        problem["initial_state"][:] = 0
        problem["initial_state"][slot, 0, 3, 70] = 1.0
        problem["a"][:] = -1e4  # sigmoid 0: no decay
        problem["b"][:] = -1e4  # beta 0: no correction
        problem["mixed_qkv"][:] = 0
        problem["mixed_qkv"][0, 70] = 1.0  # q points at key 70
        out, state = self.run(problem, scale=1.0)
        assert np.flatnonzero(out).tolist() == [3]
        assert out[0, 0, 0, 3] == pytest.approx(1.0, abs=1e-6)
        assert np.argwhere(state[slot, 0]).tolist() == [[3, 70]]

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("extreme", [False, True])
    def test_sixteen_tokens_in_a_row(self, op: str, lower_bound: float | None, extreme: bool) -> None:
        """With gates at both extremes too: raw +-1e4 at A_log = 5, a key or a head at a time."""
        problem = make_problem(op, dtype="float32", B=3, H=2, HV=4, lower_bound=lower_bound)
        if extreme:
            problem["A_log"][:] = 5
        moved = to(problem, self.library)
        want_state = problem["initial_state"]
        for token in range(16):
            fresh = make_problem(op, dtype="float32", B=3, H=2, HV=4, seed=100 + token)
            if extreme:
                fresh["a"][...] = np.where(fresh["a"] > 0, 1e4, -1e4)
            for name in ("mixed_qkv", "a", "b"):
                problem[name] = fresh[name]
                moved[name] = to_library(fresh[name], self.library)
            want_out, want_state = reference({**problem, "initial_state": want_state})
            out, _ = OPERATIONS[op](**moved)
            assert truth.relative_error(to_host(out), want_out) < CHAINED_ERROR
        assert truth.relative_error(to_host(moved["initial_state"]), want_state) < CHAINED_ERROR

    def test_two_thousand_tokens_in_a_row(self) -> None:
        """B2, B13: rounding does not add up to a drift; beta in bf16 would be 1e-3 off by now."""
        B, H, HV, K, V, tokens = 2, 1, 2, 16, 16, 2000
        problem = make_problem("kda", B=B, H=H, HV=HV, K=K, V=V)
        moved = to(problem, self.library)
        long = make_problem(
            "kda", B=B * tokens, P=4, slots=np.zeros(B * tokens), H=H, HV=HV, K=K, V=V, seed=5
        )
        chunks = {name: long[name].reshape(tokens, B, -1) for name in ("mixed_qkv", "a", "b")}
        placed = {
            name: to_library(np.ascontiguousarray(array), self.library) for name, array in chunks.items()
        }
        want_state = problem["initial_state"]
        for token in range(tokens):
            now = {name: chunks[name][token] for name in chunks}
            _, want_state = reference({**problem, **now, "initial_state": want_state})
            OPERATIONS["kda"](**{**moved, **{name: placed[name][token] for name in placed}})
        assert truth.relative_error(to_host(moved["initial_state"]), want_state) < 1e-6

    def test_nan_in_a_parameter_shows(self) -> None:
        """A NaN in A_log is not swallowed by a minimum: its head becomes NaN, and no other."""
        problem = make_problem("kda", dtype="float32", B=1, H=2, HV=2, K=64, V=64)
        clean = self.run(problem)
        problem["A_log"][0] = np.nan
        out, state = self.run(problem)
        slot = problem["ssm_state_indices"][0]
        assert np.isnan(out[0, 0, 0]).all() and np.isnan(state[slot, 0]).all()
        assert same_bits(out[:, :, 1], clean[0][:, :, 1]) and same_bits(state[:, 1], clean[1][:, 1])

    def test_denormal_states_may_be_flushed(self) -> None:
        """B15: CuPy compiles with -ftz=true; 1e-39 may come back as 0, and nothing else may happen."""
        problem = make_problem("kda", dtype="float32", B=1, H=1, HV=1, lower_bound=-5.0)
        problem["initial_state"][:] = 1e-39
        problem["a"][:] = -1e4
        problem["mixed_qkv"][:] = 0
        out, state = self.run(problem)
        assert np.abs(state).max() <= 1.0001e-39 and not np.abs(out).max() > 1e-30

    def test_large_states_survive_half_precision_activations(self) -> None:
        """B14: the state is never staged in fp16, where 65536 is infinite."""
        problem = make_problem("kda", dtype="float16", B=1, H=1, HV=1)
        slot = problem["ssm_state_indices"][0]
        problem["initial_state"][slot] *= 65536
        _, want_state = reference(problem)
        _, state = self.run(problem)
        assert truth.relative_error(state[slot], want_state[slot]) < STATE_ERROR

    def test_nan_stays_with_its_row(self) -> None:
        problem = make_problem("kda", dtype="float32", B=4, K=64, V=64)
        clean = make_problem("kda", dtype="float32", B=4, K=64, V=64)
        problem["mixed_qkv"][2] = np.nan
        problem["initial_state"][problem["ssm_state_indices"][2]] = np.inf
        out, state = self.run(problem)
        want_out, want_state = self.run(clean)
        others = [0, 1, 3]
        slots = problem["ssm_state_indices"]
        assert same_bits(out[others], want_out[others])
        assert same_bits(state[slots[others]], want_state[slots[others]])
        assert np.isnan(out[2]).all()

    # ---- same bits --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    @pytest.mark.parametrize("K, V", [(64, 64), (128, 128), (256, 16)])
    def test_a_row_has_the_same_bits_in_every_batch(self, op: str, K: int, V: int) -> None:
        """B12: at B = 1, 2, 3, 8, 64, 257 and at any position."""
        whole = make_problem(op, B=257, H=1, HV=2, K=K, V=V)
        want_out, want_state = self.run(whole)
        rng = np.random.default_rng(1)
        for B in (1, 2, 3, 8, 64):
            rows = rng.permutation(257)[:B]
            part = {
                **whole,
                **{name: whole[name][rows] for name in ("mixed_qkv", "a", "b", "ssm_state_indices")},
            }
            out, state = self.run(part)
            assert same_bits(out, want_out[rows])
            slots = part["ssm_state_indices"]
            assert same_bits(state[slots], want_state[slots])

    @pytest.mark.parametrize("H", [3, 4, 6, 8, 12, 16, 24])
    def test_a_head_has_the_same_bits_in_every_shard(self, H: int) -> None:
        """C11: tensor parallelism gives any head count; a head does not notice."""
        K = V = 32
        whole = make_problem("kda", B=2, H=24, HV=24, K=K, V=V)
        want_out, want_state = self.run(whole)
        q, k, v = (whole["mixed_qkv"][:, i * 24 * K : (i * 24 + H) * K] for i in range(3))
        shard = {
            **whole,
            "mixed_qkv": np.concatenate([q, k, v], axis=1),
            "a": whole["a"][:, : H * K],
            "b": whole["b"][:, :H],
            "A_log": whole["A_log"][:H],
            "dt_bias": whole["dt_bias"][: H * K],
            "initial_state": np.ascontiguousarray(whole["initial_state"][:, :H]),
        }
        out, state = self.run(shard)
        assert same_bits(out, want_out[:, :, :H])
        assert same_bits(state, want_state[:, :H])

    @pytest.mark.parametrize("dtype", list(OUTPUT_ERROR))
    @pytest.mark.parametrize("offset", [1, 2, 4, 8])
    def test_views_have_the_same_bits_as_copies(self, dtype: str, offset: int) -> None:
        """C4, C14: slices of a wider projection, at any offset, with different strides, are taken as they are."""
        problem = make_problem("kda", dtype=dtype, gate_dtype=dtype, B=3, K=64, V=64)
        want_out, want_state = self.run(problem)
        moved = to(problem, self.library)
        for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias"):
            array = problem[name]
            pad = [(0, 0)] * (array.ndim - 1) + [(offset, 5 + offset)]
            wide = to_library(np.pad(array, pad, constant_values=np.nan), self.library)
            moved[name] = wide[..., offset : offset + array.shape[-1]]
        out, state = OPERATIONS["kda"](**moved)
        assert same_bits(out, want_out)
        assert same_bits(state, want_state)

    def test_slots_may_be_a_column_of_a_table(self) -> None:
        problem = make_problem("kda", B=4, K=64, V=64)
        want_out, want_state = self.run(problem)
        for dtype in ("int32", "int64"):
            table = np.full((4, 3), 10**6, dtype)
            table[:, 1] = problem["ssm_state_indices"]
            moved = to(problem, self.library)
            moved["ssm_state_indices"] = to_library(table, self.library)[:, 1]
            out, state = OPERATIONS["kda"](**moved)
            assert same_bits(out, want_out) and same_bits(state, want_state)

    def test_strides_of_single_rows_do_not_matter(self) -> None:
        """C6: B = 1 from a wider buffer, H = HV = 1, one slot of a sliced pool."""
        problem = make_problem("kda", B=1, H=1, HV=1, K=64, V=64, row_padding=7)
        want_out, want_state = self.run(problem)
        moved = to(problem, self.library)
        strided = self.library.lib.stride_tricks.as_strided
        for name in ("mixed_qkv", "a", "b"):
            moved[name] = strided(moved[name], moved[name].shape, (9998, moved[name].strides[1]))
        state = moved["initial_state"]
        moved["initial_state"] = strided(state, state.shape, (state.strides[0], 44, *state.strides[2:]))
        out, state = OPERATIONS["kda"](**moved)
        assert same_bits(out, want_out) and same_bits(state, want_state)

    @pytest.mark.parametrize(
        "value", [0.125, np.float64(0.125), np.float32(0.125), np.array(0.125)], ids=repr
    )
    def test_any_host_scalar_will_do(self, value: Any) -> None:
        """E9: a Python float is a double to a kernel; the struct says float."""
        problem = make_problem("kda", B=2, K=64, V=64)
        assert same_bits(self.run(problem, scale=value)[0], self.run(problem)[0])

    def test_missing_A_log_means_zero(self) -> None:
        problem = make_problem("kda", B=2, K=64, V=64, lower_bound=-5.0)
        problem["A_log"][:] = 0
        want = self.run(problem)
        got = self.run({**problem, "A_log": None})
        assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])

    def test_dt_bias_and_A_log_in_other_shapes(self) -> None:
        problem = make_problem("kda", B=2, H=2, HV=4, K=64, V=64)
        want = self.run(problem)
        shaped = {
            **problem,
            "dt_bias": problem["dt_bias"].reshape(4, 64),
            "A_log": problem["A_log"].reshape(1, 1, 4, 1),
        }
        got = self.run(shaped)
        assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])

    # ---- what must not be touched -----------------------------------------------------------------------------

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    @pytest.mark.parametrize("slots", [[-1, 3], [3, -1], [2, -1, 4], [-1, -1], [-7, 1, -(2**31)]], ids=str)
    def test_padding_rows_are_inert(self, op: str, slots: list[int]) -> None:
        """A1, A3, A7: no pool access, and an output that is exactly zero."""
        problem = make_problem(op, B=len(slots), P=5, slots=slots)
        want_out, _ = reference(problem)
        out, state = self.run(problem)
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        padding = [row for row, slot in enumerate(slots) if slot < 0]
        assert truth.relative_error(out[live], want_out[live]) < OUTPUT_ERROR["bfloat16"] if live else True
        assert same_bits(out[padding], np.zeros_like(out[padding]))
        idle = [slot for slot in range(5) if slot not in slots]
        assert same_bits(state[idle], problem["initial_state"][idle])

    def test_null_index_zero_makes_slot_zero_padding(self) -> None:
        problem = make_problem("kda", B=3, P=4, slots=[0, 2, -1], K=64, V=64)
        out, state = self.run(problem, null_index=0)
        assert same_bits(out[[0, 2]], np.zeros_like(out[[0, 2]])) and out[1].any()
        assert same_bits(state[[0, 1, 3]], problem["initial_state"][[0, 1, 3]])
        out, state = self.run(problem)
        assert out[0].any() and not same_bits(state[0], problem["initial_state"][0])

    @pytest.mark.parametrize("index_dtype", ["int32", "int64"])
    def test_slots_past_the_pool_are_recorded_and_never_followed(self, index_dtype: str) -> None:
        """A5: a sentinel is not wrapped into the pool; the row is padding, and the error is raised later, once."""
        problem = make_problem("kda", B=4, P=26, slots=[5, 6947, 26, 2], index_dtype=index_dtype, K=64, V=64)
        out, state = self.run(problem)
        alone = make_problem("kda", B=4, P=26, slots=[5, -1, -1, 2], index_dtype=index_dtype, K=64, V=64)
        want_out, want_state = self.run({**problem, "ssm_state_indices": alone["ssm_state_indices"]})
        assert same_bits(out, want_out) and same_bits(state, want_state)
        with pytest.raises(kda_cupy.SlotError, match="1 more such row") as caught:
            kda_cupy.check_errors()
        assert caught.value.code == "KDA-VALUE-SLOT-RANGE" and "kda_packed_decode" in str(caught.value)
        assert "ssm_state_indices[1]" in str(caught.value) or "ssm_state_indices[2]" in str(caught.value)
        kda_cupy.check_errors()

    def test_slots_beyond_32_bits_are_not_cut(self) -> None:
        problem = make_problem("kda", B=2, P=4, slots=[2**32 + 1, 2], index_dtype="int64", K=64, V=64)
        out, state = self.run(problem)
        assert not out[0].any() and same_bits(state[1], problem["initial_state"][1])
        with pytest.raises(kda_cupy.SlotError, match=str(2**32 + 1)):
            kda_cupy.check_errors()

    def test_full_validation_raises_before_anything_runs(self) -> None:
        """A10: a slot out of range or named twice; -1 may repeat."""
        for slots, code in (([1, 9, 2], "KDA-VALUE-SLOT-RANGE"), ([3, -1, 3], "KDA-VALUE-SLOT-DUPLICATE")):
            problem = make_problem("kda", B=3, P=5, slots=slots, K=64, V=64)
            moved = to(problem, self.library)
            out = to_library(np.full(out_shape(problem), 7, problem["mixed_qkv"].dtype), self.library)
            with pytest.raises(kda_cupy.SlotError) as caught:
                OPERATIONS["kda"](**moved, out=out, validate="full")
            assert caught.value.code == code
            assert (to_host(out) == 7).all() and same_bits(moved["initial_state"], problem["initial_state"])
        problem = make_problem("kda", B=4, P=5, slots=[-1, 3, -1, 1], K=64, V=64)
        want = self.run(problem)
        assert same_bits(self.run(problem, validate="full")[0], want[0])

    def test_a_padded_batch_equals_the_unpadded_one(self) -> None:
        """A6, A8: three rows padded to eight, in the same bits, and zeros behind them."""
        live = make_problem("kda", B=3, P=9, slots=[4, 1, 7], K=64, V=64)
        padded = make_problem("kda", B=8, P=9, slots=[4, 1, 7, -1, -1, -1, -1, -1], K=64, V=64)
        for name in ("mixed_qkv", "a", "b"):
            padded[name][:3] = live[name]
        for name in ("A_log", "dt_bias", "initial_state"):
            padded[name] = live[name]
        want_out, want_state = self.run(live)
        out, state = self.run(padded)
        assert same_bits(out[:3], want_out) and same_bits(state, want_state) and not out[3:].any()

    @pytest.mark.parametrize("K, V", [(128, 128), (100, 20), (64, 24)])
    def test_memory_around_pool_and_output_is_untouched(self, K: int, V: int) -> None:
        problem = make_problem("kda", B=3, P=6, K=K, V=V, slot_padding=4096)
        moved = to(problem, self.library)
        shape = out_shape(problem)
        size = int(np.prod(shape))
        around = to_library(np.full(size + 128, POISON, problem["mixed_qkv"].dtype), self.library)
        out = around[64 : 64 + size].reshape(shape)
        state = moved["initial_state"]
        # A wider view of the same memory: slots with the gaps behind them.
        wide = self.library.lib.stride_tricks.as_strided(
            state, (5, state.strides[0] // 4), (state.strides[0], 4)
        )  # the last slot's gap may end with the buffer
        OPERATIONS["kda"](**moved, out=out)
        around, wide = to_host(around), to_host(wide)
        assert (around[:64] == around.dtype.type(POISON)).all() and (
            around[-64:] == around.dtype.type(POISON)
        ).all()
        assert (wide[:, -4096:] == POISON).all()
        for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "ssm_state_indices"):
            assert same_bits(moved[name], problem[name])

    @pytest.mark.parametrize("poison", [np.nan, 1e30])
    def test_neighbours_of_the_gate_operands_are_not_read(self, poison: float) -> None:
        """B9: K = 100 leaves lanes without keys; what lies behind a, dt_bias and A_log must not reach the row."""
        problem = make_problem("kda", dtype="float32", B=2, H=1, HV=1, K=100, V=100)
        want_out, want_state = self.run(problem)
        moved = to(problem, self.library)
        for name in ("a", "b", "A_log", "dt_bias", "mixed_qkv"):
            array = problem[name]
            pad = [(0, 0)] * (array.ndim - 1) + [(0, 32)]
            wide = to_library(np.pad(array, pad, constant_values=poison), self.library)
            moved[name] = wide[..., : array.shape[-1]]
        out, state = OPERATIONS["kda"](**moved)
        assert same_bits(out, want_out) and same_bits(state, want_state)

    # ---- calling it -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    def test_empty_batch(self, op: str) -> None:
        problem = make_problem(op, B=0, K=64, V=64)
        out, state = self.run(problem)
        assert out.shape == (0, 1, 4, 64) and same_bits(state, problem["initial_state"])

    def test_output_is_allocated_like_the_operands(self) -> None:
        problem = to(make_problem("kda", B=2, K=64, V=64), self.library)
        out, state = OPERATIONS["kda"](**problem)
        assert type(out) is type(problem["mixed_qkv"]) and out.dtype == problem["mixed_qkv"].dtype
        assert out.shape == (2, 1, 4, 64) and out.flags.c_contiguous and state is problem["initial_state"]

    def test_positional_operands(self) -> None:
        problem = make_problem("gdn", B=2, K=64, V=64)
        want = self.run(problem)
        moved = to(problem, self.library)
        out, _ = kda_cupy.gdn_packed_decode(*moved.values())
        assert same_bits(out, want[0])

    def test_bound_call(self) -> None:
        problem = make_problem("kda", B=2, K=64, V=64)
        want_out, want_state = self.run(problem)
        moved = to(problem, self.library)
        step = kda_cupy.bind(kda_cupy.kda_packed_decode, **moved)
        assert same_bits(moved["initial_state"], problem["initial_state"])  # binding runs nothing
        out, state = step()
        assert out is step.out and state is moved["initial_state"]
        assert same_bits(out, want_out) and same_bits(state, want_state)
        fresh = make_problem("kda", B=2, K=64, V=64, seed=9)
        moved["mixed_qkv"][...] = to_library(np.ascontiguousarray(fresh["mixed_qkv"]), self.library)
        again = self.run({**problem, "mixed_qkv": fresh["mixed_qkv"], "initial_state": want_state})
        out, state = step()
        assert same_bits(out, again[0]) and same_bits(state, again[1])
        assert step.bytes_moved == 2 * (2 * 4 * 64 * 64 * 4 + (2 * 2 * 64 + 2 * 4 * 64 + 4 * 64 + 4) * 2 + 4)
