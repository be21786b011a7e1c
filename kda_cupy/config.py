# SPDX-License-Identifier: Apache-2.0
"""What changes the machine code, one frozen object per kernel: it is the key of the module cache.

Sizes that only change the grid or an offset (batch, heads, pool slots, strides, scale) stay out of it, so that
nothing recompiles when traffic changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from kda_cupy.dtypes import C_NAMES, by_name

OPTIONS = ("--std=c++17",)
"""Of the compiler, beside a configuration's macros. CuPy adds ``-arch`` for the device at hand and ``-ftz=true``."""


class KernelConfig(Protocol):
    """What the module cache needs to know of a kernel. Implementations are hashable."""

    @property
    def source(self) -> str:
        """File name under kernels/."""

    @property
    def entry(self) -> str:
        """Name of the ``extern "C"`` function in it."""

    @property
    def variant(self) -> str:
        """What a person calls it: shown by ``bind(...)`` and the benchmark."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    def defines(self) -> tuple[str, ...]:
        """Compiler options. Every macro begins with ``KDA_``: short names break NVRTC's own headers."""


@dataclass(frozen=True, slots=True)
class PackedDecodeConfig:
    """kernels/packed_decode.cu. The dtypes are names such as ``"bfloat16"``."""

    per_key_gate: bool
    """True for KDA (a gate per key channel), False for GDN (a gate per head)."""
    bounded: bool
    K: int
    V: int
    activation: str
    a: str
    b: str
    A_log: str
    dt_bias: str
    vector: bool
    """True if q, k, the gates and dt_bias can be loaded four elements at a time: aligned base and row stride."""
    params_bytes: int
    """Size of the parameter struct on the host; the kernel refuses to compile if it counts otherwise."""

    @property
    def source(self) -> str:
        return "packed_decode.cu"

    @property
    def entry(self) -> str:
        return "packed_decode"

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def variant(self) -> str:
        op = "kda" if self.per_key_gate else "gdn"
        gate = "bounded" if self.bounded else "softplus"
        loads = "" if self.vector else ",unaligned"
        return f"{self.entry}[{op},{gate},K{self.K},V{self.V},{self.activation}{loads}]"

    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKDA_PER_KEY_GATE={self.per_key_gate:d}",
            f"-DKDA_BOUNDED={self.bounded:d}",
            f"-DKDA_K={self.K}",
            f"-DKDA_V={self.V}",
            f"-DKDA_ACTIVATION={C_NAMES[self.activation]}",
            f"-DKDA_A={C_NAMES[self.a]}",
            f"-DKDA_B={C_NAMES[self.b]}",
            f"-DKDA_A_LOG={C_NAMES[self.A_log]}",
            f"-DKDA_DT_BIAS={C_NAMES[self.dt_bias]}",
            f"-DKDA_VECTOR={self.vector:d}",
            f"-DKDA_PARAMS_BYTES={self.params_bytes}",
        )


@dataclass(frozen=True, slots=True)
class YardstickConfig:
    """kernels/yardstick.cu: what a kernel that only moves the state would take."""

    moves: str
    """``"RW"`` (reads and writes), ``"R"`` (reads) or ``"SNAP"`` (reads once, stores copies)."""
    K: int
    V: int
    warps: int
    """A block."""
    loads: int
    """Of 16 bytes, that a lane has in flight."""
    params_bytes: int

    @property
    def source(self) -> str:
        return "yardstick.cu"

    @property
    def entry(self) -> str:
        return "yardstick"

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def variant(self) -> str:
        return f"{self.entry}[{self.moves},K{self.K},V{self.V},{self.warps}x{self.loads}]"

    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKDA_MOVES=KDA_{self.moves}",
            f"-DKDA_K={self.K}",
            f"-DKDA_V={self.V}",
            f"-DKDA_WARPS={self.warps}",
            f"-DKDA_LOADS={self.loads}",
            f"-DKDA_PARAMS_BYTES={self.params_bytes}",
        )


CHAIN_BYTES: Final = 4 * (5 * 8 * 128 + 3 * 16 * 136 + 4 * 16 * 8 + 8)
"""Size of ``Chain`` in kernels/chain.cuh: k, q, v and gates of eight tokens, the operands, coefficients, beta."""


def verify_bytes(activation: str) -> int:
    """Size of ``Shared`` in kernels/mtp_verify.cu.

    The chain, taps and biases, raw inputs, addresses, squares of outputs, steep tokens.
    """
    raw = 3 * (3 + 8) * 128 * by_name(activation).itemsize
    return CHAIN_BYTES + 4 * 15 * 128 + raw + 6 * 8 + 4 * 8 * 8 + 4 * 4


COMMIT_BYTES: Final = CHAIN_BYTES + 2 * 4 * 8 * 144 + 4 * 4
"""Size of ``Shared`` in kernels/commit.cu: the chain, and decayed keys in two parts."""


