# SPDX-License-Identifier: Apache-2.0
"""StatePool in host memory: who owns which slot, what is in it, whose memory it is; check_state on many layouts."""

import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from problems import POISON, make_problem, make_state, same_bits, to_library

from kda_cupy import (
    BridgeError,
    DeviceError,
    OperandError,
    PoolExhausted,
    SlotError,
    StatePool,
    check_state,
    is_valid_state,
    kda_packed_decode,
)


def small_pool(capacity=4, **changes):
    return StatePool(
        capacity, **({"num_value_heads": 2, "head_k_dim": 8, "head_v_dim": 3, "device": "cpu"} | changes)
    )


def bookkeeping(pool):
    """Which slots are free, in the order they will be handed out, and which are not."""
    return list(pool._ledger._free), set(pool._ledger._in_use)


# Geometry


@pytest.mark.parametrize(
    ("HV", "V", "K", "layers"), [(1, 1, 4, 1), (3, 5, 12, 2), (32, 128, 128, 1), (2, 64, 512, 3)]
)
def test_geometry_is_told_truthfully(HV, V, K, layers):
    pool = StatePool(2, HV, K, V, layers=layers, device="cpu")
    assert pool.state.shape == (layers, 3, HV, V, K)
    assert pool.state.dtype == np.float32
    assert (len(pool), pool.capacity, pool.free_slots, pool.layers, pool.device) == (2, 2, 2, layers, "cpu")
    assert pool.bytes_per_slot == layers * HV * V * K * 4 == pool.state[:, 0].nbytes
    assert not pool.state.any()
    assert pool[layers - 1].shape == (3, HV, V, K)


def test_head_v_dim_defaults_to_head_k_dim():
    assert StatePool(1, 2, 64, device="cpu").state.shape == (1, 2, 2, 64, 64)


def test_every_slot_starts_on_a_boundary():
    for _ in range(20):  # an allocator returns aligned memory by luck too
        pool = StatePool(3, 1, 4, 3, layers=3, device="cpu")
        assert pool.state.ctypes.data % 256 == 0
        starts = [pool.state[layer, slot].ctypes.data % 16 for layer in range(3) for slot in range(4)]
        assert starts == [0] * 12


def test_an_index_selects_a_layer_and_is_a_view():
    pool = small_pool(layers=3)
    pool[1][2, 1, 0, 5] = 7
    assert pool.state[1, 2, 1, 0, 5] == 7
    assert np.count_nonzero(pool.state) == 1
    assert pool[-1].ctypes.data == pool.state[2].ctypes.data
    with pytest.raises(IndexError):
        pool[3]
    with pytest.raises(TypeError):
        pool[1.0]


@pytest.mark.parametrize(
    "sizes",
    [
        {"capacity": 0},
        {"capacity": -1},
        {"capacity": 2.5},
        {"capacity": "4"},
        {"capacity": None},
        {"num_value_heads": 0},
        {"head_k_dim": 0},
        {"head_k_dim": 6},
        {"head_k_dim": 516},
        {"head_k_dim": -4},
        {"head_v_dim": 0},
        {"layers": 0},
        {"device": "cuda:0"},
        {"device": "gpu"},
    ],
    ids=str,
)
def test_sizes_that_make_no_pool_are_refused(sizes):
    with pytest.raises(OperandError) as caught:
        small_pool(**sizes)
    assert caught.value.code == "KDA-POOL-GEOMETRY"
    ((_, came),) = sizes.items()
    assert str(came) in str(caught.value)


def test_numpy_integers_are_sizes():
    assert small_pool(np.int32(5), layers=np.int64(2)).state.shape == (2, 6, 2, 3, 8)


def test_repr_tells_the_truth():
    pool = StatePool(8, 32, 128, layers=2, device="cpu")
    pool.allocate(3)
    wanted = "<StatePool 3 of 8 slots in use, 2 layer(s), [HV=32, V=128, K=128] float32, 0.0352 GiB on cpu>"
    assert repr(pool) == wanted
    wrapped = StatePool.wrap(pool[0])
    wrapped.allocate(8)
    assert repr(wrapped).startswith("<StatePool 8 of 8 slots in use, 1 layer(s), ")
    assert repr(wrapped).endswith(" on cpu, wrapped>")


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2), ("float16", 2), (np.float32, 4), (ml_dtypes.bfloat16, 2)]
)
def test_a_conv_history_is_there_when_it_is_asked_for(dtype, size):
    pool = small_pool(3, layers=2, num_key_heads=1, activation_dtype=dtype)
    channels = 2 * 1 * 8 + 2 * 3
    assert pool.conv.shape == (2, 4, channels, 3)
    assert pool.conv.itemsize == size
    assert not pool.conv.any()
    assert pool.bytes_per_slot == 2 * (2 * 3 * 8 * 4 + channels * 3 * size)
    assert pool.nbytes == 4 * pool.bytes_per_slot == pool.state.nbytes + pool.conv.nbytes
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    assert f"float32 + conv [{channels}, 3] {name}, " in repr(pool)
    assert small_pool().conv is None


