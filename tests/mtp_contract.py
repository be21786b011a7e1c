# SPDX-License-Identifier: Apache-2.0
"""What verify and commit promise, whatever runs them. tests/pure runs this on NumPy, tests/gpu on CUDA.

Numbers are compared with kda_cupy.reference.truth (float64, token by token, shares no code with a backend).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mtp_problems import DIM, commit_operands, make_mtp, scratch, settle
from numpy.lib.stride_tricks import as_strided
from problems import POISON, Problem, np_dtype, same_bits, to, to_host, to_library

import kda_cupy
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

#: fp32: sums of 128 products, over up to 16 tokens. fp16, bf16: the output's own rounding is 2.0e-4 and 1.6e-3.
OUTPUT_ERROR = {"float32": 1e-5, "float16": 3e-4, "bfloat16": 3e-3}
STATE_ERROR = 1e-5
#: One token, and what should be the same state by two ways.
ONE_TOKEN_ERROR = 2e-6
RINGS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
WINDOWS = ("intermediate_conv_q", "intermediate_conv_k", "intermediate_conv_v")
SCRATCH = ("intermediate_ssm", *RINGS, *WINDOWS)
TOKENS = ("x_q", "x_k", "x_v", "g", "beta")
PERSISTENT = ("recurrent_state", "cs_q", "cs_k", "cs_v")


class Case(NamedTuple):
    name: str
    problem: dict[str, Any]


def _cases() -> list[Case]:
    cases = []
    for mode in ("rings", "snapshots"):
        for gate, lower_bound in (("softplus", None), ("bounded", -5.0)):
            cases += [
                Case(f"{mode}-{gate}-{dtype}", {"mode": mode, "lower_bound": lower_bound, "dtype": dtype})
                for dtype in OUTPUT_ERROR
            ]
        cases += [
            Case(f"{mode}-t{t}", {"mode": mode, "t": t, "N": 2, "dtype": "float32"}) for t in range(1, 17)
        ]
        cases += [
            Case(f"{mode}-no-bias", {"mode": mode, "bias": False}),
            Case(f"{mode}-output-norm", {"mode": mode, "onorm": True}),
            Case(f"{mode}-output-norm-fp32", {"mode": mode, "onorm": True, "dtype": "float32"}),
            Case(f"{mode}-ragged", {"mode": mode, "N": 5, "lengths": [2, 0, 8, 1, 3], "spare_tokens": 3}),
            Case(f"{mode}-taps-fastest", {"mode": mode, "channels_fastest": False}),
            Case(f"{mode}-int64", {"mode": mode, "index_dtype": "int64"}),
        ]
    heads = [(H, HV) for H in (1, 3, 4, 6, 8) for HV in (H, 2 * H, 4 * H)]
    heads += [(12, 12), (12, 24), (16, 32), (32, 32), (96, 96), (16, 64)]
    cases += [
        Case(
            f"H{H}-HV{HV}",
            {
                "H": H,
                "HV": HV,
                "N": 1,
                "P": 3,
                "t": 2,
                "dtype": "float32",
                "mode": "snapshots" if H % 2 else "rings",
            },
        )
        for H, HV in heads
    ]
    cases += [
        Case("ring-indices", {"ring_indices": True, "N": 4}),
        Case("fp32-gates", {"gate_dtype": "float32"}),
        Case("bf16-weights", {"weight_dtype": "bfloat16", "parameter_dtype": "bfloat16"}),
        Case("fp16-weights", {"weight_dtype": "float16", "parameter_dtype": "float16", "dtype": "float16"}),
        Case("no-A_log", {"A_log": False, "dtype": "float32"}),
    ]
    return cases


CASES = _cases()


@st.composite
def problems(draw: Any) -> Problem:
    """Any heads, dtypes, lengths, strides and padding."""
    H, N = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    P = N + draw(st.integers(1, 3))
    live = draw(st.permutations(range(P)))
    dtype = draw(st.sampled_from(list(OUTPUT_ERROR)))
    parameters = draw(st.sampled_from([dtype, "float32"]))  # each combination is a kernel to compile
    return make_mtp(
        N=N,
        H=H,
        HV=H * draw(st.integers(1, 3)),
        dtype=dtype,
        mode=draw(st.sampled_from(["rings", "snapshots"])),
        lengths=[draw(st.integers(0, 4)) for _ in range(N)],
        t=draw(st.integers(1, 6)),
        spare_tokens=draw(st.integers(0, 3)),
        P=P,
        slots=[draw(st.sampled_from([-1, live[row], live[row]])) for row in range(N)],
        lower_bound=draw(st.sampled_from([None, -5.0, -0.5])),
        bias=draw(st.booleans()),
        onorm=draw(st.booleans()),
        gate_dtype=parameters,
        weight_dtype=parameters,
        parameter_dtype=parameters,
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        ring_indices=draw(st.booleans()),
        channels_fastest=draw(st.booleans()),
        spare_steps=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**31)),
    )


class Result(NamedTuple):
    """What a call left behind, as NumPy arrays by name."""

    out: Any
    arrays: dict[str, Any]


class MtpContract:
    """Subclasses say where to run by a fixture ``library`` (numpy or cupy)."""

    @pytest.fixture(autouse=True)
    def _no_errors_left_behind(self, library: ModuleType) -> Any:
        self.library = library
        kda_cupy.check_errors()
        yield
        kda_cupy.check_errors()

    def verify(self, problem: Problem, **options: Any) -> Result:
        """Call it on copies in the library, with a poisoned output."""
        moved = to({**problem, **options}, self.library)
        shape = (1, problem["x_q"].shape[1], problem["x_v"].shape[2], DIM)
        moved["out"] = to_library(np.full(shape, np.nan, problem["x_q"].dtype), self.library)
        out = kda_cupy.kda_decode_mtp(**moved)
        assert out is moved["out"]
        return Result(to_host(out), to_hosts(moved))

    def commit(self, operands: Problem, **options: Any) -> dict[str, Any]:
        moved = to({**operands, **options}, self.library)
        assert kda_cupy.kda_commit(**moved) is moved["recurrent_state"]
        return to_hosts(moved)

    # ---- numbers ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_agrees_with_the_float64_reference(self, case: Case) -> None:
        problem = make_mtp(**case.problem)
        self.judge(problem, self.verify(problem))

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(problem=problems())
    def test_any_problem(self, problem: Problem) -> None:
        self.judge(problem, self.verify(problem))

    def judge(self, problem: Problem, result: Result, **options: Any) -> None:
        """Compare everything that a verify writes, and everything that it must not write."""
        kind, arrays = problem["x_q"].dtype.name, result.arrays
        wanted = truth.decode_mtp({**problem, **options})
        bounds = problem["cu_seqlens"]
        rings = problem.get("ring_indices", problem["ssm_state_indices"])
        untouched = {
            name: np.ones(arrays[name].shape, bool) for name in SCRATCH if arrays.get(name) is not None
        }
        silent = np.ones(result.out.shape[1], bool)
        for row, want in enumerate(wanted):
            if want is None:
                continue
            tokens, t = slice(bounds[row], bounds[row + 1]), int(bounds[row + 1] - bounds[row])
            silent[tokens] = False
            if not t:
                continue
            assert relative_error(result.out[0, tokens], want.out) < OUTPUT_ERROR[kind]
            at = problem["intermediate_state_indices"][row]
            for name, window in zip(WINDOWS, want.windows, strict=True):
                assert same_bits(arrays[name][at, :t], window.astype(kind_of(kind)))
                untouched[name][at, :t] = False
            if "intermediate_ssm" in untouched:
                error = ONE_TOKEN_ERROR if t == 1 else STATE_ERROR
                assert relative_error(arrays["intermediate_ssm"][at, :t], want.states) < error
                untouched["intermediate_ssm"][at, :t] = False
                continue
            ring = [arrays[name][rings[row], :, :t] for name in RINGS]
            for got, raw in zip(ring[:2], (want.rawv, want.rawk), strict=True):
                if kind == "float32":
                    assert relative_error(got, raw) < ONE_TOKEN_ERROR
                else:
                    assert same_bits(got, raw.astype(kind_of(kind)))
            assert relative_error(ring[2], want.g) < ONE_TOKEN_ERROR
            assert relative_error(ring[3], want.beta) < ONE_TOKEN_ERROR
            for name in RINGS:
                untouched[name][rings[row], :, :t] = False
        for name, mask in untouched.items():
            assert (arrays[name][mask] == arrays[name].dtype.type(POISON)).all(), name
        assert same_bits(result.out[:, silent], np.zeros_like(result.out[:, silent]))
        for name in PERSISTENT:
            assert same_bits(arrays[name], problem[name]), name

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("options", [
        {"scale": 0.25},
        {"use_qk_l2norm_in_kernel": False},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5, "scale": 1.0, "allow_neg_eigval": True},
    ], ids=str)  # fmt: skip
    def test_options(self, mode: str, options: dict[str, Any]) -> None:
        problem = make_mtp(N=2, mode=mode, dtype="float32")
        if not options.get("use_qk_l2norm_in_kernel", True):
            for name in ("x_k", "cs_k", "conv_bias_k"):
                problem[name] *= 0.1
        self.judge(problem, self.verify(problem, **options), **options)

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("A_log", [-10.0, 0.0, 5.0])
    @pytest.mark.parametrize("raw", [-1e4, -20.0, 0.0, 20.0001, 100.0, 1e4])
    def test_gates_at_the_extremes(
        self, mode: str, lower_bound: float | None, A_log: float, raw: float
    ) -> None:
        """B7, B10: no overflow, no NaN, and prefix sums of saturated gates over 8 tokens stay exact."""
        problem = make_mtp(N=1, t=8, HV=1, dtype="float32", mode=mode, lower_bound=lower_bound)
        problem["g"][:] = raw
        problem["dt_bias"][:] = 0
        problem["A_log"][:] = A_log
        self.judge(problem, self.verify(problem))

    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    def test_open_and_shut_gates_in_one_chain(self, lower_bound: float | None) -> None:
        problem = make_mtp(N=2, t=16, HV=2, dtype="float32", mode="snapshots", lower_bound=lower_bound)
        problem["g"][...] = np.where(np.arange(32)[None, :, None, None] % 3 == 0, 1e4, -1e4)
        problem["g"][:, ::5] = 0
        self.judge(problem, self.verify(problem))

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("lower_bound", [-12.0, -20.0, -60.0])
    def test_decays_that_leave_the_range_of_their_inverses(self, mode: str, lower_bound: float) -> None:
        """Kernels divide decays where they can; somewhere in these chains they no longer can."""
        problem = make_mtp(N=2, t=8, HV=2, dtype="float32", mode=mode, lower_bound=lower_bound)
        problem["g"][:] = 3.0
        problem["g"][:, :, :, ::5] = -9.0  # some keys forget nothing
        result, (first, second) = self.verify(problem), truth.decode_mtp(problem)
        committed = self.commit(commit_operands({**problem, **result.arrays}, [8, 5]))
        for n, (wanted, accepted) in enumerate(((first, 8), (second, 5))):
            assert relative_error(result.out[0, 8 * n : 8 * n + 8], wanted.out) < OUTPUT_ERROR["float32"]
            state = committed["recurrent_state"][problem["ssm_state_indices"][n]]
            assert relative_error(state, wanted.states[accepted - 1]) < STATE_ERROR

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("t", [1, 5, 16])
    def test_windows_may_slide_over_raw_inputs(self, mode: str, t: int) -> None:
        """Step and tap strides the same: each input is held once, and a commit reads the same history."""
        problem = make_mtp(N=2, t=t, mode=mode, dtype="bfloat16")
        plain = self.verify(problem)
        slid = dict(problem)
        for name in WINDOWS:
            rows, steps, channels, taps = problem[name].shape
            inputs = np.full((rows, steps + taps - 1, channels), 77.0, problem[name].dtype)
            row, step, channel = inputs.strides
            slid[name] = as_strided(inputs, problem[name].shape, (row, step, channel, step))
        result = self.verify(slid)
        assert same_bits(result.out, plain.out)
        rows = problem["intermediate_state_indices"]
        for name in WINDOWS:
            assert same_bits(result.arrays[name][rows, :t], plain.arrays[name][rows, :t])
        accept = [t, (t + 1) // 2]
        committed = self.commit(commit_operands({**slid, **result.arrays}, accept))
        wanted = self.commit(commit_operands({**problem, **plain.arrays}, accept))
        for name in PERSISTENT:
            assert same_bits(committed[name], wanted[name])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    def test_infinite_rates(self, mode: str, lower_bound: float | None) -> None:
        """exp(A_log) overflows: 0 * inf is 0 and no NaN, and an infinite decay wipes the state and nothing else."""
        problem = make_mtp(N=1, t=6, dtype="float32", mode=mode, lower_bound=lower_bound)
        problem["A_log"][:] = 200.0
        problem["dt_bias"][:] = 0
        shut = -1e4 if lower_bound is None else 0.0  # softplus(-1e4) = 0, and sigmoid's argument 0
        problem["g"][:] = shut
        problem["g"][:, 2, :, ::3] = problem["g"][:, 4] = 1.0
        result, wanted = self.verify(problem), truth.decode_mtp(problem)[0]
        assert relative_error(result.out[0], wanted.out) < OUTPUT_ERROR["float32"]
        committed = self.commit(commit_operands({**problem, **result.arrays}, [6]))
        slot = problem["ssm_state_indices"][0]
        assert relative_error(committed["recurrent_state"][slot], wanted.states[5]) < STATE_ERROR

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    def test_rows_are_values_and_columns_are_keys(self, mode: str) -> None:
        """C1, C3: at 128 x 128 a transposed state has the same shape, so it is checked by value."""
        problem = make_mtp(N=1, t=1, HV=1, dtype="float32", mode=mode, bias=False)
        slot = problem["ssm_state_indices"][0]
        problem["recurrent_state"][:] = 0
        problem["recurrent_state"][slot, 0, 3, 70] = 1.0
        problem["g"][:] = problem["beta"][:] = -1e4  # no decay, no correction
        for letter in "qkv":
            problem[f"x_{letter}"][:] = 0
            problem[f"cs_{letter}"][:] = 0
            problem[f"w_{letter}"][:] = [0, 0, 0, 1]
        problem["x_q"][..., 70] = 20.0  # SiLU(20) = 20, and the norm makes it 1
        result = self.verify(problem, scale=1.0)
        assert np.flatnonzero(result.out).tolist() == [3]
        assert result.out[0, 0, 0, 3] == pytest.approx(1.0, abs=1e-6)
        if mode == "snapshots":
            snapshot = result.arrays["intermediate_ssm"][problem["intermediate_state_indices"][0], 0]
            assert np.argwhere(snapshot[0]).tolist() == [[3, 70]]
        committed = self.commit(commit_operands({**problem, **result.arrays}, [1]))
        assert np.argwhere(committed["recurrent_state"]).tolist() == [[slot, 0, 3, 70]]

    @pytest.mark.parametrize("amplitude", [1e-2, 1e-4, 0.0])
    def test_small_and_zero_keys(self, amplitude: float) -> None:
        """B6: the epsilon is added to the sum; a zero vector stays zero."""
        problem = make_mtp(N=2, dtype="float32", mode="snapshots", bias=False)
        for name in ("x_q", "x_k", "cs_q", "cs_k"):
            problem[name] *= amplitude
        self.judge(problem, self.verify(problem))

    # ---- same bits --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", list(OUTPUT_ERROR))
    @pytest.mark.parametrize("t", [1, 3, 8, 9, 16])
    def test_outputs_have_the_same_bits_in_both_modes(self, dtype: str, t: int) -> None:
        problem = make_mtp(N=2, t=t, dtype=dtype, mode="rings", onorm=t == 3)
        other = {name: value for name, value in problem.items() if name not in RINGS}
        rows, steps, _, _ = problem["intermediate_conv_q"].shape
        other |= scratch("snapshots", rows=rows, slots=0, steps=steps, H=1, HV=2, dtype=dtype)
        rings, snapshots = self.verify(problem), self.verify(other)
        assert same_bits(rings.out, snapshots.out)
        for name in WINDOWS:
            assert same_bits(rings.arrays[name], snapshots.arrays[name])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    @pytest.mark.parametrize("t", [4, 16])
    def test_many_tokens_equal_single_steps(self, mode: str, lower_bound: float | None, t: int) -> None:
        """One verify of t tokens, and t of one token with a commit after each: the same, by another way."""
        problem = make_mtp(N=2, t=t, dtype="float32", mode=mode, lower_bound=lower_bound)
        whole = self.verify(problem)
        committed = self.commit(commit_operands({**problem, **whole.arrays}, [t, t]))
        arrays = {**problem, "cu_seqlens": np.arange(3, dtype=np.int32)}
        for j in range(t):
            now = {**arrays, **{name: problem[name][:, [j, t + j]] for name in TOKENS}}
            step = self.verify(now)
            assert relative_error(step.out[0], whole.out[0, [j, t + j]]) < ONE_TOKEN_ERROR
            arrays |= {name: step.arrays[name] for name in SCRATCH if name in step.arrays}
            arrays |= {
                name: array
                for name, array in self.commit(commit_operands({**now, **step.arrays}, [1, 1])).items()
                if name in PERSISTENT
            }
        for slot in problem["ssm_state_indices"]:
            for name in PERSISTENT[:1]:
                assert relative_error(arrays[name][slot], committed[name][slot]) < ONE_TOKEN_ERROR
            for name in PERSISTENT[1:]:
                assert same_bits(arrays[name][slot], committed[name][slot])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("t", [8, 16])
    def test_earlier_tokens_never_see_later_ones(self, mode: str, t: int) -> None:
        """B10: not even a NaN in the last token's gate, key or value reaches the outputs before it."""
        problem = make_mtp(N=2, t=t, mode=mode, seed=3)
        want = self.verify(problem)
        for name, poison in (("g", 1e4), ("g", np.nan), ("x_k", np.nan), ("x_v", np.inf), ("beta", np.nan)):
            changed = {**problem, name: problem[name].copy()}
            changed[name][0, [t - 1, 2 * t - 1]] = poison
            got = self.verify(changed)
            before = np.setdiff1d(np.arange(2 * t), [t - 1, 2 * t - 1])
            assert same_bits(got.out[0, before], want.out[0, before])
            if mode == "snapshots":
                assert same_bits(
                    got.arrays["intermediate_ssm"][:, : t - 1], want.arrays["intermediate_ssm"][:, : t - 1]
                )
            else:
                for ring in RINGS:
                    assert same_bits(got.arrays[ring][:, :, : t - 1], want.arrays[ring][:, :, : t - 1])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    def test_a_request_has_the_same_bits_in_every_batch(self, mode: str) -> None:
        """B12, A6: alone, with others, at any position, and between padding."""
        N, t = 24, 3
        whole = make_mtp(N=N, t=t, H=1, HV=1, mode=mode)
        want = self.verify(whole)
        rng = np.random.default_rng(1)
        for size in (1, 2, 3, 7):
            requests = rng.permutation(N)[:size]
            padded = np.repeat(requests, 2)
            part = pick(whole, padded, t)
            part["ssm_state_indices"] = np.where(
                np.arange(2 * size) % 2, -1, part["ssm_state_indices"]
            ).astype(np.int32)
            got = self.verify(part)
            for row, request in enumerate(requests):
                mine, its = slice(2 * row * t, (2 * row + 1) * t), slice(request * t, (request + 1) * t)
                assert same_bits(got.out[0, mine], want.out[0, its])
                assert not got.out[0, mine.stop : mine.stop + t].any()
                self.same_scratch(whole, request, got, want)

    def same_scratch(self, problem: Problem, row: int, got: Result, want: Result) -> None:
        for name in SCRATCH:
            if got.arrays.get(name) is None:
                continue
            at = problem["ssm_state_indices" if name in RINGS else "intermediate_state_indices"][row]
            assert same_bits(got.arrays[name][at], want.arrays[name][at])

    @pytest.mark.parametrize("H", [3, 4, 6, 8])
    def test_a_head_has_the_same_bits_in_every_shard(self, H: int) -> None:
        """C11: tensor parallelism gives any head count; a head does not notice."""
        whole = make_mtp(N=1, t=2, H=12, HV=12, P=2, mode="snapshots", slots=[1])
        want = self.verify(whole)
        shard = {
            name: array[..., :H, :] if name in ("x_q", "x_k", "x_v", "g") else array
            for name, array in whole.items()
        }
        shard |= {"beta": whole["beta"][..., :H], "A_log": whole["A_log"][:H]}
        shard["dt_bias"] = whole["dt_bias"][: H * DIM]
        shard["recurrent_state"] = np.ascontiguousarray(whole["recurrent_state"][:, :H])
        shard["intermediate_ssm"] = np.ascontiguousarray(whole["intermediate_ssm"][:, :, :H])
        for letter in "qkv":
            for name in (f"w_{letter}", f"conv_bias_{letter}"):
                shard[name] = whole[name][: H * DIM]
            shard[f"cs_{letter}"] = whole[f"cs_{letter}"][:, : H * DIM]
            shard[f"intermediate_conv_{letter}"] = whole[f"intermediate_conv_{letter}"][:, :, : H * DIM]
        got = self.verify(shard)
        assert same_bits(got.out, want.out[:, :, :H])
        assert same_bits(got.arrays["intermediate_ssm"], want.arrays["intermediate_ssm"][:, :, :H])

    @pytest.mark.parametrize("dtype", list(OUTPUT_ERROR))
    @pytest.mark.parametrize("offset", [0, 1, 3, 8])
    def test_column_slices_of_one_projection(self, dtype: str, offset: int) -> None:
        """C4: x_q, x_k, x_v and the gates are slices of one buffer, at any offset; out is one of another."""
        problem = make_mtp(N=3, t=2, H=1, HV=2, dtype=dtype)
        want = self.verify(problem)
        names = ("x_q", "x_k", "x_v", "g")
        flat = [problem[name][0].reshape(6, -1) for name in names]
        buffer = np.full((6, offset + sum(part.shape[1] for part in flat) + 5), np.nan, flat[0].dtype)
        buffer[:, offset:-5] = np.concatenate(flat, axis=1)
        moved = to(problem, self.library)
        shared, first = to_library(buffer, self.library), offset
        for name, part in zip(names, flat, strict=True):
            columns = shared[:, first : first + part.shape[1]]
            moved[name] = columns.reshape(problem[name].shape)
            assert self.library.shares_memory(moved[name], shared)
            first += part.shape[1]
        wide = to_library(np.full((1, 6, 2 * DIM + offset), POISON, flat[0].dtype), self.library)
        moved["out"] = wide[:, :, offset:].reshape(1, 6, 2, DIM)
        kda_cupy.kda_decode_mtp(**moved)
        assert same_bits(moved["out"], want.out)
        assert (to_host(wide)[:, :, :offset] == buffer.dtype.type(POISON)).all()
        assert same_bits(shared, buffer)

    def test_conv_arrays_of_one_buffer(self) -> None:
        """Production strides: q, k and v are channel ranges of one history and one window buffer, written in place."""
        problem = make_mtp(N=3, t=2)
        want = self.verify(problem)
        moved = to(problem, self.library)
        for kind in ("cs", "intermediate_conv"):
            parts = [problem[f"{kind}_{letter}"] for letter in "qkv"]
            whole = to_library(np.concatenate([part.swapaxes(-1, -2) for part in parts], -1), self.library)
            first = 0
            for letter, part in zip("qkv", parts, strict=True):
                channels = part.shape[-2]
                moved[f"{kind}_{letter}"] = whole[..., first : first + channels].swapaxes(-1, -2)
                first += channels
        out = kda_cupy.kda_decode_mtp(**moved)
        assert same_bits(out, want.out)
        for name in (*WINDOWS, *PERSISTENT):
            assert same_bits(moved[name], want.arrays[name])
        operands = commit_operands(moved, np.array([1, 2, 2]))
        operands["accept_lens"] = to_library(operands["accept_lens"], self.library)
        kda_cupy.kda_commit(**operands)
        committed = self.commit(commit_operands({**problem, **want.arrays}, [1, 2, 2]))
        for name in PERSISTENT:
            assert same_bits(moved[name], committed[name])

    def test_index_vectors_may_be_columns_of_a_table(self) -> None:
        problem = make_mtp(N=3, ring_indices=True)
        want = self.verify(problem)
        names = ("ssm_state_indices", "intermediate_state_indices", "ring_indices")
        for dtype in ("int32", "int64"):
            table = np.stack([problem[name] for name in names], axis=1).astype(dtype)
            moved = to(problem, self.library)
            columns = to_library(table, self.library)
            moved |= {name: columns[:, i] for i, name in enumerate(names)}
            moved["cu_seqlens"] = to_library(problem["cu_seqlens"].astype(dtype), self.library)
            assert same_bits(kda_cupy.kda_decode_mtp(**moved), want.out)

    # ---- what must not be touched -----------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize(
        "slots", [[-1, 3, 1], [3, -1, 1], [1, 3, -1], [-1, -1, -1], [-(2**31), 2, -7]], ids=str
    )
    def test_padding_is_inert(self, mode: str, slots: list[int]) -> None:
        """A1, A3, A7: nothing of it is read, its scratch row may be anything, and its output is exactly zero."""
        problem = make_mtp(N=3, t=3, mode=mode, slots=slots, P=5)
        padding = np.array(slots) < 0
        problem["intermediate_state_indices"][padding] = 10**6
        self.judge(problem, self.verify(problem))

    def test_null_index_zero_makes_slot_zero_padding(self) -> None:
        problem = make_mtp(N=3, slots=[0, 2, -1], P=4)
        self.judge(problem, self.verify(problem, null_index=0), null_index=0)
        assert self.verify(problem).out[0, :3].any()

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    def test_lengths_of_zero_and_rows_behind_the_last_token(self, mode: str) -> None:
        """A14, D4: requests of length 0 at the ends and between, and a launch padded to its captured size."""
        problem = make_mtp(N=6, lengths=[0, 3, 0, 1, 16, 0], spare_tokens=9, mode=mode)
        result = self.verify(problem)
        self.judge(problem, result)
        alone = make_mtp(N=6, lengths=[0, 3, 0, 1, 16, 0], spare_tokens=0, mode=mode)
        for name in ("x_q", "x_k", "x_v", "g", "beta"):
            alone[name] = problem[name][:, :20]
        for name in PERSISTENT:
            alone[name] = problem[name]
        shared = ("A_log", "dt_bias", "w_q", "w_k", "w_v", "conv_bias_q", "conv_bias_k", "conv_bias_v")
        alone |= {
            name: problem[name] for name in (*shared, "ssm_state_indices", "intermediate_state_indices")
        }
        assert same_bits(result.out[:, :20], self.verify(alone).out)

    @pytest.mark.parametrize(
        ("operand", "value", "said"),
        [
            ("ssm_state_indices", 6947, "slot 6947"),
            ("ssm_state_indices", 6, "slot 6"),
            ("intermediate_state_indices", 5, "row 5"),
            ("intermediate_state_indices", -1, "row -1"),
            ("ring_indices", 6, "row 6"),
            ("ring_indices", -3, "row -3"),
        ],
    )
    @pytest.mark.parametrize("row", [0, 2])
    def test_indices_out_of_range_are_recorded_and_never_followed(
        self, operand: str, value: int, said: str, row: int
    ) -> None:
        """A5: the request is treated as padding, and the error is raised later, once."""
        problem = make_mtp(N=3, t=2, ring_indices=True)
        problem[operand][row] = value
        result = self.verify(problem)
        with pytest.raises(kda_cupy.SlotError, match=said) as caught:
            kda_cupy.check_errors()
        assert f"{operand}[{row}]" in str(caught.value) and "kda_decode_mtp" in str(caught.value)
        assert caught.value.code == f"KDA-VALUE-{'SLOT' if said.startswith('slot') else 'ROW'}-RANGE"
        kda_cupy.check_errors()
        inert = {**problem, "ssm_state_indices": problem["ssm_state_indices"].copy()}
        inert["ssm_state_indices"][row] = -1
        self.judge(inert, result)

    @pytest.mark.parametrize("bounds", [
        [0, 5, 7, 9], [1, 0, 1, 2], [-2, 1, 2, 4], [0, 2, 4, 99], [0, 2, 2**31 - 1, 2**31 - 1],
    ], ids=str)  # fmt: skip
    def test_lengths_out_of_range_are_recorded_and_never_followed(self, bounds: list[int]) -> None:
        problem = make_mtp(N=3, lengths=[3, 3, 3], index_dtype="int64")
        problem["max_tokens_per_request"] = 4
        problem["cu_seqlens"][:] = bounds
        result = self.verify(problem)
        with pytest.raises(kda_cupy.SlotError, match="cu_seqlens") as caught:
            kda_cupy.check_errors()
        assert caught.value.code == "KDA-VALUE-LENGTH-RANGE"
        self.judge(problem, result)

    def test_nan_stays_with_its_request(self) -> None:
        problem, clean = make_mtp(N=3, t=2), make_mtp(N=3, t=2)
        problem["x_v"][0, 2:4] = np.nan
        problem["recurrent_state"][problem["ssm_state_indices"][1]] = np.inf
        got, want = self.verify(problem), self.verify(clean)
        assert same_bits(got.out[0, [0, 1, 4, 5]], want.out[0, [0, 1, 4, 5]])
        assert np.isnan(got.out[0, 2:4]).all()

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    def test_memory_around_what_is_written_is_untouched(self, mode: str) -> None:
        """Scratch arrays with gaps between rows, heads and steps; the gaps keep their poison."""
        problem = make_mtp(N=3, t=2, mode=mode)
        want = self.verify(problem)
        moved, wide = to(problem, self.library), {}
        for name in SCRATCH:
            if problem.get(name) is None:
                continue
            array = problem[name]
            gaps = {"intermediate_ssm": (1, 1), "replayssm_g": (1,), "replayssm_beta": (1,)}.get(name, (1, 1))
            shape = (
                tuple(n + gap for n, gap in zip(array.shape, gaps, strict=False)) + array.shape[len(gaps) :]
            )
            wide[name] = to_library(np.full(shape, POISON, array.dtype), self.library)
            moved[name] = wide[name][tuple(slice(n) for n in array.shape)]
        around = to_library(np.full(6 * 2 * DIM + 128, POISON, problem["x_q"].dtype), self.library)
        moved["out"] = around[64:-64].reshape(1, 6, 2, DIM)
        before = to_hosts(moved)
        kda_cupy.kda_decode_mtp(**moved)
        assert same_bits(moved["out"], want.out)
        edges = np.concatenate([to_host(around)[:64], to_host(around)[-64:]])
        assert (edges == edges.dtype.type(POISON)).all()
        for name, array in wide.items():
            whole = to_host(array).copy()
            inner = tuple(slice(n) for n in problem[name].shape)
            assert same_bits(whole[inner], want.arrays[name])
            whole[inner] = POISON
            assert (whole == whole.dtype.type(POISON)).all(), name
        for name, array in before.items():
            if name not in (*SCRATCH, "out") and isinstance(array, np.ndarray):
                assert same_bits(moved[name], array), name

    # ---- calling it -------------------------------------------------------------------------------------------

    def test_no_requests(self) -> None:
        problem = make_mtp(N=0, t=1, slots=[])
        assert self.verify(problem).out.shape == (1, 0, 2, DIM)
        self.commit(commit_operands(problem, []))

    def test_requests_without_tokens(self) -> None:
        problem = make_mtp(N=3, lengths=[0, 0, 0], spare_tokens=2)
        self.judge(problem, self.verify(problem))

    def test_output_is_allocated_like_the_operands(self) -> None:
        problem = make_mtp(N=2)
        moved = to(problem, self.library)
        out = kda_cupy.kda_decode_mtp(**moved)
        assert type(out) is type(moved["x_q"]) and out.dtype == moved["x_q"].dtype
        assert out.flags.c_contiguous and same_bits(out, self.verify(problem).out)

    def test_bound_calls(self) -> None:
        problem = make_mtp(N=2)
        want = self.verify(problem)
        moved = to(problem, self.library)
        step = kda_cupy.bind(kda_cupy.kda_decode_mtp, **moved)
        assert (to_host(moved["replayssm_g"]) == POISON).all()  # binding runs nothing
        assert step() is step.out and same_bits(step.out, want.out)
        operands = commit_operands(moved, np.array([3, 1]))
        operands["accept_lens"] = to_library(operands["accept_lens"], self.library)
        settle_in = kda_cupy.bind(kda_cupy.kda_commit, **operands)
        assert same_bits(moved["recurrent_state"], problem["recurrent_state"])
        assert settle_in() is moved["recurrent_state"]
        committed = self.commit(commit_operands({**problem, **want.arrays}, [3, 1]))
        assert same_bits(moved["recurrent_state"], committed["recurrent_state"])
        # act = 2, C = 4 * 128 channels, 2 requests of 3 tokens
        state, token = (
            2 * 65536 + 3 * 512 * 2,
            4 * 512 * 2 + 256 * (2 + 2) + 2 * 2 + 3 * 128 * 2 + 256 * 4 + 8,
        )
        assert step.bytes_moved == 2 * state + 6 * token
        ring = 3 * 128 * 2 + 256 * 4 + 8
        assert settle_in.bytes_moved == 2 * (2 * 2 * 65536 + 4 * ring + 6 * 512 * 2)

    def test_full_validation_raises_before_anything_runs(self) -> None:
        """A10: out of range, or named twice; what is padding or empty may repeat."""
        for name, values, code in (
            ("ssm_state_indices", [1, 9, 2], "KDA-VALUE-SLOT-RANGE"),
            ("ssm_state_indices", [3, -1, 3], "KDA-VALUE-SLOT-DUPLICATE"),
            ("intermediate_state_indices", [1, 1, 2], "KDA-VALUE-SLOT-DUPLICATE"),
            ("intermediate_state_indices", [1, 5, 2], "KDA-VALUE-ROW-RANGE"),
            ("ring_indices", [-1, 5, 2], "KDA-VALUE-ROW-RANGE"),
            ("ring_indices", [2, 5, 2], "KDA-VALUE-SLOT-DUPLICATE"),
            ("cu_seqlens", [0, 3, 2, 4], "KDA-VALUE-LENGTH-RANGE"),
        ):
            problem = make_mtp(N=3, ring_indices=True)
            problem[name][:] = values
            moved = to(problem, self.library)
            with pytest.raises(kda_cupy.SlotError) as caught:
                kda_cupy.kda_decode_mtp(**moved, validate="full")
            assert caught.value.code == code
            for array in SCRATCH:
                if problem.get(array) is not None:
                    assert same_bits(moved[array], problem[array])
        problem = make_mtp(N=3, slots=[-1, 3, -1], P=5)
        problem["intermediate_state_indices"][:] = 2
        self.judge(problem, self.verify(problem, validate="full"))

    # ---- commit -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("dtype", list(OUTPUT_ERROR))
    @pytest.mark.parametrize(("H", "HV"), [(1, 2), (3, 3), (2, 8)])
    def test_commit_keeps_the_accepted_tokens(self, mode: str, dtype: str, H: int, HV: int) -> None:
        """Every count from 0 to t, against float64; idle slots and count 0 keep their bits."""
        t = 4
        problem = make_mtp(N=t + 1, t=t, H=H, HV=HV, dtype=dtype, mode=mode)
        wanted = truth.decode_mtp(problem)
        accept = np.random.default_rng(0).permutation(t + 1)
        result = self.verify(problem)
        got = self.commit(commit_operands({**problem, **result.arrays}, accept))
        state, slots = got["recurrent_state"], problem["ssm_state_indices"]
        for row, n in enumerate(accept):
            slot = slots[row]
            if n == 0:
                for name in PERSISTENT:
                    assert same_bits(got[name][slot], problem[name][slot])
                continue
            error = ONE_TOKEN_ERROR if n == 1 else STATE_ERROR
            assert relative_error(state[slot], wanted[row].states[n - 1]) < error
            for letter, window in zip("qkv", wanted[row].windows, strict=True):
                assert same_bits(got[f"cs_{letter}"][slot], window[n - 1].astype(kind_of(dtype)))
        idle = np.setdiff1d(np.arange(len(state)), slots)
        for name in PERSISTENT:
            assert same_bits(got[name][idle], problem[name][idle])
        for name in SCRATCH:
            if result.arrays.get(name) is not None:
                assert same_bits(got[name], result.arrays[name])

    @pytest.mark.parametrize("t", [1, 2, 8, 9, 16])
    def test_commit_from_rings_equals_commit_from_snapshots(self, t: int) -> None:
        problem = make_mtp(N=2, t=t, dtype="float32")
        other = {name: value for name, value in problem.items() if name not in RINGS}
        rows, steps, _, _ = problem["intermediate_conv_q"].shape
        other |= scratch("snapshots", rows=rows, slots=0, steps=steps, H=1, HV=2, dtype="float32")
        states = []
        for each in (problem, other):
            result = self.verify(each)
            states.append(self.commit(commit_operands({**each, **result.arrays}, [t, (t + 1) // 2])))
        rings, snapshots = (each["recurrent_state"] for each in states)
        slots = problem["ssm_state_indices"]
        for slot in slots:
            assert relative_error(rings[slot], snapshots[slot]) < ONE_TOKEN_ERROR
        for name in PERSISTENT[1:]:
            assert same_bits(states[0][name], states[1][name])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("row", [0, 2])
    @pytest.mark.parametrize(
        ("operand", "value", "code", "said"),
        [
            ("accept_lens", -1, "ACCEPT", "-1"),
            ("accept_lens", 5, "ACCEPT", "5"),
            ("accept_lens", 2**31 - 1, "ACCEPT", "2147483647"),
            ("ssm_state_indices", 6, "SLOT", "slot 6"),
            ("intermediate_state_indices", 5, "ROW", "row 5"),
            ("intermediate_state_indices", -1, "ROW", "row -1"),
            ("track_indices", 6, "SLOT", "slot 6"),
            ("track_steps", 2, "ACCEPT", "2"),
        ],
    )
    def test_a_row_of_a_commit_that_is_out_of_range_is_left_as_it_is(
        self, mode: str, row: int, operand: str, value: int, code: str, said: str
    ) -> None:
        """D1: the first and the last row, and the others are committed."""
        problem = make_mtp(N=3, t=4, mode=mode, spare_steps=0, P=6, slots=[2, 5, 1])
        result = self.verify(problem)
        operands = commit_operands({**problem, **result.arrays}, [2, 2, 2])
        operands["track_indices"] = np.array([-1, -1, -1], np.int32)
        operands["track_steps"] = np.array([1, 1, 1], np.int32)
        operands["track_indices"][row] = 3
        operands[operand] = operands[operand].copy()
        operands[operand][row] = value
        got = self.commit(operands)
        with pytest.raises(kda_cupy.SlotError, match=said) as caught:
            kda_cupy.check_errors()
        assert caught.value.code == f"KDA-VALUE-{code}-RANGE" and f"{operand}[{row}]" in str(caught.value)
        assert "kda_commit" in str(caught.value)
        inert = commit_operands({**problem, **result.arrays}, [2, 2, 2])
        inert["accept_lens"][row] = 0
        want = self.commit(inert)
        for name in PERSISTENT:
            assert same_bits(got[name], want[name])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    def test_padding_and_accept_zero_look_at_nothing(self, mode: str) -> None:
        """D1: count 0 reads no neighbour, whatever its scratch row says; padding may have any count."""
        problem = make_mtp(N=3, t=2, mode=mode, slots=[-1, 2, 4], P=5)
        result = self.verify(problem)
        operands = commit_operands({**problem, **result.arrays}, [77, 0, 2])
        operands["intermediate_state_indices"] = np.array(
            [10**6, -5, problem["intermediate_state_indices"][2]], np.int32
        )
        got = self.commit(operands)
        for name in PERSISTENT:
            assert same_bits(got[name][[0, 1, 2, 3]], problem[name][[0, 1, 2, 3]])
            assert not same_bits(got[name][4], problem[name][4])
        operands["ssm_state_indices"] = np.array([0, -1, 4], np.int32)
        got = self.commit(operands, null_index=0)
        assert same_bits(got["recurrent_state"][:4], problem["recurrent_state"][:4])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    def test_tracking_slots_get_the_state_and_history_after_a_step(self, mode: str) -> None:
        problem = make_mtp(N=4, t=4, mode=mode, P=9, slots=[3, 1, 6, 2])
        result = self.verify(problem)
        arrays = {**problem, **result.arrays}
        got = self.commit(
            commit_operands(arrays, [4, 3, 2, 4]),
            track_indices=np.array([8, 5, -1, 7], np.int32),
            track_steps=np.array([0, 2, 1, -1], np.int32),
        )
        plain = self.commit(commit_operands(arrays, [4, 3, 2, 4]))
        earlier = self.commit(commit_operands(arrays, [1, 3, 0, 0]))
        for name in PERSISTENT:
            assert same_bits(got[name][[1, 6, 2, 0, 4, 7]], plain[name][[1, 6, 2, 0, 4, 7]])
            if name == "recurrent_state":  # stopping on the way adds what replays left in another order
                assert relative_error(got[name][3], plain[name][3]) < ONE_TOKEN_ERROR
            else:
                assert same_bits(got[name][3], plain[name][3])
            for track, slot in ((8, 3), (5, 1)):
                if name == "recurrent_state":
                    assert relative_error(got[name][track], earlier[name][slot]) < ONE_TOKEN_ERROR
                else:
                    assert same_bits(got[name][track], earlier[name][slot])

    @pytest.mark.parametrize("mode", ["rings", "snapshots"])
    @pytest.mark.parametrize("conv", [True, False])
    def test_all_layers_are_committed_at_once(self, mode: str, conv: bool) -> None:
        layers = [make_mtp(N=3, t=3, mode=mode, seed=seed, slots=[2, 5, 1]) for seed in range(3)]
        for layer in layers:
            layer["intermediate_state_indices"] = layers[0]["intermediate_state_indices"]
        accept = [3, 0, 2]
        one_by_one, stacked = [], {}
        for layer in layers:
            operands = commit_operands({**layer, **self.verify(layer).arrays}, accept, conv=conv)
            one_by_one.append(self.commit(operands))
            for name, array in operands.items():
                stacked.setdefault(name, []).append(array)
        vectors = ("accept_lens", "ssm_state_indices", "intermediate_state_indices", "ring_indices")
        together = {
            name: arrays[0] if name in vectors else np.stack(arrays) for name, arrays in stacked.items()
        }
        got = self.commit(together)
        for number, want in enumerate(one_by_one):
            for name in PERSISTENT if conv else PERSISTENT[:1]:
                assert same_bits(got[name][number], want[name])

    def test_a_row_of_a_commit_has_the_same_bits_in_every_batch(self) -> None:
        problem = make_mtp(N=16, t=5, H=1, HV=1)
        result = self.verify(problem)
        accept = np.random.default_rng(0).integers(0, 6, 16)
        want = self.commit(commit_operands({**problem, **result.arrays}, accept))
        for rows in ([3], [9, 3], [0, 15, 3, 8, 5]):
            part = {**problem, **result.arrays}
            for name in ("ssm_state_indices", "intermediate_state_indices"):
                part[name] = problem[name][rows]
            got = self.commit(commit_operands(part, accept[rows]))
            for slot in part["ssm_state_indices"]:
                for name in PERSISTENT:
                    assert same_bits(got[name][slot], want[name][slot])

    def test_a_ring_that_was_written_elsewhere(self) -> None:
        problem = make_mtp(N=3, t=3, ring_indices=True, seed=5)
        result = self.verify(problem)
        got = self.commit(commit_operands({**problem, **result.arrays}, [3, 2, 1]))
        wanted = truth.decode_mtp(problem)
        for row, n in enumerate([3, 2, 1]):
            slot = problem["ssm_state_indices"][row]
            assert relative_error(got["recurrent_state"][slot], wanted[row].states[n - 1]) < STATE_ERROR

    def test_commit_validates_fully(self) -> None:
        problem = make_mtp(N=3, t=2, P=6, slots=[2, 5, 1], spare_steps=0)
        result = self.verify(problem)
        for change, code in (
            ({"ssm_state_indices": [2, 2, 1]}, "KDA-VALUE-SLOT-DUPLICATE"),
            ({"ssm_state_indices": [2, 6, 1]}, "KDA-VALUE-SLOT-RANGE"),
            ({"accept_lens": [0, 3, 1]}, "KDA-VALUE-ACCEPT-RANGE"),
            ({"intermediate_state_indices": [0, 9, 1]}, "KDA-VALUE-ROW-RANGE"),
            ({"track_indices": [3, 3, -1]}, "KDA-VALUE-SLOT-DUPLICATE"),
            ({"track_indices": [2, 3, -1]}, "KDA-VALUE-SLOT-DUPLICATE"),
            ({"track_indices": [4, 3, 99]}, "KDA-VALUE-SLOT-RANGE"),
            ({"track_steps": [0, 1, 2]}, "KDA-VALUE-ACCEPT-RANGE"),
        ):
            operands = commit_operands({**problem, **result.arrays}, [2, 2, 2])
            operands |= {"track_indices": np.array([4, 3, 0]), "track_steps": np.array([0, 1, 1])}
            operands |= {name: np.array(values, np.int64) for name, values in change.items()}
            moved = to(operands, self.library)
            with pytest.raises(kda_cupy.SlotError) as caught:
                kda_cupy.kda_commit(**moved, validate="full")
            assert caught.value.code == code
            for name in PERSISTENT:
                assert same_bits(moved[name], operands[name])

    def test_large_states_survive_half_precision_activations(self) -> None:
        """B14: the state is never staged in fp16, where 65536 is infinite."""
        problem = make_mtp(N=1, t=2, dtype="float16", mode="snapshots")
        problem["recurrent_state"] *= 65536
        wanted = truth.decode_mtp(problem)
        result = self.verify(problem)
        at = problem["intermediate_state_indices"][0]
        assert relative_error(result.arrays["intermediate_ssm"][at, :2], wanted[0].states) < STATE_ERROR

    def test_an_output_norm_of_zeros_is_zero(self) -> None:
        problem = make_mtp(N=1, t=2, onorm=True, bias=False)
        for letter in "qkv":
            problem[f"x_{letter}"][...] = 0
            problem[f"cs_{letter}"][...] = 0
        assert not self.verify(problem).out.any()
        settle(problem, np.random.default_rng(0))


def pick(problem: Problem, requests: Any, t: int) -> Problem:
    """The same launch with these requests only, one behind the other, each of t tokens."""
    tokens = (np.asarray(requests)[:, None] * t + np.arange(t)).ravel()
    part = dict(problem)
    for name in ("x_q", "x_k", "x_v", "g", "beta", "onorm_gate"):
        if problem.get(name) is not None:
            part[name] = problem[name][:, tokens]
    for name in ("ssm_state_indices", "intermediate_state_indices", "ring_indices"):
        if problem.get(name) is not None:
            part[name] = problem[name][requests]
    part["cu_seqlens"] = (np.arange(len(requests) + 1) * t).astype(problem["cu_seqlens"].dtype)
    return part


def to_hosts(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: to_host(value) if hasattr(value, "dtype") else value for name, value in arrays.items()}


def kind_of(name: str) -> np.dtype[Any]:
    return np_dtype(name)
