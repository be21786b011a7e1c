# SPDX-License-Identifier: Apache-2.0
"""The parameter structs of kernels/mtp_verify.cu and kernels/commit.cu, and the grids they are launched with.

Each struct is two NamedTuples here, one behind the other in memory: addresses, which differ from call to call,
and the layout, which the metadata of the operands and the options decide and a plan packs once. A NamedTuple's
fields are those of the C struct in the same order; where C has an array of three (q, k, v), here are three fields.
All strides are in elements. An optional operand that is absent has address 0; its strides are then never read.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kda_cupy import guard

THREADS: Final = 256
"""Threads a block, both kernels."""

OPERANDS: Final = guard.OPERANDS
"""What the operand number in an error record means; the kernels write these numbers.

The value recorded is the slot, the row, the length or the count; the limit is the first value too large for it
(slots, rows), or the largest allowed (``cu_seqlens``, ``accept_lens``), or the accept count (``track_steps``).
A request is looked at in this order and only its first fault is noted: a padding slot (no fault; outputs zero), the
length, then (if the length is not 0) the slot, the scratch row, the ring row. Commit: a padding slot (no fault), the
slot, the accept count, then (if it is not 0) the scratch row, the ring row, the tracking slot, the tracking step.
"""


class VerifyPointers(NamedTuple):
    """``MtpVerifyParams`` of kernels/mtp_verify.cu, first part: addresses and where this launch begins."""

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
    intermediate_conv_q: int
    """0: windows are not written (all three or none)."""
    intermediate_conv_k: int
    intermediate_conv_v: int
    g: int
    beta: int
    A_log: int
    """0: exp(A_log) = 1."""
    dt_bias: int
    recurrent_state: int
    intermediate_ssm: int
    """0: no snapshots."""
    ssm_state_indices: int
    intermediate_state_indices: int
    """Read if there are snapshots or windows."""
    ring_indices: int
    """0 with rings: the ring row is the slot."""
    cu_seqlens: int
    ring_v: int
    """0: no rings (all four or none)."""
    ring_k: int
    ring_g: int
    ring_beta: int
    onorm_gate: int
    """0: no output norm."""
    onorm_weight: int
    out: int
    errors: int
    """Of kda_cupy.guard."""
    first_request: int
    """Of this launch: see kda_cupy.launch.split_rows."""


class VerifyLayout(NamedTuple):
    """``MtpVerifyParams``, second part."""

    x_q_stride: int
    """From token to token; heads are 128 apart."""
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
    window_q_row_stride: int
    window_k_row_stride: int
    window_v_row_stride: int
    window_q_step_stride: int
    window_k_step_stride: int
    window_v_step_stride: int
    window_q_channel_stride: int
    window_k_channel_stride: int
    window_v_channel_stride: int
    window_q_tap_stride: int
    window_k_tap_stride: int
    window_v_tap_stride: int
    g_stride: int
    """From token to token; heads are 128 apart."""
    beta_stride: int
    """From token to token."""
    beta_head_stride: int
    state_slot_stride: int
    snapshot_row_stride: int
    snapshot_step_stride: int
    ring_v_slot_stride: int
    ring_v_head_stride: int
    ring_k_slot_stride: int
    ring_k_head_stride: int
    ring_g_slot_stride: int
    """Inside a slot g is [HV, L, 128] and beta [HV, L], dense."""
    ring_beta_slot_stride: int
    onorm_gate_stride: int
    """From token to token; heads are 128 apart."""
    out_stride: int
    """From token to token; heads are 128 apart."""
    slot_index_stride: int
    """Of ssm_state_indices."""
    scratch_index_stride: int
    ring_index_stride: int
    requests: int
    """N, of all launches together."""
    tokens: int
    """T: rows of ``out``; those past cu_seqlens[N] are zeroed."""
    slots: int
    """P."""
    scratch_rows: int
    """Rows of intermediate_ssm / intermediate_conv (the fewer); 0 if there are neither."""
    ring_rows: int
    """Rows of the rings; 0 if there are none."""
    max_tokens: int
    """The longest request allowed; not above the steps of the snapshots and windows."""
    ring_steps: int
    """L: steps from here on are not written."""
    null_index: int
    """-1 or 0: slots up to here are padding."""
    slot_index_is_64bit: int
    scratch_index_is_64bit: int
    ring_index_is_64bit: int
    cu_seqlens_is_64bit: int
    normalize_qk: int
    group: int
    """HV // H: value heads that share a q/k head."""
    operation: int
    """Index in guard.OPERATIONS."""
    scale: float
    lower_bound: float
    beta_scale: float
    """1, or 2 with allow_neg_eigval."""
    onorm_eps: float


_VERIFY_POINTERS = struct.Struct("<33Qq")
_VERIFY_LAYOUT = struct.Struct("<49q10i4f")
VERIFY_PARAMS_BYTES: Final = _VERIFY_POINTERS.size + _VERIFY_LAYOUT.size


