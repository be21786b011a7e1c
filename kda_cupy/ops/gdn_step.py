# SPDX-License-Identifier: Apache-2.0
"""``gdn_decode_step``: one whole token of Gated DeltaNet, convolution to output norm, everything in place.

q, k and v are columns of one projection and channels of one convolution, as in Qwen3-Next. The maths stands in
kernels/decode_step.cu and, one formula a line, in kda_cupy/reference/truth.py. This file says which operands are
refused and in which order; step_plan.py launches the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from kda_cupy import bridge
from kda_cupy.arrays import ArrayInfo
from kda_cupy.checks import (
    check_alignment,
    check_bfloat16_support,
    check_dtype,
    check_one_place,
    check_strides,
    check_written,
)
from kda_cupy.dtypes import FLOATS
from kda_cupy.errors import error
from kda_cupy.launch import BoundCall, Call, register_binder
from kda_cupy.ops import step_plan
from kda_cupy.ops.mtp_checks import DIM, TAPS, check_history, check_state_memory
from kda_cupy.ops.packed_checks import (
    check_dtypes,
    check_gate_shapes,
    check_ranks_and_contiguity,
    check_rows_agree,
    heads_of,
)
from kda_cupy.ops.step_plan import Options, Part, StepPlan
from kda_cupy.ops.token_checks import check_dense, check_output_norm, check_taps
from kda_cupy.reference.batched_step import Step

NAME: Final = "gdn_decode_step"


class Operands(NamedTuple):
    """The arrays, in the order of the signature; those that may be None are in OPTIONAL."""

    mixed_qkv: Any
    a: Any
    b: Any
    conv_weight: Any
    conv_state: Any
    A_log: Any
    dt_bias: Any
    initial_state: Any
    ssm_state_indices: Any
    conv_bias: Any
    onorm_gate: Any
    onorm_weight: Any
    out: Any


WRITTEN: Final = frozenset(("conv_state", "initial_state", "out"))
OPTIONAL: Final = frozenset(("A_log", "conv_bias", "onorm_gate", "onorm_weight", "out"))


@lru_cache(maxsize=1024)
def check(infos: Operands, options: Options) -> StepPlan:
    """Check everything that metadata can show, in the order of ``gdn_packed_decode``, and plan the launch.

    ``infos`` holds an ArrayInfo in place of each array. Raises OperandError or DeviceError.
    """
    named: dict[str, ArrayInfo] = {name: info for name, info in infos._asdict().items() if info is not None}
    for name in Operands._fields:
        if name not in named and name not in OPTIONAL:
            raise error("KDA-ARRAY-KIND", operand=name, got="None")
    x, a, b, state, indices = infos.mixed_qkv, infos.a, infos.b, infos.initial_state, infos.ssm_state_indices
    gates = (infos.A_log, infos.dt_bias)

    check_ranks_and_contiguity(False, x, a, b, *gates, indices, infos.out)
    check_one_place(named, "KDA-PACKED-DEVICES")
    check_dtypes(x, a, b, *gates, state, indices, infos.out)
    for name, info in named.items():
        check_strides(name, info)
        if name != "initial_state":  # which has a stricter check of its own
            check_alignment(name, info)
    B = check_rows_agree(x, a, b, indices)
    check_state_memory("initial_state", state, None)
    slots, HV, _, _ = state.shape
    check_gate_shapes(False, HV, DIM, a, b, *gates)
    out_shape = (B, 1, HV, DIM)
    if infos.out is not None and infos.out.shape != out_shape:
        raise error("KDA-PACKED-OUT-SHAPE", operand="out", got=str(infos.out.shape), expected=out_shape)
    H = heads_of(x.shape[1], HV, DIM, DIM)

    channels = x.shape[1]
    check_taps(named, "conv_weight", (channels, TAPS))
    check_taps(named, "conv_bias", (channels,))
    check_history("conv_state", infos.conv_state, slots=slots, channels=channels)
    onorm_eps = check_output_norm(
        infos.onorm_gate,
        infos.onorm_weight,
        options.onorm_eps,
        shape=(B, HV, DIM),
        axes=f"(B={B}, HV={HV}, 128)",
        activation=x.dtype,
    )
    check_dtype("conv_weight", infos.conv_weight, FLOATS)
    if infos.conv_bias is not None:
        check_dtype("conv_bias", infos.conv_bias, (infos.conv_weight.dtype,))
    check_dtype("conv_state", infos.conv_state, (x.dtype,))
    check_bfloat16_support(named)
    check_dense(named, ("conv_weight", "conv_bias", "onorm_weight"), 1)
    check_dense(named, ("onorm_gate",), 2)

    plan = step_plan.make_plan(NAME, _parts(named, H), options, H=H, out_shape=out_shape, onorm_eps=onorm_eps)
    check_written({name: info for name, info in named.items() if name in WRITTEN})
    return plan


def _parts(named: Mapping[str, ArrayInfo], H: int) -> dict[str, Part]:
    """The kernel's operands: q, k and v are columns of the projection and channels of the convolution."""
    first_channels = {"q": 0, "k": H * DIM, "v": 2 * H * DIM}
    columns = {
        "x": ("mixed_qkv", 1),
        "w": ("conv_weight", 0),
        "conv_bias": ("conv_bias", 0),
        "cs": ("conv_state", 1),
    }
    parts = {
        f"{kind}_{letter}": Part(name, named[name], channel * named[name].strides[axis])
        for kind, (name, axis) in columns.items()
        for letter, channel in first_channels.items()
        if name in named
    }
    renamed = {"g": "a", "beta": "b", "recurrent_state": "initial_state"}
    same = ("A_log", "dt_bias", "ssm_state_indices", "onorm_gate", "onorm_weight")
    parts |= {field: Part(name, named[name]) for field, name in renamed.items()}
    return parts | {name: Part(name, named[name]) for name in same if name in named}