@pytest.mark.parametrize("snapshots", [False, True])
def test_verify_scratch_is_there_when_it_is_asked_for(snapshots):
    pool = small_pool(
        3,
        layers=2,
        num_key_heads=1,
        activation_dtype="float16",
        verify_rows=5,
        verify_tokens=4,
        snapshots=snapshots,
    )
    shapes = {name: array.shape for name, array in pool.operands().items()}
    assert (
        shapes.items()
        >= {
            "recurrent_state": (2, 4, 2, 3, 8),
            "cs_q": (2, 4, 8, 3),
            "cs_v": (2, 4, 6, 3),
            "intermediate_conv_k": (2, 5, 4, 8, 3),
            "intermediate_conv_v": (2, 5, 4, 6, 3),
        }.items()
    )
    rings = {
        "replayssm_rawv": (2, 4, 2, 4, 3),
        "replayssm_rawk": (2, 4, 1, 4, 8),
        "replayssm_g": (2, 4, 2, 4, 8),
        "replayssm_beta": (2, 4, 2, 4),
    }
    states = {"intermediate_ssm": (2, 5, 4, 2, 3, 8)}
    assert shapes.items() >= (states if snapshots else rings).items()
    assert not shapes.keys() & (rings if snapshots else states).keys()
    inputs = 2 * 5 * (4 + 2) * 22 * 2  # windows slide over them
    assert pool.nbytes == pool.state.nbytes + pool.conv.nbytes + inputs + sum(
        array.nbytes
        for name, array in pool.operands().items()
        if name.startswith(("intermediate_ssm", "replay"))
    )
    windows = pool.operands(1)["intermediate_conv_k"]
    windows[2, 1, :, 2] = 7
    assert (windows[2, 2, :, 1] == 7).all()
    assert (windows[2, 3, :, 0] == 7).all()
    assert np.count_nonzero(pool.operands()["intermediate_conv_k"]) == 3 * 8
    assert np.count_nonzero(pool.operands()["intermediate_conv_v"]) == 0
    ring_bytes = 2 * (2 * 4 * 3 * 2 + 1 * 4 * 8 * 2 + 2 * 4 * 8 * 4 + 2 * 4 * 4)
    slot = 2 * (2 * 3 * 8 * 4 + 22 * 3 * 2)
    assert pool.bytes_per_slot == slot + (0 if snapshots else ring_bytes)
    assert f" + {'snapshots' if snapshots else 'rings'} of 4 tokens, " in repr(pool)
    assert {name: array.shape for name, array in pool.operands(1).items()} == {
        name: shape[1:] for name, shape in shapes.items()
    }
    assert pool.operands(1)["recurrent_state"].ctypes.data == pool[1].ctypes.data


def test_a_pool_of_states_alone_has_one_operand():
    assert small_pool().operands().keys() == {"recurrent_state"}


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_heads": 3},
        {"num_key_heads": 0},
        {"num_key_heads": 1.0},
        {"activation_dtype": "float64"},
        {"activation_dtype": np.int8},
        {"activation_dtype": 3},
        {"verify_rows": 1},
        {"verify_tokens": 1},
        {"verify_rows": 1, "verify_tokens": 1},
        {"activation_dtype": "float16", "verify_rows": 1},
        {"activation_dtype": "float16", "verify_rows": -1, "verify_tokens": 1},
        {"capacity": True},
    ],
    ids=str,
)
def test_parts_that_make_no_pool_are_refused(sizes):
    with pytest.raises(OperandError) as caught:
        small_pool(**sizes)
    assert caught.value.code == "KDA-POOL-GEOMETRY"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 3},
        {"layers": 2, "activation_dtype": "bfloat16", "num_key_heads": 1},
        {"activation_dtype": "float32", "verify_rows": 3, "verify_tokens": 2},
        {"activation_dtype": "float32", "verify_rows": 3, "verify_tokens": 2, "snapshots": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [20_000, 123_457, 10**6])
def test_a_pool_for_a_budget_is_the_largest_that_fits(budget, options):
    pool = StatePool.for_budget(budget, 2, 8, 3, device="cpu", **options)
    assert (
        pool.nbytes <= budget < pool.nbytes + pool.bytes_per_slot + 4096
    )  # less than one slot, and rounding
    assert pool.state.shape == (options.get("layers", 1), len(pool) + 1, 2, 3, 8)
    assert pool.free_slots == len(pool) >= 1


def test_a_budget_takes_the_defaults_of_the_constructor():
    pool = StatePool.for_budget(2**22, 1, device="cpu")
    assert pool.state.shape[2:] == (1, 128, 128)
    assert len(pool) == 2**22 // 65_536 - 2  # slot 0, and the rounding of allocations


