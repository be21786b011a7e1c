# SPDX-License-Identifier: Apache-2.0
"""Copies of slots, to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """What was in some slots when :meth:`StatePool.snapshot` was called, in memory of its own.

    ``arrays`` holds ``state`` [layers, n, HV, V, K] and, where the pool has it, ``conv`` [layers, n, channels, 3], in
    the order of ``slots``. It may be restored any number of times, to any pool that is laid out alike.
    """

    slots: tuple[int, ...]
    """Where it was taken."""
    arrays: Mapping[str, Any]
    device: int | str
    """Number of the GPU, or ``"cpu"``."""

    def __len__(self) -> int:
        """How many slots."""
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(int(array.nbytes) for array in self.arrays.values())

    def __repr__(self) -> str:
        where = self.device if self.device == "cpu" else f"cuda:{self.device}"
        return f"<Snapshot of {len(self)} slot(s), {self.nbytes:,} bytes on {where}>"
