# SPDX-License-Identifier: Apache-2.0
"""Copies of slots on a GPU: a pool there and one in host memory live through the same calls and agree to the bit."""

import contextlib

import numpy as np
import pytest
from problems import POISON, make_problem, same_bits, to, to_host

from kda_cupy import DeviceError, OperandError, SlotError, StatePool, kda_packed_decode

cupy = pytest.importorskip("cupy")

HV, V, K, H = 2, 3, 8, 1
GIB = 2**30


def twins(capacity=9, *, layers=2, conv="bfloat16", seed=0):
    """A pool on the GPU and one in host memory, every bit of both random and equal, NaN included."""
    options = {"layers": layers, "num_key_heads": H, "activation_dtype": conv}
    pools = StatePool(capacity, HV, K, V, **options), StatePool(capacity, HV, K, V, device="cpu", **options)
    fill(pools, seed)
    return pools


def fill(pools, seed):
    rng = np.random.default_rng(seed)
    here, there = pools
    for name in ("state", "conv"):
        array = getattr(there, name)
        if array is not None:
            kind = np.dtype(f"u{array.itemsize}")
            bits = rng.integers(0, 1 << 8 * array.itemsize, array.shape, np.uint64).astype(kind)
            bits[:, 0] = 0
            array.view(kind)[...] = bits
            getattr(here, name).view(kind)[...] = cupy.asarray(bits)


def agree(pools):
    here, there = pools
    assert here.slots_in_use.tolist() == there.slots_in_use.tolist()
    assert repr(here).partition(" on ")[0] == repr(there).partition(" on ")[0]
    assert same_bits(here.state, there.state)
    if there.conv is not None:
        assert same_bits(here.conv, there.conv)
    return True


def both(pools, call):
    return [call(pool) for pool in pools]


