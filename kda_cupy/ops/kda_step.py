# SPDX-License-Identifier: Apache-2.0
"""``kda_decode_step``: one whole token of Kimi Delta Attention, convolution to output norm, everything in place.

The maths stands in kernels/decode_step.cu and, one formula a line, in kda_cupy/reference/truth.py. This file says which
operands are refused and in which order; step_plan.py launches the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from kda_cupy import bridge
from kda_cupy.arrays import ArrayInfo
from kda_cupy.checks import check_one_place, check_written, shape_text
from kda_cupy.errors import error
from kda_cupy.launch import BoundCall, Call, register_binder
from kda_cupy.ops import step_plan
from kda_cupy.ops.mtp_checks import DIM, check_index_vector, check_state_memory
from kda_cupy.ops.step_plan import Options, Part, StepPlan
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
from kda_cupy.reference.batched_step import Step

NAME: Final = "kda_decode_step"


class Operands(NamedTuple):
    """The arrays; those that may be None are in OPTIONAL."""

    x_q: Any
    x_k: Any
    x_v: Any
    w_q: Any
    w_k: Any
    w_v: Any
    conv_bias_q: Any
    conv_bias_k: Any
    conv_bias_v: Any
    cs_q: Any
    cs_k: Any
    cs_v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    recurrent_state: Any
    ssm_state_indices: Any
    onorm_gate: Any
    onorm_weight: Any
    out: Any


WRITTEN: Final = frozenset((*HISTORIES, "recurrent_state", "out"))
OPTIONAL: Final = frozenset((*BIASES, "A_log", "onorm_gate", "onorm_weight", "out"))
_PACKED: Final = frozenset(("x_q", "x_k", "x_v", "g", "beta", "onorm_gate", "out"))
"""Operands with a leading axis of 1."""


@lru_cache(maxsize=1024)
def check(infos: Operands, options: Options) -> StepPlan:
    """Check everything that metadata can show, in the order of ``kda_decode_mtp``, and plan the launch.

    ``infos`` holds an ArrayInfo in place of each array. Raises OperandError or DeviceError.
    """
    named: dict[str, ArrayInfo] = {name: info for name, info in infos._asdict().items() if info is not None}
    for name in Operands._fields:
        if name not in named and name not in OPTIONAL:
            raise error("KDA-ARRAY-KIND", operand=name, got="None")
    check_one_place(named, "KDA-PACKED-DEVICES")

    B, H, HV = check_activations(infos)
    check_gate_parameters(infos.A_log, infos.dt_bias, HV)
    check_state_memory("recurrent_state", infos.recurrent_state, HV)
    check_convolutions(named, infos.recurrent_state.shape[0], H, HV)
    check_index_vector("ssm_state_indices", infos.ssm_state_indices, B)
    onorm_eps = check_output_norm(
        infos.onorm_gate,
        infos.onorm_weight,
        options.onorm_eps,
        shape=(1, B, HV, DIM),
        axes=f"(1, B={B}, HV={HV}, 128)",
        activation=infos.x_q.dtype,
    )
    out_shape = (1, B, HV, DIM)
    if infos.out is not None and infos.out.shape != out_shape:
        got, shape = shape_text(infos.out.shape), f"(1, B={B}, HV={HV}, 128)"
        raise error("KDA-VERIFY-OUT-SHAPE", operand="out", got=got, shape=shape)
    check_token_dtypes(infos._asdict())
    check_token_memory(named)

    parts = {
        name: Part(name, _without_first(info) if name in _PACKED else info) for name, info in named.items()
    }
    plan = step_plan.make_plan(NAME, parts, options, H=H, out_shape=out_shape, onorm_eps=onorm_eps)
    check_written({name: info for name, info in named.items() if name in WRITTEN})
    return plan


def _without_first(info: ArrayInfo) -> ArrayInfo:
    return info._replace(shape=info.shape[1:], strides=info.strides[1:])


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
    results = step_plan.with_out(plan, native, pointers, "x_q", given)
    if step_plan.is_on_host(plan):
        return step_plan.make_host_call(plan, _as_step(native), results), plan, foreign
    return step_plan.make_launch(plan, native, pointers, results), plan, foreign


def _plan(infos: Operands, options: Options) -> StepPlan:
    """:func:`check`, also for options that cannot be a key (0-d arrays, and whatever else is to be refused)."""
    try:
        hash(options)
    except TypeError:
        return check.__wrapped__(infos, options)
    return check(infos, options)


def _as_step(native: Mapping[str, Any]) -> Step:
    """The NumPy arrays without their leading axis of 1."""
    arrays = {
        name: array[0] if name in _PACKED and array is not None else array for name, array in native.items()
    }
    renamed = {"state": arrays.pop("recurrent_state"), "indices": arrays.pop("ssm_state_indices")}
    return Step(**arrays, **renamed)


def _split(arguments: Mapping[str, Any]) -> tuple[Operands, Options]:
    """Arguments of the call as arrays and host scalars."""
    return (
        Operands(**{name: arguments.get(name) for name in Operands._fields}),
        Options(**{name: arguments[name] for name in Options._fields}),
    )


def kda_decode_step(
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
    conv_bias_q: Any = None,
    conv_bias_k: Any = None,
    conv_bias_v: Any = None,
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
    """Advance each row's sequence by one whole token of Kimi Delta Attention, in one launch.

    Convolution (history rolled in place), gates, norms, delta rule (state updated in place), and the gated output norm
    if one is given. Operands are those of :func:`kda_cupy.kda_decode_mtp` with one token a request; K = V = 128.

    ==========================  ==================================  ========================  ====================
    operand                     shape                               dtype                     strides
    ==========================  ==================================  ========================  ====================
    x_q, x_k                    [1, B, H, 128], raw projections     bf16, fp16, fp32          heads dense, row free
    x_v                         [1, B, HV, 128]                     as x_q                    heads dense, row free
    w_q, w_k, w_v               [H*128, 4], v: [HV*128, 4]          fp32, bf16, fp16          taps neighbours
    conv_bias_q, _k, _v         [H*128], v: [HV*128], optional      as w_q                    contiguous
    cs_q, cs_k, cs_v            [P, H*128, 3], v: HV; history       as x_q, **in place**      free
    g                           [1, B, HV, 128], raw gate           as x_q, or fp32           heads dense, row free
    beta                        [1, B, HV], raw logit               as x_q, or fp32           free
    A_log, dt_bias              HV (or None) and HV*128 elements    fp32, bf16, fp16          contiguous
    recurrent_state             [P, HV, V, K]: rows V, columns K    fp32, **in place**        slot free
    ssm_state_indices           [B], slot of each row               int32, int64              free
    onorm_gate                  [1, B, HV, 128], optional           as x_q                    heads dense, row free
    onorm_weight                [128], optional                     fp32, bf16                contiguous
    out                         [1, B, HV, 128], optional           as x_q, **written**       heads dense, row free
    ==========================  ==================================  ========================  ====================

    Per channel, ``y = bias + w0*h0 + w1*h1 + w2*h2 + w3*x`` and ``act = y * sigmoid(y)``, rounded to the dtype of
    ``x_q``; the history keeps raw inputs, oldest first. What follows has the bits of :func:`kda_cupy.kda_packed_decode`
    on those activations (see there for gates, norms and update, ``lower_bound``, ``scale`` and the flags); so
    :func:`kda_cupy.causal_conv1d_update` and the packed decode, one after the other, leave the same state. With
    ``onorm_gate``, ``onorm_weight`` and ``onorm_eps``, ``out = o * rsqrt(mean_v(o^2) + eps) * weight * sigmoid(gate)``,
    taken from the unrounded ``o``.

    A slot < 0 is padding (``null_index=0``: a slot <= 0): its row touches neither state nor history, its output is
    zero. A slot >= P does the same, and :func:`kda_cupy.check_errors` raises it later; ``validate="full"`` reads the
    slots first and raises before anything runs, also for a slot named twice.

    The arrays choose the backend, and CuPy's current stream is used, as in :func:`kda_cupy.kda_packed_decode`.
    Returns ``out``. Raises OperandError, DeviceError, SlotError, BridgeError or CompileError, and nothing is changed
    then.
    """
    operands, options = _split(locals())
    call, plan, foreign = prepare(operands, options)
    return step_plan.run(call, plan, foreign=foreign, caller=x_q, out_was_given=out is not None)


def _bind(**arguments: Any) -> BoundCall:
    call, plan, _ = prepare(*_split({**Options._field_defaults, **arguments}))
    return BoundCall(call, plan.bytes_moved)


register_binder(kda_decode_step, _bind)
