# SPDX-License-Identifier: Apache-2.0
"""``gdn_packed_decode`` and ``kda_packed_decode``: one token per row, packed projections, state in place.

The maths stands in kernels/packed_decode.cu and, one formula a line, in kda_cupy/reference/truth.py. This file is
the host's side: which operands are refused and in which order, and what the kernel is told about the others.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from kda_cupy import bridge, guard
from kda_cupy.arrays import HOST, ArrayInfo, describe
from kda_cupy.checks import (
    STATE_AXES,
    check_alignment,
    check_contiguous_last,
    check_flag,
    check_lower_bound,
    check_modes,
    check_no_overlap,
    check_one_place,
    check_scale,
    check_slots,
    check_state_layout,
    check_strides,
    shape_text,
)
from kda_cupy.config import PackedDecodeConfig
from kda_cupy.dtypes import INT64
from kda_cupy.errors import error
from kda_cupy.launch import BoundCall, Call, HostCall, Launch, register_binder, split_rows
from kda_cupy.modules import Kernel, get_kernel
from kda_cupy.ops.packed_checks import (
    check_dtypes,
    check_gate_shapes,
    check_ranks_and_contiguity,
    check_rows_agree,
    heads_of,
)
from kda_cupy.reference import batched

GDN, KDA = "gdn_packed_decode", "kda_packed_decode"


class Operands(NamedTuple):
    """The arrays, in the order of the signature; ``A_log`` and ``out`` may be None."""

    mixed_qkv: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    initial_state: Any
    ssm_state_indices: Any
    out: Any


WRITTEN = ("initial_state", "out")
OPTIONAL = ("A_log", "out")
_STATE, _OUT = Operands._fields.index("initial_state"), Operands._fields.index("out")
_READ = tuple(index for index in range(len(Operands._fields)) if index not in (_STATE, _OUT))


class Options(NamedTuple):
    """The host scalars, as they were passed."""

    scale: Any = None
    lower_bound: Any = None
    use_qk_l2norm_in_kernel: Any = True
    allow_neg_eigval: Any = False
    null_index: Any = -1
    validate: Any = "metadata"


class PackedDecodeParams(NamedTuple):
    """The parameter struct of kernels/packed_decode.cu, field by field. Strides in elements."""

    mixed_qkv: int
    a: int
    b: int
    A_log: int
    dt_bias: int
    state: int
    indices: int
    out: int
    errors: int
    first_row: int
    qkv_stride: int
    a_stride: int
    b_stride: int
    slot_stride: int
    index_stride: int
    slots: int
    null_index: int
    index_is_64bit: int
    normalize_qk: int
    scale: float
    lower_bound: float
    beta_scale: float
    operation: int


_PER_CALL = struct.Struct("<9Qq")
_PER_PLAN = struct.Struct("<6q3i3fi4x")
_PARAMS_BYTES = _PER_CALL.size + _PER_PLAN.size


@dataclass(frozen=True)
class Plan(guard.Noting):
    """What the metadata of the operands and the options decide; the same for every call that looks alike."""

    B: int
    H: int
    HV: int
    K: int
    V: int
    slots: int
    device: int
    config: PackedDecodeConfig
    packed: bytes
    """The parameter struct from ``qkv_stride`` on."""
    scale: float
    lower_bound: float | None
    normalize_qk: bool
    beta_scale: float
    null_index: int
    validate_fully: bool
    spans: tuple[int, ...]
    """Bytes that each operand covers, in the order of Operands; 0 for what is not there."""

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled at the first use."""
        return get_kernel(self.config, self.device)

    @cached_property
    def blocks_per_row(self) -> tuple[int, int]:
        """Tiles of the value heads of a key head, and key heads."""
        return (self.HV // self.H * tiles_per_head(self.K, self.V), self.H)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """[B, 1, HV, V]."""
        return (self.B, 1, self.HV, self.V)

    @property
    def bytes_moved(self) -> int:
        """See the function of this name."""
        return bytes_moved(self.B, self.H, self.HV, self.K, self.V, self.config)


def tiles_per_head(K: int, V: int) -> int:
    """Blocks a head is split into: 8 value rows each, or 16 where half a warp spans a row (K <= 64)."""
    rows = 16 if K <= 64 else 8
    return -(-V // rows)


def bytes_moved(B: int, H: int, HV: int, K: int, V: int, config: PackedDecodeConfig) -> int:
    """Bytes that B live rows must move through memory, each operand once.

    ``B * (2 * HV*V*K * 4  +  (2*H*K + HV*V) * act  +  gates * a  +  HV * b  +  HV*V * act  +  4)``

    State read and written (fp32), packed row, raw gates (HV*K for KDA, HV for GDN), raw beta, output, slot index.
    A_log and dt_bias are shared by the rows and not counted.
    """
    size = {"bfloat16": 2, "float16": 2, "float32": 4}
    gates = HV * K if config.per_key_gate else HV
    activations = (2 * H * K + HV * V + HV * V) * size[config.activation]
    return B * (2 * HV * V * K * 4 + activations + gates * size[config.a] + HV * size[config.b] + 4)


@lru_cache(maxsize=1024)
def check(operation: str, infos: Operands, options: Options) -> Plan:
    """Check everything that metadata can show, in the documented order, and plan the launch.

    ``infos`` holds an ArrayInfo in place of each array. Raises OperandError or DeviceError; the plan of operands
    that look the same as earlier ones is remembered.
    """
    for name, info in infos._asdict().items():
        if info is None and name not in OPTIONAL:
            raise error("KDA-ARRAY-KIND", operand=name, got="None")
    per_key = operation == KDA
    x, a, b, A_log, dt_bias, state, indices, out = infos
    named: dict[str, ArrayInfo] = {name: info for name, info in infos._asdict().items() if info is not None}

    check_ranks_and_contiguity(per_key, x, a, b, A_log, dt_bias, indices, out)
    check_one_place(named, "KDA-PACKED-DEVICES")
    check_dtypes(x, a, b, A_log, dt_bias, state, indices, out)
    for name, info in named.items():
        check_strides(name, info)
    for name, info in named.items():
        if name != "initial_state":  # which has a stricter check of its own
            check_alignment(name, info)

    B = check_rows_agree(x, a, b, indices)
    if state.rank != 4:
        got = f"shape {shape_text(state.shape)}"
        raise error("KDA-STATE-RANK", operand="initial_state", got=got, rank=state.rank, axes=STATE_AXES)
    check_contiguous_last("KDA-STATE-CONTIGUOUS", "initial_state", state)
    check_state_layout("initial_state", state)
    slots, HV, V, K = state.shape

    check_gate_shapes(per_key, HV, K, a, b, A_log, dt_bias)
    if out is not None and out.shape != (B, 1, HV, V):
        raise error("KDA-PACKED-OUT-SHAPE", operand="out", got=str(out.shape), expected=(B, 1, HV, V))
    H = heads_of(x.shape[1], HV, V, K)

    scale = check_scale(options.scale, K)
    lower_bound = check_lower_bound(options.lower_bound, has_A_log=A_log is not None)
    normalize_qk = check_flag("use_qk_l2norm_in_kernel", options.use_qk_l2norm_in_kernel)
    doubles_beta = check_flag("allow_neg_eigval", options.allow_neg_eigval)
    check_modes(options.null_index, options.validate)
    for name, info in (("initial_state", state), ("out", out)):
        if info is not None and not info.writeable:
            raise error("KDA-ARRAY-READ-ONLY", operand=name, got="read-only memory")

    params = PackedDecodeParams(
        *(0,) * 10,
        qkv_stride=x.stride(0),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        slot_stride=state.stride(0),
        index_stride=indices.stride(0),
        slots=slots,
        null_index=int(options.null_index),
        index_is_64bit=indices.dtype == INT64,
        normalize_qk=normalize_qk,
        scale=scale,
        lower_bound=lower_bound if lower_bound is not None else 0.0,
        beta_scale=2.0 if doubles_beta else 1.0,
        operation=guard.OPERATIONS.index(operation),
    )
    return Plan(
        B=B,
        H=H,
        HV=HV,
        K=K,
        V=V,
        slots=slots,
        device=x.device,
        config=PackedDecodeConfig(
            per_key_gate=per_key,
            bounded=lower_bound is not None,
            K=K,
            V=V,
            activation=x.dtype.name,
            a=a.dtype.name,
            b=b.dtype.name,
            A_log=A_log.dtype.name if A_log is not None else "float32",
            dt_bias=dt_bias.dtype.name,
            vector=x.moves_by_four() and (not per_key or (a.moves_by_four() and dt_bias.moves_by_four())),
            params_bytes=_PARAMS_BYTES,
        ),
        packed=_PER_PLAN.pack(*params[10:]),
        scale=scale,
        lower_bound=lower_bound,
        normalize_qk=normalize_qk,
        beta_scale=params.beta_scale,
        null_index=params.null_index,
        validate_fully=options.validate == "full",
        spans=tuple(0 if info is None else info.span_bytes for info in infos),
    )


def prepare(operation: str, operands: Operands, options: Options) -> tuple[Call, Plan, bool]:
    """Check and convert everything, and return what only has to be called.

    Also returns the plan, and whether arrays of other libraries are involved.
    """
    foreign = not bridge.all_native(operands)
    native = Operands(**bridge.adopt_all(operands._asdict(), WRITTEN)) if foreign else operands
    described = [describe(array) if array is not None else (None, 0) for array in native]
    infos = Operands(*[info for info, _ in described])
    pointers = [pointer for _, pointer in described]
    plan = _plan(operation, infos, options)

    handed = operands.out
    if handed is None:
        handed, out = bridge.empty_like_caller(operands.mixed_qkv, native.mixed_qkv, plan.out_shape)
        native = native._replace(out=out)
        pointers[_OUT] = describe(out)[1]
    _check_overlaps(infos, pointers, plan.spans)
    if plan.validate_fully:
        check_slots(native.ssm_state_indices, plan.slots, plan.null_index)

    results = (native.out if handed is None else handed, operands.initial_state)
    if plan.device == HOST:
        return HostCall(partial(_run_on_host, operation, plan, native), results), plan, foreign
    launches = tuple(
        [
            (
                (*plan.blocks_per_row, rows),
                np.void(_PER_CALL.pack(*pointers, plan.errors, first_row) + plan.packed),
            )
            for first_row, rows in split_rows(plan.B)
        ]
    )
    return Launch(plan.kernel, plan.device, (32, 1, 1), launches, results, keep=native), plan, foreign


def _plan(operation: str, infos: Operands, options: Options) -> Plan:
    """:func:`check`, also for options that cannot be a key (0-d arrays, and whatever else is to be refused)."""
    try:
        hash(options)
    except TypeError:
        return check.__wrapped__(operation, infos, options)
    return check(operation, infos, options)


def _check_overlaps(infos: Operands, pointers: list[int], spans: tuple[int, ...]) -> None:
    """Neither ``out`` nor the state shares memory with another operand. Compares ranges first: this is a hot path."""
    ends = [pointer + span for pointer, span in zip(pointers, spans, strict=True)]
    out, out_end, state, state_end = pointers[_OUT], ends[_OUT], pointers[_STATE], ends[_STATE]
    suspects = [(_OUT, _STATE)] if out < state_end and state < out_end else []
    for index in _READ:
        start, end = pointers[index], ends[index]
        if start < out_end and out < end:
            suspects.append((_OUT, index))
        if start < state_end and state < end:
            suspects.append((_STATE, index))
    names = Operands._fields
    for written, other in suspects:
        check_no_overlap(
            names[written], infos[written], pointers[written], names[other], infos[other], pointers[other]
        )


def _run_on_host(operation: str, plan: Plan, native: Operands) -> None:
    number = guard.OPERATIONS.index(operation)
    batched.packed_decode(
        *native,
        per_key_gate=operation == KDA,
        H=plan.H,
        scale=plan.scale,
        lower_bound=plan.lower_bound,
        normalize_qk=plan.normalize_qk,
        beta_scale=plan.beta_scale,
        null_index=plan.null_index,
        on_bad_slot=lambda row, slot: guard.record_on_host(number, 0, row, slot, plan.slots),
    )


def _run(operation: str, operands: Operands, options: Options) -> tuple[Any, Any]:
    call, plan, foreign = prepare(operation, operands, options)
    call()
    out, state = call.results
    if foreign:
        bridge.after_launch(plan.device, call)
        if operands.out is None and bridge.is_native(out):
            out = bridge.hand_back(operands.mixed_qkv, out)
    return out, state


def _bind(
    operation: str,
    mixed_qkv: Any,
    a: Any,
    b: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    ssm_state_indices: Any,
    *,
    out: Any = None,
    **options: Any,
) -> BoundCall:
    operands = Operands(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, out)
    call, plan, _ = prepare(operation, operands, Options(**options))
    return BoundCall(call, plan.bytes_moved)


def gdn_packed_decode(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    ssm_state_indices: Any,
    *,
    out: Any = None,
    scale: Any = None,
    lower_bound: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
    validate: str = "metadata",
) -> tuple[Any, Any]:
    """Advance each row's sequence by one token of Gated DeltaNet (one gate per value head) and read its output.

    Everything is as in :func:`kda_packed_decode`, except for the gate: ``a`` is ``[B, HV]`` and ``dt_bias`` is
    ``[HV]``. Source of the formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464).
    """
    operands = Operands(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, out)
    options = Options(scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, null_index, validate)
    return _run(GDN, operands, options)


def kda_packed_decode(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    ssm_state_indices: Any,
    *,
    out: Any = None,
    scale: Any = None,
    lower_bound: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
    validate: str = "metadata",
) -> tuple[Any, Any]:
    """Advance each row's sequence by one token of Kimi Delta Attention (one gate per key) and read its output.

    ==================  ==========================================  ==========================  =================
    operand             shape                                       dtype                       strides
    ==================  ==========================================  ==========================  =================
    mixed_qkv           [B, 2*H*K + HV*V], q of all heads, k, v     bf16, fp16, fp32            last 1, row free
    a                   [B, HV*K], raw gate                         as mixed_qkv, or fp32       last 1, row free
    b                   [B, HV], raw beta logit                     as mixed_qkv, or fp32       last 1, row free
    A_log               HV elements, log decay rate, or None        fp32, bf16, fp16            contiguous
    dt_bias             [HV*K] or [HV, K], gate bias                fp32, bf16, fp16            contiguous
    initial_state       [P, HV, V, K]: rows V, columns K            fp32, **written in place**  slot stride free
    ssm_state_indices   [B], slot of each row                       int32, int64                free
    out                 [B, 1, HV, V], optional                     as mixed_qkv, **written**   contiguous
    ==================  ==========================================  ==========================  =================

    Value head ``hv`` uses q and k of head ``hv // (HV // H)``; H is inferred from the width of a row. K is a multiple
    of 4 up to 512. The slot stride of the state is a multiple of 4 elements and its first element lies on a 16-byte
    boundary. With ``x = a + dt_bias``, all in fp32::

        g = lower_bound * sigmoid(exp(A_log) * x)       if lower_bound (a float < 0) is given; A_log=None means 0
        g = -exp(A_log) * softplus(x)                   otherwise
        q = q / sqrt(sum q^2 + 1e-6) * scale            scale defaults to K**-0.5
        k = k / sqrt(sum k^2 + 1e-6)                    (use_qk_l2norm_in_kernel=False: no division)
        S = S * exp(g);  u = sigmoid(b) * (v - S k);  S = S + u k^T;  o = S q
                                                        (allow_neg_eigval=True: sigmoid(b) * 2)

    Source of the formulas: Kimi Team, "Kimi Linear" (arXiv 2510.26692).

    A slot < 0 is padding (with ``null_index=0``: a slot <= 0): its row touches no state and its output is zero. A slot
    >= P does the same, and :func:`kda_cupy.check_errors` raises it later; ``validate="full"`` reads the indices first
    (waiting for the GPU) and raises SlotError before anything runs, also for a slot named twice.

    The arrays choose the backend: CuPy arrays, or CUDA arrays of any library with DLPack, run on the GPU, on CuPy's
    current stream of their device, without waiting; NumPy arrays, or host arrays of other libraries, run on NumPy.

    Returns ``(out, initial_state)``: ``initial_state`` is the object passed in; ``out`` too, or a new array of the
    type of ``mixed_qkv``. Raises OperandError, DeviceError, SlotError, BridgeError or CompileError, and nothing is
    changed then.
    """
    operands = Operands(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, out)
    options = Options(scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, null_index, validate)
    return _run(KDA, operands, options)


register_binder(gdn_packed_decode, partial(_bind, GDN))
register_binder(kda_packed_decode, partial(_bind, KDA))
