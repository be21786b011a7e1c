# SPDX-License-Identifier: Apache-2.0
"""States of other projects: [n, HV, K, V] and [n, HV, V, K], to and from the slots of a pool.

At K = V = 128 no shape tells the two apart, so the layout is always said and never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kda_cupy.arrays import describe
from kda_cupy.checks import (
    check_alignment,
    check_dtype,
    check_no_overlap,
    check_place,
    check_strides,
    shape_text,
)
from kda_cupy.dtypes import BFLOAT16, FLOATS
from kda_cupy.errors import error
from kda_cupy.pool.contents import as_bits, empty_beside, numbered_runs


def check_layout(layout: object) -> None:
    """One of the two names."""
    if not isinstance(layout, str) or layout not in ("KV", "VK"):
        raise error("KDA-POOL-LAYOUT", operand="layout", got=f"layout={layout!r}")


def check_import(native: Any, layout: str, state: Any, *, layered: bool) -> Any:
    """What is to be written to ``state`` [layers, P, HV, V, K], as a view [layers, n, HV, V, K] of ``native``.

    layered: ``native`` has an axis of layers too. Raises OperandError or DeviceError.
    """
    info, pointer = describe(native)
    pool, pool_pointer = describe(state)
    check_place("array", info, pool.device)
    check_dtype("array", info, FLOATS)
    layers, _, HV, V, K = state.shape
    tail = (HV, K, V) if layout == "KV" else (HV, V, K)
    right = info.rank == 4 + layered and info.shape[-3:] == tail and (not layered or info.shape[0] == layers)
    if not right:
        axes = [f"{name}={size}" for name, size in zip(("HV", *layout), tail, strict=True)]
        wanted = f"[{', '.join([*[f'layers={layers}'] * layered, 'n', *axes])}]"
        raise error("KDA-STATE-LAYOUT", operand="array", got=shape_text(info.shape), layout=wanted)
    check_strides("array", info)
    check_alignment("array", info)
    check_no_overlap("state", pool, pool_pointer, "array", info, pointer)
    source = native if layered else native[None]
    return source.swapaxes(-1, -2) if layout == "KV" else source


def write(state: Any, source: Any, slots: Sequence[int]) -> None:
    """Write [layers, n, HV, V, K] to slots, as float32: exact, whatever the source."""
    if source.dtype == BFLOAT16:  # the upper half of a float32
        source = (as_bits(source).astype(np.uint32) << 16).view(np.float32)
    for row, first, end in numbered_runs(slots):
        state[:, first:end] = source[:, row : row + end - first]


def read(state: Any, layout: str, slots: Sequence[int]) -> Any:
    """A new array [layers, n, HV, K, V] or [layers, n, HV, V, K] with what is in the slots."""
    layers, _, HV, V, K = state.shape
    tail = (K, V) if layout == "KV" else (V, K)
    out = empty_beside(state, (layers, len(slots), HV, *tail))
    to, source = as_bits(out.swapaxes(-1, -2) if layout == "KV" else out), as_bits(state)
    for row, first, end in numbered_runs(slots):
        to[:, row : row + end - first] = source[:, first:end]
    return out
