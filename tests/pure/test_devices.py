# SPDX-License-Identifier: Apache-2.0
"""Several GPUs, none of them here: nothing lands on device 0 because nobody said otherwise.

The fake CuPy refuses what CUDA would: a kernel or an event on a device that is not the current one. What needs real
memory and clocks is asked in tests/gpu.
"""

import gc
import threading
import weakref

import numpy as np
import pytest
from fake_cupy import CompileException, machine, on_gpu
from mtp_problems import commit_operands, make_mtp
from problems import make_problem
from producers import Producer

from kda_cupy import (
    CompileError,
    DeviceError,
    OperandError,
    SlotError,
    bind,
    bridge,
    check_errors,
    guard,
    kda_commit,
    kda_decode_mtp,
    kda_packed_decode,
)

CUDA, MANAGED = 2, 13


def packed(device, kind=None, dtype="float32"):
    """Operands of a packed decode on a device; of another library if ``kind`` is its DLPack device type."""
    return there(make_problem("kda", B=2, H=1, HV=2, K=16, V=8, dtype=dtype), device, kind)


def there(problem, device, kind=None):
    def move(value):
        if not isinstance(value, np.ndarray):
            return value
        return on_gpu(value, device) if kind is None else Abroad(value, kind, device)

    return {name: move(value) for name, value in problem.items()}


class Abroad(Producer):
    """An array of another library on a GPU. Remembers what was current when it was asked for, and for which stream."""

    def __init__(self, array, kind, device):
        super().__init__(array, device=(kind, device))
        self.asked = []

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        import cupy

        assert dl_device is None
        self.asked.append((cupy.cuda.runtime.getDevice(), stream))
        return super().__dlpack__(stream=stream, max_version=max_version)


def verify(device, kind=None):
    return there(make_mtp(2, 3, 1, 2, "float32"), device, kind)


def commit(device, kind=None):
    return there(commit_operands(make_mtp(2, 3, 1, 2, "float32"), [1, 3]), device, kind)


OPERATIONS = {
    "decode": (kda_packed_decode, packed),
    "verify": (kda_decode_mtp, verify),
    "commit": (kda_commit, commit),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)
foreign_or_not = pytest.mark.parametrize("kind", [None, CUDA, MANAGED], ids=["CuPy", "CUDA", "managed"])


@every_operation
@foreign_or_not
@pytest.mark.parametrize("current", [0, 1, 2])
def test_everything_happens_on_the_device_of_the_operands(name, kind, current):
    operation, operands = OPERATIONS[name]
    with machine(gpus=3) as cupy, cupy.cuda.Device(current):
        operation(**operands(1, kind))
        assert {device for _, device, _ in cupy.log} == {1}
        assert {what for what, _, _ in cupy.log} >= {"compile", "allocate", "launch"}
        assert ("record" in {what for what, _, _ in cupy.log}) == (kind is not None)
        assert cupy.cuda.runtime.getDevice() == current


@every_operation
@foreign_or_not
def test_each_device_has_kernels_and_records_of_its_own(name, kind):
    operation, operands = OPERATIONS[name]
    with machine(gpus=3) as cupy:
        for device in (2, 0, 2, 1, 0, 1):
            operation(**operands(device, kind))
        compiled = [device for what, device, _ in cupy.log if what == "compile"]
        launched = [device for what, device, _ in cupy.log if what == "launch"]
        assert (compiled, launched) == ([2, 0, 1], [2, 0, 2, 1, 0, 1])
        assert {device: record.data.device_id for device, record in guard._records.items()} == {
            0: 0,
            1: 1,
            2: 2,
        }


@every_operation
def test_bound_calls_go_to_their_own_device_from_anywhere(name):
    operation, operands = OPERATIONS[name]
    with machine(gpus=2) as cupy:
        calls = [bind(operation, **operands(device)) for device in (0, 1)]
        cupy.log.clear()
        for current in (0, 1):
            with cupy.cuda.Device(current):
                for call in calls:
                    call()
        thread = threading.Thread(target=calls[1])  # a new thread is on device 0
        thread.start()
        thread.join()
        assert [(what, device) for what, device, _ in cupy.log] == [
            ("launch", device) for device in (0, 1, 0, 1, 1)
        ]


@pytest.mark.parametrize("kind", [CUDA, MANAGED])
def test_producers_are_asked_on_their_device_for_the_stream_that_is_current_there(kind):
    """torch exports from its current device only, and a stream of another device would order nothing."""
    with machine(gpus=3):
        for device, stream in ((2, 0x2000), (1, 0x1000), (0, 1)):  # DLPack calls the legacy default stream 1
            operands = packed(device, kind=kind)
            kda_packed_decode(**operands)
            for name, value in operands.items():
                if isinstance(value, Abroad):
                    assert value.asked == [(device, stream)], name


def test_outputs_are_allocated_beside_the_operands():
    with machine(gpus=2):
        assert kda_packed_decode(**packed(1))[0].data.device_id == 1
        assert kda_packed_decode(**packed(1, kind=CUDA))[0].data.device_id == 1


