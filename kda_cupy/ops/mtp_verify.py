# SPDX-License-Identifier: Apache-2.0
"""``kda_decode_mtp``: convolution, gates and the delta rule over 1 + num_spec tokens a request, state unchanged.

The maths stands in kernels/mtp_verify.cu and, one formula a line, in kda_cupy/reference/truth.py. This file is the
host's side: which operands are refused and in which order, and what the kernel is told about the others.
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
    check_apart,
    check_dtype,
    check_flag,
    check_lower_bound,
    check_modes,
    check_one_place,
    check_scale,
    check_written,
    shape_text,
    strides_text,
)
from kda_cupy.config import MtpVerifyConfig
from kda_cupy.dtypes import INDICES
from kda_cupy.errors import error
from kda_cupy.launch import BoundCall, Call, HostCall, Launch, register_binder, split_rows
from kda_cupy.modules import Kernel, get_kernel
from kda_cupy.ops import mtp_params
from kda_cupy.ops.mtp_checks import (
    DIM,
    MAX_TOKENS,
    RINGS,
    check_index_vector,
    check_rings,
    check_rollback,
    check_rows,
    check_scratch_rows,
    check_snapshots,
    check_state_memory,
    check_window,
    sliding,
    to_host,
)
from kda_cupy.ops.strides import Strides
from kda_cupy.ops.token_checks import (
    BIASES,
    HISTORIES,
    check_activations,
    check_convolutions,
    check_gate_parameters,
    check_output_norm,
    check_token_dtypes,
    check_token_memory,
)
from kda_cupy.reference import batched_mtp
from kda_cupy.reference.batched_mtp import Verify as Operands

NAME: Final = "kda_decode_mtp"
WINDOWS: Final = ("intermediate_conv_q", "intermediate_conv_k", "intermediate_conv_v")
WRITTEN: Final = frozenset(("out", "intermediate_ssm", *WINDOWS, *RINGS))
_ROLLBACK: Final = ("intermediate_ssm", *RINGS)
OPTIONAL: Final = frozenset(
    (*BIASES, *_ROLLBACK, "A_log", "ring_indices", "onorm_gate", "onorm_weight", "out")
)
_RING_FIELDS: Final = dict(zip(("ring_v", "ring_k", "ring_g", "ring_beta"), RINGS, strict=True))
_POINTERS: Final = tuple(
    Operands._fields.index(_RING_FIELDS.get(name, name)) for name in mtp_params.VerifyPointers._fields[:-2]
)
"""Which operand stands where in the parameter struct."""


class Options(NamedTuple):
    """The host scalars, as they were passed."""

    lower_bound: Any = None
    scale: Any = None
    onorm_eps: Any = None
    max_tokens_per_request: Any = None
    use_qk_l2norm_in_kernel: Any = True
    allow_neg_eigval: Any = False
    null_index: Any = -1
    validate: Any = "metadata"


@dataclass(frozen=True)
class Plan(guard.Noting):
    """What the metadata of the operands and the options decide; the same for every call that looks alike."""

    N: int
    T: int
    H: int
    HV: int
    max_tokens: int
    slots: int
    scratch_rows: int
    device: int
    infos: Operands
    scale: float
    lower_bound: float | None
    normalize_qk: bool
    beta_scale: float
    onorm_eps: float
    null_index: int
    validate_fully: bool
    apart: set[tuple[int, ...]] = field(default_factory=set)
    """Addresses known not to overlap."""

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled at the first use."""
        return get_kernel(verify_config(self), self.device)

    @cached_property
    def packed(self) -> bytes:
        """The parameter struct from ``x_q_stride`` on."""
        return mtp_params.pack_verify_layout(_layout(self))

    @property
    def bytes_moved(self) -> int:
        """See the function of this name."""
        return bytes_moved(self.N, self.T, self.H, self.HV, self.infos)


