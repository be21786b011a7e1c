# SPDX-License-Identifier: Apache-2.0
"""When memory, the compiler, the disk or a stream fails in the middle: what is lost is said, and nothing else is.

Without a GPU: the fake CuPy for launches, NumPy pools for copies. tests/gpu/test_faults.py does it for real.
"""

import shutil

import numpy as np
import pytest
from fake_cupy import CompileException, fake_cubin, machine, on_gpu
from mtp_problems import commit_operands, make_mtp
from problems import make_problem
from step_problems import make_step

import kda_cupy
from kda_cupy import CompileError, StatePool, cubins, streams
from kda_cupy.config import CommitConfig
from kda_cupy.pool import contents, files, geometry, layouts

CALLS = {
    "packed": (kda_cupy.kda_packed_decode, lambda: make_problem("kda", B=2, K=16, V=8, dtype="float32")),
    "step": (kda_cupy.kda_decode_step, lambda: make_step("kda", B=2, dtype="float32")),
    "verify": (kda_cupy.kda_decode_mtp, lambda: make_mtp(N=2, dtype="float32")),
    "commit": (kda_cupy.kda_commit, lambda: commit_operands(make_mtp(N=2, dtype="float32"), [1, 1])),
}
CALL = pytest.mark.parametrize("name", CALLS)


class OutOfMemoryError(MemoryError):
    """Named as CuPy's."""


def nth(n, cause, then):
    """A function that fails the n-th time it is called."""
    calls = iter(range(1 << 20))

    def run(*arguments, **options):
        if next(calls) == n:
            raise cause
        return then(*arguments, **options)

    return run


def on_device(problem):
    return {
        name: on_gpu(value) if isinstance(value, np.ndarray) else value for name, value in problem.items()
    }


def bits(problem):
    return {name: value.tobytes() for name, value in problem.items() if isinstance(value, np.ndarray)}


# ---- launches -------------------------------------------------------------------------------------------------------


@CALL
@pytest.mark.parametrize("n", [0, 1])
def test_out_of_memory_in_any_allocation_of_a_call(name, n, monkeypatch):
    """The output and the error record are all it allocates; the same call works when there is memory again."""
    operation, make = CALLS[name]
    problem = make()
    before = bits(problem)
    with machine() as cupy:
        moved = on_device(problem)
        with monkeypatch.context() as patch:
            count = nth(n, OutOfMemoryError("out of memory"), lambda *_: None)
            for place, method in ((cupy.ndarray, "__init__"), (cupy, "zeros")):
                real = getattr(place, method)

                def limited(*arguments, real=real, **options):
                    count()
                    return real(*arguments, **options)

                patch.setattr(place, method, limited)
            allocations = 1 if name == "commit" else 2
            if n < allocations:
                with pytest.raises(OutOfMemoryError):
                    operation(**moved)
                assert not [each for each in cupy.log if each[0] == "launch"]
        operation(**moved)
        assert [each for each in cupy.log if each[0] == "launch"]
    assert bits(problem) == before


@CALL
def test_a_compilation_that_fails_is_tried_again(name):
    operation, make = CALLS[name]
    problem = make()
    before, broken = bits(problem), [True]

    def fail():
        if broken[0]:
            raise CompileException("error: out of disk")

    with machine(fail=fail) as cupy:
        moved = on_device(problem)
        for _ in range(2):
            with pytest.raises(CompileError):
                operation(**moved)
        broken[0] = False
        operation(**moved)
        assert len([each for each in cupy.log if each[0] == "launch"]) == 1
    assert bits(problem) == before


def test_a_cache_folder_that_vanishes_between_two_looks(tmp_path, monkeypatch):
    """Found, and gone before it is read; gone before it is loaded; gone as a whole."""
    config = CommitConfig("float32", True, 1000)
    place = tmp_path / "kernels"
    monkeypatch.setenv(cubins.VARIABLE, str(place))
    path = cubins.store(config, "sm_90", fake_cubin(), place)
    real = cubins.damage

    def vanish(found):
        shutil.rmtree(place)
        return real(found)

    monkeypatch.setattr(cubins, "damage", vanish)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert cubins.find(config, "sm_90") is None
    monkeypatch.setattr(cubins, "damage", real)
    with pytest.warns(RuntimeWarning, match="where there is no folder"):
        assert cubins.find(config, "sm_90") is None
    assert not path.exists()


