# SPDX-License-Identifier: Apache-2.0
"""Every message of the catalogue as a user meets it, whole, through the public functions; no GPU is needed.

Messages are compared literally: a change of wording shows here, where somebody can read it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kda_cupy import (
    KdaError,
    SlotError,
    Snapshot,
    StatePool,
    bind,
    bridge,
    check_errors,
    check_state,
    gdn_packed_decode,
    guard,
    is_valid_state,
    kda_packed_decode,
)
from kda_cupy.catalogue import CATALOGUE
from kda_cupy.error_pages import search
from kda_cupy.raisers import raised_by
from tests.fake_cupy import CompileException, DynamicLibNotFoundError, machine, on_gpu

B, H, HV, K, V, P = 3, 2, 4, 8, 12, 6
WIDTH = 2 * H * K + HV * V
WRITTEN = np.nan
"""What ``out`` is full of before a call."""
BFLOAT16 = ml_dtypes.bfloat16


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape).astype(dtype)


def aligned(*shape: int, offset: int = 0, dtype: Any = np.float32) -> Any:
    """An array ``offset`` bytes behind a 16-byte boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 32, np.uint8)
    start = -raw.ctypes.data % 16 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def strided(array: Any, *strides: int) -> Any:
    """The memory of an array with other strides, in bytes."""
    return np.lib.stride_tricks.as_strided(array, strides=strides)


