# SPDX-License-Identifier: Apache-2.0
"""What verify and commit ask of the arrays that pass between them: snapshots, replay rings, conv windows, indices.

All checks are on metadata. ``HV`` and ``H`` are numbers of value and of key heads; head dimensions are 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from kda_cupy import guard
from kda_cupy.arrays import MAX_ALIGNMENT, ArrayInfo
from kda_cupy.checks import check_dtype, check_state_layout, is_dense, shape_text, strides_text
from kda_cupy.dtypes import FLOAT32, FLOATS, INDICES
from kda_cupy.errors import KdaError, error

DIM: Final = 128
"""K and V of the kernels."""
TAPS: Final = 4
MAX_TOKENS: Final = 16
"""The longest request: a bonus token and 15 drafts."""
RINGS: Final = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
SHORT_NAMES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_STATE_LAYOUT: Final = "[pool, H, V=128, K=128]"


def check_state_memory(name: str, info: ArrayInfo, HV: int | None) -> None:
    """A pool [P, HV, 128, 128] in float32, dense inside a slot, every slot on a 16-byte boundary."""
    if info.rank != 4 or info.shape[2:] != (DIM, DIM) or not info.shape[1] or HV not in (None, info.shape[1]):
        layout = _STATE_LAYOUT if HV is None else f"{_STATE_LAYOUT} with H={HV} value heads"
        raise error("KDA-STATE-LAYOUT", operand=name, got=shape_text(info.shape), layout=layout)
    try:
        check_dtype(name, info, (FLOAT32,), "KDA-STATE-DTYPE")
        check_state_layout(name, info)
    except KdaError as reason:
        raise error("KDA-VERIFY-STATE-MEMORY", operand=name, got=reason.got) from None


def check_rollback(infos: Mapping[str, ArrayInfo]) -> bool:
    """True if rings are used, False if snapshots are; exactly one of the two is there, and whole."""
    rings = [name for name in RINGS if name in infos]
    if rings and len(rings) < len(RINGS):
        missing = next(name for name in RINGS if name not in infos)
        got = f"{', '.join(f'`{name}`' for name in rings)} without `{missing}`"
        raise error("KDA-VERIFY-RINGS-INCOMPLETE", operand=missing, got=got)
    if bool(rings) == ("intermediate_ssm" in infos):
        got = "both" if rings else "neither"
        raise error("KDA-VERIFY-ROLLBACK", operand="intermediate_ssm", got=got)
    return bool(rings)


def check_rings(
    infos: Mapping[str, ArrayInfo], *, HV: int, H: int | None, steps: int, activation: np.dtype[Any] | None
) -> None:
    """Rings of ``steps`` or more, for ``H`` key heads (None: any divisor of HV)."""
    v, k, g, beta = (infos[name] for name in RINGS)
    rows, L = (v.shape[0], v.shape[2]) if v.rank == 4 else (0, 0)
    if H is None:
        H = k.shape[1] if k.rank == 4 and k.shape[1] and HV % k.shape[1] == 0 else 1
    wanted = {
        "replayssm_rawv": (rows, HV, L, DIM),
        "replayssm_rawk": (rows, H, L, DIM),
        "replayssm_g": (rows, HV, L, DIM),
        "replayssm_beta": (rows, HV, L),
    }
    layout = f"[slots, H={HV}, L>={steps}, 128] / [slots, H, L]"
    for name, dense in zip(RINGS, (2, 2, 3, 2), strict=True):
        info = infos[name]
        got = f"`{name}` of shape {shape_text(info.shape)}"
        if info.shape == wanted[name] and steps <= L:
            if is_dense(info, dense):
                continue
            got = f"`{name}` with {strides_text(info)}"
        raise error("KDA-VERIFY-RING-LAYOUT", operand=name, got=got, layout=layout, key_heads=H)
    kind = v.dtype if activation is None else activation
    for name, info in zip(RINGS, (v, k, g, beta), strict=True):
        dtypes = FLOATS if activation is None else (kind,)
        if info.dtype not in (dtypes if name in RINGS[:1] else (kind,) if name in RINGS[1:2] else (FLOAT32,)):
            got = f"`{name}` in {info.dtype}"
            short = SHORT_NAMES.get(str(kind), "bf16")
            raise error("KDA-VERIFY-RING-DTYPE", operand=name, got=got, activation=short)


def check_snapshots(info: ArrayInfo, *, HV: int, steps: int) -> None:
    """Snapshots [rows, >= steps, HV, 128, 128], each of them dense and on a 16-byte boundary."""
    apart = all(
        length == 1 or stride % MAX_ALIGNMENT == 0
        for length, stride in zip(info.shape[:2], info.strides[:2], strict=True)
    )
    if info.rank != 5 or info.shape[1] < steps or info.shape[2:] != (HV, DIM, DIM):
        got = f"shape {shape_text(info.shape)}"
    elif info.dtype != FLOAT32:
        got = f"dtype {info.dtype}"
    elif not is_dense(info, 3) or not apart:
        got = strides_text(info)
    elif info.misalignment and info.size:
        got = f"an address {info.misalignment} bytes past a 16-byte boundary"
    else:
        return
    raise error("KDA-VERIFY-SNAPSHOT-LAYOUT", operand="intermediate_ssm", got=got, steps=steps)


def check_history(name: str, info: ArrayInfo, *, slots: int, channels: int | None) -> None:
    """Conv history [P, channels, 3]; any strides."""
    right = info.rank == 3 and info.shape[0] == slots and info.shape[2] == TAPS - 1
    if not right or channels not in (None, info.shape[1]):
        shape = f"[P={slots}, {'channels' if channels is None else channels}, 3]"
        raise error("KDA-VERIFY-CONV-HISTORY", operand=name, got=shape_text(info.shape), shape=shape)


def check_window(name: str, info: ArrayInfo, *, steps: int, channels: int) -> None:
    """Conv windows [rows, >= steps, channels, 3]; any strides."""
    if info.rank != 4 or info.shape[1] < steps or info.shape[2:] != (channels, TAPS - 1):
        shape = f"[rows, >={steps}, {channels}, 3]"
        raise error("KDA-VERIFY-CONV-WINDOW", operand=name, got=shape_text(info.shape), shape=shape)


def sliding(info: ArrayInfo) -> ArrayInfo:
    """Windows that slide over raw inputs, seen as those inputs: [rows, steps + 2, channels], each in one place.

    They slide if a step's second tap is the next step's first one: the strides of step and tap are the same.
    """
    rows, steps, channels, taps = info.shape
    if info.strides[1] != info.strides[3] or not steps:
        return info
    return info._replace(shape=(rows, steps + taps - 1, channels), strides=info.strides[:3])


def check_scratch_rows(infos: Mapping[str, ArrayInfo]) -> int:
    """Snapshots and windows of one request stand in the same row of each: all have as many. Returns how many."""
    rows = {name: info.shape[0] for name, info in infos.items()}
    (first, wanted), *rest = rows.items()
    for name, number in rest:
        if number != wanted:
            got = f"{wanted} in `{first}` and {number} in `{name}`"
            raise error("KDA-VERIFY-SCRATCH-ROWS", operand=name, got=got)
    return wanted


def check_index_vector(name: str, info: ArrayInfo, requests: int) -> None:
    """[N] of int32 or int64; any stride."""
    if info.shape != (requests,):
        got, shape = shape_text(info.shape), f"[N={requests}]"
        raise error("KDA-VERIFY-INDICES-SHAPE", operand=name, got=got, shape=shape)
    check_dtype(name, info, INDICES)


def to_host(vector: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The values of an index vector; waits for the GPU."""
    host: np.ndarray[Any, Any] = vector if isinstance(vector, np.ndarray) else vector.get()
    return host.astype(np.int64)


def check_rows(
    operand: str, values: Any, live: Any, limit: int, *, once: bool = True, lowest: int = 0
) -> None:
    """SlotError for the first live row whose value is out of range, or (``once``) stands in another live row too."""
    for row in np.flatnonzero(live & ((values < lowest) | (values >= limit)))[:1]:
        raise guard.fault(operand, int(row), int(values[row]), limit)
    if not once:
        return
    rows = np.flatnonzero(live)
    _, first, counts = np.unique(values[rows], return_index=True, return_counts=True)
    for twice in np.flatnonzero(counts > 1)[:1]:
        value = values[rows[first[twice]]]
        both = np.flatnonzero(live & (values == value)).tolist()
        others = f" and {len(both) - 3} more" if len(both) > 3 else ""
        got = f"{value} in rows {', '.join(map(str, both[:3]))}{others}"
        raise error("KDA-VALUE-SLOT-DUPLICATE", operand=operand, got=got)