@dataclass(frozen=True, slots=True)
class MtpVerifyConfig:
    """kernels/mtp_verify.cu. The dtypes are names such as ``"bfloat16"``."""

    bounded: bool
    activation: str
    conv_weight: str
    g: str
    beta: str
    A_log: str
    dt_bias: str
    onorm_weight: str
    vector: bool
    """True if four channels can be moved at a time: neighbours in memory, aligned to all four."""
    params_bytes: int

    @property
    def source(self) -> str:
        return "mtp_verify.cu"

    @property
    def entry(self) -> str:
        return "mtp_verify"

    @property
    def shared_bytes(self) -> int:
        return verify_bytes(self.activation)

    @property
    def variant(self) -> str:
        gate = "bounded" if self.bounded else "softplus"
        loads = "" if self.vector else ",unaligned"
        return f"{self.entry}[{gate},{self.activation}{loads}]"

    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKDA_BOUNDED={self.bounded:d}",
            f"-DKDA_ACTIVATION={C_NAMES[self.activation]}",
            f"-DKDA_CONV_WEIGHT={C_NAMES[self.conv_weight]}",
            f"-DKDA_G={C_NAMES[self.g]}",
            f"-DKDA_BETA={C_NAMES[self.beta]}",
            f"-DKDA_A_LOG={C_NAMES[self.A_log]}",
            f"-DKDA_DT_BIAS={C_NAMES[self.dt_bias]}",
            f"-DKDA_ONORM_WEIGHT={C_NAMES[self.onorm_weight]}",
            f"-DKDA_VECTOR={self.vector:d}",
            f"-DKDA_PARAMS_BYTES={self.params_bytes}",
            f"-DKDA_SHARED_BYTES={self.shared_bytes}",
        )


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """kernels/commit.cu."""

    activation: str
    vector: bool
    """True if the rings' rows can be moved four channels at a time."""
    params_bytes: int

    @property
    def source(self) -> str:
        return "commit.cu"

    @property
    def entry(self) -> str:
        return "commit"

    @property
    def shared_bytes(self) -> int:
        return COMMIT_BYTES

    @property
    def variant(self) -> str:
        loads = "" if self.vector else ",unaligned"
        return f"{self.entry}[{self.activation}{loads}]"

    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKDA_ACTIVATION={C_NAMES[self.activation]}",
            f"-DKDA_VECTOR={self.vector:d}",
            f"-DKDA_PARAMS_BYTES={self.params_bytes}",
            f"-DKDA_SHARED_BYTES={self.shared_bytes}",
        )


@dataclass(frozen=True, slots=True)
class StepConfig:
    """kernels/decode_step.cu. The dtypes are names such as ``"bfloat16"``."""

    per_key_gate: bool
    """True for KDA (a gate per key channel, sigmoid behind the output norm), False for GDN (one per head, SiLU)."""
    bounded: bool
    group: int
    """HV // H: value heads that share a q/k head, and its conv history. A model has one such number."""
    activation: str
    conv_weight: str
    g: str
    beta: str
    A_log: str
    dt_bias: str
    onorm_weight: str
    vector: bool
    """True if the four taps of a channel can be loaded at once."""
    params_bytes: int

    @property
    def source(self) -> str:
        return "decode_step.cu"

    @property
    def entry(self) -> str:
        return "decode_step"

    @property
    def heads(self) -> int:
        """Value heads that a block works on at once: 512 threads each, and a block has 1,024 at most."""
        return 2 if self.group == 2 else 1

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def variant(self) -> str:
        op = "kda" if self.per_key_gate else "gdn"
        gate = "bounded" if self.bounded else "softplus"
        loads = "" if self.vector else ",unaligned"
        return f"{self.entry}[{op},{gate},HV/H={self.group},{self.activation}{loads}]"

    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKDA_PER_KEY_GATE={self.per_key_gate:d}",
            f"-DKDA_BOUNDED={self.bounded:d}",
            f"-DKDA_GROUP={self.group}",
            f"-DKDA_HEADS={self.heads}",
            f"-DKDA_ACTIVATION={C_NAMES[self.activation]}",
            f"-DKDA_CONV_WEIGHT={C_NAMES[self.conv_weight]}",
            f"-DKDA_G={C_NAMES[self.g]}",
            f"-DKDA_BETA={C_NAMES[self.beta]}",
            f"-DKDA_A_LOG={C_NAMES[self.A_log]}",
            f"-DKDA_DT_BIAS={C_NAMES[self.dt_bias]}",
            f"-DKDA_ONORM_WEIGHT={C_NAMES[self.onorm_weight]}",
            f"-DKDA_VECTOR={self.vector:d}",
            f"-DKDA_PARAMS_BYTES={self.params_bytes}",
        )


@dataclass(frozen=True, slots=True)
class ConvUpdateConfig:
    """kernels/causal_conv1d_update.cu."""

    width: int
    """Taps of a channel: 2, 3 or 4."""
    silu: bool
    activation: str
    conv_weight: str
    threads: int
    params_bytes: int

    @property
    def source(self) -> str:
        return "causal_conv1d_update.cu"

    @property
    def entry(self) -> str:
        return "causal_conv1d_update"

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def variant(self) -> str:
        activation = "silu" if self.silu else "none"
        return f"{self.entry}[width={self.width},{activation},{self.activation}]"

    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKDA_WIDTH={self.width}",
            f"-DKDA_SILU={self.silu:d}",
            f"-DKDA_THREADS={self.threads}",
            f"-DKDA_ACTIVATION={C_NAMES[self.activation]}",
            f"-DKDA_CONV_WEIGHT={C_NAMES[self.conv_weight]}",
            f"-DKDA_PARAMS_BYTES={self.params_bytes}",
        )
