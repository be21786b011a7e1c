# SPDX-License-Identifier: Apache-2.0
"""``causal_conv1d_update``: the short convolution in front of q, k and v by itself, history in place.

The formula stands in kernels/conv.cuh. Channels may come in one piece or in up to three; what is called ``x`` below is
then a tuple, and so are ``conv_state``, ``weight`` and ``bias``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy import bridge, guard
from kda_cupy.arrays import HOST, ArrayInfo, describe
from kda_cupy.checks import (
    check_alignment,
    check_apart,
    check_bfloat16_support,
    check_dtype,
    check_modes,
    check_one_place,
    check_slots,
    check_strides,
    check_written,
    shape_text,
)
from kda_cupy.config import ConvUpdateConfig
from kda_cupy.dtypes import FLOATS, INT64
from kda_cupy.errors import error
from kda_cupy.launch import BoundCall, Call, HostCall, Launch, register_binder, split_rows
from kda_cupy.modules import Kernel, get_kernel
from kda_cupy.ops import conv_params
from kda_cupy.ops.mtp_checks import check_index_vector, check_rows, to_host
from kda_cupy.reference import batched_step

NAME: Final = "causal_conv1d_update"
PIECEWISE: Final = ("x", "conv_state", "weight", "bias", "intermediate_conv_window")
_WIDTHS: Final = (2, 3, 4)


class Operands(NamedTuple):
    """The arrays; the piece-wise ones are tuples, empty if they are absent, the others may be None."""

    x: tuple[Any, ...]
    conv_state: tuple[Any, ...]
    weight: tuple[Any, ...]
    bias: tuple[Any, ...]
    intermediate_conv_window: tuple[Any, ...]
    conv_state_indices: Any
    intermediate_state_indices: Any
    out: Any


class Options(NamedTuple):
    """The host scalars, as they were passed."""

    activation: Any = None
    null_index: Any = -1
    validate: Any = "metadata"


@dataclass(frozen=True)
class Plan(guard.Noting):
    """What the metadata of the operands and the options decide; the same for every call that looks alike."""

    B: int
    tokens: int
    channels: tuple[int, ...]
    slots: int
    scratch_rows: int
    device: int
    infos: Operands
    silu: bool
    null_index: int
    validate_fully: bool
    apart: set[tuple[int, ...]] = field(default_factory=set)
    """Addresses known not to overlap."""

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[B, C] or [B, C, t], as ``x``, all channels in one."""
        return (self.B, sum(self.channels), *self.infos.x[0].shape[2:])

    @cached_property
    def config(self) -> ConvUpdateConfig:
        """What the kernel is compiled for."""
        x, weight = self.infos.x[0], self.infos.weight[0]
        return ConvUpdateConfig(
            width=weight.shape[1],
            silu=self.silu,
            activation=x.dtype.name,
            conv_weight=weight.dtype.name,
            threads=conv_params.THREADS,
            params_bytes=conv_params.PARAMS_BYTES,
        )

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled at the first use."""
        return get_kernel(self.config, self.device)

    @cached_property
    def packed(self) -> bytes:
        """The parameter struct from ``x_stride`` on."""
        return conv_params.pack_layout(_layout(self))

    @property
    def bytes_moved(self) -> int:
        """See the function of this name."""
        x, weight = self.infos.x[0], self.infos.weight[0]
        windows = self.tokens if self.infos.intermediate_conv_window else 1
        return bytes_moved(
            self.B, self.tokens, sum(self.channels), weight.shape[1], windows, x.dtype.itemsize
        )


def bytes_moved(B: int, t: int, C: int, width: int, windows: int, size: int) -> int:
    """Bytes that B live rows must move through memory: ``B * C * (2 * t + (width - 1) * (1 + windows)) * size``.

    Inputs and outputs, history read, and histories written: one, or a window for each token. Weights, which the rows
    share, and index vectors are not counted.
    """
    return B * C * (2 * t + (width - 1) * (1 + windows)) * size


def _named(operands: Operands) -> dict[str, Any]:
    """The arrays by the names that messages use: ``x``, or ``x[0]`` and ``x[1]``."""
    named: dict[str, Any] = {}
    for name in Operands._fields:
        value = getattr(operands, name)
        if name not in PIECEWISE:
            named[name] = value
        else:
            named |= {_piece(name, number, len(value)): each for number, each in enumerate(value)}
    return named


def _piece(name: str, number: int, pieces: int) -> str:
    return name if pieces == 1 else f"{name}[{number}]"


def _regroup(operands: Operands, named: Mapping[str, Any]) -> Operands:
    """The inverse of :func:`_named`, for arrays that took the place of others."""
    return Operands._make(
        tuple(named[_piece(name, number, len(value))] for number in range(len(value)))
        if name in PIECEWISE
        else named[name]
        for name, value in operands._asdict().items()
    )


@lru_cache(maxsize=1024)
def check(infos: Operands, options: Options) -> Plan:
    """Check everything that metadata can show, in the documented order, and plan the launch.

    ``infos`` holds an ArrayInfo in place of each array. Raises OperandError or DeviceError.
    """
    by_name = _named(infos)
    named: dict[str, ArrayInfo] = {name: info for name, info in by_name.items() if info is not None}
    for name in PIECEWISE:
        for number, info in enumerate(getattr(infos, name)):
            if info is None:
                raise error(
                    "KDA-ARRAY-KIND", operand=_piece(name, number, len(getattr(infos, name))), got="None"
                )
    _check_pieces(infos)
    check_one_place(named, "KDA-PACKED-DEVICES")

    B, tokens, channels = _check_x(infos.x)
    width = _check_weights(infos, channels)
    slots = _check_histories(infos.conv_state, channels, width)
    if infos.conv_state_indices is not None:
        check_index_vector("conv_state_indices", infos.conv_state_indices, B)
    elif slots < B:
        got = f"P={slots}, and no `conv_state_indices`"
        wanted = f"[P, {channels[0]}, {width - 1}] with P of at least B={B}"
        raise error("KDA-CONV-STATE-SHAPE", operand="conv_state", got=got, shape=wanted)
    scratch_rows = _check_windows(infos, B, tokens, channels, width)
    out = infos.out
    shape = (B, sum(channels), *infos.x[0].shape[2:])
    if out is not None and out.shape != shape:
        raise error("KDA-CONV-OUT-SHAPE", operand="out", got=shape_text(out.shape), shape=shape_text(shape))
    _check_dtypes(infos)
    for name, info in named.items():
        check_strides(name, info)
        check_alignment(name, info)

    if options.activation not in (None, "silu"):
        raise error("KDA-VALUE-ACTIVATION", operand="activation", got=repr(options.activation))
    check_modes(options.null_index, options.validate)
    check_written({name: info for name, info in named.items() if _is_written(name, infos)})
    return Plan(
        B=B,
        tokens=tokens,
        channels=channels,
        slots=slots,
        scratch_rows=scratch_rows,
        device=infos.x[0].device,
        infos=infos,
        silu=options.activation == "silu",
        null_index=int(options.null_index),
        validate_fully=options.validate == "full",
    )


def _is_written(name: str, operands: Operands) -> bool:
    """With windows, the history is only read."""
    kept = "intermediate_conv_window" if operands.intermediate_conv_window else "conv_state"
    return name == "out" or name.startswith(kept + "[") or name == kept


def _check_pieces(infos: Operands) -> None:
    pieces = len(infos.x)
    for name in PIECEWISE:
        number = len(getattr(infos, name))
        if not 1 <= number <= conv_params.PIECES or number != pieces:
            optional = name in ("bias", "intermediate_conv_window")
            if number or not optional:
                got = f"{pieces} in `x`" + (f" and {number} in `{name}`" if name != "x" else "")
                raise error("KDA-CONV-PIECES", operand=name, got=got)


def _check_x(x: tuple[ArrayInfo, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Returns B, tokens and the channels of each piece."""
    for number, info in enumerate(x):
        name = _piece("x", number, len(x))
        alike = (
            info.rank == x[0].rank and info.shape[:1] == x[0].shape[:1] and info.shape[2:] == x[0].shape[2:]
        )
        if info.rank not in (2, 3) or not alike or not info.shape[1]:
            raise error("KDA-CONV-X-SHAPE", operand="x", got=f"`{name}` of shape {shape_text(info.shape)}")
    first = x[0]
    return first.shape[0], first.shape[2] if first.rank == 3 else 1, tuple(info.shape[1] for info in x)


