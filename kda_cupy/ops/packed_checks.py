# SPDX-License-Identifier: Apache-2.0
"""What the packed decodes and the decode step of GDN ask of packed projections, gates and indices. Metadata only."""

from __future__ import annotations

from kda_cupy.arrays import ArrayInfo
from kda_cupy.checks import (
    check_bfloat16_support,
    check_contiguous,
    check_contiguous_last,
    check_dtype,
    shape_text,
)
from kda_cupy.dtypes import FLOAT32, FLOATS, INDICES
from kda_cupy.errors import error


def check_ranks_and_contiguity(
    per_key: bool,
    x: ArrayInfo,
    a: ArrayInfo,
    b: ArrayInfo,
    A_log: ArrayInfo | None,
    dt_bias: ArrayInfo,
    indices: ArrayInfo,
    out: ArrayInfo | None,
) -> None:
    """Ranks, and what must be contiguous, in the documented order. ``per_key``: one gate per key, not per head."""
    if x.rank != 2:
        raise error(
            "KDA-PACKED-QKV-RANK", operand="mixed_qkv", got=f"shape {shape_text(x.shape)}", rank=x.rank
        )
    check_contiguous_last("KDA-PACKED-QKV-CONTIGUOUS", "mixed_qkv", x)
    for name, info in (("a", a), ("b", b)):
        if info.rank != 2:
            axes = "[B, HV*K]" if per_key and name == "a" else "[B, HV]"
            got = f"shape {shape_text(info.shape)}"
            raise error("KDA-PACKED-AB-RANK", operand=name, got=got, rank=info.rank, axes=axes)
    for name, info in (("a", a), ("b", b)):
        check_contiguous_last("KDA-PACKED-AB-CONTIGUOUS", name, info)
    if dt_bias.rank not in ((1, 2) if per_key else (1,)):
        wanted = "1D or 2D tensor, [HV*K] or [HV, K]" if per_key else "1D tensor, [HV]"
        got = f"shape {shape_text(dt_bias.shape)}"
        raise error("KDA-PACKED-GATE-RANK", operand="dt_bias", got=got, rank=dt_bias.rank, wanted_rank=wanted)
    for name, gate in (("A_log", A_log), ("dt_bias", dt_bias)):
        if gate is not None:
            check_contiguous("KDA-PACKED-GATE-CONTIGUOUS", name, gate)
    if indices.rank != 1:
        raise error(
            "KDA-PACKED-INDICES-RANK",
            operand="ssm_state_indices",
            got=f"shape {shape_text(indices.shape)}",
            rank=indices.rank,
        )
    if out is not None:
        check_contiguous("KDA-PACKED-OUT-CONTIGUOUS", "out", out)


def check_dtypes(
    x: ArrayInfo,
    a: ArrayInfo,
    b: ArrayInfo,
    A_log: ArrayInfo | None,
    dt_bias: ArrayInfo,
    state: ArrayInfo,
    indices: ArrayInfo,
    out: ArrayInfo | None,
) -> None:
    """Activations alike, gates also in float32, parameters in any float type, indices in int32 or int64."""
    check_dtype("mixed_qkv", x, FLOATS)
    gate_types = dict.fromkeys((x.dtype, FLOAT32))
    check_dtype("a", a, gate_types)
    check_dtype("b", b, gate_types)
    if A_log is not None:
        check_dtype("A_log", A_log, FLOATS)
    check_dtype("dt_bias", dt_bias, FLOATS)
    check_dtype("initial_state", state, (FLOAT32,), "KDA-STATE-DTYPE")
    check_dtype("ssm_state_indices", indices, INDICES)
    if out is not None:
        check_dtype("out", out, (x.dtype,))
    check_bfloat16_support({"mixed_qkv": x, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias})


def check_rows_agree(x: ArrayInfo, a: ArrayInfo, b: ArrayInfo, indices: ArrayInfo) -> int:
    """As many rows in each. Returns B."""
    B = x.shape[0]
    if not B == a.shape[0] == b.shape[0]:
        got = f"`mixed_qkv.shape[0]={B}`, `a.shape[0]={a.shape[0]}`, `b.shape[0]={b.shape[0]}`"
        raise error("KDA-PACKED-BATCH", operand="mixed_qkv", got=got)
    if indices.shape != (B,):
        raise error(
            "KDA-PACKED-INDICES-SHAPE", operand="ssm_state_indices", got=str(indices.shape), expected=(B,)
        )
    return B


def check_gate_shapes(
    per_key: bool, HV: int, K: int, a: ArrayInfo, b: ArrayInfo, A_log: ArrayInfo | None, dt_bias: ArrayInfo
) -> None:
    """As many gates and parameters as there are heads, or keys."""
    gates = HV * K if per_key else HV
    wanted_a = f"[B, HV*K] with HV={HV}, K={K}" if per_key else f"[B, HV] with HV={HV}"
    for name, info, width, wanted in (("a", a, gates, wanted_a), ("b", b, HV, f"[B, HV] with HV={HV}")):
        if info.shape[1] != width:
            raise error("KDA-PACKED-AB-SHAPE", operand=name, got=f"{name}.shape={info.shape}", shape=wanted)
    wrong_bias_axes = dt_bias.rank == 2 and dt_bias.shape != (HV, K)
    if (A_log is not None and A_log.size != HV) or dt_bias.size != gates or wrong_bias_axes:
        raise error(
            "KDA-PACKED-GATE-NUMEL",
            operand="A_log" if A_log is not None and A_log.size != HV else "dt_bias",
            got=f"{'A_log=None' if A_log is None else f'A_log.shape={A_log.shape}'}, dt_bias.shape={dt_bias.shape}",
            elements=f"HV={HV} and HV*K={gates}" if per_key else f"HV={HV}",
        )


def heads_of(width: int, HV: int, V: int, K: int) -> int:
    """H, from the width of a packed row."""
    qk = width - HV * V
    if qk <= 0 or qk % 2:
        got = f"qk_dim={qk} from qkv_dim={width}, HV={HV}, V={V}"
        raise error("KDA-PACKED-QKV-WIDTH", operand="mixed_qkv", got=got)
    if qk // 2 % K:
        got = f"qk_dim/2={qk // 2} from qkv_dim={width}, HV={HV}, V={V}"
        raise error("KDA-PACKED-Q-WIDTH", operand="mixed_qkv", got=got, K=K)
    H = qk // 2 // K
    if HV % H:
        got = f"H={H} and HV={HV}, from qkv_dim={width}, V={V}, K={K}"
        raise error("KDA-PACKED-HEADS", operand="mixed_qkv", got=got)
    return H
