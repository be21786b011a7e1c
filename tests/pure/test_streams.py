# SPDX-License-Identifier: Apache-2.0
"""Copies of slots and launches are ordered, whatever their streams: on streams that only remember what came before."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_cupy import streams
from tests.fake_cupy import machine


class Event:
    def __init__(self, disable_timing=False):
        self.past = frozenset()


class Stream:
    """Work is a name; ``past`` is all work that is done before what is queued next begins."""

    def __init__(self, ptr):
        self.ptr, self.past = ptr, frozenset()
        self.capturing = False
        self.done = True
        self.waits = 0

    def record(self, event):
        assert not self.capturing
        event.past = self.past
        return event

    def wait_event(self, event):
        assert not self.capturing
        self.waits += 1
        self.past |= event.past

    def is_capturing(self):
        return self.capturing

    def work(self, name):
        before = self.past
        self.past |= {name}
        return before


@pytest.fixture
def gpu():
    with machine(gpus=2) as cupy:
        cupy.cuda.Event = Event
        current = [None]
        cupy.cuda.get_current_stream = lambda: current[-1]
        cupy.cuda.runtime.deviceSynchronize = lambda: pytest.fail("the host waited")
        yield SimpleNamespace(cupy=cupy, current=current)


def launch(gpu, stream, name, device=0):
    streams.before_launch(device, stream)
    return stream.work(name)


def copy(gpu, stream, name, device=0):
    gpu.current[-1] = stream
    with streams.copying_slots(device):
        return stream.work(name)


def test_a_copy_waits_for_a_launch_on_another_stream(gpu):
    """A21."""
    one, two = Stream(10), Stream(20)
    launch(gpu, one, "decode")
    assert copy(gpu, two, "snapshot") == {"decode"}


def test_a_launch_on_a_stream_that_was_seen_waits_for_a_copy(gpu):
    """A13: the stream that zeroes a slot is not the one that decodes."""
    one, two = Stream(10), Stream(20)
    launch(gpu, one, "decode")
    copy(gpu, two, "zero")
    assert "zero" in launch(gpu, one, "decode again")


def test_a_launch_on_a_stream_that_nobody_has_seen_waits_for_a_copy(gpu):
    one, two = Stream(10), Stream(20)
    copy(gpu, one, "zero")
    assert launch(gpu, two, "decode") == {"zero"}


@given(
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 1)), max_size=40),
)
def test_any_copy_comes_after_all_before_it_and_before_all_after_it(calls):
    with machine(gpus=2) as cupy:
        cupy.cuda.Event = Event
        current = [None]
        cupy.cuda.get_current_stream = lambda: current[-1]
        each = [[Stream(100 + 10 * n + device) for n in range(4)] for device in range(2)]
        issued, copies = [set(), set()], [set(), set()]
        gpu = SimpleNamespace(current=current)
        for number, (is_copy, which, device) in enumerate(calls):
            stream = each[device][which]
            if is_copy:
                assert copy(gpu, stream, number, device) == issued[device]
                copies[device].add(number)
            else:
                assert launch(gpu, stream, number, device) >= copies[device]
            issued[device].add(number)


def test_one_stream_waits_for_nothing(gpu):
    only = Stream(0)
    for number in range(3):
        launch(gpu, only, f"decode {number}")
        copy(gpu, only, f"zero {number}")
    assert only.waits == 0


def test_a_launch_on_a_known_stream_is_one_look_up(gpu):
    """It must not even ask whether the stream is capturing: that is a call to the driver."""
    known = Stream(10)
    launch(gpu, known, "first")
    known.is_capturing = lambda: pytest.fail("asked")
    launch(gpu, known, "second")


def test_a_capture_is_left_alone(gpu):
    one, two, capturing = Stream(10), Stream(20), Stream(30)
    copy(gpu, one, "zero")
    capturing.capturing = True
    assert launch(gpu, capturing, "captured") == set()
    launch(gpu, two, "decode")
    assert copy(gpu, one, "snapshot") == {"zero", "decode"}
    assert copy(gpu, capturing, "captured copy") == {"captured"}
    capturing.capturing = False
    assert {"zero", "snapshot"} <= launch(gpu, capturing, "eager")
    capturing.capturing = True  # seen before, and capturing now
    copy(gpu, one, "again")


def test_streams_that_ran_dry_are_forgotten_and_busy_ones_are_not(gpu):
    busy = Stream(1)
    busy.done = False
    launch(gpu, busy, "long")
    for number in range(3 * streams.MOST_REMEMBERED):
        launch(gpu, Stream(100 + number), number)
    assert len(streams._seen[0]) <= streams.MOST_REMEMBERED + 1
    assert "long" in copy(gpu, Stream(3), "snapshot")


def test_a_copy_that_fails_still_orders_what_was_queued(gpu):
    one, two = Stream(10), Stream(20)
    launch(gpu, two, "decode")
    gpu.current[-1] = one
    with pytest.raises(MemoryError), streams.copying_slots(0):
        one.work("half a copy")
        raise MemoryError
    assert "half a copy" in launch(gpu, two, "decode again")


def test_a_stream_that_differs_by_thread_makes_the_host_wait(gpu):
    waited = []
    gpu.cupy.cuda.runtime.deviceSynchronize = lambda: waited.append(1)
    per_thread, one = Stream(2), Stream(10)
    launch(gpu, per_thread, "decode")
    copy(gpu, one, "snapshot")
    assert len(waited) == 2  # before and after
    assert per_thread.waits == 0


def test_a_stream_that_its_owner_has_destroyed_is_forgotten(gpu):
    class CUDARuntimeError(RuntimeError):
        pass

    def gone():
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle")

    waited = []
    gpu.cupy.cuda.runtime.CUDARuntimeError = CUDARuntimeError
    gpu.cupy.cuda.runtime.deviceSynchronize = lambda: waited.append(1)
    foreign, one, two = Stream(10), Stream(20), Stream(30)
    launch(gpu, foreign, "decode")
    launch(gpu, two, "decode too")
    foreign.is_capturing = gone
    for _ in range(2):
        assert "decode too" in copy(gpu, one, "snapshot")
    assert len(waited) == 1
    assert foreign.ptr not in streams._seen[0]


def test_devices_are_apart(gpu):
    one, two = Stream(10), Stream(20)
    launch(gpu, one, "decode on 0", device=0)
    assert copy(gpu, two, "snapshot on 1", device=1) == set()
    assert launch(gpu, Stream(30), "decode on 0 too", device=0) == set()