@pytest.mark.parametrize("budget", [0, -1, 383, 384])
def test_a_budget_that_is_too_small_is_refused_with_the_numbers(budget):
    with pytest.raises(OperandError, match=f"{budget:,} bytes where a slot takes 192") as caught:
        StatePool.for_budget(budget, 2, 8, 3, device="cpu")
    assert caught.value.code == "KDA-POOL-GEOMETRY"
    with pytest.raises(TypeError):
        StatePool.for_budget(1e9, 2, device="cpu")


# Allocate and release


def test_slots_are_ints_from_1_to_capacity():
    pool = small_pool(3)
    slots = [pool.allocate() for _ in range(3)]
    assert sorted(slots) == [1, 2, 3]
    assert all(type(slot) is int for slot in slots)
    assert pool.free_slots == 0


def test_several_slots_are_an_int32_array_of_the_callers_own():
    pool = small_pool(4)
    slots = pool.allocate(3)
    assert slots.dtype == np.int32
    assert slots.shape == (3,)
    assert len(set(slots.tolist())) == 3
    kept = slots.copy()
    slots[:] = -1  # the pool must not notice
    pool.release(kept)
    assert pool.free_slots == 4


def test_none_of_none():
    pool = small_pool(2)
    slots = pool.allocate(0)
    assert (slots.dtype, slots.shape) == (np.int32, (0,))
    pool.release(slots)
    pool.release([])
    assert pool.free_slots == 2


@pytest.mark.parametrize("n", [-1, -(2**40)])
def test_a_negative_number_of_slots_is_refused(n):
    pool = small_pool()
    with pytest.raises(OperandError, match=str(n)) as caught:
        pool.allocate(n)
    assert caught.value.code == "KDA-POOL-GEOMETRY"
    assert pool.free_slots == 4


@pytest.mark.parametrize("n", [1.0, "2", [1]])
def test_a_number_of_slots_is_an_integer(n):
    pool = small_pool()
    with pytest.raises(TypeError):
        pool.allocate(n)
    assert pool.free_slots == 4


def test_exhaustion_names_the_numbers_and_takes_nothing():
    """A18: three slots are free, four are wanted."""
    pool = small_pool(5)
    pool.allocate(2)
    before = bookkeeping(pool)
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(4)
    assert caught.value.code == "KDA-POOL-EXHAUSTED"
    for number in ("4", "3", "5"):  # wanted, free, capacity
        assert number in str(caught.value)
    assert bookkeeping(pool) == before
    assert pool.free_slots == 3
    assert len(set(pool.allocate(3).tolist())) == 3
    with pytest.raises(PoolExhausted):
        pool.allocate()
    assert isinstance(caught.value, RuntimeError)


def test_release_takes_one_slot_many_or_arrays_of_any_kind():
    pool = small_pool(12)
    for slots in (
        pool.allocate(),
        np.int64(pool.allocate()),
        np.array(pool.allocate()),
        [pool.allocate(), pool.allocate()],
        pool.allocate(1),
        pool.allocate(2).astype(np.int64),
        {pool.allocate()},
        (slot for slot in pool.allocate(2).tolist()),
    ):
        pool.release(slots)
    assert pool.free_slots == 12
    assert sorted(pool.allocate(12).tolist()) == list(range(1, 13))


def test_release_takes_torch_tensors(torch):
    pool = small_pool(8)
    pool.release(torch.from_numpy(pool.allocate(3)))
    pool.release(torch.tensor(pool.allocate()))
    pool.release(torch.tensor([pool.allocate()]))
    assert pool.free_slots == 8


