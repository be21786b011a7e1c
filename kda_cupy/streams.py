# SPDX-License-Identifier: Apache-2.0
"""Which streams this package has launched on, so that copies of slots and launches never race.

A launch waits for nothing but its own stream. A copy of slots (zeroing, fork, snapshot, restore, ...) is rare, so it
pays for order: it comes after everything that was launched before on the same GPU, whatever the stream, and before
everything that is launched later. Events do that; the host does not wait.

What the package cannot see it cannot order: replays of a CUDA graph, kernels of other libraries. They are ordered by
the stream they run on, as everything in CUDA is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

MOST_REMEMBERED: Final = 64
"""Streams of a GPU; of more, those that have run dry are forgotten. Remembering keeps a stream from being destroyed."""
_PER_THREAD_DEFAULT: Final = 2
"""The handle of a stream that is another one in every thread: no event of ours can stand for it."""

_seen: dict[int, dict[int, Any]] = {}
"""By GPU: the streams that were launched on, by their handles."""
_last_copy: dict[int, Any] = {}
"""By GPU: the event after the last copy of slots, for streams that nobody had seen then."""
_lock = threading.Lock()


def before_launch(device: int, stream: Any) -> None:
    """Note the stream of a launch. Hot path: one look-up, unless the stream is new."""
    seen = _seen.get(device)
    if seen is None or stream.ptr not in seen:
        _greet(device, stream)


def _greet(device: int, stream: Any) -> None:
    if stream.is_capturing():  # it cannot wait for what is outside its graph
        return
    with _lock:
        copied = _last_copy.get(device)
        if copied is not None:
            stream.wait_event(copied)
        _remember(device, stream)


def _remember(device: int, stream: Any) -> None:
    seen = _seen.setdefault(device, {})
    if len(seen) >= MOST_REMEMBERED:
        for handle, other in list(seen.items()):
            del seen[handle]  # first, so that its next launch comes here
            if not other.done:
                seen[handle] = other
    seen[stream.ptr] = stream


@contextmanager
def copying_slots(device: int) -> Iterator[None]:
    """On ``device``, what is queued on the current stream inside comes between the launches before and after."""
    import cupy

    with cupy.cuda.Device(device):
        ours = cupy.cuda.get_current_stream()
        if ours.is_capturing():
            yield
            return
        with _lock:
            for other in _others(device, ours):
                ours.wait_event(other.record(cupy.cuda.Event(disable_timing=True)))
        try:
            yield
        finally:
            with _lock:
                copied = ours.record(cupy.cuda.Event(disable_timing=True))
                for other in _others(device, ours):
                    other.wait_event(copied)
                _last_copy[device] = copied
                _remember(device, ours)


def _others(device: int, ours: Any) -> list[Any]:
    """Streams besides ours that an event can stand for."""
    import cupy

    others = [stream for handle, stream in _seen.get(device, {}).items() if handle != ours.ptr]
    if any(stream.ptr == _PER_THREAD_DEFAULT for stream in (*others, ours)):
        cupy.cuda.runtime.deviceSynchronize()
    return [each for each in others if each.ptr != _PER_THREAD_DEFAULT and _can_be_waited_for(device, each)]


def _can_be_waited_for(device: int, stream: Any) -> bool:
    import cupy

    try:
        return not stream.is_capturing()
    except (
        cupy.cuda.runtime.CUDARuntimeError
    ):  # somebody else's, destroyed by now; what it queued may still run
        del _seen[device][stream.ptr]
        cupy.cuda.runtime.deviceSynchronize()
        return False