def bytes_moved(N: int, T: int, H: int, HV: int, infos: Operands) -> int:
    """Bytes that N live requests with T tokens must move through memory, each operand once.

    ``N * (HV*V*K * 4  +  3 * C * act)  +  T * (C * act  +  HV*K * g  +  HV * beta  +  HV*V * act  +  S)  +
    windows``  with ``C = (2*H + HV) * 128`` channels, and S a token's snapshot (HV*V*K * 4) or its part of the rings
    ((HV + H) * 128 * act + HV*K * 4 + HV * 4).

    Windows are ``T * 3 * C * act``, or ``(T + 2*N) * C * act`` if they slide over raw inputs.
    State, history, projections, gates, windows and output; with an output norm its gate (HV*V * act a token) too.
    Weights, which the requests share, and index vectors are not counted.
    """
    act, channels, state = infos.x_q.dtype.itemsize, (2 * H + HV) * DIM, HV * DIM * DIM * 4
    slides = sliding(infos.intermediate_conv_q).rank == 3
    windows = T + 2 * N if slides else 3 * T
    token = channels * act + HV * DIM * (infos.g.dtype.itemsize + act) + HV * infos.beta.dtype.itemsize
    if infos.intermediate_ssm is not None:
        token += state
    else:
        token += (HV + H) * DIM * act + HV * DIM * 4 + HV * 4
    if infos.onorm_gate is not None:
        token += HV * DIM * act
    return int(N * (state + 3 * channels * act) + T * token + windows * channels * act)


@lru_cache(maxsize=1024)
def check(infos: Operands, options: Options) -> Plan:
    """Check everything that metadata can show, in the documented order, and plan the launch.

    ``infos`` holds an ArrayInfo in place of each array. Raises OperandError or DeviceError; the plan of operands
    that look the same as earlier ones is remembered.
    """
    named: dict[str, ArrayInfo] = {name: info for name, info in infos._asdict().items() if info is not None}
    for name in Operands._fields:
        if name not in named and name not in OPTIONAL:
            raise error("KDA-ARRAY-KIND", operand=name, got="None")
    check_one_place(named, "KDA-PACKED-DEVICES")

    T, H, HV = check_activations(infos)
    N, max_tokens = _check_tokens(infos.cu_seqlens, T, options.max_tokens_per_request)
    check_gate_parameters(infos.A_log, infos.dt_bias, HV)
    check_state_memory("recurrent_state", infos.recurrent_state, HV)
    slots = infos.recurrent_state.shape[0]
    check_convolutions(named, slots, H, HV)
    _check_scratch(named, slots, H, HV, max_tokens, infos.x_q.dtype)
    scratch_rows = check_scratch_rows(
        {name: named[name] for name in ("intermediate_ssm", *WINDOWS) if name in named}
    )
    for name in ("ssm_state_indices", "intermediate_state_indices", "ring_indices"):
        if name in named:
            check_index_vector(name, named[name], N)
    onorm_eps = check_output_norm(
        infos.onorm_gate,
        infos.onorm_weight,
        options.onorm_eps,
        shape=(1, T, HV, DIM),
        axes=f"(1, T={T}, HV={HV}, 128)",
        activation=infos.x_q.dtype,
    )
    if infos.out is not None and infos.out.shape != (1, T, HV, DIM):
        got, shape = shape_text(infos.out.shape), f"(1, T={T}, HV={HV}, 128)"
        raise error("KDA-VERIFY-OUT-SHAPE", operand="out", got=got, shape=shape)
    check_token_dtypes(infos._asdict(), WINDOWS)
    check_token_memory(named)

    scale = check_scale(options.scale, DIM)
    lower_bound = check_lower_bound(options.lower_bound, has_A_log=infos.A_log is not None)
    normalize_qk = check_flag("use_qk_l2norm_in_kernel", options.use_qk_l2norm_in_kernel)
    doubles_beta = check_flag("allow_neg_eigval", options.allow_neg_eigval)
    check_modes(options.null_index, options.validate)
    check_written(
        {name: sliding(info) if name in WINDOWS else info for name, info in named.items() if name in WRITTEN}
    )
    return Plan(
        N=N,
        T=T,
        H=H,
        HV=HV,
        max_tokens=max_tokens,
        slots=slots,
        scratch_rows=scratch_rows,
        device=infos.x_q.device,
        infos=infos,
        scale=scale,
        lower_bound=lower_bound,
        normalize_qk=normalize_qk,
        beta_scale=2.0 if doubles_beta else 1.0,
        onorm_eps=onorm_eps,
        null_index=int(options.null_index),
        validate_fully=options.validate == "full",
    )


