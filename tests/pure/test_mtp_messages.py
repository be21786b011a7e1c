# SPDX-License-Identifier: Apache-2.0
"""Every message of verify and commit as a user meets it, whole, and the order of the checks; no GPU is needed.

Messages are compared literally: a change of wording shows here, where somebody can read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kda_cupy
from kda_cupy import KdaError, bind, guard
from kda_cupy.catalogue import CATALOGUE
from kda_cupy.error_pages import search
from kda_cupy.ops import mtp_params
from kda_cupy.raisers import raised_by
from tests.fake_cupy import on_gpu

N, t, H, HV, P, R, D = 2, 3, 1, 2, 4, 4, 128
T = N * t
RINGS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
HISTORIES = ("cs_q", "cs_k", "cs_v")
WINDOWS = ("intermediate_conv_q", "intermediate_conv_k", "intermediate_conv_v")
BFLOAT16 = ml_dtypes.bfloat16


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def aligned(*shape: int, offset: int = 0) -> Any:
    """A float32 array ``offset`` bytes behind a 16-byte boundary."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 32, np.uint8)
    start = -raw.ctypes.data % 16 + offset
    return raw[start : start + size].view(np.float32).reshape(shape)


def strided(array: Any, *strides: int) -> Any:
    return np.lib.stride_tricks.as_strided(array, strides=strides)