def _check_weights(infos: Operands, channels: tuple[int, ...]) -> int:
    """Returns the width."""
    first = infos.weight[0]
    width = first.shape[1] if first.rank == 2 else 0
    for number, (info, count) in enumerate(zip(infos.weight, channels, strict=True)):
        if width not in _WIDTHS or info.shape != (count, width):
            name, got = _piece("weight", number, len(channels)), f"shape {shape_text(info.shape)}"
            shape = f"[{count}, width] with a width of 2, 3 or 4"
            raise error("KDA-CONV-WEIGHT-SHAPE", operand=name, got=got, shape=shape)
    for number, (info, count) in enumerate(zip(infos.bias, channels, strict=False)):
        if info.shape != (count,):
            name, got = _piece("bias", number, len(channels)), f"shape {shape_text(info.shape)}"
            raise error("KDA-CONV-WEIGHT-SHAPE", operand=name, got=got, shape=f"[{count}]")
    return int(width)


def _check_histories(states: tuple[ArrayInfo, ...], channels: tuple[int, ...], width: int) -> int:
    """Returns the number of slots."""
    slots = states[0].shape[0] if states[0].rank == 3 else 0
    for number, (info, count) in enumerate(zip(states, channels, strict=True)):
        if info.shape != (slots, count, width - 1) or info.rank != 3:
            name, got = _piece("conv_state", number, len(channels)), f"shape {shape_text(info.shape)}"
            shape = f"[P, {count}, {width - 1}]" + (f" with P={slots}" if number else "")
            raise error("KDA-CONV-STATE-SHAPE", operand=name, got=got, shape=shape)
    return int(slots)