class CommitPointers(NamedTuple):
    """``CommitParams`` of kernels/commit.cu, first part: addresses and where this launch begins."""

    accept_lens: int
    ssm_state_indices: int
    intermediate_state_indices: int
    """Read if there are snapshots or windows."""
    ring_indices: int
    """0 with rings: the ring row is the slot."""
    track_indices: int
    """0: no tracking. A tracking slot that is padding (see null_index) skips the row's tracking."""
    track_steps: int
    """A negative step skips the row's tracking; step s stores the state after s + 1 tokens."""
    recurrent_state: int
    intermediate_ssm: int
    """Either this or the four rings; the other is 0."""
    ring_v: int
    ring_k: int
    ring_g: int
    ring_beta: int
    cs_q: int
    """0: no conv history to commit (all three, and all three windows, or none)."""
    cs_k: int
    cs_v: int
    intermediate_conv_q: int
    intermediate_conv_k: int
    intermediate_conv_v: int
    errors: int
    first_request: int


class CommitLayout(NamedTuple):
    """``CommitParams``, second part. Layer strides are 0 (or anything) with one layer."""

    state_layer_stride: int
    state_slot_stride: int
    snapshot_layer_stride: int
    snapshot_row_stride: int
    snapshot_step_stride: int
    ring_v_layer_stride: int
    ring_v_slot_stride: int
    ring_v_head_stride: int
    ring_k_layer_stride: int
    ring_k_slot_stride: int
    ring_k_head_stride: int
    ring_g_layer_stride: int
    ring_g_slot_stride: int
    ring_beta_layer_stride: int
    ring_beta_slot_stride: int
    cs_q_layer_stride: int
    cs_k_layer_stride: int
    cs_v_layer_stride: int
    cs_q_slot_stride: int
    cs_k_slot_stride: int
    cs_v_slot_stride: int
    cs_q_channel_stride: int
    cs_k_channel_stride: int
    cs_v_channel_stride: int
    cs_q_tap_stride: int
    cs_k_tap_stride: int
    cs_v_tap_stride: int
    window_q_layer_stride: int
    window_k_layer_stride: int
    window_v_layer_stride: int
    window_q_row_stride: int
    window_k_row_stride: int
    window_v_row_stride: int
    window_q_step_stride: int
    window_k_step_stride: int
    window_v_step_stride: int
    window_q_channel_stride: int
    window_k_channel_stride: int
    window_v_channel_stride: int
    window_q_tap_stride: int
    window_k_tap_stride: int
    window_v_tap_stride: int
    accept_stride: int
    slot_index_stride: int
    scratch_index_stride: int
    ring_index_stride: int
    track_index_stride: int
    track_step_stride: int
    slots: int
    """P."""
    scratch_rows: int
    """Rows of intermediate_ssm / intermediate_conv (the fewer); 0 if there are neither."""
    ring_rows: int
    max_tokens: int
    """The largest accept count allowed: the steps of the snapshots or rings, and of the windows (the fewest)."""
    ring_steps: int
    """L."""
    group: int
    """HV // H: value heads that share a q/k head."""
    null_index: int
    accept_is_64bit: int
    slot_index_is_64bit: int
    scratch_index_is_64bit: int
    ring_index_is_64bit: int
    track_index_is_64bit: int
    track_step_is_64bit: int
    normalize_k: int
    """As the verify that wrote the rings had it."""
    operation: int
    """Index in guard.OPERATIONS."""


_COMMIT_POINTERS = struct.Struct("<19Qq")
_COMMIT_LAYOUT = struct.Struct("<51q12i")
COMMIT_PARAMS_BYTES: Final = _COMMIT_POINTERS.size + _COMMIT_LAYOUT.size


def pack_verify_pointers(pointers: VerifyPointers) -> bytes:
    """First part of the struct."""
    return _VERIFY_POINTERS.pack(*pointers)


def pack_verify_layout(layout: VerifyLayout) -> bytes:
    """Second part of the struct, to be put behind the first."""
    return _VERIFY_LAYOUT.pack(*layout)


def pack_commit_pointers(pointers: CommitPointers) -> bytes:
    """First part of the struct."""
    return _COMMIT_POINTERS.pack(*pointers)


def pack_commit_layout(layout: CommitLayout) -> bytes:
    """Second part of the struct, to be put behind the first."""
    return _COMMIT_LAYOUT.pack(*layout)


def verify_grid(requests: int, HV: int) -> tuple[int, int, int]:
    """Blocks of one launch over ``requests`` (at most 65,535)."""
    return (HV, requests, 1)


def commit_grid(requests: int, HV: int, layers: int) -> tuple[int, int, int]:
    """Blocks of one launch over ``requests`` and ``layers`` (at most 65,535 each)."""
    return (HV, requests, layers)
