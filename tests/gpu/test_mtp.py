# SPDX-License-Identifier: Apache-2.0
"""The contract of verify and commit on CUDA, and what only a GPU can show."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from mtp_contract import (
    OUTPUT_ERROR,
    PERSISTENT,
    RINGS,
    SCRATCH,
    STATE_ERROR,
    MtpContract,
    kind_of,
    pick,
    to_hosts,
)
from mtp_problems import DIM, commit_operands, make_mtp
from problems import Problem, same_bits, to, to_host
from sequence_model import Game, games, play, scripted

import kda_cupy
from kda_cupy import modules
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

cupy = pytest.importorskip("cupy")
MODES = pytest.mark.parametrize("mode", ["rings", "snapshots"])


class TestOnCuda(MtpContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return cupy


def with_out(problem: Problem) -> Problem:
    shape = (1, problem["x_q"].shape[1], problem["x_v"].shape[2], DIM)
    return {**problem, "out": np.full(shape, np.nan, problem["x_q"].dtype)}


def capture(*calls: Any) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    return graph, stream


def set_to(target: Any, value: Any) -> None:
    """Write into a buffer that a graph knows, whatever its strides."""
    target[...] = cupy.asarray(np.ascontiguousarray(value).astype(target.dtype))


@MODES
def test_a_captured_round_uses_what_the_buffers_hold_at_replay(mode: str) -> None:
    """D5: lengths 0 to 8, slots, scratch rows and counts rewritten in place, padding between live rows, 200 replays.

    A graph of a verify and its commit gives every request the bits that it has alone, and zeros elsewhere.
    """
    rng = np.random.default_rng(0)
    N, most, P, T = 6, 8, 10, 40
    problem = with_out(
        make_mtp(N=N, lengths=[most] * 5 + [0], P=P, HV=2, mode=mode, spare_steps=0, slots=range(1, N + 1))
    )
    moved = to(problem, cupy)
    verify = kda_cupy.bind(kda_cupy.kda_decode_mtp, **moved)
    settlement = commit_operands(moved, np.zeros(N, np.int32))
    settlement["accept_lens"] = cupy.asarray(settlement["accept_lens"])
    commit = kda_cupy.bind(kda_cupy.kda_commit, **settlement)
    graph, stream = capture(verify, commit)
    kept = {name: problem[name].copy() for name in PERSISTENT}
    for _ in range(200):
        lengths = rng.integers(0, most + 1, N)
        while lengths.sum() > T:
            lengths = rng.integers(0, most + 1, N)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        slots = np.where(rng.random(N) < 0.3, -1, rng.permutation(np.arange(1, P))[:N])
        accepted = rng.integers(0, lengths + 1)
        fresh = {
            name: rng.standard_normal(problem[name].shape).astype(problem[name].dtype)
            for name in ("x_q", "x_k", "x_v", "g", "beta")
        }
        fresh |= {
            "cu_seqlens": bounds.astype(np.int32),
            "ssm_state_indices": slots.astype(np.int32),
            "intermediate_state_indices": rng.permutation(N + 2)[:N].astype(np.int32),
        }
        for name, value in fresh.items():
            set_to(moved[name], value)
        set_to(settlement["accept_lens"], accepted)
        moved["out"].fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

        got = to_host(moved["out"])[0]
        want = np.zeros_like(got)
        before, kept = kept, {name: array.copy() for name, array in kept.items()}
        for row in np.flatnonzero((slots >= 0) & (lengths > 0)):
            tokens = slice(bounds[row], bounds[row + 1])
            alone = {**problem, **fresh, **before, "out": None, "cu_seqlens": np.array([0, lengths[row]])}
            for name in ("x_q", "x_k", "x_v", "g", "beta"):
                alone[name] = fresh[name][:, tokens]
            for name in ("ssm_state_indices", "intermediate_state_indices"):
                alone[name] = fresh[name][row : row + 1]
            there = to(alone, cupy)
            want[tokens] = to_host(kda_cupy.kda_decode_mtp(**there))[0]
            operands = commit_operands(there, np.zeros(1))
            operands["accept_lens"] = cupy.asarray(accepted[row : row + 1])
            kda_cupy.kda_commit(**operands)
            for name in PERSISTENT:
                kept[name][slots[row]] = to_host(there[name][int(slots[row])])
        assert same_bits(got, want)
        for name in PERSISTENT:
            assert same_bits(moved[name], kept[name])
    kda_cupy.check_errors()


@MODES
def test_batches_of_every_size_give_the_same_bits(mode: str) -> None:
    """From one request to 60 of them, in any order; no result may show it."""
    N, t, H, HV = 120, 5, 1, 2
    whole = make_mtp(N=N, t=t, H=H, HV=HV, mode=mode)
    want = to_hosts(verified(whole))
    accept = np.random.default_rng(2).integers(0, t + 1, N)
    committed = committed_after(whole, want, accept)
    for requests in ([7], [9, 7], list(range(5, 25)), list(range(60, 120))):
        part = pick(whole, requests, t)
        got = to_hosts(verified(part))
        tokens = (np.array(requests)[:, None] * t + np.arange(t)).ravel()
        assert same_bits(got["out"], want["out"][:, tokens])
        state = committed_after(part, got, accept[requests])
        for request in requests:
            slot, row = (whole[name][request] for name in ("ssm_state_indices", "intermediate_state_indices"))
            for name in SCRATCH:
                if got.get(name) is not None:
                    at = slot if name in RINGS else row
                    assert same_bits(got[name][at], want[name][at])
            for name in PERSISTENT:
                assert same_bits(state[name][slot], committed[name][slot])


def verified(problem: Problem) -> Problem:
    moved = to(with_out(problem), cupy)
    kda_cupy.kda_decode_mtp(**moved)
    return moved


def committed_after(problem: Problem, arrays: Problem, accept: Any) -> Problem:
    moved = to(
        commit_operands({**problem, **{name: arrays[name] for name in SCRATCH if name in arrays}}, accept),
        cupy,
    )
    kda_cupy.kda_commit(**moved)
    return to_hosts(moved)


@MODES
def test_nothing_is_allocated_and_nothing_copied(mode: str) -> None:
    """G5, G4: column slices are taken as they are; a call makes no allocation when out is given."""
    problem = with_out(make_mtp(N=3, mode=mode, onorm=True))
    moved = to(problem, cupy)
    settlement = to(commit_operands(problem, [1, 2, 3]), cupy)
    kda_cupy.kda_decode_mtp(**moved)
    kda_cupy.kda_commit(**settlement)
    calls = [
        kda_cupy.bind(kda_cupy.kda_decode_mtp, **moved),
        kda_cupy.bind(kda_cupy.kda_commit, **settlement),
    ]
    seen = []

    class Hook(cupy.cuda.memory_hook.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **size: Any) -> None:
            seen.append(size)

    with Hook():
        kda_cupy.kda_decode_mtp(**moved)
        kda_cupy.kda_commit(**settlement)
        for call in calls:
            call()
    assert not seen


@MODES
def test_offsets_are_64_bit(mode: str) -> None:
    """A11: slots beyond 2**31 elements and bytes, a stride that is no power of two; and as many snapshots."""
    P, HV, rows, steps = 4101, 32, 514, 8
    stride = HV * DIM * DIM + 20
    try:
        memory = cupy.empty(P * stride, np.float32)
        scratch = cupy.empty((rows, steps, HV, DIM, DIM), np.float32) if mode == "snapshots" else None
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 18 GB of GPU memory")
    strides = (stride * 4, DIM * DIM * 4, DIM * 4, 4)
    pool = cupy.lib.stride_tricks.as_strided(memory, (P, HV, DIM, DIM), strides)
    problem = make_mtp(N=1, t=3, H=HV, HV=HV, P=2, slots=[1], mode=mode, ring_indices=True)
    history = {name: problem[name][1] for name in ("cs_q", "cs_k", "cs_v")}
    wanted = truth.decode_mtp(problem)[0]
    first = None
    for slot, row in ((1, 0), (1025, 140), (4099, 512), (4100, 513)):
        pool[slot] = cupy.asarray(problem["recurrent_state"][1])
        small = {name: value for name, value in problem.items() if name not in ("recurrent_state", *history)}
        moved = to({**small, "ssm_state_indices": np.array([slot])}, cupy)
        moved["recurrent_state"] = pool
        for name, value in history.items():
            moved[name] = cupy.zeros((P, *value.shape), value.dtype)
            moved[name][slot] = cupy.asarray(np.ascontiguousarray(value))
        if mode == "snapshots":
            moved["intermediate_ssm"] = scratch
            moved["intermediate_state_indices"] = cupy.array([row])
            for name in ("intermediate_conv_q", "intermediate_conv_k", "intermediate_conv_v"):
                moved[name] = cupy.zeros((rows, steps, *moved[name].shape[2:]), moved[name].dtype)
        out = to_host(kda_cupy.kda_decode_mtp(**moved))
        operands = commit_operands(moved, [3])
        operands["accept_lens"] = cupy.array([3])
        kda_cupy.kda_commit(**operands)
        result = out, to_host(pool[slot]), to_host(moved["cs_v"][slot])
        first = first or result
        assert all(same_bits(mine, its) for mine, its in zip(result, first, strict=True))
        del moved, operands
    assert relative_error(first[0][0], wanted.out) < OUTPUT_ERROR["bfloat16"]
    assert relative_error(first[1], wanted.states[2]) < STATE_ERROR
    assert same_bits(first[2], wanted.windows[2][2].astype(kind_of("bfloat16")))


def test_more_requests_than_a_grid_has_blocks() -> None:
    """C17: nearly all requests are empty or padding; the last ones are not."""
    N = 70_000
    lengths = np.zeros(N, int)
    lengths[[0, 65_534, 65_535, N - 1]] = 2
    problem = make_mtp(N=4, t=2, HV=1)
    moved = to(problem, cupy)
    rows = np.full(N, -1, np.int32)
    live = np.flatnonzero(lengths)
    scratch = rows.copy()
    rows[live], scratch[live] = problem["ssm_state_indices"], problem["intermediate_state_indices"]
    rows[1:60_000:3] = 3  # live, and nothing to do
    want = to_host(kda_cupy.kda_decode_mtp(**moved))
    moved["ssm_state_indices"] = cupy.asarray(rows)
    moved["intermediate_state_indices"] = cupy.asarray(scratch)
    moved["cu_seqlens"] = cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    assert same_bits(kda_cupy.kda_decode_mtp(**moved, max_tokens_per_request=2), want)
    accept = np.zeros(N, np.int32)
    accept[live] = [1, 2, 1, 2]
    operands = commit_operands(moved, accept)
    operands["accept_lens"] = cupy.asarray(accept)
    kda_cupy.kda_commit(**operands)
    small = commit_operands({**problem, **to_hosts({name: moved[name] for name in RINGS})}, [1, 2, 1, 2])
    small |= {f"intermediate_conv_{x}": to_host(moved[f"intermediate_conv_{x}"]) for x in "qkv"}
    committed = to(small, cupy)
    kda_cupy.kda_commit(**committed)
    for name in PERSISTENT:
        assert same_bits(moved[name], committed[name])
    kda_cupy.check_errors()


def test_nothing_recompiles_when_traffic_changes() -> None:
    """N, T, heads, slots, strides, scale, bounds, eps, lengths: run-time values."""
    modules._kernels.clear()
    for N, H, HV, scale, bound in ((1, 1, 1, None, -5.0), (3, 1, 2, 0.5, -1.0), (9, 2, 4, 0.1, -8.0)):
        problem = make_mtp(N=N, t=2, H=H, HV=HV, lower_bound=bound)
        kda_cupy.kda_decode_mtp(**to(problem, cupy), scale=scale)
    for lengths in ([3, 0], [1, 2, 0, 3]):
        kda_cupy.kda_decode_mtp(**to(make_mtp(N=len(lengths), lengths=lengths), cupy))
    assert len(modules._kernels) == 1


@MODES
def test_kernels_tell_about_themselves(mode: str) -> None:
    modules._kernels.clear()
    problem = make_mtp(N=1, mode=mode, dtype="bfloat16")
    verify = kda_cupy.bind(kda_cupy.kda_decode_mtp, **to(problem, cupy))
    commit = kda_cupy.bind(kda_cupy.kda_commit, **to(commit_operands(problem, [1]), cupy))
    assert "mtp_verify" in repr(verify) and "commit" in repr(commit)
    for call in (verify, commit):
        assert 0 < call.registers <= 128
    assert all(kernel.local_bytes == 0 for kernel in modules._kernels.values())


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_of_everything(mode: str, dtype: str) -> None:
    play(scripted(mode, dtype), cupy)


@settings(max_examples=40, deadline=None)
@given(game=games())
def test_mixed_sequences_equal_sequential_decoding(game: Game) -> None:
    play(game, cupy)


@MODES
def test_torch_tensors(mode: str, torch: ModuleType) -> None:
    problem = make_mtp(N=2, mode=mode)
    want = verified(problem)
    theirs = to(problem, torch, "cuda")
    out = kda_cupy.kda_decode_mtp(**theirs)
    assert isinstance(out, torch.Tensor) and same_bits(out, want["out"])
    operands = commit_operands(theirs, [0, 0])
    operands["accept_lens"] = torch.tensor([2, 1], device="cuda")
    assert kda_cupy.kda_commit(**operands) is theirs["recurrent_state"]
    settled = committed_after(problem, to_hosts(want), [2, 1])
    for name in PERSISTENT:
        assert same_bits(theirs[name], settled[name])


@MODES
@pytest.mark.parametrize("t", [1, 8, 16])
@pytest.mark.parametrize("onorm", [False, True])
def test_sanitizer_selection(mode: str, t: int, onorm: bool) -> None:
    """Every mode in one short test each, for compute-sanitizer: padding, an empty request, one out of range."""
    if mode == "snapshots" and onorm and t == 16:
        t = 9
    problem = make_mtp(N=4, lengths=[t, 0, t, 1], P=5, slots=[2, 3, -1, 4], mode=mode, onorm=onorm)
    moved = verified(problem)
    assert np.isfinite(to_host(moved["out"]).astype(np.float32)).all()
    operands = commit_operands(moved, np.zeros(4))
    operands["accept_lens"] = cupy.array([t, 0, 3, 99])
    operands["track_indices"], operands["track_steps"] = cupy.array([1, 1, 1, 1]), cupy.array([0, -1, 0, -1])
    kda_cupy.kda_commit(**operands)
    with pytest.raises(kda_cupy.SlotError, match="accept_lens"):
        kda_cupy.check_errors()
    wanted = truth.decode_mtp(problem)[0]
    assert relative_error(to_host(moved["recurrent_state"])[2], wanted.states[t - 1]) < STATE_ERROR
