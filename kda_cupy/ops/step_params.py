# SPDX-License-Identifier: Apache-2.0
"""The parameter struct of kernels/decode_step.cu, and the grid that it is launched with.

Two NamedTuples, one behind the other in memory: addresses, which differ from call to call, and the layout, which the
metadata of the operands and the options decide and a plan packs once. The fields are those of the C struct in the
same order; where C has an array of three (q, k, v), here are three fields. All strides are in elements. An optional
operand that is absent has address 0; its strides are then never read.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

THREADS_PER_HEAD: Final = 512
"""A block has them once for each value head that it works on at a time."""


class StepPointers(NamedTuple):
    """``DecodeStepParams``, first part: addresses and where this launch begins."""

    x_q: int
    x_k: int
    x_v: int
    w_q: int
    w_k: int
    w_v: int
    conv_bias_q: int
    """0: no bias (all three or none)."""
    conv_bias_k: int
    conv_bias_v: int
    cs_q: int
    cs_k: int
    cs_v: int
    g: int
    beta: int
    A_log: int
    """0: exp(A_log) = 1."""
    dt_bias: int
    recurrent_state: int
    ssm_state_indices: int
    onorm_gate: int
    """0: no output norm."""
    onorm_weight: int
    out: int
    errors: int
    """Of kda_cupy.guard."""
    first_row: int
    """Of this launch: see kda_cupy.launch.split_rows."""


class StepLayout(NamedTuple):
    """``DecodeStepParams``, second part."""

    x_q_stride: int
    """From row to row; heads are 128 apart."""
    x_k_stride: int
    x_v_stride: int
    w_q_stride: int
    """From channel to channel; taps are neighbours."""
    w_k_stride: int
    w_v_stride: int
    cs_q_slot_stride: int
    cs_k_slot_stride: int
    cs_v_slot_stride: int
    cs_q_channel_stride: int
    cs_k_channel_stride: int
    cs_v_channel_stride: int
    cs_q_tap_stride: int
    cs_k_tap_stride: int
    cs_v_tap_stride: int
    g_stride: int
    """From row to row; heads (or keys) are neighbours."""
    beta_stride: int
    beta_head_stride: int
    state_slot_stride: int
    onorm_gate_stride: int
    """From row to row; heads are 128 apart."""
    out_stride: int
    """From row to row; heads are 128 apart."""
    slot_index_stride: int
    slots: int
    """P."""
    null_index: int
    """-1 or 0: slots up to here are padding."""
    slot_index_is_64bit: int
    normalize_qk: int
    operation: int
    """Index in guard.OPERATIONS."""
    scale: float
    lower_bound: float
    beta_scale: float
    """1, or 2 with allow_neg_eigval."""
    onorm_eps: float


_POINTERS: Final = struct.Struct("<22Qq")
_LAYOUT: Final = struct.Struct("<23q4i4f")
PARAMS_BYTES: Final = _POINTERS.size + _LAYOUT.size


def pack_pointers(pointers: StepPointers) -> bytes:
    """First part of the struct."""
    return _POINTERS.pack(*pointers)


def pack_layout(layout: StepLayout) -> bytes:
    """Second part of the struct, to be put behind the first."""
    return _LAYOUT.pack(*layout)


def grid(rows: int, H: int) -> tuple[int, int, int]:
    """Blocks of one launch over ``rows`` (at most 65,535)."""
    return (H, 1, rows)
