# SPDX-License-Identifier: Apache-2.0
"""StatePool on a GPU: zeroing, padding, threads, and pools of more than 2**31 elements."""

import threading

import numpy as np
import pytest
from problems import POISON, make_problem, make_state, same_bits, to, to_host, to_library

from kda_cupy import (
    OperandError,
    PoolExhausted,
    SlotError,
    StatePool,
    check_state,
    gdn_packed_decode,
    is_valid_state,
    kda_packed_decode,
)

cupy = pytest.importorskip("cupy")

OPERATIONS = {"kda": kda_packed_decode, "gdn": gdn_packed_decode}
GIB = 2**30


def small_pool(capacity=4, **changes):
    return StatePool(capacity, **({"num_value_heads": 2, "head_k_dim": 8, "head_v_dim": 3} | changes))


@pytest.fixture
def free_gpu_memory():
    """Bytes that can be had, once CuPy and torch have given back what they keep."""
    cupy.get_default_memory_pool().free_all_blocks()
    try:
        import torch
    except ImportError:
        pass
    else:
        torch.cuda.empty_cache()
    yield cupy.cuda.runtime.memGetInfo()[0]
    cupy.get_default_memory_pool().free_all_blocks()


def test_geometry_is_told_truthfully():
    pool = small_pool(layers=2)
    here = cupy.cuda.runtime.getDevice()
    assert isinstance(pool.state, cupy.ndarray)
    assert pool.state.shape == (2, 5, 2, 3, 8)
    assert pool.state.dtype == np.float32
    assert (len(pool), pool.free_slots, pool.layers, pool.device) == (4, 4, 2, here)
    assert pool.bytes_per_slot == 2 * 2 * 3 * 8 * 4
    assert pool.state.data.ptr % 256 == 0
    assert not pool.state.any()
    pool.allocate(3)
    assert repr(pool).startswith("<StatePool 3 of 4 slots in use, 2 layer(s), [HV=2, V=3, K=8] float32, ")
    assert repr(pool).endswith(f" on cuda:{here}>")


def test_layers_are_views():
    pool = small_pool(layers=3)
    pool[1][2, 1, 0, 5] = 7
    assert pool.state[1, 2, 1, 0, 5] == 7
    assert cupy.count_nonzero(pool.state) == 1


@pytest.mark.parametrize("device", [-1, 64, "cuda", "cuda:0"])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(OperandError) as caught:
        small_pool(device=device)
    assert caught.value.code == "KDA-POOL-GEOMETRY"
    assert repr(device) in str(caught.value)


def test_slots_come_and_go_as_in_host_memory():
    pool = small_pool(3)
    assert type(pool.allocate()) is int
    slots = pool.allocate(2)
    assert isinstance(slots, np.ndarray)
    assert slots.dtype == np.int32
    with pytest.raises(PoolExhausted):
        pool.allocate()
    with pytest.raises(SlotError):
        pool.release([1, 2, 2])
    assert pool.free_slots == 0
    pool.release(slots)
    with pool.slot():
        assert pool.free_slots == 1
    assert pool.free_slots == 2


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, -0.0])
@pytest.mark.parametrize("n", [None, 1, 3, 8])
def test_nothing_survives_in_a_slot(garbage, n):
    """A13, in runs and alone, in every layer; neighbours keep their bits."""
    pool = small_pool(9, layers=2)
    pool.allocate(9)
    pool.release([7, 2, 3, 9, 5, 4, 1, 6])
    pool.state[:, 1:] = garbage
    slots = np.atleast_1d(pool.allocate() if n is None else pool.allocate(n)).tolist()
    state = to_host(pool.state)
    wanted = np.full_like(state, garbage)
    wanted[:, [0, *slots]] = 0
    assert same_bits(state, wanted)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_fresh_slot_decodes_as_a_start_from_zeros(op):
    """A13, end to end: the last tenant of the slot left NaN."""
    problem = make_problem(op, B=1, slots=[2], P=4)
    problem["initial_state"][:] = 0
    wanted, _ = OPERATIONS[op](**to(problem, cupy))
    pool = StatePool(3, 4)
    pool.allocate()
    tenant = pool.allocate()
    pool[0][tenant] = cupy.nan
    pool.release(tenant)
    slot = pool.allocate()
    assert slot == tenant == 2
    problem = to(problem, cupy) | {"initial_state": pool[0]}
    problem["ssm_state_indices"] = cupy.array([slot])
    out, _ = OPERATIONS[op](**problem)
    assert same_bits(out, wanted)
    assert cupy.isfinite(pool.state).all()


