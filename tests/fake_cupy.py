# SPDX-License-Identifier: Apache-2.0
"""A CuPy that needs no GPU, for tests of what is decided on the host: which arrays are refused, and what is said when
something is missing. Its arrays are host memory that claims to be a GPU's; its kernels do nothing.

>>> with machine(gpus=2) as cupy:
...     kda_packed_decode(cupy.asarray(mixed_qkv), ...)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kda_cupy import bridge, guard, modules, streams
from kda_cupy.ops import commit, mtp_verify, packed_decode

_current = [0]
"""Number of the current device, and above it those of the blocks `with Device(n)`."""


class ndarray:
    """What the package asks of a CuPy array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._take(np.empty(shape, dtype), _current[-1])

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


def _module(gpus: int, capability: str, fail: Callable[[], None]) -> ModuleType:
    class Device:
        def __init__(self, number: int | None = None) -> None:
            self.id = _current[-1] if number is None else number
            self.compute_capability = capability
            self.attributes = {"MultiProcessorCount": 132}

        def __enter__(self) -> Device:
            _current.append(self.id)
            return self

        def __exit__(self, *_: object) -> None:
            _current.pop()

        def synchronize(self) -> None:
            pass

    def get_function(entry: str) -> Any:
        fail()
        launch = functools.partial(lambda grid, block, arguments, shared_mem: None)
        launch.num_regs, launch.local_size_bytes = 32, 0  # type: ignore[attr-defined]
        return launch

    stream = SimpleNamespace(
        ptr=0, synchronize=lambda: None, is_capturing=lambda: False, record=lambda event=None: event
    )
    runtime = SimpleNamespace(
        getDevice=lambda: _current[-1], getDeviceCount=lambda: gpus, driverGetVersion=lambda: 13000
    )
    cupy = ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    cupy.ndarray = ndarray
    cupy.is_available = lambda: gpus > 0
    cupy.asarray = lambda values: on_gpu(np.array(values), _current[-1])
    cupy.zeros = lambda shape, dtype: on_gpu(np.zeros(shape, dtype), _current[-1])
    cupy.asnumpy = lambda array: array.get()
    cupy.RawModule = lambda code, options: SimpleNamespace(get_function=get_function)
    cupy.cuda = SimpleNamespace(
        Device=Device,
        Event=lambda disable_timing: SimpleNamespace(ptr=0),
        get_current_stream=lambda: stream,
        runtime=runtime,
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    return cupy


@contextmanager
def machine(
    gpus: int = 1, *, capability: str = "90", fail: Callable[[], None] = lambda: None, cupy: bool = True
) -> Iterator[Any]:
    """Stand on a machine with so many GPUs of this compute capability; on one without CuPy if ``cupy`` is False.

    fail: called whenever a kernel is compiled; raises what CuPy would. What the package remembers of GPUs is put
    aside and comes back afterwards.
    """
    real, remembered = sys.modules.get("cupy"), [dict(memory) for memory in _MEMORIES]
    fake = _module(gpus, capability, fail) if cupy else None
    _forget([{} for _ in _MEMORIES])
    sys.modules["cupy"] = fake  # type: ignore[assignment]
    try:
        yield fake
    finally:
        if real is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = real
        _forget(remembered)


_MEMORIES: tuple[dict[Any, Any], ...] = (
    modules._kernels,
    guard._records,
    streams._seen,
    streams._last_copy,
)
"""What the package remembers of GPUs."""


def _forget(contents: list[dict[Any, Any]]) -> None:
    for operation in (packed_decode, mtp_verify, commit):
        operation.check.cache_clear()
    bridge._cupy.cache_clear()
    for memory, content in zip(_MEMORIES, contents, strict=True):
        memory.clear()
        memory.update(content)
