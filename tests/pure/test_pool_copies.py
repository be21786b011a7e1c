# SPDX-License-Identifier: Apache-2.0
"""Copies of slots: forks, snapshots, other projects' layouts; and a slot as the operations see it."""

import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from mtp_problems import make_mtp
from problems import make_problem, same_bits

import kda_cupy
from kda_cupy import (
    DeviceError,
    OperandError,
    PoolExhausted,
    SlotError,
    Snapshot,
    StatePool,
    kda_packed_decode,
)
from tests.fake_cupy import machine

HV, V, K, H = 2, 3, 8, 1


def make_pool(capacity=5, *, used=3, seed=0, **changes):
    """Random bits in every slot but 0; slots 1 to ``used`` are in use."""
    options = {"layers": 2, "num_key_heads": H, "activation_dtype": "bfloat16", "device": "cpu"} | changes
    pool = StatePool(capacity, HV, K, V, **options)
    pool.allocate(used)
    rng = np.random.default_rng(seed)
    for array in (pool.state, pool.conv):
        if array is not None:
            bits = rng.integers(0, 1 << 8 * array.itemsize, array.shape, np.uint64)
            array[:, 1:] = bits.astype(f"u{array.itemsize}").view(array.dtype)[:, 1:]
    return pool


def everything(pool):
    return [a.copy() for a in (pool.state, pool.conv) if a is not None], pool.slots_in_use.tolist()


def unchanged(pool, before):
    return all(map(same_bits, everything(pool)[0], before[0])) and everything(pool)[1] == before[1]


# Fork


def test_a_fork_is_a_copy_and_then_goes_its_own_way():
    pool = make_pool()
    before = everything(pool)
    beam = pool.fork(2)
    assert type(beam) is int
    assert beam == 4
    assert same_bits(pool.state[:, beam], pool.state[:, 2])
    assert same_bits(pool.conv[:, beam], pool.conv[:, 2])
    pool.state[:, beam] = 7
    pool.conv[:, beam] = 7
    for array, old in zip((pool.state, pool.conv), before[0], strict=True):
        rest = [0, 1, 2, 3, 5]
        assert same_bits(array[:, rest], old[:, rest])


def test_several_forks_are_all_or_nothing():
    pool = make_pool()
    before = everything(pool)
    with pytest.raises(PoolExhausted):
        pool.fork(1, 3)
    assert unchanged(pool, before)
    beams = pool.fork(1, 2)
    assert (beams.dtype, sorted(beams.tolist())) == (np.int32, [4, 5])
    for beam in beams:
        assert same_bits(pool.state[:, beam], pool.state[:, 1])
    assert pool.fork(1, 0).shape == (0,)


@pytest.mark.parametrize("slot", [0, 4, 5, 6, -1, 2**40])
def test_only_a_slot_in_use_can_be_forked(slot):
    pool = make_pool()
    before = everything(pool)
    with pytest.raises(SlotError):
        pool.fork(slot)
    assert unchanged(pool, before)


def test_forks_of_a_prefix_decode_as_the_sequence_itself():
    problem = make_problem("kda", B=1, slots=[1], P=4, K=16, V=8)
    pool = StatePool(3, 4, 16, 8, device="cpu")
    prefix = pool.allocate()
    pool[0][prefix] = problem["initial_state"][1]
    beams = pool.fork(prefix, 2)
    rows = {name: np.repeat(problem[name], 3, axis=0) for name in ("mixed_qkv", "a", "b")}
    rows |= {"initial_state": pool[0], "ssm_state_indices": np.array([prefix, *beams])}
    out, state = kda_packed_decode(**problem | rows)
    assert same_bits(out[1], out[0])
    assert same_bits(out[2], out[0])
    assert same_bits(state[beams[1]], state[prefix])


# Snapshots