def prepare(operands: Operands, options: Options) -> tuple[Call, StepPlan, bool]:
    """Check and convert everything, and return what only has to be called.

    Also returns the plan, and whether arrays of other libraries are involved.
    """
    given = operands._asdict()
    foreign = not bridge.all_native(operands)
    native = bridge.adopt_all(given, WRITTEN) if foreign else dict(given)
    infos, pointers = step_plan.describe_all(native)
    plan = _plan(Operands(**infos), options)
    step_plan.check_memory(plan, native, infos, pointers, WRITTEN)
    results = step_plan.with_out(plan, native, pointers, "mixed_qkv", given)
    if step_plan.is_on_host(plan):
        return step_plan.make_host_call(plan, _as_step(native, plan), results), plan, foreign
    return step_plan.make_launch(plan, native, pointers, results), plan, foreign


def _plan(infos: Operands, options: Options) -> StepPlan:
    """:func:`check`, also for options that cannot be a key (0-d arrays, and whatever else is to be refused)."""
    try:
        hash(options)
    except TypeError:
        return check.__wrapped__(infos, options)
    return check(infos, options)


def _as_step(native: Mapping[str, Any], plan: StepPlan) -> Step:
    """The NumPy arrays, q, k and v apart: views, so that the history is written where it is."""
    qk = plan.H * DIM
    columns = {"q": slice(0, qk), "k": slice(qk, 2 * qk), "v": slice(2 * qk, None)}
    rows, bias = native["mixed_qkv"], native["conv_bias"]
    arrays: dict[str, Any] = {}
    for letter, part in columns.items():
        arrays[f"x_{letter}"] = rows[:, part].reshape(plan.B, plan.HV if letter == "v" else plan.H, DIM)
        arrays[f"w_{letter}"] = native["conv_weight"][part]
        arrays[f"conv_bias_{letter}"] = None if bias is None else bias[part]
        arrays[f"cs_{letter}"] = native["conv_state"][:, part]
    for name in ("A_log", "dt_bias", "onorm_gate", "onorm_weight"):
        arrays[name] = native[name]
    return Step(
        **arrays,
        g=native["a"],
        beta=native["b"],
        state=native["initial_state"],
        indices=native["ssm_state_indices"],
        out=native["out"][:, 0],
    )


