# SPDX-License-Identifier: Apache-2.0
"""What both decode steps do with operands that passed: the parameter struct, the launch, the NumPy backend.

KDA has q, k and v apart, GDN has them side by side in one projection, one weight and one history. A kernel sees no
difference: :class:`Part` says where in the caller's operands each of its own lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy import bridge, guard
from kda_cupy.arrays import HOST, ArrayInfo, describe
from kda_cupy.checks import check_apart, check_flag, check_lower_bound, check_modes, check_scale, check_slots
from kda_cupy.config import StepConfig
from kda_cupy.launch import Call, HostCall, Launch, split_rows
from kda_cupy.modules import Kernel, get_kernel
from kda_cupy.ops import step_params
from kda_cupy.ops.mtp_checks import DIM, TAPS
from kda_cupy.ops.strides import Strides
from kda_cupy.reference import batched_step

_HISTORIES: Final = ("cs_q", "cs_k", "cs_v")
_TAPS: Final = ("w_q", "w_k", "w_v")
_PROJECTIONS: Final = ("x_q", "x_k", "x_v")


class Options(NamedTuple):
    """The host scalars, as they were passed."""

    lower_bound: Any = None
    scale: Any = None
    onorm_eps: Any = None
    use_qk_l2norm_in_kernel: Any = True
    allow_neg_eigval: Any = False
    null_index: Any = -1
    validate: Any = "metadata"


class Part(NamedTuple):
    """Where one of the kernel's operands lies: in which operand of the caller, how many bytes in, with which axes.

    The axes of ``info`` begin with the row, the channel or the slot, and only their strides count.
    """

    operand: str
    info: ArrayInfo
    offset: int = 0


@dataclass(frozen=True)
class StepPlan(guard.Noting):
    """What the metadata of the operands and the options decide; the same for every call that looks alike."""

    operation: str
    B: int
    H: int
    HV: int
    slots: int
    device: int
    parts: Mapping[str, Part]
    """By the field of StepPointers; an optional operand that is absent is absent here too."""
    scale: float
    lower_bound: float | None
    normalize_qk: bool
    beta_scale: float
    onorm_eps: float
    null_index: int
    validate_fully: bool
    out_shape: tuple[int, ...]
    apart: set[tuple[int, ...]] = field(default_factory=set)
    """Addresses known not to overlap."""

    @cached_property
    def config(self) -> StepConfig:
        """What the kernel is compiled for."""
        return _config(self)

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled at the first use."""
        return get_kernel(self.config, self.device)

    @cached_property
    def packed(self) -> bytes:
        """The parameter struct from ``x_q_stride`` on."""
        return step_params.pack_layout(_layout(self))

    @property
    def bytes_moved(self) -> int:
        """See the function of this name."""
        return bytes_moved(self.B, self.H, self.HV, self.config, normed="onorm_gate" in self.parts)


def bytes_moved(B: int, H: int, HV: int, config: StepConfig, *, normed: bool) -> int:
    """Bytes that B live rows must move through memory, each operand once.

    ``B * (2 * HV*V*K * 4  +  7 * C * act  +  gates * g  +  HV * beta  +  HV*V * act  +  4)`` with
    ``C = (2*H + HV) * 128`` channels.

    State read and written (fp32), projections, history read and written, raw gates (HV*K for KDA, HV for GDN), raw
    beta, output, slot index; with an output norm its gate (HV*V * act) too. Weights, which the rows share, are not
    counted.
    """
    size = {"bfloat16": 2, "float16": 2, "float32": 4}
    act, channels = size[config.activation], (2 * H + HV) * DIM
    gates = HV * DIM if config.per_key_gate else HV
    activations = (2 * TAPS - 1) * channels + (2 if normed else 1) * HV * DIM
    raw = gates * size[config.g] + HV * size[config.beta]
    return B * (2 * HV * DIM * DIM * 4 + activations * act + raw + 4)


def make_plan(
    operation: str,
    parts: Mapping[str, Part],
    options: Options,
    *,
    H: int,
    out_shape: tuple[int, ...],
    onorm_eps: float,
) -> StepPlan:
    """Check the options; ``parts`` have passed. Raises OperandError."""
    state = parts["recurrent_state"].info
    scale = check_scale(options.scale, DIM)
    lower_bound = check_lower_bound(options.lower_bound, has_A_log="A_log" in parts)
    normalize_qk = check_flag("use_qk_l2norm_in_kernel", options.use_qk_l2norm_in_kernel)
    doubles_beta = check_flag("allow_neg_eigval", options.allow_neg_eigval)
    check_modes(options.null_index, options.validate)
    return StepPlan(
        operation=operation,
        B=parts["ssm_state_indices"].info.shape[0],
        H=H,
        HV=state.shape[1],
        slots=state.shape[0],
        device=state.device,
        parts=parts,
        scale=scale,
        lower_bound=lower_bound,
        normalize_qk=normalize_qk,
        beta_scale=2.0 if doubles_beta else 1.0,
        onorm_eps=onorm_eps,
        null_index=int(options.null_index),
        validate_fully=options.validate == "full",
        out_shape=out_shape,
    )


def _config(plan: StepPlan) -> StepConfig:
    def dtype(name: str) -> str:
        return str(plan.parts[name].info.dtype.name) if name in plan.parts else "float32"

    return StepConfig(
        per_key_gate=plan.parts["g"].info.rank == 3,
        bounded=plan.lower_bound is not None,
        group=plan.HV // plan.H,
        activation=dtype("x_q"),
        conv_weight=dtype("w_q"),
        g=dtype("g"),
        beta=dtype("beta"),
        A_log=dtype("A_log"),
        dt_bias=dtype("dt_bias"),
        onorm_weight=dtype("onorm_weight"),
        vector=all(_loads_by_four(plan.parts[name]) for name in _TAPS),
        params_bytes=step_params.PARAMS_BYTES,
    )


