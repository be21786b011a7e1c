# SPDX-License-Identifier: Apache-2.0
"""Faults that only a GPU can have: its memory at an end, a context in an error state, a process killed in a replay."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from problems import make_problem, same_bits, to

import kda_cupy
from kda_cupy import StatePool

cupy = pytest.importorskip("cupy")
ROOT = Path(__file__).parents[2]


class Exhausted:
    """An allocator that has room for so many allocations."""

    def __init__(self, room):
        self.room = room

    def __call__(self, size):
        if self.room <= 0:
            raise cupy.cuda.memory.OutOfMemoryError(size, 0, 0)
        self.room -= 1
        return cupy.get_default_memory_pool().malloc(size)


def make_pool():
    pool = StatePool(5, 2, 8, 4, layers=2, device=0, activation_dtype="float32")
    rng = np.random.default_rng(0)
    for slot in pool.allocate(2):
        for array in (pool.state, pool.conv):
            array[:, slot] = cupy.asarray(rng.standard_normal(array[:, slot].shape, np.float32))
    return pool


def held(pool, slots=(1, 2)):
    return [array[:, slot].get().tobytes() for slot in slots for array in (pool.state, pool.conv)]


@pytest.mark.parametrize("room", range(5))
def test_out_of_memory_while_a_pool_is_made(room):
    def make():
        return StatePool(3, 2, device=0, activation_dtype="bfloat16", verify_rows=2, verify_tokens=3)

    with cupy.cuda.using_allocator(Exhausted(room)), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        make()
    assert make().free_slots == 3


@pytest.mark.parametrize("room", range(3))
@pytest.mark.parametrize("name", ["fork", "snapshot", "load", "load over", "allocate"])
def test_out_of_memory_in_a_copy_takes_nothing(name, room, tmp_path):
    """It raises and changes nothing, or it needed no more than there was."""
    pool, path = make_pool(), tmp_path / "states"
    pool.save(path, [1])
    other = (
        make_pool()
        if name == "load over"
        else StatePool(5, 2, 8, 4, layers=2, device=0, activation_dtype="float32")
    )
    calls = {
        "fork": lambda: pool.fork(1),
        "snapshot": lambda: pool.snapshot([2, 1]),
        "load": lambda: other.load(path),
        "load over": lambda: other.load(path, [2]),
        "allocate": lambda: pool.allocate(2),
    }
    before, its = held(pool), held(other)
    free = pool.free_slots, other.free_slots
    cupy.cuda.Device().synchronize()
    try:
        with cupy.cuda.using_allocator(Exhausted(room)):
            calls[name]()
    except cupy.cuda.memory.OutOfMemoryError:
        assert (pool.free_slots, other.free_slots) == free
        assert held(other) == its
        calls[name]()
    assert held(pool) == before


@pytest.mark.parametrize("room", [0])
def test_out_of_memory_for_an_output_changes_no_state(room):
    problem = to(make_problem("kda", B=2), cupy)
    kda_cupy.kda_packed_decode(**problem)
    before = problem["initial_state"].copy()
    with cupy.cuda.using_allocator(Exhausted(room)), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        kda_cupy.kda_packed_decode(**problem)
    assert same_bits(problem["initial_state"], before)


BROKEN = """
import sys
import cupy
from kda_cupy import StatePool
pool = StatePool(4, 2, 8, 4, device=0)
pool.allocate(2)
path = sys.argv[1]
pool.save(path)
free = pool.free_slots
crash = cupy.RawKernel('extern "C" __global__ void crash(float* x) { *x = 1; }', "crash")
crash((1,), (1,), (cupy.uint64(16),))
try:
    cupy.cuda.Device().synchronize()
except cupy.cuda.runtime.CUDARuntimeError:
    pass
calls = {"allocate": lambda: pool.allocate(1), "fork": lambda: pool.fork(1), "save": lambda: pool.save(path)}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        print(name, type(error).__name__, pool.free_slots == free)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_a_context_in_an_error_state_takes_no_slot_and_no_file(tmp_path):
    path = tmp_path / "states"
    ran = subprocess.run(
        [sys.executable, "-c", BROKEN, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line.split() for line in ran.stdout.splitlines()]
    assert [each[0] for each in said] == ["allocate", "fork", "save"], ran.stderr
    assert all(each[2] == "True" for each in said), ran.stdout
    assert (
        len(StatePool(4, 2, 8, 4, device=0).load(path)) == 2
    )  # the old file, and the GPU is everybody else's still
    assert [each.name for each in tmp_path.iterdir()] == ["states"]


REPLAYING = """
import sys
sys.path[:0] = ["tests"]
import cupy
from problems import make_problem, to
import kda_cupy
from kda_cupy import StatePool
pool = StatePool(8, 4, device=0)
slots = pool.allocate(5)
problem = to(make_problem("kda", B=5), cupy)
problem["initial_state"], problem["ssm_state_indices"] = pool[0], cupy.asarray(slots)
bound = kda_cupy.bind(kda_cupy.kda_packed_decode, **problem)
stream = cupy.cuda.Stream(non_blocking=True)
cupy.cuda.Device().synchronize()
with stream:
    stream.begin_capture()
    bound()
    graph = stream.end_capture()
    for n in range(1 << 30):
        for _ in range(100):
            graph.launch(stream)
        pool.save(sys.argv[1])
        if n == 2:
            print("replaying", flush=True)
"""


@pytest.mark.parametrize("milliseconds", [0, 37])
def test_a_process_killed_in_the_middle_of_replays_and_saves(milliseconds, tmp_path):
    path = tmp_path / "states"
    with subprocess.Popen(
        [sys.executable, "-c", REPLAYING, path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "replaying\n"
        time.sleep(milliseconds / 1000)
        child.send_signal(signal.SIGKILL)
    pool = StatePool(8, 4, device=0)
    slots = pool.load(path)
    assert len(slots) == 5 and np.isfinite(pool[0][cupy.asarray(slots)].get()).all()