@pytest.mark.parametrize(
    ("slots", "code", "named"),
    [
        (4, "KDA-POOL-DOUBLE-RELEASE", "slot 4"),  # free
        ([1, 4], "KDA-POOL-DOUBLE-RELEASE", "slot 4"),
        ([1, 2, 1], "KDA-POOL-DOUBLE-RELEASE", "slot 1"),  # twice in one call
        (0, "KDA-POOL-RESERVED", "slots[0] = 0"),
        ([1, 2, 0], "KDA-POOL-RESERVED", "slots[2] = 0"),
        (-1, "KDA-VALUE-SLOT-RANGE", "slot -1"),
        (7, "KDA-VALUE-SLOT-RANGE", "slot 7"),
        ([1, 7], "KDA-VALUE-SLOT-RANGE", "slot 7"),
        ([1, 2, 2**40], "KDA-VALUE-SLOT-RANGE", str(2**40)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [list, np.array, iter])
def test_a_wrong_release_changes_nothing(slots, code, named, kind):
    """A15: double, reserved, out of range, alone and among good ones."""
    pool = small_pool(6)
    assert pool.allocate(3).tolist() == [1, 2, 3]
    before = bookkeeping(pool)
    with pytest.raises(SlotError) as caught:
        pool.release(kind(slots) if isinstance(slots, list) else slots)
    assert caught.value.code == code
    assert isinstance(caught.value, IndexError)
    assert named in str(caught.value)
    assert bookkeeping(pool) == before
    pool.release([1, 2, 3])
    assert pool.free_slots == 6


@pytest.mark.parametrize("slots", [True, [True], np.array([True, False]), np.bool_(True)], ids=repr)
def test_a_mask_names_no_slots(slots):
    pool = small_pool(3)
    pool.allocate(3)
    for call in (pool.release, pool.snapshot, pool.fork):
        with pytest.raises(TypeError):
            call(slots)
    assert pool.free_slots == 0


def test_slots_in_use_are_told_as_a_copy():
    pool = small_pool(5)
    pool.allocate(4)
    pool.release([2])
    told = pool.slots_in_use
    assert (told.dtype, told.tolist()) == (np.int32, [1, 3, 4])
    told[:] = 0
    assert pool.slots_in_use.tolist() == [1, 3, 4]


@pytest.mark.parametrize("slots", [1.0, [1, 2.0], "12", None, [None], [[1], [2]], np.array([1.0])], ids=repr)
def test_what_is_no_slot_is_refused(slots):
    pool = small_pool(3)
    pool.allocate(3)
    with pytest.raises(TypeError):
        pool.release(slots)
    assert pool.free_slots == 0


def test_a_slot_freed_twice_is_never_handed_out_twice():
    """A15."""
    pool = small_pool(4)
    slot = pool.allocate()
    pool.release(slot)
    with pytest.raises(SlotError):
        pool.release(slot)
    assert len({pool.allocate() for _ in range(4)}) == 4


def test_a_failure_while_zeroing_gives_the_slots_back(monkeypatch):
    pool = small_pool(3)

    def fail(slots):
        raise MemoryError

    monkeypatch.setattr(pool._contents, "zero", fail)
    with pytest.raises(MemoryError):
        pool.allocate(2)
    assert pool.free_slots == 3


# The context


def test_a_slot_for_the_length_of_a_block():
    pool = small_pool(2)
    with pool.slot() as first, pool.slot() as second:
        assert {first, second} == {1, 2}
        assert pool.free_slots == 0
    assert pool.free_slots == 2


def test_an_exception_cannot_leak_a_slot():
    """A17: two slots, three requests that fail."""
    pool = small_pool(2)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), pool.slot() as first, pool.slot():
            first / 0
        assert pool.free_slots == 2


def test_an_abandoned_generator_gives_its_slot_back():
    pool = small_pool(2)

    def request():
        with pool.slot() as slot:
            yield slot

    running = request()
    next(running)
    assert pool.free_slots == 1
    running.close()
    assert pool.free_slots == 2


def test_exhaustion_in_a_context_takes_nothing():
    pool = small_pool(1)
    with pool.slot(), pytest.raises(PoolExhausted), pool.slot():
        raise AssertionError("unreachable")
    assert pool.free_slots == 1


def test_releasing_inside_the_block_is_a_double_release():
    pool = small_pool(2)
    with pytest.raises(SlotError), pool.slot() as slot:
        pool.release(slot)
    assert pool.free_slots == 2


# Zeroing


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38, -0.0])
@pytest.mark.parametrize("n", [None, 1, 3])
def test_nothing_survives_in_a_slot(garbage, n):
    """A13: 0 * NaN is NaN, so zeroing means writing."""
    pool = small_pool(3, layers=2)
    pool.state[:, 1:] = garbage
    slots = np.atleast_1d(pool.allocate() if n is None else pool.allocate(n))
    assert same_bits(pool.state[:, slots], np.zeros((2, len(slots), 2, 3, 8), np.float32))
    others = [slot for slot in range(1, 4) if slot not in slots]
    assert same_bits(pool.state[:, others], np.full((2, len(others), 2, 3, 8), garbage, np.float32))


def test_a_fresh_slot_decodes_as_a_start_from_zeros():
    """A13, end to end: the last tenant of the slot left NaN."""
    problem = make_problem("kda", B=1, slots=[2], P=4, K=16, V=8)
    problem["initial_state"][:] = 0
    wanted, _ = kda_packed_decode(**problem)
    pool = StatePool(3, 4, 16, 8, device="cpu")
    pool.allocate()
    tenant = pool.allocate()
    pool[0][tenant] = np.nan
    pool.release(tenant)
    slot = pool.allocate()
    assert slot == tenant == 2
    problem |= {"initial_state": pool[0], "ssm_state_indices": np.array([slot])}
    out, _ = kda_packed_decode(**problem)
    assert same_bits(out, wanted)
    assert np.isfinite(pool.state).all()


def test_slots_in_no_order_are_zeroed_and_no_others():
    pool = small_pool(9)
    pool.allocate(9)
    pool.release([7, 2, 3, 9, 5])
    pool.state[:] = 1
    slots = pool.allocate(4)
    zero = {slot for slot in range(10) if not pool.state[0, slot].any()}
    assert zero == set(slots.tolist())


# Threads


