# SPDX-License-Identifier: Apache-2.0
"""The contract of the whole decode steps on CUDA, and what only a GPU can show."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mtp_problems import DIM
from problems import Problem, np_dtype, same_bits, to, to_host, to_library
from step_contract import (
    OPERATIONS,
    OPS,
    OUTPUT_ERROR,
    STATE_ERROR,
    TRUTHS,
    StepContract,
    op_of,
    pick,
)
from step_problems import histories_of, make_step, next_token, out_of, state_of

import kda_cupy
from kda_cupy import modules
from kda_cupy.reference.truth import relative_error

cupy = pytest.importorskip("cupy")


class TestOnCuda(StepContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return cupy


def ready(problem: Problem) -> Problem:
    """On the GPU, with an output full of NaN."""
    moved = to(problem, cupy)
    moved["out"] = to_library(out_of(problem), cupy)
    return moved


def capture(call: Any) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    return graph, stream


def set_to(target: Any, value: Any) -> None:
    """Write into a buffer that a graph knows, whatever its strides."""
    target[...] = cupy.asarray(np.ascontiguousarray(value).astype(target.dtype))


@OPS
@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_captured_step_uses_what_the_buffers_hold_at_replay(op: str, group: int) -> None:
    """D5, A3: slots and tokens rewritten in place, padding anywhere; each row has the bits that it has alone."""
    rng = np.random.default_rng(0)
    problem = make_step(op, B=6, P=12, HV=group, onorm=True)
    moved = ready(problem)
    graph, stream = capture(kda_cupy.bind(OPERATIONS[op], **moved))
    eager = ready(problem)
    for _ in range(60):
        slots = rng.permutation(12)[:6].astype(np.int32)
        slots[rng.random(6) < 0.3] = -1
        fresh = {**next_token({**problem, "ssm_state_indices": slots * 0 - 1}, histories_of(problem), rng)}
        fresh["ssm_state_indices"] = slots
        for name, value in fresh.items():
            set_to(moved[name], value)
            set_to(eager[name], value)
        moved["out"].fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for row in range(6):
            alone = pick({name: value for name, value in eager.items() if name != "out"}, [row])
            out = to_host(OPERATIONS[op](**alone))
            assert same_bits(rows_of(out, op)[0], rows_of(to_host(moved["out"]), op)[row])
        assert same_bits(state_of(moved), state_of(eager))
        for mine, its in zip(histories_of(moved), histories_of(eager), strict=True):
            assert same_bits(mine, its)
    kda_cupy.check_errors()


def rows_of(out: Any, op: str) -> Any:
    return out[0] if op == "kda" else out[:, 0]


@OPS
@pytest.mark.parametrize("group", [1, 2, 4])
def test_batches_of_every_size_give_the_same_bits(op: str, group: int) -> None:
    """From one row to more blocks than the GPU has room for."""
    whole = make_step(op, B=300, H=2, HV=2 * group, P=301, slots=range(1, 301), onorm=True)
    want = run(whole)
    for rows in ([7], [9, 7], list(range(5, 25)), list(range(100, 200))):
        got = run(pick(whole, rows))
        slots = whole["ssm_state_indices"][rows]
        assert same_bits(rows_of(got["out"], op), rows_of(want["out"], op)[rows])
        assert same_bits(state_of(got)[slots], state_of(want)[slots])
        for mine, its in zip(histories_of(got), histories_of(want), strict=True):
            assert same_bits(mine[slots], its[slots])


def run(problem: Problem) -> Problem:
    moved = ready(problem)
    OPERATIONS[op_of(problem)](**moved)
    return {name: to_host(value) if hasattr(value, "shape") else value for name, value in moved.items()}


@OPS
def test_nothing_is_allocated_and_nothing_copied(op: str) -> None:
    """G5, G4: column slices are taken as they are; a call makes no allocation when out is given."""
    moved = ready(make_step(op, B=4, onorm=True))
    call = kda_cupy.bind(OPERATIONS[op], **moved)
    OPERATIONS[op](**moved)
    seen = []

    class Hook(cupy.cuda.memory_hook.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **size: Any) -> None:
            seen.append(size)

    with Hook():
        OPERATIONS[op](**moved)
        call()
    assert not seen


@OPS
def test_offsets_are_64_bit(op: str) -> None:
    """A11: slots beyond 2**31 elements and bytes, of the state and of the history; strides that are no power of two."""
    P, H, HV = 4101, 16, 32
    stride, channels = HV * DIM * DIM + 20, (2 * H + HV) * DIM
    history_stride = (1 << 20) + 12 if op == "gdn" else 3 * channels
    try:
        memory = cupy.empty(P * stride, np.float32)
        history = cupy.empty(P * history_stride, np_dtype("bfloat16"))
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 17 GB of GPU memory")
    strides = (stride * 4, DIM * DIM * 4, DIM * 4, 4)
    pool = cupy.lib.stride_tricks.as_strided(memory, (P, HV, DIM, DIM), strides)
    problem = make_step(op, B=1, H=H, HV=HV, P=2, slots=[1], onorm=True)
    wide = cupy.lib.stride_tricks.as_strided(history, (P, channels, 3), (history_stride * 2, 2, 2 * channels))
    edges = [0, H * DIM, 2 * H * DIM, channels]
    want, first = TRUTHS[op](problem)[0], None
    for slot in (1, 1025, 4099, 4100):
        pool[slot] = cupy.asarray(state_of(problem)[1])
        for number, each in enumerate(histories_of(problem)):
            set_to(wide[slot, edges[number] : edges[number + 1]], each[1])
        big = ("recurrent_state", "initial_state", "cs_q", "cs_k", "cs_v", "conv_state")
        moved = to({name: value for name, value in problem.items() if name not in big}, cupy)
        moved["ssm_state_indices"] = cupy.array([slot])
        if op == "kda":
            moved |= {f"cs_{x}": wide[:, edges[n] : edges[n + 1]] for n, x in enumerate("qkv")}
            moved["recurrent_state"] = pool
        else:
            moved |= {"conv_state": wide, "initial_state": pool}
        out = to_host(OPERATIONS[op](**moved))
        result = out, to_host(pool[slot]), to_host(wide[slot])
        first = first or result
        assert all(same_bits(mine, its) for mine, its in zip(result, first, strict=True))
    assert relative_error(rows_of(first[0], op)[0], want.out[0]) < OUTPUT_ERROR["bfloat16"]
    assert relative_error(first[1], want.states[0]) < STATE_ERROR
    windows = np.concatenate([each[0] for each in want.windows])
    assert same_bits(first[2], windows.astype(first[2].dtype))


@OPS
def test_more_rows_than_a_grid_has_blocks(op: str) -> None:
    """C17: nearly all rows are padding; the last ones are not, and a bad one is named."""
    B = 70_000
    small = make_step(op, B=4, P=9, slots=[7, 3, 5, 1], onorm=True)
    live = [0, 65_534, 65_535, B - 1]
    padded = dict(small)
    for name in ("x_q", "x_k", "x_v", "g", "beta", "onorm_gate", "mixed_qkv", "a", "b"):
        if name in small:
            value, axis = small[name], 1 if op == "kda" else 0
            shape = (*value.shape[:axis], B, *value.shape[axis + 1 :])
            padded[name] = np.zeros(shape, value.dtype)
            padded[name][(slice(None),) * axis + (live,)] = value
    slots = np.full(B, -1, np.int32)
    slots[live] = small["ssm_state_indices"]
    slots[69_000] = 9
    padded["ssm_state_indices"] = slots
    got, want = run(padded), run(small)
    assert same_bits(rows_of(got["out"], op)[live], rows_of(want["out"], op))
    assert same_bits(state_of(got), state_of(want))
    assert np.count_nonzero(np.abs(rows_of(got["out"], op)).max((1, 2))) == 4
    with pytest.raises(kda_cupy.SlotError, match=r"ssm_state_indices\[69000\]"):
        kda_cupy.check_errors()


def test_nothing_recompiles_when_traffic_changes() -> None:
    """B, heads, slots, strides, scale, bounds, eps: run-time values. Another group, dtype or gate: another kernel."""
    modules._kernels.clear()
    for B, H, scale, bound, bias in (
        (1, 1, None, -5.0, True),
        (3, 2, 0.5, -1.0, False),
        (9, 4, 0.1, -8.0, True),
    ):
        problem = make_step(B=B, H=H, HV=2 * H, lower_bound=bound, bias=bias, onorm=B == 3)
        kda_cupy.kda_decode_step(**to(problem, cupy), scale=scale)
    assert len(modules._kernels) == 1
    kda_cupy.kda_decode_step(**to(make_step(H=1, HV=1, lower_bound=-5.0), cupy))
    assert len(modules._kernels) == 2


@OPS
@pytest.mark.parametrize("group", [1, 2, 4])
def test_kernels_tell_about_themselves(op: str, group: int) -> None:
    call = kda_cupy.bind(OPERATIONS[op], **to(make_step(op, B=1, HV=group), cupy))
    assert f"decode_step[{op},bounded,HV/H={group},bfloat16]" in repr(call)
    assert 0 < call.registers <= (64 if group <= 2 else 128) and call._call.kernel.local_bytes == 0


@OPS
def test_torch_tensors(op: str, torch: ModuleType) -> None:
    problem = make_step(op, B=3, onorm=True)
    want = run(problem)
    theirs = to(problem, torch, "cuda")
    out = OPERATIONS[op](**theirs)
    assert isinstance(out, torch.Tensor) and same_bits(out, want["out"])
    assert same_bits(state_of(theirs), state_of(want))
    for mine, its in zip(histories_of(theirs), histories_of(want), strict=True):
        assert same_bits(mine, its)


@OPS
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("onorm", [False, True])
@pytest.mark.parametrize("channels_fastest", [False, True])
def test_sanitizer_selection(op: str, group: int, onorm: bool, channels_fastest: bool) -> None:
    """Every form in one short test each, for compute-sanitizer: padding, and a slot past the pool."""
    problem = make_step(
        op, B=4, H=2, HV=2 * group, P=5, slots=[4, -1, 5, 0], onorm=onorm, channels_fastest=channels_fastest
    )
    got = run(problem)
    assert np.isfinite(got["out"].astype(np.float32)).all()
    with pytest.raises(kda_cupy.SlotError):
        kda_cupy.check_errors()
