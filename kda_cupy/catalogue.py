# SPDX-License-Identifier: Apache-2.0
"""The error catalogue: one page for every code that this package raises. Data only.

``kda_cupy.errors.error`` fills a page's ``words`` and ``cure``; ``kda-cupy errors`` and docs/errors.md show the rest.
A code is stable for ever, its sentences may improve. Words that users of other projects search for come first.
"""

from __future__ import annotations

from typing import Final

from kda_cupy.errors import (
    BridgeError,
    CompileError,
    DeviceError,
    NoGpuError,
    OperandError,
    Page,
    PoolExhausted,
    SlotError,
)

PREAMBLE: Final = """\
import numpy as np
import kda_cupy

B, H, HV, K, V = 3, 2, 4, 64, 32
pool = kda_cupy.StatePool(8, HV, K, V, device="cpu")
rng = np.random.default_rng(0)
mixed_qkv = rng.standard_normal((B, 2 * H * K + HV * V), np.float32)
a = rng.standard_normal((B, HV * K), np.float32)
b = rng.standard_normal((B, HV), np.float32)
A_log = np.zeros(HV, np.float32)
dt_bias = np.zeros(HV * K, np.float32)
initial_state = pool[0]
ssm_state_indices = pool.allocate(B)

# kda_decode_mtp and kda_commit: N requests of two tokens, one head, P slots
N, T, D, P = 2, 4, 128, 5
verify = {name: np.ones((1, T, 1, D), np.float32) for name in ("x_q", "x_k", "x_v", "g")}
verify |= {f"w_{x}": np.ones((D, 4), np.float32) for x in "qkv"}
verify |= {f"cs_{x}": np.zeros((P, D, 3), np.float32) for x in "qkv"}
verify |= {f"intermediate_conv_{x}": np.zeros((3, 2, D, 3), np.float32) for x in "qkv"}
verify |= {
    "beta": np.ones((1, T, 1), np.float32),
    "A_log": np.zeros(1, np.float32),
    "dt_bias": np.zeros(D, np.float32),
    "recurrent_state": kda_cupy.StatePool(P - 1, 1, D, D, device="cpu")[0],
    "ssm_state_indices": np.array([3, 1]),
    "cu_seqlens": np.array([0, 2, 4]),
    "intermediate_state_indices": np.array([2, 0]),
    "intermediate_ssm": np.zeros((3, 2, 1, D, D), np.float32),
}
rings = {f"replayssm_{x}": np.zeros((P, 1, 2, D), np.float32) for x in ("rawv", "rawk", "g")}
rings["replayssm_beta"] = np.zeros((P, 1, 2), np.float32)
norm = {"onorm_gate": verify["g"], "onorm_weight": np.ones(D, np.float32), "onorm_eps": 1e-5}
_shared = (
    "recurrent_state", "ssm_state_indices", "intermediate_ssm", "intermediate_state_indices"
)
commit = {name: verify[name] for name in _shared} | {"accept_lens": np.array([2, 0])}

# causal_conv1d_update: B rows of C channels, four taps
C = 24
conv = {"x": np.ones((B, C), np.float32), "weight": np.ones((C, 4), np.float32)}
conv |= {"conv_state": np.zeros((5, C, 3), np.float32), "conv_state_indices": np.array([3, 1, 4])}

# KdaLayer: its weights, and a pool of one layer with one head
weights = tuple(verify[name] for name in ("w_q", "w_k", "w_v", "A_log", "dt_bias"))
sizes = {"capacity": 2, "num_value_heads": 1, "device": "cpu"}
"""
"""What every example begins with: the operands of a call that is right."""

_OPERANDS: Final = "mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices"
_CALL: Final = f"kda_cupy.kda_packed_decode(\n    {_OPERANDS}\n)"
_CALL_WITH: Final = f"kda_cupy.kda_packed_decode(\n    {_OPERANDS},\n    %s,\n)"
_CALL_INTO_OUT: Final = _CALL_WITH % "out=out"
_CALL_VALIDATED: Final = _CALL_WITH % 'validate="full"'
_VERIFY_CALL: Final = "kda_cupy.kda_decode_mtp(**verify)"
_CONV_CALL: Final = "kda_cupy.causal_conv1d_update(**conv)"
_VERIFY_NORM_CALL: Final = "kda_cupy.kda_decode_mtp(**verify | norm)"
_TO_GPU: Final = f"""\
import cupy

operands = (
    {_OPERANDS}
)
operands = [cupy.asarray(operand) for operand in operands]"""
_CALL_ON_GPU: Final = f"{_TO_GPU}\nkda_cupy.kda_packed_decode(*operands)"

