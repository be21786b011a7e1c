# SPDX-License-Identifier: Apache-2.0
"""From checked operands to a launch: the parameter struct, the grid, the moment.

A kernel takes one struct by value. Its fields are a NamedTuple on this side, in the order of the ``.cu`` file:
addresses first, then what the operands' metadata decides, then the options. The second and third parts do not
change from call to call, so a plan packs them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kda_cupy.errors import error
from kda_cupy.modules import Kernel

#: The most blocks a grid can have along y and along z.
MAX_GRID_YZ = 65_535


class Call(Protocol):
    """A prepared operation: launches when called, and tells what it returned."""

    results: Any

    def __call__(self) -> None:
        """Launch (or, on the NumPy backend, compute)."""


def grid_over_rows(blocks_per_row: int, rows: int) -> tuple[int, int, int]:
    """A grid of ``blocks_per_row`` x ``rows`` blocks with the rows folded over y and z, which stop at 65,535."""
    y = min(rows, MAX_GRID_YZ)
    return blocks_per_row, y, -(-rows // y)


@dataclass(slots=True)
class Launch:
    """A kernel, its grid and its parameters: everything but the moment.

    Calling it launches on CuPy's current stream of ``device``, reads nothing on the host, allocates nothing and
    does not wait.
    """

    kernel: Kernel
    device: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: np.void
    results: Any
    keep: Any = None
    """Operands whose memory must outlive the launch."""
    _on_current_device: Callable[[], int] = field(init=False)

    def __post_init__(self) -> None:
        import cupy

        self._on_current_device = cupy.cuda.runtime.getDevice

    def __call__(self) -> None:
        if not self.grid[1]:
            return  # no rows
        if self._on_current_device() == self.device:
            self.kernel.function(self.grid, self.block, (self.parameters,))
        else:
            import cupy

            with cupy.cuda.Device(self.device):
                self.kernel.function(self.grid, self.block, (self.parameters,))


@dataclass(slots=True)
class HostCall:
    """The same on the NumPy backend: calling it computes."""

    function: Callable[[], None]
    results: Any

    def __call__(self) -> None:
        self.function()


class BoundCall:
    """An operation whose operands were checked and converted once; calling it only launches.

    The arrays are the ones given to :func:`bind`; their contents may change between calls, their memory may not.
    A call runs on CuPy's current stream and orders itself behind nothing else: with torch or JAX operands, keep
    both libraries on one stream, or synchronise them yourself.

    Attributes: ``out`` and ``results`` (what the operation returns), ``variant`` (the kernel, or the backend),
    ``registers`` (per thread; 0 on NumPy), ``bytes_moved`` (of one call, by the operation's own formula, all
    rows live).
    """

    def __init__(self, call: Call, bytes_moved: int) -> None:
        self._call = call
        self.results = call.results
        self.bytes_moved = bytes_moved

    @property
    def out(self) -> Any:
        return self.results[0]

    @property
    def variant(self) -> str:
        return self._call.kernel.variant if isinstance(self._call, Launch) else "numpy"

    @property
    def registers(self) -> int:
        return self._call.kernel.registers if isinstance(self._call, Launch) else 0

    def __call__(self) -> Any:
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
    return binder(*operands, **options)
