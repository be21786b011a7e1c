# SPDX-License-Identifier: Apache-2.0
"""Decode kernels for Kimi Delta Attention and Gated DeltaNet, compiled at run time by CuPy.

``import kda_cupy`` imports neither CuPy nor CUDA: that happens when the first CUDA array comes in.
"""

from kda_cupy.checks import check_state, is_valid_state
from kda_cupy.errors import (
    BridgeError,
    CompileError,
    DeviceError,
    KdaError,
    NoGpuError,
    OperandError,
    PoolExhausted,
    SlotError,
)
from kda_cupy.guard import check_errors
from kda_cupy.launch import BoundCall, bind
from kda_cupy.layer import CapturedStep, GdnLayer, KdaLayer
from kda_cupy.ops.commit import kda_commit
from kda_cupy.ops.conv_update import causal_conv1d_update
from kda_cupy.ops.gdn_step import gdn_decode_step
from kda_cupy.ops.kda_step import kda_decode_step
from kda_cupy.ops.mtp_verify import kda_decode_mtp
from kda_cupy.ops.packed_decode import gdn_packed_decode, kda_packed_decode
from kda_cupy.pool.snapshot import Snapshot
from kda_cupy.pool.state_pool import StatePool

__version__ = "0.1.0"

__all__ = [
    "BoundCall",
    "BridgeError",
    "CapturedStep",
    "CompileError",
    "DeviceError",
    "GdnLayer",
    "KdaError",
    "KdaLayer",
    "NoGpuError",
    "OperandError",
    "PoolExhausted",
    "SlotError",
    "Snapshot",
    "StatePool",
    "bind",
    "causal_conv1d_update",
    "check_errors",
    "check_state",
    "gdn_decode_step",
    "gdn_packed_decode",
    "is_valid_state",
    "kda_commit",
    "kda_decode_mtp",
    "kda_decode_step",
    "kda_packed_decode",
]