def test_four_threads_lose_nothing_and_share_nothing(request):
    switch = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(switch))
    sys.setswitchinterval(1e-5)
    pool = StatePool(6, 1, 4, 1, device="cpu")
    owner = [None] * 7
    wrong = []

    def work(me):
        for turn in range(10_000):
            slots = [pool.allocate()] if turn % 3 else pool.allocate(1).tolist()
            for slot in slots:
                if owner[slot] is not None:
                    wrong.append(f"slot {slot} of {owner[slot]} handed to {me}")
                owner[slot] = me
                pool[0][slot] = me
            for slot in slots:
                if owner[slot] != me or (pool[0][slot] != me).any():
                    wrong.append(f"slot {slot} of {me} touched by {owner[slot]}")
                owner[slot] = None
            pool.release(slots)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.free_slots == 6
    assert sorted(pool.allocate(6).tolist()) == [1, 2, 3, 4, 5, 6]
    assert not pool[0][0].any()


class SlowList(list):
    """Lets other threads run between a look and a leap."""

    def __len__(self):
        length = super().__len__()
        time.sleep(1e-4)
        return length


class SlowSet(set):
    def __contains__(self, slot):
        found = super().__contains__(slot)
        time.sleep(1e-4)
        return found


def in_threads(work, count=4):
    """What the calls of ``work`` returned or raised, from threads that start together."""
    results, together = [], threading.Barrier(count)

    def run():
        together.wait()
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_last_slot_goes_to_one_thread_only():
    for _ in range(50):
        pool = small_pool(3)
        pool._ledger._free = SlowList(pool._ledger._free)
        results = in_threads(lambda pool=pool: pool.allocate(2).tolist())
        taken = [result for result in results if isinstance(result, list)]
        assert len(taken) == 1, results
        assert sum(isinstance(result, PoolExhausted) for result in results) == 3, results
        assert pool.free_slots == 1


def test_one_thread_only_can_release_a_slot():
    for _ in range(50):
        pool = small_pool(3)
        slot = pool.allocate()
        pool._ledger._in_use = SlowSet(pool._ledger._in_use)
        results = in_threads(lambda pool=pool, slot=slot: pool.release(slot))
        assert results.count(None) == 1, results
        assert sum(isinstance(result, SlotError) for result in results) == 3, results
        assert pool.free_slots == 3


# Somebody else's memory