def frozen(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


class Operands:
    """Operands of a verify with rings and an output norm that is right."""

    def __init__(self) -> None:
        self.x_q, self.x_k = numbers(1, T, H, D), numbers(1, T, H, D)
        self.x_v, self.g = numbers(1, T, HV, D), numbers(1, T, HV, D)
        self.beta, self.A_log, self.dt_bias = numbers(1, T, HV), numbers(HV), numbers(HV * D)
        for letter, heads in (("q", H), ("k", H), ("v", HV)):
            setattr(self, f"w_{letter}", numbers(heads * D, 4))
            setattr(self, f"conv_bias_{letter}", numbers(heads * D))
            setattr(self, f"cs_{letter}", numbers(P, heads * D, 3))
            setattr(self, f"intermediate_conv_{letter}", numbers(R, t, heads * D, 3))
        self.recurrent_state = aligned(P, HV, D, D)
        self.ssm_state_indices = np.array([3, 1], np.int32)
        self.cu_seqlens = np.array([0, 3, 6], np.int32)
        self.intermediate_state_indices = np.array([2, 0], np.int32)
        self.replayssm_rawv, self.replayssm_g = numbers(P, HV, t, D), numbers(P, HV, t, D)
        self.replayssm_rawk, self.replayssm_beta = numbers(P, H, t, D), numbers(P, HV, t)
        self.onorm_gate, self.onorm_weight, self.onorm_eps = numbers(1, T, HV, D), numbers(D), 1e-5
        self.out = numbers(1, T, HV, D)

    def verify(self, **changes: Any) -> None:
        self.call(kda_cupy.kda_decode_mtp, vars(self) | changes)

    def snapshots(self, **changes: Any) -> None:
        without_rings = dict.fromkeys(RINGS) | {"intermediate_ssm": aligned(R, t, HV, D, D)}
        self.call(kda_cupy.kda_decode_mtp, vars(self) | without_rings | changes)

    def commit(self, **changes: Any) -> None:
        names = ("recurrent_state", "ssm_state_indices", "intermediate_state_indices")
        mine = {name: getattr(self, name) for name in (*names, *RINGS, *HISTORIES, *WINDOWS)}
        self.call(kda_cupy.kda_commit, mine | {"accept_lens": np.array([3, 1])} | changes)

    def call(self, operation: Any, operands: dict[str, Any]) -> None:
        """Call and bind: both say the same, and neither changes a bit."""
        arrays = [
            value for value in (*vars(self).values(), *operands.values()) if isinstance(value, np.ndarray)
        ]
        before = [array.tobytes() for array in arrays]
        try:
            operation(**operands)
        except KdaError as error:
            with pytest.raises(KdaError) as bound:
                bind(operation, **operands)
            assert (type(error), str(error)) == (type(bound.value), str(bound.value))
            assert [array.tobytes() for array in arrays] == before, "a refusal changes nothing"
            raise


@dataclass
class Case:
    """One way to meet one message."""

    code: str
    operand: str
    by: str
    meet: Callable[[Operands], Any]
    message: str


def case_of(by: str, method: str) -> Callable[..., Case]:
    """Cases of calls with some operands or options changed."""

    def make(code: str, operand: str, message: str, **changes: Callable[[Operands], Any]) -> Case:
        def meet(c: Operands) -> None:
            getattr(c, method)(**{name: change(c) for name, change in changes.items()})

        return Case(code, operand, by, meet, message)

    return make


verify = case_of("kda_decode_mtp", "verify")
snapshots = case_of("kda_decode_mtp", "snapshots")
commit = case_of("kda_commit", "commit")


CASES = [
    verify(
        "KDA-ARRAY-KIND",
        "cu_seqlens",
        "`cu_seqlens` must be an array of NumPy, CuPy or another library with DLPack. Got None. "
        "Make an array of it first, with numpy.asarray or cupy.asarray.",
        cu_seqlens=lambda c: None,
    ),
    verify(
        "KDA-ARRAY-KIND",
        "w_q",
        "`w_q` must be an array of NumPy, CuPy or another library with DLPack. Got list. Make an "
        "array of it first, with numpy.asarray or cupy.asarray.",
        w_q=lambda c: [1, 2],
    ),
    verify(
        "KDA-VERIFY-TREE",
        "parents",
        "Tree drafts are not supported: `parents` must be None. Got `parents`. Verify the drafts "
        "of a request as one chain, each token after the one before it.",
        parents=lambda c: np.array([-1, 0, 0]),
    ),
    verify(
        "KDA-VERIFY-TREE",
        "retrieve_next_token",
        "Tree drafts are not supported: `retrieve_next_token` must be None. Got "
        "`retrieve_next_token`. Verify the drafts of a request as one chain, each token after the "
        "one before it.",
        retrieve_next_token=lambda c: np.zeros(3),
    ),
    verify(
        "KDA-VERIFY-QK-SHAPE",
        "x_q",
        "expected q/k shape (1, T, H, 128) for `x_q` and `x_k`, the same for both. Got `x_q` of "
        "shape [6, 1, 128]. Pass raw projections of all tokens, packed along T, with a leading "
        "axis of 1.",
        x_q=lambda c: c.x_q[0],
    ),
    verify(
        "KDA-VERIFY-QK-SHAPE",
        "x_q",
        "expected q/k shape (1, T, H, 128) for `x_q` and `x_k`, the same for both. Got `x_q` of "
        "shape [1, 6, 1, 64]. Pass raw projections of all tokens, packed along T, with a leading "
        "axis of 1.",
        x_q=lambda c: numbers(1, T, H, 64),
    ),
    verify(
        "KDA-VERIFY-QK-SHAPE",
        "x_k",
        "expected q/k shape (1, T, H, 128) for `x_q` and `x_k`, the same for both. Got `x_k` of "
        "shape [1, 4, 1, 128]. Pass raw projections of all tokens, packed along T, with a leading "
        "axis of 1.",
        x_k=lambda c: c.x_k[:, :4],
    ),
    verify(
        "KDA-VERIFY-VG-SHAPE",
        "x_v",
        "expected v/g shape (1, T=6, HV, 128) with HV a multiple of H. Got `x_v` of shape [1, 7, "
        "2, 128] and `g` of shape [1, 6, 2, 128]. Pass values and raw gates of every value head "
        "and token of `x_q`.",
        x_v=lambda c: numbers(1, T + 1, HV, D),
    ),
    verify(
        "KDA-VERIFY-VG-SHAPE",
        "g",
        "expected v/g shape (1, T=6, HV, 128) with HV a multiple of H. Got `x_v` of shape [1, 6, "
        "2, 128] and `g` of shape [1, 6, 2]. Pass values and raw gates of every value head and "
        "token of `x_q`.",
        g=lambda c: numbers(1, T, HV),
    ),
    verify(
        "KDA-VERIFY-BETA-SHAPE",
        "beta",
        "expected beta shape (1, T=6, HV=2). Got [1, 6, 1]. Pass one raw logit per token and value head.",
        beta=lambda c: numbers(1, T, H),
    ),
    verify(
        "KDA-VERIFY-CU-SEQLENS",
        "cu_seqlens",
        "`cu_seqlens` must be a contiguous vector [N+1]. Got shape [1, 3]. Pass where each "
        "request's tokens begin, and where the last one's end: np.cumsum with a 0 in front.",
        cu_seqlens=lambda c: np.zeros((1, 3), np.int32),
    ),
    verify(
        "KDA-VERIFY-CU-SEQLENS",
        "cu_seqlens",
        "`cu_seqlens` must be a contiguous vector [N+1]. Got element strides [2] for shape [3]. "
        "Pass where each request's tokens begin, and where the last one's end: np.cumsum with a 0 "
        "in front.",
        cu_seqlens=lambda c: np.zeros((3, 2), np.int32)[:, 0],
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "cu_seqlens",
        "`cu_seqlens` must be int32 or int64. Got uint32. Convert it with astype before the call: "
        "nothing is cast silently.",
        cu_seqlens=lambda c: np.zeros(3, np.uint32),
    ),
    verify(
        "KDA-VERIFY-TOKENS",
        "cu_seqlens",
        "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=6, N=4. "
        "Pass N times as many tokens as a request has, `cu_seqlens` being N + 1 long, or "
        "max_tokens_per_request for lengths that "
        "differ.",
        cu_seqlens=lambda c: np.arange(5),
    ),
    verify(
        "KDA-VERIFY-TOKENS",
        "cu_seqlens",
        "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=6, N=0. "
        "Pass N times as many tokens as a request has, `cu_seqlens` being N + 1 long, or "
        "max_tokens_per_request for lengths that "
        "differ.",
        cu_seqlens=lambda c: np.zeros(1, np.int32),
    ),
    verify(
        "KDA-VERIFY-TOKENS",
        "cu_seqlens",
        "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=6, N=0. "
        "Pass N times as many tokens as a request has, `cu_seqlens` being N + 1 long, or "
        "max_tokens_per_request for lengths that "
        "differ.",
        cu_seqlens=lambda c: np.zeros(1, np.int32),
        max_tokens_per_request=lambda c: 8,
    ),
    verify(
        "KDA-VERIFY-MAX-TOKENS",
        "cu_seqlens",
        "A request may have 1 to 16 tokens, the bonus token included. Got 18 tokens. Propose "
        "fewer drafts, or pass max_tokens_per_request as a whole number from 1 to 16.",
        **{
            name: (lambda c, name=name: np.repeat(getattr(c, name), 6, axis=1))
            for name in ("x_q", "x_k", "x_v", "g", "beta")
        },
    ),
    verify(
        "KDA-VERIFY-MAX-TOKENS",
        "max_tokens_per_request",
        "A request may have 1 to 16 tokens, the bonus token included. Got 17 tokens. Propose "
        "fewer drafts, or pass max_tokens_per_request as a whole number from 1 to 16.",
        max_tokens_per_request=lambda c: 17,
    ),
    verify(
        "KDA-VERIFY-MAX-TOKENS",
        "max_tokens_per_request",
        "A request may have 1 to 16 tokens, the bonus token included. Got 0 tokens. Propose fewer "
        "drafts, or pass max_tokens_per_request as a whole number from 1 to 16.",
        max_tokens_per_request=lambda c: 0,
    ),
    verify(
        "KDA-VERIFY-MAX-TOKENS",
        "max_tokens_per_request",
        "A request may have 1 to 16 tokens, the bonus token included. Got 4.0. Propose fewer "
        "drafts, or pass max_tokens_per_request as a whole number from 1 to 16.",
        max_tokens_per_request=lambda c: 4.0,
    ),
    verify(
        "KDA-VERIFY-A-LOG-NUMEL",
        "A_log",
        "Unexpected A_log shape: (8,); expected numel=2. Got 8 elements. Pass the parameters of "
        "the value heads that are on this GPU: HV of `A_log`, HV*128 of `dt_bias`.",
        A_log=lambda c: numbers(8),
    ),
    verify(
        "KDA-VERIFY-A-LOG-NUMEL",
        "dt_bias",
        "Unexpected dt_bias shape: (2,); expected numel=256. Got 2 elements. Pass the parameters "
        "of the value heads that are on this GPU: HV of `A_log`, HV*128 of `dt_bias`.",
        dt_bias=lambda c: numbers(HV),
    ),
    verify(
        "KDA-VERIFY-A-LOG-NUMEL",
        "dt_bias",
        "Unexpected dt_bias shape: (128, 2); expected numel=256. Got 256 elements. Pass the "
        "parameters of the value heads that are on this GPU: HV of `A_log`, HV*128 of `dt_bias`.",
        dt_bias=lambda c: numbers(D, HV),
    ),
    verify(
        "KDA-STATE-LAYOUT",
        "recurrent_state",
        "expected recurrent state layout [pool, H, V=128, K=128] with H=2 value heads for "
        "`recurrent_state`. Got [8, 12, 64, 64]. Pass the pool as [pool, HV, V, K]: one head per "
        "value head, rows V (values), columns K (keys).",
        recurrent_state=lambda c: numbers(8, 12, 64, 64),
    ),
    verify(
        "KDA-STATE-LAYOUT",
        "recurrent_state",
        "expected recurrent state layout [pool, H, V=128, K=128] with H=2 value heads for "
        "`recurrent_state`. Got [4, 1, 128, 128]. Pass the pool as [pool, HV, V, K]: one head per "
        "value head, rows V (values), columns K (keys).",
        recurrent_state=lambda c: c.recurrent_state[:, :1],
    ),
    verify(
        "KDA-STATE-LAYOUT",
        "recurrent_state",
        "expected recurrent state layout [pool, H, V=128, K=128] with H=2 value heads for "
        "`recurrent_state`. Got [2, 128, 128]. Pass the pool as [pool, HV, V, K]: one head per "
        "value head, rows V (values), columns K (keys).",
        recurrent_state=lambda c: c.recurrent_state[0],
    ),
    verify(
        "KDA-VERIFY-STATE-MEMORY",
        "recurrent_state",
        "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and "
        "16-byte-aligned slot offsets. Got float16. Pass `recurrent_state` as kda_cupy.StatePool "
        "makes it.",
        recurrent_state=lambda c: c.recurrent_state.astype(np.float16),
    ),
    verify(
        "KDA-VERIFY-STATE-MEMORY",
        "recurrent_state",
        "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and "
        "16-byte-aligned slot offsets. Got element strides [32768, 16384, 1, 128] for shape [4, "
        "2, 128, 128]. Pass `recurrent_state` as kda_cupy.StatePool makes it.",
        recurrent_state=lambda c: c.recurrent_state.swapaxes(2, 3),
    ),
    verify(
        "KDA-VERIFY-STATE-MEMORY",
        "recurrent_state",
        "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and "
        "16-byte-aligned slot offsets. Got an address 4 bytes past a 16-byte boundary. Pass "
        "`recurrent_state` as kda_cupy.StatePool makes it.",
        recurrent_state=lambda c: aligned(P, HV, D, D, offset=4),
    ),
    verify(
        "KDA-VERIFY-CONV-WEIGHT",
        "w_q",
        "The convolution's `w_q` must be [128, 4]. Got shape [128, 1, 4]. Pass four taps per "
        "channel as [channels, 4], and biases for q, k and v or for none of them.",
        w_q=lambda c: numbers(H * D, 1, 4),
    ),
    verify(
        "KDA-VERIFY-CONV-WEIGHT",
        "w_v",
        "The convolution's `w_v` must be [256, 4]. Got shape [128, 4]. Pass four taps per channel "
        "as [channels, 4], and biases for q, k and v or for none of them.",
        w_v=lambda c: numbers(H * D, 4),
    ),
    verify(
        "KDA-VERIFY-CONV-WEIGHT",
        "conv_bias_v",
        "The convolution's `conv_bias_v` must be [256]. Got shape [128]. Pass four taps per "
        "channel as [channels, 4], and biases for q, k and v or for none of them.",
        conv_bias_v=lambda c: numbers(H * D),
    ),
    verify(
        "KDA-VERIFY-CONV-WEIGHT",
        "conv_bias_k",
        "The convolution's `conv_bias_k` must be with the other two, or none. Got `conv_bias_q` "
        "without `conv_bias_k`. Pass four taps per channel as [channels, 4], and biases for q, k "
        "and v or for none of them.",
        conv_bias_k=lambda c: None,
    ),
    verify(
        "KDA-VERIFY-CONV-HISTORY",
        "cs_k",
        "The conv history `cs_k` must be [P=4, 128, 3]. Got [4, 3, 128]. Pass the last three raw "
        "inputs of every slot and channel, oldest first.",
        cs_k=lambda c: numbers(P, 3, H * D),
    ),
    verify(
        "KDA-VERIFY-CONV-HISTORY",
        "cs_v",
        "The conv history `cs_v` must be [P=4, 256, 3]. Got [5, 256, 3]. Pass the last three raw "
        "inputs of every slot and channel, oldest first.",
        cs_v=lambda c: numbers(P + 1, HV * D, 3),
    ),
    verify(
        "KDA-VERIFY-RINGS-INCOMPLETE",
        "replayssm_g",
        "ReplaySSM requires all four replayssm_* rings. Got `replayssm_rawv`, `replayssm_rawk`, "
        "`replayssm_beta` without `replayssm_g`. Pass `replayssm_g` too, or none of them.",
        replayssm_g=lambda c: None,
    ),
    verify(
        "KDA-VERIFY-ROLLBACK",
        "intermediate_ssm",
        "Either `intermediate_ssm` or the replayssm_* rings, which `ring_indices` is for, must be "
        "given. Got both. Pass snapshots or rings, and None for the other.",
        intermediate_ssm=lambda c: numbers(R, t, HV, D, D),
    ),
    verify(
        "KDA-VERIFY-ROLLBACK",
        "intermediate_ssm",
        "Either `intermediate_ssm` or the replayssm_* rings, which `ring_indices` is for, must be "
        "given. Got neither. Pass snapshots or rings, and None for the other.",
        **dict.fromkeys(RINGS, lambda c: None),
    ),
    snapshots(
        "KDA-VERIFY-ROLLBACK",
        "ring_indices",
        "Either `intermediate_ssm` or the replayssm_* rings, which `ring_indices` is for, must be "
        "given. Got `ring_indices` without rings. Pass snapshots or rings, and None for the "
        "other.",
        ring_indices=lambda c: np.arange(N),
    ),
    verify(
        "KDA-VERIFY-RING-LAYOUT",
        "replayssm_rawv",
        "expected ReplaySSM ring layouts [slots, H=2, L>=3, 128] / [slots, H, L]. Got "
        "`replayssm_rawv` of shape [4, 2, 2, 128]. Allocate [slots, HV, L, 128] for rawv and g, "
        "[slots, H, L, 128] for rawk and [slots, HV, L] for beta.",
        replayssm_rawv=lambda c: numbers(P, HV, 2, D),
    ),
    verify(
        "KDA-VERIFY-RING-LAYOUT",
        "replayssm_rawk",
        "expected ReplaySSM ring layouts [slots, H=2, L>=3, 128] / [slots, H, L]. Got "
        "`replayssm_rawk` of shape [4, 2, 3, 128]. Allocate [slots, HV, L, 128] for rawv and g, "
        "[slots, H, L, 128] for rawk and [slots, HV, L] for beta.",
        replayssm_rawk=lambda c: numbers(P, HV, t, D),
    ),
    verify(
        "KDA-VERIFY-RING-LAYOUT",
        "replayssm_g",
        "expected ReplaySSM ring layouts [slots, H=2, L>=3, 128] / [slots, H, L]. Got "
        "`replayssm_g` with element strides [1536, 768, 256, 1] for shape [4, 2, 3, 128]. "
        "Allocate [slots, HV, L, 128] for rawv and g, [slots, H, L, 128] for rawk and [slots, HV, "
        "L] for beta.",
        replayssm_g=lambda c: numbers(P, HV, 2 * t, D)[:, :, ::2],
    ),
    verify(
        "KDA-VERIFY-RING-LAYOUT",
        "replayssm_beta",
        "expected ReplaySSM ring layouts [slots, H=2, L>=3, 128] / [slots, H, L]. Got "
        "`replayssm_beta` of shape [4, 2]. Allocate [slots, HV, L, 128] for rawv and g, [slots, "
        "H, L, 128] for rawk and [slots, HV, L] for beta.",
        replayssm_beta=lambda c: numbers(P, HV),
    ),
    verify(
        "KDA-VERIFY-RING-LAYOUT",
        "replayssm_rawv",
        "expected ReplaySSM ring layouts [slots, H=2, L>=3, 128] / [slots, H, L]. Got "
        "`replayssm_rawv` with 3 ring rows "
        "for a pool of P=4 slots, and no `ring_indices`. Allocate [slots, HV, L, 128] for rawv "
        "and g, [slots, H, L, 128] for rawk and [slots, HV, L] for beta.",
        **{name: (lambda c, name=name: getattr(c, name)[:3]) for name in RINGS},
    ),
    verify(
        "KDA-VERIFY-RING-DTYPE",
        "replayssm_rawk",
        "expected ReplaySSM ring dtypes rawv/rawk=fp32, g/beta=fp32. Got `replayssm_rawk` in "
        "bfloat16. Allocate rawv and rawk in the dtype of the activations, g and beta in float32.",
        replayssm_rawk=lambda c: c.replayssm_rawk.astype(BFLOAT16),
    ),
    verify(
        "KDA-VERIFY-RING-DTYPE",
        "replayssm_beta",
        "expected ReplaySSM ring dtypes rawv/rawk=fp32, g/beta=fp32. Got `replayssm_beta` in "
        "float16. Allocate rawv and rawk in the dtype of the activations, g and beta in float32.",
        replayssm_beta=lambda c: c.replayssm_beta.astype(np.float16),
    ),
    snapshots(
        "KDA-VERIFY-SNAPSHOT-LAYOUT",
        "intermediate_ssm",
        "expected intermediate SSM layout [scratch, >=3, H, V=128, K=128], float32 and "
        "16-byte-aligned. Got shape [4, 2, 2, 128, 128]. Allocate `intermediate_ssm` with one "
        "state per scratch row and token, dense in the last three axes.",
        intermediate_ssm=lambda c: numbers(R, 2, HV, D, D),
    ),
    snapshots(
        "KDA-VERIFY-SNAPSHOT-LAYOUT",
        "intermediate_ssm",
        "expected intermediate SSM layout [scratch, >=3, H, V=128, K=128], float32 and "
        "16-byte-aligned. Got dtype float16. Allocate `intermediate_ssm` with one state per "
        "scratch row and token, dense in the last three axes.",
        intermediate_ssm=lambda c: numbers(R, t, HV, D, D, dtype=np.float16),
    ),
    snapshots(
        "KDA-VERIFY-SNAPSHOT-LAYOUT",
        "intermediate_ssm",
        "expected intermediate SSM layout [scratch, >=3, H, V=128, K=128], float32 and "
        "16-byte-aligned. Got element strides [196608, 65536, 32768, 256, 2] for shape [4, 3, 2, "
        "128, 128]. Allocate `intermediate_ssm` with one state per scratch row and token, dense in "
        "the last three axes.",
        intermediate_ssm=lambda c: numbers(R, t, HV, D, 2 * D)[..., ::2],
    ),
    snapshots(
        "KDA-VERIFY-SNAPSHOT-LAYOUT",
        "intermediate_ssm",
        "expected intermediate SSM layout [scratch, >=3, H, V=128, K=128], float32 and "
        "16-byte-aligned. Got an address 8 bytes past a 16-byte boundary. Allocate "
        "`intermediate_ssm` with one state per scratch row and token, dense in the last three axes.",
        intermediate_ssm=lambda c: aligned(R, t, HV, D, D, offset=8),
    ),
    verify(
        "KDA-VERIFY-CONV-WINDOW",
        "intermediate_conv_q",
        "The conv windows `intermediate_conv_q` must be [rows, >=3, 128, 3]. Got [4, 2, 128, 3]. "
        "Allocate one window of three inputs per scratch row, token and channel.",
        intermediate_conv_q=lambda c: numbers(R, 2, H * D, 3),
    ),
    verify(
        "KDA-VERIFY-CONV-WINDOW",
        "intermediate_conv_v",
        "The conv windows `intermediate_conv_v` must be [rows, >=3, 256, 3]. Got [4, 3, 128, 3]. "
        "Allocate one window of three inputs per scratch row, token and channel.",
        intermediate_conv_v=lambda c: numbers(R, t, H * D, 3),
    ),
    verify(
        "KDA-VERIFY-SCRATCH-ROWS",
        "intermediate_conv_k",
        "Snapshots and conv windows must have the same number of scratch rows. Got 4 in "
        "`intermediate_conv_q` and 5 in `intermediate_conv_k`. Allocate `intermediate_conv_k` "
        "with as many rows as the others.",
        intermediate_conv_k=lambda c: numbers(R + 1, t, H * D, 3),
    ),
    verify(
        "KDA-VERIFY-INDICES-SHAPE",
        "ssm_state_indices",
        "`ssm_state_indices` must have one number per request, shape [N=2]. Got [3]. Slice it to "
        "the requests of this launch, or pad the launch with requests of slot -1.",
        ssm_state_indices=lambda c: np.arange(N + 1),
    ),
    verify(
        "KDA-VERIFY-INDICES-SHAPE",
        "intermediate_state_indices",
        "`intermediate_state_indices` must have one number per request, shape [N=2]. Got [2, 1]. "
        "Slice it to the requests of this launch, or pad the launch with requests of slot -1.",
        intermediate_state_indices=lambda c: np.zeros((N, 1), np.int32),
    ),
    verify(
        "KDA-VERIFY-INDICES-SHAPE",
        "ring_indices",
        "`ring_indices` must have one number per request, shape [N=2]. Got [6]. Slice it to the "
        "requests of this launch, or pad the launch with requests of slot -1.",
        ring_indices=lambda c: np.arange(T),
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "ssm_state_indices",
        "`ssm_state_indices` must be int32 or int64. Got int16. Convert it with astype before the "
        "call: nothing is cast silently.",
        ssm_state_indices=lambda c: np.zeros(N, np.int16),
    ),
    verify(
        "KDA-VERIFY-ONORM-INCOMPLETE",
        "onorm_gate",
        "fused output norm requires onorm_gate, onorm_weight, and onorm_eps. Got no `onorm_gate`. "
        "Pass `onorm_gate` too, or none of the three.",
        onorm_gate=lambda c: None,
    ),
    verify(
        "KDA-VERIFY-ONORM-INCOMPLETE",
        "onorm_eps",
        "fused output norm requires onorm_gate, onorm_weight, and onorm_eps. Got no `onorm_eps`. "
        "Pass `onorm_eps` too, or none of the three.",
        onorm_eps=lambda c: None,
    ),
    verify(
        "KDA-VERIFY-ONORM-GATE-SHAPE",
        "onorm_gate",
        "expected output-norm gate shape (1, T=6, HV=2, 128). Got [6, 2, 128]. Pass the raw gate "
        "of every token and value head as `onorm_gate`.",
        onorm_gate=lambda c: c.onorm_gate[0],
    ),
    verify(
        "KDA-VERIFY-ONORM-WEIGHT-SHAPE",
        "onorm_weight",
        "expected output-norm weight shape (128,). Got [2, 128]. Pass the weight of the norm over "
        "a head as `onorm_weight`, the same for all heads.",
        onorm_weight=lambda c: numbers(HV, D),
    ),
    verify(
        "KDA-VERIFY-ONORM-DTYPE",
        "onorm_gate",
        "expected output-norm gate=fp32 and weight=fp32 (or bfloat16). Got gate=bfloat16 and "
        "weight=float32. Pass `onorm_gate` in the dtype of the activations and `onorm_weight` in "
        "float32 or bfloat16.",
        onorm_gate=lambda c: c.onorm_gate.astype(BFLOAT16),
    ),
    verify(
        "KDA-VERIFY-ONORM-DTYPE",
        "onorm_weight",
        "expected output-norm gate=fp32 and weight=fp32 (or bfloat16). Got gate=float32 and "
        "weight=float16. Pass `onorm_gate` in the dtype of the activations and `onorm_weight` in "
        "float32 or bfloat16.",
        onorm_weight=lambda c: c.onorm_weight.astype(np.float16),
    ),
    verify(
        "KDA-VALUE-EPS",
        "onorm_eps",
        "`onorm_eps` must be a finite number of at least 0 on the host. Got -1e-06. Pass the "
        "model's rms_norm_eps as a Python float.",
        onorm_eps=lambda c: -1e-6,
    ),
    verify(
        "KDA-VALUE-EPS",
        "onorm_eps",
        "`onorm_eps` must be a finite number of at least 0 on the host. Got '1e-6' of type str. "
        "Pass the model's rms_norm_eps as a Python float.",
        onorm_eps=lambda c: "1e-6",
    ),
    verify(
        "KDA-VERIFY-OUT-SHAPE",
        "out",
        "`out` of packed tokens must have shape (1, T=6, HV=2, 128). Got [1, 6, 1, 128]. Allocate it "
        "like `x_v`, or leave it out.",
        out=lambda c: numbers(1, T, H, D),
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "out",
        "`out` must be float32. Got float16. Convert it with astype before the call: nothing is "
        "cast silently.",
        out=lambda c: c.out.astype(np.float16),
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "cs_q",
        "`cs_q` must be float32. Got bfloat16. Convert it with astype before the call: nothing is "
        "cast silently.",
        cs_q=lambda c: c.cs_q.astype(BFLOAT16),
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "intermediate_conv_v",
        "`intermediate_conv_v` must be float32. Got float16. Convert it with astype before the "
        "call: nothing is cast silently.",
        intermediate_conv_v=lambda c: c.intermediate_conv_v.astype(np.float16),
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "w_k",
        "`w_k` must be float32. Got bfloat16. Convert it with astype before the call: nothing is "
        "cast silently.",
        w_k=lambda c: c.w_k.astype(BFLOAT16),
    ),
    verify(
        "KDA-ARRAY-DTYPE",
        "g",
        "`g` must be float32. Got float16. Convert it with astype before the call: nothing is cast silently.",
        g=lambda c: c.g.astype(np.float16),
    ),
    verify(
        "KDA-VERIFY-CONTIGUOUS",
        "x_v",
        "`x_v` must be dense within a token (or a channel). Got element strides [1536, 128, 768, "
        "1] for shape [1, 6, 2, 128]. Slice columns of a projection as you like, but copy what is "
        "transposed or sliced with a step.",
        x_v=lambda c: numbers(1, HV, T, D).swapaxes(1, 2),
    ),
    verify(
        "KDA-VERIFY-CONTIGUOUS",
        "w_q",
        "`w_q` must be dense within a token (or a channel). Got element strides [1, 128] for "
        "shape [128, 4]. Slice columns of a projection as you like, but copy what is transposed "
        "or sliced with a step.",
        w_q=lambda c: numbers(4, H * D).T,
    ),
    verify(
        "KDA-VERIFY-CONTIGUOUS",
        "out",
        "`out` must be dense within a token (or a channel). Got element strides [3072, 512, 256, "
        "2] for shape [1, 6, 2, 128]. Slice columns of a projection as you like, but copy what is "
        "transposed or sliced with a step.",
        out=lambda c: numbers(1, T, HV, 2 * D)[..., ::2],
    ),
    verify(
        "KDA-PACKED-GATE-CONTIGUOUS",
        "A_log",
        "`A_log`/`dt_bias` must be contiguous. Got `A_log` with element strides [2] for shape "
        "[2]. Copy it once when the weights are loaded: ascontiguousarray(A_log).",
        A_log=lambda c: numbers(2 * HV)[::2],
    ),
    verify(
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "beta",
        "`beta` must have strides of whole elements, none of them negative. Got element strides "
        "[12, -2, 1] for shape [1, 6, 2]. Copy the view: ascontiguousarray(beta).",
        beta=lambda c: c.beta[:, ::-1],
    ),
    verify(
        "KDA-ARRAY-ALIGNMENT",
        "beta",
        "`beta` must begin at a multiple of its element size. Got an address 1 byte past a "
        "multiple of 4. Copy it, or choose an offset that is a multiple of the element size.",
        beta=lambda c: aligned(1, T, HV, offset=1),
    ),
    verify(
        "KDA-VALUE-SCALE",
        "scale",
        "`scale` must be a finite number on the host, or None. Got inf. Pass a Python float, or "
        "None for K**-0.5.",
        scale=lambda c: np.inf,
    ),
    verify(
        "KDA-VALUE-LOWER-BOUND",
        "lower_bound",
        "`lower_bound` must be a finite number below 0, or None. Got 5.0. Pass the model's own "
        "bound, such as -5.0, or None for the softplus gate.",
        lower_bound=lambda c: 5.0,
    ),
    verify(
        "KDA-VALUE-A-LOG-MISSING",
        "A_log",
        "`A_log` may be None only with a `lower_bound`. Got A_log=None and lower_bound=None. Pass "
        "the layer's `A_log`, or the `lower_bound` that its gate has.",
        A_log=lambda c: None,
    ),
    verify(
        "KDA-VALUE-FLAG",
        "allow_neg_eigval",
        "`allow_neg_eigval` must be True or False. Got 2 of type int. Pass a bool: bool(value), "
        "or value.item() for an array of one.",
        allow_neg_eigval=lambda c: 2,
    ),
    verify(
        "KDA-VALUE-NULL-INDEX",
        "null_index",
        "`null_index` must be -1 or 0. Got 3. Pass 0 if your engine reserves slot 0 for padding, "
        "else leave it out.",
        null_index=lambda c: 3,
    ),
    verify(
        "KDA-VALUE-VALIDATE",
        "validate",
        '`validate` must be "metadata" or "full". Got True. Pass "full" to have the slots read '
        "and checked first, else leave it out.",
        validate=lambda c: True,
    ),
    verify(
        "KDA-ARRAY-READ-ONLY",
        "replayssm_g",
        "`replayssm_g` is written in place and must be writable. Got read-only memory. Pass a "
        "writable copy, and keep the copy: the update is in it.",
        replayssm_g=lambda c: frozen(c.replayssm_g),
    ),
    verify(
        "KDA-ARRAY-FOLDED",
        "intermediate_conv_q",
        "`intermediate_conv_q` is written to and every element of it must have memory of its own. "
        "Got element strides [0, 768, 3, 1] for shape [4, 3, 128, 3]. Allocate it in the shape "
        "that is used.",
        intermediate_conv_q=lambda c: strided(c.intermediate_conv_q, 0, 3072, 12, 4),
    ),
    verify(
        "KDA-ARRAY-OVERLAP",
        "out",
        "`out` is written to and must not share memory with another operand. Got `out` and `x_v` "
        "with bytes in common. Give `out` memory of its own, apart from `x_v`.",
        out=lambda c: c.x_v,
    ),
    verify(
        "KDA-ARRAY-OVERLAP",
        "intermediate_conv_q",
        "`intermediate_conv_q` is written to and must not share memory with another operand. Got "
        "`intermediate_conv_q` and `intermediate_conv_k` with bytes in common. Give "
        "`intermediate_conv_q` memory of its own, apart from `intermediate_conv_k`.",
        intermediate_conv_k=lambda c: c.intermediate_conv_q,
    ),
    verify(
        "KDA-ARRAY-OVERLAP",
        "replayssm_g",
        "`replayssm_g` is written to and must not share memory with another operand. Got "
        "`replayssm_g` and `onorm_gate` with bytes in common. Give `replayssm_g` memory of its "
        "own, apart from `onorm_gate`.",
        onorm_gate=lambda c: c.replayssm_g.reshape(-1)[: T * HV * D].reshape(1, T, HV, D),
    ),
    verify(
        "KDA-ARRAY-HOST-ON-DEVICE",
        "x_q",
        "All inputs must be on the same device. Some are in host memory. Got `x_q` in host memory "
        "and `recurrent_state` on cuda:0. Copy `x_q` to the GPU with cupy.asarray, or pass NumPy "
        "arrays only.",
        recurrent_state=lambda c: on_gpu(c.recurrent_state),
    ),
    verify(
        "KDA-VALUE-LENGTH-RANGE",
        "cu_seqlens",
        "`cu_seqlens[0:2]` must hold a request of 0 to 3 tokens within T. Got a length of 5. "
        "Write the running sums of the lengths to `cu_seqlens`, from 0 to T at most, before the "
        "launch.",
        cu_seqlens=lambda c: np.array([0, 5, 6]),
        validate=lambda c: "full",
    ),
    verify(
        "KDA-VALUE-ROW-RANGE",
        "intermediate_state_indices",
        "`intermediate_state_indices[1]` must be a row from 0 up to, but not including, 4. Got "
        "row 4. Give every live request a row that the scratch arrays or the rings have.",
        intermediate_state_indices=lambda c: np.array([0, 4]),
        validate=lambda c: "full",
    ),
    verify(
        "KDA-VALUE-ROW-RANGE",
        "ring_indices",
        "`ring_indices[0]` must be a row from 0 up to, but not including, 4. Got row -1. Give "
        "every live request a row that the scratch arrays or the rings have.",
        ring_indices=lambda c: np.array([-1, 4]),
        validate=lambda c: "full",
    ),
    verify(
        "KDA-VALUE-SLOT-DUPLICATE",
        "ssm_state_indices",
        "`ssm_state_indices` must name a live slot once only. Got 2 in rows 0, 1. Give each "
        "sequence a slot of its own; only padding (-1) may repeat.",
        ssm_state_indices=lambda c: np.array([2, 2]),
        validate=lambda c: "full",
    ),
    commit(
        "KDA-ARRAY-KIND",
        "accept_lens",
        "`accept_lens` must be an array of NumPy, CuPy or another library with DLPack. Got None. "
        "Make an array of it first, with numpy.asarray or cupy.asarray.",
        accept_lens=lambda c: None,
    ),
    commit(
        "KDA-COMMIT-LAYERS",
        "intermediate_conv_q",
        "Either all arrays of a commit or none must have a layer axis in front: `recurrent_state` "
        "has none. Got `intermediate_conv_q` of shape [1, 4, 3, 128, 3]. Stack states, scratch "
        "and histories of the same layers, or commit one layer at a time.",
        intermediate_conv_q=lambda c: c.intermediate_conv_q[None],
    ),
    commit(
        "KDA-COMMIT-LAYERS",
        "replayssm_rawv",
        "Either all arrays of a commit or none must have a layer axis in front: [layers=1, ..]. "
        "Got `replayssm_rawv` of shape [4, 2, 3, 128]. Stack states, scratch and histories of the "
        "same layers, or commit one layer at a time.",
        recurrent_state=lambda c: c.recurrent_state[None],
    ),
    commit(
        "KDA-COMMIT-LAYERS",
        "recurrent_state",
        "Either all arrays of a commit or none must have a layer axis in front: [layers>=1, ..]. "
        "Got `recurrent_state` with 0 layers. Stack states, scratch and histories of the same "
        "layers, or commit one "
        "layer at a time.",
        recurrent_state=lambda c: c.recurrent_state[None][:0],
    ),
    commit(
        "KDA-STATE-LAYOUT",
        "recurrent_state",
        "expected recurrent state layout [pool, H, V=128, K=128] for `recurrent_state`. Got [4, "
        "2, 128, 64]. Pass the pool as [pool, HV, V, K]: one head per value head, rows V "
        "(values), columns K (keys).",
        recurrent_state=lambda c: c.recurrent_state[..., :64],
    ),
    commit(
        "KDA-COMMIT-INCOMPLETE",
        "cs_v",
        "Operands of a commit that belong together must be given together: `cs_v` is missing. Got "
        "`cs_q` without `cs_v`. Pass it too, or leave out what it belongs to.",
        cs_v=lambda c: None,
    ),
    commit(
        "KDA-COMMIT-INCOMPLETE",
        "track_steps",
        "Operands of a commit that belong together must be given together: `track_steps` is "
        "missing. Got `track_indices` without `track_steps`. Pass it too, or leave out what it "
        "belongs to.",
        track_indices=lambda c: np.zeros(N, np.int32),
    ),
    commit(
        "KDA-COMMIT-INCOMPLETE",
        "intermediate_state_indices",
        "Operands of a commit that belong together must be given together: "
        "`intermediate_state_indices` is missing. Got snapshots or windows without "
        "`intermediate_state_indices`. Pass it too, or leave out what it belongs to.",
        intermediate_state_indices=lambda c: None,
    ),
    commit(
        "KDA-VERIFY-RINGS-INCOMPLETE",
        "replayssm_rawk",
        "ReplaySSM requires all four replayssm_* rings. Got `replayssm_rawv`, `replayssm_g`, "
        "`replayssm_beta` without `replayssm_rawk`. Pass `replayssm_rawk` too, or none of them.",
        replayssm_rawk=lambda c: None,
    ),
    commit(
        "KDA-VERIFY-ROLLBACK",
        "intermediate_ssm",
        "Either `intermediate_ssm` or the replayssm_* rings, which `ring_indices` is for, must be "
        "given. Got both. Pass snapshots or rings, and None for the other.",
        intermediate_ssm=lambda c: numbers(R, t, HV, D, D),
    ),
    commit(
        "KDA-VERIFY-RING-LAYOUT",
        "replayssm_beta",
        "expected ReplaySSM ring layouts [slots, H=2, L>=1, 128] / [slots, H, L]. Got "
        "`replayssm_beta` of shape [4, 3, 2]. Allocate [slots, HV, L, 128] for rawv and g, "
        "[slots, H, L, 128] for rawk and [slots, HV, L] for beta.",
        replayssm_beta=lambda c: numbers(P, t, HV),
    ),
    commit(
        "KDA-VERIFY-RING-DTYPE",
        "replayssm_rawv",
        "expected ReplaySSM ring dtypes rawv/rawk=bf16, g/beta=fp32. Got `replayssm_rawv` in "
        "int16. Allocate rawv and rawk in the dtype of the activations, g and beta in float32.",
        replayssm_rawv=lambda c: c.replayssm_rawv.astype(np.int16),
    ),
    commit(
        "KDA-VERIFY-CONV-HISTORY",
        "cs_q",
        "The conv history `cs_q` must be [P=4, 128, 3]. Got [5, 128, 3]. Pass the last three raw "
        "inputs of every slot and channel, oldest first.",
        cs_q=lambda c: numbers(P + 1, H * D, 3),
    ),
    commit(
        "KDA-VERIFY-INDICES-SHAPE",
        "accept_lens",
        "`accept_lens` must have one number per request, shape [N]. Got [2, 1]. Slice it to the "
        "requests of this launch, or pad the launch with requests of slot -1.",
        accept_lens=lambda c: np.zeros((N, 1), np.int32),
    ),
    commit(
        "KDA-VERIFY-INDICES-SHAPE",
        "track_steps",
        "`track_steps` must have one number per request, shape [N=2]. Got [6]. Slice it to the "
        "requests of this launch, or pad the launch with requests of slot -1.",
        track_indices=lambda c: np.zeros(N, np.int32),
        track_steps=lambda c: np.zeros(T, np.int32),
    ),
    commit(
        "KDA-ARRAY-DTYPE",
        "accept_lens",
        "`accept_lens` must be int32 or int64. Got float32. Convert it with astype before the "
        "call: nothing is cast silently.",
        accept_lens=lambda c: np.zeros(N, np.float32),
    ),
    commit(
        "KDA-ARRAY-DTYPE",
        "cs_q",
        "`cs_q` must be float32. Got bfloat16. Convert it with astype before the call: nothing is "
        "cast silently.",
        cs_q=lambda c: c.cs_q.astype(BFLOAT16),
    ),
    commit(
        "KDA-VERIFY-CONV-WINDOW",
        "intermediate_conv_v",
        "The conv windows `intermediate_conv_v` must be [rows, >=1, 256, 3]. Got [4, 3, 128, 3]. "
        "Allocate one window of three inputs per scratch row, token and channel.",
        intermediate_conv_v=lambda c: numbers(R, t, H * D, 3),
    ),
    commit(
        "KDA-VERIFY-STATE-MEMORY",
        "recurrent_state",
        "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and "
        "16-byte-aligned slot offsets. Got element strides [32768, 16384, 1, 128] for shape [4, "
        "2, 128, 128]. Pass `recurrent_state` as kda_cupy.StatePool makes it.",
        recurrent_state=lambda c: c.recurrent_state.swapaxes(2, 3),
    ),
    commit(
        "KDA-ARRAY-READ-ONLY",
        "cs_k",
        "`cs_k` is written in place and must be writable. Got read-only memory. Pass a writable "
        "copy, and keep the copy: the update is in it.",
        cs_k=lambda c: frozen(c.cs_k),
    ),
    commit(
        "KDA-ARRAY-OVERLAP",
        "recurrent_state",
        "`recurrent_state` is written to and must not share memory with another operand. Got "
        "`recurrent_state` and `replayssm_g` with bytes in common. Give `recurrent_state` memory "
        "of its own, apart from `replayssm_g`.",
        replayssm_g=lambda c: c.recurrent_state.reshape(-1)[: P * HV * t * D].reshape(P, HV, t, D),
    ),
    commit(
        "KDA-VALUE-ACCEPT-RANGE",
        "accept_lens",
        "`accept_lens[1]` must be a count from 0 to 3, the bonus token included. Got 4. Count the "
        "bonus token, and never more tokens than the verify ran for the request.",
        accept_lens=lambda c: np.array([1, 4]),
        validate=lambda c: "full",
    ),
    commit(
        "KDA-VALUE-ACCEPT-RANGE",
        "track_steps",
        "`track_steps[1]` must be a step below the accept count 1, or negative for none. Got 2. "
        "Count the bonus token, and never more tokens than the verify ran for the request.",
        track_indices=lambda c: np.array([-1, 3]),
        track_steps=lambda c: np.array([9, 2]),
        validate=lambda c: "full",
    ),
    commit(
        "KDA-VALUE-SLOT-DUPLICATE",
        "track_indices",
        "`track_indices` must name a live slot once only. Got slot 1, which is in "
        "`ssm_state_indices` too. Give each sequence a slot of its own; only padding (-1) may "
        "repeat.",
        track_indices=lambda c: np.array([1, 3]),
        track_steps=lambda c: np.array([0, 0]),
        validate=lambda c: "full",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.by}-{case.code}-{case.operand}")
def test_the_whole_message(case: Case) -> None:
    with pytest.raises(KdaError) as caught:
        case.meet(Operands())
    error, page = caught.value, CATALOGUE[case.code]
    assert str(error) == case.message
    assert (type(error), error.code, error.operand) == (page.exception, case.code, case.operand)
    assert error.got and error.got in case.message
    assert error.wanted and case.message.startswith(error.wanted)
    assert error.hint and case.message.endswith(f" {error.hint}.")
    assert case.by in raised_by(case.code)
    assert search(case.message)[0] is page


def test_every_page_of_these_families_has_a_case() -> None:
    families = ("KDA-VERIFY-", "KDA-COMMIT-")
    of_layers = {"KDA-COMMIT-NO-VERIFY"}  # see test_layer.py
    assert {code for code in CATALOGUE if code.startswith(families)} - of_layers <= {
        case.code for case in CASES
    }


QUOTED = [
    "expected q/k shape (1, T, H, 128)",
    "expected v/g shape ",
    "expected beta shape ",
    "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=6, N=4.",
    "Unexpected A_log shape: (8,); expected numel=2.",
    "Unexpected dt_bias shape: (2,); expected numel=256.",
    "expected recurrent state layout [pool, H, V=128, K=128]",
    "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and 16-byte-aligned "
    "slot offsets",
    "ReplaySSM requires all four replayssm_* rings",
    "expected ReplaySSM ring layouts [slots, H=2, L>=3, 128] / [slots, H, L]",
    "expected ReplaySSM ring dtypes rawv/rawk=fp32, g/beta=fp32",
    "expected intermediate SSM layout [scratch, >=3, H, V=128, K=128]",
    "fused output norm requires onorm_gate, onorm_weight, and onorm_eps",
    "expected output-norm gate shape ",
    "expected output-norm weight shape (128,)",
    "expected output-norm gate=fp32 and weight=fp32",
]
"""Words that operations.md quotes, in its order."""


@pytest.mark.parametrize("words", QUOTED)
def test_quoted_words_begin_a_message(words: str) -> None:
    assert any(case.message.startswith(words) for case in CASES)


STEPS: list[tuple[str, Callable[[Operands], dict[str, Any]]]] = [
    ("KDA-VERIFY-TREE", lambda c: {"parents": np.array([-1, 0, 0])}),
    ("KDA-ARRAY-KIND", lambda c: {"x_k": None}),
    ("KDA-ARRAY-HOST-ON-DEVICE", lambda c: {"A_log": on_gpu(numbers(9))}),
    ("KDA-VERIFY-QK-SHAPE", lambda c: {"x_q": numbers(1, T, H, 9)}),
    ("KDA-VERIFY-VG-SHAPE", lambda c: {"g": numbers(1, T, HV)}),
    ("KDA-VERIFY-BETA-SHAPE", lambda c: {"beta": numbers(1, T)}),
    ("KDA-VERIFY-CU-SEQLENS", lambda c: {"cu_seqlens": np.zeros((3, 2), np.int16)[:, 0]}),
    ("KDA-VERIFY-TOKENS", lambda c: {"cu_seqlens": np.zeros(1, np.int32)}),
    ("KDA-VERIFY-MAX-TOKENS", lambda c: {"max_tokens_per_request": 17}),
    ("KDA-VERIFY-A-LOG-NUMEL", lambda c: {"A_log": numbers(9, dtype=np.int8)}),
    ("KDA-VERIFY-A-LOG-NUMEL", lambda c: {"dt_bias": numbers(9, dtype=np.int8)}),
    ("KDA-STATE-LAYOUT", lambda c: {"recurrent_state": numbers(P, HV, D, 9)}),
    ("KDA-VERIFY-STATE-MEMORY", lambda c: {"recurrent_state": c.recurrent_state.swapaxes(2, 3)}),
    ("KDA-VERIFY-CONV-WEIGHT", lambda c: {"conv_bias_q": None}),
    ("KDA-VERIFY-CONV-WEIGHT", lambda c: {"w_q": numbers(9, 4, dtype=np.int8)}),
    ("KDA-VERIFY-CONV-HISTORY", lambda c: {"cs_v": numbers(P, 9, 3, dtype=np.int8)}),
    ("KDA-VERIFY-RINGS-INCOMPLETE", lambda c: {"replayssm_g": None}),
    ("KDA-VERIFY-ROLLBACK", lambda c: {"intermediate_ssm": numbers(9)}),
    ("KDA-VERIFY-RING-LAYOUT", lambda c: {"replayssm_rawk": numbers(9, dtype=np.int8)}),
    ("KDA-VERIFY-RING-DTYPE", lambda c: {"replayssm_rawk": numbers(P, H, t, D, dtype=np.int8)}),
    ("KDA-VERIFY-CONV-WINDOW", lambda c: {"intermediate_conv_q": numbers(9, t, 9, 3)}),
    ("KDA-VERIFY-SCRATCH-ROWS", lambda c: {"intermediate_conv_q": numbers(9, t, D, 3, dtype=np.int8)}),
    ("KDA-VERIFY-INDICES-SHAPE", lambda c: {"ssm_state_indices": numbers(9)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"ssm_state_indices": numbers(N)}),
    ("KDA-VERIFY-ONORM-INCOMPLETE", lambda c: {"onorm_eps": None}),
    ("KDA-VERIFY-ONORM-GATE-SHAPE", lambda c: {"onorm_gate": numbers(9, dtype=np.int8)}),
    ("KDA-VERIFY-ONORM-WEIGHT-SHAPE", lambda c: {"onorm_weight": numbers(9, dtype=np.int8)}),
    ("KDA-VERIFY-ONORM-DTYPE", lambda c: {"onorm_weight": numbers(D, dtype=np.int8)}),
    ("KDA-VALUE-EPS", lambda c: {"onorm_eps": -1.0}),
    ("KDA-VERIFY-OUT-SHAPE", lambda c: {"out": numbers(9, dtype=np.int8)}),
    ("KDA-ARRAY-DTYPE", lambda c: {"out": frozen(numbers(1, T, HV, 2 * D, dtype=np.int8)[..., ::2])}),
    ("KDA-ARRAY-NEGATIVE-STRIDE", lambda c: {"beta": c.beta[:, ::-1]}),
    ("KDA-ARRAY-ALIGNMENT", lambda c: {"beta": aligned(1, T, HV, offset=1)}),
    ("KDA-VERIFY-CONTIGUOUS", lambda c: {"out": frozen(numbers(1, T, HV, 2 * D)[..., ::2])}),
    ("KDA-VALUE-SCALE", lambda c: {"scale": "1"}),
    ("KDA-VALUE-LOWER-BOUND", lambda c: {"lower_bound": 1.0}),
    ("KDA-VALUE-A-LOG-MISSING", lambda c: {"A_log": None}),
    ("KDA-VALUE-FLAG", lambda c: {"allow_neg_eigval": 1}),
    ("KDA-VALUE-NULL-INDEX", lambda c: {"null_index": 7}),
    ("KDA-VALUE-VALIDATE", lambda c: {"validate": "fully"}),
    ("KDA-ARRAY-READ-ONLY", lambda c: {"out": frozen(c.x_v)}),
    ("KDA-ARRAY-FOLDED", lambda c: {"intermediate_conv_v": strided(c.intermediate_conv_v, 0, 3072, 12, 4)}),
    ("KDA-ARRAY-OVERLAP", lambda c: {"out": c.x_v}),
    ("KDA-VALUE-LENGTH-RANGE", lambda c: {"cu_seqlens": np.array([0, 9, 6]), "validate": "full"}),
    ("KDA-VALUE-SLOT-RANGE", lambda c: {"ssm_state_indices": np.array([9, 9]), "validate": "full"}),
    ("KDA-VALUE-SLOT-DUPLICATE", lambda c: {"ssm_state_indices": np.array([1, 1]), "validate": "full"}),
    ("KDA-VALUE-ROW-RANGE", lambda c: {"intermediate_state_indices": np.array([0, 9]), "validate": "full"}),
]
"""Every check of a verify in its order, and operands that violate it. :func:`violating` adds "
"those of later steps."""


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
        kda_cupy.kda_decode_mtp(**violating(step, c))
    assert caught.value.code == STEPS[step][0]


def test_the_order_is_that_of_the_specification() -> None:
    """operations.md section 2; what it leaves open stands in between."""
    specified = ["QK-SHAPE", "VG-SHAPE", "BETA-SHAPE", "TOKENS", "A-LOG-NUMEL", "STATE-MEMORY"]
    specified += ["RINGS-INCOMPLETE", "RING-LAYOUT", "RING-DTYPE", "ONORM-INCOMPLETE", "ONORM-GATE-SHAPE"]
    specified += ["ONORM-WEIGHT-SHAPE", "ONORM-DTYPE"]
    tested = [code.removeprefix("KDA-VERIFY-") for code, _ in STEPS]
    assert [code for code in dict.fromkeys(tested) if code in specified] == specified


def test_unknown_operands_are_named() -> None:
    operands = vars(Operands())
    with pytest.raises(TypeError, match="tree_mask"):
        kda_cupy.kda_decode_mtp(**operands, tree_mask=None)
    with pytest.raises(TypeError, match="tree_mask"):
        bind(kda_cupy.kda_decode_mtp, **operands, tree_mask=None)
    with pytest.raises(TypeError, match="accept"):
        bind(kda_cupy.kda_commit, accept=None)


def test_records_and_parameters_number_operands_alike() -> None:
    assert mtp_params.OPERANDS == guard.OPERANDS


def test_check_errors_tells_what_a_launch_met() -> None:
    kda_cupy.check_errors(-1)
    c = Operands()
    c.intermediate_state_indices[:] = -1
    kda_cupy.kda_decode_mtp(**vars(c))
    with pytest.raises(kda_cupy.SlotError) as caught:
        kda_cupy.check_errors(-1)
    assert str(caught.value) == (
        "`intermediate_state_indices[0]` must be a row from 0 up to, but not including, 4. Got row -1 in "
        "kda_decode_mtp on the NumPy backend, and 1 more such row. Give every live request a row "
        "that the scratch "
        "arrays or the rings have."
    )
    kda_cupy.check_errors(-1)
