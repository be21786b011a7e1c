# SPDX-License-Identifier: Apache-2.0
"""Who owns which slot. Plain ints and a lock: no array is looked at here.

Every method takes all slots it is given or none, and raises before anything has changed.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from kda_cupy.errors import error

RESERVED: Final = 0
"""Slot 0 is never handed out, so that engines can point padding at it."""


def slot_numbers(slots: int | Iterable[int]) -> list[int]:
    """Plain ints from one slot, or from any list, array or tensor of them. TypeError for anything else."""
    names: Any = slots.tolist() if hasattr(slots, "tolist") else slots
    return [slot_number(names)] if hasattr(names, "__index__") else [slot_number(name) for name in names]


def slot_number(slot: Any) -> int:
    """One slot as a plain int. A bool is none: a mask would otherwise name slots 0 and 1."""
    if isinstance(slot, (bool, np.bool_)):
        raise TypeError("a slot is an integer, not a bool")
    return operator.index(slot)


class SlotLedger:
    """Slots 1 to ``capacity``, each of them free or in use. Safe to call from several threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._free = list(range(capacity, RESERVED, -1))  # the end is handed out first
        self._in_use: set[int] = set()

    @property
    def free(self) -> int:
        """How many slots are free now."""
        return len(self._free)

    def in_use(self) -> list[int]:
        """The slots that are in use now, sorted."""
        with self._lock:
            return sorted(self._in_use)

    def take(self, n: int) -> list[int]:
        """Take any ``n`` free slots. Raises PoolExhausted if there are fewer."""
        with self._lock:
            if n > len(self._free):
                raise error(
                    "KDA-POOL-EXHAUSTED",
                    operand="n",
                    got=f"a request for {n}",
                    free=len(self._free),
                    capacity=self.capacity,
                )
            slots = [self._free.pop() for _ in range(n)]
            self._in_use.update(slots)
        return slots

    def take_these(self, slots: Sequence[int]) -> None:
        """Take these very slots, all different. Raises SlotError if one is not free."""
        with self._lock:
            self._check_free(slots)
            wanted = set(slots)
            self._free = [slot for slot in self._free if slot not in wanted]
            self._in_use |= wanted

    def check_free(self, slots: Sequence[int]) -> None:
        """Raise what :meth:`take_these` would; ``slots`` differ from each other."""
        with self._lock:
            self._check_free(slots)

    def _check_free(self, slots: Sequence[int]) -> None:
        for row, slot in enumerate(slots):
            self._check_range(row, slot)
            if slot in self._in_use:
                raise error("KDA-POOL-NOT-FREE", operand="slots", got=f"slot {slot} in use")

    def give_back(self, slots: Sequence[int]) -> None:
        """Make slots free. Raises SlotError if one is free already, reserved or out of range."""
        with self._lock:
            seen: set[int] = set()
            for row, slot in enumerate(slots):
                if slot == RESERVED:
                    raise error("KDA-POOL-RESERVED", operand="slots", got=f"slots[{row}] = {slot}")
                self._check_range(row, slot)
                if slot not in self._in_use or slot in seen:
                    raise error("KDA-POOL-DOUBLE-RELEASE", operand="slots", got=f"slot {slot}")
                seen.add(slot)
            self._in_use -= seen
            self._free.extend(reversed(slots))

    def check_in_use(self, slots: Sequence[int], *, written: bool = False) -> None:
        """Raise SlotError unless every slot is in use; slots to be ``written`` must differ from each other too."""
        with self._lock:
            for row, slot in enumerate(slots):
                if slot != RESERVED:
                    self._check_range(row, slot)
                if slot not in self._in_use:
                    place, got = f"slots[{row}]", f"slot {slot}"
                    raise error("KDA-POOL-NOT-IN-USE", operand="slots", got=got, place=place)
        if written and len(set(slots)) < len(slots):
            twice = next(slot for row, slot in enumerate(slots) if slot in slots[:row])
            raise error("KDA-VALUE-SLOT-DUPLICATE", operand="slots", got=f"slot {twice} twice")

    def _check_range(self, row: int, slot: int) -> None:
        if not RESERVED < slot <= self.capacity:
            place, allowed = f"slots[{row}]", f"a slot from 1 to {self.capacity}"
            raise error(
                "KDA-VALUE-SLOT-RANGE", operand="slots", got=f"slot {slot}", place=place, allowed=allowed
            )
