# SPDX-License-Identifier: Apache-2.0
"""What a timer asks of an operation. A new operation in the benchmark is one more :class:`Workload`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kda_cupy.bench.cases import Case
from kda_cupy.bench.judge import Verdict
from kda_cupy.launch import BoundCall

Call = Callable[[], Any]


class Memory(NamedTuple):
    """Where operands live: how to get them there and back, and how to allocate."""

    place: Callable[[Any], Any]
    """From NumPy; a copy, where that is needed."""
    fetch: Callable[[Any], Any]
    """To NumPy, always a copy."""
    zeros: Callable[[tuple[int, ...], Any], Any]


class Rotation(NamedTuple):
    """How the launches of a graph walk over the pool."""

    groups: int
    """Sets of B slots, all different."""
    launches: int
    """A multiple of ``groups``, so that the next replay goes on where this one ends."""
    reuse_bytes: int
    """That should move before memory is used again; 0 if L2 may hold it."""

    def scratch_groups(self, written_bytes: int) -> int:
        """Sets of scratch memory, of which a launch writes so many bytes."""
        return min(self.groups, max(1, -(-self.reuse_bytes // max(written_bytes, 1))))


@dataclass(frozen=True)
class Part:
    """What becomes one row of a table."""

    case: Case
    calls: Sequence[BoundCall]
    """Once over all groups of slots."""
    eager: Call
    """One call on the first group that checks its operands. So is ``bound`` without the checks."""
    bound: Call
    bytes_moved: int
    yardstick: str
    kernels: Sequence[BoundCall] = ()
    """The calls whose kernel belongs to this row alone."""


class Workload(Protocol):
    """A case with its operands in memory."""

    def judge(self) -> Verdict:
        """Run it once, with a row of padding added, and compare with the float64 truth. Writes slots of the pool."""

    def parts(self) -> list[Part]:
        """What is to be timed, in the order in which it has to run."""

    def yardsticks(self, moves: str) -> list[list[Call]]:
        """A yardstick over the same groups of slots; with several forms, the faster counts."""


class Make(Protocol):
    """Makes a workload."""

    def __call__(
        self, case: Case, memory: Memory, state: Any, rotation: Rotation, rng: np.random.Generator
    ) -> Workload:
        """state: [P > B, HV, V, K], of which slot 0 stays unused."""


def group_slots(case: Case, state: Any, groups: int, rng: np.random.Generator) -> Any:
    """[groups, B] int32: scattered slots of a pool, all different."""
    return (1 + rng.permutation(len(state) - 1)[: groups * case.B]).reshape(groups, case.B).astype(np.int32)