def _check_tokens(cu_seqlens: ArrayInfo, T: int, max_tokens: Any) -> tuple[int, int]:
    """Returns N and the longest request allowed."""
    if cu_seqlens.rank != 1 or not cu_seqlens.size or not cu_seqlens.is_contiguous:
        got = strides_text(cu_seqlens) if cu_seqlens.rank == 1 else f"shape {shape_text(cu_seqlens.shape)}"
        raise error("KDA-VERIFY-CU-SEQLENS", operand="cu_seqlens", got=got)
    check_dtype("cu_seqlens", cu_seqlens, INDICES)
    N = cu_seqlens.shape[0] - 1
    if max_tokens is None:
        if T % N if N else T:
            raise error("KDA-VERIFY-TOKENS", operand="cu_seqlens", got=f"T={T}, N={N}")
        longest = T // N if N else 1
        name = "cu_seqlens"
    else:
        name, longest = "max_tokens_per_request", max_tokens
        if not isinstance(longest, (int, np.integer)) or isinstance(longest, bool):
            raise error("KDA-VERIFY-MAX-TOKENS", operand=name, got=repr(max_tokens))
        if T and not N:
            raise error("KDA-VERIFY-TOKENS", operand="cu_seqlens", got=f"T={T}, N={N}")
    if not (longest >= 1 or (max_tokens is None and not T)) or longest > MAX_TOKENS:
        raise error("KDA-VERIFY-MAX-TOKENS", operand=name, got=f"{longest} tokens")
    return N, max(int(longest), 1)


def _check_scratch(
    named: Mapping[str, ArrayInfo], slots: int, H: int, HV: int, steps: int, activation: np.dtype[Any]
) -> None:
    if check_rollback(named):
        check_rings(named, HV=HV, H=H, steps=steps, activation=activation)
        rows = named["replayssm_rawv"].shape[0]
        if "ring_indices" not in named and rows != slots:
            got = (
                f"`replayssm_rawv` with {rows} ring rows for a pool of P={slots} slots, and no `ring_indices`"
            )
            layout = f"[slots, H={HV}, L>={steps}, 128] / [slots, H, L]"
            raise error(
                "KDA-VERIFY-RING-LAYOUT", operand="replayssm_rawv", got=got, layout=layout, key_heads=H
            )
    elif "ring_indices" in named:
        raise error("KDA-VERIFY-ROLLBACK", operand="ring_indices", got="`ring_indices` without rings")
    else:
        check_snapshots(named["intermediate_ssm"], HV=HV, steps=steps)
    for name, heads in zip(WINDOWS, (H, H, HV), strict=True):
        check_window(name, named[name], steps=steps, channels=heads * DIM)


def verify_config(plan: Plan) -> MtpVerifyConfig:
    """The configuration of kernels/mtp_verify.cu for a plan."""
    infos = plan.infos

    def dtype(name: str) -> str:
        info = getattr(infos, name)
        return "float32" if info is None else str(info.dtype.name)

    return MtpVerifyConfig(
        bounded=plan.lower_bound is not None,
        activation=dtype("x_q"),
        conv_weight=dtype("w_q"),
        g=dtype("g"),
        beta=dtype("beta"),
        A_log=dtype("A_log"),
        dt_bias=dtype("dt_bias"),
        onorm_weight=dtype("onorm_weight"),
        vector=all(
            info.moves_by_four(axis)
            for name, axis in _MOVED.items()
            if (info := getattr(infos, name)) is not None
        ),
        params_bytes=mtp_params.VERIFY_PARAMS_BYTES,
    )


_MOVED: Final = (
    dict.fromkeys(("x_q", "x_k", "x_v", "out", *RINGS[:2]), -1)
    | dict.fromkeys(HISTORIES, 1)
    | dict.fromkeys(WINDOWS, 2)
)
"""What is moved four channels at a time, and the axis of the channels."""


