# SPDX-License-Identifier: Apache-2.0
"""The note that a kernel leaves when it meets an index it must not follow. Mirrors kernels/guard.cuh.

Nothing on the launch path may read a device value on the host, so an out-of-range slot cannot raise where it is
passed. The kernel treats the row as padding and records the first such row; :func:`check_errors` raises it.
There is one record per GPU, and one for the NumPy backend, which follows the same rule.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any, Final

import numpy as np

from kda_cupy.arrays import HOST
from kda_cupy.errors import KdaError, error

#: Names behind the numbers in a record; a kernel is told its operation's number, and knows its operands'.
OPERATIONS: Final = (
    "gdn_packed_decode",
    "kda_packed_decode",
    "kda_decode_mtp",
    "kda_commit",
    "kda_decode_step",
    "gdn_decode_step",
    "causal_conv1d_update",
)
OPERANDS: Final = (
    "ssm_state_indices",
    "cu_seqlens",
    "intermediate_state_indices",
    "ring_indices",
    "accept_lens",
    "track_indices",
    "track_steps",
    "conv_state_indices",
)

RECORD: Final = np.dtype(
    [
        ("count", np.uint64),
        ("claimed", np.uint32),
        ("operation", np.int32),
        ("operand", np.int32),
        ("reserved", np.int32),
        ("row", np.int64),
        ("value", np.int64),
        ("limit", np.int64),
    ]
)

_INT64: Final = np.iinfo(np.int64)
_records: dict[int, Any] = {}
_lock = threading.Lock()


def record_on(device: int) -> Any:
    """The record of a device (a 48-byte CuPy array; allocated at the first call), or the host's NumPy one."""
    record = _records.get(device)
    if record is None:
        with _lock:
            record = _records.get(device)
            if record is None:
                record = _records[device] = _allocate(device)
    return record


class Noting:
    """Of plans whose kernels note what they do not follow."""

    device: int

    @cached_property
    def errors(self) -> int:
        """Address of the device's error record."""
        return int(record_on(self.device).data.ptr)


def _allocate(device: int) -> Any:
    if device == HOST:
        return np.zeros((), RECORD)
    import cupy

    with cupy.cuda.Device(device):
        record = cupy.zeros(RECORD.itemsize, np.uint8)
        cupy.cuda.get_current_stream().synchronize()  # other streams may be the first to write to it
    return record


def record_on_host(operation: int, operand: int, row: int, value: int, limit: int) -> None:
    """Note one refused row of the NumPy backend. ``value`` may be a difference of two int64, and none itself."""
    record = record_on(HOST)
    value = min(max(value, _INT64.min), _INT64.max)
    with _lock:
        record["count"] += 1
        if not record["claimed"]:
            for name, number in (("claimed", 1), ("operation", operation), ("operand", operand)):
                record[name] = number
            record["row"], record["value"], record["limit"] = row, value, limit


def check_errors(device: int | str | None = None) -> None:
    """Raise :class:`SlotError` if a launch met a slot, row, length or count out of range since the last call.

    Waits for all work on the device (``"cpu"`` or -1: the NumPy backend; default: everywhere that was used) and
    clears the record. Those rows read and wrote no state, and their outputs are zero. A launch that another thread
    makes in the meantime may go unnoticed: check when the work that is to be checked has been queued.
    """
    if device == "cpu":
        device = HOST
    for number in sorted(_records) if device is None else [device]:
        if number in _records:
            found = _take(number)
            if found is not None:
                raise found


def _take(device: int) -> KdaError | None:
    record = _records[device]
    if device == HOST:
        with _lock:
            note = record.copy()
            record[...] = np.zeros((), RECORD)
    else:
        import cupy

        with cupy.cuda.Device(device) as current:
            current.synchronize()
            note = cupy.asnumpy(record).view(RECORD)[0]
            if note["count"]:
                record.fill(0)
                cupy.cuda.get_current_stream().synchronize()
    if not note["count"]:
        return None
    others = int(note["count"]) - 1
    return fault(
        OPERANDS[note["operand"]],
        int(note["row"]),
        int(note["value"]),
        int(note["limit"]),
        f" in {OPERATIONS[note['operation']]} on "
        f"{'the NumPy backend' if device == HOST else f'cuda:{device}'}"
        + (f", and {others} more such row{'s' if others > 1 else ''}" if others else ""),
    )


def fault(operand: str, row: int, value: int, limit: int, where: str = "") -> KdaError:
    """The SlotError of an index, a length or a count that must not be followed; what it may be depends on ``limit``.

    where: in which operation, and on what, if that is not plain.
    """
    place = f"{operand}[{row}]"
    if operand == "cu_seqlens":
        place, allowed = f"cu_seqlens[{row}:{row + 2}]", f"0 to {limit} tokens within T"
        return error(
            "KDA-VALUE-LENGTH-RANGE",
            operand=operand,
            got=f"a length of {value}{where}",
            place=place,
            allowed=allowed,
        )
    if operand in ("accept_lens", "track_steps"):
        allowed = (
            f"a count from 0 to {limit}, the bonus token included"
            if operand == "accept_lens"
            else f"a step below the accept count {limit}, or negative for none"
        )
        return error(
            "KDA-VALUE-ACCEPT-RANGE", operand=operand, got=f"{value}{where}", place=place, allowed=allowed
        )
    if operand in ("intermediate_state_indices", "ring_indices"):
        return error(
            "KDA-VALUE-ROW-RANGE", operand=operand, got=f"row {value}{where}", place=place, rows=limit
        )
    return error(
        "KDA-VALUE-SLOT-RANGE",
        operand=operand,
        got=f"slot {value}{where}",
        place=place,
        allowed=f"a slot below P={limit}, or negative for padding",
    )
