# SPDX-License-Identifier: Apache-2.0
"""The contract of the packed decodes on CUDA, and what only a GPU can show."""

import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from packed_decode_contract import OPERATIONS, OUTPUT_ERROR, STATE_ERROR, PackedDecodeContract
from problems import make_problem, out_shape, same_bits, to, to_host, to_library

import kda_cupy
from kda_cupy import modules
from kda_cupy.ops import packed_decode
from kda_cupy.reference import truth

cupy = pytest.importorskip("cupy")


class TestOnCuda(PackedDecodeContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return cupy


def make_call(problem: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    moved = to(problem, cupy)
    moved["out"] = to_library(np.full(out_shape(problem), np.nan, problem["mixed_qkv"].dtype), cupy)
    return moved, kda_cupy.bind(OPERATIONS["kda"], **moved)


def capture(call: Any, times: int = 1) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(times):
            call()
        graph = stream.end_capture()
    return graph, stream


def test_a_captured_call_uses_what_the_buffers_hold_at_replay() -> None:
    """D5, A3: slots rewritten in place, padding anywhere; each row gives its standalone result, 200 replays long."""
    rng = np.random.default_rng(0)
    problem = make_problem("kda", B=6, P=12, K=128, V=128)
    moved, call = make_call(problem)
    graph, stream = capture(call)
    state = problem["initial_state"].copy()
    for _ in range(200):
        slots = rng.permutation(12)[:6].astype(np.int32)
        slots[rng.random(6) < 0.3] = -1
        fresh = make_problem("kda", B=6, P=12, seed=int(rng.integers(1 << 30)))
        for name in ("mixed_qkv", "a", "b"):
            moved[name].set(fresh[name])
        moved["ssm_state_indices"].set(slots)
        moved["out"].fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = {**problem, **{name: fresh[name] for name in ("mixed_qkv", "a", "b")}, "initial_state": state}
        eager = to({**eager, "ssm_state_indices": slots}, cupy)
        want, new_state = OPERATIONS["kda"](**eager)
        assert same_bits(moved["out"], want)
        state = to_host(new_state)
        assert same_bits(moved["initial_state"], state)
    kda_cupy.check_errors()


def test_an_eager_call_can_be_captured_once_it_is_warm() -> None:
    problem = make_problem("kda", B=2)
    moved, _ = make_call(problem)
    OPERATIONS["kda"](**moved)
    moved["initial_state"][...] = cupy.asarray(problem["initial_state"])
    graph, stream = capture(lambda: OPERATIONS["kda"](**moved))
    graph.launch(stream)
    stream.synchronize()
    want = OPERATIONS["kda"](**to(problem, cupy))
    assert same_bits(moved["out"], want[0]) and same_bits(moved["initial_state"], want[1])


def test_nothing_is_allocated_when_out_is_given() -> None:
    """G5, G4: strided inputs are not copied; a call makes no allocation at all."""
    moved, call = make_call(make_problem("kda", B=4, row_padding=64))
    OPERATIONS["kda"](**moved)
    seen = []

    class Hook(cupy.cuda.memory_hook.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **size: Any) -> None:
            seen.append(size)

    with Hook():
        OPERATIONS["kda"](**moved)
        call()
    assert not seen


@pytest.mark.parametrize("B", [65_536, 1 << 20])
def test_more_rows_than_a_grid_has_blocks(B: int) -> None:
    """C17: the last row of a huge batch equals its own small run; nothing stops at 65,535."""
    K, V, P = 8, 8, 40
    slots = np.full(B, -1, np.int64)
    rows = [0, 65_534, 65_535, B - 1]
    slots[rows] = [7, 3, 39, 21]
    problem = make_problem(
        "kda", B=B, H=1, HV=1, K=K, V=V, P=P, slots=slots, index_dtype="int64", slot_padding=4
    )
    want = {**problem, **{name: problem[name][rows] for name in ("mixed_qkv", "a", "b", "ssm_state_indices")}}
    want_out, want_state = OPERATIONS["kda"](**to(want, cupy))
    out, state = OPERATIONS["kda"](**to(problem, cupy))
    assert same_bits(out[np.array(rows)], want_out) and same_bits(state, want_state)
    assert not to_host(out)[slots < 0].any()


def test_the_bad_row_of_a_huge_batch_is_named() -> None:
    slots = np.full(70_000, -1, np.int64)
    slots[69_000] = 40
    problem = make_problem("kda", B=70_000, H=1, HV=1, K=8, V=8, P=40, slots=slots, index_dtype="int64")
    OPERATIONS["kda"](**to(problem, cupy))
    with pytest.raises(kda_cupy.SlotError, match=r"ssm_state_indices\[69000\]"):
        kda_cupy.check_errors()


@pytest.mark.parametrize("padding", [0, 20])
def test_offsets_are_64_bit(padding: int) -> None:
    """A11: beyond 2**31 elements (slot 4099 at 32 heads) and bytes (slot 1025); a stride that is no power of two."""
    P, HV, K, V = 4101, 32, 128, 128
    stride = HV * V * K + padding
    try:
        memory = cupy.empty(P * stride, np.float32)
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 8.6 GB of GPU memory")
    pool = cupy.lib.stride_tricks.as_strided(memory, (P, HV, V, K), (stride * 4, V * K * 4, K * 4, 4))
    problem = make_problem("kda", B=1, H=HV, HV=HV, P=2, slots=[1], lower_bound=-5.0)
    results = []
    for slot in (1, 1025, 4099, 4100):
        pool[slot] = cupy.asarray(problem["initial_state"][1])
        moved = to(
            {**problem, "initial_state": np.zeros(1), "ssm_state_indices": np.array([slot], np.int32)}, cupy
        )
        out, _ = OPERATIONS["kda"](**{**moved, "initial_state": pool})
        results.append((to_host(out), to_host(pool[slot])))
    want_out, want_state = truth.packed_decode(**problem)
    assert truth.relative_error(results[0][0], want_out) < OUTPUT_ERROR["bfloat16"]
    assert truth.relative_error(results[0][1], want_state[1]) < STATE_ERROR
    for out, state in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(state, results[0][1])


def test_threads_with_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: 4 threads x 250 calls, own stream and slots each, give the bits of a serial run, and compile once."""
    packed_decode.check.cache_clear()  # plans remember their kernels
    modules._kernels.clear()
    compiled = []
    make_kernel = modules._make
    monkeypatch.setattr(modules, "_make", lambda *key: compiled.append(key) or make_kernel(*key))
    problem = make_problem("kda", B=8, P=9, slots=range(1, 9), K=64, V=64)
    shared = to(problem, cupy)
    cupy.cuda.Device().synchronize()
    failures = []

    def work(part: int) -> None:
        try:
            rows = slice(2 * part, 2 * part + 2)
            with cupy.cuda.Stream(non_blocking=True) as stream:
                mine = {name: shared[name] for name in ("A_log", "dt_bias", "initial_state")}
                mine |= {name: shared[name][rows] for name in ("mixed_qkv", "a", "b", "ssm_state_indices")}
                mine["out"] = cupy.empty((2, 1, 4, 64), shared["mixed_qkv"].dtype)
                for _ in range(250):
                    OPERATIONS["kda"](**mine)
                stream.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(compiled) == 1
    serial = to(problem, cupy)
    for _ in range(250):
        OPERATIONS["kda"](**serial)
    assert same_bits(shared["initial_state"], serial["initial_state"])


def test_nothing_recompiles_when_traffic_changes() -> None:
    """B, slots, strides, scale, bounds: run-time values. Another dtype, gate or head size: another kernel."""
    packed_decode.check.cache_clear()
    modules._kernels.clear()
    for B, P, scale, bound in ((1, 4, None, -5.0), (3, 9, 0.5, -1.0), (64, 70, 0.1, -8.0)):
        OPERATIONS["kda"](**to(make_problem("kda", B=B, P=P, lower_bound=bound), cupy), scale=scale)
    OPERATIONS["kda"](**to(make_problem("kda", H=3, HV=12, lower_bound=-5.0), cupy))
    assert len(modules._kernels) == 1
    OPERATIONS["kda"](**to(make_problem("kda", lower_bound=-5.0, row_padding=1), cupy))
    assert len(modules._kernels) == 2  # unaligned rows


def test_kernel_tells_about_itself() -> None:
    _, call = make_call(make_problem("kda", B=1))
    assert "packed_decode[kda,softplus,K128,V128,bfloat16]" in repr(call)
    assert call.registers > 0 and call._call.kernel.local_bytes == 0


def test_a_compiler_error_is_one_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    text = modules.sources.flatten("packed_decode.cu").replace(
        "const float beta =", "const float beta = nonsense *"
    )
    monkeypatch.setattr(modules.sources, "flatten", lambda name: text)
    monkeypatch.setattr(modules, "_kernels", {})
    with pytest.raises(kda_cupy.CompileError) as caught:
        OPERATIONS["kda"](**to(make_problem("kda", B=1, V=56), cupy))
    assert caught.value.code == "KDA-COMPILER-COMPILE" and "nonsense" in str(caught.value)
    assert any("const float beta" in note for note in caught.value.__notes__)


@pytest.mark.skipif(cupy.is_available() and cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
def test_every_gpu_runs_its_own_operands() -> None:
    problem = make_problem("kda", B=3)
    with cupy.cuda.Device(0):
        want = [to_host(array) for array in OPERATIONS["kda"](**to(problem, cupy))]
    with cupy.cuda.Device(1):
        moved = to(problem, cupy)
    with cupy.cuda.Device(0):  # the operands decide, not the current device
        out, state = OPERATIONS["kda"](**moved)
        assert out.device.id == 1
    assert same_bits(out, want[0]) and same_bits(state, want[1])
    with pytest.raises(kda_cupy.DeviceError):
        OPERATIONS["kda"](**{**moved, "b": to_library(problem["b"], cupy)})