@pytest.mark.parametrize("conv", [None, "bfloat16", "float32"])
def test_a_snapshot_is_a_real_copy_of_everything(conv):
    """A20: a rollback that copied no bytes."""
    pool = make_pool(activation_dtype=conv)
    kept = pool.snapshot([3, 1])
    assert kept.slots == (3, 1)
    assert len(kept) == 2
    channels = 2 * H * K + HV * V
    size = 2 * 2 * HV * V * K * 4 + (
        0 if conv is None else 2 * 2 * channels * 3 * (2 if conv[0] == "b" else 4)
    )
    assert kept.nbytes == size == 2 * pool.bytes_per_slot
    assert repr(kept) == f"<Snapshot of 2 slot(s), {size:,} bytes on cpu>"
    before = everything(pool)
    pool.state[:, 1:4] = np.nan
    if pool.conv is not None:
        pool.conv[:, 1:4] = 7
    assert same_bits(kept.arrays["state"], before[0][0][:, [3, 1]])
    pool.restore(kept)
    assert same_bits(pool.state[:, [1, 3]], before[0][0][:, [1, 3]])
    assert np.isnan(pool.state[:, 2]).all()
    if pool.conv is not None:
        assert same_bits(pool.conv[:, [1, 3]], before[0][1][:, [1, 3]])
        assert (pool.conv[:, 2] == 7).all()


def test_a_snapshot_goes_to_other_slots_and_pools_and_more_than_once():
    pool, other = make_pool(), make_pool(seed=1)
    kept = pool.snapshot([1, 2, 1])
    other.restore(kept, [3, 1, 2])
    assert same_bits(other.state[:, [3, 1, 2]], pool.state[:, [1, 2, 1]])
    assert same_bits(other.conv[:, [3, 1, 2]], pool.conv[:, [1, 2, 1]])
    other.restore(kept, np.array([2, 3, 1]))
    assert same_bits(other.state[:, [2, 3, 1]], pool.state[:, [1, 2, 1]])
    nothing = pool.snapshot([])
    assert (len(nothing), nothing.nbytes) == (0, 0)
    pool.restore(nothing)


def test_a_snapshot_outlives_its_pool():
    pool = make_pool()
    wanted = pool.state[:, 1].copy()
    kept = pool.snapshot(1)
    del pool
    assert same_bits(kept.arrays["state"][:, 0], wanted)


def test_the_negative_index_of_padding_never_wraps():
    """A1: -1 is Python's last slot."""
    pool = make_pool(used=5)
    before = everything(pool)
    kept = pool.snapshot([1, 3])
    for call in (
        lambda: pool.snapshot([-1, 3]),
        lambda: pool.restore(kept, [-1, 3]),
        lambda: pool.fork(-1),
        lambda: pool.release([-1, 3]),
        lambda: pool.export_state([-1, 3], layout="VK"),
        lambda: pool.import_state(np.ones((2, 2, HV, V, K), np.float32), [-1, 3], layout="VK"),
    ):
        with pytest.raises(SlotError):
            call()
    assert unchanged(pool, before)


def test_a_large_sentinel_is_not_folded_into_the_pool():
    """A5: 6947 modulo 26 is a live slot."""
    pool = make_pool(25, used=25)
    before = everything(pool)
    for call in (lambda: pool.snapshot([5, 6947]), lambda: pool.release([5, 6947]), lambda: pool.fork(6947)):
        with pytest.raises(SlotError, match="6947"):
            call()
    assert unchanged(pool, before)


@pytest.mark.parametrize("slots", [[1, 4], [0, 1], [1, 1], [1, 6], [1, 2, 3], [1], 1])
def test_a_restore_that_does_not_fit_changes_nothing(slots):
    pool = make_pool()
    kept = pool.snapshot([2, 3])
    before = everything(pool)
    with pytest.raises((SlotError, OperandError)):
        pool.restore(kept, slots)
    assert unchanged(pool, before)


