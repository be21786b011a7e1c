# SPDX-License-Identifier: Apache-2.0
"""Copies of slots and launches on several streams: nobody in these tests records an event or waits.

A spinning kernel keeps one stream busy while the other side is queued; each round would read or keep something wrong
if it did not wait for it.
"""

import threading

import numpy as np
import pytest
from problems import make_problem, same_bits, to, to_host

from kda_cupy import StatePool, bind, kda_packed_decode

cupy = pytest.importorskip("cupy")

ROUNDS = 100
SPIN_CYCLES = 6_000_000  # some 3 ms: longer than a round takes the host
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {}
}
"""


@pytest.fixture(scope="module")
def spin():
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))  # compile
    cupy.cuda.Device().synchronize()
    return lambda: kernel((1,), (1,), (np.int64(SPIN_CYCLES),))


@pytest.fixture
def decode():
    """A pool with one slot in use, a decode of it, and what it turns a given state into."""
    problem = make_problem("kda", B=1, slots=[1], P=4)
    start = cupy.asarray(np.ascontiguousarray(problem["initial_state"][1]))
    _, wanted = kda_packed_decode(**to(problem, cupy))
    fresh = to(problem, cupy)
    fresh["initial_state"][...] = 0
    _, from_zeros = kda_packed_decode(**fresh)
    pool = StatePool(3, 4)
    slot = pool.allocate()
    operands = to(problem, cupy) | {"initial_state": pool[0]}
    operands["out"] = cupy.empty((1, 1, 4, 128), operands["mixed_qkv"].dtype)
    call = bind(kda_packed_decode, **operands)
    call()
    warm_up(pool, slot)
    return pool, slot, call, start, to_host(wanted)[1], to_host(from_zeros)[1]


def warm_up(pool, slot):
    """Whatever CuPy compiles or loads at a first call would outlast the spinning kernel."""
    pool.restore(pool.snapshot(slot))
    pool.release(pool.fork(slot))
    for layout in ("KV", "VK"):
        pool.import_state(pool.export_state(slot, layout=layout), [slot], layout=layout)
    cupy.full((1, 4, 128, 128), -1, np.float32)
    cupy.cuda.Device().synchronize()


def streams(count=2):
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


def settle(pool, slot, state):
    """A known state in the slot, and nothing in flight."""
    pool[0][slot] = state
    cupy.cuda.Device().synchronize()


def still_busy(stream):
    assert not stream.done, "the spinning kernel was over too early for this round to mean anything"


def test_a_snapshot_waits_for_the_kernel_that_writes(decode, spin):
    """A21: decode on one stream, snapshot on another one, no event between them."""
    pool, slot, call, start, wanted, _ = decode
    writer, reader = streams()
    for round_ in range(ROUNDS):
        settle(pool, slot, start)
        with writer:
            spin()
            call()
        with reader:
            kept = pool.snapshot(slot)
        still_busy(writer)
        reader.synchronize()
        assert same_bits(to_host(kept.arrays["state"])[0, 0], wanted), round_


def test_a_fork_waits_too_and_the_next_launch_waits_for_it(decode, spin):
    """The fork is of the state before the second decode."""
    pool, slot, call, start, wanted, _ = decode
    writer, copier = streams()
    for round_ in range(ROUNDS):
        settle(pool, slot, start)
        with writer:
            spin()
            call()
        with copier:
            beam = pool.fork(slot)
        with writer:
            call()
        still_busy(writer)
        cupy.cuda.Device().synchronize()
        assert same_bits(to_host(pool[0][beam]), wanted), round_
        pool.release(beam)


@pytest.mark.parametrize("known", [True, False])
def test_a_launch_waits_for_the_slot_to_be_zeroed(decode, spin, known):
    """A13: the stream that zeroes is busy, and not the one that decodes; whether it has decoded before or not."""
    pool, slot, call, _, _, from_zeros = decode
    copier, known_stream = streams()
    pool.release(slot)
    for round_ in range(ROUNDS):
        settle(pool, slot, cupy.nan)
        decoder = known_stream if known else streams(1)[0]
        with copier:
            spin()
            assert pool.allocate() == slot
        with decoder:
            call()
        still_busy(copier)
        decoder.synchronize()
        assert same_bits(to_host(pool[0][slot]), from_zeros), round_
        pool.release(slot)


def test_a_slot_is_not_zeroed_under_a_kernel_that_still_writes_to_it(decode, spin):
    """Released and handed out again while its last token is in flight."""
    pool, slot, call, start, _, _ = decode
    writer, copier = streams()
    for round_ in range(ROUNDS):
        settle(pool, slot, start)
        with writer:
            spin()
            call()
        pool.release(slot)
        with copier:
            assert pool.allocate() == slot
        still_busy(writer)
        cupy.cuda.Device().synchronize()
        assert not pool[0][slot].any(), round_


def test_a_snapshot_may_be_dropped_as_soon_as_it_is_restored(decode, spin):
    """F10: its memory came from one stream's share of CuPy's pool and is read on another one."""
    pool, slot, _, start, _, _ = decode
    owner, copier = streams()
    for round_ in range(ROUNDS):
        settle(pool, slot, start)
        with owner:
            kept = pool.snapshot(slot)
        owner.synchronize()
        settle(pool, slot, 0)
        with copier:
            spin()
            pool.restore(kept)
        del kept
        with owner:
            others = [cupy.full((1, 1, 4, 128, 128), -1, np.float32) for _ in range(4)]
        still_busy(copier)
        cupy.cuda.Device().synchronize()
        assert same_bits(pool[0][slot], start), round_
        del others


def test_an_imported_array_may_be_dropped_too(decode, spin):
    pool, slot, _, start, _, _ = decode
    owner, copier = streams()
    for round_ in range(ROUNDS):
        settle(pool, slot, 0)
        with owner:
            theirs = start[None].copy()
        owner.synchronize()
        with copier:
            spin()
            pool.import_state(theirs, [slot], layout="VK")
        del theirs
        with owner:
            others = [cupy.full((1, 4, 128, 128), -1, np.float32) for _ in range(4)]
        still_busy(copier)
        cupy.cuda.Device().synchronize()
        assert same_bits(pool[0][slot], start), round_
        del others


def test_an_exported_state_waits_for_the_kernel_that_writes(decode, spin):
    pool, slot, call, start, wanted, _ = decode
    writer, reader = streams()
    for round_ in range(ROUNDS // 5):
        settle(pool, slot, start)
        with writer:
            spin()
            call()
        with reader:
            out = pool.export_state(slot, layout="KV")
        still_busy(writer)
        reader.synchronize()
        assert same_bits(to_host(out)[0], np.ascontiguousarray(wanted.swapaxes(-1, -2))), round_


def test_a_file_holds_what_was_queued_before(decode, spin, tmp_path):
    pool, slot, call, start, wanted, _ = decode
    writer, reader = streams()
    settle(pool, slot, start)
    with writer:
        spin()
        call()
    with reader:
        pool.save(tmp_path / "states")
    other = StatePool(3, 4, device="cpu")
    assert other.load(tmp_path / "states").tolist() == [slot]
    assert same_bits(other[0][slot], wanted)


def test_a_new_pool_is_zero_for_whoever_comes_first(spin):
    problem = make_problem("kda", B=1, slots=[1], P=4)
    fresh = to(problem, cupy)
    fresh["initial_state"][...] = 0
    _, wanted = kda_packed_decode(**fresh)
    maker, decoder = streams()
    operands = to(problem, cupy)
    for round_ in range(ROUNDS // 5):
        with maker:  # what this stream has had it gets again
            dirty = cupy.full((1, 4, 4, 128, 128), cupy.nan, np.float32)
        cupy.cuda.Device().synchronize()
        del dirty
        with maker:
            spin()
            pool = StatePool(3, 4)
        with decoder:
            kda_packed_decode(**operands | {"initial_state": pool[0]})
        still_busy(maker)
        cupy.cuda.Device().synchronize()
        assert same_bits(pool[0][1], wanted[1]), round_


def test_a_captured_decode_is_left_alone(decode):
    """Capturing asks for nothing that a capture cannot do, and the graph replays what was captured."""
    pool, slot, call, start, wanted, _ = decode
    (stream,) = streams(1)
    pool.fork(slot)  # a copy that a new stream would wait for
    settle(pool, slot, start)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        graph.launch(stream)
    kept = pool.snapshot(slot)
    cupy.cuda.Device().synchronize()
    assert same_bits(to_host(pool[0][slot]), wanted)
    assert len(kept) == 1


def test_four_threads_decode_ten_thousand_rounds_each_without_waiting():
    """Allocate, decode, release on four streams, nobody synchronises: no slot is lost, shared, or handed out dirty."""
    turns = 10_000
    problem = make_problem("gdn", B=1, H=1, HV=1, K=64, V=64, slots=[1], P=8)
    from kda_cupy import gdn_packed_decode

    fresh = to(problem, cupy)
    fresh["initial_state"][...] = 0
    wanted, _ = gdn_packed_decode(**fresh)
    pool = StatePool(6, 1, 64)
    slots = cupy.arange(7, dtype=np.int32)
    operands = to(problem, cupy) | {"initial_state": pool[0]}
    outs = [cupy.zeros((turns, 1, 1, 64), wanted.dtype) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    finished = []

    def work(me):
        with cupy.cuda.Stream(non_blocking=True):
            for turn in range(turns):
                slot = pool.allocate()
                row = outs[me][turn : turn + 1]
                gdn_packed_decode(**operands | {"ssm_state_indices": slots[slot : slot + 1], "out": row})
                pool[0][slot].fill(cupy.nan)
                pool.release(slot)
        finished.append(me)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cupy.cuda.Device().synchronize()
    assert sorted(finished) == [0, 1, 2, 3]
    host = to_host(wanted).tobytes()
    for out in outs:
        assert to_host(out).tobytes() == host * turns
    assert sorted(pool.allocate(6).tolist()) == [1, 2, 3, 4, 5, 6]
    assert not pool[0][0].any()
