# SPDX-License-Identifier: Apache-2.0
"""What a call leaves behind, by the float64 truth: which elements of which arrays it writes, and what is in them then.

One function an operation, from the operands before the call (NumPy arrays by name, ``out`` among them) to
{name: Left}. Whatever a Left does not name keeps its bits. :func:`faulty_rows` counts the rows that are to be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kda_cupy.reference import truth

OUTPUT_ERROR = {"float32": 1e-5, "float16": 3e-4, "bfloat16": 3e-3}
STATE_ERROR = 1e-5
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
"""Half a unit in the last place."""
CONV_ERROR = 6e-7
"""Of a convolution in fp32, relative to the sum of its terms' magnitudes."""
TINY = 2**-25
"""Below it float16 has no digits left."""
RINGS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
LETTERS = ("q", "k", "v")

Operands = dict[str, Any]


class Left(NamedTuple):
    """What is in one array after the call."""

    wanted: Any
    """float64, the array's shape."""
    written: Any
    """bool, the array's shape: elements that have a new value."""
    error: float | None = 0.0
    """norm(got - wanted) / norm(wanted) stays below it; 0: wanted to the bit; None: see ``allowed``."""
    allowed: Any = None
    """Instead of it, for each element."""


def differences(name: str, got: Any, left: Left) -> list[str]:
    """What is wrong with the written elements of one array; an empty list if nothing is.

    Where float64 says NaN or infinity, something that is not finite has to be there, and nowhere else.
    """
    mine, wanted = got[left.written], left.wanted[left.written]
    if not mine.size:
        return []
    with np.errstate(invalid="ignore", over="ignore"):
        if left.error == 0.0:
            same = np.ascontiguousarray(mine).tobytes() == wanted.astype(got.dtype).tobytes()
            same = same or np.array_equal(mine.astype(np.float64), wanted, equal_nan=True)
            return [] if same else [f"{name}: not the bits of float64, rounded"]
        finite = np.isfinite(wanted)
        if left.allowed is not None:
            far = np.abs(mine.astype(np.float64) - wanted) > left.allowed[left.written]
            if far[finite].any():
                return [f"{name}: {int(far[finite].sum())} elements too far from float64"]
        strange = np.isfinite(mine.astype(np.float64)) != finite
        if strange.any():
            return [f"{name}: {int(strange.sum())} elements are finite where float64 is not, or the reverse"]
        if left.error is not None:
            error = truth.relative_error(mine[finite], wanted[finite])
            if not error < left.error:
                return [f"{name}: error {error:.3g}, allowed {left.error:.3g}"]
    noise = (wanted == 0) & (mine != 0)
    if name == "out" and noise.any():
        return [f"out: {int(noise.sum())} elements of silent rows are not zero"]
    return []


