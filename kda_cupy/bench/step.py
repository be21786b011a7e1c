# SPDX-License-Identifier: Apache-2.0
"""The whole decode step as a workload: one fused launch, and beside it a convolution and a packed decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np

from kda_cupy.bench.cases import Case, random_array, random_state
from kda_cupy.bench.judge import SENTINEL, Verdict, choose_rows, padding_complaint, verdict
from kda_cupy.bench.settle import settle
from kda_cupy.bench.speculation import HISTORIES, NORM_EPSILON, Inputs, channels_of, make_inputs, split
from kda_cupy.bench.workload import Call, Memory, Part, Rotation, group_slots
from kda_cupy.bench.yardstick import state_yardsticks
from kda_cupy.launch import bind
from kda_cupy.ops.conv_update import causal_conv1d_update
from kda_cupy.ops.gdn_step import gdn_decode_step
from kda_cupy.ops.kda_step import kda_decode_step
from kda_cupy.ops.mtp_checks import DIM
from kda_cupy.ops.packed_decode import gdn_packed_decode, kda_packed_decode
from kda_cupy.reference import truth

FUSED: Final[dict[str, Callable[..., Any]]] = {"kda": kda_decode_step, "gdn": gdn_decode_step}
PACKED: Final[dict[str, Callable[..., Any]]] = {"kda": kda_packed_decode, "gdn": gdn_packed_decode}
TRUTHS: Final = {"kda": truth.kda_decode_step, "gdn": truth.gdn_decode_step}
JUDGED_ROWS: Final = 4


class WholeStep:
    """B rows of one token, each in a slot of ``state`` [P, HV, V, K] and of a conv history [P, C, 3]."""

    def __init__(
        self, case: Case, memory: Memory, state: Any, rotation: Rotation, rng: np.random.Generator
    ) -> None:
        self._case, self._memory, self._state, self._rotation, self._rng = case, memory, state, rotation, rng
        self._inputs = make_inputs(case, case.B + 1, rng)
        kind, channels = self._inputs.projection.dtype, sum(channels_of(case))
        # Channels are neighbours, as engines keep them: [P, 3, C], and the operations see [P, C, 3].
        self._history = memory.zeros((len(state), 3, channels), kind)
        self._history[:] = memory.place(random_array(rng, (3, channels)).astype(kind))

    def _operands(self, inputs: Inputs, state: Any, history: Any, slots: Any, place: Any) -> dict[str, Any]:
        """Of the fused step, by its names. history: [P, 3, C]."""
        case = self._case
        if case.op == "kda":
            parts = split(history.swapaxes(1, 2), channels_of(case), axis=1)
            return inputs.operands(case, place) | {
                **dict(zip(HISTORIES, parts, strict=True)),
                "recurrent_state": state,
                "ssm_state_indices": slots,
            }
        found = {
            "mixed_qkv": place(inputs.projection),
            "a": place(np.ascontiguousarray(inputs.g[:, : case.HV])),
            "b": place(inputs.beta),
            "conv_weight": place(inputs.taps),
            "conv_state": history.swapaxes(1, 2),
            "A_log": place(inputs.A_log),
            "dt_bias": place(inputs.dt_bias[: case.HV]),
            "initial_state": state,
            "ssm_state_indices": slots,
            "lower_bound": case.lower_bound,
        }
        if case.norm:
            found |= {
                "onorm_gate": place(inputs.norm_gate).reshape(-1, case.HV, DIM),
                "onorm_weight": place(inputs.norm_weight),
                "onorm_eps": NORM_EPSILON,
            }
        return found

    def _fused(self, inputs: Inputs, slots: Any, out: Any) -> partial[Any]:
        operands = self._operands(inputs, self._state, self._history, slots, self._memory.place)
        return partial(FUSED[self._case.op], **{**operands, "out": out})

    def _chain(self, inputs: Inputs) -> tuple[partial[Any], partial[Any]]:
        """The convolution, which takes ``conv_state_indices``, and the packed decode, which takes slots."""
        case, (place, _, zeros) = self._case, self._memory
        rows, kind = len(inputs.g), inputs.projection.dtype
        gates = inputs.g if case.op == "kda" else np.ascontiguousarray(inputs.g[:, : case.HV])
        bias = inputs.dt_bias if case.op == "kda" else inputs.dt_bias[: case.HV]
        act = zeros(inputs.projection.shape, kind)
        convolve = partial(
            causal_conv1d_update,
            place(inputs.projection),
            self._history.swapaxes(1, 2),
            place(inputs.taps),
            activation="silu",
            out=act,
        )
        decode = partial(
            PACKED[case.op],
            act,
            *map(place, (gates, inputs.beta, inputs.A_log, bias)),
            self._state,
            lower_bound=case.lower_bound,
            out=zeros((rows, 1, case.HV, DIM), kind),
        )
        return convolve, decode

    def _out(self, rows: int) -> Any:
        """What the fused step writes, full of a sentinel: [1, B, HV, V] (KDA) or [B, 1, HV, V] (GDN)."""
        front = (1, rows) if self._case.op == "kda" else (rows, 1)
        return np.full((*front, self._case.HV, DIM), SENTINEL, self._inputs.projection.dtype)

    def judge(self) -> Verdict:
        """Run the fused step once, with a row of padding added, and compare with the float64 truth.

        The chain then has to leave the same bits, and its output is compared as well: the larger error counts.
        """
        case, inputs, state, (place, fetch, _) = self._case, self._inputs, self._state, self._memory
        padding, rows, slots = choose_rows(case, state, self._rng, compared=JUDGED_ROWS)
        before = random_state(case, len(rows), self._rng)
        kind, channels = inputs.projection.dtype, inputs.projection.shape[1]
        history = random_array(self._rng, (len(rows), 3, channels)).astype(kind)
        x = inputs.projection[rows][:, None]
        settle(x, history, inputs.taps, self._rng)
        inputs.projection[rows] = x[:, 0]
        compared = slots[rows].tolist()

        def begin() -> None:
            for slot, *values in zip(compared, before, history, strict=True):
                state[slot], self._history[slot] = map(place, values)

        begin()
        out = place(self._out(case.B + 1))
        self._fused(inputs, place(slots), out)()
        got_out = fetch(out).reshape(case.B + 1, case.HV, DIM)
        got_state = np.stack([fetch(state[slot]) for slot in compared])
        got_history = np.stack([fetch(self._history[slot]) for slot in compared])

        begin()
        convolve, decode = self._chain(inputs)
        decode.keywords["out"][:] = place(np.full(decode.keywords["out"].shape, SENTINEL, kind))
        convolve(conv_state_indices=place(slots))
        decode(place(slots))
        chain_out = fetch(decode.keywords["out"])[:, 0]
        agree = all(
            np.array_equal(fetch(state[slot]), left) and np.array_equal(fetch(self._history[slot]), rolled)
            for slot, left, rolled in zip(compared, got_state, got_history, strict=True)
        )
        own = np.arange(len(rows))
        operands = self._operands(inputs.tokens(rows), before, history, own, np.asarray)
        live = [each for each in TRUTHS[case.op](operands) if each is not None]
        not_normed = TRUTHS[case.op](operands | {"onorm_gate": None, "onorm_weight": None, "onorm_eps": None})
        windows = np.concatenate([history[:, 1:], inputs.projection[rows][:, None]], axis=1)
        return verdict(
            case,
            float(
                np.max(
                    [
                        truth.relative_error(got_out[rows], [each.out[0] for each in live]),
                        truth.relative_error(chain_out[rows], [each.out[0] for each in not_normed if each]),
                    ]
                )
            ),
            truth.relative_error(got_state, [each.states[0] for each in live]),
            complaints=(
                padding_complaint(np.concatenate([got_out[padding], chain_out[padding]])),
                "" if np.array_equal(got_history, windows) else "wrong conv history",
                "" if agree else "the unfused chain leaves another state",
            ),
        )

    @cached_property
    def _slots(self) -> list[Any]:
        slots = group_slots(self._case, self._state, self._rotation.groups, self._rng)
        return list(self._memory.place(slots))  # a view a launch

    def parts(self) -> list[Part]:
        """The fused step, and the chain that it replaces: convolution and packed decode, the output norm left out."""
        case, memory = self._case, self._memory
        inputs = self._inputs.tokens(slice(case.B))
        first = self._fused(inputs, self._slots[0], memory.place(self._out(case.B)))
        steps = [bind(first.func, **first.keywords | {"ssm_state_indices": each}) for each in self._slots]
        fused = Part(
            case=case,
            calls=steps,
            eager=first,
            bound=steps[0],
            bytes_moved=steps[0].bytes_moved,
            yardstick="RW",
            kernels=steps[:1],
        )
        convolve, decode = self._chain(inputs)
        pairs = [
            (
                bind(convolve.func, *convolve.args, **convolve.keywords, conv_state_indices=each),
                bind(decode.func, *decode.args, each, **decode.keywords),
            )
            for each in self._slots
        ]
        slots = self._slots[0]
        chain = Part(
            case=replace(case, operation="chain", norm=False),
            calls=[call for pair in pairs for call in pair],
            eager=lambda: (convolve(conv_state_indices=slots), decode(slots)),
            bound=lambda: (pairs[0][0](), pairs[0][1]()),
            bytes_moved=sum(call.bytes_moved for call in pairs[0]),
            yardstick="RW",
        )
        return [fused, chain]

    def yardsticks(self, moves: str) -> list[list[Call]]:
        """Of the same slots."""
        return [list(form) for form in state_yardsticks(moves, self._state, self._slots)]