def _check_windows(infos: Operands, B: int, tokens: int, channels: tuple[int, ...], width: int) -> int:
    """Returns the number of scratch rows; 0 without windows."""
    windows, indices = infos.intermediate_conv_window, infos.intermediate_state_indices
    if bool(windows) != (indices is not None):
        name, other = "intermediate_conv_window", "intermediate_state_indices"
        missing, there = (name, other) if not windows else (other, name)
        raise error("KDA-CONV-WINDOWS-INCOMPLETE", operand=missing, got=f"`{there}` without `{missing}`")
    if not windows:
        return 0
    rows = windows[0].shape[0] if windows[0].rank == 4 else 0
    for number, (info, count) in enumerate(zip(windows, channels, strict=True)):
        wanted = info.rank == 4 and info.shape[0] == rows and info.shape[1] >= tokens
        if not wanted or info.shape[2:] != (count, width - 1):
            name = _piece("intermediate_conv_window", number, len(channels))
            shape = f"[rows, >={tokens}, {count}, {width - 1}]" + (f" with {rows} rows" if number else "")
            raise error("KDA-CONV-WINDOW-SHAPE", operand=name, got=shape_text(info.shape), shape=shape)
    check_index_vector("intermediate_state_indices", indices, B)
    return int(rows)


def _check_dtypes(infos: Operands) -> None:
    named = _named(infos)
    activation, taps = infos.x[0].dtype, infos.weight[0].dtype
    for name, info in named.items():
        kind = name.partition("[")[0]
        if info is None or kind.endswith("indices"):
            continue
        if kind in ("weight", "bias"):
            check_dtype(name, info, FLOATS if info is infos.weight[0] else (taps,))
        else:
            check_dtype(name, info, FLOATS if info is infos.x[0] else (activation,))
    check_bfloat16_support(named)


def _layout(plan: Plan) -> conv_params.ConvLayout:
    infos = plan.infos

    def strides(name: str, axis: int) -> tuple[int, ...]:
        return tuple(info.stride(axis) if axis < info.rank else 0 for info in getattr(infos, name))

    def stride(info: ArrayInfo | None, axis: int = 0) -> int:
        return info.stride(axis) if info is not None and axis < info.rank else 0

    out, C = infos.out, sum(plan.channels)
    slots, scratch = infos.conv_state_indices, infos.intermediate_state_indices
    return conv_params.ConvLayout(
        x_stride=strides("x", 0),
        x_channel_stride=strides("x", 1),
        x_token_stride=strides("x", 2),
        w_stride=strides("weight", 0),
        w_tap_stride=strides("weight", 1),
        bias_stride=strides("bias", 0),
        cs_slot_stride=strides("conv_state", 0),
        cs_channel_stride=strides("conv_state", 1),
        cs_tap_stride=strides("conv_state", 2),
        window_row_stride=strides("intermediate_conv_window", 0),
        window_step_stride=strides("intermediate_conv_window", 1),
        window_channel_stride=strides("intermediate_conv_window", 2),
        window_tap_stride=strides("intermediate_conv_window", 3),
        channels=plan.channels,
        blocks=conv_params.blocks_of(plan.channels),
        out_stride=C * plan.tokens if out is None else stride(out),
        out_channel_stride=plan.tokens if out is None else stride(out, 1),
        out_token_stride=1 if out is None else stride(out, 2),
        slot_index_stride=stride(slots),
        scratch_index_stride=stride(scratch),
        slots=plan.slots,
        scratch_rows=plan.scratch_rows,
        tokens=plan.tokens,
        null_index=plan.null_index,
        slot_index_is_64bit=slots is not None and slots.dtype == INT64,
        scratch_index_is_64bit=scratch is not None and scratch.dtype == INT64,
        operation=guard.OPERATIONS.index(NAME),
    )


