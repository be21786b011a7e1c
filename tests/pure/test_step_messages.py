# SPDX-License-Identifier: Apache-2.0
"""Every message of the decode steps and of the convolution as a user meets it, whole; no GPU is needed.

Messages are compared literally: a change of wording shows here, where somebody can read it. What these operations share
with verify and the packed decodes is tested there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from conv_contract import make_conv
from problems import Problem
from step_problems import make_step, out_of

import kda_cupy
from kda_cupy import KdaError, bind
from kda_cupy.catalogue import CATALOGUE
from kda_cupy.error_pages import search
from kda_cupy.raisers import raised_by
from tests.fake_cupy import on_gpu

B, H, HV, P, D, C = 3, 1, 2, 6, 128, 24
BFLOAT16 = ml_dtypes.bfloat16
OPERATIONS: dict[str, Any] = {
    "kda": kda_cupy.kda_decode_step,
    "gdn": kda_cupy.gdn_decode_step,
    "conv": kda_cupy.causal_conv1d_update,
}


def operands_of(which: str) -> Problem:
    """Operands of a call that is right."""
    if which == "conv":
        return make_conv(B=B, pieces=(C,), dtype="float32")
    problem = make_step(which, B=B, H=H, HV=HV, dtype="float32", onorm=True)
    return {**problem, "out": out_of(problem)}


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def frozen(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def halves(array: Any, axis: int) -> tuple[Any, ...]:
    return tuple(np.split(array, 2, axis))


Change = Callable[[Problem], Problem]


class Case(NamedTuple):
    """One way to meet one message."""

    which: str
    code: str
    operand: str
    change: Change
    message: str


def _pieces(o: Problem) -> Problem:
    """What belongs to a channel, in two pieces."""
    return {
        "conv_state": halves(o["conv_state"], 1),
        "weight": halves(o["weight"], 0),
        "bias": halves(o["bias"], 0),
    }


CASES = [
    Case(
        "kda",
        "KDA-ARRAY-KIND",
        "w_v",
        lambda o: {"w_v": None},
        "`w_v` must be an array of NumPy, CuPy or another library with DLPack. Got None. Make an "
        "array of it first, with numpy.asarray or cupy.asarray.",
    ),
    Case(
        "kda",
        "KDA-ARRAY-HOST-ON-DEVICE",
        "x_q",
        lambda o: {"beta": on_gpu(ones(9))},
        "All inputs must be on the same device. Some are in host memory. Got `x_q` in host memory "
        "and `beta` on cuda:0. Copy `x_q` to the GPU with cupy.asarray, or pass NumPy arrays only.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-QK-SHAPE",
        "x_k",
        lambda o: {"x_k": ones(B, H, D)},
        "expected q/k shape (1, T, H, 128) for `x_q` and `x_k`, the same for both. Got `x_k` of "
        "shape [3, 1, 128]. Pass raw projections of all tokens, packed along T, with a leading axis"
        " of 1.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-VG-SHAPE",
        "x_v",
        lambda o: {"x_v": ones(1, B + 1, HV, D)},
        "expected v/g shape (1, T=3, HV, 128) with HV a multiple of H. Got `x_v` of shape [1, 4, 2,"
        " 128] and `g` of shape [1, 3, 2, 128]. Pass values and raw gates of every value head and "
        "token of `x_q`.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-BETA-SHAPE",
        "beta",
        lambda o: {"beta": ones(1, B, H)},
        "expected beta shape (1, T=3, HV=2). Got [1, 3, 1]. Pass one raw logit per token and value head.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-A-LOG-NUMEL",
        "A_log",
        lambda o: {"A_log": ones(9)},
        "Unexpected A_log shape: (9,); expected numel=2. Got 9 elements. Pass the parameters of the"
        " value heads that are on this GPU: HV of `A_log`, HV*128 of `dt_bias`.",
    ),
    Case(
        "kda",
        "KDA-STATE-LAYOUT",
        "recurrent_state",
        lambda o: {"recurrent_state": ones(P, HV, 64, 64)},
        "expected recurrent state layout [pool, H, V=128, K=128] with H=2 value heads for "
        "`recurrent_state`. Got [6, 2, 64, 64]. Pass the pool as [pool, HV, V, K]: one head per "
        "value head, rows V (values), columns K (keys).",
    ),
    Case(
        "kda",
        "KDA-VERIFY-STATE-MEMORY",
        "recurrent_state",
        lambda o: {"recurrent_state": o["recurrent_state"].astype(np.float16)},
        "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and "
        "16-byte-aligned slot offsets. Got float16. Pass `recurrent_state` as kda_cupy.StatePool "
        "makes it.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-CONV-WEIGHT",
        "w_q",
        lambda o: {"w_q": ones(D, 1, 4)},
        "The convolution's `w_q` must be [128, 4]. Got shape [128, 1, 4]. Pass four taps per "
        "channel as [channels, 4], and biases for q, k and v or for none of them.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-CONV-WEIGHT",
        "conv_bias_q",
        lambda o: {"conv_bias_q": None},
        "The convolution's `conv_bias_q` must be with the other two, or none. Got `conv_bias_k` "
        "without `conv_bias_q`. Pass four taps per channel as [channels, 4], and biases for q, k "
        "and v or for none of them.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-CONV-HISTORY",
        "cs_v",
        lambda o: {"cs_v": ones(P, 3, HV * D)},
        "The conv history `cs_v` must be [P=6, 256, 3]. Got [6, 3, 256]. Pass the last three raw "
        "inputs of every slot and channel, oldest first.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-INDICES-SHAPE",
        "ssm_state_indices",
        lambda o: {"ssm_state_indices": np.arange(4)},
        "`ssm_state_indices` must have one number per request, shape [N=3]. Got [4]. Slice it to "
        "the requests of this launch, or pad the launch with requests of slot -1.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-ONORM-INCOMPLETE",
        "onorm_eps",
        lambda o: {"onorm_eps": None},
        "fused output norm requires onorm_gate, onorm_weight, and onorm_eps. Got no `onorm_eps`. "
        "Pass `onorm_eps` too, or none of the three.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-ONORM-GATE-SHAPE",
        "onorm_gate",
        lambda o: {"onorm_gate": ones(1, B, HV * D)},
        "expected output-norm gate shape (1, B=3, HV=2, 128). Got [1, 3, 256]. Pass the raw gate "
        "of every token and value head as `onorm_gate`.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-ONORM-WEIGHT-SHAPE",
        "onorm_weight",
        lambda o: {"onorm_weight": ones(HV, D)},
        "expected output-norm weight shape (128,). Got [2, 128]. Pass the weight of the norm over "
        "a head as `onorm_weight`, the same for all heads.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-ONORM-DTYPE",
        "onorm_weight",
        lambda o: {"onorm_weight": ones(D, dtype=np.float16)},
        "expected output-norm gate=fp32 and weight=fp32 (or bfloat16). Got gate=float32 and "
        "weight=float16. Pass `onorm_gate` in the dtype of the activations and `onorm_weight` in "
        "float32 or bfloat16.",
    ),
    Case(
        "kda",
        "KDA-VALUE-EPS",
        "onorm_eps",
        lambda o: {"onorm_eps": -1e-6},
        "`onorm_eps` must be a finite number of at least 0 on the host. Got -1e-06. Pass the "
        "model's rms_norm_eps as a Python float.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-OUT-SHAPE",
        "out",
        lambda o: {"out": ones(B, HV, D)},
        "`out` of packed tokens must have shape (1, B=3, HV=2, 128). Got [3, 2, 128]. Allocate it "
        "like `x_v`, or leave it out.",
    ),
    Case(
        "kda",
        "KDA-ARRAY-DTYPE",
        "cs_k",
        lambda o: {"cs_k": o["cs_k"].astype(BFLOAT16)},
        "`cs_k` must be float32. Got bfloat16. Convert it with astype before the call: nothing is "
        "cast silently.",
    ),
    Case(
        "kda",
        "KDA-VERIFY-CONTIGUOUS",
        "g",
        lambda o: {"g": ones(1, B, D, HV).swapaxes(2, 3)},
        "`g` must be dense within a token (or a channel). Got element strides [768, 256, 1, 2] for "
        "shape [1, 3, 2, 128]. Slice columns of a projection as you like, but copy what is "
        "transposed or sliced with a step.",
    ),
    Case(
        "kda",
        "KDA-ARRAY-NEGATIVE-STRIDE",
        "beta",
        lambda o: {"beta": o["beta"][:, ::-1]},
        "`beta` must have strides of whole elements, none of them negative. Got element strides "
        "[18, -6, 1] for shape [1, 3, 2]. Copy the view: ascontiguousarray(beta).",
    ),
    Case(
        "kda",
        "KDA-ARRAY-READ-ONLY",
        "cs_q",
        lambda o: {"cs_q": frozen(o["cs_q"])},
        "`cs_q` is written in place and must be writable. Got read-only memory. Pass a writable "
        "copy, and keep the copy: the update is in it.",
    ),
    Case(
        "kda",
        "KDA-ARRAY-FOLDED",
        "cs_v",
        lambda o: {"cs_v": np.lib.stride_tricks.as_strided(o["cs_v"], strides=(0, 4, 1024))},
        "`cs_v` is written to and every element of it must have memory of its own. Got element "
        "strides [0, 1, 256] for shape [6, 256, 3]. Allocate it in the shape that is used.",
    ),
    Case(
        "kda",
        "KDA-ARRAY-OVERLAP",
        "cs_q",
        lambda o: {"cs_k": o["cs_q"]},
        "`cs_q` is written to and must not share memory with another operand. Got `cs_q` and `cs_k`"
        " with bytes in common. Give `cs_q` memory of its own, apart from `cs_k`.",
    ),
    Case(
        "kda",
        "KDA-VALUE-LOWER-BOUND",
        "lower_bound",
        lambda o: {"lower_bound": 5.0},
        "`lower_bound` must be a finite number below 0, or None. Got 5.0. Pass the model's own "
        "bound, such as -5.0, or None for the softplus gate.",
    ),
    Case(
        "kda",
        "KDA-VALUE-A-LOG-MISSING",
        "A_log",
        lambda o: {"A_log": None, "lower_bound": None},
        "`A_log` may be None only with a `lower_bound`. Got A_log=None and lower_bound=None. Pass "
        "the layer's `A_log`, or the `lower_bound` that its gate has.",
    ),
    Case(
        "kda",
        "KDA-VALUE-FLAG",
        "allow_neg_eigval",
        lambda o: {"allow_neg_eigval": 1},
        "`allow_neg_eigval` must be True or False. Got 1 of type int. Pass a bool: bool(value), or "
        "value.item() for an array of one.",
    ),
    Case(
        "kda",
        "KDA-VALUE-SLOT-DUPLICATE",
        "ssm_state_indices",
        lambda o: {"ssm_state_indices": np.array([1, 2, 1]), "validate": "full"},
        "`ssm_state_indices` must name a live slot once only. Got slot 1 in rows 0, 2. Give each "
        "sequence a slot of its own; only padding (-1) may repeat.",
    ),
    Case(
        "gdn",
        "KDA-ARRAY-KIND",
        "conv_state",
        lambda o: {"conv_state": None},
        "`conv_state` must be an array of NumPy, CuPy or another library with DLPack. Got None. "
        "Make an array of it first, with numpy.asarray or cupy.asarray.",
    ),
    Case(
        "gdn",
        "KDA-PACKED-QKV-RANK",
        "mixed_qkv",
        lambda o: {"mixed_qkv": o["mixed_qkv"][0]},
        "`mixed_qkv` must be a 2D tensor (got ndim=1): [B, 2*H*K + HV*V]. Got shape [512]. Pass one"
        " row per sequence: reshape it, or drop a time axis of 1 with mixed_qkv[:, 0].",
    ),
    Case(
        "gdn",
        "KDA-PACKED-AB-RANK",
        "a",
        lambda o: {"a": ones(1, B, HV)},
        "`a` must be a 2D tensor (got ndim=3): [B, HV]. Got shape [1, 3, 2]. Reshape it to [B, HV].",
    ),
    Case(
        "gdn",
        "KDA-PACKED-BATCH",
        "mixed_qkv",
        lambda o: {"b": ones(B + 1, HV)},
        "Mismatched batch sizes: `mixed_qkv.shape[0]=3`, `a.shape[0]=3`, `b.shape[0]=4`. Pass as "
        "many rows of each as there are sequences, padding all three alike.",
    ),
    Case(
        "gdn",
        "KDA-PACKED-INDICES-SHAPE",
        "ssm_state_indices",
        lambda o: {"ssm_state_indices": np.arange(4)},
        "`ssm_state_indices` must have shape [B] (got (4,); expected (3,)). Pass one slot per row "
        "of `mixed_qkv`, with -1 for rows of padding.",
    ),
    Case(
        "gdn",
        "KDA-STATE-LAYOUT",
        "initial_state",
        lambda o: {"initial_state": ones(P, HV, D, 64)},
        "expected recurrent state layout [pool, H, V=128, K=128] for `initial_state`. Got [6, 2, "
        "128, 64]. Pass the pool as [pool, HV, V, K]: one head per value head, rows V (values), "
        "columns K (keys).",
    ),
    Case(
        "gdn",
        "KDA-PACKED-AB-SHAPE",
        "a",
        lambda o: {"a": ones(B, HV * D)},
        "`a`/`b` must have shape [B, HV] with HV=2 (got a.shape=(3, 256)). Pass gates of the value "
        "heads that the state has on this GPU.",
    ),
    Case(
        "gdn",
        "KDA-PACKED-GATE-NUMEL",
        "dt_bias",
        lambda o: {"dt_bias": ones(HV * D)},
        "`A_log` and `dt_bias` must have HV=2 elements (got A_log.shape=(2,), "
        "dt_bias.shape=(256,)). Pass the parameters of the value heads that the state has on this "
        "GPU.",
    ),
    Case(
        "gdn",
        "KDA-PACKED-OUT-SHAPE",
        "out",
        lambda o: {"out": ones(B, HV, D)},
        "`out` must have shape (3, 1, 2, 128) (got (3, 2, 128)). Allocate it as (B, 1, HV, V), or "
        "leave it out.",
    ),
    Case(
        "gdn",
        "KDA-PACKED-QKV-WIDTH",
        "mixed_qkv",
        lambda o: {"mixed_qkv": ones(B, 2 * D)},
        "`qk_dim = qkv_dim - HV*V` must be positive and even (got qk_dim=0 from qkv_dim=256, HV=2, "
        "V=128). Pass rows of q, k and v together as `mixed_qkv`, 2*H*K + HV*V wide.",
    ),
    Case(
        "gdn",
        "KDA-VERIFY-CONV-WEIGHT",
        "conv_weight",
        lambda o: {"conv_weight": ones(4 * D, 3)},
        "The convolution's `conv_weight` must be [512, 4]. Got shape [512, 3]. Pass four taps per "
        "channel as [channels, 4], and biases for q, k and v or for none of them.",
    ),
    Case(
        "gdn",
        "KDA-VERIFY-CONV-HISTORY",
        "conv_state",
        lambda o: {"conv_state": ones(P, 4 * D, 4)},
        "The conv history `conv_state` must be [P=6, 512, 3]. Got [6, 512, 4]. Pass the last three "
        "raw inputs of every slot and channel, oldest first.",
    ),
    Case(
        "gdn",
        "KDA-VERIFY-ONORM-GATE-SHAPE",
        "onorm_gate",
        lambda o: {"onorm_gate": ones(B, HV * D)},
        "expected output-norm gate shape (B=3, HV=2, 128). Got [3, 256]. Pass the raw gate of "
        "every token and value head as `onorm_gate`.",
    ),
    Case(
        "gdn",
        "KDA-VERIFY-ONORM-INCOMPLETE",
        "onorm_weight",
        lambda o: {"onorm_weight": None},
        "fused output norm requires onorm_gate, onorm_weight, and onorm_eps. Got no `onorm_weight`."
        " Pass `onorm_weight` too, or none of the three.",
    ),
    Case(
        "gdn",
        "KDA-ARRAY-DTYPE",
        "conv_bias",
        lambda o: {"conv_bias": ones(4 * D, dtype=np.float16)},
        "`conv_bias` must be float32. Got float16. Convert it with astype before the call: nothing "
        "is cast silently.",
    ),
    Case(
        "gdn",
        "KDA-VERIFY-CONTIGUOUS",
        "conv_weight",
        lambda o: {"conv_weight": ones(4, 4 * D).T},
        "`conv_weight` must be dense within a token (or a channel). Got element strides [1, 512] "
        "for shape [512, 4]. Slice columns of a projection as you like, but copy what is transposed"
        " or sliced with a step.",
    ),
    Case(
        "gdn",
        "KDA-ARRAY-READ-ONLY",
        "conv_state",
        lambda o: {"conv_state": frozen(o["conv_state"])},
        "`conv_state` is written in place and must be writable. Got read-only memory. Pass a "
        "writable copy, and keep the copy: the update is in it.",
    ),
    Case(
        "gdn",
        "KDA-ARRAY-OVERLAP",
        "out",
        lambda o: {"onorm_gate": o["out"][:, 0]},
        "`out` is written to and must not share memory with another operand. Got `out` and "
        "`onorm_gate` with bytes in common. Give `out` memory of its own, apart from `onorm_gate`.",
    ),
    Case(
        "conv",
        "KDA-ARRAY-KIND",
        "x",
        lambda o: {"x": None},
        "`x` must be an array of NumPy, CuPy or another library with DLPack. Got None. Make an "
        "array of it first, with numpy.asarray or cupy.asarray.",
    ),
    Case(
        "conv",
        "KDA-CONV-PIECES",
        "conv_state",
        lambda o: {"x": halves(o["x"], 1)},
        "`conv_state` must come in one, two or three pieces, as many as `x`. Got 2 in `x` and 1 in "
        "`conv_state`. Pass one array for each, or tuples of equal length: (q, k, v).",
    ),
    Case(
        "conv",
        "KDA-CONV-PIECES",
        "x",
        lambda o: {"x": ()},
        "`x` must come in one, two or three pieces, as many as `x`. Got 0 in `x`. Pass one array "
        "for each, or tuples of equal length: (q, k, v).",
    ),
    Case(
        "conv",
        "KDA-CONV-X-SHAPE",
        "x",
        lambda o: {"x": o["x"][0]},
        "`x` must be [B, C] or [B, C, t], pieces alike in all but C. Got `x` of shape [24]. Swap "
        "axes of [B, t, C] without a copy: x.swapaxes(1, 2).",
    ),
    Case(
        "conv",
        "KDA-CONV-X-SHAPE",
        "x",
        lambda o: {"x": (ones(B, 12), ones(B, 12, 1)), **_pieces(o)},
        "`x` must be [B, C] or [B, C, t], pieces alike in all but C. Got `x[1]` of shape [3, 12, "
        "1]. Swap axes of [B, t, C] without a copy: x.swapaxes(1, 2).",
    ),
    Case(
        "conv",
        "KDA-CONV-WEIGHT-SHAPE",
        "weight",
        lambda o: {"weight": ones(C, 1, 4)},
        "The taps or biases `weight` of a conv update must be [24, width] with a width of 2, 3 or "
        "4. Got shape [24, 1, 4]. Pass the taps of every channel of `x`, the newest token's last, "
        "and one bias a channel.",
    ),
    Case(
        "conv",
        "KDA-CONV-WEIGHT-SHAPE",
        "weight",
        lambda o: {"weight": ones(C, 5)},
        "The taps or biases `weight` of a conv update must be [24, width] with a width of 2, 3 or "
        "4. Got shape [24, 5]. Pass the taps of every channel of `x`, the newest token's last, and "
        "one bias a channel.",
    ),
    Case(
        "conv",
        "KDA-CONV-WEIGHT-SHAPE",
        "bias",
        lambda o: {"bias": ones(1, C)},
        "The taps or biases `bias` of a conv update must be [24]. Got shape [1, 24]. Pass the taps "
        "of every channel of `x`, the newest token's last, and one bias a channel.",
    ),
    Case(
        "conv",
        "KDA-CONV-STATE-SHAPE",
        "conv_state",
        lambda o: {"conv_state": ones(P, 3, C)},
        "The history `conv_state` of a conv update must be [P, 24, 3]. Got shape [6, 3, 24]. Pass "
        "the width - 1 raw inputs before the next token, oldest first, for every slot and channel.",
    ),
    Case(
        "conv",
        "KDA-CONV-STATE-SHAPE",
        "conv_state[1]",
        lambda o: {"x": halves(o["x"], 1), **_pieces(o), "conv_state": (ones(P, 12, 3), ones(P + 1, 12, 3))},
        "The history `conv_state[1]` of a conv update must be [P, 12, 3] with P=6. Got shape [7, "
        "12, 3]. Pass the width - 1 raw inputs before the next token, oldest first, for every slot "
        "and channel.",
    ),
    Case(
        "conv",
        "KDA-CONV-STATE-SHAPE",
        "conv_state",
        lambda o: {"conv_state": ones(2, C, 3), "conv_state_indices": None},
        "The history `conv_state` of a conv update must be [P, 24, 3] with P of at least B=3. Got "
        "P=2, and no `conv_state_indices`. Pass the width - 1 raw inputs before the next token, "
        "oldest first, for every slot and channel.",
    ),
    Case(
        "conv",
        "KDA-VERIFY-INDICES-SHAPE",
        "conv_state_indices",
        lambda o: {"conv_state_indices": np.arange(9)},
        "`conv_state_indices` must have one number per request, shape [N=3]. Got [9]. Slice it to "
        "the requests of this launch, or pad the launch with requests of slot -1.",
    ),
    Case(
        "conv",
        "KDA-CONV-WINDOWS-INCOMPLETE",
        "intermediate_state_indices",
        lambda o: {"intermediate_conv_window": ones(B, 1, C, 3)},
        "`intermediate_conv_window` and `intermediate_state_indices` come together. Got "
        "`intermediate_conv_window` without `intermediate_state_indices`. Pass "
        "`intermediate_state_indices` too, or neither.",
    ),
    Case(
        "conv",
        "KDA-CONV-WINDOW-SHAPE",
        "intermediate_conv_window",
        lambda o: {"intermediate_conv_window": ones(B, C, 3), "intermediate_state_indices": np.arange(B)},
        "The windows `intermediate_conv_window` of a conv update must be [rows, >=1, 24, 3]. Got "
        "[3, 24, 3]. Allocate one window per scratch row, token and channel.",
    ),
    Case(
        "conv",
        "KDA-CONV-OUT-SHAPE",
        "out",
        lambda o: {"out": ones(B, C, 1)},
        "`out` of a convolution must have shape [3, 24]. Got [3, 24, 1]. Allocate the channels of "
        "all pieces side by side, or leave it out.",
    ),
    Case(
        "conv",
        "KDA-ARRAY-DTYPE",
        "conv_state",
        lambda o: {"conv_state": o["conv_state"].astype(np.float16)},
        "`conv_state` must be float32. Got float16. Convert it with astype before the call: nothing"
        " is cast silently.",
    ),
    Case(
        "conv",
        "KDA-VALUE-ACTIVATION",
        "activation",
        lambda o: {"activation": "swish"},
        '`activation` must be None or "silu". Got \'swish\'. Pass "silu" for the convolutions of KDA '
        "and GDN, None for a bare one.",
    ),
    Case(
        "conv",
        "KDA-VALUE-ACTIVATION",
        "activation",
        lambda o: {"activation": [True]},
        '`activation` must be None or "silu". Got [True]. Pass "silu" for the convolutions of KDA '
        "and GDN, None for a bare one.",
    ),
    Case(
        "conv",
        "KDA-VALUE-NULL-INDEX",
        "null_index",
        lambda o: {"null_index": 1},
        "`null_index` must be -1 or 0. Got 1. Pass 0 if your engine reserves slot 0 for padding, "
        "else leave it out.",
    ),
    Case(
        "conv",
        "KDA-ARRAY-READ-ONLY",
        "conv_state",
        lambda o: {"conv_state": frozen(o["conv_state"])},
        "`conv_state` is written in place and must be writable. Got read-only memory. Pass a "
        "writable copy, and keep the copy: the update is in it.",
    ),
    Case(
        "conv",
        "KDA-ARRAY-OVERLAP",
        "out",
        lambda o: {"out": o["x"]},
        "`out` is written to and must not share memory with another operand. Got `out` and `x` with"
        " bytes in common. Give `out` memory of its own, apart from `x`.",
    ),
    Case(
        "conv",
        "KDA-VALUE-SLOT-RANGE",
        "conv_state_indices",
        lambda o: {"conv_state_indices": np.array([1, 9, 2]), "validate": "full"},
        "`conv_state_indices[1]` must be a slot below P=6, or negative for padding. Got slot 9. "
        "Pass slots that the pool handed out.",
    ),
    Case(
        "conv",
        "KDA-VALUE-ROW-RANGE",
        "intermediate_state_indices",
        lambda o: {
            "intermediate_conv_window": ones(B, 1, C, 3),
            "intermediate_state_indices": np.array([0, 3, 1]),
            "validate": "full",
        },
        "`intermediate_state_indices[1]` must be a row from 0 up to, but not including, 3. Got row "
        "3. Give every live request a row that the scratch arrays or the rings have.",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.which}-{case.code}-{case.operand}")
def test_the_whole_message(case: Case) -> None:
    """Called and bound alike, and a refusal changes nothing."""
    operands = operands_of(case.which)
    operands |= case.change(operands)
    arrays = [each for each in operands.values() if isinstance(each, np.ndarray)]
    before = [each.tobytes() for each in arrays]
    with pytest.raises(KdaError) as caught:
        OPERATIONS[case.which](**operands)
    with pytest.raises(KdaError) as bound:
        bind(OPERATIONS[case.which], **operands)
    assert [each.tobytes() for each in arrays] == before
    error, page = caught.value, CATALOGUE[case.code]
    assert str(error) == str(bound.value) == case.message
    assert (type(error), error.code, error.operand) == (page.exception, case.code, case.operand)
    assert error.got and error.got in case.message
    assert OPERATIONS[case.which].__name__ in raised_by(case.code)
    assert search(case.message)[0] is page


def test_every_page_of_the_convolution_has_a_case() -> None:
    assert {code for code in CATALOGUE if code.startswith("KDA-CONV-")} <= {case.code for case in CASES}


ORDER: dict[str, list[tuple[str, Change]]] = {
    "kda": [
        ("KDA-ARRAY-KIND", lambda o: {"w_k": None}),
        ("KDA-ARRAY-HOST-ON-DEVICE", lambda o: {"dt_bias": on_gpu(ones(9))}),
        ("KDA-VERIFY-QK-SHAPE", lambda o: {"x_q": ones(9)}),
        ("KDA-VERIFY-VG-SHAPE", lambda o: {"g": ones(9)}),
        ("KDA-VERIFY-BETA-SHAPE", lambda o: {"beta": ones(9)}),
        ("KDA-VERIFY-A-LOG-NUMEL", lambda o: {"A_log": ones(9)}),
        ("KDA-STATE-LAYOUT", lambda o: {"recurrent_state": ones(9)}),
        ("KDA-VERIFY-CONV-WEIGHT", lambda o: {"w_q": ones(9)}),
        ("KDA-VERIFY-CONV-HISTORY", lambda o: {"cs_v": ones(9)}),
        ("KDA-VERIFY-INDICES-SHAPE", lambda o: {"ssm_state_indices": ones(9)}),
        ("KDA-VERIFY-ONORM-GATE-SHAPE", lambda o: {"onorm_gate": ones(9)}),
        ("KDA-VERIFY-OUT-SHAPE", lambda o: {"out": ones(9)}),
        ("KDA-ARRAY-DTYPE", lambda o: {"out": ones(1, B, HV, D, dtype=np.int8)}),
        ("KDA-VERIFY-CONTIGUOUS", lambda o: {"out": ones(1, B, HV, 2 * D)[..., ::2]}),
        ("KDA-VALUE-SCALE", lambda o: {"scale": "1"}),
        ("KDA-ARRAY-READ-ONLY", lambda o: {"out": frozen(o["x_v"])}),
        ("KDA-ARRAY-OVERLAP", lambda o: {"out": o["x_v"]}),
        ("KDA-VALUE-SLOT-RANGE", lambda o: {"ssm_state_indices": np.array([9, 1, 2]), "validate": "full"}),
    ],
    "gdn": [
        ("KDA-ARRAY-KIND", lambda o: {"conv_weight": None}),
        ("KDA-PACKED-QKV-RANK", lambda o: {"mixed_qkv": ones(9)}),
        ("KDA-PACKED-AB-RANK", lambda o: {"a": ones(9)}),
        ("KDA-ARRAY-HOST-ON-DEVICE", lambda o: {"dt_bias": on_gpu(ones(9))}),
        ("KDA-ARRAY-DTYPE", lambda o: {"b": ones(9, 9, dtype=np.int8)}),
        ("KDA-PACKED-BATCH", lambda o: {"b": ones(9, 9)}),
        ("KDA-PACKED-INDICES-SHAPE", lambda o: {"ssm_state_indices": np.arange(9)}),
        ("KDA-STATE-LAYOUT", lambda o: {"initial_state": ones(9)}),
        ("KDA-PACKED-GATE-NUMEL", lambda o: {"A_log": ones(9)}),
        ("KDA-PACKED-OUT-SHAPE", lambda o: {"out": ones(9)}),
        ("KDA-PACKED-Q-WIDTH", lambda o: {"mixed_qkv": ones(B, HV * D + 2)}),
        ("KDA-VERIFY-CONV-WEIGHT", lambda o: {"conv_weight": ones(9, 9)}),
        ("KDA-VERIFY-CONV-HISTORY", lambda o: {"conv_state": ones(9)}),
        ("KDA-VERIFY-ONORM-WEIGHT-SHAPE", lambda o: {"onorm_weight": ones(9)}),
        ("KDA-ARRAY-DTYPE", lambda o: {"conv_state": ones(*o["conv_state"].shape, dtype=np.int8)}),
        ("KDA-VERIFY-CONTIGUOUS", lambda o: {"onorm_gate": ones(B, HV, 2 * D)[..., ::2]}),
        ("KDA-VALUE-FLAG", lambda o: {"allow_neg_eigval": 1}),
        ("KDA-ARRAY-READ-ONLY", lambda o: {"initial_state": frozen(o["initial_state"])}),
        ("KDA-ARRAY-OVERLAP", lambda o: {"onorm_gate": o["out"][:, 0]}),
        ("KDA-VALUE-SLOT-RANGE", lambda o: {"ssm_state_indices": np.array([9, 1, 2]), "validate": "full"}),
    ],
    "conv": [
        ("KDA-CONV-PIECES", lambda o: {"bias": (o["bias"], o["bias"])}),
        ("KDA-ARRAY-HOST-ON-DEVICE", lambda o: {"bias": on_gpu(ones(9))}),
        ("KDA-CONV-X-SHAPE", lambda o: {"x": ones(9)}),
        ("KDA-CONV-WEIGHT-SHAPE", lambda o: {"weight": ones(9)}),
        ("KDA-CONV-STATE-SHAPE", lambda o: {"conv_state": ones(9)}),
        ("KDA-VERIFY-INDICES-SHAPE", lambda o: {"conv_state_indices": ones(9)}),
        ("KDA-CONV-WINDOWS-INCOMPLETE", lambda o: {"intermediate_state_indices": ones(9)}),
        ("KDA-CONV-OUT-SHAPE", lambda o: {"out": ones(9)}),
        ("KDA-ARRAY-DTYPE", lambda o: {"out": ones(B, C, dtype=np.int8)}),
        ("KDA-ARRAY-NEGATIVE-STRIDE", lambda o: {"out": ones(B, C)[:, ::-1]}),
        ("KDA-VALUE-ACTIVATION", lambda o: {"activation": "relu"}),
        ("KDA-VALUE-VALIDATE", lambda o: {"validate": "fully"}),
        ("KDA-ARRAY-READ-ONLY", lambda o: {"out": frozen(o["x"])}),
        ("KDA-ARRAY-OVERLAP", lambda o: {"out": o["x"]}),
        ("KDA-VALUE-SLOT-RANGE", lambda o: {"conv_state_indices": np.array([9, 1, 2]), "validate": "full"}),
    ],
}
"""Every check in its order, and operands that violate it; those of later checks are violated with it."""


@pytest.mark.parametrize(
    "which, step", [(which, step) for which, steps in ORDER.items() for step in range(len(steps))]
)
def test_the_earliest_rule_that_is_violated_is_told(which: str, step: int) -> None:
    right = operands_of(which)
    operands = dict(right)
    for _, change in reversed(ORDER[which][step:]):
        operands |= change(right)
    with pytest.raises(KdaError) as caught:
        OPERATIONS[which](**operands)
    assert caught.value.code == ORDER[which][step][0]


def test_unknown_operands_are_named() -> None:
    for operation in (kda_cupy.kda_decode_step, kda_cupy.gdn_decode_step):
        for call in (operation, lambda **operands: bind(operation, **operands)):  # noqa: B023
            with pytest.raises(TypeError, match="accept_lens"):
                call(**operands_of(operation.__name__[:3]), accept_lens=None)
