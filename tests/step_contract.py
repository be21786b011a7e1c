# SPDX-License-Identifier: Apache-2.0
"""What both whole decode steps promise, whatever runs them. tests/pure runs this on NumPy, tests/gpu on CUDA.

Numbers are compared with kda_cupy.reference.truth (float64, token by token, shares no code with a backend).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mtp_problems import DIM, settle_tokens
from problems import POISON, Problem, same_bits, to, to_host, to_library
from step_problems import histories_of, make_step, next_token, out_of, state_of

import kda_cupy
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

#: One token. fp32: sums of 128 products, measured 1.6e-7. fp16, bf16: the output's own rounding is 2.0e-4 and 1.6e-3.
OUTPUT_ERROR = {"float32": 2e-6, "float16": 3e-4, "bfloat16": 3e-3}
STATE_ERROR = 2e-6
#: 16 tokens in a row, and the state after 4,096.
CHAINED_ERROR = 1e-5
OPERATIONS = {"kda": kda_cupy.kda_decode_step, "gdn": kda_cupy.gdn_decode_step}
TRUTHS = {"kda": truth.kda_decode_step, "gdn": truth.gdn_decode_step}
OPS = pytest.mark.parametrize("op", ["kda", "gdn"])


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
        heads = [(H, g * H) for H, g in ((1, 1), (3, 1), (12, 1), (32, 1), (96, 1), (1, 2), (16, 2))]
        heads += [(1, 3), (2, 6), (1, 4), (2, 8), (1, 5), (1, 8), (3, 24), (1, 16)]
        cases += [
            Case(f"{op}-H{H}-HV{HV}", {"op": op, "H": H, "HV": HV, "B": 2, "dtype": "float32", "onorm": True})
            for H, HV in heads
        ]
        cases += [
            Case(f"{op}-output-norm-{dtype}", {"op": op, "onorm": True, "dtype": dtype})
            for dtype in OUTPUT_ERROR
        ]
        cases += [
            Case(f"{op}-no-bias", {"op": op, "bias": False}),
            Case(f"{op}-taps-fastest", {"op": op, "channels_fastest": False}),
            Case(f"{op}-int64", {"op": op, "index_dtype": "int64"}),
            Case(f"{op}-fp32-gates", {"op": op, "gate_dtype": "float32"}),
            Case(f"{op}-bf16-weights", {"op": op, "weight_dtype": "bfloat16", "parameter_dtype": "bfloat16"}),
            Case(
                f"{op}-fp16-weights",
                {"op": op, "weight_dtype": "float16", "parameter_dtype": "float16", "dtype": "float16"},
            ),
            Case(f"{op}-no-A_log", {"op": op, "A_log": False, "dtype": "float32"}),
        ]
    return cases


CASES = _cases()


@st.composite
def problems(draw: Any) -> Problem:
    """Any heads, dtypes, strides and padding."""
    H, B = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    P = B + draw(st.integers(1, 3))
    live = draw(st.permutations(range(P)))
    dtype = draw(st.sampled_from(list(OUTPUT_ERROR)))
    parameters = draw(st.sampled_from([dtype, "float32"]))  # each combination is a kernel to compile
    return make_step(
        draw(st.sampled_from(["kda", "gdn"])),
        B=B,
        H=H,
        HV=H * draw(st.integers(1, 3)),
        dtype=dtype,
        P=P,
        slots=[draw(st.sampled_from([-1, live[row], live[row]])) for row in range(B)],
        lower_bound=draw(st.sampled_from([None, -5.0, -0.5])),
        bias=draw(st.booleans()),
        onorm=draw(st.booleans()),
        gate_dtype=parameters,
        weight_dtype=parameters,
        parameter_dtype=parameters,
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        channels_fastest=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def op_of(problem: Problem) -> str:
    return "kda" if "x_q" in problem else "gdn"


class Result(NamedTuple):
    """What a call left behind, as NumPy arrays: ``out`` by rows [B, HV, 128], state, histories of q, k, v."""

    out: Any
    state: Any
    histories: list[Any]


class StepContract:
    """Subclasses say where to run by a fixture ``library`` (numpy or cupy)."""

    @pytest.fixture(autouse=True)
    def _no_errors_left_behind(self, library: ModuleType) -> Any:
        self.library = library
        kda_cupy.check_errors()
        yield
        kda_cupy.check_errors()

    def run(self, problem: Problem, **options: Any) -> Result:
        """Call it on copies in the library, with a poisoned output."""
        scalars = {name: value for name, value in options.items() if np.ndim(value) == 0}
        moved = to({**problem, **options}, self.library) | scalars  # a 0-d array stays on the host
        moved["out"] = to_library(out_of(problem), self.library)
        assert OPERATIONS[op_of(problem)](**moved) is moved["out"]
        return self.result(moved)

    def result(self, moved: Problem) -> Result:
        out = to_host(moved["out"])
        hosts = {name: to_host(value) for name, value in moved.items() if hasattr(value, "shape")}
        rows = out[0] if op_of(moved) == "kda" else out[:, 0]
        return Result(rows, state_of(hosts), histories_of(hosts))

    def judge(self, problem: Problem, result: Result, **options: Any) -> None:
        """Compare what a step writes, and what it must not write."""
        kind = result.out.dtype.name
        slots, live = problem["ssm_state_indices"], []
        for row, want in enumerate(TRUTHS[op_of(problem)]({**problem, **options})):
            if want is None:
                assert same_bits(result.out[row], np.zeros_like(result.out[row]))
                continue
            slot = slots[row]
            live.append(slot)
            assert relative_error(result.out[row], want.out[0]) < OUTPUT_ERROR[kind]
            assert relative_error(result.state[slot], want.states[0]) < STATE_ERROR
            for got, windows in zip(result.histories, want.windows, strict=True):
                assert same_bits(got[slot], windows[0].astype(got.dtype))
        idle = np.setdiff1d(np.arange(len(result.state)), live)
        assert same_bits(result.state[idle], state_of(problem)[idle])
        for got, before in zip(result.histories, histories_of(problem), strict=True):
            assert same_bits(got[idle], before[idle])

    # ---- numbers ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_agrees_with_the_float64_reference(self, case: Case) -> None:
        problem = make_step(**case.problem)
        self.judge(problem, self.run(problem))

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(problem=problems())
    def test_any_problem(self, problem: Problem) -> None:
        self.judge(problem, self.run(problem))

    @OPS
    @pytest.mark.parametrize("options", [
        {"scale": 0.25},
        {"use_qk_l2norm_in_kernel": False},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5, "scale": 1.0, "allow_neg_eigval": True},
    ], ids=str)  # fmt: skip
    def test_options(self, op: str, options: dict[str, Any]) -> None:
        problem = make_step(op, dtype="float32", onorm=True)
        self.judge(problem, self.run(problem, **options), **options)

    @OPS
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("A_log", [-10.0, 0.0, 5.0])
    @pytest.mark.parametrize("raw", [-1e4, -20.0, 0.0, 20.0001, 100.0, 1e4])
    def test_gates_at_the_extremes(
        self, op: str, lower_bound: float | None, A_log: float, raw: float
    ) -> None:
        """B7: softplus must not overflow, and a branch-free blend must not make 0 * inf."""
        problem = make_step(op, B=2, dtype="float32", lower_bound=lower_bound)
        problem["g" if op == "kda" else "a"][:] = raw
        problem["dt_bias"][:] = 0
        problem["A_log"][:] = A_log
        self.judge(problem, self.run(problem))

    @OPS
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    def test_infinite_rate_times_zero_is_no_nan(self, op: str, lower_bound: float | None) -> None:
        problem = make_step(op, B=1, dtype="float32", lower_bound=lower_bound)
        problem["A_log"][:] = 200.0  # exp overflows in fp32
        problem["g" if op == "kda" else "a"][:] = -1e4 if lower_bound is None else 0.0
        problem["dt_bias"][:] = 0
        self.judge(problem, self.run(problem))

    @OPS
    @pytest.mark.parametrize("gate", [-1e4, -20.0, 0.0, 20.0, 1e4])
    def test_output_gates_at_the_extremes(self, op: str, gate: float) -> None:
        """SiLU of -1e4 is -0, of 1e4 itself; a sigmoid is 0 or 1. Never inf * 0."""
        problem = make_step(op, B=2, dtype="float32", onorm=True)
        problem["onorm_gate"][:] = gate
        result = self.run(problem)
        self.judge(problem, result)
        assert np.isfinite(result.out).all()

    @OPS
    @pytest.mark.parametrize("x", [-1e4, -90.0, 0.0, 90.0, 1e4])
    def test_convolutions_at_the_extremes(self, op: str, x: float) -> None:
        """SiLU must not overflow where exp(-y) does."""
        problem = make_step(op, B=1, dtype="float32")
        for name in ("x_v", "mixed_qkv"):
            if name in problem:
                problem[name][..., -DIM:] = x
        result = self.run(problem)
        self.judge(problem, result)

    @OPS
    def test_the_norm_of_a_zero_output_is_zero(self, op: str) -> None:
        problem = make_step(op, B=1, dtype="float32", onorm=True, bias=False)
        state_of(problem)[:] = 0
        for name in ("x_v", "cs_v", "mixed_qkv", "conv_state"):
            if name in problem:
                problem[name][:] = 0
        assert not self.run(problem).out.any()

    @OPS
    def test_rows_are_values_and_columns_are_keys(self, op: str) -> None:
        """C1, C3: at 128 x 128 a transposed state has the same shape, so it is checked by value."""
        problem = make_step(op, B=1, H=1, HV=1, dtype="float32", bias=False)
        slot = problem["ssm_state_indices"][0]
        state_of(problem)[:] = 0
        state_of(problem)[slot, 0, 3, 70] = 1.0
        for name in ("g", "beta", "a", "b"):
            if name in problem:
                problem[name][:] = -1e4  # no decay, no correction
        for history in histories_of(problem):
            history[:] = 0
        for name in ("w_q", "w_k", "w_v", "conv_weight"):
            if name in problem:
                problem[name][:] = [0, 0, 0, 1]
        for name in ("x_q", "x_k", "x_v", "mixed_qkv"):
            if name in problem:
                problem[name][:] = 0
        problem["x_q" if op == "kda" else "mixed_qkv"][..., 70] = (
            20.0  # SiLU(20) = 20, and the norm makes it 1
        )
        result = self.run(problem, scale=1.0)
        assert np.argwhere(result.out).tolist() == [[0, 0, 3]]
        assert result.out[0, 0, 3] == pytest.approx(1.0, abs=1e-6)
        assert np.argwhere(result.state).tolist() == [[slot, 0, 3, 70]]

    def test_nan_stays_with_its_row(self) -> None:
        problem = make_step(B=4, dtype="float32", onorm=True)
        clean = self.run(problem)
        for name in ("x_q", "x_k", "x_v"):
            problem[name][:, 2] = np.nan
        state_of(problem)[problem["ssm_state_indices"][2]] = np.inf
        got = self.run(problem)
        others = [0, 1, 3]
        slots = problem["ssm_state_indices"][others]
        assert same_bits(got.out[others], clean.out[others])
        assert same_bits(got.state[slots], clean.state[slots]) and np.isnan(got.out[2]).all()

    # ---- many tokens ------------------------------------------------------------------------------------------

    @OPS
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_sixteen_tokens_in_a_row(self, op: str, lower_bound: float | None, dtype: str) -> None:
        problem = make_step(op, B=2, dtype=dtype, lower_bound=lower_bound, onorm=True)
        moved, rng = to(problem, self.library), np.random.default_rng(1)
        moved["out"] = to_library(out_of(problem), self.library)
        model = {**problem, "recurrent_state": None, "initial_state": None}
        state, histories = state_of(problem).astype(np.float64), histories_of(problem)
        histories = [each.astype(np.float64) for each in histories]
        slots = problem["ssm_state_indices"]
        for _ in range(16):
            fresh = next_token(problem, histories, rng)
            for name, value in fresh.items():
                moved[name] = to_library(value, self.library)
            model |= fresh
            model |= {"recurrent_state": state} if op == "kda" else {"initial_state": state}
            if op == "kda":
                model |= {f"cs_{letter}": each for letter, each in zip("qkv", histories, strict=True)}
            else:
                model["conv_state"] = np.concatenate(histories, axis=1)
            OPERATIONS[op](**moved)
            got = self.result(moved)
            for row, want in enumerate(TRUTHS[op](model)):
                error = max(OUTPUT_ERROR[dtype], CHAINED_ERROR)
                assert relative_error(got.out[row], want.out[0]) < error
                state[slots[row]] = want.states[0]
                for each, windows in zip(histories, want.windows, strict=True):
                    each[slots[row]] = windows[0]
        assert relative_error(got.state[slots], state[slots]) < CHAINED_ERROR
        for mine, each in zip(got.histories, histories, strict=True):
            assert same_bits(mine[slots], each[slots].astype(mine.dtype))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_four_thousand_tokens_in_a_row(self, dtype: str) -> None:
        """B2, B13: 4,096 tokens, state within 1e-5 of float64; beta or the state in bf16 would be 1e-3 off by now."""
        tokens = 4096
        problem = make_step("gdn", B=1, H=1, HV=1, dtype=dtype)
        rng, slot = np.random.default_rng(3), problem["ssm_state_indices"][0]
        kind = problem["mixed_qkv"].dtype
        rows = rng.standard_normal((tokens, 3 * DIM)).astype(kind)
        if dtype != "float32":
            settle_tokens(
                rows, problem["conv_state"][slot], problem["conv_weight"], problem["conv_bias"], rng
            )
        raw, logit = (rng.standard_normal((tokens, 1)).astype(kind) for _ in range(2))
        moved = to(problem, self.library)
        moved["out"] = to_library(out_of(problem), self.library)
        placed = {
            name: to_library(value, self.library)
            for name, value in (("mixed_qkv", rows), ("a", raw), ("b", logit))
        }
        for token in range(tokens):
            now = {name: value[token : token + 1] for name, value in placed.items()}
            kda_cupy.gdn_decode_step(**{**moved, **now})
        want = float64_chain(problem, rows, raw, logit)
        got = self.result(moved)
        assert relative_error(got.state[slot, 0], want) < CHAINED_ERROR
        window = np.concatenate([problem["conv_state"][slot].T, rows])[-3:].T
        assert same_bits(np.concatenate([each[slot] for each in got.histories]), window)

    # ---- same bits --------------------------------------------------------------------------------------------

    @OPS
    @pytest.mark.parametrize("group", [1, 2, 3, 4])
    def test_a_row_has_the_same_bits_in_every_batch(self, op: str, group: int) -> None:
        """B12, H11: alone, in pairs, in any order; the batch never shows."""
        problem = make_step(op, B=9, H=2, HV=2 * group, onorm=True)
        want = self.run(problem)
        for rows in ([4], [8, 0], [3, 1, 2], [7, 6, 5, 4, 3, 2, 1, 0]):
            got = self.run(pick(problem, rows))
            slots = problem["ssm_state_indices"][rows]
            assert same_bits(got.out, want.out[rows])
            assert same_bits(got.state[slots], want.state[slots])
            for mine, whole in zip(got.histories, want.histories, strict=True):
                assert same_bits(mine[slots], whole[slots])

    @OPS
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("group", [1, 2, 3, 4])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_the_packed_decode_of_its_activations_gives_the_same_bits(
        self, op: str, lower_bound: float | None, group: int, dtype: str
    ) -> None:
        """The activations are settled: what float64 rounds them to is what any backend does."""
        problem = make_step(op, B=3, H=2, HV=2 * group, dtype=dtype, lower_bound=lower_bound)
        fused = self.run(problem)
        rows = activated(problem)
        if op == "kda":
            gates = {"a": problem["g"][0].reshape(3, -1), "b": problem["beta"][0]}
        else:
            gates = {"a": problem["a"], "b": problem["b"]}
        names = ("A_log", "dt_bias", "ssm_state_indices", "lower_bound")
        packed = {"mixed_qkv": rows, **gates, **{name: problem[name] for name in names}}
        packed["initial_state"] = state_of(problem)
        decode = kda_cupy.kda_packed_decode if op == "kda" else kda_cupy.gdn_packed_decode
        out, state = decode(**to(packed, self.library))
        assert same_bits(to_host(out)[:, 0], fused.out) and same_bits(state, fused.state)

    @OPS
    def test_no_bias_is_a_bias_of_zero_and_strides_do_not_show(self, op: str) -> None:
        problem = make_step(op, bias=False, onorm=True)
        want = self.run(problem)
        zeros = {
            f"conv_bias{name.removeprefix('w').removeprefix('conv_weight')}": np.zeros(
                len(problem[name]), problem[name].dtype
            )
            for name in ("w_q", "w_k", "w_v", "conv_weight")
            if name in problem
        }
        compact = {
            name: np.ascontiguousarray(value)
            if isinstance(value, np.ndarray) and name not in ("recurrent_state", "initial_state")
            else value
            for name, value in problem.items()
        }
        for other in ({**problem, **zeros}, compact):
            got = self.run(other)
            assert same_bits(got.out, want.out) and same_bits(got.state, want.state)
            for mine, whole in zip(got.histories, want.histories, strict=True):
                assert same_bits(mine, whole)

    @OPS
    def test_weights_at_odd_addresses(self, op: str) -> None:
        """C14: taps that cannot be loaded four at a time give the same bits."""
        problem = make_step(op)
        want = self.run(problem)
        shifted = dict(problem)
        for name in ("w_q", "w_k", "w_v", "conv_weight"):
            if name in problem:
                wide = np.full((len(problem[name]), 5), POISON, problem[name].dtype)
                wide[:, 1:] = problem[name]
                shifted[name] = wide[:, 1:]
        got = self.run(shifted)
        assert same_bits(got.out, want.out) and same_bits(got.state, want.state)

    def test_scalars_of_any_type(self) -> None:
        """E9: a Python float, NumPy scalars and 0-d arrays mean the same."""
        problem = make_step(B=2, onorm=True)
        results = [
            self.run(problem, scale=kind(0.125), lower_bound=kind(-4.0), onorm_eps=kind(2**-16))
            for kind in (float, np.float64, np.float32, np.array)
        ]
        assert all(same_bits(each.out, results[0].out) for each in results)
        assert all(same_bits(each.state, results[0].state) for each in results)

    # ---- padding, and what must not be followed ---------------------------------------------------------------

    @OPS
    @pytest.mark.parametrize("group", [1, 2, 3])
    @pytest.mark.parametrize("slots", [[-1, 3, 1], [3, -5, 1], [3, 1, -1], [-1, -1, -1]], ids=str)
    def test_padding_rows_are_inert(self, op: str, group: int, slots: list[int]) -> None:
        """A1, A3, A7: -1 is no last slot; state and history are left alone and the output is zero."""
        problem = make_step(op, B=3, P=5, H=2, HV=2 * group, slots=slots, onorm=True)
        for name in ("x_q", "x_k", "x_v", "g", "beta"):
            if name in problem:
                problem[name][:, np.array(slots) < 0] = np.nan
        for name in ("mixed_qkv", "a", "b"):
            if name in problem:
                problem[name][np.array(slots) < 0] = np.nan
        self.judge(problem, self.run(problem))

    @OPS
    def test_null_index(self, op: str) -> None:
        problem = make_step(op, B=3, P=4, slots=[2, 0, 1])
        got = self.run(problem, null_index=0)
        self.judge(problem, got, null_index=0)
        assert not got.out[1].any()
        self.judge(problem, self.run(problem))

    @OPS
    @pytest.mark.parametrize("group", [1, 2, 3])
    def test_a_slot_past_the_pool_touches_nothing_and_is_reported(self, op: str, group: int) -> None:
        """A5: never folded into the pool."""
        problem = make_step(op, B=3, P=6, H=2, HV=2 * group, slots=[5, 6947, 6], onorm=True)
        self.judge(problem, self.run(problem))
        with pytest.raises(kda_cupy.SlotError, match=rf"{op}_decode_step.* and 1 more") as caught:
            kda_cupy.check_errors()
        assert caught.value.operand == "ssm_state_indices"
        kda_cupy.check_errors()

    @OPS
    def test_full_validation_raises_before_anything_runs(self, op: str) -> None:
        """A10: a slot named twice is a race; padding may repeat."""
        for slots, words in (([3, 1, 3], "rows 0, 2"), ([1, 9, 2], "slot 9")):
            problem = to(make_step(op, B=3, P=5, slots=slots), self.library)
            before = [to_host(state_of(problem)), *map(to_host, histories_of(problem))]
            with pytest.raises(kda_cupy.SlotError, match=words):
                OPERATIONS[op](**problem, validate="full")
            after = [state_of(problem), *histories_of(problem)]
            assert all(same_bits(mine, its) for mine, its in zip(before, after, strict=True))
        fine = make_step(op, B=4, P=5, slots=[-1, 2, -1, 0])
        self.judge(fine, self.run(fine, validate="full"))

    @OPS
    def test_an_empty_batch(self, op: str) -> None:
        """C18."""
        problem = make_step(op, B=0, P=3, slots=np.zeros(0), onorm=True)
        assert self.run(problem).out.size == 0

    @OPS
    def test_slots_may_be_a_column_of_a_table(self, op: str) -> None:
        problem = make_step(op, B=3)
        want = self.run(problem)
        table = np.full((3, 5), 99, np.int64)
        table[:, 2] = problem["ssm_state_indices"]
        problem["ssm_state_indices"] = table[:, 2]
        got = self.run(problem)
        assert same_bits(got.out, want.out) and same_bits(got.state, want.state)

    # ---- calling ----------------------------------------------------------------------------------------------

    @OPS
    def test_bind(self, op: str) -> None:
        """The same bits as calls, on new contents of the same buffers."""
        problem = make_step(op, B=3, onorm=True)
        called, bound = to(problem, self.library), to(problem, self.library)
        call = kda_cupy.bind(OPERATIONS[op], **bound)
        rng = np.random.default_rng(0)
        for _ in range(3):
            for name, value in next_token(problem, histories_of(problem), rng).items():
                called[name] = to_library(value, self.library)
                bound[name][...] = to_library(value, self.library)
            want = OPERATIONS[op](**called)
            assert call() is call.out and same_bits(call.out, want)
            assert same_bits(state_of(bound), state_of(called))
        B, H, HV = 3, 1, 2
        gates, channels = HV * DIM if op == "kda" else HV, (2 * H + HV) * DIM
        assert call.bytes_moved == B * (
            2 * HV * DIM * DIM * 4 + 7 * channels * 2 + gates * 2 + HV * 2 + 2 * HV * DIM * 2 + 4
        )
        with pytest.raises(TypeError):
            kda_cupy.bind(OPERATIONS[op], **bound, no_such_option=1)

    @OPS
    def test_an_output_of_the_callers_kind_is_made(self, op: str) -> None:
        problem = make_step(op, B=2)
        out = OPERATIONS[op](**to(problem, self.library))
        assert type(out).__module__.partition(".")[0] == self.library.__name__
        assert out.shape == out_of(problem).shape and out.dtype == out_of(problem).dtype


def float64_chain(problem: Problem, rows: Any, raw: Any, logit: Any) -> Any:
    """The state [V, K] of a GDN head after many tokens, one after the other."""
    slot = problem["ssm_state_indices"][0]
    S, history = problem["initial_state"][slot, 0].astype(np.float64), problem["conv_state"][slot]
    history = history.astype(np.float64)
    taps, bias = problem["conv_weight"].astype(np.float64), problem["conv_bias"].astype(np.float64)
    for x, gate, beta in zip(
        rows.astype(np.float64), raw.astype(np.float64), logit.astype(np.float64), strict=True
    ):
        act, history = truth.conv(history, x, taps, bias, rows.dtype)
        q, k, v = act[:DIM], act[DIM : 2 * DIM], act[2 * DIM :]
        g = truth.log_decay(
            gate[0], problem["dt_bias"][0], float(problem["A_log"][0]), problem["lower_bound"]
        )
        token = truth.Token(
            truth.l2_normalized(q) * DIM**-0.5, truth.l2_normalized(k), v, g, float(truth.sigmoid(beta[0]))
        )
        S, _ = truth.step(S, token)
    return S


def activated(problem: Problem) -> Any:
    """The packed rows [B, C] that a packed decode takes: float64 activations, rounded to the activation dtype."""
    kind = problem["x_q" if "x_q" in problem else "mixed_qkv"].dtype
    acts = []
    for row, slot in enumerate(problem["ssm_state_indices"]):
        parts = []
        for number, (letter, history) in enumerate(zip("qkv", histories_of(problem), strict=True)):
            if "x_q" in problem:
                x, w = problem[f"x_{letter}"][0, row].ravel(), problem[f"w_{letter}"]
                bias = problem[f"conv_bias_{letter}"]
            else:
                first = sum(each.shape[1] for each in histories_of(problem)[:number])
                channels = slice(first, first + history.shape[1])
                x, w = problem["mixed_qkv"][row, channels], problem["conv_weight"][channels]
                bias = problem["conv_bias"][channels]
            values = [np.asarray(each, np.float64) for each in (history[slot], x, w, bias)]
            parts.append(truth.conv(*values, kind)[0])
        acts.append(np.concatenate(parts))
    return np.array(acts).astype(kind)


def pick(problem: Problem, rows: list[int]) -> Problem:
    """The same operands with these rows only; the pool and the histories stay whole."""
    picked = dict(problem)
    for name in ("x_q", "x_k", "x_v", "g", "beta"):
        if name in problem:
            picked[name] = problem[name][:, rows]
    for name in ("mixed_qkv", "a", "b", "ssm_state_indices"):
        if name in problem:
            picked[name] = problem[name][rows]
    if "onorm_gate" in problem:
        gate = problem["onorm_gate"]
        picked["onorm_gate"] = gate[:, rows] if "x_q" in problem else gate[rows]
    return picked