def prepare(operands: Operands, options: Options) -> tuple[Call, Plan, bool]:
    """Check and convert everything, and return what only has to be called.

    Also returns the plan, and whether arrays of other libraries are involved.
    """
    given = _named(operands)
    foreign = not bridge.all_native(given.values())
    written = frozenset(name for name in given if _is_written(name, operands))
    native = bridge.adopt_all(given, written) if foreign else given
    described = {name: (None, 0) if array is None else describe(array) for name, array in native.items()}
    infos = {name: info for name, (info, _) in described.items()}
    plan = _plan(_regroup(operands, infos), options)
    pointers = {name: pointer for name, (_, pointer) in described.items()}
    check_apart(infos, tuple(pointers.values()), written, plan.apart)
    arrays = _regroup(operands, native)
    if plan.validate_fully:
        _check_values(arrays, plan)

    handed = operands.out
    if handed is None:
        handed, out = bridge.empty_like_caller(operands.x[0], arrays.x[0], plan.out_shape)
        arrays = arrays._replace(out=out)
        pointers["out"] = describe(out)[1]
    results = arrays.out if handed is None else handed
    if plan.device == HOST:
        return HostCall(partial(_run_on_host, plan, arrays), results), plan, foreign
    return _launch(plan, arrays, _regroup(operands, pointers), results), plan, foreign


def _plan(infos: Operands, options: Options) -> Plan:
    """:func:`check`, also for options that cannot be a key (arrays, and whatever else is to be refused)."""
    try:
        hash(options)
    except TypeError:
        return check.__wrapped__(infos, options)
    return check(infos, options)


def _check_values(arrays: Operands, plan: Plan) -> None:
    """Read what is on the GPU and raise SlotError for what the kernel would not follow, and for races."""
    slots = np.arange(plan.B) if arrays.conv_state_indices is None else to_host(arrays.conv_state_indices)
    live = slots > plan.null_index
    if arrays.intermediate_conv_window:  # the history is only read: rows may share it
        check_rows("conv_state_indices", slots, live, plan.slots, once=False)
        rows = to_host(arrays.intermediate_state_indices)
        check_rows("intermediate_state_indices", rows, live, plan.scratch_rows)
    else:
        check_slots(slots, plan.slots, plan.null_index, "conv_state_indices")


def _launch(plan: Plan, arrays: Operands, pointers: Operands, results: Any) -> Launch:
    launches = tuple(
        (
            conv_params.grid(rows, plan.channels),
            np.void(
                conv_params.pack_pointers(
                    conv_params.ConvPointers(
                        x=pointers.x,
                        w=pointers.weight,
                        bias=pointers.bias,
                        cs=pointers.conv_state,
                        windows=pointers.intermediate_conv_window,
                        conv_state_indices=pointers.conv_state_indices,
                        intermediate_state_indices=pointers.intermediate_state_indices,
                        out=pointers.out,
                        errors=plan.errors,
                        first_row=first,
                    )
                )
                + plan.packed
            ),
        )
        for first, rows in split_rows(plan.B)
    )
    return Launch(plan.kernel, plan.device, (conv_params.THREADS, 1, 1), launches, results, keep=arrays)


