# SPDX-License-Identifier: Apache-2.0
"""The contract of the convolution on CUDA, and what only a GPU can show."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conv_contract import ConvContract, make_conv, moved_to
from problems import same_bits, to_host

import kda_cupy
from kda_cupy import modules

cupy = pytest.importorskip("cupy")


class TestOnCuda(ConvContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return cupy


def test_a_captured_call_uses_what_the_buffers_hold_at_replay() -> None:
    """D5: slots and tokens rewritten in place."""
    rng = np.random.default_rng(0)
    problem = make_conv(B=6, pieces=(100, 60), P=12)
    replayed, eager = moved_to(problem, cupy), moved_to(problem, cupy)
    call = kda_cupy.bind(kda_cupy.causal_conv1d_update, **replayed)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    for _ in range(50):
        slots = rng.permutation(12)[:6].astype(np.int32)
        slots[rng.random(6) < 0.3] = -1
        fresh = [rng.standard_normal(each.shape).astype(each.dtype) for each in problem["x"]]
        for operands in (replayed, eager):
            operands["conv_state_indices"].set(slots)
            for to, value in zip(operands["x"], fresh, strict=True):
                to[...] = cupy.asarray(value)
        call.out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(call.out, kda_cupy.causal_conv1d_update(**eager))
        for mine, its in zip(replayed["conv_state"], eager["conv_state"], strict=True):
            assert same_bits(mine, its)
    kda_cupy.check_errors()


def test_nothing_is_allocated_and_nothing_copied() -> None:
    """G5, G4: column slices are taken as they are; a call makes no allocation when out is given."""
    moved = moved_to(make_conv(pieces=(64, 64, 128)), cupy)
    moved["out"] = kda_cupy.causal_conv1d_update(**moved)
    call = kda_cupy.bind(kda_cupy.causal_conv1d_update, **moved)
    kda_cupy.causal_conv1d_update(**moved)
    seen = []

    class Hook(cupy.cuda.memory_hook.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **size: Any) -> None:
            seen.append(size)

    with Hook():
        kda_cupy.causal_conv1d_update(**moved)
        call()
    assert not seen


def test_offsets_are_64_bit() -> None:
    """A11: a history beyond 2**31 elements, with a stride that is no power of two."""
    P, stride = 2200, (1 << 20) + 12
    problem = make_conv(B=1, pieces=(300,), P=2, slots=[1])
    want = kda_cupy.causal_conv1d_update(**moved_to(problem, cupy))
    try:
        memory = cupy.empty(P * stride, problem["conv_state"].dtype)
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 5 GB of GPU memory")
    wide = cupy.lib.stride_tricks.as_strided(memory, (P, 300, 3), (stride * 2, 2, 600))
    for slot in (1024, 2049, 2199):
        wide[slot] = cupy.asarray(np.ascontiguousarray(problem["conv_state"][1]))
        moved = moved_to({**problem, "conv_state": None, "conv_state_indices": np.array([slot])}, cupy)
        assert same_bits(kda_cupy.causal_conv1d_update(**{**moved, "conv_state": wide}), want)
        assert same_bits(wide[slot, :, 2], to_host(moved["x"])[0])


def test_more_rows_than_a_grid_has_blocks() -> None:
    """C17: the last rows of a huge batch equal their own small run, and a bad one is named."""
    B, live = 70_000, [0, 65_534, 65_535, 69_999]
    small = make_conv(B=4, pieces=(5, 3), P=9)
    x = tuple(np.zeros((B, each.shape[1]), each.dtype) for each in small["x"])
    slots = np.full(B, -1, np.int32)
    for mine, its in zip(x, small["x"], strict=True):
        mine[live] = its
    slots[live], slots[69_000] = small["conv_state_indices"], 9
    want = kda_cupy.causal_conv1d_update(**moved_to(small, cupy))
    out = kda_cupy.causal_conv1d_update(**moved_to({**small, "x": x, "conv_state_indices": slots}, cupy))
    assert same_bits(to_host(out)[live], want)
    with pytest.raises(kda_cupy.SlotError, match=r"conv_state_indices\[69000\]"):
        kda_cupy.check_errors()


def test_nothing_recompiles_when_traffic_changes() -> None:
    """B, t, channels, pieces, slots, strides, windows: run-time values."""
    modules._kernels.clear()
    for options in ({}, {"B": 9, "pieces": (4, 5, 6)}, {"t": 3}, {"t": 2, "windows": True}, {"bias": False}):
        kda_cupy.causal_conv1d_update(**moved_to(make_conv(**options), cupy))
    (kernel,) = modules._kernels.values()
    assert kernel.local_bytes == 0 and kernel.variant == "causal_conv1d_update[width=4,silu,bfloat16]"


def test_torch_tensors(torch: ModuleType) -> None:
    problem = make_conv(pieces=(64, 32), t=2)
    ours, theirs = moved_to(problem, cupy), moved_to(problem, torch, "cuda")
    want, got = kda_cupy.causal_conv1d_update(**ours), kda_cupy.causal_conv1d_update(**theirs)
    assert isinstance(got, torch.Tensor) and same_bits(got, want)
    for mine, its in zip(theirs["conv_state"], ours["conv_state"], strict=True):
        assert same_bits(mine, its)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("pieces", [(130,), (128, 1, 70)])
@pytest.mark.parametrize("t", [None, 3])
def test_sanitizer_selection(windows: bool, pieces: tuple[int, ...], t: int | None) -> None:
    """Every form in one short test each, for compute-sanitizer: padding, and a slot past the pool."""
    problem = make_conv(B=4, pieces=pieces, t=t, windows=windows, P=5, slots=[4, -1, 5, 0])
    out = to_host(kda_cupy.causal_conv1d_update(**moved_to(problem, cupy)))
    assert np.isfinite(out.astype(np.float32)).all()
    with pytest.raises(kda_cupy.SlotError):
        kda_cupy.check_errors()
