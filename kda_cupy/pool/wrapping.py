# SPDX-License-Identifier: Apache-2.0
"""What somebody else's buffers must be like to serve as a pool. Metadata only."""

from __future__ import annotations

import math
from typing import Any

from kda_cupy.arrays import ArrayInfo, describe
from kda_cupy.checks import (
    STATE_AXES,
    check_alignment,
    check_no_overlap,
    check_place,
    check_state,
    check_strides,
    check_written,
    shape_text,
    strides_text,
)
from kda_cupy.errors import error
from kda_cupy.pool.geometry import SIZES, TAPS, Geometry


def check_states(native: Any) -> Any:
    """States [P, HV, V, K] or [layers, P, HV, V, K], as a view with the axis of layers."""
    layers = _with_layers(native)
    for layer in layers[:2]:  # the others follow the same stride
        check_state(layer, layer.shape[1])
    _check_slots_apart(describe(layers)[0])
    if layers.shape[1] < 2:
        got = f"P={layers.shape[1]}, and slot 0 is reserved"
        raise error("KDA-POOL-GEOMETRY", operand="array", got=got, rule=SIZES)
    return layers


def _with_layers(native: Any) -> Any:
    """A state array with its layer axis, if it has the rank of one."""
    if native.ndim not in (4, 5):
        raise error(
            "KDA-STATE-RANK",
            operand="array",
            got=f"shape {shape_text(native.shape)}",
            rank=native.ndim,
            axes=f"{STATE_AXES} or [layers, {STATE_AXES[1:]}",
        )
    layers = native if native.ndim == 5 else native[None]
    if not layers.shape[0]:
        raise error("KDA-POOL-GEOMETRY", operand="array", got="no layers", rule=SIZES)
    return layers


def _check_slots_apart(info: ArrayInfo) -> None:
    """No two slots of any layers overlap: of slots and layers, one nests in the other's stride."""
    taken = math.prod(info.shape[2:]) * info.dtype.itemsize
    for stride, length in sorted(zip(info.strides[:2], info.shape[:2], strict=True)):
        if length > 1:
            if stride < taken:
                raise error("KDA-STATE-STRIDES", operand="array", got=strides_text(info))
            taken += (length - 1) * stride


def check_conv(history: Any, geometry: Geometry, states: Any) -> None:
    """A conv history [layers, P, channels, 3] that fits the states, each element with memory of its own."""
    info, pointer = describe(history)
    wanted = (geometry.layers, geometry.capacity + 1, geometry.channels, TAPS)
    if info.shape != wanted:
        shape = f"[layers={wanted[0]}, P={wanted[1]}, channels={wanted[2]}, {TAPS}]"
        raise error("KDA-VERIFY-CONV-HISTORY", operand="conv", got=shape_text(info.shape), shape=shape)
    state, state_pointer = describe(states)
    check_place("conv", info, state.device)
    check_strides("conv", info)
    check_alignment("conv", info)
    check_written({"conv": info})
    check_no_overlap("array", state, state_pointer, "conv", info, pointer)
