# SPDX-License-Identifier: Apache-2.0
"""The sizes of a pool, and the arrays that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy import streams
from kda_cupy.checks import MAX_K, check_flag, shape_text
from kda_cupy.dtypes import FLOAT32, by_name
from kda_cupy.errors import error
from kda_cupy.gpu import require_gpu

SIZES: Final = f"layers >= 1, capacity >= 1 (P >= 2), HV >= 1, V >= 1 and K = 4, 8, .., {MAX_K}"
TAPS: Final = 3
"""Inputs that a convolution over four tokens remembers."""
_ALIGNMENT: Final = 256
_ALLOCATION_UNIT: Final = 512
"""CuPy rounds every allocation up to a multiple of it; host memory is aligned by less."""


class Part(NamedTuple):
    """One array of a pool."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: str
    """What its axes mean; files repeat it, so that a later layout is not mistaken for this one."""
    channels_last: bool = False
    """In memory the last two axes change places: the channels of one token are neighbours, as a kernel reads them."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, device: int | str | None) -> Any:
        """The array, zeroed, in host memory (``"cpu"``) or on a GPU that :func:`check_device` has seen."""
        shape = (*self.shape[:-2], *self.shape[:-3:-1]) if self.channels_last else self.shape
        array = _host_zeros(shape, self.dtype) if device == "cpu" else _gpu_zeros(shape, self.dtype, device)
        return array.swapaxes(-1, -2) if self.channels_last else array


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a pool: H key heads, HV value heads, keys K, values V, P = capacity + 1 slots."""

    layers: int
    capacity: int
    HV: int
    V: int
    K: int
    H: int
    activation: np.dtype[Any] | None = None
    """Of conv history and rings; None: the pool holds states alone."""
    verify_rows: int = 0
    verify_tokens: int = 0
    snapshots: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: q and k of H heads, v of HV heads."""
        return 2 * self.H * self.K + self.HV * self.V

    def contents(self) -> tuple[Part, ...]:
        """What a slot consists of, as ``[layers, P, ...]``: this list is the only one.

        All of it is zeroed, forked, copied, saved and loaded together, and counted in ``bytes_per_slot``. What all
        layers of a slot share has a first axis of 1. A file loads only where the list is the same.
        """
        ahead = (self.layers, self.capacity + 1)
        axes = "layers, slots, HV, V, K: rows are values, columns are keys"
        state = Part("state", (*ahead, self.HV, self.V, self.K), FLOAT32, axes)
        if self.activation is None:
            return (state,)
        axes = "layers, slots, channels of q, k and v, raw inputs from the oldest"
        conv = Part("conv", (*ahead, self.channels, TAPS), self.activation, axes, channels_last=True)
        return (state, conv)

    def rings(self) -> tuple[Part, ...]:
        """What a verify leaves for its commit in the rows of the slots. Dead after the commit, so never copied."""
        if not self.verify_tokens or self.snapshots or self.activation is None:
            return ()
        ahead = (self.layers, self.capacity + 1)
        steps = self.verify_tokens
        return (
            Part(
                "replayssm_rawv",
                (*ahead, self.HV, steps, self.V),
                self.activation,
                "layers, slots, HV, step, V",
            ),
            Part(
                "replayssm_rawk",
                (*ahead, self.H, steps, self.K),
                self.activation,
                "layers, slots, H, step, K",
            ),
            Part("replayssm_g", (*ahead, self.HV, steps, self.K), FLOAT32, "layers, slots, HV, step, K"),
            Part("replayssm_beta", (*ahead, self.HV, steps), FLOAT32, "layers, slots, HV, step"),
        )

    def scratch(self) -> tuple[Part, ...]:
        """The same in rows of requests: conv windows, and states after each token where they are kept."""
        if not self.verify_tokens or self.activation is None:
            return ()
        ahead = (self.layers, self.verify_rows, self.verify_tokens)
        axes = "layers, rows, raw inputs from the oldest (windows slide over them), channels of q, k and v"
        inputs = (*ahead[:2], self.verify_tokens + TAPS - 1, self.channels)
        windows = Part("intermediate_conv", inputs, self.activation, axes)
        axes = "layers, rows, step, HV, V, K"
        states = Part("intermediate_ssm", (*ahead, self.HV, self.V, self.K), FLOAT32, axes)
        return (windows, states) if self.snapshots else (windows,)

    @property
    def bytes_per_slot(self) -> int:
        """What one more slot costs, all layers."""
        return sum(part.nbytes for part in (*self.contents(), *self.rings())) // (self.capacity + 1)

    @property
    def nbytes(self) -> int:
        """All of it, slot 0 and the scratch included."""
        return sum(part.nbytes for part in (*self.contents(), *self.rings(), *self.scratch()))

    def capacity_for(self, budget: int) -> int:
        """The most slots that fit into so many bytes; below 1 if none does."""
        parts = (*self.contents(), *self.rings(), *self.scratch())
        scratch = sum(part.nbytes for part in self.scratch()) + len(parts) * _ALLOCATION_UNIT
        return (budget - scratch) // self.bytes_per_slot - 1


def check_geometry(
    capacity: Any,
    num_value_heads: Any,
    head_k_dim: Any,
    head_v_dim: Any,
    *,
    layers: Any = 1,
    num_key_heads: Any = None,
    activation_dtype: Any = None,
    verify_rows: Any = 0,
    verify_tokens: Any = 0,
    snapshots: Any = False,
) -> Geometry:
    """The arguments of a pool as its sizes. Raises OperandError (KDA-POOL-GEOMETRY) for what makes no pool."""
    head_v_dim = head_k_dim if head_v_dim is None else head_v_dim
    num_key_heads = num_value_heads if num_key_heads is None else num_key_heads
    sizes = (layers, capacity, num_value_heads, head_v_dim, head_k_dim)
    if not all(map(_is_size, sizes)) or head_k_dim % 4 or head_k_dim > MAX_K:
        raise error("KDA-POOL-GEOMETRY", got=f"layers, capacity, HV, V, K = {shape_text(sizes)}", rule=SIZES)
    if not _is_size(num_key_heads) or num_value_heads % num_key_heads:
        got = f"{num_key_heads} key heads for {num_value_heads} value heads"
        rule = "`num_key_heads` >= 1 that divides `num_value_heads`"
        raise error("KDA-POOL-GEOMETRY", operand="num_key_heads", got=got, rule=rule)
    activation = _activation(activation_dtype)
    verify = (verify_rows, verify_tokens)
    whole = all(_is_size(each) for each in verify) and activation is not None
    if not whole and verify != (0, 0):
        got = f"verify_rows={verify_rows}, verify_tokens={verify_tokens}, activation_dtype={activation_dtype}"
        rule = "`verify_rows` and `verify_tokens` >= 1 with an `activation_dtype`, or both 0"
        raise error("KDA-POOL-GEOMETRY", operand="verify_rows", got=got, rule=rule)
    L, slots, HV, V, K = map(int, sizes)
    rows, tokens = map(int, verify)
    kept = check_flag("snapshots", snapshots)
    return Geometry(L, slots, HV, V, K, int(num_key_heads), activation, rows, tokens, kept)


def _is_size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _activation(value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    try:
        return by_name(value if isinstance(value, str) else np.dtype(value).name)
    except (TypeError, KeyError):
        rule = '`activation_dtype` to be "bfloat16", "float16", "float32" or None'
        got = f"activation_dtype={value!r}"
        raise error("KDA-POOL-GEOMETRY", operand="activation_dtype", got=got, rule=rule) from None


def check_device(device: int | str | None) -> None:
    """Raise OperandError unless ``device`` is "cpu", or None or the number of a GPU; NoGpuError without one."""
    if device == "cpu":
        return
    rule = '`device` to be "cpu", None or the number of a GPU'
    if isinstance(device, str):
        raise error("KDA-POOL-GEOMETRY", operand="device", got=f"device={device!r}", rule=rule)
    gpus = require_gpu().cuda.runtime.getDeviceCount()
    if device is not None and not 0 <= device < gpus:
        got = f"device={device!r}, with {gpus} here"
        raise error("KDA-POOL-GEOMETRY", operand="device", got=got, rule=rule)


def _gpu_zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: int | str | None) -> Any:
    import cupy

    number = cupy.cuda.runtime.getDevice() if device is None else int(device)
    with streams.copying_slots(number):  # zeros are written on a stream, as everything is
        return cupy.zeros(shape, dtype)


def _host_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