def gdn_decode_step(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    conv_weight: Any,
    conv_state: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    ssm_state_indices: Any,
    *,
    conv_bias: Any = None,
    onorm_gate: Any = None,
    onorm_weight: Any = None,
    onorm_eps: Any = None,
    out: Any = None,
    lower_bound: Any = None,
    scale: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
    validate: str = "metadata",
) -> Any:
    """Advance each row's sequence by one whole token of Gated DeltaNet, in one launch.

    Convolution over packed channels (history rolled in place), gates, norms, delta rule (state updated in place), and
    the gated output norm if one is given. K = V = 128; C = 2*H*128 + HV*128 channels, q of all heads, then k, then v.

    =================  ==================================  ========================  ====================
    operand            shape                               dtype                     strides
    =================  ==================================  ========================  ====================
    mixed_qkv          [B, C], raw projections             bf16, fp16, fp32          last 1, row free
    a, b               [B, HV], raw gate, raw beta logit   as mixed_qkv, or fp32     last 1, row free
    conv_weight        [C, 4]                              fp32, bf16, fp16          taps neighbours
    conv_state         [P, C, 3], history                  as mixed_qkv, **in        free
                                                           place**
    A_log, dt_bias     HV (or None) and [HV]               fp32, bf16, fp16          contiguous
    initial_state      [P, HV, V, K]: rows V, columns K    fp32, **in place**        slot free
    ssm_state_indices  [B], slot of each row               int32, int64              free
    conv_bias          [C], optional                       as conv_weight            contiguous
    onorm_gate         [B, HV, 128], optional              as mixed_qkv              heads dense, row free
    onorm_weight       [128], optional                     fp32, bf16                contiguous
    out                [B, 1, HV, 128], optional           as mixed_qkv,             contiguous
                                                           **written**
    =================  ==================================  ========================  ====================

    The convolution is that of :func:`kda_cupy.kda_decode_step`; what follows has the bits of
    :func:`kda_cupy.gdn_packed_decode` on its activations. With ``onorm_gate`` (z), ``onorm_weight`` and ``onorm_eps``,
    ``out = o * rsqrt(mean_v(o^2) + eps) * weight * z * sigmoid(z)``, taken from the unrounded ``o``: the SiLU gate of
    Qwen3-Next.

    Padding, errors, backends and streams are as in :func:`kda_cupy.kda_decode_step`. Returns ``out``.
    """
    operands = Operands(
        mixed_qkv, a, b, conv_weight, conv_state, A_log, dt_bias, initial_state, ssm_state_indices,
        conv_bias, onorm_gate, onorm_weight, out,
    )  # fmt: skip
    options = Options(
        lower_bound, scale, onorm_eps, use_qk_l2norm_in_kernel, allow_neg_eigval, null_index, validate
    )
    call, plan, foreign = prepare(operands, options)
    return step_plan.run(call, plan, foreign=foreign, caller=mixed_qkv, out_was_given=out is not None)


def _bind(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    conv_weight: Any,
    conv_state: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    ssm_state_indices: Any,
    *,
    conv_bias: Any = None,
    onorm_gate: Any = None,
    onorm_weight: Any = None,
    out: Any = None,
    **options: Any,
) -> BoundCall:
    operands = Operands(
        mixed_qkv, a, b, conv_weight, conv_state, A_log, dt_bias, initial_state, ssm_state_indices,
        conv_bias, onorm_gate, onorm_weight, out,
    )  # fmt: skip
    call, plan, _ = prepare(operands, Options(**options))
    return BoundCall(call, plan.bytes_moved)


register_binder(gdn_decode_step, _bind)