def _run_on_host(plan: Plan, arrays: Operands) -> None:
    number = guard.OPERATIONS.index(NAME)
    batched_step.conv_update(
        arrays.x,
        arrays.conv_state,
        arrays.weight,
        arrays.bias,
        arrays.intermediate_conv_window,
        np.arange(plan.B) if arrays.conv_state_indices is None else arrays.conv_state_indices,
        arrays.intermediate_state_indices,
        arrays.out,
        silu=plan.silu,
        null_index=plan.null_index,
        on_fault=lambda operand, *note: guard.record_on_host(number, guard.OPERANDS.index(operand), *note),
    )


def _as_pieces(value: Any) -> tuple[Any, ...]:
    """One array, some of them, or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _collect(arguments: Mapping[str, Any]) -> tuple[Operands, Options]:
    """Arguments of the call as arrays and host scalars."""
    for name in ("x", "conv_state", "weight"):
        if arguments[name] is None:
            raise error("KDA-ARRAY-KIND", operand=name, got="None")
    pieces = {name: _as_pieces(arguments[name]) for name in PIECEWISE}
    others = {name: arguments[name] for name in Operands._fields if name not in PIECEWISE}
    return Operands(**pieces, **others), Options(**{name: arguments[name] for name in Options._fields})


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    conv_state_indices: Any = None,
    *,
    intermediate_conv_window: Any = None,
    intermediate_state_indices: Any = None,
    out: Any = None,
    null_index: int = -1,
    validate: str = "metadata",
) -> Any:
    """Convolve the next token (or t of them) of every row, and roll the history of its slot in place.

    ==========================  ====================================  ========================  ==============
    operand                     shape                                 dtype                     strides
    ==========================  ====================================  ========================  ==============
    x                           [B, C] or [B, C, t], raw inputs       bf16, fp16, fp32          free
    conv_state                  [P, C, width - 1], oldest first       as x, **in place**        free
    weight                      [C, width], width 2 to 4              fp32, bf16, fp16          free
    bias                        [C], optional                         as weight                 free
    conv_state_indices          [B], slot of each row; default: row   int32, int64              free
                                i uses slot i
    intermediate_conv_window    [rows, >= t, C, width - 1], optional  as x, **written**         free
    intermediate_state_indices  [B], row of the windows               int32, int64              free
    out                         [B, C] or [B, C, t], optional         as x, **written**         free
    ==========================  ====================================  ========================  ==============

    Per channel and token ``y = bias + sum_i weight[i] * window[i]`` in fp32 over the ``width - 1`` raw inputs before
    the token and the token; with ``activation="silu"`` times ``sigmoid(y)``; rounded to the dtype of ``x``. Followed by
    :func:`kda_cupy.kda_packed_decode` it leaves the bits that :func:`kda_cupy.kda_decode_step` leaves.

    Channels may be split: with tuples of up to three arrays for ``x``, ``conv_state``, ``weight`` (and ``bias`` and
    ``intermediate_conv_window``), such as q, k and v, one launch does all of them, and ``out`` has their channels side
    by side, as a packed decode takes them.

    With ``intermediate_conv_window``, ``conv_state`` is only read (a verify of t tokens): the window after token j goes
    to ``intermediate_conv_window[row, j]``, from where :func:`kda_cupy.kda_commit` makes one the history.

    A slot < 0 is padding (``null_index=0``: a slot <= 0): nothing is read or written for it and its row of ``out`` is
    zero. A slot >= P or a window row out of range does the same, and :func:`kda_cupy.check_errors` raises it later;
    ``validate="full"`` reads the vectors first and raises before anything runs, also for a slot or a row named twice.

    The arrays choose the backend, and CuPy's current stream is used, as in :func:`kda_cupy.kda_packed_decode`.
    Returns ``out``. Raises OperandError, DeviceError, SlotError, BridgeError or CompileError, and nothing is changed
    then.
    """
    operands, options = _collect(locals())
    call, plan, foreign = prepare(operands, options)
    call()
    result = call.results
    if foreign:
        bridge.after_launch(plan.device, call)
        if out is None and bridge.is_native(result):
            result = bridge.hand_back(operands.x[0], result)
    return result


def _bind(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    conv_state_indices: Any = None,
    *,
    intermediate_conv_window: Any = None,
    intermediate_state_indices: Any = None,
    out: Any = None,
    null_index: int = -1,
    validate: str = "metadata",
) -> BoundCall:
    call, plan, _ = prepare(*_collect(locals()))
    return BoundCall(call, plan.bytes_moved)


register_binder(causal_conv1d_update, _bind)