def test_zeroing_is_ordered_on_the_current_stream():
    pool = small_pool(2)
    pool.state[:] = cupy.nan
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        slot = pool.allocate()
        pool[0][slot] += 1
        stream.synchronize()
    assert (pool[0][slot] == 1).all()


# Somebody else's memory


def test_wrap_honours_padding():
    theirs = to_library(make_state(np.random.default_rng(0), 6, 4, 128, 128, slot_padding=4096), cupy)
    gaps = cupy.lib.stride_tricks.as_strided(theirs[0, 3, 127, 127:], (5, 4097), (theirs.strides[0], 4))[
        :, 1:
    ]
    pool = StatePool.wrap(theirs)
    assert pool.state.data.ptr == theirs.data.ptr
    assert pool.bytes_per_slot == 4 * 128 * 128 * 4
    assert pool.allocate(2).tolist() == [1, 2]
    problem = make_problem("kda", B=3, slots=[1, 5, 2], P=6)
    problem["initial_state"] = to_host(theirs)
    wanted_out, wanted_state = kda_packed_decode(**to(problem, cupy))
    out, _ = kda_packed_decode(**to(problem, cupy) | {"initial_state": pool[0]})
    assert same_bits(out, wanted_out)
    assert same_bits(theirs, wanted_state)
    assert (gaps == POISON).all()


def test_wrap_honours_interleaving():
    buffer = cupy.full((5, 3, 2, 8, 64), 7, np.float32)  # [P, layers, HV, V, K]
    pool = StatePool.wrap(buffer[:, :2].swapaxes(0, 1))
    assert (pool.layers, pool.capacity) == (2, 4)
    slot = pool.allocate()
    assert not buffer[slot, :2].any()
    assert (buffer[:, 2] == 7).all()
    assert all((buffer[other] == 7).all() for other in range(5) if other != slot)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: cupy.zeros((5, 2, 8), np.float32), "KDA-STATE-RANK"),
        (lambda: cupy.zeros((5, 2, 8, 8)), "KDA-STATE-DTYPE"),
        (lambda: cupy.zeros((5, 2, 8, 8), np.float32).swapaxes(2, 3), "KDA-STATE-CONTIGUOUS"),
        (lambda: cupy.zeros((5, 2, 8, 16), np.float32)[..., :8], "KDA-STATE-STRIDES"),
        (lambda: cupy.zeros(5 * 128 + 1, np.float32)[1:].reshape(5, 2, 8, 8), "KDA-STATE-ALIGNMENT"),
        (lambda: cupy.zeros((5, 2, 8, 8), np.float32), None),
        (lambda: cupy.zeros((5, 3, 8, 8), np.float32)[:, :2], None),
        (lambda: cupy.broadcast_to(cupy.zeros((1, 2, 8, 8), np.float32), (5, 2, 8, 8)), "KDA-STATE-STRIDES"),
    ],
)
def test_states_are_checked(make, code):
    array = make()
    assert is_valid_state(array, 2) == (code is None)
    if code is None:
        check_state(array, 2)
        check_state(array, 2, device=cupy.cuda.runtime.getDevice())
        return
    for check in (StatePool.wrap, lambda state: check_state(state, 2)):
        with pytest.raises(OperandError) as caught:
            check(array)
        assert caught.value.code == code


# Threads


def test_four_threads_lose_nothing_and_share_nothing():
    pool = small_pool(6)
    owner = [None] * 7
    wrong = []

    def work(me):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for turn in range(300):
                slot = pool.allocate()
                if owner[slot] is not None:
                    wrong.append(f"slot {slot} of {owner[slot]} handed to {me}")
                owner[slot] = me
                mine = pool[0][slot]
                mine += me
                if not (mine == me).all():
                    wrong.append(f"round {turn}: slot {slot} of {me} holds something else")
                owner[slot] = None
                mine.fill(cupy.nan)
                stream.synchronize()  # the next owner may use another stream
                pool.release(slot)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.free_slots == 6
    assert not pool[0][0].any()


