# SPDX-License-Identifier: Apache-2.0
"""The packed decodes as a workload: one token a row, the state updated in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.bench.cases import Case, random_array, random_rows, random_state
from kda_cupy.bench.judge import SENTINEL, Verdict, choose_rows, padding_complaint, verdict
from kda_cupy.bench.workload import Call, Memory, Part, Rotation, group_slots
from kda_cupy.bench.yardstick import state_yardsticks
from kda_cupy.launch import bind
from kda_cupy.ops.packed_decode import gdn_packed_decode, kda_packed_decode
from kda_cupy.reference import truth

OPERATIONS: Final[dict[str, Callable[..., Any]]] = {"kda": kda_packed_decode, "gdn": gdn_packed_decode}
JUDGED_ROWS: Final = 6


class Inputs(NamedTuple):
    """The operands in front of the state, as NumPy arrays."""

    mixed_qkv: Any
    """[B, 2*H*K + HV*V]"""
    a: Any
    """[B, HV*K] (KDA) or [B, HV] (GDN)"""
    b: Any
    """[B, HV]"""
    A_log: Any
    """[HV], float32"""
    dt_bias: Any
    """[HV*K] or [HV], float32"""

    def rows(self, selection: Any) -> Inputs:
        """Some of the rows: an index array or a slice."""
        return self._replace(mixed_qkv=self.mixed_qkv[selection], a=self.a[selection], b=self.b[selection])


def make_inputs(case: Case, rows: int, rng: np.random.Generator) -> Inputs:
    """Random operands."""
    gates = case.HV * case.K if case.op == "kda" else case.HV
    return Inputs(
        mixed_qkv=random_rows(rng, rows, 2 * case.H * case.K + case.HV * case.V, case.dtype),
        a=random_rows(rng, rows, gates, case.dtype),
        b=random_rows(rng, rows, case.HV, case.dtype),
        A_log=rng.uniform(-2, 1, case.HV).astype(np.float32),
        dt_bias=random_array(rng, (gates,)) / 2,
    )


class PackedDecode:
    """B rows, each in a slot of ``state`` [P, HV, V, K]."""

    def __init__(
        self,
        case: Case,
        memory: Memory,
        state: Any,
        rotation: Rotation,
        rng: np.random.Generator,
        make: Callable[[Case, int, np.random.Generator], Inputs] = make_inputs,
    ) -> None:
        self.case, self.memory, self.state, self._rotation, self._rng = case, memory, state, rotation, rng
        self.inputs = make(case, case.B + 1, rng)
        self._operation = partial(OPERATIONS[case.op], lower_bound=case.lower_bound)

    def judge(self) -> Verdict:
        """Run it once, with a row of padding added, and compare with the float64 truth."""
        case, inputs, state, (place, fetch, _) = self.case, self.inputs, self.state, self.memory
        padding, rows, slots = choose_rows(case, state, self._rng, compared=JUDGED_ROWS)
        before = random_state(case, len(rows), self._rng)
        for slot, values in zip(slots[rows].tolist(), before, strict=True):
            state[slot] = place(values)
        out = place(np.full((case.B + 1, 1, case.HV, case.V), SENTINEL, inputs.mixed_qkv.dtype))
        self._operation(*map(place, inputs), state, place(slots), out=out)
        got_out = fetch(out)
        got_state = np.stack([fetch(state[slot]) for slot in slots[rows].tolist()])

        own = np.arange(len(rows))
        want_out, want_state = truth.packed_decode(
            *inputs.rows(rows), before, own, lower_bound=case.lower_bound
        )
        return verdict(
            case,
            truth.relative_error(got_out[rows], want_out),
            truth.relative_error(got_state, want_state),
            complaints=(padding_complaint(got_out[padding]),),
        )

    @cached_property
    def _slots(self) -> list[Any]:
        slots = group_slots(self.case, self.state, self._rotation.groups, self._rng)
        return list(self.memory.place(slots))  # a view a launch

    def parts(self) -> list[Part]:
        """The one operation."""
        operands = [self.memory.place(each) for each in self.inputs.rows(slice(self.case.B))]
        out = self.memory.zeros((self.case.B, 1, self.case.HV, self.case.V), operands[0].dtype)
        eager = partial(self._operation, *operands, self.state, out=out)
        bound = [bind(eager.func, *eager.args, each, **eager.keywords) for each in self._slots]
        part = Part(
            case=self.case,
            calls=bound,
            eager=partial(eager, self._slots[0]),
            bound=bound[0],
            bytes_moved=bound[0].bytes_moved,
            yardstick="RW",
            kernels=bound[:1],
        )
        return [part]

    def yardsticks(self, moves: str) -> list[list[Call]]:
        """Of the same slots."""
        return [list(form) for form in state_yardsticks(moves, self.state, self._slots)]