def _float(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def _nowhere(array: Any) -> Left:
    return Left(np.zeros(array.shape), np.zeros(array.shape, bool))


def _live(slots: Any, P: int, null_index: int) -> list[tuple[int, int]]:
    """(row, slot) of rows that are neither padding nor out of range."""
    return [(row, slot) for row, slot in enumerate(slots.tolist()) if max(null_index, -1) < slot < P]


def packed_decode(p: Operands) -> dict[str, Left]:
    """Of both packed decodes."""
    arguments = {"A_log": None} | {
        name: value for name, value in p.items() if name not in ("out", "validate")
    }
    out, state = truth.packed_decode(**arguments)
    written = np.zeros(p["initial_state"].shape, bool)
    for _, slot in _live(p["ssm_state_indices"], len(state), p.get("null_index", -1)):
        written[slot] = True
    kind = p["mixed_qkv"].dtype.name
    return {
        "out": Left(out, np.ones(out.shape, bool), OUTPUT_ERROR[kind]),
        "initial_state": Left(state, written, STATE_ERROR),
    }


def kda_step(p: Operands) -> dict[str, Left]:
    """Of kda_decode_step."""
    results = truth.kda_decode_step(p)
    state, histories = _nowhere(p["recurrent_state"]), [_nowhere(p[f"cs_{letter}"]) for letter in LETTERS]
    out = np.zeros(p["out"].shape)
    for row, result in enumerate(results):
        if result is None:
            continue
        slot = int(p["ssm_state_indices"][row])
        out[0, row] = result.out[0]
        state.wanted[slot], state.written[slot] = result.states[0], True
        for history, window in zip(histories, result.windows, strict=True):
            history.wanted[slot], history.written[slot] = window[0], True
    return {
        "out": Left(out, np.ones(out.shape, bool), OUTPUT_ERROR[p["x_q"].dtype.name]),
        "recurrent_state": state._replace(error=STATE_ERROR),
        **{f"cs_{letter}": history for letter, history in zip(LETTERS, histories, strict=True)},
    }


def gdn_step(p: Operands) -> dict[str, Left]:
    """Of gdn_decode_step."""
    results = truth.gdn_decode_step(p)
    state, history = _nowhere(p["initial_state"]), _nowhere(p["conv_state"])
    out = np.zeros(p["out"].shape)
    for row, result in enumerate(results):
        if result is None:
            continue
        slot = int(p["ssm_state_indices"][row])
        out[row, 0] = result.out[0]
        state.wanted[slot], state.written[slot] = result.states[0], True
        history.wanted[slot] = np.concatenate([window[0] for window in result.windows])
        history.written[slot] = True
    return {
        "out": Left(out, np.ones(out.shape, bool), OUTPUT_ERROR[p["mixed_qkv"].dtype.name]),
        "initial_state": state._replace(error=STATE_ERROR),
        "conv_state": history,
    }


def verify(p: Operands) -> dict[str, Left]:
    """Of kda_decode_mtp."""
    bounds, out, left = p["cu_seqlens"].tolist(), np.zeros(p["out"].shape), {}
    scratch = [f"intermediate_conv_{letter}" for letter in LETTERS]
    scratch += [name for name in ("intermediate_ssm", *RINGS) if p.get(name) is not None]
    left = {name: _nowhere(p[name]) for name in scratch}
    rings = p.get("ring_indices")
    for row, result in enumerate(truth.decode_mtp(p)):
        start, end = bounds[row], bounds[row + 1]
        if result is None or end == start:
            continue
        t, at = end - start, int(p["intermediate_state_indices"][row])
        ring = int((p["ssm_state_indices"] if rings is None else rings)[row])
        if not 0 <= at < len(p["intermediate_conv_q"]):
            continue
        if RINGS[0] in left and not 0 <= ring < len(p[RINGS[0]]):
            continue
        out[0, start:end] = result.out
        for name, window in zip(scratch, result.windows, strict=False):
            left[name].wanted[at, :t], left[name].written[at, :t] = window, True
        if "intermediate_ssm" in left:
            left["intermediate_ssm"].wanted[at, :t] = result.states
            left["intermediate_ssm"].written[at, :t] = True
        else:
            for name, value in zip(RINGS, (result.rawv, result.rawk, result.g, result.beta), strict=True):
                left[name].wanted[ring, :, :t], left[name].written[ring, :, :t] = value, True
    kind = p["x_q"].dtype.name
    errors = dict.fromkeys(("intermediate_ssm", "replayssm_g", "replayssm_beta"), STATE_ERROR)
    errors |= dict.fromkeys(RINGS[:2], STATE_ERROR if kind == "float32" else 0.0)
    left = {name: each._replace(error=errors.get(name, 0.0)) for name, each in left.items()}
    return left | {"out": Left(out, np.ones(out.shape, bool), OUTPUT_ERROR[kind])}


def commit(p: Operands) -> dict[str, Left]:
    """Of kda_commit."""
    layered = p["recurrent_state"].ndim == 5
    names = ["recurrent_state", *(f"cs_{letter}" for letter in LETTERS if p.get("cs_q") is not None)]
    left = {name: _nowhere(p[name]) for name in names}
    for layer in range(len(p["recurrent_state"])) if layered else [...]:
        arrays = {
            name: value[layer] if isinstance(value, np.ndarray) and value.ndim > 1 else value
            for name, value in p.items()
        }
        views = {name: Left(each.wanted[layer], each.written[layer]) for name, each in left.items()}
        _commit_layer(arrays, views)
    return {name: each._replace(error=STATE_ERROR * (name == names[0])) for name, each in left.items()}


def _commit_layer(p: Operands, left: dict[str, Left]) -> None:
    state, snapshots = p["recurrent_state"], p.get("intermediate_ssm")
    histories, null_index = [name for name in left if name != "recurrent_state"], p.get("null_index", -1)

    def windows_after(at: int, n: int) -> dict[str, Any]:
        return {name: _float(p[f"intermediate_conv_{name[-1]}"][at, n - 1]) for name in histories}

    for row, slot in _live(p["ssm_state_indices"], len(state), null_index):
        n = int(p["accept_lens"][row])
        if not 0 < n <= _most_accepted(p):
            continue
        at = ring = slot
        if snapshots is not None or histories:
            at = int(p["intermediate_state_indices"][row])
            rows = len(snapshots if snapshots is not None else p["intermediate_conv_q"])
            if not 0 <= at < rows:
                continue
        if snapshots is None:
            ring = slot if p.get("ring_indices") is None else int(p["ring_indices"][row])
            if not 0 <= ring < len(p[RINGS[0]]):
                continue

        def after(n: int, at: int = at, ring: int = ring, slot: int = slot) -> Any:
            if snapshots is not None:
                return _float(snapshots[at, n - 1])
            parts = [_float(p[name][ring]) for name in RINGS]
            normalize = p.get("use_qk_l2norm_in_kernel", True)
            return truth.replay(_float(state[slot]), *parts, n, normalize_k=normalize)

        stores = [(slot, n)]
        if p.get("track_indices") is not None:
            where, step = int(p["track_indices"][row]), int(p["track_steps"][row])
            if step >= 0 and where > max(null_index, -1):
                if where >= len(state) or step >= n:
                    continue  # a fault of the row: nothing of it is committed
                stores.append((where, step + 1))
        for where, count in stores:
            for name, value in {"recurrent_state": after(count), **windows_after(at, count)}.items():
                left[name].wanted[where], left[name].written[where] = value, True


def conv(p: Operands) -> dict[str, Left]:
    """Of causal_conv1d_update. Pieces are x[0], x[1], ..; one piece is x."""

    def pieces(name: str) -> list[str]:
        return [each for each in p if each.partition("[")[0] == name and p[each] is not None]

    states, windows = pieces("conv_state"), pieces("intermediate_conv_window")
    left = {name: _nowhere(p[name]) for name in (windows or states)}
    out, allowed = np.zeros(p["out"].shape), np.zeros(p["out"].shape)
    B, slots = len(p["out"]), p.get("conv_state_indices")
    live = _live(np.arange(B) if slots is None else slots, len(p[states[0]]), p.get("null_index", -1))
    kind = p["out"].dtype.name
    for row, slot in live:
        at = int(p["intermediate_state_indices"][row]) if windows else 0
        if windows and not 0 <= at < len(p[windows[0]]):
            continue
        first = 0
        for number, (x, state, weight) in enumerate(zip(pieces("x"), states, pieces("weight"), strict=True)):
            tokens = _float(p[x][row]).reshape(p[x].shape[1], -1)
            taps, history = _float(p[weight]), _float(p[state][slot])
            bias = _float(p[pieces("bias")[number]]) if pieces("bias") else 0.0
            for j, token in enumerate(tokens.T):
                size, _ = truth.conv(*map(np.abs, (history, token, taps, bias)), np.float64, silu=False)
                silu = p.get("activation") == "silu"
                act, history = truth.conv(history, token, taps, bias, np.float64, silu=silu)
                here = (row, slice(first, first + len(tokens)), *([j] if out.ndim > 2 else []))
                out[here] = act
                allowed[here] = CONV_ERROR * (size + np.abs(act)) + ROUNDING[kind] * np.abs(act) + TINY
                if windows:
                    left[windows[number]].wanted[at, j] = history
                    left[windows[number]].written[at, j] = True
            if not windows:
                left[state].wanted[slot], left[state].written[slot] = history, True
            first += len(tokens)
    return left | {"out": Left(out, np.ones(out.shape, bool), None, allowed)}


def faulty_rows(p: Operands) -> int:
    """Rows with an index, a length or a count out of range, which ``check_errors`` has to raise."""
    state = p.get("recurrent_state", p.get("initial_state"))
    names = [each for each in p if each.partition("[")[0] == "conv_state"]
    histories = p[names[0]] if state is None else state
    P = len(histories) if histories.ndim < 5 else histories.shape[1]
    slots = p.get("ssm_state_indices", p.get("conv_state_indices"))
    slots = np.arange(len(p["out"])) if slots is None else slots
    live = [row for row, slot in enumerate(slots.tolist()) if slot > max(p.get("null_index", -1), -1)]
    return sum(_is_faulty(p, row, int(slots[row]), P) for row in live)


def _is_faulty(p: Operands, row: int, slot: int, P: int) -> bool:
    """In the order in which an operation looks: what a row without tokens names is not looked at."""
    if "cu_seqlens" in p:
        T, bounds = p["x_q"].shape[1], p["cu_seqlens"].tolist()
        start, end = bounds[row], bounds[row + 1]
        longest = p.get("max_tokens_per_request") or T // (len(bounds) - 1)
        if not (0 <= start <= T and end <= T and 0 <= end - start <= longest):
            return True
        if start == end:
            return False
    if slot >= P:
        return True
    if "accept_lens" in p:
        n = int(p["accept_lens"][row])
        if n <= 0 or n > _most_accepted(p):
            return n != 0
    return _names_no_row(p, row, slot) or _tracks_wrongly(p, row, P)


def _names_no_row(p: Operands, row: int, slot: int) -> bool:
    """A scratch row or a ring row out of range."""
    scratch = (
        *("intermediate_ssm", "intermediate_conv_q"),
        *("intermediate_conv_window", "intermediate_conv_window[0]"),
    )
    here = [p[name] for name in scratch if p.get(name) is not None]
    at = p.get("intermediate_state_indices")
    if (
        here
        and at is not None
        and not 0 <= int(at[row]) < _rows(here[0], 5 if here[0] is p.get(scratch[0]) else 4)
    ):
        return True
    if p.get(RINGS[0]) is None:
        return False
    ring = slot if p.get("ring_indices") is None else int(p["ring_indices"][row])
    return not 0 <= ring < _rows(p[RINGS[0]], 4)


def _rows(array: Any, rank: int) -> int:
    """Length of the axis that is the first one without layers."""
    return int(array.shape[array.ndim - rank])


def _tracks_wrongly(p: Operands, row: int, P: int) -> bool:
    if p.get("track_indices") is None:
        return False
    where, step = int(p["track_indices"][row]), int(p["track_steps"][row])
    if step < 0 or where <= max(p.get("null_index", -1), -1):
        return False
    return where >= P or step >= int(p["accept_lens"][row])


def _most_accepted(p: Operands) -> int:
    """The steps that the scratch arrays hold, the fewest of them."""
    axes = {"intermediate_ssm": -4, RINGS[0]: -2, **{f"intermediate_conv_{letter}": -3 for letter in LETTERS}}
    return min(16, *(p[name].shape[axis] for name, axis in axes.items() if p.get(name) is not None))


AFTER: dict[str, Callable[[Operands], dict[str, Left]]] = {
    "kda_packed_decode": packed_decode,
    "gdn_packed_decode": packed_decode,
    "kda_decode_step": kda_step,
    "gdn_decode_step": gdn_step,
    "kda_decode_mtp": verify,
    "kda_commit": commit,
    "causal_conv1d_update": conv,
}