# More than 2**31 elements


def any_in_slots(state, slots):
    """Whether anything but zero is in these slots, a few at a time: a mask of the whole pool would be as large."""
    parts = ((first, min(first + 64, slots.stop)) for first in range(slots.start, slots.stop, 64))
    return any(bool(state[:, first:end].any()) for first, end in parts)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_slots_beyond_32_bits(op, index_dtype, free_gpu_memory):
    """A11: 4100 slots of 32 heads, 8.6 GB. Offsets in elements pass 2**31 at slot 4096, in bytes at 1024 and 2048."""
    if free_gpu_memory < 9.5 * GIB:
        pytest.skip(f"needs 9.5 GiB, {free_gpu_memory / GIB:.1f} are free")
    slots = [1, 1023, 1025, 2049, 4095, 4096, 4099]
    pool = StatePool(4099, 32)
    assert pool.state.size > 2**31
    problem = make_problem(op, B=1, H=32, HV=32, P=2, slots=[1], index_dtype=index_dtype)
    rows = {name: np.repeat(problem[name], len(slots), axis=0) for name in ("mixed_qkv", "a", "b")}
    rows["ssm_state_indices"] = np.array(slots, index_dtype)
    operands = to(problem | rows, cupy) | {"initial_state": pool[0]}
    for _ in range(2):  # from zeros, and from a state
        out, _ = OPERATIONS[op](**operands)
    for row, slot in enumerate(slots):
        assert same_bits(out[row], out[0]), slot
        assert same_bits(pool[0][slot], pool[0][1]), slot
    assert pool[0][4099].any()
    for before, after in zip([-1, *slots], [*slots, 4100], strict=True):
        assert not any_in_slots(pool.state, range(before + 1, after)), (before, after)
    small = StatePool(1, 32)
    once = to(problem, cupy) | {"initial_state": small[0]}
    for _ in range(2):
        wanted, _ = OPERATIONS[op](**once)
    assert same_bits(out[-1:], wanted)
    assert same_bits(pool[0][4099], small[0][1])


@pytest.mark.parametrize(("layers", "capacity"), [(1, 4099), (2, 2049)])
def test_zeroing_beyond_32_bits(layers, capacity, free_gpu_memory):
    if free_gpu_memory < 9.5 * GIB:
        pytest.skip(f"needs 9.5 GiB, {free_gpu_memory / GIB:.1f} are free")
    pool = StatePool(capacity, 32, layers=layers)
    assert pool.state.size > 2**31
    last = pool.allocate(capacity).tolist()[-1]
    assert last == capacity
    for layer in range(layers):  # a layer at a time, so as not to rely on what is tested
        pool[layer][last - 1 :] = cupy.nan
        pool[layer][1] = 7
    pool.release(last)
    assert pool.allocate() == last
    assert not pool.state[:, last].any()
    assert cupy.isnan(pool.state[:, last - 1]).all()
    assert (pool.state[:, 1] == 7).all()
    assert not any_in_slots(pool.state, range(2, last - 1))
    for layer in range(layers):
        pool[layer][2:] = cupy.nan
    pool.release(range(2, capacity + 1))
    pool.allocate(capacity - 1)
    assert not any_in_slots(pool.state, range(2, capacity + 1))
    assert (pool.state[:, 1] == 7).all()
    assert not pool.state[:, 0].any()


# Several GPUs


def test_a_pool_on_another_gpu_than_the_current_one():
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    pool = small_pool(device=1)
    assert pool.device == 1
    assert repr(pool).endswith(" on cuda:1>")
    with cupy.cuda.Device(1):
        pool.state[:] = cupy.nan
        cupy.cuda.Device().synchronize()
    slots = pool.allocate(2)
    with cupy.cuda.Device(1):
        cupy.cuda.Device().synchronize()
        assert not pool.state[:, slots].any()
        assert cupy.isnan(pool.state[:, 3:]).all()
    assert cupy.cuda.runtime.getDevice() == 0