def _loads_by_four(part: Part) -> bool:
    """True if the four taps of every channel are aligned to all four of them."""
    size = TAPS * part.info.dtype.itemsize
    return (part.info.misalignment + part.offset) % size == 0 and part.info.strides[0] % size == 0


def _layout(plan: StepPlan) -> step_params.StepLayout:
    stride = Strides({name: part.info for name, part in plan.parts.items()})
    return step_params.StepLayout(
        **stride.of_each(_PROJECTIONS, 0, "x_{}_stride"),
        **stride.of_each(_TAPS, 0, "w_{}_stride"),
        **stride.of_each(_HISTORIES, 0, "cs_{}_slot_stride"),
        **stride.of_each(_HISTORIES, 1, "cs_{}_channel_stride"),
        **stride.of_each(_HISTORIES, 2, "cs_{}_tap_stride"),
        g_stride=stride("g"),
        beta_stride=stride("beta"),
        beta_head_stride=stride("beta", 1),
        state_slot_stride=stride("recurrent_state"),
        onorm_gate_stride=stride("onorm_gate"),
        out_stride=stride("out") if "out" in plan.parts else plan.HV * DIM,
        slot_index_stride=stride("ssm_state_indices"),
        slots=plan.slots,
        null_index=plan.null_index,
        slot_index_is_64bit=stride.is_64bit("ssm_state_indices"),
        normalize_qk=plan.normalize_qk,
        operation=guard.OPERATIONS.index(plan.operation),
        scale=plan.scale,
        lower_bound=0.0 if plan.lower_bound is None else plan.lower_bound,
        beta_scale=plan.beta_scale,
        onorm_eps=plan.onorm_eps,
    )


def describe_all(native: Mapping[str, Any]) -> tuple[dict[str, ArrayInfo | None], dict[str, int]]:
    """Metadata and address of each operand; None and 0 for what is not there."""
    described = {name: (None, 0) if array is None else describe(array) for name, array in native.items()}
    return (
        {name: info for name, (info, _) in described.items()},
        {name: pointer for name, (_, pointer) in described.items()},
    )


def check_memory(
    plan: StepPlan,
    native: Mapping[str, Any],
    infos: Mapping[str, ArrayInfo | None],
    pointers: Mapping[str, int],
    written: frozenset[str],
) -> None:
    """Nothing that is written overlaps another operand; with ``validate="full"``, the slots are read and checked."""
    check_apart(infos, tuple(pointers.values()), written, plan.apart)
    if plan.validate_fully:
        check_slots(native["ssm_state_indices"], plan.slots, plan.null_index)


def with_out(
    plan: StepPlan, native: dict[str, Any], pointers: dict[str, int], caller: str, operands: Mapping[str, Any]
) -> Any:
    """Allocate ``out`` if the caller gave none, as an array of the type of his operand ``caller``.

    Returns what the operation returns; ``native`` and ``pointers`` get what is written to.
    """
    handed = operands["out"]
    if handed is None:
        handed, native["out"] = bridge.empty_like_caller(operands[caller], native[caller], plan.out_shape)
        pointers["out"] = describe(native["out"])[1]
    return native["out"] if handed is None else handed


def make_launch(
    plan: StepPlan, native: Mapping[str, Any], pointers: Mapping[str, int], results: Any
) -> Launch:
    """The kernel with its parameters."""
    addresses = [
        pointers[plan.parts[name].operand] + plan.parts[name].offset if name in plan.parts else 0
        for name in step_params.StepPointers._fields[:-3]
    ]
    launches = tuple(
        (
            step_params.grid(rows, plan.H),
            np.void(
                step_params.pack_pointers(
                    step_params.StepPointers._make([*addresses, pointers["out"], plan.errors, first])
                )
                + plan.packed
            ),
        )
        for first, rows in split_rows(plan.B)
    )
    block = (step_params.THREADS_PER_HEAD * plan.config.heads, 1, 1)
    return Launch(plan.kernel, plan.device, block, launches, results, keep=native)


def make_host_call(plan: StepPlan, arrays: batched_step.Step, results: Any) -> HostCall:
    """The same on the NumPy backend."""
    return HostCall(partial(_run_on_host, plan, arrays), results)


def _run_on_host(plan: StepPlan, arrays: batched_step.Step) -> None:
    number = guard.OPERATIONS.index(plan.operation)
    batched_step.decode_step(
        arrays,
        scale=plan.scale,
        lower_bound=plan.lower_bound,
        normalize_qk=plan.normalize_qk,
        beta_scale=plan.beta_scale,
        onorm_eps=plan.onorm_eps,
        onorm_silu=not plan.config.per_key_gate,
        null_index=plan.null_index,
        on_bad_slot=lambda row, slot: guard.record_on_host(number, 0, row, slot, plan.slots),
    )


def run(call: Call, plan: StepPlan, *, foreign: bool, caller: Any, out_was_given: bool) -> Any:
    """Launch, and give back ``out`` as an array of the caller's library.

    foreign: some operand is neither NumPy's nor CuPy's. caller: the operand whose library ``out`` belongs to.
    """
    call()
    result = call.results
    if foreign:
        bridge.after_launch(plan.device, call)
        if not out_was_given and bridge.is_native(result):
            result = bridge.hand_back(caller, result)
    return result


def is_on_host(plan: StepPlan) -> bool:
    """True if NumPy is to compute it."""
    return plan.device == HOST