@pytest.mark.parametrize("kind", [None, CUDA], ids=["CuPy", "CUDA"])
@pytest.mark.parametrize("lone", ["mixed_qkv", "A_log", "initial_state", "ssm_state_indices"])
def test_one_operand_on_another_device_is_refused_by_name(lone, kind):
    with machine(gpus=2) as cupy:
        operands = packed(1, kind=kind)
        operands[lone] = packed(0, kind=kind)[lone]
        with pytest.raises(DeviceError) as caught:
            kda_packed_decode(**operands)
        assert caught.value.code == "KDA-PACKED-DEVICES"
        assert "cuda:0" in str(caught.value)
        assert "cuda:1" in str(caught.value)
        assert "launch" not in {what for what, _, _ in cupy.log}


def test_errors_are_kept_apart():
    with machine(gpus=3) as cupy:
        for device, slot in ((1, 40), (2, 50)):
            note = np.array((1, 1, 1, 0, 0, 5, slot, 33), guard.RECORD)
            guard.record_on(device).values[:] = note.reshape(1).view(np.uint8)
        guard.record_on(0)
        check_errors(0)
        with pytest.raises(SlotError, match="slot 50 in kda_packed_decode on cuda:2"):
            check_errors(2)
        check_errors(2)
        with pytest.raises(SlotError, match="slot 40 in kda_packed_decode on cuda:1"):
            check_errors()
        assert [device for what, device, _ in cupy.log if what == "synchronize"] == [0, 2, 2, 0, 1]
        check_errors()


def test_what_a_gpu_can_do_is_asked_of_that_gpu():
    with machine(gpus=2, capability=("90", "75")):
        kda_packed_decode(**packed(0, dtype="bfloat16"))
        with pytest.raises(DeviceError) as caught:
            kda_packed_decode(**packed(1, dtype="bfloat16"))
        assert caught.value.code == "KDA-ARRAY-BF16-SUPPORT"
        kda_packed_decode(**packed(1, dtype="float16"))


def test_a_failed_compilation_speaks_of_its_own_gpu_and_does_not_stick():
    broken = []

    def fail():
        if broken:
            raise CompileException(broken.pop())

    with machine(gpus=2, capability=("90", "130"), fail=fail):
        broken.append("nvrtc: error: invalid value for --gpu-architecture (-arch)")
        with pytest.raises(CompileError, match=r"Got compute capability 13\.0") as caught:
            kda_packed_decode(**packed(1))
        assert caught.value.code == "KDA-COMPILER-ARCH"
        kda_packed_decode(**packed(0))
        kda_packed_decode(**packed(1))  # NVRTC was mended, say


def test_a_busy_gpu_does_not_hold_the_operands_of_another_one():
    def call(device):
        operands = packed(device, kind=CUDA)
        kda_packed_decode(**operands)
        return weakref.ref(operands["mixed_qkv"])

    with machine(gpus=2) as cupy:
        busy = call(0)
        cupy.streams[0].events[-1].done = False
        idle = call(1)
        call(0), call(1)
        gc.collect()
        assert busy() is not None
        assert idle() is None
        cupy.streams[0].events[0].done = True
        call(0)
        gc.collect()
        assert busy() is None


def test_nothing_is_kept_or_waited_for_while_a_graph_is_captured_on_that_device():
    with machine(gpus=2) as cupy:
        kda_packed_decode(**packed(1, kind=CUDA))
        cupy.streams[1].capturing = True
        operands = packed(1, kind=CUDA)
        kda_packed_decode(**operands)
        assert len(cupy.streams[1].events) == 1
        assert {
            asked for value in operands.values() if isinstance(value, Abroad) for asked in value.asked
        } == {(1, -1)}
        kda_packed_decode(**packed(0, kind=CUDA))
        assert len(cupy.streams[0].events) == 1


def test_threads_on_several_devices_meet_in_nothing():
    """E8: eight threads, four devices, one compilation each, every launch where its operands are."""
    wrong, start = [], threading.Barrier(8)

    def work(number):
        operands = packed(number % 4, kind=CUDA if number % 2 else None)
        start.wait()
        try:
            for _ in range(200):
                kda_packed_decode(**operands)
        except Exception as error:
            wrong.append(error)

    with machine(gpus=4) as cupy:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sorted(device for what, device, _ in cupy.log if what == "compile") == [0, 1, 2, 3]
        launched = [device for what, device, _ in cupy.log if what == "launch"]
        assert [launched.count(device) for device in range(4)] == [400] * 4


@foreign_or_not
def test_an_empty_batch_stays_on_its_device(kind):
    """Arrays without elements have no memory to tell a device by: DLPack's word counts."""
    problem = make_problem("kda", B=0, P=3, H=1, HV=2, K=16, V=8, dtype="float32")
    with machine(gpus=2) as cupy:
        out, _ = kda_packed_decode(**there(problem, 1, kind))
        assert (out.shape, out.data.device_id) == ((0, 1, 2, 8), 1)
        assert {device for _, device, _ in cupy.log} == {1}
        assert "launch" not in {what for what, _, _ in cupy.log}


def test_views_carry_the_device_of_their_memory():
    with machine(gpus=4):
        view = bridge.adopt("a", Abroad(np.ones((2, 3), np.float32), CUDA, 3))
        assert view.data.device_id == 3
        with pytest.raises(OperandError):
            bridge.adopt("a", Abroad(np.ones((2, 3), np.float32)[:, ::-1], CUDA, 3))