def test_a_released_slot_is_not_restored_in_its_place():
    pool = make_pool()
    kept = pool.snapshot([2, 3])
    pool.release(3)
    before = everything(pool)
    with pytest.raises(SlotError) as caught:
        pool.restore(kept)
    assert caught.value.code == "KDA-POOL-NOT-IN-USE"
    assert unchanged(pool, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1},
        {"layers": 3},
        {"num_key_heads": 2},
        {"activation_dtype": None},
        {"activation_dtype": "float16"},
    ],
    ids=str,
)
def test_a_snapshot_of_another_geometry_is_refused(changes):
    pool, other = make_pool(), make_pool(**changes)
    for target, kept in ((pool, other.snapshot(1)), (other, pool.snapshot(1))):
        before = everything(target)
        with pytest.raises(OperandError) as caught:
            target.restore(kept, 1)
        assert caught.value.code == "KDA-POOL-SNAPSHOT"
        assert unchanged(target, before)


def test_a_snapshot_of_another_place_is_refused():
    pool = make_pool()
    kept = pool.snapshot(1)
    with pytest.raises(OperandError, match="on cuda:1"):
        pool.restore(Snapshot(kept.slots, kept.arrays, 1))


# Other projects' layouts


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dim", [(3, 8), (128, 128)])
def test_a_single_element_arrives_at_its_value_and_key(layers, dim):
    """C1, C3: at 128 x 128 a swap has the right shape."""
    values, keys = dim
    pool = StatePool(4, HV, keys, values, layers=layers, device="cpu")
    v, k = 2, min(70, keys - 1)
    theirs = np.zeros((layers, 2, HV, keys, values), np.float32)
    theirs[-1, 1, 1, k, v] = 5
    theirs = theirs if layers > 1 else theirs[0]
    slots = pool.import_state(theirs, layout="KV")
    assert slots.tolist() == [1, 2]
    assert np.argwhere(pool.state).tolist() == [[layers - 1, 2, 1, v, k]]
    assert pool.state[-1, 2, 1, v, k] == 5
    assert same_bits(pool.export_state(slots, layout="KV"), theirs)
    assert same_bits(pool.export_state(slots, layout="VK"), np.ascontiguousarray(theirs.swapaxes(-1, -2)))


def test_a_state_of_flash_linear_attention_decodes_on(torch):
    """[N, H, K, V] out of a prefill, one token here, and back."""
    problem = make_problem("kda", B=2, slots=[3, 1], P=4, K=16, V=8)
    prefill = torch.from_numpy(np.ascontiguousarray(problem["initial_state"][[3, 1]].swapaxes(-1, -2)))
    assert prefill.shape == (2, 4, 16, 8)
    wanted_out, wanted_state = kda_packed_decode(**problem)
    pool = StatePool(5, 4, 16, 8, device="cpu")
    pool.allocate(2)
    slots = pool.import_state(prefill, layout="KV")
    out, _ = kda_packed_decode(**problem | {"initial_state": pool[0], "ssm_state_indices": slots})
    assert same_bits(out, wanted_out)
    after = torch.from_numpy(pool.export_state(slots, layout="KV"))
    assert same_bits(after, np.ascontiguousarray(wanted_state[[3, 1]].swapaxes(-1, -2)))


def test_one_layer_after_the_other():
    pool = make_pool(used=0)
    states = np.random.default_rng(0).standard_normal((2, 2, HV, K, V), np.float32)
    pool.state[:, 1:] = np.nan
    pool.conv[:, 1:] = np.nan
    slots = pool.import_state(states[1], layout="KV", layer=1)
    assert not pool.state[0, slots].any()  # new slots are zero where nothing was imported
    assert not pool.conv[:, slots].any()
    assert pool.import_state(states[0], slots, layout="KV", layer=0).tolist() == slots.tolist()
    assert same_bits(pool.export_state(slots, layout="KV"), states)
    assert same_bits(pool.export_state(slots, layout="KV", layer=1), states[1])
    assert np.isnan(pool.state[:, 3:]).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_states_become_float32_exactly(dtype):
    bits = np.arange(2**16, dtype=np.uint16).view(dtype)
    theirs = bits[np.isfinite(bits.astype(np.float32))][:48_000].reshape(1000, HV, V, K)
    pool = StatePool(1000, HV, K, V, device="cpu")
    slots = pool.import_state(theirs, layout="VK")
    assert same_bits(pool[0][slots], theirs.astype(np.float32))


