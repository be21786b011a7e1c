# SPDX-License-Identifier: Apache-2.0
"""What verify and the decode step of KDA ask of a token: projections, taps, gates, output norm.

All checks are on metadata, and ``infos`` has an ArrayInfo (or None) by the operand's name, as an attribute. ``HV`` and
``H`` are numbers of value and of key heads; head dimensions are 128.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from kda_cupy.arrays import ArrayInfo
from kda_cupy.checks import (
    as_float,
    check_alignment,
    check_bfloat16_support,
    check_contiguous,
    check_dtype,
    check_strides,
    is_dense,
    shape_text,
    strides_text,
)
from kda_cupy.dtypes import BFLOAT16, FLOAT32, FLOATS
from kda_cupy.errors import error
from kda_cupy.ops.mtp_checks import DIM, SHORT_NAMES, TAPS, check_history

HISTORIES: Final = ("cs_q", "cs_k", "cs_v")
BIASES: Final = ("conv_bias_q", "conv_bias_k", "conv_bias_v")
_TOKEN_AXES: Final = ("x_q", "x_k", "x_v", "g", "onorm_gate", "out")
"""Operands whose last two axes are dense and whose token stride is free."""


def check_activations(infos: Any) -> tuple[int, int, int]:
    """Returns T, H and HV."""
    for name, x in (("x_q", infos.x_q), ("x_k", infos.x_k)):
        alike = x.rank == 4 and x.shape[0] == 1 and x.shape[2] > 0 and x.shape[3] == DIM
        if not alike or x.shape != infos.x_q.shape:
            raise error("KDA-VERIFY-QK-SHAPE", operand=name, got=f"`{name}` of shape {shape_text(x.shape)}")
    _, T, H, _ = infos.x_q.shape
    HV = infos.x_v.shape[2] if infos.x_v.rank == 4 else 0
    for name, x in (("x_v", infos.x_v), ("g", infos.g)):
        if x.shape != (1, T, HV, DIM) or not HV or HV % H:
            got = f"`x_v` of shape {shape_text(infos.x_v.shape)} and `g` of shape {shape_text(infos.g.shape)}"
            shape = f"(1, T={T}, HV, 128)"
            raise error("KDA-VERIFY-VG-SHAPE", operand=name, got=got, shape=shape)
    if infos.beta.shape != (1, T, HV):
        got, shape = shape_text(infos.beta.shape), f"(1, T={T}, HV={HV})"
        raise error("KDA-VERIFY-BETA-SHAPE", operand="beta", got=got, shape=shape)
    return T, H, HV


def check_gate_parameters(A_log: ArrayInfo | None, dt_bias: ArrayInfo, HV: int) -> None:
    """As many elements as there are value heads, and keys."""
    for name, info, numel in (("A_log", A_log, HV), ("dt_bias", dt_bias, HV * DIM)):
        if info is None:
            continue
        folded = name == "dt_bias" and info.rank != 1 and info.shape[-2:] != (HV, DIM)
        if info.size != numel or folded:
            raise error(
                "KDA-VERIFY-A-LOG-NUMEL",
                operand=name,
                got=f"{info.size} elements",
                shape=info.shape,
                numel=numel,
            )


def check_convolutions(named: Mapping[str, ArrayInfo], slots: int, H: int, HV: int) -> None:
    """Taps, biases (for all three or none) and history, a channel each."""
    biases = [name for name in BIASES if name in named]
    if biases and len(biases) < len(BIASES):
        missing = next(name for name in BIASES if name not in named)
        got = f"`{biases[0]}` without `{missing}`"
        raise error("KDA-VERIFY-CONV-WEIGHT", operand=missing, got=got, shape="with the other two, or none")
    for letter, heads in (("q", H), ("k", H), ("v", HV)):
        channels = heads * DIM
        check_taps(named, f"w_{letter}", (channels, TAPS))
        check_taps(named, f"conv_bias_{letter}", (channels,))
        name = f"cs_{letter}"
        check_history(name, named[name], slots=slots, channels=channels)


def check_taps(named: Mapping[str, ArrayInfo], name: str, shape: tuple[int, ...]) -> None:
    """Taps or biases, if they are there, of every channel."""
    if name in named and named[name].shape != shape:
        got = f"shape {shape_text(named[name].shape)}"
        raise error("KDA-VERIFY-CONV-WEIGHT", operand=name, got=got, shape=shape_text(shape))


def check_output_norm(
    gate: ArrayInfo | None,
    weight: ArrayInfo | None,
    eps: Any,
    *,
    shape: tuple[int, ...],
    axes: str,
    activation: np.dtype[Any],
) -> float:
    """All three parts or none. Returns the epsilon; 0.0 without a norm.

    shape: of the gate. axes: the same with names, such as ``(1, T=4, HV=2, 128)``.
    """
    parts = {"onorm_gate": gate, "onorm_weight": weight, "onorm_eps": eps}
    missing = [name for name, part in parts.items() if part is None]
    if len(missing) == len(parts):
        return 0.0
    if missing or gate is None or weight is None:
        got = f"no `{missing[0]}`"
        raise error("KDA-VERIFY-ONORM-INCOMPLETE", operand=missing[0], got=got)
    if gate.shape != shape:
        got = shape_text(gate.shape)
        raise error("KDA-VERIFY-ONORM-GATE-SHAPE", operand="onorm_gate", got=got, shape=axes)
    if weight.shape != (DIM,):
        raise error("KDA-VERIFY-ONORM-WEIGHT-SHAPE", operand="onorm_weight", got=shape_text(weight.shape))
    if gate.dtype != activation or weight.dtype not in (FLOAT32, BFLOAT16):
        name = "onorm_gate" if gate.dtype != activation else "onorm_weight"
        got = f"gate={gate.dtype} and weight={weight.dtype}"
        short = SHORT_NAMES.get(activation.name, activation.name)
        raise error("KDA-VERIFY-ONORM-DTYPE", operand=name, got=got, activation=short)
    epsilon = as_float("KDA-VALUE-EPS", "onorm_eps", eps)
    if epsilon < 0:
        raise error("KDA-VALUE-EPS", operand="onorm_eps", got=repr(epsilon))
    return epsilon


def check_token_dtypes(infos: Mapping[str, Any], activations: tuple[str, ...] = ()) -> None:
    """The activation dtype is that of ``x_q``, and of the operands named in ``activations`` too."""
    check_dtype("x_q", infos["x_q"], FLOATS)
    activation = infos["x_q"].dtype
    _check_each(infos, ("x_k", "x_v", *HISTORIES, *activations, "out"), (activation,))
    _check_each(infos, ("g", "beta"), dict.fromkeys((activation, FLOAT32)))
    check_dtype("w_q", infos["w_q"], FLOATS)
    _check_each(infos, ("w_k", "w_v", *BIASES), (infos["w_q"].dtype,))
    _check_each(infos, ("A_log", "dt_bias"), FLOATS)
    check_bfloat16_support(infos)


def _check_each(infos: Mapping[str, Any], names: Iterable[str], allowed: Iterable[np.dtype[Any]]) -> None:
    for name in names:
        if infos[name] is not None:
            check_dtype(name, infos[name], allowed)


def check_token_memory(named: Mapping[str, ArrayInfo]) -> None:
    """Strides and alignment of what has no stricter check of its own."""
    for name, info in named.items():
        check_strides(name, info)
        check_alignment(name, info)
    check_dense(named, _TOKEN_AXES, 2)
    check_dense(named, ("w_q", "w_k", "w_v", *BIASES, "onorm_weight"), 1)
    for name in ("A_log", "dt_bias"):
        if name in named:
            check_contiguous("KDA-PACKED-GATE-CONTIGUOUS", name, named[name])


def check_dense(named: Mapping[str, ArrayInfo], names: Iterable[str], axes: int) -> None:
    """The last ``axes`` axes of those that are there lie in C order without gaps."""
    for name in names:
        if name in named and not is_dense(named[name], axes):
            raise error("KDA-VERIFY-CONTIGUOUS", operand=name, got=strides_text(named[name]))