_STATE: Final = (
    Page(
        code="KDA-STATE-LAYOUT",
        exception=OperandError,
        words="expected recurrent state layout {layout} for `{operand}`",
        cure="Pass the pool as [pool, HV, V, K]: one head per value head, rows V (values), columns K (keys)",
        meaning=(
            "A slot holds one matrix per value head, V rows by K columns with K contiguous. The kernels read rows in "
            "runs of four keys (16 bytes), so K is a multiple of 4, and a lane holds 16 keys of a row at most, so K "
            "is at most 512. Where V equals K no shape can show that the two were swapped: only the caller knows."
        ),
        when=(
            "The head dimension is no multiple of 4, or above 512: a toy model with K = 6.",
            "check_state was given the number of query heads H of a model with more value heads HV.",
            "The pool was made for another tensor-parallel size: 96 heads in the model, 12 on this GPU.",
            "An axis other than the first is empty.",
        ),
        solutions=(
            "Make the pool with kda_cupy.StatePool(capacity, HV, K, V): its layout is right by construction.",
            "Pad K with zeros to the next multiple of 4, in q, k, the gates and the state alike.",
            'Bring states stored as [n, HV, K, V] into a pool with pool.import_state(states, layout="KV").',
        ),
        before="kda_cupy.check_state(initial_state, num_heads=H)",
        after="kda_cupy.check_state(initial_state, num_heads=HV)",
        related=("KDA-STATE-RANK", "KDA-STATE-STRIDES", "KDA-PACKED-AB-SHAPE"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-STATE-DTYPE",
        exception=OperandError,
        words="`{operand}` must be float32",
        cure="Convert the pool once with astype(float32), and keep it so",
        meaning=(
            "A state is read, decayed and written back at every token, so its rounding errors add up over the whole "
            "sequence: in bfloat16 or float16 it drifts. It is updated in place, so nothing can be converted on the "
            "way in."
        ),
        when=(
            "The pool was made in the activation dtype, bfloat16 or float16, to save memory.",
            "np.zeros(shape) without a dtype made it float64.",
            "It was read from a file in another byte order, such as >f4.",
        ),
        solutions=(
            "Make the pool with kda_cupy.StatePool, which is float32.",
            "Convert it once, when it is loaded: state.astype(np.float32). Activations may stay in bfloat16.",
        ),
        before=f"initial_state = np.zeros((9, HV, V, K))\n{_CALL}",
        after=f"initial_state = np.zeros((9, HV, V, K), np.float32)\n{_CALL}",
        related=("KDA-ARRAY-DTYPE", "KDA-STATE-LAYOUT"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-STATE-STRIDES",
        exception=OperandError,
        words="`{operand}` must be dense inside a slot, strides (V*K, K, 1), and its slots must not overlap",
        cure="Pass the pool itself, or select slots and leading heads only: pool[2:9], pool[:, :4]",
        meaning=(
            "The kernels step through a slot with the strides of a dense [HV, V, K] block; only the slot stride is "
            "free, so that padded and interleaved pools work. Two slots that share memory would write into each "
            "other's state."
        ),
        when=(
            "A slice of K or V: the pool was allocated wider than the model needs, pool[..., :64] of K = 128.",
            "Every other head, pool[:, ::2], or two of the axes HV, V, K swapped without a copy.",
            "A pool made by broadcasting one slot: all slots are the same memory.",
        ),
        solutions=(
            "Allocate the pool in the shape that is used.",
            "Copy the slice once, np.ascontiguousarray(view), and keep the copy: it is the pool from then on.",
        ),
        before=f"wide = np.zeros((9, HV, V, 2 * K), np.float32)\ninitial_state = wide[..., :K]\n{_CALL}",
        after=f"initial_state = np.zeros((9, HV, V, K), np.float32)\n{_CALL}",
        related=("KDA-STATE-CONTIGUOUS", "KDA-STATE-ALIGNMENT", "KDA-STATE-LAYOUT"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-STATE-ALIGNMENT",
        exception=OperandError,
        words="`{operand}` must have every slot on a 16-byte boundary",
        cure="Start the pool at a multiple of 4 elements, and make the slot stride one",
        meaning=(
            "The kernels load states 16 bytes at a time, and a GPU faults on such a load from any other address. The "
            "first element must lie on a 16-byte boundary, and slots must be a multiple of 16 bytes (4 elements) "
            "apart."
        ),
        when=(
            "The pool is a slice at an odd offset of one large allocation, behind a header or another array.",
            "Slots are padded by a number of elements that is no multiple of 4.",
            "It was mapped from a file whose header is no multiple of 16 bytes.",
        ),
        solutions=(
            "Make the pool with kda_cupy.StatePool, which aligns it.",
            "In an allocation of your own, round offsets and slot strides up to multiples of 4 elements.",
        ),
        before=(
            "buffer = np.zeros(1 + 9 * HV * V * K, np.float32)\n"
            "initial_state = buffer[1:].reshape(9, HV, V, K)\n"
            f"{_CALL}"
        ),
        after=(
            "buffer = np.zeros(4 + 9 * HV * V * K, np.float32)\n"
            "initial_state = buffer[4:].reshape(9, HV, V, K)\n"
            f"{_CALL}"
        ),
        related=("KDA-STATE-STRIDES", "KDA-ARRAY-ALIGNMENT"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-STATE-RANK",
        exception=OperandError,
        words="`{operand}` must be a 4D tensor (got ndim={rank})",
        cure="Pass states {axes}, such as pool[layer]",
        meaning=(
            "An operation works on the states of one layer: a pool of slots, each with a V by K matrix per value "
            "head. No axis is added or dropped for the caller, because a guess could be the wrong one."
        ),
        when=(
            "All layers were passed at once: pool.state is [layers, P, HV, V, K].",
            "One sequence was passed without its slot axis, [HV, V, K].",
            "Heads were folded into rows, [P, HV*V, K], as some checkpoints store them.",
        ),
        solutions=(
            "Index the layer: pool[layer].",
            "Add the slot axis with state[None], or unfold heads with state.reshape(P, HV, V, K).",
        ),
        before=f"initial_state = pool.state\n{_CALL}",
        after=f"initial_state = pool[0]\n{_CALL}",
        related=("KDA-STATE-LAYOUT", "KDA-POOL-GEOMETRY"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-STATE-CONTIGUOUS",
        exception=OperandError,
        words="`{operand}` must be contiguous in the last dim",
        cure="Pass [P, HV, V, K] with neighbouring keys next to each other in memory",
        meaning=(
            "The last axis is K, and the kernels load four neighbouring keys at once. A transposed view has the "
            "right shape but steps from row to row, and the operations write in place, so a hidden copy would lose "
            "the update."
        ),
        when=(
            "A pool stored as [P, HV, K, V] was passed as pool.swapaxes(2, 3) to get the shape right.",
            "Every other key was sliced out, pool[..., ::2].",
        ),
        solutions=(
            "Store the pool as [P, HV, V, K] from the start.",
            "Convert it once: np.ascontiguousarray(pool.swapaxes(2, 3)), and use the copy from then on.",
        ),
        before=f"stored = np.zeros((9, HV, K, V), np.float32)\ninitial_state = stored.swapaxes(2, 3)\n{_CALL}",
        after=(
            "stored = np.zeros((9, HV, K, V), np.float32)\n"
            "initial_state = np.ascontiguousarray(stored.swapaxes(2, 3))\n"
            f"{_CALL}"
        ),
        related=("KDA-STATE-STRIDES", "KDA-STATE-LAYOUT", "KDA-PACKED-QKV-CONTIGUOUS"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-STATE-DEVICE",
        exception=DeviceError,
        words="`{operand}` must be {place}",
        cure="Move it there, or ask check_state about the device that it is on",
        meaning=(
            "check_state was told where the state has to be. A kernel runs on one GPU and writes to the memory of "
            "that GPU; states are never copied between devices behind the caller's back."
        ),
        when=(
            "A worker of a multi-GPU engine allocated its pool before it chose its GPU, so it lies on GPU 0.",
            "A pool for tests, in host memory, is checked for a GPU.",
        ),
        solutions=(
            "Make the pool there: kda_cupy.StatePool(..., device=1).",
            "Copy it: with cupy.cuda.Device(1): state = cupy.asarray(state).",
            "Pass device=-1 for host memory, or leave it out where any place will do.",
        ),
        before="kda_cupy.check_state(initial_state, HV, device=0)",
        after="kda_cupy.check_state(initial_state, HV, device=-1)",
        related=("KDA-PACKED-DEVICES", "KDA-ARRAY-HOST-ON-DEVICE"),
        predicate="is_valid_state",
    ),
)

_PACKED: Final = (
    Page(
        code="KDA-PACKED-QKV-RANK",
        exception=OperandError,
        words="`mixed_qkv` must be a 2D tensor (got ndim={rank}): [B, 2*H*K + HV*V]",
        cure="Pass one row per sequence: reshape it, or drop a time axis of 1 with mixed_qkv[:, 0]",
        meaning=(
            "A row holds q of all H heads, k of all H heads and v of all HV heads, one behind the other, for one "
            "token of one sequence. Decode takes one token per row, so there is no time axis."
        ),
        when=(
            "The projection was made for prefill and returns [B, 1, dim] or [1, B, dim].",
            "Heads were split off already: [B, heads, K].",
            "A single sequence was passed as one vector.",
        ),
        solutions=(
            "Drop the axis of length 1 by indexing it: mixed_qkv[:, 0].",
            "Pass what the projection returns, before it is split into q, k and v.",
        ),
        before=f"mixed_qkv = mixed_qkv[:, None]\n{_CALL}",
        after=f"mixed_qkv = mixed_qkv[:, None][:, 0]\n{_CALL}",
        related=("KDA-PACKED-QKV-WIDTH", "KDA-PACKED-AB-RANK"),
    ),
    Page(
        code="KDA-PACKED-QKV-CONTIGUOUS",
        exception=OperandError,
        words="`mixed_qkv` must be contiguous in the last dim",
        cure="Slice columns or rows of the projection as you like, but copy what is transposed",
        meaning=(
            "Neighbouring channels of a row must be neighbours in memory, so that they are loaded together. The "
            "distance between rows is free: a column slice of a wider projection works without a copy."
        ),
        when=(
            "The projection was computed transposed, [dim, B], and passed as .T.",
            "Channels are interleaved and were sliced with a step: projection[:, ::2].",
        ),
        solutions=(
            "Let the projection write [B, dim].",
            "Copy it: np.ascontiguousarray(mixed_qkv); the copy is small beside the state.",
        ),
        before=f"mixed_qkv = np.asfortranarray(mixed_qkv)\n{_CALL}",
        after=f"mixed_qkv = np.ascontiguousarray(mixed_qkv)\n{_CALL}",
        related=("KDA-PACKED-AB-CONTIGUOUS", "KDA-ARRAY-NEGATIVE-STRIDE"),
    ),
    Page(
        code="KDA-PACKED-AB-RANK",
        exception=OperandError,
        words="`{operand}` must be a 2D tensor (got ndim={rank}): {axes}",
        cure="Reshape it to {axes}",
        meaning=(
            "The raw gate `a` and the raw beta logit `b` have one row per sequence, as mixed_qkv has. With one gate "
            "per head (gdn_packed_decode) a row of `a` has HV elements, with one per key (kda_packed_decode) HV*K, "
            "head by head; a row of `b` always has HV."
        ),
        when=(
            "Gates of kda_packed_decode were passed as [B, HV, K].",
            "A time axis of length 1 is left over from prefill: [B, 1, HV].",
        ),
        solutions=(
            "Fold heads and keys: a.reshape(B, HV * K), which copies nothing.",
            "Drop the time axis by indexing it: b[:, 0].",
        ),
        before=f"a = a.reshape(B, HV, K)\n{_CALL}",
        after=f"a = a.reshape(B, HV * K)\n{_CALL}",
        related=("KDA-PACKED-AB-SHAPE", "KDA-PACKED-QKV-RANK"),
    ),
    Page(
        code="KDA-PACKED-AB-CONTIGUOUS",
        exception=OperandError,
        words="`a`/`b` must be contiguous in the last dim",
        cure="Pass a column slice of the projection, or ascontiguousarray({operand})",
        meaning=(
            "Neighbouring gates of a row must be neighbours in memory. The distance between rows is free, so `a` and "
            "`b` may be column slices of one projection."
        ),
        when=(
            "The gates were computed transposed, [HV, B], and passed as .T.",
            "`a` and `b` are interleaved in one array and were sliced with a step: ab[:, 0::2], ab[:, 1::2].",
        ),
        solutions=(
            "Order the columns of the projection so that `a` and `b` are each in one piece.",
            "Copy the operand that the message names: np.ascontiguousarray(b).",
        ),
        before=f"ab = np.zeros((B, 2 * HV), np.float32)\nb = ab[:, 1::2]\n{_CALL}",
        after=f"ab = np.zeros((B, 2 * HV), np.float32)\nb = ab[:, HV:]\n{_CALL}",
        related=("KDA-PACKED-QKV-CONTIGUOUS", "KDA-PACKED-AB-SHAPE"),
    ),
    Page(
        code="KDA-PACKED-GATE-RANK",
        exception=OperandError,
        words="`dt_bias` must be a {wanted_rank} (got ndim={rank})",
        cure="Reshape it, for example with dt_bias.reshape(-1)",
        meaning=(
            "`dt_bias` is a parameter of the layer, the same for all rows, so it has no batch axis: one value per "
            "head for gdn_packed_decode, one per head and key for kda_packed_decode. `A_log` may have any shape with "
            "HV elements, as checkpoints differ in it."
        ),
        when=(
            "It was stored for broadcasting, [1, 1, HV, K].",
            "It was expanded over the batch.",
            "gdn_packed_decode was given the [HV, K] bias of a KDA layer.",
        ),
        solutions=(
            "Flatten it once when the weights are loaded: dt_bias.reshape(-1).",
            "Pass the parameter itself, not a copy expanded over the batch.",
        ),
        before=f"dt_bias = dt_bias.reshape(1, 1, HV, K)\n{_CALL}",
        after=f"dt_bias = dt_bias.reshape(-1)\n{_CALL}",
        related=("KDA-PACKED-GATE-NUMEL", "KDA-PACKED-GATE-CONTIGUOUS"),
    ),
    Page(
        code="KDA-PACKED-GATE-CONTIGUOUS",
        exception=OperandError,
        words="`A_log`/`dt_bias` must be contiguous",
        cure="Copy it once when the weights are loaded: ascontiguousarray({operand})",
        meaning=(
            "`A_log` and `dt_bias` are small parameters that every row reads; the kernels index them as flat arrays "
            "without strides. They may start anywhere."
        ),
        when=(
            "A column of a larger parameter was passed: parameters[:, 0].",
            "dt_bias is a transposed [K, HV] array, passed as .T.",
            "A tensor-parallel shard was cut along the second axis.",
        ),
        solutions=("Copy the parameter once, at load time, not in every call.",),
        before=f"parameters = np.zeros((HV, 2), np.float32)\nA_log = parameters[:, 0]\n{_CALL}",
        after=(
            "parameters = np.zeros((HV, 2), np.float32)\n"
            "A_log = np.ascontiguousarray(parameters[:, 0])\n"
            f"{_CALL}"
        ),
        related=("KDA-PACKED-GATE-RANK", "KDA-PACKED-GATE-NUMEL"),
    ),
    Page(
        code="KDA-PACKED-INDICES-RANK",
        exception=OperandError,
        words="`ssm_state_indices` must be 1D for packed decode (got ndim={rank})",
        cure="Pass one slot per row, such as a column of the table: table[:, 0]",
        meaning=(
            "Packed decode advances each row by one token, and so takes one slot per row. The stride is free: a "
            "column of a two-dimensional table is read where it is."
        ),
        when=(
            "The engine keeps a table [B, blocks] or [B, 1 + drafts] and the whole table was passed.",
            "A single slot was passed as a number or a 0-d array.",
        ),
        solutions=(
            "Select the column that holds the current slot: table[:, 0].",
            "Wrap one slot: np.array([slot]).",
        ),
        before=f"table = ssm_state_indices[:, None]\nssm_state_indices = table\n{_CALL}",
        after=f"table = ssm_state_indices[:, None]\nssm_state_indices = table[:, 0]\n{_CALL}",
        related=("KDA-PACKED-INDICES-SHAPE", "KDA-VALUE-SLOT-RANGE"),
    ),
    Page(
        code="KDA-PACKED-OUT-CONTIGUOUS",
        exception=OperandError,
        words="`out` must be contiguous",
        cure="Allocate it with empty((B, 1, HV, V)), or leave the argument out",
        meaning=(
            "The output is written as one dense [B, 1, HV, V] block. `out` exists to avoid an allocation; a strided "
            "one would need a copy, which costs more."
        ),
        when=(
            "`out` is a column slice of a wider buffer, or a transposed view.",
            "Rows of a larger padded buffer were sliced in an inner axis, buffer[:, :, :HV].",
        ),
        solutions=(
            "Slice leading rows only: buffer[:B] of a [max_batch, 1, HV, V] buffer is contiguous.",
            "Leave `out` out and copy the result where it belongs.",
        ),
        before=f"out = np.empty((B, 1, HV, 2 * V), np.float32)[..., :V]\n{_CALL_INTO_OUT}",
        after=f"out = np.empty((8, 1, HV, V), np.float32)[:B]\n{_CALL_INTO_OUT}",
        related=("KDA-PACKED-OUT-SHAPE", "KDA-ARRAY-OVERLAP"),
    ),
    Page(
        code="KDA-PACKED-DEVICES",
        exception=DeviceError,
        words="All inputs must be on the same device",
        cure="Copy `{operand}` to the GPU of the others: with cupy.cuda.Device(n): cupy.asarray({operand})",
        meaning=(
            "A launch runs on one GPU and may read and write the memory of that GPU only. Which GPU that is, the "
            "operands say; CuPy's current device does not matter."
        ),
        when=(
            "A multi-GPU worker made its index vector on CuPy's current device, which was still GPU 0.",
            "Weights were loaded on one GPU and the pool was made on another.",
        ),
        solutions=(
            "Make every array of a worker inside `with cupy.cuda.Device(n):`.",
            "Copy the odd one over: inside that block, cupy.asarray(x) copies between GPUs.",
        ),
        before=(
            f"{_TO_GPU}\n"
            "with cupy.cuda.Device(1):\n"
            "    operands[5] = cupy.asarray(initial_state)\n"
            "kda_cupy.kda_packed_decode(*operands)"
        ),
        after=(
            f"import cupy\n\noperands = (\n    {_OPERANDS}\n)\n"
            "with cupy.cuda.Device(1):\n"
            "    operands = [cupy.asarray(operand) for operand in operands]\n"
            "kda_cupy.kda_packed_decode(*operands)"
        ),
        related=("KDA-ARRAY-HOST-ON-DEVICE", "KDA-STATE-DEVICE"),
        needs="two GPUs",
    ),
    Page(
        code="KDA-PACKED-BATCH",
        exception=OperandError,
        words="Mismatched batch sizes: {got}",
        cure="Pass as many rows of each as there are sequences, padding all three alike",
        meaning="Row i of `mixed_qkv`, `a` and `b` belongs to the same sequence, so all three have B rows.",
        when=(
            "The projection was padded to a captured batch size and the gates were not.",
            "`a` and `b` of one micro-batch were passed with mixed_qkv of another.",
        ),
        solutions=(
            "Pad every operand to the same B, and mark padded rows with slot -1.",
            "Slice all of them with the same number of live rows.",
        ),
        before=f"mixed_qkv = np.resize(mixed_qkv, (4, mixed_qkv.shape[1]))\n{_CALL}",
        after=(
            "mixed_qkv, a, b = (np.resize(x, (4, x.shape[1])) for x in (mixed_qkv, a, b))\n"
            "ssm_state_indices = np.append(ssm_state_indices, -1)\n"
            f"{_CALL}"
        ),
        related=("KDA-PACKED-INDICES-SHAPE", "KDA-PACKED-OUT-SHAPE"),
    ),
    Page(
        code="KDA-PACKED-INDICES-SHAPE",
        exception=OperandError,
        words="`ssm_state_indices` must have shape [B] (got {got}; expected {expected})",
        cure="Pass one slot per row of `mixed_qkv`, with -1 for rows of padding",
        meaning=(
            "Every row needs to know which slot its state is in. A shorter vector would leave rows without a slot, a "
            "longer one would hide that it belongs to another batch."
        ),
        when=(
            "The index buffer has the captured batch size and the projection has only the live rows, or the reverse.",
            "Slots of all running sequences were passed for one micro-batch.",
        ),
        solutions=("Slice the buffer: slots[:B].", "Pad the projection and mark the padded rows with -1."),
        before=f"slots = np.array([1, 2, 3, -1], np.int32)\nssm_state_indices = slots\n{_CALL}",
        after=f"slots = np.array([1, 2, 3, -1], np.int32)\nssm_state_indices = slots[:B]\n{_CALL}",
        related=("KDA-PACKED-BATCH", "KDA-PACKED-INDICES-RANK"),
    ),
    Page(
        code="KDA-PACKED-AB-SHAPE",
        exception=OperandError,
        words="`a`/`b` must have shape {shape} (got {got})",
        cure="Pass gates of the value heads that the state has on this GPU",
        meaning=(
            "HV and K are those of the state, [P, HV, V, K]. gdn_packed_decode has one gate per head, so `a` is [B, "
            "HV]; kda_packed_decode has one per key, so `a` is [B, HV*K]. `b` is [B, HV] for both."
        ),
        when=(
            "The operation of the other model family was called: GDN gates given to kda_packed_decode.",
            "The gates of all heads were passed where the state has only those of one tensor-parallel rank.",
            "Gates per query head, H, were passed where HV is larger.",
        ),
        solutions=(
            "Call gdn_packed_decode for one gate per head, kda_packed_decode for one per key.",
            "Slice the gates of this rank's heads: a[:, rank * HV * K : (rank + 1) * HV * K].",
        ),
        before=f"a = np.zeros((B, HV), np.float32)\n{_CALL}",
        after=(
            "a = np.zeros((B, HV), np.float32)\n"
            "dt_bias = np.zeros(HV, np.float32)\n"
            f"{_CALL.replace('kda_packed', 'gdn_packed')}"
        ),
        related=("KDA-PACKED-AB-RANK", "KDA-PACKED-GATE-NUMEL", "KDA-STATE-LAYOUT"),
    ),
    Page(
        code="KDA-PACKED-GATE-NUMEL",
        exception=OperandError,
        words="`A_log` and `dt_bias` must have {elements} elements (got {got})",
        cure="Pass the parameters of the value heads that the state has on this GPU",
        meaning=(
            "`A_log` has one element per value head. `dt_bias` has one per value head for gdn_packed_decode, and one "
            "per value head and key for kda_packed_decode, as [HV*K] or [HV, K]. HV and K are those of the state."
        ),
        when=(
            "Parameters of all heads were passed with the state of one tensor-parallel rank.",
            "dt_bias of a GDN layer (HV elements) was given to kda_packed_decode.",
            "A two-dimensional dt_bias is transposed, [K, HV].",
        ),
        solutions=(
            "Slice the parameters as the weights were sliced: A_log[rank * HV : (rank + 1) * HV].",
            "Call the operation that the layer was trained with.",
        ),
        before=f"A_log = np.zeros(2 * HV, np.float32)\n{_CALL}",
        after=f"A_log = np.zeros(2 * HV, np.float32)[:HV]\n{_CALL}",
        related=("KDA-PACKED-AB-SHAPE", "KDA-PACKED-GATE-RANK", "KDA-VALUE-A-LOG-MISSING"),
    ),
    Page(
        code="KDA-PACKED-OUT-SHAPE",
        exception=OperandError,
        words="`out` must have shape {expected} (got {got})",
        cure="Allocate it as (B, 1, HV, V), or leave it out",
        meaning=(
            "The output keeps a time axis of length 1, [B, 1, HV, V], as the packed decodes of other projects return "
            "it. B comes from mixed_qkv, HV and V from the state."
        ),
        when=(
            "The time axis was left out: (B, HV, V).",
            "`out` was allocated for query heads, H, where HV is larger.",
            "A buffer of the largest batch was passed whole.",
        ),
        solutions=(
            "Pass buffer[:B] of a [max_batch, 1, HV, V] buffer.",
            "Add the time axis with out[:, None].",
        ),
        before=f"out = np.empty((B, HV, V), np.float32)\n{_CALL_INTO_OUT}",
        after=f"out = np.empty((B, HV, V), np.float32)\n{_CALL_WITH % 'out=out[:, None]'}",
        related=("KDA-PACKED-OUT-CONTIGUOUS", "KDA-PACKED-BATCH"),
    ),
    Page(
        code="KDA-PACKED-QKV-WIDTH",
        exception=OperandError,
        words="`qk_dim = qkv_dim - HV*V` must be positive and even (got {got})",
        cure="Pass rows of q, k and v together as `mixed_qkv`, 2*H*K + HV*V wide",
        meaning=(
            "H is inferred from the width of a row: what is left beside the HV*V elements of v belongs half to q and "
            "half to k. HV and V are those of the state."
        ),
        when=(
            "Only v, or only q and k, was passed.",
            "The state has more value heads than the projection: the pool of another tensor-parallel size.",
            "V and K of the state are swapped, so that HV*V is not the width of v.",
        ),
        solutions=(
            "Pass the output of the fused projection, before it is split.",
            "Join the parts: np.concatenate([q, k, v], axis=1).",
        ),
        before=f"mixed_qkv = mixed_qkv[:, 2 * H * K :]\n{_CALL}",
        after=(
            "q, k, v = np.split(mixed_qkv, [H * K, 2 * H * K], axis=1)\n"
            "mixed_qkv = np.concatenate([q, k, v], axis=1)\n"
            f"{_CALL}"
        ),
        related=("KDA-PACKED-Q-WIDTH", "KDA-PACKED-HEADS", "KDA-STATE-LAYOUT"),
    ),
    Page(
        code="KDA-PACKED-Q-WIDTH",
        exception=OperandError,
        words="`qk_dim/2` must be a multiple of K={K} (got {got})",
        cure="Pass q and k of whole heads in `mixed_qkv`, as wide as the last axis of the state",
        meaning=(
            "q and k are H heads of K elements each, and K is the last axis of the state, [P, HV, V, K]. A width "
            "that is no multiple of K has no whole number of heads."
        ),
        when=(
            "The state was made for another head dimension than the projection.",
            "V and K of the state are swapped.",
            "The projection has extra columns, such as the gates, that were not cut off.",
        ),
        solutions=(
            "Slice the columns of q, k and v out of the wider projection; no copy is needed.",
            "Make the pool with the model's head dimensions: StatePool(capacity, HV, K, V).",
        ),
        before=f"mixed_qkv = np.zeros((B, 2 * H * 48 + HV * V), np.float32)\n{_CALL}",
        after=f"mixed_qkv = np.zeros((B, 2 * H * K + HV * V), np.float32)\n{_CALL}",
        related=("KDA-PACKED-QKV-WIDTH", "KDA-PACKED-HEADS"),
    ),
    Page(
        code="KDA-PACKED-HEADS",
        exception=OperandError,
        words="H >= 1 and HV % H == 0 must hold (got {got})",
        cure="Pass a `mixed_qkv` whose number of query heads divides the value heads of the state",
        meaning=(
            "Value head hv reads q and k of head hv // (HV // H): every query head serves the same number of value "
            "heads, so H must divide HV. H is inferred from the width of a row."
        ),
        when=(
            "Query heads and value heads were split over different numbers of GPUs.",
            "The projection has extra columns that look like another head.",
            "HV is smaller than H: the arrangement of grouped-query attention, the other way round.",
        ),
        solutions=(
            "Split both kinds of heads over the same tensor-parallel ranks.",
            "Cut off columns that are not q, k or v: projection[:, : 2*H*K + HV*V].",
        ),
        before=f"mixed_qkv = np.zeros((B, 2 * 3 * K + HV * V), np.float32)\n{_CALL}",
        after=f"mixed_qkv = np.zeros((B, 2 * 2 * K + HV * V), np.float32)\n{_CALL}",
        related=("KDA-PACKED-QKV-WIDTH", "KDA-PACKED-Q-WIDTH"),
    ),
)

_VERIFY: Final = (
    Page(
        code="KDA-VERIFY-TREE",
        exception=OperandError,
        words="Tree drafts are not supported: `{operand}` must be None",
        cure="Verify the drafts of a request as one chain, each token after the one before it",
        meaning=(
            "A verify runs the tokens of a request one after another from one state. In a tree, a token continues from "
            "its parent instead, and running it as a chain would give wrong outputs without a sign of it."
        ),
        when=(
            "The engine proposes several continuations of one token (a top-k above 1 in EAGLE and the like).",
            "The caller passes its tree arrays in any case, also for chains.",
        ),
        solutions=(
            "Configure the proposer for chains: a top-k of 1.",
            "Verify each path of the tree as a request of its own, on a copy of the slot.",
        ),
        before="kda_cupy.kda_decode_mtp(\n    **verify, parents=np.array([-1, 0, 0, 1])\n)",
        after=_VERIFY_CALL,
        related=("KDA-VERIFY-TOKENS",),
    ),
    Page(
        code="KDA-VERIFY-QK-SHAPE",
        exception=OperandError,
        words="expected q/k shape (1, T, H, 128) for `x_q` and `x_k`, the same for both",
        cure="Pass raw projections of all tokens, packed along T, with a leading axis of 1",
        meaning=(
            "The tokens of all requests stand one behind the other on the second axis. H is the number of query and "
            "key heads on this GPU. Only head dimension 128 is compiled, which KDA and Qwen3-Next models have."
        ),
        when=(
            "Requests were kept apart, [N, t, H, 128].",
            "Heads are still folded into the last axis, [1, T, H*128].",
            "The model has another head dimension.",
        ),
        solutions=(
            "Fold requests into tokens: x_q.reshape(1, N * t, H, 128).",
            "Split off heads with reshape(1, T, H, 128), which copies nothing for a column slice.",
        ),
        before=f'verify["x_q"] = verify["x_q"].reshape(1, T, D)\n{_VERIFY_CALL}',
        after=f'verify["x_q"] = verify["x_q"].reshape(1, T, 1, D)\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-VG-SHAPE", "KDA-VERIFY-TOKENS"),
    ),
    Page(
        code="KDA-VERIFY-VG-SHAPE",
        exception=OperandError,
        words="expected v/g shape {shape} with HV a multiple of H",
        cure="Pass values and raw gates of every value head and token of `x_q`",
        meaning=(
            "`x_v` and the raw gate `g` have one row of 128 per value head and token. Value head hv uses q and k of "
            "head hv // (HV // H), so HV is H times a whole number."
        ),
        when=(
            "The gate of a GDN layer, one per head, was passed: a verify takes one per key.",
            "Values and keys were split over different numbers of GPUs, so that H does not divide HV.",
            "Values cover other tokens than `x_q`: the padded batch on one side, the live rows on the other.",
        ),
        solutions=(
            "Broadcast a gate per head over the keys, into an array of its own.",
            "Slice values, keys and gates with the same tokens and the same tensor-parallel rank.",
        ),
        before=f'verify["g"] = verify["g"][..., :1]\n{_VERIFY_CALL}',
        after=f'gate = verify["g"][..., :1]\nverify["g"] = np.repeat(gate, D, axis=-1)\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-QK-SHAPE", "KDA-VERIFY-BETA-SHAPE", "KDA-PACKED-HEADS"),
    ),
    Page(
        code="KDA-VERIFY-BETA-SHAPE",
        exception=OperandError,
        words="expected beta shape {shape}",
        cure="Pass one raw logit per token and value head",
        meaning="Beta is a number per token and value head, raw: the sigmoid is part of the operation.",
        when=(
            "A trailing axis of 1 is left over: [1, T, HV, 1].",
            "The leading axis of 1 is missing.",
            "Logits per query head were passed where HV is larger.",
        ),
        solutions=("Index the superfluous axis away, beta[..., 0], or add the missing one, beta[None].",),
        before=f'verify["beta"] = verify["beta"][..., None]\n{_VERIFY_CALL}',
        after=f'verify["beta"] = verify["beta"][..., None][..., 0]\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-VG-SHAPE",),
    ),
    Page(
        code="KDA-VERIFY-CU-SEQLENS",
        exception=OperandError,
        words="`cu_seqlens` must be a contiguous vector [N+1]",
        cure="Pass where each request's tokens begin, and where the last one's end: np.cumsum with a 0 in front",
        meaning=(
            "Request n has the tokens from cu_seqlens[n] up to cu_seqlens[n+1]. The number of requests N is read from "
            "its length, so that it is the one vector that may not be missing, empty or strided."
        ),
        when=(
            "Lengths were passed as a column of a table.",
            "It has a batch axis, [1, N+1].",
            "It is empty: without requests it is still [0].",
        ),
        solutions=("Keep it as a vector of its own, and write new lengths into it in place.",),
        before=(
            "table = np.array([[0, 0], [2, 0], [4, 0]], np.int32)\n"
            f'verify["cu_seqlens"] = table[:, 0]\n{_VERIFY_CALL}'
        ),
        after=f'verify["cu_seqlens"] = np.array([0, 2, 4], np.int32)\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-TOKENS", "KDA-VERIFY-INDICES-SHAPE", "KDA-VALUE-LENGTH-RANGE"),
    ),
    Page(
        code="KDA-VERIFY-TOKENS",
        exception=OperandError,
        words="DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got {got}",
        cure=(
            "Pass N times as many tokens as a request has, `cu_seqlens` being N + 1 long, or max_tokens_per_request "
            "for lengths that differ"
        ),
        meaning=(
            "Without max_tokens_per_request every request has t = T / N tokens, so T is a multiple of N. With it, the "
            "lengths come from cu_seqlens on the GPU and T may be anything, as long as there are requests."
        ),
        when=(
            "Requests have different numbers of drafts.",
            "`x_q` was padded to a captured number of tokens and cu_seqlens was not.",
            "cu_seqlens has N elements: the end of the last request is missing.",
        ),
        solutions=(
            "Pass max_tokens_per_request, the longest that a request can be.",
            "Pad requests to one length, and the batch with requests of slot -1.",
        ),
        before=f'verify["cu_seqlens"] = np.array([0, 1, 3, 4], np.int32)\n{_VERIFY_CALL}',
        after=(
            'verify["cu_seqlens"] = np.array([0, 2, 3], np.int32)\n'
            "kda_cupy.kda_decode_mtp(**verify, max_tokens_per_request=2)"
        ),
        related=("KDA-VERIFY-MAX-TOKENS", "KDA-VERIFY-CU-SEQLENS", "KDA-VALUE-LENGTH-RANGE"),
    ),
    Page(
        code="KDA-VERIFY-MAX-TOKENS",
        exception=OperandError,
        words="A request may have 1 to 16 tokens, the bonus token included",
        cure="Propose fewer drafts, or pass max_tokens_per_request as a whole number from 1 to 16",
        meaning=(
            "A block keeps what all tokens of a request need of each other at hand, and there is room for 16. "
            "max_tokens_per_request is the longest request that a launch may meet; it is a number on the host."
        ),
        when=(
            "The proposer makes 16 drafts or more: with the bonus token that is 17.",
            "A prompt was passed: a verify is no prefill.",
            "max_tokens_per_request was computed on the GPU, or as a float.",
        ),
        solutions=("Limit the proposer to 15 drafts.", "Convert the limit once: int(limit)."),
        before="kda_cupy.kda_decode_mtp(**verify, max_tokens_per_request=64)",
        after="kda_cupy.kda_decode_mtp(**verify, max_tokens_per_request=2)",
        related=("KDA-VERIFY-TOKENS", "KDA-VALUE-LENGTH-RANGE"),
    ),
    Page(
        code="KDA-VERIFY-A-LOG-NUMEL",
        exception=OperandError,
        words="Unexpected {operand} shape: {shape}; expected numel={numel}",
        cure="Pass the parameters of the value heads that are on this GPU: HV of `A_log`, HV*128 of `dt_bias`",
        meaning=(
            "`A_log` has one element per value head, in any shape; `dt_bias` one per value head and key, as [HV*128] "
            "or [HV, 128]. HV is that of `x_v`."
        ),
        when=(
            "Parameters of all heads were passed on one tensor-parallel rank.",
            "`dt_bias` of a GDN layer, one element per head, was passed.",
        ),
        solutions=("Slice the parameters as the weights were sliced: A_log[rank * HV : (rank + 1) * HV].",),
        before=f'verify["dt_bias"] = np.zeros(2 * D, np.float32)\n{_VERIFY_CALL}',
        after=f'verify["dt_bias"] = np.zeros(2 * D, np.float32)[:D]\n{_VERIFY_CALL}',
        related=("KDA-PACKED-GATE-NUMEL", "KDA-VERIFY-VG-SHAPE"),
    ),
    Page(
        code="KDA-VERIFY-STATE-MEMORY",
        exception=OperandError,
        words=(
            "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and 16-byte-aligned slot offsets"
        ),
        cure="Pass `{operand}` as kda_cupy.StatePool makes it",
        meaning=(
            "The state is float32, because rounding adds up over a sequence; its last three axes are dense, and every "
            "slot begins on a 16-byte boundary, because it is loaded 16 bytes at a time. Only the slot stride is free."
        ),
        when=(
            "The pool is in bfloat16, to save memory.",
            "K and V were swapped without a copy, or heads were sliced with a step.",
            "The pool begins at an odd offset of a larger allocation.",
        ),
        solutions=(
            "Make the pool with kda_cupy.StatePool, or wrap yours with StatePool.wrap, which checks it once.",
            "Store states as [P, HV, V, K] from the start; copy a transposed pool once.",
        ),
        before=(
            'states = verify["recurrent_state"]\n'
            'verify["recurrent_state"] = states.swapaxes(2, 3)\n'
            f"{_VERIFY_CALL}"
        ),
        after=(
            'states = verify["recurrent_state"].swapaxes(2, 3)\n'
            'verify["recurrent_state"] = np.ascontiguousarray(states)\n'
            f"{_VERIFY_CALL}"
        ),
        related=("KDA-STATE-LAYOUT", "KDA-STATE-DTYPE", "KDA-STATE-STRIDES", "KDA-STATE-ALIGNMENT"),
        predicate="is_valid_state",
    ),
    Page(
        code="KDA-VERIFY-CONV-WEIGHT",
        exception=OperandError,
        words="The convolution's `{operand}` must be {shape}",
        cure="Pass four taps per channel as [channels, 4], and biases for q, k and v or for none of them",
        meaning=(
            "The convolution is per channel: four taps, the last of which is for the newest token, and a bias if the "
            "layer has one. There are H*128 channels for q and for k, and HV*128 for v."
        ),
        when=(
            "The weight of a torch Conv1d was passed as it is, [channels, 1, 4].",
            "Weights of q, k and v are still in one array.",
            "The layer has another kernel size.",
        ),
        solutions=(
            "Drop the middle axis: weight[:, 0] or weight.squeeze(1).",
            "Slice the joint weight by channels: q first, then k, then v.",
        ),
        before=f'weight = np.zeros((D, 1, 4), np.float32)\nverify["w_q"] = weight\n{_VERIFY_CALL}',
        after=f'weight = np.zeros((D, 1, 4), np.float32)\nverify["w_q"] = weight[:, 0]\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-CONV-HISTORY", "KDA-VERIFY-CONV-WINDOW"),
    ),
    Page(
        code="KDA-VERIFY-CONV-HISTORY",
        exception=OperandError,
        words="The conv history `{operand}` must be {shape}",
        cure="Pass the last three raw inputs of every slot and channel, oldest first",
        meaning=(
            "A slot has a recurrent state and the three raw inputs before the next token, for each channel of q, k "
            "and v. Both live under the same slot number, so there are as many histories as states. Strides are free: "
            "channels may be next to each other."
        ),
        when=(
            "The history has room for four inputs, or for the drafts as well.",
            "Taps and channels are in the other order, [P, 3, channels].",
            "The conv pool was made with another number of slots than the state pool.",
        ),
        solutions=(
            "Swap the axes without a copy: cs.swapaxes(1, 2).",
            "Slice the channels of q, k and v out of one history.",
        ),
        before=(f'history = np.zeros((P, 3, D), np.float32)\nverify["cs_q"] = history\n{_VERIFY_CALL}'),
        after=(
            'history = np.zeros((P, 3, D), np.float32)\nverify["cs_q"] = history.swapaxes(1, 2)\n'
            f"{_VERIFY_CALL}"
        ),
        related=("KDA-VERIFY-CONV-WINDOW", "KDA-VERIFY-CONV-WEIGHT"),
    ),
    Page(
        code="KDA-VERIFY-CONV-WINDOW",
        exception=OperandError,
        words="The conv windows `{operand}` must be {shape}",
        cure="Allocate one window of three inputs per scratch row, token and channel",
        meaning=(
            "After each token a verify stores the last three raw inputs of every channel, so that a commit can make "
            "any of them the history. There must be a step for each token that a request can have. Strides are free."
        ),
        when=(
            "The scratch was made for fewer drafts than are verified now.",
            "Taps and channels are in the other order.",
            "Channels of key heads were allocated for v, whose heads are more.",
        ),
        solutions=("Allocate [rows, most tokens, channels, 3], or swap axes without a copy.",),
        before=(
            'windows = np.zeros((3, 1, D, 3), np.float32)\nverify["intermediate_conv_q"] = windows\n'
            f"{_VERIFY_CALL}"
        ),
        after=(
            'windows = np.zeros((3, 2, D, 3), np.float32)\nverify["intermediate_conv_q"] = windows\n'
            f"{_VERIFY_CALL}"
        ),
        related=("KDA-VERIFY-CONV-HISTORY", "KDA-VERIFY-SCRATCH-ROWS", "KDA-VERIFY-SNAPSHOT-LAYOUT"),
    ),
    Page(
        code="KDA-VERIFY-ROLLBACK",
        exception=OperandError,
        words="Either `intermediate_ssm` or the replayssm_* rings, which `ring_indices` is for, must be given",
        cure="Pass snapshots or rings, and None for the other",
        meaning=(
            "A verify leaves behind what a commit needs: the state after every token, or the inputs from which the "
            "accepted tokens can be run again. Rings are sixty times smaller; one of the two is enough."
        ),
        when=(
            "Snapshots are allocated in any case and rings were switched on.",
            "Neither was passed, to verify without a rollback.",
        ),
        solutions=(
            "Pass intermediate_ssm=None where rings are in use.",
            "Allocate rings if memory is short: about 1 kB a head and token.",
        ),
        before="kda_cupy.kda_decode_mtp(**verify | rings)",
        after='del verify["intermediate_ssm"]\nkda_cupy.kda_decode_mtp(**verify | rings)',
        related=("KDA-VERIFY-RINGS-INCOMPLETE", "KDA-VERIFY-SNAPSHOT-LAYOUT", "KDA-COMMIT-INCOMPLETE"),
    ),
    Page(
        code="KDA-VERIFY-RINGS-INCOMPLETE",
        exception=OperandError,
        words="ReplaySSM requires all four replayssm_* rings",
        cure="Pass `{operand}` too, or none of them",
        meaning=(
            "To run accepted tokens again, a commit needs their values, keys, log decays and betas; three of them are "
            "of no use."
        ),
        when=(
            "A ring was renamed or forgotten when the call was written.",
            "One of them is None in this layer.",
        ),
        solutions=("Allocate the four together and pass them together.",),
        before='del verify["intermediate_ssm"], rings["replayssm_g"]\nkda_cupy.kda_decode_mtp(**verify | rings)',
        after='del verify["intermediate_ssm"]\nkda_cupy.kda_decode_mtp(**verify | rings)',
        related=("KDA-VERIFY-RING-LAYOUT", "KDA-VERIFY-ROLLBACK"),
    ),
    Page(
        code="KDA-VERIFY-RING-LAYOUT",
        exception=OperandError,
        words="expected ReplaySSM ring layouts {layout}",
        cure="Allocate [slots, HV, L, 128] for rawv and g, [slots, H, L, 128] for rawk and [slots, HV, L] for beta",
        meaning=(
            "Rings have a row per slot (or per ring_indices value), a part per head and a step per token of the "
            "verify; rawk has key heads, the others value heads. Rows may be apart, rawv and rawk also from head to "
            "head; within that they are dense."
        ),
        when=(
            "rawk was allocated for value heads where H is smaller.",
            "The rings hold fewer steps than a request has tokens.",
            "Steps come before heads, [slots, L, HV, 128].",
            "There are fewer ring rows than slots, and no ring_indices to tell which is whose.",
        ),
        solutions=(
            "Allocate as many steps as a request can have tokens.",
            "Pass ring_indices [N] for rings with a row per running request.",
        ),
        before=(
            'del verify["intermediate_ssm"]\n'
            'rings["replayssm_beta"] = np.zeros((P, 2, 1), np.float32)\n'
            "kda_cupy.kda_decode_mtp(**verify | rings)"
        ),
        after=(
            'del verify["intermediate_ssm"]\n'
            'rings["replayssm_beta"] = np.zeros((P, 1, 2), np.float32)\n'
            "kda_cupy.kda_decode_mtp(**verify | rings)"
        ),
        related=("KDA-VERIFY-RING-DTYPE", "KDA-VERIFY-RINGS-INCOMPLETE", "KDA-VERIFY-SNAPSHOT-LAYOUT"),
    ),
    Page(
        code="KDA-VERIFY-RING-DTYPE",
        exception=OperandError,
        words="expected ReplaySSM ring dtypes rawv/rawk={activation}, g/beta=fp32",
        cure="Allocate rawv and rawk in the dtype of the activations, g and beta in float32",
        meaning=(
            "Activations after the convolution are rounded to the activation dtype, so rawv and rawk hold them "
            "exactly. Decays and betas are computed in float32; to round them would change the committed state."
        ),
        when=(
            "All rings were allocated in bfloat16.",
            "The activations are float16 or float32 and the rings were made for bfloat16.",
        ),
        solutions=("Take the dtype from the operands: np.zeros(shape, x_q.dtype).",),
        before=(
            'del verify["intermediate_ssm"]\n'
            'rings["replayssm_rawv"] = rings["replayssm_rawv"].astype(np.float16)\n'
            "kda_cupy.kda_decode_mtp(**verify | rings)"
        ),
        after='del verify["intermediate_ssm"]\nkda_cupy.kda_decode_mtp(**verify | rings)',
        related=("KDA-VERIFY-RING-LAYOUT", "KDA-ARRAY-DTYPE"),
    ),
    Page(
        code="KDA-VERIFY-SNAPSHOT-LAYOUT",
        exception=OperandError,
        words="expected intermediate SSM layout [scratch, >={steps}, H, V=128, K=128], float32 and 16-byte-aligned",
        cure="Allocate `intermediate_ssm` with one state per scratch row and token, dense in the last three axes",
        meaning=(
            "A snapshot is the whole state after a token, rows V and columns K, and a commit copies it into the pool. "
            "There must be a step for each token that a request can have. Rows and steps may be apart, by multiples of "
            "16 bytes."
        ),
        when=(
            "The scratch was made for fewer drafts than are verified now.",
            "It is in the activation dtype, or has the heads of another tensor-parallel size.",
            "It is a slice of something wider than 128, or begins at an odd offset.",
        ),
        solutions=(
            "Allocate it with np.empty((rows, most tokens, HV, 128, 128), np.float32).",
            "Use rings instead, which are sixty times smaller.",
        ),
        before=f'verify["intermediate_ssm"] = np.zeros((3, 1, 1, D, D), np.float32)\n{_VERIFY_CALL}',
        after=f'verify["intermediate_ssm"] = np.zeros((3, 2, 1, D, D), np.float32)\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-ROLLBACK", "KDA-VERIFY-SCRATCH-ROWS", "KDA-STATE-LAYOUT"),
    ),
    Page(
        code="KDA-VERIFY-SCRATCH-ROWS",
        exception=OperandError,
        words="Snapshots and conv windows must have the same number of scratch rows",
        cure="Allocate `{operand}` with as many rows as the others",
        meaning=(
            "intermediate_state_indices names one scratch row per request, and it is the same row of the snapshots and "
            "of the three windows. With different numbers of rows, a row that exists in one may not exist in another."
        ),
        when=(
            "The arrays were sized at different times, for different batch sizes.",
            "One of them was sliced to the live requests.",
        ),
        solutions=("Allocate and slice the scratch arrays together.",),
        before=f'verify["intermediate_ssm"] = np.zeros((4, 2, 1, D, D), np.float32)\n{_VERIFY_CALL}',
        after=f'verify["intermediate_ssm"] = np.zeros((3, 2, 1, D, D), np.float32)\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-SNAPSHOT-LAYOUT", "KDA-VERIFY-CONV-WINDOW", "KDA-VERIFY-INDICES-SHAPE"),
    ),
    Page(
        code="KDA-VERIFY-INDICES-SHAPE",
        exception=OperandError,
        words="`{operand}` must have one number per request, shape {shape}",
        cure="Slice it to the requests of this launch, or pad the launch with requests of slot -1",
        meaning=(
            "Every request has a slot, a scratch row, an accept count. A vector of another length belongs to another "
            "batch: read as it is, a request would get what is somebody else's, or what lies behind the vector."
        ),
        when=(
            "A buffer of the largest batch was passed whole.",
            "A vector of an earlier, larger launch was kept.",
            "There is one number per token instead of one per request.",
        ),
        solutions=(
            "Slice the buffer: indices[:N].",
            "Pad all vectors to one N, with slot -1 where there is no request.",
        ),
        before=f'verify["ssm_state_indices"] = np.array([1, 2, -1])\n{_VERIFY_CALL}',
        after=f'verify["ssm_state_indices"] = np.array([1, 2, -1])[:N]\n{_VERIFY_CALL}',
        related=("KDA-VERIFY-CU-SEQLENS", "KDA-VALUE-SLOT-RANGE", "KDA-PACKED-INDICES-SHAPE"),
    ),
    Page(
        code="KDA-VERIFY-ONORM-INCOMPLETE",
        exception=OperandError,
        words="fused output norm requires onorm_gate, onorm_weight, and onorm_eps",
        cure="Pass `{operand}` too, or none of the three",
        meaning="The norm divides by the root of the mean square plus epsilon, and multiplies by weight and gate.",
        when=("The epsilon was left to a default; there is none, since models differ.",),
        solutions=("Read the epsilon from the model's config: rms_norm_eps, often 1e-5 or 1e-6.",),
        before='verify["onorm_gate"] = verify["g"]\nkda_cupy.kda_decode_mtp(**verify, onorm_eps=1e-5)',
        after=(
            'verify["onorm_gate"] = verify["g"]\n'
            'verify["onorm_weight"] = np.ones(D, np.float32)\n'
            "kda_cupy.kda_decode_mtp(**verify, onorm_eps=1e-5)"
        ),
        related=("KDA-VERIFY-ONORM-GATE-SHAPE", "KDA-VALUE-EPS"),
    ),
    Page(
        code="KDA-VERIFY-ONORM-GATE-SHAPE",
        exception=OperandError,
        words="expected output-norm gate shape {shape}",
        cure="Pass the raw gate of every token and value head as `onorm_gate`",
        meaning=(
            "The output of each token and value head is multiplied, element by element, by the sigmoid of the gate "
            "(KDA) or by its SiLU (GDN)."
        ),
        when=(
            "Heads are folded into the last axis, [1, T, HV*128].",
            "The gate covers padded tokens and `x_q` only the live ones, or the reverse.",
        ),
        solutions=("Split off heads: gate.reshape(1, T, HV, 128).",),
        before=f'norm["onorm_gate"] = verify["g"][0]\n{_VERIFY_NORM_CALL}',
        after=f'norm["onorm_gate"] = verify["g"]\n{_VERIFY_NORM_CALL}',
        related=("KDA-VERIFY-ONORM-INCOMPLETE", "KDA-VERIFY-ONORM-DTYPE"),
    ),
    Page(
        code="KDA-VERIFY-ONORM-WEIGHT-SHAPE",
        exception=OperandError,
        words="expected output-norm weight shape (128,)",
        cure="Pass the weight of the norm over a head as `onorm_weight`, the same for all heads",
        meaning="The norm runs over the 128 values of one head, and all heads share one weight of that length.",
        when=("The weight was expanded over heads, [HV, 128] or [HV*128].",),
        solutions=("Pass weight[0] of a weight that was expanded.",),
        before=f'norm["onorm_weight"] = np.ones((1, D), np.float32)\n{_VERIFY_NORM_CALL}',
        after=f'norm["onorm_weight"] = np.ones((1, D), np.float32)[0]\n{_VERIFY_NORM_CALL}',
        related=("KDA-VERIFY-ONORM-GATE-SHAPE", "KDA-VERIFY-ONORM-DTYPE"),
    ),
    Page(
        code="KDA-VERIFY-ONORM-DTYPE",
        exception=OperandError,
        words="expected output-norm gate={activation} and weight=fp32 (or bfloat16)",
        cure="Pass `onorm_gate` in the dtype of the activations and `onorm_weight` in float32 or bfloat16",
        meaning=(
            "The gate is an activation like the projections and comes in their dtype. The weight is a parameter: "
            "float32, or bfloat16 as checkpoints store it."
        ),
        when=(
            "The gate was computed in float32 for bfloat16 activations.",
            "The weight was converted to float16.",
        ),
        solutions=("Convert the gate with astype, or let its projection write the right dtype.",),
        before=f'norm["onorm_weight"] = np.ones(D, np.float16)\n{_VERIFY_NORM_CALL}',
        after=f'norm["onorm_weight"] = np.ones(D, np.float32)\n{_VERIFY_NORM_CALL}',
        related=("KDA-VERIFY-ONORM-WEIGHT-SHAPE", "KDA-ARRAY-DTYPE"),
    ),
    Page(
        code="KDA-VERIFY-OUT-SHAPE",
        exception=OperandError,
        words="`out` of packed tokens must have shape {shape}",
        cure="Allocate it like `x_v`, or leave it out",
        meaning="The output has a row of 128 per token and value head, in the order of the packed tokens.",
        when=(
            "It was allocated for query heads, H, where HV is larger.",
            "A buffer of the largest number of tokens was passed whole.",
        ),
        solutions=("Slice the tokens of a larger buffer: out[:, :T].",),
        before="kda_cupy.kda_decode_mtp(\n    **verify, out=np.empty((1, 9, 1, D), np.float32)\n)",
        after="kda_cupy.kda_decode_mtp(\n    **verify, out=np.empty((1, 9, 1, D), np.float32)[:, :T]\n)",
        related=("KDA-PACKED-OUT-SHAPE", "KDA-VERIFY-CONTIGUOUS"),
    ),
    Page(
        code="KDA-VERIFY-CONTIGUOUS",
        exception=OperandError,
        words="`{operand}` must be dense within a token (or a channel)",
        cure="Slice columns of a projection as you like, but copy what is transposed or sliced with a step",
        meaning=(
            "Heads of 128 elements stand one behind the other within a token, as a projection writes them; only the "
            "distance from token to token is free. Taps of a channel, biases and the norm's weight are dense too."
        ),
        when=(
            "Heads come before tokens, and were swapped without a copy.",
            "q, k and v are interleaved head by head in one projection.",
            "Conv weights are stored taps first, [4, channels], and were passed as .T.",
        ),
        solutions=(
            "Order the columns of the projection: q of all heads, k of all heads, v of all heads.",
            "Copy parameters once, when they are loaded: np.ascontiguousarray(weight.T).",
        ),
        before=f'taps = np.zeros((4, D), np.float32)\nverify["w_q"] = taps.T\n{_VERIFY_CALL}',
        after=(
            'taps = np.zeros((4, D), np.float32)\nverify["w_q"] = np.ascontiguousarray(taps.T)\n'
            f"{_VERIFY_CALL}"
        ),
        related=("KDA-VERIFY-QK-SHAPE", "KDA-PACKED-QKV-CONTIGUOUS"),
    ),
)

_COMMIT: Final = (
    Page(
        code="KDA-COMMIT-LAYERS",
        exception=OperandError,
        words="Either all arrays of a commit or none must have a layer axis in front: {layers}",
        cure="Stack states, scratch and histories of the same layers, or commit one layer at a time",
        meaning=(
            "All layers of a model accept the same tokens, so one launch commits them all: every array but the index "
            "vectors carries the layers in front, as many as recurrent_state has, or none does."
        ),
        when=(
            "pool.state, all layers, was passed with the scratch of one layer.",
            "The scratch covers only the linear-attention layers of a hybrid model, the pool all of them.",
        ),
        solutions=(
            "Pass pool[layer] for one layer.",
            "Allocate the scratch with the layer axis in front, and pass verify its slice scratch[layer].",
        ),
        before='commit["recurrent_state"] = commit["recurrent_state"][None]\nkda_cupy.kda_commit(**commit)',
        after=(
            'for name in ("recurrent_state", "intermediate_ssm"):\n'
            "    commit[name] = commit[name][None]\n"
            "kda_cupy.kda_commit(**commit)"
        ),
        related=("KDA-STATE-RANK", "KDA-COMMIT-INCOMPLETE"),
    ),
    Page(
        code="KDA-COMMIT-INCOMPLETE",
        exception=OperandError,
        words="Operands of a commit that belong together must be given together: `{operand}` is missing",
        cure="Pass it too, or leave out what it belongs to",
        meaning=(
            "Three groups are whole or absent: cs_q, cs_k, cs_v with intermediate_conv_q, _k, _v; track_indices with "
            "track_steps; and snapshots or windows with the intermediate_state_indices that say whose row is whose."
        ),
        when=(
            "Only the recurrent state was to be rolled back, and part of the conv arrays came along.",
            "Scratch rows were taken for slots, and intermediate_state_indices were left out.",
        ),
        solutions=(
            "Commit conv history and state together: a state without its history continues wrongly.",
            "Pass the intermediate_state_indices that the verify was given.",
        ),
        before='del commit["intermediate_state_indices"]\nkda_cupy.kda_commit(**commit)',
        after="kda_cupy.kda_commit(**commit)",
        related=("KDA-COMMIT-LAYERS", "KDA-VERIFY-ROLLBACK", "KDA-VERIFY-RINGS-INCOMPLETE"),
    ),
    Page(
        code="KDA-COMMIT-NO-VERIFY",
        exception=OperandError,
        words="There is nothing to commit: a layer commits the tokens of its last `{operand}`",
        cure="Call the layer's verify first, or kda_cupy.kda_commit with operands of your own",
        meaning=(
            "A layer remembers the slots and scratch rows of its last verify, so that a commit need not be told, and "
            "cannot be told wrongly, whose tokens are accepted."
        ),
        when=("The verify ran through kda_decode_mtp, or on another layer object.",),
        solutions=("Verify and commit on one object.", "Pass everything to kda_commit."),
        before=(
            'sizes |= {"activation_dtype": "float32"}\n'
            'sizes |= {"verify_rows": 1, "verify_tokens": 2}\n'
            "layer = kda_cupy.KdaLayer(*weights, kda_cupy.StatePool(**sizes))\n"
            "layer.commit(np.array([1]))"
        ),
        after=(
            'sizes |= {"activation_dtype": "float32"}\n'
            'sizes |= {"verify_rows": 1, "verify_tokens": 2}\n'
            "layer = kda_cupy.KdaLayer(*weights, kda_cupy.StatePool(**sizes))\n"
            "x = np.ones((2, D), np.float32)\n"
            "layer.verify(x, x, x, x, x[:, :1], layer.pool.allocate(1))\n"
            "layer.commit(np.array([1]))"
        ),
        related=("KDA-COMMIT-INCOMPLETE", "KDA-POOL-PARTS"),
    ),
)

_CONV: Final = (
    Page(
        code="KDA-CONV-PIECES",
        exception=OperandError,
        words="`{operand}` must come in one, two or three pieces, as many as `x`",
        cure="Pass one array for each, or tuples of equal length: (q, k, v)",
        meaning=(
            "Channels may lie in one array or in up to three, each with its own memory. What belongs to a channel, its "
            "history, taps, bias and windows, comes in the same pieces."
        ),
        when=(
            "The projections of q, k and v are apart, but the weight is still in one array.",
            "There are more than three pieces.",
        ),
        solutions=("Slice what is in one array by channels; a slice is no copy: weight[:C], weight[C:].",),
        before=f'conv["x"] = (conv["x"][:, :8], conv["x"][:, 8:])\n{_CONV_CALL}',
        after=(
            'conv["x"] = (conv["x"][:, :8], conv["x"][:, 8:])\n'
            'conv["weight"] = (conv["weight"][:8], conv["weight"][8:])\n'
            'history = conv["conv_state"]\n'
            f'conv["conv_state"] = (history[:, :8], history[:, 8:])\n{_CONV_CALL}'
        ),
        related=("KDA-CONV-WEIGHT-SHAPE", "KDA-CONV-STATE-SHAPE"),
    ),
    Page(
        code="KDA-CONV-X-SHAPE",
        exception=OperandError,
        words="`x` must be [B, C] or [B, C, t], pieces alike in all but C",
        cure="Swap axes of [B, t, C] without a copy: x.swapaxes(1, 2)",
        meaning=(
            "A row has one token, or t of them on the last axis, as elsewhere in this field. Strides are free, so "
            "tokens may lie in any order in memory; but which axis is which, no shape can tell."
        ),
        when=(
            "One row was passed without its batch axis.",
            "Heads are split off: [B, H, 128].",
            "The pieces have different numbers of tokens.",
        ),
        solutions=("Fold heads into channels: x.reshape(B, H * 128).", "Add the batch axis: x[None]."),
        before=f'conv["x"] = np.ones((B, 2, 3, 4), np.float32)\n{_CONV_CALL}',
        after=f'conv["x"] = np.ones((B, 2, 3, 4), np.float32).reshape(B, C)\n{_CONV_CALL}',
        related=("KDA-CONV-PIECES", "KDA-CONV-OUT-SHAPE"),
    ),
    Page(
        code="KDA-CONV-WEIGHT-SHAPE",
        exception=OperandError,
        words="The taps or biases `{operand}` of a conv update must be {shape}",
        cure="Pass the taps of every channel of `x`, the newest token's last, and one bias a channel",
        meaning=(
            "The convolution is per channel: two, three or four taps, and a bias if the layer has one. Its width is "
            "that of the weight, and the history is one shorter."
        ),
        when=(
            "The weight of a torch Conv1d was passed as it is, [C, 1, width].",
            "The weight has the channels of another tensor-parallel size.",
        ),
        solutions=(
            "Drop the middle axis: weight[:, 0].",
            "Swap axes of a weight stored taps first: weight.T.",
        ),
        before=f'conv["weight"] = np.ones((C, 1, 4), np.float32)\n{_CONV_CALL}',
        after=f'conv["weight"] = np.ones((C, 1, 4), np.float32)[:, 0]\n{_CONV_CALL}',
        related=("KDA-CONV-STATE-SHAPE", "KDA-VERIFY-CONV-WEIGHT"),
    ),
    Page(
        code="KDA-CONV-STATE-SHAPE",
        exception=OperandError,
        words="The history `{operand}` of a conv update must be {shape}",
        cure="Pass the width - 1 raw inputs before the next token, oldest first, for every slot and channel",
        meaning=(
            "A slot keeps, for each channel, as many raw inputs as the convolution looks back. Strides are free: "
            "channels may be next to each other in memory, or the taps."
        ),
        when=(
            "Taps and channels are in the other order, [P, width - 1, C].",
            "The history has room for the current token, or for drafts.",
            "Without `conv_state_indices`, there are fewer slots than rows.",
        ),
        solutions=(
            "Swap the axes without a copy: conv_state.swapaxes(1, 2).",
            "Slice the newest inputs out of a longer history: conv_state[:, :, -3:].",
        ),
        before=f'conv["conv_state"] = np.zeros((5, 3, C), np.float32)\n{_CONV_CALL}',
        after=f'conv["conv_state"] = np.zeros((5, 3, C), np.float32).swapaxes(1, 2)\n{_CONV_CALL}',
        related=("KDA-CONV-WEIGHT-SHAPE", "KDA-CONV-WINDOW-SHAPE", "KDA-VERIFY-CONV-HISTORY"),
    ),
    Page(
        code="KDA-CONV-WINDOWS-INCOMPLETE",
        exception=OperandError,
        words="`intermediate_conv_window` and `intermediate_state_indices` come together",
        cure="Pass `{operand}` too, or neither",
        meaning=(
            "With windows, the history is read and left as it is, and the window after each token goes to the row that "
            "the request has in the scratch. Without, the history is rolled in place."
        ),
        when=("Rows were left to a default; there is none, since a scratch has its own.",),
        solutions=("Number the rows of the batch, if the scratch is used by it alone: np.arange(B).",),
        before=f'conv["intermediate_state_indices"] = np.arange(B)\n{_CONV_CALL}',
        after=(
            'conv["intermediate_state_indices"] = np.arange(B)\n'
            f'conv["intermediate_conv_window"] = np.zeros((B, 1, C, 3), np.float32)\n{_CONV_CALL}'
        ),
        related=("KDA-CONV-WINDOW-SHAPE", "KDA-VALUE-ROW-RANGE"),
    ),
    Page(
        code="KDA-CONV-WINDOW-SHAPE",
        exception=OperandError,
        words="The windows `{operand}` of a conv update must be {shape}",
        cure="Allocate one window per scratch row, token and channel",
        meaning=(
            "After each token of a row the window that the next token would see is written, so that a commit can make "
            "any of them the history. There must be a step for each token. Strides are free."
        ),
        when=(
            "The scratch was made for fewer drafts than there are tokens now.",
            "Taps and channels are in the other order.",
        ),
        solutions=("Allocate [rows, most tokens, C, width - 1], or swap axes without a copy.",),
        before=(
            'conv["intermediate_state_indices"] = np.arange(B)\n'
            f'conv["intermediate_conv_window"] = np.zeros((B, C, 3), np.float32)\n{_CONV_CALL}'
        ),
        after=(
            'conv["intermediate_state_indices"] = np.arange(B)\n'
            f'conv["intermediate_conv_window"] = np.zeros((B, 1, C, 3), np.float32)\n{_CONV_CALL}'
        ),
        related=("KDA-CONV-WINDOWS-INCOMPLETE", "KDA-CONV-STATE-SHAPE", "KDA-VERIFY-CONV-WINDOW"),
    ),
    Page(
        code="KDA-CONV-OUT-SHAPE",
        exception=OperandError,
        words="`out` of a convolution must have shape {shape}",
        cure="Allocate the channels of all pieces side by side, or leave it out",
        meaning="The output is one array, like `x` in all but the channels: those of the pieces one behind the other.",
        when=("It was allocated for one piece of three.", "A buffer of the largest batch was passed whole."),
        solutions=("Slice the rows of a larger buffer: out[:B].",),
        before=f'conv["out"] = np.empty((9, C), np.float32)\n{_CONV_CALL}',
        after=f'conv["out"] = np.empty((9, C), np.float32)[:B]\n{_CONV_CALL}',
        related=("KDA-CONV-X-SHAPE", "KDA-CONV-PIECES"),
    ),
)

_VALUES: Final = (
    Page(
        code="KDA-VALUE-SLOT-RANGE",
        exception=SlotError,
        words="`{place}` must be {allowed}",
        cure="Pass slots that the pool handed out",
        meaning=(
            "A slot beyond the pool would make the kernel read and write somebody else's memory. Such a row is "
            "treated as padding: no state is touched and its output is zero. The values are on the GPU, so the "
            'launch only notes it, and check_errors() raises it later; validate="full" reads them first and raises '
            "before anything runs."
        ),
        when=(
            "A sentinel such as 2**31 - 1 marks padding; here any negative number does.",
            "Slots of a larger pool were used after the pool was made smaller.",
            "The index vector was read before its copy to the GPU had finished.",
            "A slot of another pool was released.",
        ),
        solutions=(
            "Mark padding with -1.",
            "Take slots from StatePool.allocate() of the pool that is passed.",
            'Find the call that did it with validate="full".',
        ),
        before=f"ssm_state_indices = np.array([1, 2, 9])\n{_CALL_VALIDATED}",
        after=f"ssm_state_indices = np.array([1, 2, -1])\n{_CALL_VALIDATED}",
        related=("KDA-VALUE-SLOT-DUPLICATE", "KDA-VALUE-NULL-INDEX", "KDA-POOL-RESERVED"),
    ),
    Page(
        code="KDA-VALUE-SLOT-DUPLICATE",
        exception=SlotError,
        words="`{operand}` must name a live slot once only",
        cure="Give each sequence a slot of its own; only padding (-1) may repeat",
        meaning=(
            "Rows run at the same time and each updates its slot in place. Two rows on one slot race, and the state "
            'ends up as neither. Only validate="full" can see it, for the values are on the GPU.'
        ),
        when=(
            "A slot was released twice and handed out twice.",
            "Beams or forks of one prefix still share its slot.",
            "Padded rows repeat the slot of a live row instead of -1.",
        ),
        solutions=(
            "Fork the slot before two sequences continue from it: pool.fork(slot).",
            "Mark padded rows with -1.",
        ),
        before=f"ssm_state_indices = np.array([1, 2, 2])\n{_CALL_VALIDATED}",
        after=(f"beam = pool.fork(2)\nssm_state_indices = np.array([1, 2, beam])\n{_CALL_VALIDATED}"),
        related=("KDA-VALUE-SLOT-RANGE", "KDA-POOL-DOUBLE-RELEASE"),
    ),
    Page(
        code="KDA-VALUE-ROW-RANGE",
        exception=SlotError,
        words="`{place}` must be a row from 0 up to, but not including, {rows}",
        cure="Give every live request a row that the scratch arrays or the rings have",
        meaning=(
            "Scratch rows and ring rows are numbers on the GPU, as slots are: a request with a row that is not there "
            "is treated as padding, the launch notes it, and check_errors() raises it later. A negative row is no "
            'padding; the slot says that. validate="full" reads the rows first and raises before anything runs.'
        ),
        when=(
            "Slots were passed as scratch rows, which are usually fewer.",
            "Rows of a larger scratch were used after it was made smaller.",
            "A row of padding was marked by a row of -1, and its slot is still that of a live request.",
        ),
        solutions=(
            "Number the scratch rows by request: np.arange(N).",
            "Mark padding in ssm_state_indices; the other vectors are not looked at there.",
        ),
        before=(
            'verify["intermediate_state_indices"] = np.array([0, 3])\n'
            'kda_cupy.kda_decode_mtp(**verify, validate="full")'
        ),
        after=(
            'verify["intermediate_state_indices"] = np.array([0, 2])\n'
            'kda_cupy.kda_decode_mtp(**verify, validate="full")'
        ),
        related=("KDA-VALUE-SLOT-RANGE", "KDA-VERIFY-SCRATCH-ROWS"),
    ),
    Page(
        code="KDA-VALUE-LENGTH-RANGE",
        exception=SlotError,
        words="`{place}` must hold a request of {allowed}",
        cure="Write the running sums of the lengths to `cu_seqlens`, from 0 to T at most, before the launch",
        meaning=(
            "Lengths are on the GPU, so a launch cannot refuse them: a request that is too long, negative or outside "
            "the packed tokens is treated as padding, the launch notes it, and check_errors() raises it later. "
            'validate="full" reads them first and raises before anything runs.'
        ),
        when=(
            "A captured graph was replayed with more drafts than it was captured for.",
            "The vector was read before its copy to the GPU had finished.",
            "Lengths were passed in place of their running sums.",
        ),
        solutions=(
            "Pass the largest length that can occur as max_tokens_per_request.",
            "Write padded requests as slot -1, or with the length 0.",
        ),
        before=(
            'verify["cu_seqlens"] = np.array([0, 3, 4])\nkda_cupy.kda_decode_mtp(**verify, validate="full")'
        ),
        after=(
            'verify["cu_seqlens"] = np.array([0, 3, 4])\n'
            "kda_cupy.kda_decode_mtp(\n"
            '    **verify | rings | {"intermediate_ssm": None}\n'
            ")"
        ),
        related=("KDA-VERIFY-MAX-TOKENS", "KDA-VERIFY-CU-SEQLENS", "KDA-VALUE-ACCEPT-RANGE"),
    ),
    Page(
        code="KDA-VALUE-ACCEPT-RANGE",
        exception=SlotError,
        words="`{place}` must be {allowed}",
        cure="Count the bonus token, and never more tokens than the verify ran for the request",
        meaning=(
            "Accept counts include the bonus token: 0 keeps nothing, n keeps n tokens. A count below 0 or past the "
            "scratch row would take a neighbour's state; such a row is left as it is and noted, and check_errors() "
            'raises it later. validate="full" reads the counts first and raises before anything runs.'
        ),
        when=(
            "Counts of drafts without the bonus token were reduced by one more, and became -1.",
            "Counts of a round with more drafts were kept.",
            "The step to track is not among the accepted ones.",
        ),
        solutions=(
            "Pass drafts accepted + 1, or 0 for a request that is to stay as it was.",
            "Mark rows without a request by slot -1.",
        ),
        before='commit["accept_lens"] = np.array([3, -1])\nkda_cupy.kda_commit(**commit, validate="full")',
        after='commit["accept_lens"] = np.array([2, 0])\nkda_cupy.kda_commit(**commit, validate="full")',
        related=("KDA-VALUE-LENGTH-RANGE", "KDA-VALUE-SLOT-RANGE"),
    ),
    Page(
        code="KDA-VALUE-LOWER-BOUND",
        exception=OperandError,
        words="`lower_bound` must be a finite number below 0, or None",
        cure="Pass the model's own bound, such as -5.0, or None for the softplus gate",
        meaning=(
            "lower_bound selects the bounded gate, lower_bound * sigmoid(exp(A_log) * x): the log decay lies between "
            "it and 0. A positive bound would let states grow, and 0 would switch decay off. It is a parameter of "
            "the model, not a clamp: the two gates differ everywhere."
        ),
        when=(
            "The bound was passed without its sign: 5.0.",
            "0 or False was meant to switch the bound off; None does.",
            "It was read from a config file as a string, or is an array in GPU memory.",
        ),
        solutions=(
            "Pass -abs(bound) if the config stores it without a sign.",
            "Pass None for models with the softplus gate.",
            "Convert it to a Python float when the model is loaded.",
        ),
        before=_CALL_WITH % "lower_bound=5.0",
        after=_CALL_WITH % "lower_bound=-5.0",
        related=("KDA-VALUE-A-LOG-MISSING", "KDA-VALUE-SCALE"),
    ),
    Page(
        code="KDA-VALUE-SCALE",
        exception=OperandError,
        words="`scale` must be a finite number on the host, or None",
        cure="Pass a Python float, or None for K**-0.5",
        meaning=(
            "scale multiplies q after its norm. It travels in the kernel's parameters, so it must be known on the "
            "host: a value in GPU memory would have to be waited for on every call."
        ),
        when=(
            "It was computed as a 0-d array on the GPU.",
            "It was read from a config file as a string.",
            "A division by a head dimension of 0 made it inf or nan.",
        ),
        solutions=(
            "Convert it once, when the model is loaded: float(scale).",
            "Leave it out: the default is K**-0.5.",
        ),
        before=_CALL_WITH % 'scale="0.125"',
        after=_CALL_WITH % 'scale=float("0.125")',
        related=("KDA-VALUE-LOWER-BOUND",),
    ),
    Page(
        code="KDA-VALUE-EPS",
        exception=OperandError,
        words="`onorm_eps` must be a finite number of at least 0 on the host",
        cure="Pass the model's rms_norm_eps as a Python float",
        meaning=(
            "The epsilon is added to the mean square under the root, and travels in the kernel's parameters. A "
            "negative one would make the root of a small output a NaN."
        ),
        when=("It was read from a config file as a string.", "It is an array in GPU memory."),
        solutions=("Convert it once, when the model is loaded: float(eps).",),
        before='norm["onorm_eps"] = "1e-5"\nkda_cupy.kda_decode_mtp(**verify | norm)',
        after='norm["onorm_eps"] = float("1e-5")\nkda_cupy.kda_decode_mtp(**verify | norm)',
        related=("KDA-VERIFY-ONORM-INCOMPLETE", "KDA-VALUE-SCALE"),
    ),
    Page(
        code="KDA-VALUE-A-LOG-MISSING",
        exception=OperandError,
        words="`A_log` may be None only with a `lower_bound`",
        cure="Pass the layer's `A_log`, or the `lower_bound` that its gate has",
        meaning=(
            "With a lower bound, A_log=None means a rate of exp(0) = 1. The softplus gate, -exp(A_log) * "
            "softplus(x), has no decay rate without it."
        ),
        when=(
            "The checkpoint has no A_log because its gate is bounded, and lower_bound was not passed on.",
            "The parameter was looked up under another name and came back as None.",
        ),
        solutions=(
            "Read lower_bound from the model's config and pass it.",
            "Pass A_log; zeros mean a rate of 1.",
        ),
        before=f"A_log = None\n{_CALL}",
        after=f"A_log = None\n{_CALL_WITH % 'lower_bound=-5.0'}",
        related=("KDA-VALUE-LOWER-BOUND", "KDA-PACKED-GATE-NUMEL"),
    ),
    Page(
        code="KDA-VALUE-NULL-INDEX",
        exception=OperandError,
        words="`null_index` must be -1 or 0",
        cure="Pass 0 if your engine reserves slot 0 for padding, else leave it out",
        meaning=(
            "Negative slots are always padding. null_index=0 makes slot 0 padding too, for engines that reserve "
            "block 0. Any other number would turn slots that sequences may own into padding."
        ),
        when=(
            "The engine's padding sentinel, such as 1024 or -100, was passed.",
            "The number of a real slot was passed to switch it off.",
        ),
        solutions=(
            "Leave it out if padding is negative, whichever negative number it is.",
            "Replace other sentinels by -1 in the index vector.",
        ),
        before=_CALL_WITH % "null_index=-100",
        after=_CALL_WITH % "null_index=-1",
        related=("KDA-VALUE-SLOT-RANGE", "KDA-POOL-RESERVED"),
    ),
    Page(
        code="KDA-VALUE-VALIDATE",
        exception=OperandError,
        words='`validate` must be "metadata" or "full"',
        cure='Pass "full" to have the slots read and checked first, else leave it out',
        meaning=(
            '"metadata", the default, looks at shapes, dtypes, strides and addresses and never waits for the GPU. '
            '"full" also reads the slots on the host before the launch; it waits, and cannot be captured in a graph.'
        ),
        when=("True or False was passed, as other projects take it.", "The name of the level was misspelt."),
        solutions=('Pass validate="full" while debugging, nothing in production.',),
        before=_CALL_WITH % "validate=True",
        after=_CALL_WITH % 'validate="full"',
        related=("KDA-VALUE-SLOT-RANGE", "KDA-VALUE-SLOT-DUPLICATE"),
    ),
    Page(
        code="KDA-VALUE-FLAG",
        exception=OperandError,
        words="`{operand}` must be True or False",
        cure="Pass a bool: bool(value), or value.item() for an array of one",
        meaning=(
            "A flag decides what the kernel computes, and a call whose operands look like an earlier one's is not "
            "checked again. So a flag is a bool and nothing that merely counts as one: a tensor may change later, and "
            'a string such as "False" counts as true.'
        ),
        when=(
            "A flag came from a configuration file or an environment variable as a string.",
            "A tensor or an array of one element was passed.",
            "None was passed where False was meant.",
        ),
        solutions=("Pass bool(value).", 'For strings, compare: value == "true".'),
        before=_CALL_WITH % 'allow_neg_eigval="False"',
        after=_CALL_WITH % "allow_neg_eigval=False",
        related=("KDA-VALUE-VALIDATE",),
    ),
    Page(
        code="KDA-VALUE-ACTIVATION",
        exception=OperandError,
        words='`activation` must be None or "silu"',
        cure='Pass "silu" for the convolutions of KDA and GDN, None for a bare one',
        meaning=(
            "The convolutions in front of KDA and GDN end in SiLU, x * sigmoid(x), which other projects call swish "
            "too. Nothing else is known, and nothing is guessed from a truth value."
        ),
        when=(
            'The model config says "swish".',
            "True was passed, or a function.",
        ),
        solutions=('Translate the config\'s name: "silu" if name in ("silu", "swish").',),
        before='kda_cupy.causal_conv1d_update(**conv, activation="swish")',
        after='kda_cupy.causal_conv1d_update(**conv, activation="silu")',
        related=("KDA-CONV-WEIGHT-SHAPE", "KDA-VALUE-FLAG"),
    ),
    Page(
        code="KDA-VALUE-OPERATION",
        exception=OperandError,
        words="`operation` must be one that can be bound: {known}",
        cure="Pass the function itself, then its operands",
        meaning=(
            "bind checks and converts the operands of an operation once and returns a call that only launches. It "
            "knows how to do that for the operations of this package."
        ),
        when=(
            "The operation was called inside bind: bind(kda_packed_decode(...)).",
            "Its name was passed as a string.",
            "It was wrapped, with functools.partial or a decorator, so that bind cannot recognise it.",
        ),
        solutions=(
            "Pass the function, its operands and its options side by side: bind(kda_packed_decode, ...).",
        ),
        before=f'kda_cupy.bind(\n    "kda_packed_decode",\n    {_OPERANDS},\n)',
        after=f"kda_cupy.bind(\n    kda_cupy.kda_packed_decode,\n    {_OPERANDS},\n)",
        related=("KDA-ARRAY-KIND",),
    ),
)

_ARRAYS: Final = (
    Page(
        code="KDA-ARRAY-DTYPE",
        exception=OperandError,
        words="`{operand}` must be {wanted_dtype}",
        cure="Convert it with astype before the call: nothing is cast silently",
        meaning=(
            "Kernels read bfloat16, float16 and float32 activations and parameters, and int32 and int64 slots, as "
            "they are. The gates have the dtype of `mixed_qkv` or float32, the output has that of `mixed_qkv`. A "
            "silent cast would cost a copy per call, or lose digits."
        ),
        when=(
            "NumPy made float64, its default.",
            "Slots are uint32, int16 or float, after arithmetic on them.",
            "`out` was allocated in float32 for bfloat16 activations.",
            "A quantised array (fp8, int8) was passed before it was scaled back.",
        ),
        solutions=(
            "Make arrays in the right dtype from the start: np.zeros(n, np.float32).",
            "Convert activations with astype; convert parameters once, when they are loaded.",
            "bfloat16 in NumPy and CuPy is ml_dtypes.bfloat16.",
        ),
        before=f"mixed_qkv = mixed_qkv.astype(np.float64)\n{_CALL}",
        after=f"mixed_qkv = mixed_qkv.astype(np.float32)\n{_CALL}",
        related=("KDA-STATE-DTYPE", "KDA-ARRAY-KIND", "KDA-ARRAY-BF16-SUPPORT"),
    ),
    Page(
        code="KDA-ARRAY-OVERLAP",
        exception=OperandError,
        words="`{operand}` is written to and must not share memory with another operand",
        cure="Give `{operand}` memory of its own, apart from `{other}`",
        meaning=(
            "Blocks run in any order: one would write where another has still to read, and the result would depend "
            "on luck. Views that interleave without sharing a byte are fine."
        ),
        when=(
            "`out` reuses the activation buffer, as an arena allocator hands it out again.",
            "The pool and the activations were cut from one allocation with a wrong offset.",
        ),
        solutions=(
            "Leave `out` out, or allocate it apart from the inputs.",
            "Check the offsets: np.shares_memory(out, mixed_qkv) says whether two views touch.",
        ),
        before=f"out = initial_state[0].ravel()[: B * HV * V].reshape(B, 1, HV, V)\n{_CALL_INTO_OUT}",
        after=f"out = np.empty((B, 1, HV, V), np.float32)\n{_CALL_INTO_OUT}",
        related=("KDA-STATE-STRIDES", "KDA-PACKED-OUT-CONTIGUOUS"),
    ),
    Page(
        code="KDA-ARRAY-FOLDED",
        exception=OperandError,
        words="`{operand}` is written to and every element of it must have memory of its own",
        cure="Allocate it in the shape that is used",
        meaning=(
            "A stride of 0, or one shorter than what it steps over, puts several elements into the same place. What is "
            "written to one of them would overwrite the others, in any order."
        ),
        when=(
            "Scratch was made by broadcasting one row or one step over the others.",
            "A sliding-window view of a smaller buffer was passed.",
        ),
        solutions=("Allocate it: np.empty(shape, dtype), not np.broadcast_to.",),
        before=(
            "row = np.zeros((2, D, 3), np.float32)\n"
            'verify["intermediate_conv_q"] = np.lib.stride_tricks.as_strided(\n'
            "    row, (3, *row.shape), (0, *row.strides)\n"
            ")\n"
            f"{_VERIFY_CALL}"
        ),
        after=f'verify["intermediate_conv_q"] = np.zeros((3, 2, D, 3), np.float32)\n{_VERIFY_CALL}',
        related=("KDA-ARRAY-OVERLAP", "KDA-ARRAY-READ-ONLY"),
    ),
    Page(
        code="KDA-ARRAY-NEGATIVE-STRIDE",
        exception=OperandError,
        words="`{operand}` must have strides of whole elements, none of them negative",
        cure="Copy the view: ascontiguousarray({operand})",
        meaning=(
            "Kernels take the address of the first element and positive steps in whole elements. Reversed views have "
            "negative ones, which libraries also export in different ways; fields of records may have steps that are "
            "no whole number of elements."
        ),
        when=(
            "The batch was reversed with x[::-1], or flipped.",
            "A field of a structured array was passed.",
        ),
        solutions=(
            "Copy the view with np.ascontiguousarray(x).",
            "Reorder with an index array, x[order], which makes a copy.",
        ),
        before=f"mixed_qkv = mixed_qkv[::-1]\n{_CALL}",
        after=f"mixed_qkv = np.ascontiguousarray(mixed_qkv[::-1])\n{_CALL}",
        related=("KDA-ARRAY-ALIGNMENT", "KDA-PACKED-QKV-CONTIGUOUS"),
    ),
    Page(
        code="KDA-ARRAY-ALIGNMENT",
        exception=OperandError,
        words="`{operand}` must begin at a multiple of its element size",
        cure="Copy it, or choose an offset that is a multiple of the element size",
        meaning=(
            "A GPU cannot load a float from an address between two floats: the kernel would fault, and with it the "
            "whole process's CUDA context."
        ),
        when=(
            "A buffer of bytes was viewed as floats behind a header of odd length.",
            "A field of a packed structured array was passed.",
        ),
        solutions=("Copy the array: its copy is aligned.", "Pad the header to a multiple of 16 bytes."),
        before=(
            'message = b"v1" + b.tobytes()\n'
            "b = np.frombuffer(message, np.float32, offset=2).reshape(B, HV)\n"
            f"{_CALL}"
        ),
        after=(
            'message = b"v1" + b.tobytes()\n'
            "b = np.frombuffer(message, np.float32, offset=2).reshape(B, HV)\n"
            "b = b.copy()\n"
            f"{_CALL}"
        ),
        related=("KDA-STATE-ALIGNMENT", "KDA-ARRAY-NEGATIVE-STRIDE"),
    ),
    Page(
        code="KDA-ARRAY-READ-ONLY",
        exception=OperandError,
        words="`{operand}` is written in place and must be writable",
        cure="Pass a writable copy, and keep the copy: the update is in it",
        meaning=(
            "The operations update states in place and write to `out`. Arrays marked read-only and JAX arrays (which "
            "are immutable) cannot take the update, and are welcome as inputs. A producer that hands out a copy of "
            "itself would lose it."
        ),
        when=(
            "A JAX array was passed as the pool or as `out`.",
            "The pool is a broadcast view, or mapped from a file with mode r.",
            "An array came out of np.frombuffer(bytes).",
        ),
        solutions=(
            "Keep the states in a kda_cupy.StatePool and pass JAX arrays as inputs only.",
            "Copy once with array.copy() and use the copy from then on.",
        ),
        before=f"initial_state.flags.writeable = False\n{_CALL}",
        after=f"initial_state.flags.writeable = False\ninitial_state = initial_state.copy()\n{_CALL}",
        related=("KDA-ARRAY-KIND", "KDA-STATE-STRIDES"),
    ),
    Page(
        code="KDA-ARRAY-KIND",
        exception=BridgeError,
        words="`{operand}` must be an array of NumPy, CuPy or another library with DLPack",
        cure="Make an array of it first, with numpy.asarray or cupy.asarray",
        meaning=(
            "Operands are NumPy arrays, CuPy arrays, or objects with __dlpack__ and __dlpack_device__ in host or "
            "CUDA memory (torch, JAX). They are used where they are; nothing is converted, for that would copy on "
            "every call."
        ),
        when=(
            "A list, a number or None was passed where an array belongs.",
            "The array lives on another kind of device: ROCm, Metal, a TPU.",
            "Its library refused to export it: a sparse, quantised or lazily conjugated tensor.",
            "Its library hands out a copy on every call, which a bound call would go on reading.",
        ),
        solutions=(
            "Convert it: np.asarray(x), or cupy.asarray(x) for the GPU.",
            "In torch, x.contiguous().resolve_neg() or x.to_dense() makes a plain tensor.",
        ),
        before=f"ssm_state_indices = [1, 2, 3]\n{_CALL}",
        after=f"ssm_state_indices = np.asarray([1, 2, 3])\n{_CALL}",
        related=("KDA-ARRAY-CAPSULE", "KDA-ARRAY-READ-ONLY", "KDA-ARRAY-DTYPE"),
    ),
    Page(
        code="KDA-ARRAY-CAPSULE",
        exception=BridgeError,
        words="`{operand}` must be an array, not the DLPack capsule of one",
        cure="Pass the array itself instead of x.__dlpack__() or to_dlpack(x)",
        meaning=(
            "A bare capsule does not say which stream its producer is still writing it on, so work on it could start "
            "too early. It can also be used only once. The array itself answers both."
        ),
        when=("Code for older libraries passes to_dlpack(x) or x.toDlpack() from one to the other.",),
        solutions=("Pass x: objects with __dlpack__ are taken without a copy.",),
        before=f"mixed_qkv = mixed_qkv.__dlpack__()\n{_CALL}",
        after=_CALL,
        related=("KDA-ARRAY-KIND",),
    ),
    Page(
        code="KDA-ARRAY-HOST-ON-DEVICE",
        exception=DeviceError,
        words="All inputs must be on the same device. Some are in host memory",
        cure="Copy `{operand}` to the GPU with cupy.asarray, or pass NumPy arrays only",
        meaning=(
            "The arrays choose the backend: all on one GPU runs CUDA, all in host memory runs NumPy. A mixture says "
            "neither, and a hidden copy in every call would cost more than the kernel."
        ),
        when=(
            "Slots are a NumPy array, as StatePool.allocate(n) returns them, and everything else is on the GPU.",
            "Weights were left on the CPU when the model was moved.",
            "One torch tensor misses its .cuda().",
        ),
        solutions=(
            "Copy it once, where it is made: cupy.asarray(slots).",
            'To run on the CPU, pass every operand as a NumPy array, the state from StatePool(..., device="cpu").',
        ),
        before=f"{_TO_GPU}\noperands[6] = ssm_state_indices\nkda_cupy.kda_packed_decode(*operands)",
        after=_CALL_ON_GPU,
        related=("KDA-PACKED-DEVICES", "KDA-STATE-DEVICE"),
        needs="a GPU",
    ),
    Page(
        code="KDA-ARRAY-BF16-SUPPORT",
        exception=DeviceError,
        words="bfloat16 needs a GPU of compute capability 8.0 or newer",
        cure="Pass float16 or float32 on this GPU",
        meaning=(
            "GPUs before Ampere (A100, RTX 30) have no instructions for bfloat16. The state is float32 in any case; "
            "only activations, gates and parameters are concerned."
        ),
        when=("A model in bfloat16 runs on a V100 (7.0) or T4 (7.5).",),
        solutions=(
            "Convert activations and parameters to float16, or to float32 if they exceed 65504.",
            "Run on a newer GPU.",
        ),
        before=f"import ml_dtypes\n\nmixed_qkv = mixed_qkv.astype(ml_dtypes.bfloat16)\n{_CALL_ON_GPU}",
        after=f"mixed_qkv = mixed_qkv.astype(np.float16)\n{_CALL_ON_GPU}",
        related=("KDA-ARRAY-DTYPE", "KDA-COMPILER-ARCH"),
        needs="a GPU older than compute capability 8.0",
    ),
)

_POOL: Final = (
    Page(
        code="KDA-POOL-EXHAUSTED",
        exception=PoolExhausted,
        words="The pool has {free} of {capacity} slots free",
        cure="Release slots of finished sequences, or make the pool larger",
        meaning=(
            "Slots are handed out all or none: nothing was allocated. The pool never grows by itself, since every "
            "view and captured graph points into its memory, and it never shares a slot between two sequences."
        ),
        when=(
            "More sequences run than the pool has slots.",
            "Slots leak: a request that was aborted or raised did not release its own.",
        ),
        solutions=(
            "Admit no more sequences than pool.free_slots.",
            "Use `with pool.slot() as slot:`, which releases however the block ends.",
            "Make the pool larger: pool.bytes_per_slot says what a slot costs.",
        ),
        before="pool.allocate(6)",
        after="pool.release(ssm_state_indices)\npool.allocate(6)",
        related=("KDA-POOL-DOUBLE-RELEASE", "KDA-POOL-GEOMETRY"),
    ),
    Page(
        code="KDA-POOL-DOUBLE-RELEASE",
        exception=SlotError,
        words="A slot can be released only while it is in use",
        cure="Release each slot once, where its sequence ends",
        meaning=(
            "A slot that is free already may belong to another sequence a moment later: to release it again would "
            "hand the same slot out twice. Nothing was released by this call, the other slots in it included."
        ),
        when=(
            "Both the normal end and the error handler of a request release its slot.",
            "The same slot stands twice in one list.",
            "A slot was never allocated here: it was made up, or comes from another pool.",
        ),
        solutions=(
            "Let one owner release: `with pool.slot() as slot:`.",
            "Forget the number when you release it.",
        ),
        before="slot = pool.allocate()\npool.release(slot)\npool.release(slot)",
        after="with pool.slot() as slot:\n    initial_state[slot] = 0",
        related=("KDA-POOL-EXHAUSTED", "KDA-POOL-RESERVED", "KDA-VALUE-SLOT-DUPLICATE"),
    ),
    Page(
        code="KDA-POOL-RESERVED",
        exception=SlotError,
        words="Slot 0 is reserved: it is never handed out, and so cannot be released",
        cure="Release only slots that allocate() returned",
        meaning=(
            "Slot 0 stays zero so that engines can point rows of padding at it. Were it released, it would be handed "
            "out, and padding would write into a sequence. Nothing was released by this call."
        ),
        when=(
            "The index vector of a padded batch was released whole, its padding being 0.",
            "A variable that was meant to hold a slot still holds its initial 0.",
        ),
        solutions=(
            "Leave padding out: pool.release(slots[slots > 0]).",
            "Use None, not 0, for a sequence without a slot.",
        ),
        before="padded = np.append(ssm_state_indices, 0)\npool.release(padded)",
        after="padded = np.append(ssm_state_indices, 0)\npool.release(padded[padded > 0])",
        related=("KDA-POOL-DOUBLE-RELEASE", "KDA-VALUE-NULL-INDEX"),
    ),
    Page(
        code="KDA-POOL-GEOMETRY",
        exception=OperandError,
        words="A pool needs {rule}",
        cure='Pass sizes as whole numbers, and a GPU by its number (0, not "cuda:0")',
        meaning=(
            "A pool is [layers, P, HV, V, K] with P = capacity + 1, since slot 0 is reserved. Loads of 16 bytes need "
            "a K that is a multiple of 4, and a lane holds 16 keys of a row at most, so K is at most 512."
        ),
        when=(
            "A capacity was computed from a memory budget and came out as 0, negative or fractional.",
            "A buffer with a single slot was wrapped: its only slot is the reserved one.",
            'The device was named as torch does, "cuda:0", or its number is not on this machine.',
            "A negative number of slots was asked for, or a layer that is not there.",
            "Verify scratch was asked for without an `activation_dtype`, or `num_key_heads` do not divide the others.",
        ),
        solutions=(
            "Size the pool by its memory: StatePool.for_budget(budget_bytes, HV, K, V).",
            'Pass device=0 for the first GPU, device="cpu" for NumPy.',
        ),
        before='kda_cupy.StatePool(100 / 8, HV, K, V, device="cpu")',
        after='kda_cupy.StatePool(100 // 8, HV, K, V, device="cpu")',
        related=("KDA-STATE-LAYOUT", "KDA-POOL-EXHAUSTED"),
    ),
    Page(
        code="KDA-POOL-PARTS",
        exception=OperandError,
        words="The pool of a layer needs {rule}",
        cure="Pass activation_dtype, for a verify also verify_rows and verify_tokens, to kda_cupy.StatePool",
        meaning=(
            "A layer keeps a state and a conv history for every slot, and for every request what a verify leaves for "
            "its commit. All of it belongs to the pool, which zeroes and copies them together."
        ),
        when=(
            "The pool was made for the packed decodes, which need states alone.",
            "The pool wraps a state, and the conv history was not given.",
            "A pool without scratch was made for plain decoding, and speculation came later.",
        ),
        solutions=(
            'Say what activations are: StatePool(64, HV, activation_dtype="bfloat16", num_key_heads=H).',
            "Wrap both: StatePool.wrap(state, conv).",
            "Give it as many rows as requests are verified at once, and as many tokens as one of them has.",
        ),
        before="kda_cupy.KdaLayer(*weights, kda_cupy.StatePool(**sizes))",
        after='sizes["activation_dtype"] = "float32"\nkda_cupy.KdaLayer(*weights, kda_cupy.StatePool(**sizes))',
        related=("KDA-POOL-GEOMETRY", "KDA-COMMIT-NO-VERIFY"),
    ),
    Page(
        code="KDA-POOL-NOT-IN-USE",
        exception=SlotError,
        words="`{place}` must be a slot that is in use",
        cure="Pass slots that allocate(), fork(), load() or import_state() returned and release() has not seen",
        meaning=(
            "What is in a free slot belongs to nobody and is zeroed when the slot is handed out again; slot 0 is never "
            "handed out. To copy from such a slot, or into it, is a mistake in the caller's bookkeeping. Nothing was "
            "copied, the other slots of the call included."
        ),
        when=(
            "A request was released, and its prefix is forked or saved afterwards.",
            "The index vector of a padded batch was passed whole, its padding being 0.",
            "Slots of another pool were passed.",
        ),
        solutions=(
            "Copy first, release then.",
            "Leave padding out: slots[slots > 0].",
        ),
        before="slot = pool.allocate()\npool.release(slot)\nbeam = pool.fork(slot)",
        after="slot = pool.allocate()\nbeam = pool.fork(slot)\npool.release(slot)",
        related=("KDA-POOL-NOT-FREE", "KDA-POOL-DOUBLE-RELEASE", "KDA-VALUE-SLOT-RANGE"),
    ),
    Page(
        code="KDA-POOL-NOT-FREE",
        exception=SlotError,
        words="A saved slot comes back under its own number only while that number is free",
        cure="Pass `slots` to load into slots that you hold, or load into a new pool",
        meaning=(
            "load(path) gives every slot the number that it was saved under, so that an engine's tables stay true. A "
            "number that is in use belongs to another sequence, which is not overwritten unless its slot is named. "
            "Nothing was loaded."
        ),
        when=(
            "States were loaded into the pool that they were saved from, where their slots are still in use.",
            "New sequences were admitted before the saved ones were loaded.",
        ),
        solutions=(
            "Load before anything is allocated.",
            "Go back in place: pool.load(path, slots), in the order in which they were saved.",
            "Load anywhere: pool.load(path, pool.allocate(n)).",
        ),
        before=(
            "import tempfile\n"
            "with tempfile.TemporaryDirectory() as folder:\n"
            '    pool.save(folder + "/states.safetensors", ssm_state_indices)\n'
            '    pool.load(folder + "/states.safetensors")'
        ),
        after=(
            "import tempfile\n"
            "with tempfile.TemporaryDirectory() as folder:\n"
            '    pool.save(folder + "/states.safetensors", ssm_state_indices)\n'
            '    pool.load(folder + "/states.safetensors", ssm_state_indices)'
        ),
        related=("KDA-POOL-FILE", "KDA-POOL-NOT-IN-USE"),
    ),
    Page(
        code="KDA-POOL-SNAPSHOT",
        exception=OperandError,
        words="A snapshot must fit where it is restored: {wanted_layout}",
        cure="Restore it to as many slots of a pool with the same layers, sizes, dtypes and device",
        meaning=(
            "restore writes bits, so every array of the snapshot must be laid out as the pool's, and each slot of it "
            "needs one slot to go to. Nothing was written."
        ),
        when=(
            "A snapshot of several slots was restored to one.",
            "The pool was made anew with other sizes, or with a conv history that the snapshot lacks.",
            "A snapshot on one GPU was restored to a pool on another one, or in host memory.",
        ),
        solutions=(
            "Pass one slot for each of snapshot.slots.",
            "Between devices and processes use save() and load().",
        ),
        before="kept = pool.snapshot(ssm_state_indices)\npool.restore(kept, pool.allocate(2))",
        after="kept = pool.snapshot(ssm_state_indices)\npool.restore(kept, pool.allocate(3))",
        related=("KDA-POOL-NOT-IN-USE", "KDA-POOL-FILE", "KDA-VALUE-SLOT-DUPLICATE"),
    ),
    Page(
        code="KDA-POOL-FILE",
        exception=OperandError,
        words="`{path}` is no file that this pool can load",
        cure="Load a file that pool.save() wrote for a pool with the same layers, sizes, dtypes and number of slots",
        meaning=(
            "A file of states is a safetensors file whose metadata say which pool it fits. Its header is checked "
            "against the pool and against the size of the file before any of it is read, and the pool is written only "
            "when all of the data have been read. Nothing was changed."
        ),
        when=(
            "The file was cut: the disk was full, or a copy of it was interrupted.",
            "It is a file of model weights, or of another project.",
            "The model has other head dimensions or another number of layers than the one it was saved for.",
            "It holds another number of slots than the ones that are to be replaced.",
            "A newer version of this package wrote it.",
        ),
        solutions=(
            "Make the pool with the arguments of the one that was saved; the message says what differs.",
            "To move states to another layout, read the file with safetensors.numpy and use import_state().",
        ),
        before=(
            "import tempfile\n"
            "with tempfile.TemporaryDirectory() as folder:\n"
            '    pool.save(folder + "/states.safetensors")\n'
            '    other = kda_cupy.StatePool(8, HV, K, 2 * V, device="cpu")\n'
            '    other.load(folder + "/states.safetensors")'
        ),
        after=(
            "import tempfile\n"
            "with tempfile.TemporaryDirectory() as folder:\n"
            '    pool.save(folder + "/states.safetensors")\n'
            '    other = kda_cupy.StatePool(8, HV, K, V, device="cpu")\n'
            '    other.load(folder + "/states.safetensors")'
        ),
        related=("KDA-POOL-NOT-FREE", "KDA-POOL-GEOMETRY", "KDA-POOL-SNAPSHOT"),
    ),
    Page(
        code="KDA-POOL-LAYOUT",
        exception=OperandError,
        words='`layout` must be "KV" for [n, HV, K, V] or "VK" for [n, HV, V, K]',
        cure='Say which axis comes first: flash-linear-attention returns "KV"',
        meaning=(
            "Projects store the state either way round, and with K = V no shape tells which. A wrong guess would give "
            "plausible nonsense, so the layout is said by the caller."
        ),
        when=(
            "The argument was left to a default that another project has.",
            "The names of all axes were passed, or lower case.",
        ),
        solutions=(
            'Pass layout="KV" for states of flash-linear-attention, layout="VK" for states of this package.',
            "If in doubt, put a single non-zero element at a known value and key, and look where it arrives.",
        ),
        before='states = np.zeros((B, HV, K, V), np.float32)\npool.import_state(states, layout="K, V")',
        after='states = np.zeros((B, HV, K, V), np.float32)\npool.import_state(states, layout="KV")',
        related=("KDA-STATE-LAYOUT", "KDA-STATE-CONTIGUOUS"),
    ),
)

_COMPILER: Final = (
    Page(
        code="KDA-COMPILER-NO-CUPY",
        exception=NoGpuError,
        words="CuPy cannot be imported",
        cure="Install it with pip install 'kda-cupy[cu13]' (a driver for CUDA 12: 'kda-cupy[cu12]')",
        meaning=(
            "Work on a GPU goes through CuPy, which comes in one wheel per CUDA version and so is not installed with "
            "this package by itself. NumPy arrays need neither CuPy nor a GPU."
        ),
        when=(
            "kda-cupy was installed without an extra.",
            "Two CuPy wheels, or the wheel of another CUDA version, are installed over each other.",
            "A library that CuPy loads is missing.",
        ),
        solutions=(
            "Run `kda-cupy doctor`: it looks at the driver and names the wheel that suits it.",
            "With two wheels: pip uninstall -y cupy cupy-cuda12x cupy-cuda13x, then install one.",
            'To work without a GPU, pass NumPy arrays, and device="cpu" to StatePool.',
        ),
        before="pool = kda_cupy.StatePool(8, HV, K, V)",
        after='pool = kda_cupy.StatePool(8, HV, K, V, device="cpu")',
        related=("KDA-COMPILER-NO-GPU", "KDA-COMPILER-NVRTC"),
        needs="an environment without CuPy",
    ),
    Page(
        code="KDA-COMPILER-NO-GPU",
        exception=NoGpuError,
        words="No GPU can be used here",
        cure='Run `kda-cupy doctor`, which says why, or work on NumPy arrays (device="cpu")',
        meaning=(
            "CuPy is installed but finds no CUDA device. This package runs on NumPy too, but never falls back to it "
            "silently: a broken driver would look like a slow GPU."
        ),
        when=(
            "The machine has no NVIDIA GPU, or no driver for it.",
            "A container was started without --gpus all.",
            "CUDA_VISIBLE_DEVICES is empty.",
        ),
        solutions=(
            "Run `kda-cupy doctor` and do what stands beside the fault.",
            "If nvidia-smi shows a GPU, check CUDA_VISIBLE_DEVICES and the container's options.",
            'To work without a GPU, pass NumPy arrays, and device="cpu" to StatePool.',
        ),
        before="pool = kda_cupy.StatePool(8, HV, K, V)",
        after='pool = kda_cupy.StatePool(8, HV, K, V, device="cpu")',
        related=("KDA-COMPILER-NO-CUPY", "KDA-COMPILER-DRIVER"),
        needs="a machine without a GPU, with CuPy",
    ),
    Page(
        code="KDA-COMPILER-NVRTC",
        exception=CompileError,
        words="NVRTC, which compiles the kernels, cannot be loaded",
        cure="Install it with pip install 'cuda-toolkit[cudart,nvrtc]==13.*' (CuPy for CUDA 12: ==12.*)",
        meaning=(
            "Kernels are compiled at run time, for the GPU at hand, by NVIDIA's NVRTC library. Its major version "
            "must be that of the CuPy wheel."
        ),
        when=(
            "CuPy was installed by itself, without the CUDA libraries that kda-cupy[cu12] and [cu13] bring.",
            "The toolkit of another CUDA version is installed.",
            "LD_LIBRARY_PATH points at libraries of another version.",
        ),
        solutions=(
            "Install the extra: pip install 'kda-cupy[cu13]' or 'kda-cupy[cu12]'.",
            "Run `kda-cupy doctor`, which shows the NVRTC that is found.",
        ),
        before=_CALL_ON_GPU,
        after=f"# pip install 'cuda-toolkit[cudart,nvrtc]==13.*', and in a new Python:\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-HEADERS", "KDA-COMPILER-ARCH"),
        needs="a GPU, and before the fix an environment without NVRTC",
    ),
    Page(
        code="KDA-COMPILER-HEADERS",
        exception=CompileError,
        words="CUDA's own headers cannot be found",
        cure="Install them with pip install 'cuda-toolkit[cudart,nvrtc]==13.*' (CuPy for CUDA 12: ==12.*)",
        meaning=(
            "CuPy hands CUDA's headers to the compiler with every kernel and compiles nothing without them, although "
            "the kernels of this package include none. They come with the CUDA toolkit, or with the small wheels "
            "that kda-cupy[cu12] and kda-cupy[cu13] bring."
        ),
        when=(
            "CuPy was installed by itself on a machine without a CUDA toolkit.",
            "CUDA_PATH points at a folder without an include folder.",
        ),
        solutions=(
            "Install the headers of CuPy's own CUDA version, with the command in the message.",
            "Unset CUDA_PATH if the toolkit that it points at is gone.",
            "Run `kda-cupy doctor`, which shows the folder that is used.",
        ),
        before=_CALL_ON_GPU,
        after=f"# pip install 'cuda-toolkit[cudart,nvrtc]==13.*', and in a new Python:\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-NVRTC", "KDA-COMPILER-COMPILE"),
        needs="a GPU, and before the fix an environment without CUDA's headers",
    ),
    Page(
        code="KDA-COMPILER-ARCH",
        exception=CompileError,
        words="NVRTC does not know this GPU",
        cure="Install the NVRTC of another CUDA version: a newer one for a newer GPU, CUDA 12 for one before 7.5",
        meaning=(
            "Kernels are compiled for exactly the compute capability of the GPU. An NVRTC older than the GPU has not "
            "heard of it, and a newer one has dropped old GPUs: that of CUDA 13 begins at 7.5."
        ),
        when=(
            "The GPU is newer than the installed toolkit: a Blackwell GPU with the NVRTC of CUDA 12.4.",
            "The GPU is older than CUDA 13 supports: a GTX 1080 or V100.",
            "An old libnvrtc is found first, through LD_LIBRARY_PATH.",
        ),
        solutions=(
            "Newer GPU: pip install -U 'cuda-toolkit[cudart,nvrtc]', within the major version of the CuPy wheel.",
            "Older GPU: pip uninstall -y cupy-cuda13x, then pip install 'kda-cupy[cu12]'.",
            "Run `kda-cupy doctor`, which lists what the NVRTC in use compiles for.",
        ),
        before=_CALL_ON_GPU,
        after=f"# pip install -U 'cuda-toolkit[cudart,nvrtc]', and in a new Python:\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-NVRTC", "KDA-ARRAY-BF16-SUPPORT"),
        needs="a GPU, and before the fix an NVRTC that does not know it",
    ),
    Page(
        code="KDA-COMPILER-OLD-GPU",
        exception=CompileError,
        words="The kernel {variant} needs a GPU of compute capability {needed} or newer",
        cure="Run it on a newer GPU, or on NumPy arrays",
        meaning=(
            "Verify and commit multiply on tensor cores in TF32, which came with Ampere (8.0: A100, RTX 30). The "
            "packed decodes run on older GPUs too, in float16 and float32; nobody tests them there."
        ),
        when=("kda_decode_mtp or kda_commit was called on a V100 (7.0) or T4 (7.5).",),
        solutions=(
            "Decode token by token with kda_packed_decode on this GPU.",
            "Run on a GPU of compute capability 8.0 or newer.",
        ),
        before=(
            "import cupy\n\nverify = {name: cupy.asarray(value) for name, value in verify.items()}\n"
            f"{_VERIFY_CALL}"
        ),
        after=_VERIFY_CALL,
        related=("KDA-ARRAY-BF16-SUPPORT", "KDA-COMPILER-ARCH"),
        needs="a GPU older than compute capability 8.0",
    ),
    Page(
        code="KDA-COMPILER-CACHE",
        exception=CompileError,
        words="CuPy cannot use its cache folder for compiled kernels",
        cure="Set CUPY_CACHE_DIR to a folder that can be written to, before CuPy is imported",
        meaning=(
            "Compiled kernels are kept on disk, so that they are compiled once and not at every start. CuPy takes "
            "~/.cupy/kernel_cache unless CUPY_CACHE_DIR says otherwise, and makes the folder itself."
        ),
        when=(
            "The home folder is read-only or missing, as in many containers and batch jobs.",
            "The disk is full, or a quota is used up.",
            "The folder belongs to another user.",
        ),
        solutions=(
            "Point CUPY_CACHE_DIR at a local folder, in the environment or before the first import.",
            "Free space, or give the folder to the user who runs this.",
        ),
        before=_CALL_ON_GPU,
        after=f'import os\n\nos.environ["CUPY_CACHE_DIR"] = "/tmp/kernels"\n{_CALL_ON_GPU}',
        related=("KDA-COMPILER-TMPDIR", "KDA-COMPILER-COMPILE"),
        needs="a GPU, and before the fix a home folder that cannot be written to",
    ),
    Page(
        code="KDA-COMPILER-TWO-CUPY",
        exception=NoGpuError,
        words="More than one CuPy wheel is installed, and they overwrite each other's files",
        cure=(
            "Remove them all, pip uninstall -y {wheels}, and install one: pip install 'kda-cupy[cu13]' (a driver for "
            "CUDA 12: 'kda-cupy[cu12]')"
        ),
        meaning=(
            "Every CuPy wheel installs the same package `cupy`, for one CUDA version each. The one installed last "
            "wins file by file, so libraries of two CUDA versions are mixed. Sometimes that works; here it did not."
        ),
        when=(
            "Another package asks for a CuPy wheel of its own, such as cupy-cuda12x.",
            "The driver was updated, and the wheel for it was installed over the old one.",
        ),
        solutions=(
            "Remove all of them before one is installed anew: to remove one takes files of the other along.",
            "Run `kda-cupy doctor`: it lists the wheels and names the one that suits the driver.",
        ),
        before=_CALL_ON_GPU,
        after=f"# pip uninstall -y cupy-cuda12x cupy-cuda13x; pip install 'kda-cupy[cu13]'\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-NO-CUPY", "KDA-COMPILER-NVRTC"),
        needs="a GPU, and before the fix two CuPy wheels",
    ),
    Page(
        code="KDA-COMPILER-DRIVER",
        exception=NoGpuError,
        words="The NVIDIA driver is older than the CUDA version that CuPy or NVRTC is made for",
        cure="Update the driver (580 or newer for CUDA 13), or install CuPy for it: pip install 'kda-cupy[cu12]'",
        meaning=(
            "A driver runs programs and machine code of its own CUDA version's major number and of older ones. Within "
            "one major number any minor one will do."
        ),
        when=(
            "kda-cupy[cu13] was installed where the driver is one for CUDA 12.",
            "CuPy suits the driver, but a newer NVRTC, which another package brought along, was found first.",
            "A container with a new toolkit runs on a host with an old driver.",
        ),
        solutions=(
            "Update the driver of the host; containers use that one too.",
            "Or: pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc, then pip install 'kda-cupy[cu12]'.",
            "Run `kda-cupy doctor`, which shows the versions of driver, CuPy and NVRTC.",
        ),
        before="pool = kda_cupy.StatePool(8, HV, K, V)",
        after=f"# update the driver, and in a new Python:\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-NO-GPU", "KDA-COMPILER-ARCH"),
        needs="a GPU, and before the fix an old driver",
    ),
    Page(
        code="KDA-COMPILER-TMPDIR",
        exception=CompileError,
        words="CuPy cannot use the folder for temporary files, where it puts the source of a kernel",
        cure="Set TMPDIR to a folder that can be written to and whose name is plain ASCII",
        meaning=(
            "CuPy writes the source to a temporary file and hands its name to the compiler as UTF-8. A folder that "
            "is full or read-only, or whose name has no spelling in UTF-8, cannot serve. Names in any script are "
            "fine where Python runs in a UTF-8 locale."
        ),
        when=(
            "TMPDIR has characters beyond ASCII, and the locale is C or POSIX.",
            "The root file system of a container is read-only, /tmp included.",
            "/tmp is full.",
        ),
        solutions=(
            "Set TMPDIR before Python starts: export TMPDIR=/var/tmp.",
            "Or set CUPY_CACHE_IN_MEMORY=1: no files then, and kernels are compiled at every start.",
        ),
        before=_CALL_ON_GPU,
        after=f"# export TMPDIR=/var/tmp, and in a new Python:\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-CACHE",),
        needs="a GPU, and before the fix a TMPDIR that will not do",
    ),
    Page(
        code="KDA-COMPILER-COMPILE",
        exception=CompileError,
        words="The kernel {variant} could not be compiled",
        cure="Update CuPy and NVRTC; if that does not help, report this message with `kda-cupy doctor --json`",
        meaning=(
            "Every kernel is compiled in tests for all supported GPUs, so this is either a compiler that the tests "
            "did not see, or a bug of this package. The message has the compiler's first error; the lines of source "
            "around it follow as a note."
        ),
        when=(
            "NVRTC and the headers come from different CUDA versions.",
            "A GPU or toolkit is newer than this version of the package.",
            "The sources of the package were changed.",
        ),
        solutions=(
            "Update: pip install -U kda-cupy, and cupy and cuda-toolkit of one CUDA version.",
            "Run `kda-cupy doctor` and mend what it finds.",
            "Report it, with the whole message and the output of `kda-cupy doctor --json`.",
        ),
        before=_CALL_ON_GPU,
        after=f"# pip install -U kda-cupy 'cuda-toolkit[cudart,nvrtc]', and in a new Python:\n{_CALL_ON_GPU}",
        related=("KDA-COMPILER-HEADERS", "KDA-COMPILER-ARCH"),
        needs="a GPU, and before the fix a toolkit that does not fit",
    ),
)

CATALOGUE: Final[dict[str, Page]] = {
    page.code: page
    for page in (*_STATE, *_PACKED, *_VERIFY, *_COMMIT, *_CONV, *_VALUES, *_ARRAYS, *_POOL, *_COMPILER)
}
"""Every page by its code, in the order of the documentation."""