def frozen(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


OPERANDS = ("mixed_qkv", "a", "b", "A_log", "dt_bias", "initial_state", "ssm_state_indices")


class Operands:
    """Operands of a call that is right, and calls with some of them changed."""

    def __init__(self) -> None:
        self.mixed_qkv = numbers(B, WIDTH)
        self.a = numbers(B, HV * K)
        self.b = numbers(B, HV)
        self.A_log = numbers(HV)
        self.dt_bias = numbers(HV * K)
        self.initial_state = aligned(P, HV, V, K)
        self.ssm_state_indices = np.array([4, 1, 2], np.int32)
        self.out = np.full((B, 1, HV, V), WRITTEN, np.float32)

    def kda(self, **changes: Any) -> None:
        self.call(kda_packed_decode, vars(self) | changes)

    def gdn(self, **changes: Any) -> None:
        one_gate_per_head = {"a": numbers(B, HV), "dt_bias": numbers(HV)}
        self.call(gdn_packed_decode, vars(self) | one_gate_per_head | changes)

    def call(self, operation: Any, operands: dict[str, Any]) -> None:
        """Call and bind: both say the same, and neither changes a bit."""
        arrays = [
            value for value in (*vars(self).values(), *operands.values()) if isinstance(value, np.ndarray)
        ]
        before = [array.tobytes() for array in arrays]
        with pytest.raises(KdaError) as bound:
            bind(operation, **operands)
        try:
            operation(**operands)
        except KdaError as error:
            assert (type(error), str(error)) == (type(bound.value), str(bound.value))
            assert [array.tobytes() for array in arrays] == before, "a refusal changes nothing"
            raise


class Producer:
    """An array of another library: NumPy's memory and capsule, with some fields of the capsule changed."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), **changes: Any) -> None:
        self.array, self.device, self.changes = array, device, changes

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.array.__dlpack__(max_version=(1, 0))
        tensor, _ = bridge._read("", capsule)
        for name, value in self.changes.items():
            if name == "row_stride":
                tensor.strides[0] = value
            else:
                setattr(tensor, name, value)
        return capsule


class Refusing(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("sparse arrays have no strides")


class Used(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        capsule = super().__dlpack__()
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
        rename(capsule, b"used_dltensor_versioned")
        return capsule


class Newer(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        capsule = super().__dlpack__()
        address = bridge._capsule_pointer(capsule, b"dltensor_versioned")
        versions = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))
        versions[0], versions[1] = 2, 1
        return capsule


class Negative(Producer):
    def is_neg(self) -> bool:
        return True


class CUDADriverError(RuntimeError):
    """Named as CuPy's."""


class OnGpu:
    """A scalar in GPU memory, which must not be looked at."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __repr__(self) -> str:
        raise AssertionError("repr would wait for the GPU")


@dataclass
class Case:
    """One way to meet one message."""

    code: str
    operand: str
    by: str
    """The public function that says it."""
    meet: Callable[[Operands], Any]
    message: str


def kda(code: str, operand: str, message: str = "", **changes: Callable[[Operands], Any]) -> Case:
    """kda_packed_decode with some operands or options changed."""
    return Case(
        code, operand, "kda_packed_decode", lambda c: c.kda(**{n: f(c) for n, f in changes.items()}), message
    )


def gdn(code: str, operand: str, message: str = "", **changes: Callable[[Operands], Any]) -> Case:
    """gdn_packed_decode with some operands or options changed."""
    return Case(
        code, operand, "gdn_packed_decode", lambda c: c.gdn(**{n: f(c) for n, f in changes.items()}), message
    )


def state(code: str, message: str, array: Callable[[Operands], Any], heads: int = HV, **options: Any) -> Case:
    """check_state, to which is_valid_state agrees."""

    def meet(c: Operands) -> None:
        value = array(c)
        assert options or not is_valid_state(value, heads)
        check_state(value, heads, **options)

    return Case(code, "state", "check_state", meet, message)


def wrap(code: str, message: str, array: Callable[[Operands], Any], operand: str = "array") -> Case:
    return Case(code, operand, "StatePool.wrap", lambda c: StatePool.wrap(array(c)), message)


def pool(code: str, operand: str, by: str, message: str, meet: Callable[[StatePool], Any]) -> Case:
    """A method of a pool of 4 slots of which 1 and 2 are taken. It has the same slots afterwards."""

    def checked(_: Operands) -> None:
        slots = StatePool(4, HV, K, V, device="cpu")
        taken = slots.allocate(2)
        slots.state[:, taken] = 7
        ledger = slots._ledger
        kept = slots.state.copy(), list(ledger._free), set(ledger._in_use)
        try:
            meet(slots)
        finally:
            assert np.array_equal(kept[0], slots.state)
            assert kept[1:] == (ledger._free, ledger._in_use)

    return Case(code, operand, by, checked, message)


def in_a_file(pool: StatePool, meet: Callable[[str], Any]) -> None:
    """With the slots of the pool saved in a file called ``states``."""
    with TemporaryDirectory() as folder, chdir(folder):
        pool.save("states")
        meet("states")


def snapshot_of_two_layers() -> Snapshot:
    pool = StatePool(1, HV, K, V, layers=2, device="cpu")
    return pool.snapshot(pool.allocate())


def elsewhere(
    code: str, by: str, meet: Callable[[Operands], Any], message: str, operand: str = "", **where: Any
) -> Case:
    """On another machine: see tests/fake_cupy.py."""

    def there(c: Operands) -> None:
        with machine(**where):
            meet(c)

    return Case(code, operand, by, there, message)


def on_one_gpu(c: Operands) -> None:
    """The call that is right, with every operand on GPU 0."""
    c.kda(**{name: on_gpu(array) for name, array in vars(c).items()})


def failing(cause: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise cause

    return fail


PACKED = [
    kda(
        "KDA-PACKED-QKV-RANK",
        "mixed_qkv",
        "`mixed_qkv` must be a 2D tensor (got ndim=3): [B, 2*H*K + HV*V]. Got shape [3, 1, 80]. Pass one "
        "row per sequence: reshape it, or drop a time axis of 1 with mixed_qkv[:, 0].",
        mixed_qkv=lambda c: c.mixed_qkv[:, None],
    ),
    kda(
        "KDA-PACKED-QKV-RANK",
        "mixed_qkv",
        "`mixed_qkv` must be a 2D tensor (got ndim=1): [B, 2*H*K + HV*V]. Got shape [80]. Pass one row "
        "per sequence: reshape it, or drop a time axis of 1 with mixed_qkv[:, 0].",
        mixed_qkv=lambda c: c.mixed_qkv[0],
    ),
    kda(
        "KDA-PACKED-QKV-CONTIGUOUS",
        "mixed_qkv",
        "`mixed_qkv` must be contiguous in the last dim. Got `mixed_qkv` with element strides [1, 3] for "
        "shape [3, 80]. Slice columns or rows of the projection as you like, but copy what is transposed.",
        mixed_qkv=lambda c: np.asfortranarray(c.mixed_qkv),
    ),
    kda(
        "KDA-PACKED-QKV-CONTIGUOUS",
        "mixed_qkv",
        "`mixed_qkv` must be contiguous in the last dim. Got `mixed_qkv` with element strides [80, -1] "
        "for shape [3, 80]. Slice columns or rows of the projection as you like, but copy what is "
        "transposed.",
        mixed_qkv=lambda c: c.mixed_qkv[:, ::-1],
    ),
    kda(
        "KDA-PACKED-AB-RANK",
        "a",
        "`a` must be a 2D tensor (got ndim=3): [B, HV*K]. Got shape [3, 4, 8]. Reshape it to [B, HV*K].",
        a=lambda c: c.a.reshape(B, HV, K),
    ),
    kda(
        "KDA-PACKED-AB-RANK",
        "b",
        "`b` must be a 2D tensor (got ndim=1): [B, HV]. Got shape [4]. Reshape it to [B, HV].",
        b=lambda c: c.b[0],
    ),
    gdn(
        "KDA-PACKED-AB-RANK",
        "a",
        "`a` must be a 2D tensor (got ndim=3): [B, HV]. Got shape [3, 1, 4]. Reshape it to [B, HV].",
        a=lambda c: c.b[:, None],
    ),
    kda(
        "KDA-PACKED-AB-CONTIGUOUS",
        "a",
        "`a`/`b` must be contiguous in the last dim. Got `a` with element strides [64, 2] for shape [3, "
        "32]. Pass a column slice of the projection, or ascontiguousarray(a).",
        a=lambda c: numbers(B, 2 * HV * K)[:, ::2],
    ),
    kda(
        "KDA-PACKED-AB-CONTIGUOUS",
        "b",
        "`a`/`b` must be contiguous in the last dim. Got `b` with element strides [1, 3] for shape [3, "
        "4]. Pass a column slice of the projection, or ascontiguousarray(b).",
        b=lambda c: np.asfortranarray(c.b),
    ),
    kda(
        "KDA-PACKED-GATE-RANK",
        "dt_bias",
        "`dt_bias` must be a 1D or 2D tensor, [HV*K] or [HV, K] (got ndim=3). Got shape [1, 4, 8]. "
        "Reshape it, for example with dt_bias.reshape(-1).",
        dt_bias=lambda c: c.dt_bias.reshape(1, HV, K),
    ),
    kda(
        "KDA-PACKED-GATE-RANK",
        "dt_bias",
        "`dt_bias` must be a 1D or 2D tensor, [HV*K] or [HV, K] (got ndim=0). Got shape []. Reshape it, "
        "for example with dt_bias.reshape(-1).",
        dt_bias=lambda c: np.zeros((), np.float32),
    ),
    gdn(
        "KDA-PACKED-GATE-RANK",
        "dt_bias",
        "`dt_bias` must be a 1D tensor, [HV] (got ndim=2). Got shape [4, 8]. Reshape it, for example with "
        "dt_bias.reshape(-1).",
        dt_bias=lambda c: c.dt_bias.reshape(HV, K),
    ),
    kda(
        "KDA-PACKED-GATE-CONTIGUOUS",
        "A_log",
        "`A_log`/`dt_bias` must be contiguous. Got `A_log` with element strides [2] for shape [4]. Copy "
        "it once when the weights are loaded: ascontiguousarray(A_log).",
        A_log=lambda c: numbers(HV, 2)[:, 1],
    ),
    kda(
        "KDA-PACKED-GATE-CONTIGUOUS",
        "dt_bias",
        "`A_log`/`dt_bias` must be contiguous. Got `dt_bias` with element strides [1, 4] for shape [4, "
        "8]. Copy it once when the weights are loaded: ascontiguousarray(dt_bias).",
        dt_bias=lambda c: numbers(K, HV).T,
    ),
    kda(
        "KDA-PACKED-INDICES-RANK",
        "ssm_state_indices",
        "`ssm_state_indices` must be 1D for packed decode (got ndim=2). Got shape [3, 1]. Pass one slot "
        "per row, such as a column of the table: table[:, 0].",
        ssm_state_indices=lambda c: c.ssm_state_indices[:, None],
    ),
    kda(
        "KDA-PACKED-INDICES-RANK",
        "ssm_state_indices",
        "`ssm_state_indices` must be 1D for packed decode (got ndim=0). Got shape []. Pass one slot per "
        "row, such as a column of the table: table[:, 0].",
        ssm_state_indices=lambda c: np.array(1),
    ),
    kda(
        "KDA-PACKED-OUT-CONTIGUOUS",
        "out",
        "`out` must be contiguous. Got `out` with element strides [96, 96, 24, 1] for shape [3, 1, 4, "
        "12]. Allocate it with empty((B, 1, HV, V)), or leave the argument out.",
        out=lambda c: numbers(B, 1, HV, 2 * V)[..., :V],
    ),
    kda(
        "KDA-PACKED-BATCH",
        "mixed_qkv",
        "Mismatched batch sizes: `mixed_qkv.shape[0]=3`, `a.shape[0]=2`, `b.shape[0]=3`. Pass as many "
        "rows of each as there are sequences, padding all three alike.",
        a=lambda c: c.a[:2],
    ),
    kda(
        "KDA-PACKED-BATCH",
        "mixed_qkv",
        "Mismatched batch sizes: `mixed_qkv.shape[0]=3`, `a.shape[0]=3`, `b.shape[0]=4`. Pass as many "
        "rows of each as there are sequences, padding all three alike.",
        b=lambda c: numbers(B + 1, HV),
    ),
    kda(
        "KDA-PACKED-INDICES-SHAPE",
        "ssm_state_indices",
        "`ssm_state_indices` must have shape [B] (got (2,); expected (3,)). Pass one slot per row of "
        "`mixed_qkv`, with -1 for rows of padding.",
        ssm_state_indices=lambda c: c.ssm_state_indices[:2],
    ),
    kda(
        "KDA-PACKED-AB-SHAPE",
        "a",
        "`a`/`b` must have shape [B, HV*K] with HV=4, K=8 (got a.shape=(3, 4)). Pass gates of the value "
        "heads that the state has on this GPU.",
        a=lambda c: numbers(B, HV),
    ),
    kda(
        "KDA-PACKED-AB-SHAPE",
        "b",
        "`a`/`b` must have shape [B, HV] with HV=4 (got b.shape=(3, 5)). Pass gates of the value heads "
        "that the state has on this GPU.",
        b=lambda c: numbers(B, HV + 1),
    ),
    gdn(
        "KDA-PACKED-AB-SHAPE",
        "a",
        "`a`/`b` must have shape [B, HV] with HV=4 (got a.shape=(3, 32)). Pass gates of the value heads "
        "that the state has on this GPU.",
        a=lambda c: numbers(B, HV * K),
    ),
    kda(
        "KDA-PACKED-GATE-NUMEL",
        "A_log",
        "`A_log` and `dt_bias` must have HV=4 and HV*K=32 elements (got A_log.shape=(2,), "
        "dt_bias.shape=(32,)). Pass the parameters of the value heads that the state has on this GPU.",
        A_log=lambda c: numbers(H),
    ),
    kda(
        "KDA-PACKED-GATE-NUMEL",
        "dt_bias",
        "`A_log` and `dt_bias` must have HV=4 and HV*K=32 elements (got A_log.shape=(4,), "
        "dt_bias.shape=(4,)). Pass the parameters of the value heads that the state has on this GPU.",
        dt_bias=lambda c: numbers(HV),
    ),
    kda(
        "KDA-PACKED-GATE-NUMEL",
        "dt_bias",
        "`A_log` and `dt_bias` must have HV=4 and HV*K=32 elements (got A_log.shape=(4,), "
        "dt_bias.shape=(8, 4)). Pass the parameters of the value heads that the state has on this GPU.",
        dt_bias=lambda c: numbers(K, HV),
    ),
    kda(
        "KDA-PACKED-GATE-NUMEL",
        "dt_bias",
        "`A_log` and `dt_bias` must have HV=4 and HV*K=32 elements (got A_log=None, dt_bias.shape=(3,)). "
        "Pass the parameters of the value heads that the state has on this GPU.",
        A_log=lambda c: None,
        dt_bias=lambda c: numbers(3),
    ),
    gdn(
        "KDA-PACKED-GATE-NUMEL",
        "dt_bias",
        "`A_log` and `dt_bias` must have HV=4 elements (got A_log.shape=(4,), dt_bias.shape=(32,)). Pass "
        "the parameters of the value heads that the state has on this GPU.",
        dt_bias=lambda c: numbers(HV * K),
    ),
    kda(
        "KDA-PACKED-OUT-SHAPE",
        "out",
        "`out` must have shape (3, 1, 4, 12) (got (3, 4, 12)). Allocate it as (B, 1, HV, V), or leave it "
        "out.",
        out=lambda c: numbers(B, HV, V),
    ),
    kda(
        "KDA-PACKED-QKV-WIDTH",
        "mixed_qkv",
        "`qk_dim = qkv_dim - HV*V` must be positive and even (got qk_dim=0 from qkv_dim=48, HV=4, V=12). "
        "Pass rows of q, k and v together as `mixed_qkv`, 2*H*K + HV*V wide.",
        mixed_qkv=lambda c: numbers(B, HV * V),
    ),
    kda(
        "KDA-PACKED-QKV-WIDTH",
        "mixed_qkv",
        "`qk_dim = qkv_dim - HV*V` must be positive and even (got qk_dim=-8 from qkv_dim=40, HV=4, V=12). "
        "Pass rows of q, k and v together as `mixed_qkv`, 2*H*K + HV*V wide.",
        mixed_qkv=lambda c: numbers(B, 40),
    ),
    kda(
        "KDA-PACKED-QKV-WIDTH",
        "mixed_qkv",
        "`qk_dim = qkv_dim - HV*V` must be positive and even (got qk_dim=33 from qkv_dim=81, HV=4, V=12). "
        "Pass rows of q, k and v together as `mixed_qkv`, 2*H*K + HV*V wide.",
        mixed_qkv=lambda c: numbers(B, WIDTH + 1),
    ),
    kda(
        "KDA-PACKED-Q-WIDTH",
        "mixed_qkv",
        "`qk_dim/2` must be a multiple of K=8 (got qk_dim/2=17 from qkv_dim=82, HV=4, V=12). Pass "
        "q and k of whole heads in `mixed_qkv`, as wide as the last axis of the state.",
        mixed_qkv=lambda c: numbers(B, WIDTH + 2),
    ),
    kda(
        "KDA-PACKED-HEADS",
        "mixed_qkv",
        "H >= 1 and HV % H == 0 must hold (got H=3 and HV=4, from qkv_dim=96, V=12, K=8). Pass a "
        "`mixed_qkv` whose number of query heads divides the value heads of the state.",
        mixed_qkv=lambda c: numbers(B, 2 * 3 * K + HV * V),
    ),
    kda(
        "KDA-PACKED-HEADS",
        "mixed_qkv",
        "H >= 1 and HV % H == 0 must hold (got H=8 and HV=4, from qkv_dim=176, V=12, K=8). Pass a "
        "`mixed_qkv` whose number of query heads divides the value heads of the state.",
        mixed_qkv=lambda c: numbers(B, 2 * 8 * K + HV * V),
    ),
    kda(
        "KDA-PACKED-DEVICES",
        "initial_state",
        "All inputs must be on the same device. Got `mixed_qkv` on cuda:0 and `initial_state` on cuda:1. "
        "Copy `initial_state` to the GPU of the others: with cupy.cuda.Device(n): "
        "cupy.asarray(initial_state).",
        **{
            name: lambda c, name=name: on_gpu(vars(c)[name], int(name == "initial_state"))
            for name in vars(Operands())
        },
    ),
]
STATES = [
    kda(
        "KDA-STATE-DTYPE",
        "initial_state",
        "`initial_state` must be float32. Got float16. Convert the pool once with astype(float32), and "
        "keep it so.",
        initial_state=lambda c: c.initial_state.astype(np.float16),
    ),
    state(
        "KDA-STATE-DTYPE",
        "`state` must be float32. Got bfloat16. Convert the pool once with astype(float32), and keep it so.",
        lambda c: c.initial_state.astype(BFLOAT16),
    ),
    state(
        "KDA-STATE-DTYPE",
        "`state` must be float32. Got >f4. Convert the pool once with astype(float32), and keep it so.",
        lambda c: c.initial_state.astype(">f4"),
    ),
    kda(
        "KDA-STATE-RANK",
        "initial_state",
        "`initial_state` must be a 4D tensor (got ndim=3). Got shape [4, 12, 8]. Pass states [P, HV, V, "
        "K], such as pool[layer].",
        initial_state=lambda c: c.initial_state[0],
    ),
    state(
        "KDA-STATE-RANK",
        "`state` must be a 4D tensor (got ndim=5). Got shape [1, 6, 4, 12, 8]. Pass states [P, HV, V, K], "
        "such as pool[layer].",
        lambda c: c.initial_state[None],
    ),
    wrap(
        "KDA-STATE-RANK",
        "`array` must be a 4D tensor (got ndim=3). Got shape [4, 12, 8]. Pass states [P, HV, V, K] or "
        "[layers, P, HV, V, K], such as pool[layer].",
        lambda c: c.initial_state[0],
    ),
    kda(
        "KDA-STATE-CONTIGUOUS",
        "initial_state",
        "`initial_state` must be contiguous in the last dim. Got `initial_state` with element strides "
        "[384, 96, 1, 12] for shape [6, 4, 12, 8]. Pass [P, HV, V, K] with neighbouring keys next to each "
        "other in memory.",
        initial_state=lambda c: aligned(P, HV, K, V).swapaxes(2, 3),
    ),
    state(
        "KDA-STATE-CONTIGUOUS",
        "`state` must be contiguous in the last dim. Got `state` with element strides [768, 192, 16, 2] "
        "for shape [6, 4, 12, 8]. Pass [P, HV, V, K] with neighbouring keys next to each other in memory.",
        lambda c: aligned(P, HV, V, 2 * K)[..., ::2],
    ),
    kda(
        "KDA-STATE-LAYOUT",
        "initial_state",
        "expected recurrent state layout [pool, HV>=1, V>=1, K=4, 8, .., 512] for `initial_state`. Got "
        "[6, 4, 12, 6]. Pass the pool as [pool, HV, V, K]: one head per value head, rows V (values), "
        "columns K (keys).",
        initial_state=lambda c: aligned(P, HV, V, 6),
    ),
    kda(
        "KDA-STATE-LAYOUT",
        "initial_state",
        "expected recurrent state layout [pool, HV>=1, V>=1, K=4, 8, .., 512] for `initial_state`. Got "
        "[6, 4, 0, 8]. Pass the pool as [pool, HV, V, K]: one head per value head, rows V (values), "
        "columns K (keys).",
        initial_state=lambda c: aligned(P, HV, 0, K),
    ),
    state(
        "KDA-STATE-LAYOUT",
        "expected recurrent state layout [pool, HV=2, V, K] for `state`. Got [6, 4, 12, 8]. Pass the pool "
        "as [pool, HV, V, K]: one head per value head, rows V (values), columns K (keys).",
        lambda c: c.initial_state,
        heads=H,
    ),
    state(
        "KDA-STATE-LAYOUT",
        "expected recurrent state layout [pool, HV>=1, V>=1, K=4, 8, .., 512] for `state`. Got [6, 4, 12, "
        "516]. Pass the pool as [pool, HV, V, K]: one head per value head, rows V (values), columns K "
        "(keys).",
        lambda c: aligned(P, HV, V, 516),
    ),
    wrap(
        "KDA-STATE-LAYOUT",
        "expected recurrent state layout [pool, HV>=1, V>=1, K=4, 8, .., 512] for `state`. Got [6, 4, 12, "
        "2]. Pass the pool as [pool, HV, V, K]: one head per value head, rows V (values), columns K "
        "(keys).",
        lambda c: aligned(P, HV, V, 2),
        operand="state",
    ),
    kda(
        "KDA-STATE-STRIDES",
        "initial_state",
        "`initial_state` must be dense inside a slot, strides (V*K, K, 1), and its slots must not "
        "overlap. Got element strides [768, 192, 16, 1] for shape [6, 4, 12, 8]. Pass the pool itself, or "
        "select slots and leading heads only: pool[2:9], pool[:, :4].",
        initial_state=lambda c: aligned(P, HV, V, 2 * K)[..., :K],
    ),
    kda(
        "KDA-STATE-STRIDES",
        "initial_state",
        "`initial_state` must be dense inside a slot, strides (V*K, K, 1), and its slots must not "
        "overlap. Got element strides [0, 96, 8, 1] for shape [6, 4, 12, 8]. Pass the pool itself, or "
        "select slots and leading heads only: pool[2:9], pool[:, :4].",
        initial_state=lambda c: strided(c.initial_state, 0, 384, 32, 4),
    ),
    state(
        "KDA-STATE-STRIDES",
        "`state` must be dense inside a slot, strides (V*K, K, 1), and its slots must not overlap. Got "
        "element strides [768, 192, 8, 1] for shape [6, 4, 12, 8]. Pass the pool itself, or select slots "
        "and leading heads only: pool[2:9], pool[:, :4].",
        lambda c: aligned(P, 2 * HV, V, K)[:, ::2],
    ),
    wrap(
        "KDA-STATE-STRIDES",
        "`array` must be dense inside a slot, strides (V*K, K, 1), and its slots must not overlap. Got "
        "element strides [0, 384, 96, 8, 1] for shape [2, 6, 4, 12, 8]. Pass the pool itself, or select "
        "slots and leading heads only: pool[2:9], pool[:, :4].",
        lambda c: strided(aligned(2, P, HV, V, K), 0, 1536, 384, 32, 4),
    ),
    kda(
        "KDA-STATE-ALIGNMENT",
        "initial_state",
        "`initial_state` must have every slot on a 16-byte boundary. Got an address 4 bytes past a "
        "16-byte boundary. Start the pool at a multiple of 4 elements, and make the slot stride one.",
        initial_state=lambda c: aligned(P, HV, V, K, offset=4),
    ),
    kda(
        "KDA-STATE-ALIGNMENT",
        "initial_state",
        "`initial_state` must have every slot on a 16-byte boundary. Got a slot stride of 1544 bytes. "
        "Start the pool at a multiple of 4 elements, and make the slot stride one.",
        initial_state=lambda c: strided(aligned(9, HV, V, K)[:P], 1544, 384, 32, 4),
    ),
    state(
        "KDA-STATE-ALIGNMENT",
        "`state` must have every slot on a 16-byte boundary. Got an address 8 bytes past a 16-byte "
        "boundary. Start the pool at a multiple of 4 elements, and make the slot stride one.",
        lambda c: aligned(P, HV, V, K, offset=8),
    ),
    state(
        "KDA-STATE-DEVICE",
        "`state` must be on cuda:1. Got an array in host memory. Move it there, or ask check_state about "
        "the device that it is on.",
        lambda c: c.initial_state,
        device=1,
    ),
    state(
        "KDA-STATE-DEVICE",
        "`state` must be on cuda:0. Got an array on cuda:1. Move it there, or ask check_state about the "
        "device that it is on.",
        lambda c: on_gpu(c.initial_state, 1),
        device=0,
    ),
    state(
        "KDA-STATE-DEVICE",
        "`state` must be in host memory. Got an array on cuda:1. Move it there, or ask check_state about "
        "the device that it is on.",
        lambda c: on_gpu(c.initial_state, 1),
        device=-1,
    ),
]
VALUES = [
    kda(
        "KDA-VALUE-SCALE",
        "scale",
        "`scale` must be a finite number on the host, or None. Got '0.125' of type str. Pass a Python "
        "float, or None for K**-0.5.",
        scale=lambda c: "0.125",
    ),
    kda(
        "KDA-VALUE-SCALE",
        "scale",
        "`scale` must be a finite number on the host, or None. Got inf. Pass a Python float, or None for "
        "K**-0.5.",
        scale=lambda c: np.float32("inf"),
    ),
    kda(
        "KDA-VALUE-SCALE",
        "scale",
        "`scale` must be a finite number on the host, or None. Got an array of shape [2]. Pass a Python "
        "float, or None for K**-0.5.",
        scale=lambda c: np.ones(2, np.float32),
    ),
    kda(
        "KDA-VALUE-SCALE",
        "scale",
        "`scale` must be a finite number on the host, or None. Got [0.125, 0.125, 0.125, 0.125, 0.125, "
        "0.125, ...] of type list. Pass a Python float, or None for K**-0.5.",
        scale=lambda c: [0.125] * 100,
    ),
    kda(
        "KDA-VALUE-SCALE",
        "scale",
        "`scale` must be a finite number on the host, or None. Got a value in GPU memory, of type OnGpu. "
        "Pass a Python float, or None for K**-0.5.",
        scale=lambda c: OnGpu(),
    ),
    kda(
        "KDA-VALUE-LOWER-BOUND",
        "lower_bound",
        "`lower_bound` must be a finite number below 0, or None. Got 5.0. Pass the model's own bound, "
        "such as -5.0, or None for the softplus gate.",
        lower_bound=lambda c: 5,
    ),
    kda(
        "KDA-VALUE-LOWER-BOUND",
        "lower_bound",
        "`lower_bound` must be a finite number below 0, or None. Got 0.0. Pass the model's own bound, "
        "such as -5.0, or None for the softplus gate.",
        lower_bound=lambda c: 0.0,
    ),
    kda(
        "KDA-VALUE-LOWER-BOUND",
        "lower_bound",
        "`lower_bound` must be a finite number below 0, or None. Got -inf. Pass the model's own bound, "
        "such as -5.0, or None for the softplus gate.",
        lower_bound=lambda c: np.array(-np.inf),
    ),
    gdn(
        "KDA-VALUE-LOWER-BOUND",
        "lower_bound",
        "`lower_bound` must be a finite number below 0, or None. Got '-5' of type str. Pass the model's "
        "own bound, such as -5.0, or None for the softplus gate.",
        lower_bound=lambda c: "-5",
    ),
    kda(
        "KDA-VALUE-A-LOG-MISSING",
        "A_log",
        "`A_log` may be None only with a `lower_bound`. Got A_log=None and lower_bound=None. Pass the "
        "layer's `A_log`, or the `lower_bound` that its gate has.",
        A_log=lambda c: None,
    ),
    kda(
        "KDA-VALUE-NULL-INDEX",
        "null_index",
        "`null_index` must be -1 or 0. Got 1. Pass 0 if your engine reserves slot 0 for padding, else "
        "leave it out.",
        null_index=lambda c: 1,
    ),
    kda(
        "KDA-VALUE-FLAG",
        "use_qk_l2norm_in_kernel",
        "`use_qk_l2norm_in_kernel` must be True or False. Got 1 of type int. Pass a bool: bool(value), or "
        "value.item() for an array of one.",
        use_qk_l2norm_in_kernel=lambda c: 1,
    ),
    kda(
        "KDA-VALUE-FLAG",
        "allow_neg_eigval",
        "`allow_neg_eigval` must be True or False. Got 'False' of type str. Pass a bool: bool(value), or "
        "value.item() for an array of one.",
        allow_neg_eigval=lambda c: "False",
    ),
    kda(
        "KDA-VALUE-VALIDATE",
        "validate",
        '`validate` must be "metadata" or "full". Got True. Pass "full" to have the slots read and '
        "checked first, else leave it out.",
        validate=lambda c: True,
    ),
    kda(
        "KDA-VALUE-SLOT-RANGE",
        "ssm_state_indices",
        "`ssm_state_indices[2]` must be a slot below P=6, or negative for padding. Got slot 6. Pass slots "
        "that the pool handed out.",
        ssm_state_indices=lambda c: np.array([1, -1, P]),
        validate=lambda c: "full",
    ),
    kda(
        "KDA-VALUE-SLOT-DUPLICATE",
        "ssm_state_indices",
        "`ssm_state_indices` must name a live slot once only. Got slot 3 in rows 0, 2. Give each sequence "
        "a slot of its own; only padding (-1) may repeat.",
        ssm_state_indices=lambda c: np.array([3, -1, 3]),
        validate=lambda c: "full",
    ),
    kda(
        "KDA-VALUE-SLOT-DUPLICATE",
        "ssm_state_indices",
        "`ssm_state_indices` must name a live slot once only. Got slot 3 in rows 0, 2, 3 and 1 more. Give "
        "each sequence a slot of its own; only padding (-1) may repeat.",
        **{
            name: lambda c, name=name: np.concatenate([vars(c)[name]] * 2)
            for name in ("mixed_qkv", "a", "b", "out")
        },
        ssm_state_indices=lambda c: np.array([3, -1, 3, 3, -1, 3]),
        validate=lambda c: "full",
    ),
    Case(
        "KDA-VALUE-OPERATION",
        "operation",
        "bind",
        lambda c: bind("kda_packed_decode", c.mixed_qkv),
        "`operation` must be one that can be bound: causal_conv1d_update, gdn_decode_step, "
        "gdn_packed_decode, kda_commit, kda_decode_mtp, kda_decode_step, kda_packed_decode. Got "
        "'kda_packed_decode'. Pass the function itself, then its operands.",
    ),
]
ARRAYS = [
    kda(
        "KDA-ARRAY-DTYPE",
        "mixed_qkv",
        "`mixed_qkv` must be bfloat16, float16 or float32. Got float64. Convert it with astype before the "
        "call: nothing is cast silently.",
        mixed_qkv=lambda c: c.mixed_qkv.astype(np.float64),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "mixed_qkv",
        "`mixed_qkv` must be bfloat16, float16 or float32. Got >f4. Convert it with astype before the "
        "call: nothing is cast silently.",
        mixed_qkv=lambda c: c.mixed_qkv.astype(">f4"),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "a",
        "`a` must be float32. Got float16. Convert it with astype before the call: nothing is cast silently.",
        a=lambda c: c.a.astype(np.float16),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "b",
        "`b` must be bfloat16 or float32. Got float16. Convert it with astype before the call: nothing is "
        "cast silently.",
        mixed_qkv=lambda c: c.mixed_qkv.astype(BFLOAT16),
        b=lambda c: c.b.astype(np.float16),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "A_log",
        "`A_log` must be bfloat16, float16 or float32. Got float64. Convert it with astype before the "
        "call: nothing is cast silently.",
        A_log=lambda c: c.A_log.astype(np.float64),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "dt_bias",
        "`dt_bias` must be bfloat16, float16 or float32. Got int32. Convert it with astype before the "
        "call: nothing is cast silently.",
        dt_bias=lambda c: c.dt_bias.astype(np.int32),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "ssm_state_indices",
        "`ssm_state_indices` must be int32 or int64. Got uint32. Convert it with astype before the call: "
        "nothing is cast silently.",
        ssm_state_indices=lambda c: c.ssm_state_indices.astype(np.uint32),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "out",
        "`out` must be bfloat16. Got float32. Convert it with astype before the call: nothing is cast "
        "silently.",
        mixed_qkv=lambda c: c.mixed_qkv.astype(BFLOAT16),
    ),
    kda(
        "KDA-ARRAY-DTYPE",
        "a",
        "`a` must be of a number type that NumPy has. Got DLPack type code 2, 4 bits, 1 lane(s). Convert "
        "it with astype before the call: nothing is cast silently.",
        a=lambda c: Producer(c.a, bits=4),
    ),
    kda(
        "KDA-ARRAY-OVERLAP",
        "out",
        "`out` is written to and must not share memory with another operand. Got `out` and "
        "`initial_state` with bytes in common. Give `out` memory of its own, apart from `initial_state`.",
        out=lambda c: c.initial_state.ravel()[: B * HV * V].reshape(B, 1, HV, V),
    ),
    kda(
        "KDA-ARRAY-OVERLAP",
        "initial_state",
        "`initial_state` is written to and must not share memory with another operand. Got "
        "`initial_state` and `b` with bytes in common. Give `initial_state` memory of its own, apart from "
        "`b`.",
        b=lambda c: c.initial_state[0, 0, :B, :HV],
    ),
    kda(
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "mixed_qkv",
        "`mixed_qkv` must have strides of whole elements, none of them negative. Got element strides "
        "[-80, 1] for shape [3, 80]. Copy the view: ascontiguousarray(mixed_qkv).",
        mixed_qkv=lambda c: c.mixed_qkv[::-1],
    ),
    kda(
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "ssm_state_indices",
        "`ssm_state_indices` must have strides of whole elements, none of them negative. Got element "
        "strides [-1] for shape [3]. Copy the view: ascontiguousarray(ssm_state_indices).",
        ssm_state_indices=lambda c: c.ssm_state_indices[::-1],
    ),
    kda(
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "b",
        "`b` must have strides of whole elements, none of them negative. Got strides [18, 4] bytes for "
        "elements of 4. Copy the view: ascontiguousarray(b).",
        b=lambda c: strided(aligned(2 * B, HV)[:B], 18, 4),
    ),
    kda(
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "b",
        "`b` must have strides of whole elements, none of them negative. Got strides [-16, 4] bytes. Copy "
        "the view: ascontiguousarray(b).",
        b=lambda c: Producer(c.b, row_stride=-HV),
    ),
    state(
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "`state` must have strides of whole elements, none of them negative. Got element strides [-384, "
        "96, 8, 1] for shape [6, 4, 12, 8]. Copy the view: ascontiguousarray(state).",
        lambda c: c.initial_state[::-1],
    ),
    kda(
        "KDA-ARRAY-ALIGNMENT",
        "b",
        "`b` must begin at a multiple of its element size. Got an address 1 byte past a multiple of 4. "
        "Copy it, or choose an offset that is a multiple of the element size.",
        b=lambda c: aligned(B, HV, offset=1),
    ),
    kda(
        "KDA-ARRAY-ALIGNMENT",
        "ssm_state_indices",
        "`ssm_state_indices` must begin at a multiple of its element size. Got an address 4 bytes past a "
        "multiple of 8. Copy it, or choose an offset that is a multiple of the element size.",
        ssm_state_indices=lambda c: aligned(B, offset=4, dtype=np.int64),
    ),
    kda(
        "KDA-ARRAY-READ-ONLY",
        "initial_state",
        "`initial_state` is written in place and must be writable. Got read-only memory. Pass a writable "
        "copy, and keep the copy: the update is in it.",
        initial_state=lambda c: frozen(c.initial_state),
    ),
    kda(
        "KDA-ARRAY-READ-ONLY",
        "out",
        "`out` is written in place and must be writable. Got read-only memory. Pass a writable copy, and "
        "keep the copy: the update is in it.",
        out=lambda c: frozen(c.out),
    ),
    kda(
        "KDA-ARRAY-READ-ONLY",
        "out",
        "`out` is written in place and must be writable. Got Producer in read-only memory. Pass a "
        "writable copy, and keep the copy: the update is in it.",
        out=lambda c: Producer(frozen(c.out)),
    ),
    state(
        "KDA-ARRAY-READ-ONLY",
        "`state` is written in place and must be writable. Got read-only memory. Pass a writable copy, "
        "and keep the copy: the update is in it.",
        lambda c: frozen(c.initial_state),
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got None. Make an array of "
        "it first, with numpy.asarray or cupy.asarray.",
        a=lambda c: None,
    ),
    kda(
        "KDA-ARRAY-KIND",
        "ssm_state_indices",
        "`ssm_state_indices` must be an array of NumPy, CuPy or another library with DLPack. Got list. "
        "Make an array of it first, with numpy.asarray or cupy.asarray.",
        ssm_state_indices=lambda c: [1, 2, 3],
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got Producer on DLPack "
        "device type 10. Make an array of it first, with numpy.asarray or cupy.asarray.",
        a=lambda c: Producer(c.a, device=(10, 0)),
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got Refusing, which refused: "
        "sparse arrays have no strides. Make an array of it first, with numpy.asarray or cupy.asarray.",
        a=lambda c: Refusing(c.a),
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got a producer that hands "
        "out a capsule named used_dltensor_versioned. Make an array of it first, with numpy.asarray or "
        "cupy.asarray.",
        a=lambda c: Used(c.a),
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got DLPack version 2.1. Make "
        "an array of it first, with numpy.asarray or cupy.asarray.",
        a=lambda c: Newer(c.a),
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got Negative with its "
        "negative bit set. Make an array of it first, with numpy.asarray or cupy.asarray.",
        a=lambda c: Negative(c.a),
    ),
    kda(
        "KDA-ARRAY-KIND",
        "a",
        "`a` must be an array of NumPy, CuPy or another library with DLPack. Got an array without memory. "
        "Make an array of it first, with numpy.asarray or cupy.asarray.",
        a=lambda c: Producer(c.a, data=None),
    ),
    state(
        "KDA-ARRAY-KIND",
        "`state` must be an array of NumPy, CuPy or another library with DLPack. Got numpy.float32. Make "
        "an array of it first, with numpy.asarray or cupy.asarray.",
        lambda c: np.float32(1),
    ),
    kda(
        "KDA-ARRAY-CAPSULE",
        "mixed_qkv",
        "`mixed_qkv` must be an array, not the DLPack capsule of one. Got a PyCapsule. Pass the array "
        "itself instead of x.__dlpack__() or to_dlpack(x).",
        mixed_qkv=lambda c: c.mixed_qkv.__dlpack__(),
    ),
    kda(
        "KDA-ARRAY-HOST-ON-DEVICE",
        "a",
        "All inputs must be on the same device. Some are in host memory. Got `a` in host memory and "
        "`mixed_qkv` on cuda:0. Copy `a` to the GPU with cupy.asarray, or pass NumPy arrays only.",
        mixed_qkv=lambda c: on_gpu(c.mixed_qkv),
    ),
    kda(
        "KDA-ARRAY-HOST-ON-DEVICE",
        "mixed_qkv",
        "All inputs must be on the same device. Some are in host memory. Got `mixed_qkv` in host memory "
        "and `ssm_state_indices` on cuda:2. Copy `mixed_qkv` to the GPU with cupy.asarray, or pass NumPy "
        "arrays only.",
        ssm_state_indices=lambda c: on_gpu(c.ssm_state_indices, 2),
    ),
    kda(
        "KDA-ARRAY-HOST-ON-DEVICE",
        "mixed_qkv",
        "All inputs must be on the same device. Some are in host memory. Got `mixed_qkv` in host memory "
        "and `b` on cuda:1. Copy `mixed_qkv` to the GPU with cupy.asarray, or pass NumPy arrays only.",
        b=lambda c: Producer(c.b, device=(2, 1)),
    ),
    elsewhere(
        "KDA-ARRAY-BF16-SUPPORT",
        "kda_packed_decode",
        lambda c: c.kda(
            **{
                name: on_gpu(value.astype(BFLOAT16) if name == "dt_bias" else value)
                for name, value in vars(c).items()
            }
        ),
        "bfloat16 needs a GPU of compute capability 8.0 or newer. Got `dt_bias` in bfloat16 on a GPU of "
        "compute capability 7.5. Pass float16 or float32 on this GPU.",
        operand="dt_bias",
        capability="75",
    ),
]
POOLS = [
    pool(
        "KDA-POOL-EXHAUSTED",
        "n",
        "StatePool.allocate",
        "The pool has 2 of 4 slots free. Got a request for 3. Release slots of finished sequences, or "
        "make the pool larger.",
        lambda pool: pool.allocate(3),
    ),
    pool(
        "KDA-POOL-EXHAUSTED",
        "n",
        "StatePool.allocate",
        "The pool has 2 of 4 slots free. Got a request for 5. Release slots of finished sequences, or "
        "make the pool larger.",
        lambda pool: pool.allocate(5),
    ),
    pool(
        "KDA-POOL-DOUBLE-RELEASE",
        "slots",
        "StatePool.release",
        "A slot can be released only while it is in use. Got slot 3. Release each slot once, where its "
        "sequence ends.",
        lambda pool: pool.release(3),
    ),
    pool(
        "KDA-POOL-DOUBLE-RELEASE",
        "slots",
        "StatePool.release",
        "A slot can be released only while it is in use. Got slot 1. Release each slot once, where its "
        "sequence ends.",
        lambda pool: pool.release([1, 2, 1]),
    ),
    pool(
        "KDA-POOL-RESERVED",
        "slots",
        "StatePool.release",
        "Slot 0 is reserved: it is never handed out, and so cannot be released. Got slots[1] = 0. Release "
        "only slots that allocate() returned.",
        lambda pool: pool.release([1, 0]),
    ),
    pool(
        "KDA-VALUE-SLOT-RANGE",
        "slots",
        "StatePool.release",
        "`slots[1]` must be a slot from 1 to 4. Got slot 5. Pass slots that the pool handed out.",
        lambda pool: pool.release([1, 5]),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "n",
        "StatePool.allocate",
        "A pool needs `n` >= 0. Got n=-1. Pass sizes as whole numbers, and a GPU by its number "
        '(0, not "cuda:0").',
        lambda pool: pool.allocate(-1),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "",
        "StatePool",
        "A pool needs layers >= 1, capacity >= 1 (P >= 2), HV >= 1, V >= 1 and K = 4, 8, .., 512. Got "
        "layers, capacity, HV, V, K = [1, 0, 4, 12, 8]. Pass sizes as whole numbers, and a GPU by its "
        'number (0, not "cuda:0").',
        lambda pool: StatePool(0, HV, K, V, device="cpu"),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "device",
        "StatePool",
        "A pool needs `device` to be \"cpu\", None or the number of a GPU. Got device='cuda:0'. Pass sizes "
        'as whole numbers, and a GPU by its number (0, not "cuda:0").',
        lambda pool: StatePool(4, HV, K, V, device="cuda:0"),
    ),
    wrap(
        "KDA-POOL-GEOMETRY",
        "A pool needs layers >= 1, capacity >= 1 (P >= 2), HV >= 1, V >= 1 and K = 4, 8, .., 512. Got "
        "P=1, and slot 0 is reserved. Pass sizes as whole numbers, and a GPU by its number (0, not "
        '"cuda:0").',
        lambda c: c.initial_state[:1],
    ),
    wrap(
        "KDA-POOL-GEOMETRY",
        "A pool needs layers >= 1, capacity >= 1 (P >= 2), HV >= 1, V >= 1 and K = 4, 8, .., 512. Got no "
        'layers. Pass sizes as whole numbers, and a GPU by its number (0, not "cuda:0").',
        lambda c: c.initial_state[None][:0],
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "num_key_heads",
        "StatePool",
        "A pool needs `num_key_heads` >= 1 that divides `num_value_heads`. Got 3 key heads for 4 "
        "value heads. "
        'Pass sizes as whole numbers, and a GPU by its number (0, not "cuda:0").',
        lambda pool: StatePool(4, 4, K, V, num_key_heads=3, device="cpu"),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "activation_dtype",
        "StatePool",
        'A pool needs `activation_dtype` to be "bfloat16", "float16", "float32" or None. Got '
        "activation_dtype='int8'. Pass sizes as whole numbers, and a GPU by its number (0, not "
        '"cuda:0").',
        lambda pool: StatePool(4, HV, K, V, activation_dtype="int8", device="cpu"),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "verify_rows",
        "StatePool",
        "A pool needs `verify_rows` and `verify_tokens` >= 1 with an `activation_dtype`, or both 0. Got "
        "verify_rows=2, verify_tokens=4, activation_dtype=None. Pass sizes as whole numbers, and a "
        "GPU by its "
        'number (0, not "cuda:0").',
        lambda pool: StatePool(4, HV, K, V, verify_rows=2, verify_tokens=4, device="cpu"),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "budget_bytes",
        "StatePool.for_budget",
        "A pool needs `budget_bytes` for slot 0, one more slot and the scratch of verify. Got "
        "1,000 bytes where "
        'a slot takes 1,536. Pass sizes as whole numbers, and a GPU by its number (0, not "cuda:0").',
        lambda pool: StatePool.for_budget(1000, HV, K, V, device="cpu"),
    ),
    pool(
        "KDA-POOL-GEOMETRY",
        "layer",
        "StatePool.export_state",
        "A pool needs `layer` from 0 to 0. Got layer=1. Pass sizes as whole numbers, and a GPU by "
        "its number "
        '(0, not "cuda:0").',
        lambda pool: pool.export_state(1, layout="VK", layer=1),
    ),
    pool(
        "KDA-POOL-NOT-IN-USE",
        "slots",
        "StatePool.snapshot",
        "`slots[1]` must be a slot that is in use. Got slot 3. Pass slots that allocate(), fork(), "
        "load() or "
        "import_state() returned and release() has not seen.",
        lambda pool: pool.snapshot([1, 3]),
    ),
    pool(
        "KDA-POOL-NOT-IN-USE",
        "slots",
        "StatePool.fork",
        "`slots[0]` must be a slot that is in use. Got slot 0. Pass slots that allocate(), fork(), "
        "load() or "
        "import_state() returned and release() has not seen.",
        lambda pool: pool.fork(0),
    ),
    pool(
        "KDA-VALUE-SLOT-RANGE",
        "slots",
        "StatePool.snapshot",
        "`slots[0]` must be a slot from 1 to 4. Got slot -1. Pass slots that the pool handed out.",
        lambda pool: pool.snapshot([-1, 1]),
    ),
    pool(
        "KDA-VALUE-SLOT-DUPLICATE",
        "slots",
        "StatePool.restore",
        "`slots` must name a live slot once only. Got slot 1 twice. Give each sequence a slot of "
        "its own; only "
        "padding (-1) may repeat.",
        lambda pool: pool.restore(pool.snapshot([1, 2]), [1, 1]),
    ),
    pool(
        "KDA-POOL-NOT-FREE",
        "slots",
        "StatePool.load",
        "A saved slot comes back under its own number only while that number is free. Got slot 1 "
        "in use. Pass "
        "`slots` to load into slots that you hold, or load into a new pool.",
        lambda pool: in_a_file(pool, pool.load),
    ),
    pool(
        "KDA-POOL-SNAPSHOT",
        "snapshot",
        "StatePool.restore",
        "A snapshot must fit where it is restored: 1 slots. Got a snapshot of 2. Restore it to as "
        "many slots of "
        "a pool with the same layers, sizes, dtypes and device.",
        lambda pool: pool.restore(pool.snapshot([1, 2]), 1),
    ),
    pool(
        "KDA-POOL-SNAPSHOT",
        "snapshot",
        "StatePool.restore",
        "A snapshot must fit where it is restored: state [1, 1, 4, 12, 8] float32 on cpu. Got state "
        "[2, 1, 4, 12, 8] float32 on cpu. Restore it to as many slots of a pool with the same "
        "layers, sizes, "
        "dtypes and device.",
        lambda pool: pool.restore(snapshot_of_two_layers(), 1),
    ),
    pool(
        "KDA-POOL-FILE",
        "path",
        "StatePool.load",
        "`states` is no file that this pool can load. Got 2 saved slots for 1 slots of the pool. "
        "Load a file "
        "that pool.save() wrote for a pool with the same layers, sizes, dtypes and number of slots.",
        lambda pool: in_a_file(pool, lambda path: pool.load(path, [1])),
    ),
    pool(
        "KDA-POOL-LAYOUT",
        "layout",
        "StatePool.import_state",
        '`layout` must be "KV" for [n, HV, K, V] or "VK" for [n, HV, V, K]. Got layout=\'kv\'. Say which axis '
        'comes first: flash-linear-attention returns "KV".',
        lambda pool: pool.import_state(pool.state[0], layout="kv"),
    ),
    pool(
        "KDA-STATE-LAYOUT",
        "array",
        "StatePool.import_state",
        "expected recurrent state layout [n, HV=4, K=8, V=12] for `array`. Got [2, 4, 12, 8]. Pass "
        "the pool as "
        "[pool, HV, V, K]: one head per value head, rows V (values), columns K (keys).",
        lambda pool: pool.import_state(numbers(2, HV, V, K), layout="KV"),
    ),
    elsewhere(
        "KDA-POOL-GEOMETRY",
        "StatePool",
        lambda c: StatePool(4, HV, K, V, device=2),
        'A pool needs `device` to be "cpu", None or the number of a GPU. Got device=2, with 2 here. Pass '
        'sizes as whole numbers, and a GPU by its number (0, not "cuda:0").',
        operand="device",
        gpus=2,
    ),
]
COMPILER = [
    elsewhere(
        "KDA-COMPILER-NO-CUPY",
        "StatePool",
        lambda c: StatePool(4, HV, K, V),
        "CuPy cannot be imported. Got ModuleNotFoundError: import of cupy halted; None in sys.modules. "
        "Install it with pip install 'kda-cupy[cu13]' (a driver for CUDA 12: 'kda-cupy[cu12]').",
        cupy=False,
    ),
    elsewhere(
        "KDA-COMPILER-NO-GPU",
        "StatePool",
        lambda c: StatePool(4, HV, K, V),
        "No GPU can be used here. Got CuPy 14.2.0, which finds none. Run `kda-cupy doctor`, which says "
        'why, or work on NumPy arrays (device="cpu").',
        gpus=0,
    ),
    elsewhere(
        "KDA-COMPILER-NO-CUPY",
        "kda_packed_decode",
        lambda c: c.kda(**{name: Producer(array, device=(2, 0)) for name, array in vars(c).items()}),
        "CuPy cannot be imported. Got ModuleNotFoundError: import of cupy halted; None in sys.modules. "
        "Install it with pip install 'kda-cupy[cu13]' (a driver for CUDA 12: 'kda-cupy[cu12]').",
        cupy=False,
    ),
    elsewhere(
        "KDA-COMPILER-NVRTC",
        "kda_packed_decode",
        on_one_gpu,
        'NVRTC, which compiles the kernels, cannot be loaded. Got `Failure finding "libnvrtc.so": No such '
        "file`. Install it with pip install 'cuda-toolkit[cudart,nvrtc]==13.*' (CuPy for CUDA 12: "
        "==12.*).",
        fail=failing(DynamicLibNotFoundError('Failure finding "libnvrtc.so": No such file\nadvice')),
    ),
    elsewhere(
        "KDA-COMPILER-HEADERS",
        "kda_packed_decode",
        on_one_gpu,
        "CUDA's own headers cannot be found. Got `Failed to find CUDA headers` on compute capability 9.0, "
        "NVRTC 13.0, driver for CUDA 13.0. Install them with pip install "
        "'cuda-toolkit[cudart,nvrtc]==13.*' (CuPy for CUDA 12: ==12.*).",
        fail=failing(
            RuntimeError("Failed to find CUDA headers. Please install (pip install cupy-cuda12x[ctk]).")
        ),
    ),
    elsewhere(
        "KDA-COMPILER-HEADERS",
        "kda_packed_decode",
        on_one_gpu,
        "CUDA's own headers cannot be found. Got `memory.cuh(11): error: cannot open source file "
        '"cuda_bf16.h"` on compute capability 9.0, NVRTC 13.0, driver for CUDA 13.0. Install them with '
        "pip install 'cuda-toolkit[cudart,nvrtc]==13.*' (CuPy for CUDA 12: ==12.*).",
        fail=failing(
            CompileException('memory.cuh(11): error: cannot open source file "cuda_bf16.h"\n1 error')
        ),
    ),
    elsewhere(
        "KDA-COMPILER-ARCH",
        "kda_packed_decode",
        on_one_gpu,
        "NVRTC does not know this GPU. Got compute capability 6.1, NVRTC 13.0, driver for CUDA 13.0. "
        "Install the NVRTC of another CUDA version: a newer one for a newer GPU, CUDA 12 for one before "
        "7.5.",
        fail=failing(CompileException("nvrtc: error: invalid value for --gpu-architecture (-arch)\n")),
        capability="61",
    ),
    elsewhere(
        "KDA-COMPILER-CACHE",
        "kda_packed_decode",
        on_one_gpu,
        "CuPy cannot use its cache folder for compiled kernels. Got [Errno 30] Read-only file system: "
        "'/home/me/.cupy'. Set CUPY_CACHE_DIR to a folder that can be written to, before CuPy is "
        "imported.",
        fail=failing(OSError(30, "Read-only file system", "/home/me/.cupy")),
    ),
    elsewhere(
        "KDA-COMPILER-ARCH",
        "kda_packed_decode",
        on_one_gpu,
        "NVRTC does not know this GPU. Got compute capability 13.0, NVRTC 13.0, driver for CUDA 13.0. "
        "Install the NVRTC of another CUDA version: a newer one for a newer GPU, CUDA 12 for one before "
        "7.5.",
        fail=failing(CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")),
        capability="130",
    ),
    elsewhere(
        "KDA-COMPILER-OLD-GPU",
        "kda_packed_decode",
        on_one_gpu,
        "The kernel packed_decode[kda,softplus,K8,V12,float32] needs a GPU of compute capability "
        "8.0 or newer. Got "
        "compute capability 7.5, NVRTC 13.0, driver for CUDA 13.0. Run it on a newer GPU, or on "
        "NumPy arrays.",
        fail=failing(
            CompileException(
                "ptxas input, line 9; error   : Feature '.tf32' requires .target sm_80 or higher\n"
            )
        ),
        capability="75",
    ),
    elsewhere(
        "KDA-COMPILER-DRIVER",
        "StatePool",
        lambda c: StatePool(4, HV, K, V),
        "The NVIDIA driver is older than the CUDA version that CuPy or NVRTC is made for. Got a "
        "driver for CUDA 12.4 "
        "and CuPy 14.2.0 for CUDA 13.2. Update the driver (580 or newer for CUDA 13), or install "
        "CuPy for it: "
        "pip install 'kda-cupy[cu12]'.",
        driver=12040,
    ),
    elsewhere(
        "KDA-COMPILER-DRIVER",
        "kda_packed_decode",
        on_one_gpu,
        "The NVIDIA driver is older than the CUDA version that CuPy or NVRTC is made for. Got "
        "`CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid` on compute capability 9.0, "
        "NVRTC 13.0, driver for "
        "CUDA 12.8. Update the driver (580 or newer for CUDA 13), or install CuPy for it: pip install "
        "'kda-cupy[cu12]'.",
        fail=failing(CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")),
        driver=12080,
    ),
    elsewhere(
        "KDA-COMPILER-TWO-CUPY",
        "kda_packed_decode",
        on_one_gpu,
        "More than one CuPy wheel is installed, and they overwrite each other's files. Got "
        "cupy-cuda12x 14.2.0 and "
        'cupy-cuda13x 14.2.0, and `Failure finding "libnvrtc.so"`. Remove them all, pip uninstall -y cupy-cuda12x '
        "cupy-cuda13x, and install one: pip install 'kda-cupy[cu13]' (a driver for CUDA 12: "
        "'kda-cupy[cu12]').",
        fail=failing(DynamicLibNotFoundError('Failure finding "libnvrtc.so"')),
        wheels=("cupy-cuda12x", "cupy-cuda13x"),
    ),
    elsewhere(
        "KDA-COMPILER-TWO-CUPY",
        "StatePool",
        lambda c: StatePool(4, HV, K, V),
        "More than one CuPy wheel is installed, and they overwrite each other's files. Got "
        "cupy-cuda12x 14.2.0 and "
        "cupy-cuda13x 14.2.0, and no GPU that it finds. Remove them all, pip uninstall -y cupy-cuda12x "
        "cupy-cuda13x, and install one: pip install 'kda-cupy[cu13]' (a driver for CUDA 12: "
        "'kda-cupy[cu12]').",
        gpus=0,
        wheels=("cupy-cuda12x", "cupy-cuda13x"),
    ),
    elsewhere(
        "KDA-COMPILER-TMPDIR",
        "kda_packed_decode",
        on_one_gpu,
        "CuPy cannot use the folder for temporary files, where it puts the source of a kernel. Got "
        "[Errno 2] No "
        "usable temporary directory found in ['/tmp', '/var/tmp']. Set TMPDIR to a folder that can "
        "be written to and "
        "whose name is plain ASCII.",
        fail=failing(FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")),
    ),
    elsewhere(
        "KDA-COMPILER-TMPDIR",
        "kda_packed_decode",
        on_one_gpu,
        "CuPy cannot use the folder for temporary files, where it puts the source of a kernel. Got "
        "'utf-8' codec "
        "can't encode character '\\udcff' in position 8: surrogates not allowed. Set TMPDIR to a "
        "folder that can be "
        "written to and whose name is plain ASCII.",
        fail=failing(UnicodeEncodeError("utf-8", "/tmp/bad\udcff", 8, 9, "surrogates not allowed")),
    ),
    elsewhere(
        "KDA-COMPILER-COMPILE",
        "kda_packed_decode",
        on_one_gpu,
        "The kernel packed_decode[kda,softplus,K8,V12,float32] could not be compiled. Got `warp.cuh(2): "
        'error: identifier "x" is undefined` on compute capability 9.0, NVRTC 13.0, driver for CUDA 13.0. '
        "Update CuPy and NVRTC; if that does not help, report this message with `kda-cupy doctor --json`.",
        fail=failing(
            CompileException(
                'warp.cuh(3): warning: unused\n\nwarp.cuh(2): error: identifier "x" is undefined\n'
            )
        ),
    ),
    elsewhere(
        "KDA-COMPILER-COMPILE",
        "bind",
        lambda c: bind(kda_packed_decode, *(on_gpu(vars(c)[name]) for name in OPERANDS)),
        "The kernel packed_decode[kda,softplus,K8,V12,float32] could not be compiled. Got `no message` on "
        "compute capability 9.0, NVRTC 13.0, driver for CUDA 13.0. Update CuPy and NVRTC; if that does "
        "not help, report this message with `kda-cupy doctor --json`.",
        fail=failing(CompileException("")),
    ),
]
CASES = [*PACKED, *STATES, *VALUES, *ARRAYS, *POOLS, *COMPILER]


def told(case: Case) -> KdaError:
    with pytest.raises(KdaError) as caught:
        case.meet(Operands())
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.by}-{case.code}-{case.operand}")
def test_the_whole_message(case: Case) -> None:
    error = told(case)
    assert str(error) == case.message
    page = CATALOGUE[case.code]
    assert (type(error), error.code, error.operand) == (page.exception, case.code, case.operand)
    assert error.got and error.got in case.message
    assert error.wanted and case.message.startswith(error.wanted)
    assert error.hint and case.message.endswith(f" {error.hint}.")
    assert case.by in raised_by(case.code)
    assert search(case.message)[0] is page


def test_every_page_has_a_case() -> None:
    of_verify_and_commit = {"KDA-VALUE-LENGTH-RANGE", "KDA-VALUE-ACCEPT-RANGE", "KDA-VALUE-ROW-RANGE"}
    of_verify_and_commit |= {"KDA-VALUE-EPS", "KDA-ARRAY-FOLDED"}  # see test_mtp_messages.py
    families = ("KDA-VERIFY-", "KDA-COMMIT-", "KDA-CONV-")
    of_others = {code for code in CATALOGUE if code.startswith(families)}
    of_others |= {"KDA-VALUE-ACTIVATION"}  # see test_step_messages.py, for those of the convolution too
    of_others |= {"KDA-POOL-PARTS"}  # see test_layer.py
    assert {case.code for case in CASES} == CATALOGUE.keys() - of_verify_and_commit - of_others


def test_messages_are_one_line_of_plain_words() -> None:
    for case in CASES:
        assert "\n" not in case.message and "  " not in case.message
        assert not set("{}") & set(case.message), "a field was not filled"


# Words that operations.md quotes, and that users of other projects search for


QUOTED = [
    "`mixed_qkv` must be contiguous in the last dim.",
    "`a`/`b` must be contiguous in the last dim.",
    "`A_log`/`dt_bias` must be contiguous.",
    "`ssm_state_indices` must be 1D for packed decode (got ndim=2)",
    "`out` must be contiguous.",
    "All inputs must be on the same device.",
    "Mismatched batch sizes: `mixed_qkv.shape[0]=3`, `a.shape[0]=2`, `b.shape[0]=3`.",
    "`ssm_state_indices` must have shape [B] (got (2,); expected (3,)).",
    "`initial_state` must be a 4D tensor (got ndim=3).",
    "`initial_state` must be contiguous in the last dim.",
    "`a`/`b` must have shape [B, HV] with HV=4 (got ",
    "`A_log` and `dt_bias` must have HV=4 and HV*K=32 elements (got ",
    "`out` must have shape (3, 1, 4, 12) (got (3, 4, 12)).",
    "`qk_dim = qkv_dim - HV*V` must be positive and even (got qk_dim=33 from qkv_dim=81, HV=4, V=12).",
    "`qk_dim/2` must be a multiple of K=8 (got qk_dim/2=17 ",
    "H >= 1 and HV % H == 0 must hold (got H=3 and HV=4, ",
    "expected recurrent state layout [pool, HV=2, V, K]",
]


@pytest.mark.parametrize("words", QUOTED)
def test_quoted_words_begin_a_message(words: str) -> None:
    assert any(case.message.startswith(words) for case in CASES)


# What is raised later, and what needs more than one call


@pytest.mark.parametrize(
    ("slots", "more"),
    [([P, 1, 2], ""), ([1, P, P + 1], ", and 1 more such row"), ([9, 8, 7], ", and 2 more such rows")],
)
def test_check_errors_tells_what_a_kernel_met(slots: list[int], more: str) -> None:
    check_errors(-1)
    c = Operands()
    kda_packed_decode(**vars(c) | {"ssm_state_indices": np.array(slots)})
    row = next(row for row, slot in enumerate(slots) if slot >= P)
    with pytest.raises(SlotError) as caught:
        check_errors(-1)
    assert str(caught.value) == (
        f"`ssm_state_indices[{row}]` must be a slot below P=6, or negative for padding. Got slot "
        f"{slots[row]} in "
        f"kda_packed_decode on the NumPy backend{more}. Pass slots that the pool handed out."
    )
    assert (caught.value.code, caught.value.operand) == ("KDA-VALUE-SLOT-RANGE", "ssm_state_indices")
    check_errors(-1)  # it is said once


def test_check_errors_names_the_gpu() -> None:
    with machine(gpus=2):
        record = guard.record_on(1)
        record.values[:] = np.array((3, 1, 0, 0, 0, 5, 40, 33), guard.RECORD).reshape(1).view(np.uint8)
        with pytest.raises(SlotError) as caught:
            check_errors()
        check_errors()
    assert str(caught.value) == (
        "`ssm_state_indices[5]` must be a slot below P=33, or negative for padding. Got slot 40 in "
        "gdn_packed_decode "
        "on cuda:1, and 2 more such rows. Pass slots that the pool handed out."
    )


def test_a_compiler_error_shows_the_lines_around_it() -> None:
    case = next(case for case in COMPILER if case.code == "KDA-COMPILER-COMPILE")
    (note,) = told(case).__notes__
    source = (Path(__file__).parents[2] / "kernels" / "warp.cuh").read_text(encoding="utf-8").splitlines()
    marks = " ", ">", " ", " ", " "
    assert note.splitlines() == [f"{mark} {i:4d}  {source[i - 1]}" for i, mark in enumerate(marks, start=1)]


@pytest.mark.parametrize(
    "log", ["cuda_fp16.hpp(12): error: expected a declaration", "", "nvrtc: error: out of memory"]
)
def test_a_compiler_error_elsewhere_shows_no_lines(log: str) -> None:
    with machine(fail=failing(CompileException(log))), pytest.raises(KdaError) as caught:
        kda_packed_decode(*(on_gpu(vars(Operands())[name]) for name in OPERANDS))
    assert caught.value.code == "KDA-COMPILER-COMPILE"
    assert caught.value.__notes__ == ["compiling kernels/packed_decode.cu"]


def test_what_no_page_is_about_stays_as_it_is() -> None:
    with machine(fail=failing(MemoryError("host"))), pytest.raises(MemoryError, match="host"):
        kda_packed_decode(*(on_gpu(vars(Operands())[name]) for name in OPERANDS))


@pytest.mark.parametrize("place", ["the cache", "a temporary file", "a temporary folder", "nowhere"])
def test_a_full_or_read_only_disk_is_told_by_the_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may well lie beside, or under, the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    file = {
        "the cache": tmp_path / "cache" / "tmpabc",
        "a temporary file": tmp_path / "tmpabc" / "kern.cu",
        "a temporary folder": tmp_path / "tmpabc",
        "nowhere": None,
    }[place]
    cause = OSError(28, "No space left on device", *([str(file)] if file else []))
    with machine(fail=failing(cause)), pytest.raises(KdaError) as caught:
        kda_packed_decode(*(on_gpu(vars(Operands())[name]) for name in OPERANDS))
    wanted = "KDA-COMPILER-TMPDIR" if "temporary" in place else "KDA-COMPILER-CACHE"
    assert caught.value.code == wanted


def test_a_message_is_told_without_nvrtc_too() -> None:
    """What is missing may be the very thing that the message would name the version of."""
    with machine(fail=failing(RuntimeError("Failed to find CUDA headers"))) as cupy:
        cupy.cuda.nvrtc.getVersion = failing(DynamicLibNotFoundError("libnvrtc.so.13"))
        with pytest.raises(KdaError) as caught:
            kda_packed_decode(*(on_gpu(vars(Operands())[name]) for name in OPERANDS))
    assert caught.value.code == "KDA-COMPILER-HEADERS"
    assert "NVRTC that cannot be loaded" in str(caught.value)


def broken_cupy(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a CuPy before the real one that says this when it is imported."""
    (folder / "cupy.py").write_text(body)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


def test_cupy_that_cannot_make_its_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_cupy(tmp_path, monkeypatch, "raise PermissionError(13, 'Permission denied', '/.cupy')")
    with pytest.raises(KdaError) as caught:
        StatePool(4, HV, K, V)
    assert str(caught.value) == (
        "CuPy cannot use its cache folder for compiled kernels. Got [Errno 13] Permission denied: "
        "'/.cupy'. "
        "Set CUPY_CACHE_DIR to a folder that can be written to, before CuPy is imported."
    )


def test_cupy_that_wraps_its_reason_in_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "ImportError('libcublas.so.13: cannot open shared object file')"
    advice = "ImportError('====\\nFailed to import CuPy.\\n\\nLong advice')"
    broken_cupy(tmp_path, monkeypatch, f"raise {advice} from {reason}")
    with pytest.raises(KdaError) as caught:
        StatePool(4, HV, K, V)
    assert str(caught.value) == (
        "CuPy cannot be imported. Got ImportError: libcublas.so.13: cannot open shared object file. "
        "Install it with pip install 'kda-cupy[cu13]' (a driver for CUDA 12: 'kda-cupy[cu12]')."
    )


def test_cupy_that_cannot_be_imported_beside_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kda_cupy.gpu.installed_wheels", lambda: {"cupy": "13.6.0", "cupy-cuda13x": "14.2.0"})
    broken_cupy(tmp_path, monkeypatch, "raise ImportError('undefined symbol: cublasLtMatmul')")
    with pytest.raises(KdaError) as caught:
        StatePool(4, HV, K, V)
    assert caught.value.code == "KDA-COMPILER-TWO-CUPY"
    assert "ImportError: undefined symbol: cublasLtMatmul" in str(caught.value)


# The order of the checks: what violates several rules meets the earliest


def shifted(array: Any) -> Any:
    """A copy one byte off its alignment."""
    copy = aligned(*array.shape, offset=1, dtype=array.dtype)
    copy[...] = array
    return copy


STEPS: list[tuple[str, Callable[[Operands], dict[str, Any]]]] = [
    ("KDA-PACKED-QKV-RANK", lambda c: {"mixed_qkv": c.mixed_qkv[None, :, ::2]}),
    ("KDA-PACKED-QKV-CONTIGUOUS", lambda c: {"mixed_qkv": c.mixed_qkv[:, ::2]}),
    ("KDA-PACKED-AB-RANK", lambda c: {"a": c.a[None, :, ::2], "b": c.b[:, ::2]}),
    ("KDA-PACKED-AB-RANK", lambda c: {"a": c.a[:, ::2], "b": c.b[None, :, ::2]}),
    ("KDA-PACKED-AB-CONTIGUOUS", lambda c: {"a": c.a[:, ::2], "b": c.b}),
    ("KDA-PACKED-AB-CONTIGUOUS", lambda c: {"a": c.a, "b": c.b[:, ::2]}),
    ("KDA-PACKED-GATE-RANK", lambda c: {"dt_bias": numbers(2, 2, HV * K).T}),
    ("KDA-PACKED-GATE-CONTIGUOUS", lambda c: {"A_log": numbers(9)[::2]}),
    ("KDA-PACKED-GATE-CONTIGUOUS", lambda c: {"dt_bias": numbers(9, 9).T}),
    ("KDA-PACKED-INDICES-RANK", lambda c: {"ssm_state_indices": c.ssm_state_indices[None]}),
    ("KDA-PACKED-OUT-CONTIGUOUS", lambda c: {"out": c.out[..., ::2]}),
    ("KDA-ARRAY-HOST-ON-DEVICE", lambda c: {"initial_state": on_gpu(c.initial_state)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"mixed_qkv": c.mixed_qkv[::-1].astype(np.float64)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"a": c.a.astype(np.float64)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"b": c.b.astype(np.float64)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"A_log": numbers(9, dtype=np.float64)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"dt_bias": numbers(9, dtype=np.float64)}),
    ("KDA-STATE-DTYPE", lambda c: {"initial_state": numbers(3, 3, dtype=np.float64)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"ssm_state_indices": numbers(9)[::-1]}),
    ("KDA-ARRAY-DTYPE", lambda c: {"out": numbers(9, dtype=np.float64)}),
    ("KDA-ARRAY-NEGATIVE-STRIDE", lambda c: {"mixed_qkv": numbers(2, 9)[::-1]}),
    ("KDA-ARRAY-NEGATIVE-STRIDE", lambda c: {"ssm_state_indices": np.arange(9)[::-1]}),
    ("KDA-ARRAY-ALIGNMENT", lambda c: {"mixed_qkv": shifted(numbers(2, 9))}),
    ("KDA-ARRAY-ALIGNMENT", lambda c: {"out": shifted(numbers(9))}),
    ("KDA-PACKED-BATCH", lambda c: {"a": numbers(2, 9)}),
    ("KDA-PACKED-INDICES-SHAPE", lambda c: {"ssm_state_indices": np.full(9, 99)}),
    ("KDA-STATE-RANK", lambda c: {"initial_state": numbers(3, 3, 3).T}),
    ("KDA-STATE-CONTIGUOUS", lambda c: {"initial_state": numbers(P, HV, 6, 9).swapaxes(2, 3)}),
    ("KDA-STATE-LAYOUT", lambda c: {"initial_state": aligned(P, HV, 9, 12, offset=4)[..., :6]}),
    ("KDA-STATE-STRIDES", lambda c: {"initial_state": aligned(P, HV, V, K + 1, offset=4)[..., :K]}),
    (
        "KDA-STATE-ALIGNMENT",
        lambda c: {"initial_state": strided(aligned(P, HV, V, K, offset=4), 16, 384, 32, 4)},
    ),
    ("KDA-STATE-STRIDES", lambda c: {"initial_state": strided(c.initial_state, 16, 384, 32, 4)}),
    ("KDA-PACKED-AB-SHAPE", lambda c: {"a": numbers(B, 9)}),
    ("KDA-PACKED-AB-SHAPE", lambda c: {"b": numbers(B, 9)}),
    ("KDA-PACKED-GATE-NUMEL", lambda c: {"A_log": numbers(9)}),
    ("KDA-PACKED-GATE-NUMEL", lambda c: {"dt_bias": numbers(9)}),
    ("KDA-PACKED-OUT-SHAPE", lambda c: {"out": numbers(9)}),
    ("KDA-PACKED-QKV-WIDTH", lambda c: {"mixed_qkv": numbers(B, 9)}),
    ("KDA-PACKED-Q-WIDTH", lambda c: {"mixed_qkv": numbers(B, WIDTH + 2)}),
    ("KDA-PACKED-HEADS", lambda c: {"mixed_qkv": numbers(B, 2 * 3 * K + HV * V)}),
    ("KDA-VALUE-SCALE", lambda c: {"scale": "1"}),
    ("KDA-VALUE-LOWER-BOUND", lambda c: {"lower_bound": 1.0}),
    ("KDA-VALUE-A-LOG-MISSING", lambda c: {"A_log": None}),
    ("KDA-VALUE-FLAG", lambda c: {"use_qk_l2norm_in_kernel": None}),
    ("KDA-VALUE-FLAG", lambda c: {"allow_neg_eigval": np.array([True])}),
    ("KDA-VALUE-NULL-INDEX", lambda c: {"null_index": 7}),
    ("KDA-VALUE-VALIDATE", lambda c: {"validate": "fully"}),
    ("KDA-ARRAY-READ-ONLY", lambda c: {"initial_state": frozen(c.initial_state)}),
    (
        "KDA-ARRAY-READ-ONLY",
        lambda c: {"out": frozen(c.initial_state.ravel()[: c.out.size].reshape(c.out.shape))},
    ),
    ("KDA-ARRAY-OVERLAP", lambda c: {"out": c.initial_state.ravel()[: c.out.size].reshape(c.out.shape)}),
    ("KDA-VALUE-SLOT-RANGE", lambda c: {"ssm_state_indices": np.array([1, 1, 99]), "validate": "full"}),
    ("KDA-VALUE-SLOT-DUPLICATE", lambda c: {"ssm_state_indices": np.array([1, 1, -1]), "validate": "full"}),
]
"""Every check of the packed decodes in its order, and operands that violate it. Where one operand stands in several
steps, it violates the later rules too as far as it can; :func:`violating` adds those of all the other operands."""


def violating(first: int, c: Operands) -> dict[str, Any]:
    """Operands that violate the rule of a step and of every later one that leaves them free to."""
    operands = vars(c).copy()
    for _, violate in reversed(STEPS[first:]):
        operands |= violate(c)
    return operands


@pytest.mark.parametrize("step", range(len(STEPS)), ids=lambda step: f"{step}-{STEPS[step][0]}")
def test_the_earliest_rule_that_is_violated_is_told(step: int) -> None:
    c = Operands()
    with pytest.raises(KdaError) as caught:
        c.kda(**violating(step, c))
    assert caught.value.code == STEPS[step][0]


def test_the_order_is_that_of_the_specification() -> None:
    """operations.md section 1; what it leaves open (dtypes, strides, options, overlaps) stands in "
    "between."""
    specified = [
        *(
            "KDA-PACKED-QKV-RANK",
            "KDA-PACKED-QKV-CONTIGUOUS",
            "KDA-PACKED-AB-RANK",
            "KDA-PACKED-AB-CONTIGUOUS",
        ),
        *("KDA-PACKED-GATE-RANK", "KDA-PACKED-GATE-CONTIGUOUS", "KDA-PACKED-INDICES-RANK"),
        *(
            "KDA-PACKED-OUT-CONTIGUOUS",
            "KDA-ARRAY-HOST-ON-DEVICE",
            "KDA-PACKED-BATCH",
            "KDA-PACKED-INDICES-SHAPE",
        ),
        *("KDA-STATE-RANK", "KDA-STATE-CONTIGUOUS", "KDA-STATE-STRIDES", "KDA-STATE-ALIGNMENT"),
        *("KDA-PACKED-AB-SHAPE", "KDA-PACKED-GATE-NUMEL", "KDA-PACKED-OUT-SHAPE"),
        *("KDA-PACKED-QKV-WIDTH", "KDA-PACKED-Q-WIDTH", "KDA-PACKED-HEADS"),
    ]
    tested = list(dict.fromkeys(code for code, _ in STEPS))
    assert [code for code in tested if code in specified] == specified


def test_check_state_asks_device_dtype_rank_shape_strides_alignment_in_this_order() -> None:
    wide = aligned(P, HV, V, 2 * K, offset=4)
    steps = [
        ("KDA-STATE-DEVICE", frozen(numbers(3, dtype=np.float64)), 0),
        ("KDA-STATE-DTYPE", frozen(numbers(3, dtype=np.float64)), -1),
        ("KDA-STATE-RANK", frozen(numbers(3)), -1),
        ("KDA-STATE-LAYOUT", frozen(wide[:, :H, :, ::2]), -1),  # the number of heads
        ("KDA-STATE-CONTIGUOUS", frozen(wide[::-1, :, :, ::2]), -1),
        ("KDA-ARRAY-NEGATIVE-STRIDE", frozen(wide[::-1, :, :, :K]), -1),
        ("KDA-STATE-STRIDES", frozen(wide[..., :K]), -1),
        ("KDA-STATE-ALIGNMENT", frozen(aligned(P, HV, V, K, offset=4)), -1),
        ("KDA-ARRAY-READ-ONLY", frozen(aligned(P, HV, V, K)), -1),
    ]
    for code, array, device in steps:
        with pytest.raises(KdaError) as caught:
            check_state(array, HV, device=device)
        assert caught.value.code == code
