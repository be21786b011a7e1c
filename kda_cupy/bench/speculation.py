# SPDX-License-Identifier: Apache-2.0
"""Verify, commit, and both of them (a round) as a workload: B requests of t tokens, from rings or snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.arrays import describe, slide
from kda_cupy.bench.cases import Case, random_array, random_rows, random_state
from kda_cupy.bench.judge import SENTINEL, Verdict, choose_rows, padding_complaint, verdict
from kda_cupy.bench.settle import settle
from kda_cupy.bench.workload import Call, Memory, Part, Rotation, group_slots
from kda_cupy.bench.yardstick import read_and_copy, state_yardsticks
from kda_cupy.launch import BoundCall, bind
from kda_cupy.ops import commit
from kda_cupy.ops.commit import kda_commit
from kda_cupy.ops.mtp_checks import DIM, RINGS
from kda_cupy.ops.mtp_verify import kda_decode_mtp
from kda_cupy.reference import batched_mtp, truth

JUDGED_REQUESTS: Final = 3
NORM_EPSILON: Final = 1e-5
TAPS: Final = 4
HISTORIES: Final = ("cs_q", "cs_k", "cs_v")
WINDOWS: Final = ("intermediate_conv_q", "intermediate_conv_k", "intermediate_conv_v")


class Inputs(NamedTuple):
    """What the tokens bring along and what a layer owns, as NumPy arrays. C = (2*H + HV) * 128 channels."""

    projection: Any
    """[T, C]: q, k and v of a token side by side"""
    g: Any
    """[T, HV*128]"""
    beta: Any
    """[T, HV]"""
    norm_gate: Any
    """[T, HV*128], or None"""
    taps: Any
    """[C, 4], float32"""
    A_log: Any
    """[HV], float32"""
    dt_bias: Any
    """[HV*128], float32"""
    norm_weight: Any
    """[128], float32, or None"""

    def tokens(self, selection: Any) -> Inputs:
        """Some of the tokens: an index array or a slice."""
        return self._replace(
            projection=self.projection[selection],
            g=self.g[selection],
            beta=self.beta[selection],
            norm_gate=None if self.norm_gate is None else self.norm_gate[selection],
        )

    def operands(self, case: Case, place: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
        """By the names of ``kda_decode_mtp``; q, k and v are slices of one projection, as engines have them."""
        T, H, HV = len(self.g), case.H, case.HV
        found = {
            "g": place(self.g).reshape(1, T, HV, DIM),
            "beta": place(self.beta).reshape(1, T, HV),
            "A_log": place(self.A_log),
            "dt_bias": place(self.dt_bias),
            "lower_bound": case.lower_bound,
        }
        heads = place(self.projection).reshape(1, T, 2 * H + HV, DIM)
        found |= dict(zip(("x_q", "x_k", "x_v"), split(heads, (H, H, HV), axis=2), strict=True))
        taps = split(place(self.taps), channels_of(case), axis=0)
        found |= dict(zip(("w_q", "w_k", "w_v"), taps, strict=True))
        if case.norm:
            found |= {
                "onorm_gate": place(self.norm_gate).reshape(1, T, HV, DIM),
                "onorm_weight": place(self.norm_weight),
                "onorm_eps": NORM_EPSILON,
            }
        return found


def channels_of(case: Case) -> tuple[int, int, int]:
    """Of q, k and v."""
    return case.H * DIM, case.H * DIM, case.HV * DIM


def split(array: Any, sizes: tuple[int, ...], axis: int) -> list[Any]:
    """Neighbouring parts of an axis, as views."""
    ends = np.cumsum(sizes).tolist()
    before = (slice(None),) * axis
    return [array[(*before, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True)]


def make_inputs(case: Case, requests: int, rng: np.random.Generator) -> Inputs:
    """Random operands for requests of t tokens."""
    T, channels, values = requests * case.t, sum(channels_of(case)), case.HV * DIM
    taps = random_array(rng, (channels, TAPS)) / 2
    taps[:, -1] += np.copysign(np.float32(0.5), taps[:, -1])  # so that every token matters
    return Inputs(
        projection=random_rows(rng, T, channels, case.dtype),
        g=random_rows(rng, T, values, case.dtype),
        beta=random_rows(rng, T, case.HV, case.dtype),
        norm_gate=random_rows(rng, T, values, case.dtype) if case.norm else None,
        taps=taps,
        A_log=rng.uniform(-2, 1, case.HV).astype(np.float32),
        dt_bias=random_array(rng, (values,)) / 2,
        norm_weight=1 + random_array(rng, (DIM,)) / 4 if case.norm else None,
    )


class Speculation:
    """B requests, each in a slot of ``state`` [P, HV, V, K]; scratch rows rotate as the slots do."""

    def __init__(
        self, case: Case, memory: Memory, state: Any, rotation: Rotation, rng: np.random.Generator
    ) -> None:
        self._case, self._memory, self._state, self._rotation, self._rng = case, memory, state, rotation, rng
        inputs = self._inputs = make_inputs(case, case.B + 1, rng)
        kind, P, t, C = inputs.projection.dtype, len(state), case.t, sum(channels_of(case))
        step_bytes = (3 if case.plain_windows else 1) * C * kind.itemsize + (
            case.slot_bytes if case.mode == "snapshots" else 0
        )
        self._scratch_groups = rotation.scratch_groups(case.B * t * step_bytes)
        rows = self._scratch_groups * case.B + 1
        # Channels are neighbours, as engines keep them: [.., 3, C], and the operations see [.., C, 3].
        self._history = memory.zeros((P, 3, C), kind)
        self._history[:] = memory.place(random_array(rng, (3, C)).astype(kind))
        self._scratch: dict[str, Any] = self._by_part(HISTORIES, self._history)
        if case.plain_windows:
            windows = memory.zeros((rows, t, 3, C), kind).swapaxes(2, 3)
        else:
            windows = slide(
                memory.zeros((rows, t + 2, C), kind)
            )  # each raw input once, as StatePool keeps them
        self._scratch |= dict(zip(WINDOWS, split(windows, channels_of(case), axis=2), strict=True))
        if case.mode == "snapshots":
            self._scratch["intermediate_ssm"] = memory.zeros((rows, t, *state.shape[1:]), np.float32)
        else:
            shapes = ((case.HV, t, DIM), (case.H, t, DIM), (case.HV, t, DIM), (case.HV, t))
            kinds = (kind, kind, np.float32, np.float32)
            self._scratch |= {
                name: memory.zeros((P, *shape), each)
                for name, shape, each in zip(RINGS, shapes, kinds, strict=True)
            }
        self._rows = rows

    def _by_part(self, names: tuple[str, ...], array: Any) -> dict[str, Any]:
        parts = split(array.swapaxes(-1, -2), channels_of(self._case), axis=array.ndim - 2)
        return dict(zip(names, parts, strict=True))

    def _verify(self, operands: dict[str, Any], slots: Any, rows: Any, out: Any) -> Callable[[], Any]:
        bounds = self._memory.place(np.arange(len(slots) + 1, dtype=np.int32) * self._case.t)
        return partial(
            kda_decode_mtp,
            **operands,
            **self._scratch,
            recurrent_state=self._state,
            ssm_state_indices=slots,
            intermediate_state_indices=rows,
            cu_seqlens=bounds,
            out=out,
        )

    def _commit(self, accepted: Any, slots: Any, rows: Any) -> Callable[[], Any]:
        return partial(
            kda_commit,
            accept_lens=accepted,
            **self._scratch,
            recurrent_state=self._state,
            ssm_state_indices=slots,
            intermediate_state_indices=rows,
        )

    # ---- right? -----------------------------------------------------------------------------------------------

    def judge(self) -> Verdict:
        """Run a round once, with a request of padding added, and compare with the float64 truth.

        The state's error is that after the commit, and with snapshots the largest of theirs, if that is larger.
        """
        case, inputs, state, (place, fetch, _) = self._case, self._inputs, self._state, self._memory
        t, accept = case.t, case.accept or case.t
        padding, requests, slots = choose_rows(case, state, self._rng, compared=JUDGED_REQUESTS)
        tokens = requests[:, None] * t + np.arange(t)
        before = random_state(case, len(requests), self._rng)
        history = random_array(self._rng, (len(requests), *self._history.shape[1:])).astype(
            inputs.projection.dtype
        )
        x = inputs.projection[tokens]
        settle(x, history, inputs.taps, self._rng)
        inputs.projection[tokens] = x
        compared = slots[requests].tolist()
        for slot, *values in zip(compared, before, history, strict=True):
            state[slot], self._history[slot] = map(place, values)
        rows = self._rng.permutation(self._rows)[: case.B + 1].astype(np.int32)
        out = place(np.full((1, len(inputs.g), case.HV, DIM), SENTINEL, x.dtype))

        on_device = place(slots), place(rows)
        self._verify(inputs.operands(case, place), *on_device, out)()
        got_out = fetch(out).reshape(case.B + 1, t, case.HV, DIM)
        unchanged = all(
            np.array_equal(fetch(state[slot]), was) and np.array_equal(fetch(self._history[slot]), had)
            for slot, was, had in zip(compared, before, history, strict=True)
        )
        snapshots = self._scratch.get("intermediate_ssm")
        got_snapshots = (
            [] if snapshots is None else [fetch(snapshots[row]) for row in rows[requests].tolist()]
        )
        self._commit(place(np.full(case.B + 1, accept, np.int32)), *on_device)()
        got_state = np.stack([fetch(state[slot]) for slot in compared])
        got_history = np.stack([fetch(self._history[slot]) for slot in compared])

        wanted = truth.decode_mtp(
            inputs.tokens(tokens.ravel()).operands(case)
            | self._by_part(HISTORIES, history)
            | {
                "recurrent_state": before,
                "ssm_state_indices": np.arange(len(requests)),
                "cu_seqlens": np.arange(len(requests) + 1) * t,
            }
        )
        want = [each for each in wanted if each is not None]
        windows = [np.concatenate([part[accept - 1] for part in each.windows]).T for each in want]
        states: list[tuple[Any, Any]] = [(got_state, [each.states[accept - 1] for each in want])]
        if got_snapshots:
            states.append((got_snapshots, [each.states for each in want]))
        return verdict(
            case,
            truth.relative_error(got_out[requests], [each.out for each in want]),
            float(np.max([truth.relative_error(got, right) for got, right in states])),
            complaints=(
                padding_complaint(got_out[padding]),
                "" if unchanged else "the verify changed a state or history",
                ""
                if np.array_equal(got_history, np.stack(windows).astype(x.dtype))
                else "wrong conv history",
            ),
        )

    # ---- how fast? --------------------------------------------------------------------------------------------

    @cached_property
    def _indices(self) -> list[tuple[Any, Any]]:
        """Slots and scratch rows of each launch."""
        case, place = self._case, self._memory.place
        slots = place(group_slots(case, self._state, self._rotation.groups, self._rng))
        rows = self._rng.permutation(self._rows - 1).reshape(self._scratch_groups, case.B)
        placed = place(rows.astype(np.int32))
        return [(each, placed[number % self._scratch_groups]) for number, each in enumerate(slots)]

    def parts(self) -> list[Part]:
        """The verify; for a round, the commit and the round as well.

        A round has all groups verified before the first of them is committed: between its verify and its commit, a
        layer sees all the others pass, so its state has left L2.
        """
        case, place = self._case, self._memory.place
        operands = self._inputs.tokens(slice(case.B * case.t)).operands(case, place)
        out = self._memory.zeros((1, case.B * case.t, case.HV, DIM), operands["x_q"].dtype)
        verifies = [self._verify(operands, *each, out) for each in self._indices]
        writes_copies = case.mode == "snapshots"
        verify = _part(
            replace(case, operation="verify", accept=0), verifies, yardstick="SNAP" if writes_copies else "R"
        )
        if case.operation == "verify":
            return [verify]
        accepted = place(np.full(case.B, case.accept, np.int32))
        commits = [self._commit(accepted, *each) for each in self._indices]
        moved = commit_bytes(commits[0].keywords, case.accept)  # type: ignore[attr-defined]
        committed = _part(
            replace(case, operation="commit", norm=False), commits, yardstick="RW", bytes_moved=moved
        )
        whole = Part(
            case=case,
            calls=[*verify.calls, *committed.calls],
            eager=lambda: (verify.eager(), committed.eager()),
            bound=lambda: (verify.bound(), committed.bound()),
            bytes_moved=verify.bytes_moved + committed.bytes_moved,
            yardstick="RW",
        )
        return [verify, committed, whole]

    def yardsticks(self, moves: str) -> list[list[Call]]:
        """Of the same slots; SNAP stores to the same scratch rows."""
        if moves == "SNAP":
            copies = self._scratch["intermediate_ssm"]
            return [[read_and_copy(self._state, slots, copies, rows) for slots, rows in self._indices]]
        forms = state_yardsticks(moves, self._state, [slots for slots, _ in self._indices])
        return [list(form) for form in forms]


def _part(case: Case, calls: list[Any], *, yardstick: str, bytes_moved: int | None = None) -> Part:
    """calls: partial functions of an operation."""
    bound: list[BoundCall] = [bind(each.func, **each.keywords) for each in calls]
    return Part(
        case=case,
        calls=bound,
        eager=calls[0],
        bound=bound[0],
        bytes_moved=bound[0].bytes_moved if bytes_moved is None else bytes_moved,
        yardstick=yardstick,
        kernels=bound[:1],
    )


def commit_bytes(operands: dict[str, Any], accept: int) -> int:
    """What a commit of ``accept`` tokens moves: the formula of :func:`kda_cupy.ops.commit.bytes_moved`."""
    infos = {name: describe(array)[0] for name, array in operands.items()}
    plan = commit.check(
        batched_mtp.Commit(**{name: infos.get(name) for name in batched_mtp.Commit._fields}), commit.Options()
    )
    return commit.bytes_moved(plan.N, plan.layers, plan.H, plan.HV, accept, plan.infos)
