# SPDX-License-Identifier: Apache-2.0
"""A CuPy that needs no GPU, for tests of what is decided on the host: which arrays are refused, and what is said when
something is missing. Its arrays are host memory that claims to be a GPU's; its kernels do nothing.

>>> with machine(gpus=2) as cupy:
...     kda_packed_decode(cupy.asarray(mixed_qkv), ...)

What touches a device is written down in ``cupy.log``, with the device that was current: (what, device, detail).
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kda_cupy import bridge, gpu, guard, modules, streams
from kda_cupy.ops import commit, conv_update, gdn_step, kda_step, mtp_verify, packed_decode


class _Here(threading.local):
    def __init__(self) -> None:
        self.devices = [0]
        """Number of the thread's device, and above it those of the blocks `with Device(n)`."""


_here = _Here()


class ndarray:
    """What the package asks of a CuPy array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Any = None, strides: Any = None) -> None:
        if memory is None:
            sys.modules["cupy"].log.append(("allocate", _here.devices[-1], shape))  # type: ignore[attr-defined]
            self._take(np.empty(shape, dtype), _here.devices[-1])
            return
        raw = (ctypes.c_byte * max(memory.mem.size, 1)).from_address(memory.mem.ptr)
        self._take(np.ndarray(shape, dtype, raw, strides=strides), memory.mem.device_id)
        self.owner = memory.mem.owner

    def _take(self, values: Any, device: int) -> None:
        self.values, self.shape, self.strides, self.dtype = values, values.shape, values.strides, values.dtype
        self.data = SimpleNamespace(ptr=values.__array_interface__["data"][0], device_id=device)

    def get(self) -> Any:
        return self.values.copy()

    def fill(self, value: Any) -> None:
        self.values.fill(value)


ndarray.__module__ = "cupy"  # the package knows CuPy arrays by the name of their type


def on_gpu(values: Any, device: int = 0) -> Any:
    """A fake CuPy array over the very memory of a NumPy array."""
    array = ndarray.__new__(ndarray)
    array._take(values, device)
    return array


class CompileException(Exception):
    """Named as CuPy's."""


class DynamicLibNotFoundError(RuntimeError):
    """Named as that of cuda.pathfinder."""


class Event:
    """Of the device that is current when it is recorded; done when a test says so."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.ptr, self.device, self.done = id(self), -1, True


class Stream:
    """The current stream of a device."""

    def __init__(self, device: int, log: list[Any]) -> None:
        self.device, self.ptr, self.capturing, self._log = device, 0x1000 * device, False, log
        self.events: list[Event] = []

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        assert _here.devices[-1] == self.device, "CUDA refuses to record on a stream of another device"
        self._log.append(("record", self.device, ""))
        event.device = self.device
        self.events.append(event)
        return event

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        pass


def _module(
    gpus: int,
    capability: str | Sequence[str],
    driver: int,
    fail: Callable[[], None],
    fail_to_load: Callable[[], None],
) -> ModuleType:
    cupy = ModuleType("cupy")
    log = cupy.log = []
    queues = [Stream(device, log) for device in range(max(gpus, 1))]

    class Device:
        def __init__(self, number: int | None = None) -> None:
            self.id = _here.devices[-1] if number is None else number
            self.compute_capability = capability if isinstance(capability, str) else capability[self.id]
            self.attributes = {"MultiProcessorCount": 132}

        def __enter__(self) -> Device:
            _here.devices.append(self.id)
            return self

        def __exit__(self, *_: object) -> None:
            _here.devices.pop()

        def synchronize(self) -> None:
            log.append(("synchronize", self.id, ""))

    def raw_module(code: str = "", options: tuple[str, ...] = (), path: str = "") -> Any:
        def get_function(entry: str) -> Any:
            device = _here.devices[-1]
            log.append(("load" if path else "compile", device, path or entry))
            fail_to_load() if path else fail()

            def launch(grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
                assert _here.devices[-1] == device, "CUDA refuses a kernel of another device"
                log.append(("launch", device, entry))

            function = functools.partial(launch)
            function.num_regs, function.local_size_bytes = 32, 0  # type: ignore[attr-defined]
            return function

        return SimpleNamespace(get_function=get_function)

    def zeros(shape: Any, dtype: Any) -> Any:
        log.append(("allocate", _here.devices[-1], shape))
        return on_gpu(np.zeros(shape, dtype), _here.devices[-1])

    cupy.__version__ = "14.2.0"
    cupy.streams = queues
    cupy.ndarray = ndarray
    cupy.is_available = lambda: gpus > 0 and driver >= 13000  # as CuPy answers for an old driver
    cupy.asarray = lambda values: on_gpu(np.array(values), _here.devices[-1])
    cupy.zeros = zeros
    cupy.asnumpy = lambda array: array.get()
    cupy.RawModule = raw_module
    cupy.cuda = SimpleNamespace(
        Device=Device,
        Event=Event,
        MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory),
        UnownedMemory=lambda address, size, owner, device: SimpleNamespace(
            ptr=address, size=size, owner=owner, device_id=device
        ),
        get_current_stream=lambda: queues[_here.devices[-1]],
        runtime=SimpleNamespace(
            getDevice=lambda: _here.devices[-1],
            getDeviceCount=lambda: gpus,
            driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda: 13020,
        ),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    return cupy


def fake_cubin(content: str = "") -> bytes:
    """What the package takes for machine code of an NVIDIA GPU."""
    header = bytearray(64)
    header[:4], header[18:20] = b"\x7fELF", (190).to_bytes(2, "little")
    return bytes(header) + content.encode()


def _nothing() -> None:
    pass


@contextmanager
def machine(
    gpus: int = 1,
    *,
    capability: str | Sequence[str] = "90",
    driver: int = 13000,
    fail: Callable[[], None] = _nothing,
    fail_to_load: Callable[[], None] = _nothing,
    cupy: bool = True,
    wheels: Sequence[str] = ("cupy-cuda13x",),
) -> Iterator[Any]:
    """Stand on a machine with so many GPUs of this compute capability; on one without CuPy if ``cupy`` is False.

    capability: of all GPUs, or of each. driver: the CUDA version it supports. fail: called whenever a kernel is
    compiled; raises what CuPy would. fail_to_load: the same for one that was compiled ahead. wheels: of CuPy, that are
    installed. What the package remembers of GPUs is put aside and comes back afterwards.
    """
    real, remembered = sys.modules.get("cupy"), [dict(memory) for memory in _MEMORIES]
    real_wheels, gpu.installed_wheels = gpu.installed_wheels, lambda: dict.fromkeys(wheels, "14.2.0")
    fake = _module(gpus, capability, driver, fail, fail_to_load) if cupy else None
    _forget([{} for _ in _MEMORIES])
    sys.modules["cupy"] = fake  # type: ignore[assignment]
    try:
        yield fake
    finally:
        gpu.installed_wheels = real_wheels
        if real is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = real
        _forget(remembered)


_MEMORIES: tuple[dict[Any, Any], ...] = (
    modules._kernels,
    guard._records,
    bridge._in_flight,
    streams._seen,
    streams._last_copy,
)
"""What the package remembers of GPUs."""
_CHECKS = tuple(each.check for each in (packed_decode, mtp_verify, commit, kda_step, gdn_step, conv_update))
"""Their plans remember kernels."""


def _forget(contents: list[dict[Any, Any]]) -> None:
    for check in _CHECKS:
        check.cache_clear()
    bridge._cupy.cache_clear()
    for memory, content in zip(_MEMORIES, contents, strict=True):
        memory.clear()
        memory.update(content)
