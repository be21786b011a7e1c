# SPDX-License-Identifier: Apache-2.0
"""``kda_commit``: make the accepted tokens of a verify permanent, in all layers at once.

From snapshots it copies the state after the last accepted token; from replay rings it runs the accepted tokens
again. The maths of that stands in kernels/commit.cu and in kda_cupy/reference/truth.py; this file is the host's side.
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
    check_flag,
    check_modes,
    check_one_place,
    check_strides,
    check_written,
    shape_text,
)
from kda_cupy.config import CommitConfig
from kda_cupy.dtypes import FLOATS
from kda_cupy.errors import error
from kda_cupy.launch import MAX_GRID_Z, BoundCall, Call, HostCall, Launch, register_binder, split_rows
from kda_cupy.modules import Kernel, get_kernel
from kda_cupy.ops import mtp_params
from kda_cupy.ops.mtp_checks import (
    DIM,
    MAX_TOKENS,
    RINGS,
    check_history,
    check_index_vector,
    check_rings,
    check_rollback,
    check_rows,
    check_scratch_rows,
    check_snapshots,
    check_state_memory,
    check_window,
    to_host,
)
from kda_cupy.ops.strides import Strides
from kda_cupy.reference import batched_mtp
from kda_cupy.reference.batched_mtp import Commit as Operands

NAME: Final = "kda_commit"
HISTORIES: Final = ("cs_q", "cs_k", "cs_v")
WINDOWS: Final = ("intermediate_conv_q", "intermediate_conv_k", "intermediate_conv_v")
WRITTEN: Final = frozenset(("recurrent_state", *HISTORIES))
VECTORS: Final = (
    "accept_lens",
    "ssm_state_indices",
    "intermediate_state_indices",
    "ring_indices",
    "track_indices",
    "track_steps",
)
_RANKS: Final = {
    "recurrent_state": 4,
    "intermediate_ssm": 5,
    **dict(zip(RINGS, (4, 4, 4, 3), strict=True)),
    **dict.fromkeys(HISTORIES, 3),
    **dict.fromkeys(WINDOWS, 4),
}
"""Axes of each array without a layer axis."""


_RING_FIELDS: Final = dict(zip(("ring_v", "ring_k", "ring_g", "ring_beta"), RINGS, strict=True))
_POINTERS: Final = tuple(
    Operands._fields.index(_RING_FIELDS.get(name, name)) for name in mtp_params.CommitPointers._fields[:-2]
)
"""Which operand stands where in the parameter struct."""


class Options(NamedTuple):
    """The host scalars, as they were passed."""

    use_qk_l2norm_in_kernel: Any = True
    null_index: Any = -1
    validate: Any = "metadata"


@dataclass(frozen=True)
class Plan(guard.Noting):
    """What the metadata of the operands and the options decide; the same for every call that looks alike."""

    N: int
    layers: int
    H: int
    HV: int
    max_tokens: int
    slots: int
    scratch_rows: int
    device: int
    infos: Operands
    """With a layer axis."""
    layered: bool
    """Whether the caller's arrays have one."""
    normalize_k: bool
    null_index: int
    validate_fully: bool
    apart: set[tuple[int, ...]] = field(default_factory=set)
    """Addresses known not to overlap."""

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled at the first use."""
        return get_kernel(commit_config(self), self.device)

    @cached_property
    def packed(self) -> bytes:
        """The parameter struct from ``state_layer_stride`` on."""
        return mtp_params.pack_commit_layout(_layout(self))

    @property
    def bytes_moved(self) -> int:
        """See the function of this name."""
        return bytes_moved(self.N, self.layers, self.H, self.HV, self.max_tokens, self.infos)


def bytes_moved(N: int, layers: int, H: int, HV: int, n: int, infos: Operands) -> int:
    """Bytes that a commit of n tokens in each of N live rows must move through memory, each operand once.

    ``N * layers * (2 * HV*V*K * 4  +  n * ring  +  6 * C * act)``

    State read (or a snapshot, which is as large) and written; from rings a token is ``(HV + H) * 128 * act +
    HV*K * 4 + HV * 4`` bytes; with conv history a window of three inputs of C channels is read and written.
    """
    moved = 2 * HV * DIM * DIM * 4
    if infos.replayssm_rawv is not None:
        moved += n * ((HV + H) * DIM * infos.replayssm_rawv.dtype.itemsize + HV * DIM * 4 + HV * 4)
    if infos.cs_q is not None:
        channels = sum(getattr(infos, name).shape[2] for name in HISTORIES)
        moved += 6 * channels * infos.cs_q.dtype.itemsize
    return int(N * layers * moved)


@lru_cache(maxsize=1024)
def check(infos: Operands, options: Options) -> Plan:
    """Check everything that metadata can show, in a fixed order, and plan the launch.

    ``infos`` holds an ArrayInfo in place of each array. Raises OperandError or DeviceError; the plan of operands
    that look the same as earlier ones is remembered.
    """
    given: dict[str, ArrayInfo] = {name: info for name, info in infos._asdict().items() if info is not None}
    for name in ("accept_lens", "ssm_state_indices", "recurrent_state"):
        if name not in given:
            raise error("KDA-ARRAY-KIND", operand=name, got="None")
    check_one_place(given, "KDA-PACKED-DEVICES")
    layers, one_layer = _check_layers(given)

    state = one_layer["recurrent_state"]
    check_state_memory("recurrent_state", state, None)
    slots, HV = state.shape[:2]
    H, steps = _check_source(one_layer, slots, HV)
    H, window_steps = _check_histories(one_layer, slots, H, HV)
    steps = min(steps, window_steps)
    scratch = [name for name in ("intermediate_ssm", *WINDOWS) if name in given]
    scratch_rows = check_scratch_rows({name: one_layer[name] for name in scratch}) if scratch else 0
    N = _check_vectors(one_layer, needs_scratch=bool(scratch))
    for name, info in given.items():
        check_strides(name, info)
        check_alignment(name, info)
    check_bfloat16_support(given)
    for name in ("recurrent_state", "intermediate_ssm"):
        if name in given and layers > 1 and len(given[name].shape) > _RANKS[name]:
            _check_layer_stride(name, given[name])
    normalize_k = check_flag("use_qk_l2norm_in_kernel", options.use_qk_l2norm_in_kernel)
    check_modes(options.null_index, options.validate)
    check_written({name: info for name, info in given.items() if name in WRITTEN})
    layered = given["recurrent_state"].rank > _RANKS["recurrent_state"]
    return Plan(
        N=N,
        layers=layers,
        H=H,
        HV=HV,
        max_tokens=min(steps, MAX_TOKENS),
        slots=slots,
        scratch_rows=scratch_rows,
        device=state.device,
        infos=infos if layered else Operands(*[_with_layer(*item) for item in infos._asdict().items()]),
        layered=layered,
        normalize_k=normalize_k,
        null_index=int(options.null_index),
        validate_fully=options.validate == "full",
    )


def _with_layer(name: str, info: ArrayInfo | None) -> ArrayInfo | None:
    if info is None or name in VECTORS:
        return info
    return info._replace(shape=(1, *info.shape), strides=(0, *info.strides))


def _check_layers(given: Mapping[str, ArrayInfo]) -> tuple[int, dict[str, ArrayInfo]]:
    """Returns the number of layers, and the operands without the layer axis."""
    layered = given["recurrent_state"].rank == _RANKS["recurrent_state"] + 1
    layers = given["recurrent_state"].shape[0] if layered else 1
    if not 1 <= layers <= MAX_GRID_Z:
        raise error(
            "KDA-COMMIT-LAYERS",
            operand="recurrent_state",
            got=f"`recurrent_state` with {layers} layers",
            layers="[layers>=1, ..]",
        )
    one_layer = {}
    for name, info in given.items():
        one_layer[name] = info
        if name in VECTORS:
            continue
        wrong = layered and (info.rank != _RANKS[name] + 1 or info.shape[0] != layers)
        if wrong or (not layered and info.rank == _RANKS[name] + 1):
            has = f"[layers={layers}, ..]" if layered else "`recurrent_state` has none"
            got = f"`{name}` of shape {shape_text(info.shape)}"
            raise error("KDA-COMMIT-LAYERS", operand=name, got=got, layers=has)
        if layered:
            one_layer[name] = info._replace(shape=info.shape[1:], strides=info.strides[1:])
    return layers, one_layer


def _check_source(one_layer: Mapping[str, ArrayInfo], slots: int, HV: int) -> tuple[int | None, int]:
    """Snapshots or rings. Returns H (None with snapshots, which do not know it) and how many steps they hold."""
    if not check_rollback(one_layer):
        if "ring_indices" in one_layer:
            raise error("KDA-VERIFY-ROLLBACK", operand="ring_indices", got="`ring_indices` without rings")
        check_snapshots(one_layer["intermediate_ssm"], HV=HV, steps=1)
        return None, one_layer["intermediate_ssm"].shape[1]
    check_rings(one_layer, HV=HV, H=None, steps=1, activation=None)
    rawv, rawk = one_layer["replayssm_rawv"], one_layer["replayssm_rawk"]
    if "ring_indices" not in one_layer and rawv.shape[0] != slots:
        got = f"`{RINGS[0]}` with {rawv.shape[0]} ring rows for a pool of P={slots} slots, and no `ring_indices`"
        layout = f"[slots, H={HV}, L>=1, 128] / [slots, H, L]"
        raise error(
            "KDA-VERIFY-RING-LAYOUT", operand=RINGS[0], got=got, layout=layout, key_heads=rawk.shape[1]
        )
    return rawk.shape[1], rawv.shape[2]


def _check_histories(
    one_layer: Mapping[str, ArrayInfo], slots: int, H: int | None, HV: int
) -> tuple[int, int]:
    """Conv history and windows, if they are there. Returns H and how many steps the windows hold."""
    parts = (*HISTORIES, *WINDOWS)
    missing = [name for name in parts if name not in one_layer]
    if len(missing) == len(parts):
        return HV if H is None else H, MAX_TOKENS
    if missing:
        here = next(name for name in parts if name in one_layer)
        raise error("KDA-COMMIT-INCOMPLETE", operand=missing[0], got=f"`{here}` without `{missing[0]}`")
    if H is None:  # the channels of q tell, if they can
        q = one_layer["cs_q"]
        heads = q.shape[1] // DIM if q.rank == 3 else 0
        H = heads if heads and HV % heads == 0 else HV
    for name, window, heads in zip(HISTORIES, WINDOWS, (H, H, HV), strict=True):
        check_history(name, one_layer[name], slots=slots, channels=heads * DIM)
        check_window(window, one_layer[window], steps=1, channels=one_layer[name].shape[1])
    rings = one_layer.get("replayssm_rawv")
    check_dtype(HISTORIES[0], one_layer[HISTORIES[0]], FLOATS if rings is None else (rings.dtype,))
    for name in parts[1:]:
        check_dtype(name, one_layer[name], (one_layer[HISTORIES[0]].dtype,))
    return H, min(one_layer[name].shape[1] for name in WINDOWS)


def _check_vectors(one_layer: Mapping[str, ArrayInfo], *, needs_scratch: bool) -> int:
    """Returns N."""
    accept = one_layer["accept_lens"]
    N = accept.shape[0] if accept.rank == 1 else 0
    if accept.rank != 1:
        got = shape_text(accept.shape)
        raise error("KDA-VERIFY-INDICES-SHAPE", operand="accept_lens", got=got, shape="[N]")
    if needs_scratch and "intermediate_state_indices" not in one_layer:
        raise error(
            "KDA-COMMIT-INCOMPLETE",
            operand="intermediate_state_indices",
            got="snapshots or windows without `intermediate_state_indices`",
        )
    tracking = [name for name in ("track_indices", "track_steps") if name in one_layer]
    if len(tracking) == 1:
        other = "track_steps" if tracking == ["track_indices"] else "track_indices"
        raise error("KDA-COMMIT-INCOMPLETE", operand=other, got=f"`{tracking[0]}` without `{other}`")
    for name in VECTORS:
        if name in one_layer:
            check_index_vector(name, one_layer[name], N)
    return N


def _check_layer_stride(name: str, info: ArrayInfo) -> None:
    if info.strides[0] % 16:
        raise error("KDA-STATE-ALIGNMENT", operand=name, got=f"a layer stride of {info.strides[0]} bytes")


def commit_config(plan: Plan) -> CommitConfig:
    """The configuration of kernels/commit.cu for a plan."""
    infos = plan.infos
    activations = infos.replayssm_rawk if infos.replayssm_rawk is not None else infos.cs_q
    return CommitConfig(
        activation="float32" if activations is None else activations.dtype.name,
        vector=all(
            info.moves_by_four() for info in (infos.replayssm_rawv, infos.replayssm_rawk) if info is not None
        ),
        params_bytes=mtp_params.COMMIT_PARAMS_BYTES,
    )


def _layout(plan: Plan) -> mtp_params.CommitLayout:
    """The part of the parameter struct that a plan decides."""
    infos = plan.infos

    stride = Strides(infos._asdict())
    rings = infos.replayssm_rawv
    return mtp_params.CommitLayout(
        state_layer_stride=stride("recurrent_state", 0),
        state_slot_stride=stride("recurrent_state", 1),
        snapshot_layer_stride=stride("intermediate_ssm", 0),
        snapshot_row_stride=stride("intermediate_ssm", 1),
        snapshot_step_stride=stride("intermediate_ssm", 2),
        ring_v_layer_stride=stride("replayssm_rawv", 0),
        ring_v_slot_stride=stride("replayssm_rawv", 1),
        ring_v_head_stride=stride("replayssm_rawv", 2),
        ring_k_layer_stride=stride("replayssm_rawk", 0),
        ring_k_slot_stride=stride("replayssm_rawk", 1),
        ring_k_head_stride=stride("replayssm_rawk", 2),
        ring_g_layer_stride=stride("replayssm_g", 0),
        ring_g_slot_stride=stride("replayssm_g", 1),
        ring_beta_layer_stride=stride("replayssm_beta", 0),
        ring_beta_slot_stride=stride("replayssm_beta", 1),
        **stride.of_each(HISTORIES, 0, "cs_{}_layer_stride"),
        **stride.of_each(HISTORIES, 1, "cs_{}_slot_stride"),
        **stride.of_each(HISTORIES, 2, "cs_{}_channel_stride"),
        **stride.of_each(HISTORIES, 3, "cs_{}_tap_stride"),
        **stride.of_each(WINDOWS, 0, "window_{}_layer_stride"),
        **stride.of_each(WINDOWS, 1, "window_{}_row_stride"),
        **stride.of_each(WINDOWS, 2, "window_{}_step_stride"),
        **stride.of_each(WINDOWS, 3, "window_{}_channel_stride"),
        **stride.of_each(WINDOWS, 4, "window_{}_tap_stride"),
        accept_stride=stride("accept_lens", 0),
        slot_index_stride=stride("ssm_state_indices", 0),
        scratch_index_stride=stride("intermediate_state_indices", 0),
        ring_index_stride=stride("ring_indices", 0),
        track_index_stride=stride("track_indices", 0),
        track_step_stride=stride("track_steps", 0),
        slots=plan.slots,
        scratch_rows=plan.scratch_rows,
        ring_rows=0 if rings is None else rings.shape[1],
        max_tokens=plan.max_tokens,
        ring_steps=0 if rings is None else rings.shape[3],
        group=plan.HV // plan.H,
        null_index=plan.null_index,
        accept_is_64bit=stride.is_64bit("accept_lens"),
        slot_index_is_64bit=stride.is_64bit("ssm_state_indices"),
        scratch_index_is_64bit=stride.is_64bit("intermediate_state_indices"),
        ring_index_is_64bit=stride.is_64bit("ring_indices"),
        track_index_is_64bit=stride.is_64bit("track_indices"),
        track_step_is_64bit=stride.is_64bit("track_steps"),
        normalize_k=plan.normalize_k,
        operation=guard.OPERATIONS.index(NAME),
    )


def prepare(operands: Operands, options: Options) -> tuple[Call, Plan, bool]:
    """Check and convert everything, and return what only has to be called.

    Also returns the plan, and whether arrays of other libraries are involved.
    """
    foreign = not bridge.all_native(operands)
    native = Operands(**bridge.adopt_all(operands._asdict(), WRITTEN)) if foreign else operands
    described = [describe(array) if array is not None else (None, 0) for array in native]
    infos, pointers = Operands(*[info for info, _ in described]), tuple([pointer for _, pointer in described])
    plan = _plan(infos, options)
    check_apart(infos._asdict(), pointers, WRITTEN, plan.apart)
    if plan.validate_fully:
        _check_values(native, plan)
    results = operands.recurrent_state
    if plan.device == HOST:
        return HostCall(partial(_run_on_host, plan, native), results), plan, foreign
    return _launch(plan, native, pointers, results), plan, foreign


def _plan(infos: Operands, options: Options) -> Plan:
    """:func:`check`, also for options that cannot be a key (whatever is to be refused)."""
    try:
        hash(options)
    except TypeError:
        return check.__wrapped__(infos, options)
    return check(infos, options)


def _check_values(native: Operands, plan: Plan) -> None:
    """Read what is on the GPU and raise SlotError for what the kernel would not follow, and for races."""
    slots, accepted = to_host(native.ssm_state_indices), to_host(native.accept_lens)
    live = slots > plan.null_index
    check_rows("ssm_state_indices", slots, live, plan.slots)
    for row in np.flatnonzero(live & ((accepted < 0) | (accepted > plan.max_tokens)))[:1]:
        raise guard.fault("accept_lens", int(row), int(accepted[row]), plan.max_tokens)
    live &= accepted > 0
    if native.intermediate_state_indices is not None and plan.scratch_rows:
        rows = to_host(native.intermediate_state_indices)
        check_rows("intermediate_state_indices", rows, live, plan.scratch_rows, once=False)
    if native.ring_indices is not None:
        check_rows(
            "ring_indices", to_host(native.ring_indices), live, plan.infos.replayssm_rawv.shape[1], once=False
        )
    if native.track_indices is None:
        return
    track_slots, steps = to_host(native.track_indices), to_host(native.track_steps)
    tracked = live & (steps >= 0) & (track_slots > plan.null_index)
    check_rows("track_indices", track_slots, tracked, plan.slots)
    for row in np.flatnonzero(tracked & (steps >= accepted))[:1]:
        raise guard.fault("track_steps", int(row), int(steps[row]), int(accepted[row]))
    for row in np.flatnonzero(tracked & np.isin(track_slots, slots))[:1]:
        got = f"slot {track_slots[row]}, which is in `ssm_state_indices` too"
        raise error("KDA-VALUE-SLOT-DUPLICATE", operand="track_indices", got=got)


def _launch(plan: Plan, native: Operands, pointers: tuple[int, ...], results: Any) -> Launch:
    addresses = [pointers[index] for index in _POINTERS]
    launches = tuple(
        (
            mtp_params.commit_grid(requests, plan.HV, plan.layers),
            np.void(
                mtp_params.pack_commit_pointers(
                    mtp_params.CommitPointers._make([*addresses, plan.errors, first])
                )
                + plan.packed
            ),
        )
        for first, requests in split_rows(plan.N)
    )
    block = (mtp_params.THREADS, 1, 1)
    return Launch(plan.kernel, plan.device, block, launches, results, keep=native)


def _run_on_host(plan: Plan, native: Operands) -> None:
    number = guard.OPERATIONS.index(NAME)
    layered = {
        name: array if array is None or plan.layered or name in VECTORS else array[None]
        for name, array in native._asdict().items()
    }
    batched_mtp.commit(
        Operands(**layered),
        max_tokens=plan.max_tokens,
        scratch_rows=plan.scratch_rows,
        normalize_k=plan.normalize_k,
        null_index=plan.null_index,
        on_fault=lambda operand, *note: guard.record_on_host(number, guard.OPERANDS.index(operand), *note),
    )


def kda_commit(
    *,
    accept_lens: Any,
    ssm_state_indices: Any,
    recurrent_state: Any,
    intermediate_ssm: Any = None,
    intermediate_state_indices: Any = None,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    ring_indices: Any = None,
    cs_q: Any = None,
    cs_k: Any = None,
    cs_v: Any = None,
    intermediate_conv_q: Any = None,
    intermediate_conv_k: Any = None,
    intermediate_conv_v: Any = None,
    track_indices: Any = None,
    track_steps: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    null_index: int = -1,
    validate: str = "metadata",
) -> Any:
    """Make the first ``accept_lens[n]`` tokens of each request permanent, as :func:`kda_cupy.kda_decode_mtp` left them.

    ==========================  ===================================  ===================  ==========================
    operand                     shape                                dtype                strides
    ==========================  ===================================  ===================  ==========================
    accept_lens                 [N], tokens to keep, bonus included  int32, int64         free
    ssm_state_indices           [N], slot of each request            int32, int64         free
    recurrent_state             [P, HV, V=128, K=128]                fp32, **written**    slot free
    intermediate_ssm            [rows, t, HV, V, K], or rings        fp32                 inner three dense
    intermediate_state_indices  [N], scratch row of each request     int32, int64         free
    replayssm_rawv, _rawk       [P, HV, L, 128], [P, H, L, 128]      bf16, fp16, fp32     inner two dense
    replayssm_g, _beta          [P, HV, L, 128], [P, HV, L]          fp32                 dense inside a slot
    ring_indices                [N], ring row, default the slot      int32, int64         free
    cs_q, cs_k, cs_v            [P, channels, 3], optional           any float,           free
                                                                     **written**
    intermediate_conv_q, _k,    [rows, t, channels, 3], with cs_*    as cs_q              free
    _v
    track_indices, track_steps  [N], optional                        int32, int64         free
    ==========================  ===================================  ===================  ==========================

    Every array but the index vectors may carry one more axis in front, the layer: all of them, or none. All layers are
    committed by one launch, with the same slots and counts.

    From snapshots, ``recurrent_state[slot]`` becomes the snapshot of the last accepted token; from rings (all four),
    the accepted tokens are run again from the state that is there. ``cs_*[slot]`` becomes the window after the last
    accepted token. ``use_qk_l2norm_in_kernel`` is as it was for the verify. With ``track_indices``, state and history
    after step ``track_steps[n]`` (0 is the bonus token; below the accept count) are stored to that slot as well; a
    negative step, or a slot that is padding, skips it.

    A count of 0, and a slot < 0 (``null_index=0``: <= 0), leaves its slot as it is, to the bit. So does a count, slot,
    row or step out of range, which :func:`kda_cupy.check_errors` raises later; ``validate="full"`` reads the vectors
    first and raises before anything runs, also for a slot named twice.

    The arrays choose the backend, and CuPy's current stream is used, as in :func:`kda_cupy.kda_packed_decode`.
    Returns ``recurrent_state``, the object passed in. Raises OperandError, DeviceError, SlotError, BridgeError or
    CompileError, and nothing is changed then.
    """
    call, plan, foreign = prepare(*_split(locals()))
    call()
    if foreign:
        bridge.after_launch(plan.device, call)
    return call.results


def _split(arguments: dict[str, Any]) -> tuple[Operands, Options]:
    """Arguments of the call as arrays and host scalars."""
    operands = Operands(**{name: arguments.get(name) for name in Operands._fields})
    return operands, Options(*[arguments[name] for name in Options._fields])


def _bind(**arguments: Any) -> BoundCall:
    call, plan, _ = prepare(*_split({**Options._field_defaults, **arguments}))
    return BoundCall(call, plan.bytes_moved)


register_binder(kda_commit, _bind)