def _layout(plan: Plan) -> mtp_params.VerifyLayout:
    """The part of the parameter struct that a plan decides."""
    infos = plan.infos

    stride = Strides(infos._asdict())
    rings = infos.replayssm_rawv
    return mtp_params.VerifyLayout(
        **stride.of_each(("x_q", "x_k", "x_v"), 1, "x_{}_stride"),
        **stride.of_each(("w_q", "w_k", "w_v"), 0, "w_{}_stride"),
        **stride.of_each(HISTORIES, 0, "cs_{}_slot_stride"),
        **stride.of_each(HISTORIES, 1, "cs_{}_channel_stride"),
        **stride.of_each(HISTORIES, 2, "cs_{}_tap_stride"),
        **stride.of_each(WINDOWS, 0, "window_{}_row_stride"),
        **stride.of_each(WINDOWS, 1, "window_{}_step_stride"),
        **stride.of_each(WINDOWS, 2, "window_{}_channel_stride"),
        **stride.of_each(WINDOWS, 3, "window_{}_tap_stride"),
        g_stride=stride("g", 1),
        beta_stride=stride("beta", 1),
        beta_head_stride=stride("beta", 2),
        state_slot_stride=stride("recurrent_state", 0),
        snapshot_row_stride=stride("intermediate_ssm", 0),
        snapshot_step_stride=stride("intermediate_ssm", 1),
        ring_v_slot_stride=stride("replayssm_rawv", 0),
        ring_v_head_stride=stride("replayssm_rawv", 1),
        ring_k_slot_stride=stride("replayssm_rawk", 0),
        ring_k_head_stride=stride("replayssm_rawk", 1),
        ring_g_slot_stride=stride("replayssm_g", 0),
        ring_beta_slot_stride=stride("replayssm_beta", 0),
        onorm_gate_stride=stride("onorm_gate", 1),
        out_stride=stride("out", 1) if infos.out is not None else plan.HV * DIM,
        slot_index_stride=stride("ssm_state_indices", 0),
        scratch_index_stride=stride("intermediate_state_indices", 0),
        ring_index_stride=stride("ring_indices", 0),
        requests=plan.N,
        tokens=plan.T,
        slots=plan.slots,
        scratch_rows=plan.scratch_rows,
        ring_rows=0 if rings is None else rings.shape[0],
        max_tokens=plan.max_tokens,
        ring_steps=0 if rings is None else rings.shape[2],
        null_index=plan.null_index,
        slot_index_is_64bit=stride.is_64bit("ssm_state_indices"),
        scratch_index_is_64bit=stride.is_64bit("intermediate_state_indices"),
        ring_index_is_64bit=stride.is_64bit("ring_indices"),
        cu_seqlens_is_64bit=stride.is_64bit("cu_seqlens"),
        normalize_qk=plan.normalize_qk,
        group=plan.HV // plan.H,
        operation=guard.OPERATIONS.index(NAME),
        scale=plan.scale,
        lower_bound=0.0 if plan.lower_bound is None else plan.lower_bound,
        beta_scale=plan.beta_scale,
        onorm_eps=plan.onorm_eps,
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

    handed = operands.out
    if handed is None:
        shape = (1, plan.T, plan.HV, DIM)
        handed, out = bridge.empty_like_caller(operands.x_q, native.x_q, shape)
        native = native._replace(out=out)
        pointers = (*pointers[:-1], describe(out)[1])  # `out` is the last operand
    results = native.out if handed is None else handed
    if plan.device == HOST:
        return HostCall(partial(_run_on_host, plan, native), results), plan, foreign
    return _launch(plan, native, pointers, results), plan, foreign


def _plan(infos: Operands, options: Options) -> Plan:
    """:func:`check`, also for options that cannot be a key (0-d arrays, and whatever else is to be refused)."""
    try:
        hash(options)
    except TypeError:
        return check.__wrapped__(infos, options)
    return check(infos, options)


def _check_values(native: Operands, plan: Plan) -> None:
    """Read what is on the GPU and raise SlotError for what the kernel would not follow, and for races."""
    slots, bounds = to_host(native.ssm_state_indices), to_host(native.cu_seqlens)
    lengths = np.diff(bounds)
    live = slots > plan.null_index
    inside = (bounds[:-1] >= 0) & (bounds[1:] <= plan.T)
    for row in np.flatnonzero(live & ~((lengths >= 0) & (lengths <= plan.max_tokens) & inside))[:1]:
        raise guard.fault("cu_seqlens", int(row), int(lengths[row]), plan.max_tokens)
    live &= lengths > 0
    check_rows("ssm_state_indices", slots, live, plan.slots)
    check_rows(
        "intermediate_state_indices", to_host(native.intermediate_state_indices), live, plan.scratch_rows
    )
    if native.ring_indices is not None:
        check_rows("ring_indices", to_host(native.ring_indices), live, len(native.replayssm_rawv))


def _launch(plan: Plan, native: Operands, pointers: tuple[int, ...], results: Any) -> Launch:
    addresses = [pointers[index] for index in _POINTERS]
    launches = tuple(
        (
            mtp_params.verify_grid(requests, plan.HV),
            np.void(
                mtp_params.pack_verify_pointers(
                    mtp_params.VerifyPointers._make([*addresses, plan.errors, first])
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
    batched_mtp.decode_mtp(
        native,
        max_tokens=plan.max_tokens,
        scratch_rows=plan.scratch_rows,
        scale=plan.scale,
        lower_bound=plan.lower_bound,
        normalize_qk=plan.normalize_qk,
        beta_scale=plan.beta_scale,
        onorm_eps=plan.onorm_eps,
        null_index=plan.null_index,
        on_fault=lambda operand, *note: guard.record_on_host(number, guard.OPERANDS.index(operand), *note),
    )


def _split(arguments: dict[str, Any]) -> tuple[Operands, Options]:
    """Arguments of the call as arrays and host scalars; tree drafts are refused."""
    for name in ("parents", "retrieve_parent_token", "retrieve_next_token", "retrieve_next_sibling"):
        if arguments.get(name) is not None:
            raise error("KDA-VERIFY-TREE", operand=name, got=f"`{name}`")
    operands = Operands(**{name: arguments.get(name) for name in Operands._fields})
    return operands, Options(*[arguments[name] for name in Options._fields])


def kda_decode_mtp(
    *,
    x_q: Any,
    x_k: Any,
    x_v: Any,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    cs_q: Any,
    cs_k: Any,
    cs_v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    recurrent_state: Any,
    ssm_state_indices: Any,
    cu_seqlens: Any,
    intermediate_state_indices: Any,
    intermediate_conv_q: Any,
    intermediate_conv_k: Any,
    intermediate_conv_v: Any,
    intermediate_ssm: Any = None,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    ring_indices: Any = None,
    conv_bias_q: Any = None,
    conv_bias_k: Any = None,
    conv_bias_v: Any = None,
    onorm_gate: Any = None,
    onorm_weight: Any = None,
    onorm_eps: Any = None,
    out: Any = None,
    lower_bound: Any = None,
    scale: Any = None,
    max_tokens_per_request: int | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
    validate: str = "metadata",
    parents: None = None,
    retrieve_parent_token: None = None,
    retrieve_next_token: None = None,
    retrieve_next_sibling: None = None,
) -> Any:
    """Run the bonus token and the drafts of every request, and leave what is needed to keep any number of them.

    The persistent state and conv history are read and never written; :func:`kda_cupy.kda_commit` makes accepted
    tokens permanent. T tokens of N requests are packed one behind the other; K = V = 128.

    ==========================  ==================================  ====================  ==========================
    operand                     shape                               dtype                 strides
    ==========================  ==================================  ====================  ==========================
    x_q, x_k                    [1, T, H, 128], raw projections     bf16, fp16, fp32      heads dense, token free
    x_v                         [1, T, HV, 128]                     as x_q                heads dense, token free
    w_q, w_k, w_v               [H*128, 4], v: [HV*128, 4]          fp32, bf16, fp16      taps neighbours
    conv_bias_q, _k, _v         [H*128], v: [HV*128], optional      as w_q                contiguous
    cs_q, cs_k, cs_v            [P, H*128, 3], v: HV; history       as x_q                free
    g                           [1, T, HV, 128], raw gate           as x_q, or fp32       heads dense, token free
    beta                        [1, T, HV], raw logit               as x_q, or fp32       free
    A_log, dt_bias              HV (or None) and HV*128 elements    fp32, bf16, fp16      contiguous
    recurrent_state             [P, HV, V, K]: rows V, columns K    fp32                  slot free
    ssm_state_indices           [N], slot of each request           int32, int64          free
    cu_seqlens                  [N+1], where each request begins    int32, int64          contiguous
    intermediate_state_indices  [N], scratch row of each request    int32, int64          free
    intermediate_conv_q, _k,    [rows, >= t, H*128, 3], v: HV:      as x_q, **written**   free (may slide)
    _v                          window after each token
    intermediate_ssm            [rows, >= t, HV, V, K]: state       fp32, **written**     inner three dense
                                after each token
    replayssm_rawv, _rawk       [P, HV, L, 128], [P, H, L, 128]     as x_q, **written**   inner two dense
    replayssm_g, _beta          [P, HV, L, 128], [P, HV, L]         fp32, **written**     dense inside a slot
    ring_indices                [N], ring row, default the slot     int32, int64          free
    onorm_gate                  [1, T, HV, 128], optional           as x_q                heads dense, token free
    onorm_weight                [128], optional                     fp32, bf16            contiguous
    out                         [1, T, HV, 128], optional           as x_q, **written**   heads dense, token free
    ==========================  ==================================  ====================  ==========================

    Neighbouring windows share two of their three inputs. Windows that slide over raw inputs ``[rows, steps + 2,
    channels]`` (the strides of step and tap are the same) hold each once, and a third of their bytes is written.

    Exactly one of ``intermediate_ssm`` (snapshots) and the four ``replayssm_*`` rings is given; ``out`` has the same
    bits with either. Every token, with its convolution (history raw, SiLU, rounded to the dtype of ``x_q``), its
    gates and its update, is as in :func:`kda_cupy.kda_packed_decode`; with ``onorm_gate``, ``onorm_weight`` [V] and
    ``onorm_eps``, ``out = o * rsqrt(mean(o^2) + eps) * weight * sigmoid(gate)``. ``scale`` (default 128**-0.5) and
    ``lower_bound`` (None: softplus gate) are run-time values. Value head ``hv`` uses q and k of head
    ``hv // (HV // H)``.

    Without ``max_tokens_per_request`` every request has at most ``t = T / N`` tokens; with it, requests may have
    different lengths, each 0 to that number, at most 16. Lengths are read from ``cu_seqlens`` on the device. A slot
    < 0 is padding (``null_index=0``: a slot <= 0): nothing is read or written for it and its rows of ``out`` are
    zero, as are those past ``cu_seqlens[N]``. A request with a slot, row or length out of range is treated the same
    way, and :func:`kda_cupy.check_errors` raises it later; ``validate="full"`` reads the vectors first and raises
    before anything runs, also for a slot or row named twice. Tree drafts (``parents`` and the like) are refused.

    The arrays choose the backend, and CuPy's current stream is used, as in :func:`kda_cupy.kda_packed_decode`.
    Returns ``out``. Raises OperandError, DeviceError, SlotError, BridgeError or CompileError, and nothing is changed
    then.
    """
    operands, options = _split(locals())
    call, plan, foreign = prepare(operands, options)
    call()
    result = call.results
    if foreign:
        bridge.after_launch(plan.device, call)
        if operands.out is None and bridge.is_native(result):
            result = bridge.hand_back(operands.x_q, result)
    return result


def _bind(**arguments: Any) -> BoundCall:
    known = {**Options._field_defaults, **arguments}
    call, plan, _ = prepare(*_split(known))
    return BoundCall(call, plan.bytes_moved)


register_binder(kda_decode_mtp, _bind)
