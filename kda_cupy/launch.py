# SPDX-License-Identifier: Apache-2.0
"""From checked operands to a launch: the parameter struct, the grid, the moment.

A kernel takes one struct by value. Its fields are a NamedTuple on this side, in the order of the ``.cu`` file:
addresses first, then what the operands' metadata decides, then the options. The second and third parts do not
change from call to call, so a plan packs them once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from kda_cupy import streams
from kda_cupy.errors import error
from kda_cupy.modules import Kernel

#: The most blocks a grid can have along z.
MAX_GRID_Z: Final = 65_535


def split_rows(rows: int) -> list[tuple[int, int]]:
    """Cut a batch into launches: pairs of first row and number of rows; nothing for an empty batch."""
    return [(first, min(MAX_GRID_Z, rows - first)) for first in range(0, rows, MAX_GRID_Z)]


class Call(Protocol):
    """A prepared operation: launches when called, and tells what it returned."""

    results: Any

    def __call__(self) -> None:
        """Launch (or, on the NumPy backend, compute)."""


@dataclass(slots=True)
class Launch:
    """A kernel, its grid and its parameters: everything but the moment.

    Calling it launches on CuPy's current stream of ``device``, reads nothing on the host, allocates nothing and
    does not wait.
    """

    kernel: Kernel
    device: int
    block: tuple[int, int, int]
    launches: tuple[tuple[tuple[int, int, int], np.void], ...]
    """Grid and parameter struct of each launch: one, unless the batch is larger than a grid can be."""
    results: Any
    keep: Any = None
    """Operands whose memory must outlive the launch."""

    def __call__(self) -> None:
        """Launch."""
        import cupy

        if cupy.cuda.runtime.getDevice() == self.device:
            self._launch(cupy.cuda.get_current_stream())
        else:
            with cupy.cuda.Device(self.device):
                self._launch(cupy.cuda.get_current_stream())

    def _launch(self, stream: Any) -> None:
        streams.before_launch(self.device, stream)
        for grid, parameters in self.launches:
            self.kernel.function(grid, self.block, (parameters,), shared_mem=self.kernel.shared_bytes)


@dataclass(slots=True)
class HostCall:
    """The same on the NumPy backend: calling it computes."""

    function: Callable[[], None]
    results: Any

    def __call__(self) -> None:
        """Compute."""
        self.function()


class BoundCall:
    """An operation whose operands were checked and converted once; calling it only launches.

    The arrays are the ones given to :func:`bind`; their contents may change between calls, their memory may not.
    A call runs on CuPy's current stream and orders itself behind nothing else: with torch or JAX operands, keep
    both libraries on one stream, or synchronise them yourself. ``out`` is written anew by every call, so where the
    operands' library has immutable arrays (JAX) it is a CuPy or NumPy array, yours to hand on.

    Attributes: ``out`` and ``results`` (what the operation returns), ``variant`` (the kernel, or the backend),
    ``registers`` (per thread; 0 on NumPy), ``kernel`` (None on NumPy), ``bytes_moved`` (of one call, by the
    operation's own formula, all rows live).
    """

    def __init__(self, call: Call, bytes_moved: int) -> None:
        self._call = call
        self.results = call.results
        self.bytes_moved = bytes_moved

    @property
    def out(self) -> Any:
        """What the operation computes: ``results``, or the first of them."""
        return self.results[0] if isinstance(self.results, tuple) else self.results

    @property
    def kernel(self) -> Kernel | None:
        """The compiled kernel; None on NumPy."""
        return self._call.kernel if isinstance(self._call, Launch) else None

    @property
    def variant(self) -> str:
        """Name of the kernel variant, or ``"numpy"``."""
        return self.kernel.variant if self.kernel else "numpy"

    @property
    def registers(self) -> int:
        """Registers a thread; 0 on NumPy."""
        return self.kernel.registers if self.kernel else 0

    def __call__(self) -> Any:
        """Launch (or compute), and return what the operation returns."""
        self._call()
        return self.results

    def __repr__(self) -> str:
        moved = f"{self.bytes_moved:,} bytes a call"
        return f"<BoundCall {self.variant}, {self.registers} registers, {moved}>"


_binders: dict[Callable[..., Any], Callable[..., BoundCall]] = {}


def register_binder(operation: Callable[..., Any], binder: Callable[..., BoundCall]) -> None:
    """Tell :func:`bind` how an operation is prepared without being run."""
    _binders[operation] = binder


def bind(operation: Callable[..., Any], *operands: Any, **options: Any) -> BoundCall:
    """Check and convert the operands of an operation once, and return a call that only launches.

    ``bind(kda_packed_decode, mixed_qkv, a, ...)`` takes what the operation takes and raises what it raises. It
    compiles the kernel and allocates ``out`` if none is given, so a bound call can be captured in a CUDA graph
    straight away. With ``validate="full"`` the slots are read once, here.
    """
    binder = _binders.get(operation)
    if binder is None:
        known = ", ".join(sorted(each.__name__ for each in _binders))
        raise error("KDA-VALUE-OPERATION", operand="operation", got=repr(operation), known=known)
    try:  # what the operation would refuse by its signature: a name it does not know, one that is missing
        inspect.signature(operation).bind(*operands, **options)
    except TypeError as reason:
        raise TypeError(f"{operation.__name__}() {reason}") from None
    return binder(*operands, **options)
