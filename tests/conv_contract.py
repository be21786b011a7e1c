# SPDX-License-Identifier: Apache-2.0
"""What ``causal_conv1d_update`` promises, whatever runs it. tests/pure runs this on NumPy, tests/gpu on CUDA."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import POISON, Problem, np_dtype, same_bits, to_host, to_library
from step_problems import histories_of, make_step, state_of

import kda_cupy
from kda_cupy.reference import truth

#: Of an element, relative to it: half a unit in the last place of its dtype.
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
#: And relative to the sum of its terms' magnitudes: five roundings of 6e-8, and SiLU's, measured 2.2e-7.
FP32_ERROR = 6e-7
#: Below it float16 has no digits left.
TINY = 2**-25
WRITTEN = ("conv_state", "intermediate_conv_window")


def make_conv(
    B: int = 4,
    pieces: tuple[int, ...] = (70,),
    *,
    t: int | None = None,
    width: int = 4,
    dtype: str = "bfloat16",
    weight_dtype: str = "float32",
    bias: bool = True,
    activation: str | None = "silu",
    windows: bool = False,
    channels_fastest: bool = True,
    slots: Any = None,
    P: int | None = None,
    index_dtype: str = "int32",
    seed: int = 0,
) -> Problem:
    """Arguments of ``causal_conv1d_update``: NumPy arrays, or tuples of them where there is more than one piece.

    t: tokens of a row; None: ``x`` is [B, C]. Everything has gaps of POISON.
    """
    rng = np.random.default_rng(seed)
    P, rows, C = B + 3 if P is None else P, B + 2, sum(pieces)
    if slots is None:
        slots = np.roll(rng.permutation(np.arange(1, P))[:B], 1)
    kind, taps = np_dtype(dtype), np_dtype(weight_dtype)

    def cut(array: Any, axis: int) -> Any:
        parts = np.split(array, np.cumsum(pieces)[:-1], axis)
        return tuple(parts) if len(parts) > 1 else parts[0]

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    def swapped(shape: tuple[int, ...], value: Any) -> Any:
        """[.., C, n], with channels fastest or not."""
        made = np.full((*shape[:-2], shape[-1], shape[-2]) if channels_fastest else shape, POISON, kind)
        made = made.swapaxes(-1, -2) if channels_fastest else made
        if value is not None:
            made[...] = value
        return made

    wide = np.full((B, t or 1, C + 8), POISON, kind)
    wide[..., :C] = draw(B, t or 1, C)
    x = wide[..., :C].swapaxes(1, 2) if t else wide[:, 0, :C]
    problem: Problem = {
        "x": cut(x, 1),
        "conv_state": cut(swapped((P, C, width - 1), draw(P, C, width - 1)), 1),
        "weight": cut((0.5 * draw(C, width)).astype(taps), 0),
        "conv_state_indices": np.asarray(slots, index_dtype),
        "activation": activation,
    }
    if bias:
        problem["bias"] = cut((0.3 * draw(C)).astype(taps), 0)
    if windows:
        problem["intermediate_conv_window"] = cut(swapped((rows, (t or 1) + 1, C, width - 1), None), 2)
        problem["intermediate_state_indices"] = rng.permutation(rows)[:B].astype(index_dtype)
    return problem


def pieces_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def moved_to(problem: Problem, library: Any, device: Any = None) -> Problem:
    """Every array in another library, strides included."""

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(each) for each in value)
        return to_library(value, library, device) if isinstance(value, np.ndarray) else value

    return {name: move(value) for name, value in problem.items()}


@st.composite
def problems(draw: Any) -> Problem:
    B = draw(st.integers(1, 4))
    P = B + draw(st.integers(1, 3))
    live = draw(st.permutations(range(P)))
    return make_conv(
        B=B,
        pieces=tuple(draw(st.lists(st.sampled_from([1, 5, 128, 130]), min_size=1, max_size=3))),
        t=draw(st.sampled_from([None, 1, 2, 5])),
        width=draw(st.integers(2, 4)),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        weight_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from([None, "silu"])),
        windows=draw(st.booleans()),
        channels_fastest=draw(st.booleans()),
        slots=[draw(st.sampled_from([-1, live[row], live[row]])) for row in range(B)],
        P=P,
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        seed=draw(st.integers(0, 2**31)),
    )


class ConvContract:
    """Subclasses say where to run by a fixture ``library`` (numpy or cupy)."""

    @pytest.fixture(autouse=True)
    def _no_errors_left_behind(self, library: ModuleType) -> Any:
        self.library = library
        kda_cupy.check_errors()
        yield
        kda_cupy.check_errors()

    def run(self, problem: Problem, **options: Any) -> dict[str, Any]:
        """Call it on copies in the library with a poisoned output; what it left, as NumPy arrays or tuples."""
        moved = moved_to({**problem, **options}, self.library)
        x = pieces_of(problem["x"])
        shape = (x[0].shape[0], sum(each.shape[1] for each in x), *x[0].shape[2:])
        moved["out"] = to_library(np.full(shape, np.nan, x[0].dtype), self.library)
        assert kda_cupy.causal_conv1d_update(**moved) is moved["out"]
        host = {name: [to_host(each) for each in pieces_of(moved.get(name))] for name in WRITTEN}
        return {**host, "out": to_host(moved["out"])}

    def judge(self, problem: Problem, got: dict[str, Any], null_index: int = -1) -> None:
        """Every row against float64, history and windows to the bit, and everything else as it was."""
        states, windows = pieces_of(problem["conv_state"]), pieces_of(problem.get("intermediate_conv_window"))
        slots, live = problem["conv_state_indices"], []
        wanted_states = [each.copy() for each in states]
        wanted_windows = [each.copy() for each in windows]
        out = got["out"].reshape(*got["out"].shape[:2], -1)
        for row, slot in enumerate(slots.tolist()):
            if slot <= max(null_index, -1) or slot >= len(states[0]):
                assert same_bits(out[row], np.zeros_like(out[row]))
                continue
            live.append(slot)
            first = 0
            for piece, x in enumerate(pieces_of(problem["x"])):
                tokens = x[row].reshape(x.shape[1], -1)
                taps = pieces_of(problem["weight"])[piece].astype(np.float64)
                bias = pieces_of(problem.get("bias"))
                offset = bias[piece].astype(np.float64) if bias else 0.0
                history, acts, sizes = states[piece][slot].astype(np.float64), [], []
                for j, token in enumerate(tokens.T.astype(np.float64)):
                    silu = problem["activation"] == "silu"
                    size, _ = truth.conv(*map(np.abs, (history, token, taps, offset)), np.float64, silu=False)
                    sizes.append(size)
                    act, history = truth.conv(history, token, taps, offset, np.float64, silu=silu)
                    acts.append(act)
                    if windows:
                        at = problem["intermediate_state_indices"][row]
                        wanted_windows[piece][at, j] = history
                mine = out[row, first : first + len(tokens)]
                act, size = np.array(acts).T, np.array(sizes).T
                allowed = FP32_ERROR * (size + np.abs(act)) + ROUNDING[x.dtype.name] * np.abs(act) + TINY
                assert (np.abs(mine.astype(np.float64) - act) <= allowed).all()
                if not windows:
                    wanted_states[piece][slot] = history
                first += len(tokens)
        for mine, want in zip(got["conv_state"], wanted_states, strict=True):
            assert same_bits(mine, want)
        for mine, want in zip(got["intermediate_conv_window"], wanted_windows, strict=True):
            assert same_bits(mine, want)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(problem=problems())
    def test_any_problem(self, problem: Problem) -> None:
        self.judge(problem, self.run(problem))

    @pytest.mark.parametrize("activation", [None, "silu"])
    @pytest.mark.parametrize("width", [2, 3, 4])
    @pytest.mark.parametrize("dtype", list(ROUNDING))
    @pytest.mark.parametrize("pieces", [(300,), (256, 256, 384)], ids=["packed", "split"])
    def test_agrees_with_the_float64_reference(
        self, activation: str | None, width: int, dtype: str, pieces: tuple[int, ...]
    ) -> None:
        problem = make_conv(pieces=pieces, width=width, dtype=dtype, activation=activation)
        self.judge(problem, self.run(problem))

    @pytest.mark.parametrize("windows", [False, True])
    @pytest.mark.parametrize("t", [1, 2, 3, 4, 9])
    def test_several_tokens_equal_one_after_the_other(self, t: int, windows: bool) -> None:
        problem = make_conv(B=3, pieces=(40, 30), t=t, windows=windows)
        whole = self.run(problem)
        self.judge(problem, whole)
        single = make_conv(B=3, pieces=(40, 30), t=t)
        tokens = single.pop("x")
        for j in range(t):
            step = self.run({**single, "x": tuple(each[:, :, j] for each in tokens)})
            assert same_bits(step["out"], whole["out"][:, :, j])
            single["conv_state"] = tuple(step["conv_state"])
        if not windows:
            for mine, its in zip(whole["conv_state"], step["conv_state"], strict=True):
                assert same_bits(mine, its)

    @pytest.mark.parametrize("y", [-1e4, -90.0, 0.0, 90.0, 1e4])
    def test_silu_at_the_extremes(self, y: float) -> None:
        problem = make_conv(B=1, dtype="float32", bias=False)
        problem["x"][:] = y
        problem["weight"][:] = [0, 0, 0, 1]
        got = self.run(problem)
        self.judge(problem, got)
        assert np.isfinite(got["out"]).all()

    @pytest.mark.parametrize("dtype", list(ROUNDING))
    def test_split_channels_have_the_bits_of_packed_ones(self, dtype: str) -> None:
        split = make_conv(pieces=(128, 128, 256), dtype=dtype, t=2, windows=True)
        axes = {"x": 1, "conv_state": 1, "weight": 0, "bias": 0, "intermediate_conv_window": 2}
        joint = {name: np.concatenate(split[name], axis) for name, axis in axes.items()}
        want, got = self.run({**split, **joint}), self.run(split)
        assert same_bits(got["out"], want["out"])
        windows = np.concatenate(got["intermediate_conv_window"], 2)
        assert same_bits(windows, want["intermediate_conv_window"][0])

    @pytest.mark.parametrize("op", ["kda", "gdn"])
    @pytest.mark.parametrize("group", [1, 2, 3])
    @pytest.mark.parametrize("dtype", list(ROUNDING))
    @pytest.mark.parametrize("lower_bound", [None, -5.0])
    def test_with_the_packed_decode_it_has_the_bits_of_the_fused_step(
        self, op: str, group: int, dtype: str, lower_bound: float | None
    ) -> None:
        """State, history, and the output before a norm."""
        problem = make_step(op, B=3, H=2, HV=2 * group, dtype=dtype, lower_bound=lower_bound)
        fused, apart = (moved_to(problem, self.library) for _ in range(2))
        names = ("A_log", "dt_bias", "ssm_state_indices", "lower_bound")
        common = {name: apart[name] for name in names}
        slots = apart["ssm_state_indices"]
        if op == "kda":
            want = kda_cupy.kda_decode_step(**fused)[0]
            rows = kda_cupy.causal_conv1d_update(
                tuple(apart[f"x_{x}"].reshape(3, apart[f"x_{x}"].shape[2] * 128) for x in "qkv"),
                tuple(apart[f"cs_{x}"] for x in "qkv"),
                tuple(apart[f"w_{x}"] for x in "qkv"),
                tuple(apart[f"conv_bias_{x}"] for x in "qkv"),
                "silu",
                slots,
            )
            gates = {"a": apart["g"].reshape(3, 2 * group * 128), "b": apart["beta"][0]}
            out, state = kda_cupy.kda_packed_decode(
                rows, **gates, **common, initial_state=apart["recurrent_state"]
            )
        else:
            want = kda_cupy.gdn_decode_step(**fused)[:, 0]
            parts = ("mixed_qkv", "conv_state", "conv_weight", "conv_bias")
            rows = kda_cupy.causal_conv1d_update(*(apart[name] for name in parts), "silu", slots)
            gates = {"a": apart["a"], "b": apart["b"]}
            out, state = kda_cupy.gdn_packed_decode(
                rows, **gates, **common, initial_state=apart["initial_state"]
            )
        assert same_bits(out[:, 0], want) and same_bits(state, state_of(fused))
        for mine, its in zip(histories_of(apart), histories_of(fused), strict=True):
            assert same_bits(mine, its)

    def test_rows_have_the_same_bits_in_every_batch(self) -> None:
        problem = make_conv(B=9, pieces=(200, 56))
        want = self.run(problem)
        for rows in ([4], [8, 0], [7, 6, 5, 4]):
            part = {**problem, "x": tuple(each[rows] for each in problem["x"])}
            part["conv_state_indices"] = problem["conv_state_indices"][rows]
            assert same_bits(self.run(part)["out"], want["out"][rows])

    @pytest.mark.parametrize("windows", [False, True])
    @pytest.mark.parametrize("slots", [[-1, 3, 1], [3, -5, 1], [3, 1, -1], [-1, -1, -1]], ids=str)
    def test_padding_rows_are_inert(self, slots: list[int], windows: bool) -> None:
        problem = make_conv(B=3, P=5, slots=slots, t=2, windows=windows)
        problem["x"][np.array(slots) < 0] = np.nan
        self.judge(problem, self.run(problem))

    def test_null_index_and_no_indices(self) -> None:
        problem = make_conv(B=3, P=4, slots=[0, 1, 2])
        got = self.run(problem, null_index=0)
        self.judge(problem, got, null_index=0)
        want = self.run(problem)
        got = self.run({name: value for name, value in problem.items() if name != "conv_state_indices"})
        assert same_bits(got["out"], want["out"]) and same_bits(got["conv_state"][0], want["conv_state"][0])

    def test_what_must_not_be_followed_touches_nothing_and_is_reported(self) -> None:
        problem = make_conv(B=3, P=6, slots=[5, 6947, 6])
        self.judge(problem, self.run(problem))
        with pytest.raises(kda_cupy.SlotError, match=r"causal_conv1d_update.* and 1 more") as caught:
            kda_cupy.check_errors()
        assert caught.value.operand == "conv_state_indices"
        problem = make_conv(B=3, windows=True)
        rows = problem["intermediate_state_indices"]
        for wrong in (-1, 5):
            rows[1] = wrong
            out = self.run(problem)["out"]
            assert not out[1].any() and out[0].any() and out[2].any()
            with pytest.raises(kda_cupy.SlotError, match=rf"intermediate_state_indices\[1\].*row {wrong}"):
                kda_cupy.check_errors()

    def test_full_validation_raises_before_anything_runs(self) -> None:
        for slots, words in (([3, 1, 3], "rows 0, 2"), ([1, 9, 2], "slot 9")):
            with pytest.raises(kda_cupy.SlotError, match=words):
                self.run(make_conv(B=3, P=5, slots=slots), validate="full")
        shared = make_conv(B=2, P=5, slots=[3, 3], windows=True)  # a verify may read one history twice
        self.judge(shared, self.run(shared, validate="full"))
        shared["intermediate_state_indices"][:] = 1
        with pytest.raises(kda_cupy.SlotError, match="rows 0, 1"):
            self.run(shared, validate="full")

    def test_nothing_to_do(self) -> None:
        assert self.run(make_conv(B=0, P=3, slots=np.zeros(0)))["out"].size == 0
        problem = make_conv(B=2, t=1)
        problem["x"] = problem["x"][:, :, :0]
        got = self.run(problem)
        assert got["out"].size == 0 and same_bits(got["conv_state"][0], problem["conv_state"])

    @pytest.mark.parametrize("windows", [False, True])
    def test_bind(self, windows: bool) -> None:
        problem = make_conv(B=3, pieces=(30, 40), t=2, windows=windows)
        called, bound = (moved_to(problem, self.library) for _ in range(2))
        call = kda_cupy.bind(kda_cupy.causal_conv1d_update, **bound)
        for _ in range(3):
            want = kda_cupy.causal_conv1d_update(**called)
            assert call() is call.out and same_bits(call.out, want)
        assert call.bytes_moved == 3 * 70 * (2 * 2 + 3 * (3 if windows else 2)) * 2