def test_a_view_of_any_strides_is_read():
    wide = np.random.default_rng(0).standard_normal((4, HV, V + 2, 2 * K), np.float32)
    theirs = wide[::2, :, 1 : V + 1, ::2]
    pool = StatePool(2, HV, K, V, device="cpu")
    assert same_bits(pool[0][pool.import_state(theirs, layout="VK")], np.ascontiguousarray(theirs))
    pool.import_state(np.broadcast_to(theirs[:1], theirs.shape), [1, 2], layout="VK")
    assert same_bits(pool[0][1], pool[0][2])


def test_an_export_is_a_copy_even_in_the_pools_own_layout():
    pool = make_pool(layers=1)
    out = pool.export_state([1, 2], layout="VK")
    wanted = out.copy()
    assert out.flags.c_contiguous
    pool.state[...] = 7
    assert same_bits(out, wanted)
    assert pool.export_state([], layout="KV").shape == (0, HV, K, V)
    assert pool.export_state(3, layout="KV").shape == (1, HV, K, V)


NEGATIVE = "KDA-ARRAY-NEGATIVE-STRIDE"


def state(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda pool: pool.import_state(state(2, 1, HV, K, V), layout="VK"), "KDA-STATE-LAYOUT"),
        (lambda pool: pool.import_state(state(1, HV, V, K), layout="VK"), "KDA-STATE-LAYOUT"),  # which layer?
        (lambda pool: pool.import_state(state(3, 1, HV, V, K), layout="VK"), "KDA-STATE-LAYOUT"),
        (lambda pool: pool.import_state(state(2, 1, HV, V, K), layout="VK", layer=0), "KDA-STATE-LAYOUT"),
        (lambda pool: pool.import_state(state(2, 1, 3, V, K), layout="VK"), "KDA-STATE-LAYOUT"),
        (lambda pool: pool.import_state(state(), layout="VK"), "KDA-STATE-LAYOUT"),
        (lambda pool: pool.import_state(state(2, 2, HV, V, K), [1], layout="VK"), "KDA-STATE-LAYOUT"),
        (lambda pool: pool.import_state(state(2, 2, HV, V, K), [1, 1], layout="VK"), "KDA-VALUE-SLOT-DUPLICATE"),
        (lambda pool: pool.import_state(state(2, 2, HV, V, K), [1, 4], layout="VK"), "KDA-POOL-NOT-IN-USE"),
        (lambda pool: pool.import_state(state(2, 3, HV, V, K), layout="VK"), "KDA-POOL-EXHAUSTED"),
        (lambda pool: pool.import_state(state(2, 1, HV, V, K, dtype=np.float64), layout="VK"), "KDA-ARRAY-DTYPE"),
        (lambda pool: pool.import_state(state(2, 1, HV, V, K, dtype=np.int32), layout="VK"), "KDA-ARRAY-DTYPE"),
        (lambda pool: pool.import_state(state(2, 1, HV, V, K)[:, ::-1, ::-1], layout="VK"), NEGATIVE),
        (lambda pool: pool.import_state(pool.state[:, :1], layout="VK"), "KDA-ARRAY-OVERLAP"),
        (lambda pool: pool.import_state([[1.0]], layout="VK"), "KDA-ARRAY-KIND"),
        (lambda pool: pool.import_state(state(2, 1, HV, V, K), layout="KV "), "KDA-POOL-LAYOUT"),
        (lambda pool: pool.import_state(state(2, 1, HV, V, K), layout=None), "KDA-POOL-LAYOUT"),
        (lambda pool: pool.export_state([1], layout="vk"), "KDA-POOL-LAYOUT"),
        (lambda pool: pool.export_state([1, 4], layout="VK"), "KDA-POOL-NOT-IN-USE"),
        (lambda pool: pool.export_state([1], layout="VK", layer=2), "KDA-POOL-GEOMETRY"),
        (lambda pool: pool.export_state([1], layout="VK", layer=-1), "KDA-POOL-GEOMETRY"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_changes_nothing(call, code):
    pool = make_pool()
    before = everything(pool)
    with pytest.raises(kda_cupy.KdaError) as caught:
        call(pool)
    assert caught.value.code == code
    assert unchanged(pool, before)


def test_a_layout_is_never_guessed():
    pool = make_pool()
    with pytest.raises(TypeError):
        pool.import_state(state(2, 1, HV, V, K))
    with pytest.raises(TypeError):
        pool.export_state([1])


def test_a_state_on_a_gpu_is_not_read_by_a_pool_in_host_memory():
    pool = make_pool()
    with machine() as cupy, pytest.raises(DeviceError) as caught:
        pool.import_state(cupy.asarray(state(2, 1, HV, V, K)), layout="VK")
    assert caught.value.code == "KDA-STATE-DEVICE"
    assert "`array` must be in host memory" in str(caught.value)


class Counting(np.ndarray):
    """Counts what would be a launch each on a GPU."""

    launches = 0

    def __setitem__(self, key, value):
        Counting.launches += 1
        super().__setitem__(key, value)

    def fill(self, value):
        Counting.launches += 1
        super().fill(value)


@pytest.mark.parametrize("layers", [1, 69])
def test_a_run_of_slots_is_one_strided_copy_an_array_whatever_the_layers(layers):
    pool = make_pool(9, used=0, layers=layers)
    contents = pool._contents
    contents._bits = {name: bits.view(Counting) for name, bits in contents._bits.items()}

    def launches(call):
        Counting.launches = 0
        result = call()
        return Counting.launches, result

    assert launches(lambda: pool.allocate(4))[0] == 2  # state and conv
    assert launches(lambda: pool.fork(1, 2))[0] == 2
    assert launches(lambda: pool.restore(pool.snapshot([2, 3, 4])))[0] == 2  # the snapshot writes elsewhere
    assert launches(lambda: pool.restore(pool.snapshot([2, 4, 5])))[0] == 4


# A slot as the operations see it


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_and_commit_work_on_the_pools_own_arrays(snapshots, dtype):
    """The same bits as with arrays of one's own, in the layer that is meant; forks of the result too."""
    problem = make_mtp(N=2, t=3, H=1, HV=2, dtype=dtype, mode="snapshots" if snapshots else "rings", P=4)
    pool = StatePool(
        3,
        2,
        layers=2,
        device="cpu",
        num_key_heads=1,
        activation_dtype=dtype,
        verify_rows=len(problem["intermediate_conv_q"]),
        verify_tokens=3,
        snapshots=snapshots,
    )
    mine = pool.operands(1)
    assert mine.keys() <= problem.keys()
    pool.allocate(3)
    for name in ("recurrent_state", "cs_q", "cs_k", "cs_v"):
        mine[name][...] = problem[name]
    out = kda_cupy.kda_decode_mtp(**problem | mine)
    wanted = kda_cupy.kda_decode_mtp(**problem)
    assert same_bits(out, wanted)
    vectors = ("ssm_state_indices", "intermediate_state_indices")
    commit = {name: problem[name] for name in vectors} | {"accept_lens": np.array([2, 3])}
    arrays = (*mine, "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta", "intermediate_ssm")
    kda_cupy.kda_commit(**commit, **{name: problem[name] for name in arrays if problem.get(name) is not None})
    pool_wide = pool.operands()
    pool_wide["recurrent_state"][0] = 3
    kda_cupy.kda_commit(**commit, **{name: array[1] for name, array in pool_wide.items()})
    for name in ("recurrent_state", "cs_q", "cs_k", "cs_v"):
        assert same_bits(pool.operands(1)[name], problem[name]), name
    assert (pool.state[0] == 3).all()


def test_a_commit_of_all_layers_takes_what_the_pool_hands_out():
    pool = StatePool(3, 2, layers=2, device="cpu", activation_dtype="float32", verify_rows=2, verify_tokens=3)
    slots = pool.allocate(2)
    before = pool.state.copy()
    kda_cupy.kda_commit(
        accept_lens=np.zeros(2, np.int32),
        ssm_state_indices=slots,
        intermediate_state_indices=np.arange(2),
        **pool.operands(),
    )
    assert same_bits(pool.state, before)


def test_channels_lie_next_to_each_other_and_split_into_q_k_and_v():
    pool = StatePool(2, 4, 8, 12, layers=2, device="cpu", num_key_heads=2, activation_dtype="float32")
    assert pool.conv.shape == (2, 3, 2 * 2 * 8 + 4 * 12, 3)
    assert pool.conv.strides[-2:] == (4, 4 * 80)
    pool.conv[1, 2, :, 0] = np.arange(80)
    parts = [pool.operands(1)[f"cs_{letter}"] for letter in "qkv"]
    assert [part.shape for part in parts] == [(3, 16, 3), (3, 16, 3), (3, 48, 3)]
    assert np.concatenate([part[2, :, 0] for part in parts]).tolist() == list(range(80))
    assert all(np.shares_memory(part, pool.conv) for part in parts)


def test_check_raises_what_launches_recorded():
    problem = make_problem("kda", B=1, slots=[1], P=4, K=16, V=8)
    pool = StatePool(3, 4, 16, 8, device="cpu")
    pool.check()
    kda_packed_decode(**problem | {"initial_state": pool[0], "ssm_state_indices": np.array([4])})
    with pytest.raises(SlotError, match="slot 4"):
        pool.check()
    pool.check()


# Threads


def test_four_threads_decode_ten_thousand_rounds_each():
    """Allocate, decode, release: no slot is lost, shared, or handed out dirty."""
    turns = 10_000
    pool = StatePool(6, 1, 4, 4, device="cpu")
    problem = make_problem("gdn", B=1, H=1, HV=1, K=4, V=4, slots=[1], P=7, dtype="float32")
    fresh = problem | {"initial_state": pool[0], "ssm_state_indices": np.array([pool.allocate()])}
    wanted, _ = kda_cupy.gdn_packed_decode(**fresh)
    pool.release(1)
    wrong, rounds = [], []

    def work():
        for _ in range(turns):
            slot = pool.allocate()
            operands = problem | {"initial_state": pool[0], "ssm_state_indices": np.array([slot])}
            out, _ = kda_cupy.gdn_packed_decode(**operands)
            if out.tobytes() != wanted.tobytes():
                wrong.append(slot)
            pool[0][slot] = np.nan
            pool.release(slot)
        rounds.append(turns)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert sum(rounds) == 4 * turns
    assert not wrong
    assert sorted(pool.allocate(6).tolist()) == [1, 2, 3, 4, 5, 6]
    assert not pool.state[:, 0].any()


# More than 2**31 elements


def test_slots_beyond_32_bits():
    """A11. Host memory is taken only where something is written, so 8.6 GB of address space are enough."""
    try:
        pool = StatePool(4099, 32, layers=1, device="cpu")
    except MemoryError:
        pytest.skip("no address space for 8.6 GB")
    assert pool.state.size > 2**31
    pool._ledger._free = [4098, 2, 4099, 4097]  # a list of 4099 slots would be zeroed one and all
    last, next_to_last = pool.allocate(), pool.allocate()
    assert (last, next_to_last) == (4097, 4099)
    pool[0][4099] = np.arange(32 * 128 * 128, dtype=np.float32).reshape(32, 128, 128)
    beam = pool.fork(4099)
    assert beam == 2
    assert same_bits(pool[0][2], pool[0][4099])
    kept = pool.snapshot([4099, 4097])
    pool[0][4099] = 7
    pool.restore(kept)
    assert same_bits(pool[0][4099], pool[0][2])
    assert not pool[0][4097:4099].any()
    assert not pool[0][3].any()