def test_a_stream_in_an_error_state_leaves_no_lock_behind():
    """What orders copies of slots fails before it, or behind it; the next copy finds nothing locked."""

    class Broken(RuntimeError):
        pass

    def fail(event=None):
        raise Broken("an illegal memory access was encountered")

    with machine() as cupy:
        stream = cupy.streams[0]
        with pytest.raises(Broken):
            stream.record, healthy = fail, stream.record
            with streams.copying_slots(0):
                pass
        stream.record = healthy
        assert streams._lock.acquire(timeout=1)
        streams._lock.release()
        with streams.copying_slots(0):
            pass


# ---- pools ----------------------------------------------------------------------------------------------------------


def make_pool():
    """Two slots of five in use, full of numbers."""
    pool = StatePool(5, 2, 8, 4, layers=2, device="cpu", activation_dtype="float32")
    rng = np.random.default_rng(0)
    for slot in pool.allocate(2):
        for array in (pool.state, pool.conv):
            array[:, slot] = rng.standard_normal(array[:, slot].shape)
    return pool


def held(pool, slots=(1, 2)):
    return [array[:, slot].tobytes() for slot in slots for array in (pool.state, pool.conv)]


@pytest.mark.parametrize("n", range(4))
def test_a_pool_that_does_not_fit_is_no_pool(n, monkeypatch):
    """Out of memory in each of its arrays, and then there is room."""
    with monkeypatch.context() as patch:
        patch.setattr(geometry, "_host_zeros", nth(n, MemoryError("no room"), geometry._host_zeros))
        with pytest.raises(MemoryError):
            StatePool(3, 2, device="cpu", activation_dtype="bfloat16", verify_rows=2, verify_tokens=3)
    assert StatePool(3, 2, device="cpu").free_slots == 3


TAKING = {
    "allocate": lambda pool, path: pool.allocate(2),
    "fork": lambda pool, path: pool.fork(1, 2),
    "load": lambda pool, path: pool.load(path),
    "import": lambda pool, path: pool.import_state(np.ones((2, 2, 2, 8, 4), np.float32), layout="KV"),
}
OVERWRITING = {
    "restore": lambda pool, path: pool.restore(pool.snapshot([1]), [2]),
    "load": lambda pool, path: pool.load(path, [2]),
    "import": lambda pool, path: pool.import_state(np.ones((2, 1, 2, 8, 4), np.float32), [2], layout="KV"),
}


def break_copies(patch, n):
    """The n-th copy of slots fails."""
    cause = OutOfMemoryError("out of memory")
    for module, name in (
        (contents, "runs"),
        (contents, "numbered_runs"),
        (layouts, "write"),
        (files, "_stage"),
    ):
        if hasattr(module, name):
            patch.setattr(module, name, nth(n, cause, getattr(module, name)))


@pytest.mark.parametrize("name", TAKING)
@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_copy_that_fails_takes_no_slot(name, n, tmp_path, monkeypatch):
    pool, path = make_pool(), tmp_path / "states"
    other = StatePool(5, 2, 8, 4, layers=2, device="cpu", activation_dtype="float32")
    other.allocate(4)
    other.save(path, [3, 4])
    before = held(pool)
    with monkeypatch.context() as patch:
        break_copies(patch, n)
        try:
            TAKING[name](pool, path)
        except OutOfMemoryError as cause:
            assert not getattr(cause, "__notes__", [])  # nothing is lost
            assert pool.free_slots == 3 and pool.slots_in_use.tolist() == [1, 2]
        else:
            assert pool.free_slots == 1
    assert held(pool) == before
    assert len(pool.allocate(pool.free_slots)) in (1, 3)


@pytest.mark.parametrize("name", OVERWRITING)
def test_a_copy_that_fails_half_way_says_which_slots_are_lost(name, tmp_path, monkeypatch):
    pool, path = make_pool(), tmp_path / "states"
    pool.save(path, [1])
    before = held(pool, [1])
    failures = 0
    for n in range(4):
        untouched = held(pool, [2])
        with monkeypatch.context() as patch:
            break_copies(patch, n)
            try:
                OVERWRITING[name](pool, path)
            except OutOfMemoryError as cause:
                failures += 1
                notes = getattr(cause, "__notes__", [])
                assert not notes or "slots 2 were being overwritten" in notes[0]
                assert notes or held(pool, [2]) == untouched
        assert held(pool, [1]) == before and pool.slots_in_use.tolist() == [1, 2]
    assert failures
    OVERWRITING[name](pool, path)


def test_a_snapshot_that_finds_no_memory_changes_nothing(monkeypatch):
    pool = make_pool()
    before = held(pool)
    with monkeypatch.context() as patch:
        patch.setattr(contents, "empty_beside", nth(1, OutOfMemoryError("no"), contents.empty_beside))
        with pytest.raises(OutOfMemoryError):
            pool.snapshot([1, 2])
    assert held(pool) == before and pool.free_slots == 3