@pytest.mark.parametrize("conv", [None, "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_life_of_two_pools(conv, layers, tmp_path):
    pools = twins(layers=layers, conv=conv)
    both(pools, lambda pool: pool.allocate(6))
    assert agree(pools)
    fill(pools, 1)
    both(pools, lambda pool: pool.release([5, 2, 3]))
    both(pools, lambda pool: pool.fork(4))
    both(pools, lambda pool: pool.fork(1, 3))
    assert agree(pools)
    kept = both(pools, lambda pool: pool.snapshot([6, 1, 4]))
    assert kept[0].nbytes == kept[1].nbytes
    for name, array in kept[1].arrays.items():
        assert isinstance(kept[0].arrays[name], cupy.ndarray)
        assert same_bits(kept[0].arrays[name], array)
    fill(pools, 2)
    for pool, snapshot in zip(pools, kept, strict=True):
        pool.restore(snapshot)
        pool.restore(snapshot, [4, 6, 1])
    assert agree(pools)
    for number, pool in enumerate(pools):
        pool.save(tmp_path / f"{number}")
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    saved = pools[0].slots_in_use.tolist()
    fill(pools, 3)
    both(pools, lambda pool: pool.load(tmp_path / "0", saved[::-1]))
    assert agree(pools)
    new = twins(layers=layers, conv=conv, seed=4)
    assert both(new, lambda pool: pool.load(tmp_path / "0").tolist()) == [saved, saved]
    assert agree(new)


@pytest.mark.parametrize("size", [1, HV * V * K * 4 * 2, 10**9])
def test_files_in_pieces(size, tmp_path, monkeypatch):
    monkeypatch.setattr("kda_cupy.pool.contents.PIECE_BYTES", size)
    pools = twins()
    both(pools, lambda pool: pool.allocate(9))
    fill(pools, 1)
    slots = [3, 4, 5, 9, 1, 2]
    pools[0].save(tmp_path / "states", slots)
    fill(pools, 2)
    both(pools, lambda pool: pool.load(tmp_path / "states", slots[::-1]))
    assert agree(pools)


def test_a_cut_file_changes_nothing(tmp_path):
    pools = twins()
    both(pools, lambda pool: pool.allocate(3))
    pools[0].save(tmp_path / "states")
    whole = (tmp_path / "states").read_bytes()
    (tmp_path / "states").write_bytes(whole[:-1])
    with pytest.raises(OperandError):
        pools[0].load(tmp_path / "states", [1, 2, 3])
    assert agree(pools)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("layers", [1, 2])
def test_states_of_other_projects(layers, layout, dtype):
    pools = twins(layers=layers)
    tail = (HV, K, V) if layout == "KV" else (HV, V, K)
    shape = (layers, 3, *tail) if layers > 1 else (3, *tail)
    source = make_problem("kda", B=int(np.prod(shape)), H=1, HV=1, K=4, V=4, dtype=dtype)["b"].reshape(shape)
    on_gpu = to({"source": source}, cupy)["source"]
    slots = [
        pool.import_state(array, layout=layout).tolist()
        for pool, array in zip(pools, (on_gpu, source), strict=True)
    ]
    assert slots == [[1, 2, 3]] * 2
    assert agree(pools)
    last = layers - 1
    both(
        pools,
        lambda pool: pool.import_state(
            pool.export_state([3, 1], layout="VK", layer=last), [1, 2], layout="VK", layer=last
        ),
    )
    assert agree(pools)
    exported = both(pools, lambda pool: pool.export_state([2, 1, 3], layout=layout))
    assert exported[0].flags.c_contiguous
    assert same_bits(*exported)


def test_a_single_element_arrives_at_its_value_and_key():
    """C1: at 128 x 128 a swap has the right shape."""
    pool = StatePool(3, HV)
    theirs = cupy.zeros((2, HV, 128, 128), np.float32)
    theirs[1, 1, 70, 3] = 5
    slots = pool.import_state(theirs, layout="KV")
    assert np.argwhere(to_host(pool.state)).tolist() == [[0, slots[1], 1, 3, 70]]
    assert same_bits(pool.export_state(slots, layout="KV"), theirs)


def test_states_of_torch_decode_on(torch):
    """A prefill of flash-linear-attention: [N, H, K, V] in torch's memory."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    problem = make_problem("kda", B=2, slots=[3, 1], P=4)
    _, wanted = kda_packed_decode(**to(problem, cupy))
    prefill = torch.from_numpy(np.ascontiguousarray(problem["initial_state"][[3, 1]].swapaxes(-1, -2))).cuda()
    pool = StatePool(5, 4)
    slots = pool.import_state(prefill, layout="KV")
    operands = to(problem, cupy) | {"initial_state": pool[0], "ssm_state_indices": cupy.asarray(slots)}
    kda_packed_decode(**operands)
    got = torch.from_dlpack(pool.export_state(slots, layout="KV"))
    assert same_bits(got, np.ascontiguousarray(to_host(wanted)[[3, 1]].swapaxes(-1, -2)))
    half = pool.import_state(prefill.bfloat16(), layout="KV")
    assert same_bits(pool.export_state(half, layout="KV"), prefill.bfloat16().float())


def test_torch_sees_what_happens_in_its_padded_memory(torch):
    """C7: state and conv history are slices of torch's buffers; nothing between the slots is touched."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    slot, channels = HV * V * K, 2 * H * K + HV * V
    raw = torch.full((2, 6, slot + 4), POISON, device="cuda")
    conv = torch.full((2, 6, 4, channels), 7.0, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    theirs = raw[..., :slot].unflatten(-1, (HV, V, K))
    pool = StatePool.wrap(theirs, conv[:, :, :3].transpose(-1, -2), num_key_heads=H)
    assert pool.state.data.ptr == raw.data_ptr()
    assert pool.conv.data.ptr == conv.data_ptr()
    assert pool.allocate(2).tolist() == [1, 2]
    pool.state[:, 2] = 5
    pool.conv[:, 2] = 6
    beam = pool.fork(2)
    kept = pool.snapshot([1, 2])
    pool.restore(kept, [2, 1])
    cupy.cuda.Device().synchronize()
    assert (raw[..., slot:] == POISON).all()
    assert (conv[:, :, 3] == 7).all()
    assert (theirs[:, [1, beam]] == 5).all()
    assert (conv[:, [1, beam], :3] == 6).all()
    assert not theirs[:, 2].any()
    assert (theirs[:, [0, 4, 5]] == POISON).all()


def test_states_elsewhere_are_refused():
    here, there = twins()
    for pool, array in (
        (here, np.ones((2, 1, HV, V, K), np.float32)),
        (there, cupy.ones((2, 1, HV, V, K), np.float32)),
    ):
        with pytest.raises(DeviceError) as caught:
            pool.import_state(array, layout="VK")
        assert caught.value.code == "KDA-STATE-DEVICE"
    for pool in (here, there):
        pool.allocate()
    with pytest.raises(OperandError) as caught:
        here.restore(there.snapshot(1))
    assert caught.value.code == "KDA-POOL-SNAPSHOT"
    assert agree((here, there))


def test_a_view_of_the_pool_is_no_source_for_it():
    pool = StatePool(3, HV, K, V)
    slots = pool.allocate(2)
    with pytest.raises(OperandError) as caught:
        pool.import_state(pool[0][1:3], slots, layout="VK")
    assert caught.value.code == "KDA-ARRAY-OVERLAP"


def test_a_pool_for_a_budget_stays_in_it():
    cupy.get_default_memory_pool().free_all_blocks()
    before = cupy.get_default_memory_pool().used_bytes()
    budget = 50_000_001
    pool = StatePool.for_budget(
        budget, 4, layers=3, activation_dtype="bfloat16", verify_rows=4, verify_tokens=4, num_key_heads=2
    )
    used = cupy.get_default_memory_pool().used_bytes() - before
    assert used <= budget
    assert pool.nbytes + pool.bytes_per_slot + 8 * 512 > budget


def test_check_raises_what_launches_recorded():
    pool = StatePool(3, 4)
    with contextlib.suppress(SlotError):  # of a test before this one
        pool.check()
    problem = to(make_problem("kda", B=1, slots=[4], P=5), cupy) | {"initial_state": pool[0]}
    kda_packed_decode(**problem)
    with pytest.raises(SlotError, match="slot 4"):
        pool.check()
    pool.check()


# More than 2**31 elements


@pytest.fixture
def free_gpu_memory():
    cupy.get_default_memory_pool().free_all_blocks()
    yield cupy.cuda.runtime.memGetInfo()[0]
    cupy.get_default_memory_pool().free_all_blocks()


def test_copies_beyond_32_bits(free_gpu_memory):
    """A11: slots whose offset is past 2**31 elements, and copies that are larger than that themselves."""
    if free_gpu_memory < 36 * GIB:
        pytest.skip(f"needs 36 GiB, {free_gpu_memory / GIB:.1f} are free")
    pool = StatePool(4200, 32)
    pool.allocate(4099)
    marks = cupy.arange(4201, dtype=np.float32)[:, None, None, None]
    pool[0][...] = marks
    pool[0][0] = 0
    beam = pool.fork(4099)
    assert beam == 4100
    assert (pool[0][beam] == 4099).all()
    kept = pool.snapshot(range(1, 4100))
    assert kept.arrays["state"].size > 2**31
    pool[0][1:4100] = -1
    pool.restore(kept)
    firsts = pool[0][:, 0, 0, 0].get()
    lasts = pool[0][:, 31, 127, 127].get()
    wanted = np.arange(4201, dtype=np.float32)
    wanted[4100] = 4099
    assert firsts.tolist() == lasts.tolist() == wanted.tolist()
    del kept
    out = pool.export_state([1, 4098, 2, 4099], layout="KV")
    assert out[:, 31, 127, 127].get().tolist() == [1, 4098, 2, 4099]
    pool.import_state(out[::-1].copy(), [1, 4098, 2, 4099], layout="KV")
    assert pool[0][4099, 31, 127, 127] == 1
    assert pool[0][4098, 0, 0, 0] == 2


# Several GPUs


def test_copies_on_another_gpu_than_the_current_one(tmp_path):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    pool = StatePool(4, HV, K, V, device=1, activation_dtype="bfloat16")
    pool.allocate(2)
    with cupy.cuda.Device(1):
        pool.state[:, 1] = 5
        pool.state[:, 2] = 6
    kept = pool.snapshot([1, 2])
    beam = pool.fork(2)
    pool.restore(kept, [2, 1])
    pool.save(tmp_path / "states")
    assert pool.export_state(1, layout="KV").data.device_id == 1
    assert {array.data.device_id for array in kept.arrays.values()} == {1}
    other = StatePool(4, HV, K, V, device="cpu", activation_dtype="bfloat16")
    assert other.load(tmp_path / "states").tolist() == [1, 2, 3]
    assert other.state[0, :4, 0, 0, 0].tolist() == [0, 6, 5, 6]
    assert beam == 3
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(0), pytest.raises(DeviceError):
        pool.import_state(cupy.ones((1, HV, V, K), np.float32), layout="VK")