def aligned(shape, dtype=np.float32, fill=0.0):
    """A dense array on a 256-byte boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (2, 5, 2, 3, 8)])
def test_wrap_adopts_without_copying(shape):
    theirs = aligned(shape, fill=7)
    pool = StatePool.wrap(theirs)
    assert pool.state.shape == (1, *shape)[-5:]
    assert (len(pool), pool.layers) == (4, len(pool.state))
    assert pool.bytes_per_slot == theirs[..., 0, :, :, :].nbytes
    assert (theirs == 7).all()  # nothing is written before a slot is handed out
    slot = pool.allocate()
    assert slot == 1
    assert not theirs[..., slot, :, :, :].any()
    assert (theirs[..., 2:, :, :, :] == 7).all()
    pool[0][slot] = 5
    assert (theirs.reshape(pool.state.shape)[0, slot] == 5).all()


def test_wrap_honours_a_padded_slot_stride():
    """C7: HV heads of K * V, and something else behind each slot."""
    theirs = make_state(np.random.default_rng(0), 6, 2, 16, 16, slot_padding=64)
    assert theirs.strides == ((2 * 256 + 64) * 4, 1024, 64, 4)
    gaps = np.lib.stride_tricks.as_strided(theirs[0, 1, 15, 15:], (5, 64), (theirs.strides[0], 4))[:, 1:]
    pool = StatePool.wrap(theirs)
    pool.allocate(3)
    problem = make_problem("kda", B=2, H=2, HV=2, K=16, V=16, slots=[1, 5])
    before = theirs.copy()
    _, state = kda_packed_decode(**problem | {"initial_state": pool[0]})
    assert state.ctypes.data == theirs.ctypes.data
    changed = [slot for slot in range(6) if not same_bits(theirs[slot], before[slot])]
    assert changed == [1, 5]
    assert (gaps == POISON).all()


def test_wrap_honours_a_pool_that_interleaves_with_something_else():
    buffer = aligned((5, 2, 2, 3, 8), fill=7)
    pool = StatePool.wrap(buffer[:, 0])
    pool.allocate(4)
    assert not buffer[1:, 0].any()
    assert (buffer[:, 1] == 7).all()
    assert (buffer[0] == 7).all()


def test_wrap_takes_layers_that_interleave():
    buffer = aligned((5, 3, 2, 3, 8), fill=7)  # [P, layers, HV, V, K]: all layers of a slot together
    pool = StatePool.wrap(buffer.swapaxes(0, 1))
    assert (pool.layers, pool.capacity) == (3, 4)
    slot = pool.allocate()
    assert not buffer[slot].any()
    assert (np.delete(buffer, slot, axis=0) == 7).all()


def test_wrap_sees_updates_from_both_sides_through_torch(torch):
    theirs = torch.full((5, 2, 3, 8), 7.0)
    pool = StatePool.wrap(theirs)
    assert pool.state.ctypes.data == theirs.data_ptr()
    slot = pool.allocate()
    assert not theirs[slot].any()
    pool[0][slot, 1, 2, 3] = 5
    assert theirs[slot, 1, 2, 3] == 5
    theirs[slot, 0, 0, 0] = 6
    assert pool[0][slot, 0, 0, 0] == 6


def test_wrap_honours_torch_strides(torch):
    problem = make_problem("kda", B=2, H=1, HV=2, K=16, V=8, slots=[1, 3], slot_padding=20)
    theirs = to_library(problem["initial_state"], torch)
    assert theirs.stride()[0] == 2 * 16 * 8 + 20
    pool = StatePool.wrap(theirs)
    kda_packed_decode(**problem | {"initial_state": pool[0]})
    kda_packed_decode(**problem)
    assert same_bits(theirs, problem["initial_state"])


def test_wrap_keeps_the_memory_alive(torch):
    pool = StatePool.wrap(torch.full((5, 2, 3, 8), 7.0))
    for _ in range(20):
        torch.full((5, 2, 3, 8), -1.0)  # the allocator reuses what is free
    assert (pool.state == 7).all()


def refused_by_wrap(array, error=OperandError):
    with pytest.raises(error) as caught:
        StatePool.wrap(array)
    return caught.value.code


def test_wrap_refuses_what_is_no_pool():
    assert refused_by_wrap(aligned((5, 2, 3))) == "KDA-STATE-RANK"
    assert refused_by_wrap(aligned((1, 1, 5, 2, 3, 8))) == "KDA-STATE-RANK"
    assert refused_by_wrap(aligned((1, 2, 3, 8))) == "KDA-POOL-GEOMETRY"  # slot 0 alone
    assert refused_by_wrap(aligned((0, 2, 3, 8))) == "KDA-POOL-GEOMETRY"
    assert refused_by_wrap(aligned((0, 5, 2, 3, 8))) == "KDA-POOL-GEOMETRY"
    assert refused_by_wrap(aligned((5, 2, 3, 8), np.float64)) == "KDA-STATE-DTYPE"
    assert refused_by_wrap([[1.0]], BridgeError) == "KDA-ARRAY-KIND"
    assert refused_by_wrap(None, BridgeError) == "KDA-ARRAY-KIND"


def test_wrap_refuses_read_only_memory():
    frozen = aligned((5, 2, 3, 8), fill=7)
    frozen.flags.writeable = False
    assert refused_by_wrap(frozen) == "KDA-ARRAY-READ-ONLY"
    assert (frozen == 7).all()


def test_wrap_refuses_jax_arrays(jax):
    assert (
        refused_by_wrap(jax.numpy.ones((5, 2, 3, 8), device=jax.devices("cpu")[0])) == "KDA-ARRAY-READ-ONLY"
    )


def strided(shape, strides):
    """A float32 array with these strides (in elements), over memory enough."""
    memory = aligned((64 + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)),))
    return np.lib.stride_tricks.as_strided(memory[16:], shape, [4 * stride for stride in strides])


@pytest.mark.parametrize(
    ("layer_stride", "slot_stride"),
    [
        (0, 48),  # one layer in two places
        (20, 48),  # the second layer begins inside the first one's slot
        (96, 48),  # layer 1 of slot 0 is layer 0 of slot 2
        (236, 48),
        (48, 92),  # slot 1 begins inside layer 1 of slot 0
        (-240, 48),
        (48, 0),
    ],
)
def test_wrap_refuses_slots_that_overlap(layer_stride, slot_stride):
    array = strided((2, 5, 2, 3, 8), (layer_stride, slot_stride, 24, 8, 1))
    assert refused_by_wrap(array) == "KDA-STATE-STRIDES"


@pytest.mark.parametrize(
    ("layer_stride", "slot_stride"), [(240, 48), (244, 48), (48, 96), (48, 100), (52, 108)]
)
def test_wrap_takes_slots_that_just_do_not_overlap(layer_stride, slot_stride):
    array = strided((2, 5, 2, 3, 8), (layer_stride, slot_stride, 24, 8, 1))
    array[...] = 7
    pool = StatePool.wrap(array)
    pool.allocate(2)
    assert (array[:, [0, 3, 4]] == 7).all()
    assert not array[:, [1, 2]].any()


def test_wrap_refuses_a_second_layer_off_the_boundary():
    assert refused_by_wrap(strided((2, 5, 2, 3, 8), (242, 48, 24, 8, 1))) == "KDA-STATE-ALIGNMENT"


def test_wrap_refuses_what_torch_expands(torch):
    assert refused_by_wrap(torch.zeros(5, 2, 3, 8).expand(2, 5, 2, 3, 8)) == "KDA-STATE-STRIDES"


def history(layers, slots, channels, dtype=ml_dtypes.bfloat16, fill=7.0):
    return np.full((layers, slots, channels, 3), fill, dtype)


@pytest.mark.parametrize("heads", [None, 1, 2])
def test_wrap_takes_a_conv_history_along(heads):
    theirs = aligned((2, 5, 2, 3, 8), fill=7)
    channels = 2 * (heads or 2) * 8 + 2 * 3
    conv = history(2, 5, channels).swapaxes(-1, -2).copy().swapaxes(-1, -2)  # channels fastest
    pool = StatePool.wrap(theirs, conv, num_key_heads=heads)
    assert np.shares_memory(pool.conv, conv)
    slot = pool.allocate()
    assert not conv[:, slot].any()
    assert (conv[:, slot + 1 :] == 7).all()
    pool.operands(1)["cs_v"][slot, -1, 2] = 5
    assert conv[1, slot, -1, 2] == 5
    assert f"conv [{channels}, 3] bfloat16" in repr(pool)
    assert pool.bytes_per_slot == 2 * (2 * 3 * 8 * 4 + channels * 3 * 2)


def test_wrap_takes_one_layer_of_both():
    conv = history(1, 5, 38)[0]
    pool = StatePool.wrap(aligned((5, 2, 3, 8)), conv)
    assert pool.conv.shape == (1, 5, 38, 3)


@pytest.mark.parametrize(
    ("conv", "code"),
    [
        (lambda state: history(2, 5, 38), "KDA-VERIFY-CONV-HISTORY"),
        (lambda state: history(1, 4, 38), "KDA-VERIFY-CONV-HISTORY"),
        (lambda state: history(1, 5, 37), "KDA-VERIFY-CONV-HISTORY"),
        (lambda state: history(1, 5, 38)[..., :2], "KDA-VERIFY-CONV-HISTORY"),
        (lambda state: history(1, 5, 38)[0, 0], "KDA-VERIFY-CONV-HISTORY"),
        (lambda state: history(1, 5, 38, np.float64), "KDA-ARRAY-DTYPE"),
        (lambda state: history(1, 5, 38)[:, ::-1], "KDA-ARRAY-NEGATIVE-STRIDE"),
        (lambda state: np.lib.stride_tricks.as_strided(history(1, 5, 38), strides=(0, 0, 6, 2)), "KDA-ARRAY-FOLDED"),
        (lambda state: np.broadcast_to(history(1, 1, 38), (1, 5, 38, 3)), "KDA-ARRAY-READ-ONLY"),
        (lambda state: state.base[: 4 * 5 * 38 * 3].view(np.float32).reshape(5, 38, 3), "KDA-ARRAY-OVERLAP"),
        (lambda state: [[1.0]], "KDA-ARRAY-KIND"),
    ],
)  # fmt: skip
def test_wrap_refuses_a_conv_history_that_does_not_fit(conv, code):
    state = aligned((20, 2, 3, 8), fill=7)[:5]
    with pytest.raises((OperandError, BridgeError)) as caught:
        StatePool.wrap(state, conv(state))
    assert caught.value.code == code
    assert (state == 7).all()


# check_state and is_valid_state


def view_with_odd_stride():
    """One slot: its stride is never stepped along, so it may be anything."""
    return np.lib.stride_tricks.as_strided(aligned((1, 2, 3, 8)), strides=(1234, 96, 32, 4))


VALID = {
    "dense": lambda: aligned((5, 2, 3, 8)),
    "empty pool": lambda: aligned((0, 2, 3, 8)),
    "one slot": lambda: aligned((1, 2, 3, 8)),
    "one slot, odd stride": view_with_odd_stride,
    "padded": lambda: aligned((5, 3, 3, 8))[:, :2],
    "padded by 4 elements": lambda: strided((5, 2, 3, 8), (52, 24, 8, 1)),
    "interleaved": lambda: aligned((5, 2, 2, 3, 8))[:, 1],
    "every other slot": lambda: aligned((9, 2, 3, 8))[::2],
    "later slots": lambda: aligned((9, 2, 3, 8))[3:],
    "V=1 with any stride": lambda: strided((5, 2, 1, 8), (48, 8, 5, 1)),
}
INVALID = {
    "transposed": (lambda: aligned((5, 2, 8, 8)).swapaxes(2, 3), "KDA-STATE-CONTIGUOUS"),
    "every other key": (lambda: aligned((5, 2, 3, 16))[..., ::2], "KDA-STATE-CONTIGUOUS"),
    "padded rows": (lambda: aligned((5, 2, 3, 16))[..., :8], "KDA-STATE-STRIDES"),
    "padded heads": (lambda: aligned((5, 2, 4, 8))[:, :, :3], "KDA-STATE-STRIDES"),
    "every other head": (lambda: aligned((5, 4, 3, 8))[:, ::2], "KDA-STATE-STRIDES"),
    "heads swapped": (lambda: aligned((5, 3, 2, 8)).swapaxes(1, 2), "KDA-STATE-STRIDES"),
    "slot stride 2 mod 4": (lambda: strided((5, 2, 3, 8), (50, 24, 8, 1)), "KDA-STATE-ALIGNMENT"),
    "odd offset": (lambda: aligned((5 * 48 + 4,))[1 : 5 * 48 + 1].reshape(5, 2, 3, 8), "KDA-STATE-ALIGNMENT"),
    "overlapping slots": (lambda: strided((5, 2, 3, 8), (44, 24, 8, 1)), "KDA-STATE-STRIDES"),
    "broadcast slots": (lambda: strided((5, 2, 3, 8), (0, 24, 8, 1)), "KDA-STATE-STRIDES"),
    "backwards": (lambda: aligned((5, 2, 3, 8))[::-1], "KDA-ARRAY-NEGATIVE-STRIDE"),
    "rank 3": (lambda: aligned((5, 2, 8)), "KDA-STATE-RANK"),
    "rank 5": (lambda: aligned((1, 5, 2, 3, 8)), "KDA-STATE-RANK"),
    "a number": (lambda: np.zeros((), np.float32), "KDA-STATE-RANK"),
    "float64": (lambda: aligned((5, 2, 3, 8), np.float64), "KDA-STATE-DTYPE"),
    "float16": (lambda: aligned((5, 2, 3, 8), np.float16), "KDA-STATE-DTYPE"),
    "bfloat16": (lambda: aligned((5, 2, 3, 8), ml_dtypes.bfloat16), "KDA-STATE-DTYPE"),
    "int32": (lambda: aligned((5, 2, 3, 8), np.int32), "KDA-STATE-DTYPE"),
    "other byte order": (lambda: aligned((5, 2, 3, 8), ">f4"), "KDA-STATE-DTYPE"),
    "other heads": (lambda: aligned((5, 3, 3, 8)), "KDA-STATE-LAYOUT"),
    "no heads": (lambda: aligned((5, 0, 3, 8)), "KDA-STATE-LAYOUT"),
    "K=6": (lambda: aligned((5, 2, 3, 6)), "KDA-STATE-LAYOUT"),
    "K=516": (lambda: aligned((2, 2, 3, 516)), "KDA-STATE-LAYOUT"),
    "read-only": (lambda: np.broadcast_to(aligned((1, 2, 3, 8)), (1, 2, 3, 8)), "KDA-ARRAY-READ-ONLY"),
}


@pytest.mark.parametrize("make", VALID.values(), ids=VALID)
def test_valid_states(make):
    array = make()
    check_state(array, 2)
    assert is_valid_state(array, 2) is True


@pytest.mark.parametrize(("make", "code"), INVALID.values(), ids=INVALID)
def test_invalid_states(make, code):
    array = make()
    assert is_valid_state(array, 2) is False
    with pytest.raises(OperandError) as caught:
        check_state(array, 2)
    assert caught.value.code == code
    assert caught.value.operand == "state"


@pytest.mark.parametrize("shape", [(5, 2, 0, 8), (5, 2, 3, 0)])
def test_a_state_has_values_and_keys(shape):
    assert is_valid_state(aligned(shape), 2) is False
    with pytest.raises(OperandError):
        check_state(aligned(shape), 2)


def test_check_state_knows_the_device():
    check_state(aligned((5, 2, 3, 8)), 2, device=-1)
    with pytest.raises(DeviceError) as caught:
        check_state(aligned((5, 2, 3, 8)), 2, device=0)
    assert caught.value.code == "KDA-STATE-DEVICE"
    assert "cuda:0" in str(caught.value)


@pytest.mark.parametrize(
    "thing", [None, 3, "state", [[[[1.0]]]], np.float32(3), object(), memoryview(b"1234"), list]
)
def test_what_is_no_array_is_no_valid_state(thing):
    assert is_valid_state(thing, 2) is False


def test_states_of_other_libraries_are_checked_like_any(torch, jax):
    state = torch.zeros(5, 2, 3, 8)
    check_state(state, 2)
    assert is_valid_state(state, 2)
    assert is_valid_state(torch.nn.Parameter(state), 2)
    assert not is_valid_state(state.swapaxes(1, 2), 2)
    assert not is_valid_state(state.double(), 2)
    assert not is_valid_state(state.to("meta"), 2)
    frozen = jax.numpy.zeros((5, 2, 3, 8), device=jax.devices("cpu")[0])
    assert not is_valid_state(frozen, 2)
    with pytest.raises(OperandError) as caught:
        check_state(frozen, 2)
    assert caught.value.code == "KDA-ARRAY-READ-ONLY"
    with pytest.raises(BridgeError):
        check_state([[1.0]], 2)


@pytest.mark.parametrize("heads", [None, "2", 2.5, -2])
def test_no_number_of_heads_makes_a_valid_state(heads):
    assert is_valid_state(aligned((5, 2, 3, 8)), heads) is False
