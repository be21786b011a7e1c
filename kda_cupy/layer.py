# SPDX-License-Identifier: Apache-2.0
"""``KdaLayer`` and ``GdnLayer``: the weights of one layer and its memory in a pool, called with one token's arrays.

They hold no state of their own and no kernels: every method fills in what does not change and calls an operation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from kda_cupy import bridge, streams
from kda_cupy.arrays import is_numpy
from kda_cupy.errors import error
from kda_cupy.gpu import require_gpu
from kda_cupy.launch import BoundCall, bind
from kda_cupy.ops.commit import kda_commit
from kda_cupy.ops.gdn_step import gdn_decode_step
from kda_cupy.ops.kda_step import kda_decode_step
from kda_cupy.ops.mtp_checks import DIM
from kda_cupy.ops.mtp_verify import kda_decode_mtp
from kda_cupy.pool import StatePool


class CapturedStep:
    """A decode step of a fixed number of rows whose buffers stay where they are: write, call, read.

    ``inputs`` are arrays by the names of ``decode``'s arguments. Write new contents into them (``inputs["slots"][:] =
    ...``; all slots are 0 at first, which is padding), call the object, and find the result in ``out``, which the call
    returns as well. On a GPU the call replays a CUDA graph on CuPy's current stream and waits for nothing; whoever
    writes on another stream orders it before. The pool's own copies (a slot that is zeroed, a fork) come after the
    replays that were queued before, and before later ones. On NumPy it computes.
    """

    def __init__(self, inputs: dict[str, Any], call: BoundCall, out: Any, graph: Any = None) -> None:
        self.inputs, self.out = inputs, out
        self._call, self._graph = call, graph

    def __call__(self) -> Any:
        """Run the step on what the buffers hold now."""
        if self._graph is None:
            self._call()
        else:
            import cupy

            with self.out.device as device:
                stream = cupy.cuda.get_current_stream()
                streams.before_launch(device.id, stream)
                self._graph.launch(stream)
        return self.out

    def __repr__(self) -> str:
        return f"<CapturedStep of {len(self.inputs['slots'])} rows, {self._call!r}>"


class _Layer:
    """What both kinds have: the pool's arrays, and buffers beside them."""

    def __init__(self, pool: StatePool, layer: int, arrays: dict[str, Any], norm: dict[str, Any]) -> None:
        self.pool, self.layer = pool, layer
        self.H = arrays["cs_q"].shape[1] // DIM
        self.HV = arrays["recurrent_state"].shape[1]
        self._memory = {name: arrays.pop(name) for name in ("recurrent_state", "cs_q", "cs_k", "cs_v")}
        self._scratch = arrays
        self._norm = norm
        self._options: dict[str, Any] = {}
        self._verified: dict[str, Any] = {}
        """Slots and scratch rows of the last verify."""
        self._module = np if is_numpy(self._memory["cs_q"]) else require_gpu()
        self._vectors: dict[tuple[int, int], Any] = {}

    def _every(self, n: int, step: int) -> Any:
        """0, step, 2 step, .. beside the pool; made once."""
        if (n, step) not in self._vectors:
            with self._device():
                self._vectors[n, step] = self._module.arange(n, dtype=np.int32) * np.int32(step)
        return self._vectors[n, step]

    def _device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._module is np else self._memory["cs_q"].device

    def _zeros(self, *shape: int, dtype: Any = None) -> Any:
        with self._device():
            return self._module.zeros(shape, dtype or self._memory["cs_q"].dtype)

    def _captured(self, inputs: dict[str, Any], call: BoundCall, out: Any) -> CapturedStep:
        if self._module is np:
            return CapturedStep(inputs, call, out)
        with self._device():
            stream = self._module.cuda.Stream(non_blocking=True)
            self._module.cuda.get_current_stream().synchronize()  # the buffers are zero before anybody writes to them
            with stream:
                stream.begin_capture()
                call()
                graph = stream.end_capture()
        return CapturedStep(inputs, call, out, graph)


def _arrays_of(pool: StatePool, layer: int) -> dict[str, Any]:
    """State, history and scratch of a layer, by the operands' names."""
    arrays = pool.operands(layer)
    if "cs_q" not in arrays:
        rule = "a conv history: an `activation_dtype`"
        raise error("KDA-POOL-PARTS", operand="pool", got="states alone", rule=rule)
    return arrays


def _norm_of(onorm_weight: Any, onorm_eps: float | None) -> dict[str, Any]:
    if onorm_weight is None:
        return {}
    return {"onorm_weight": _adopted("onorm_weight", onorm_weight), "onorm_eps": onorm_eps}


def _verify(
    layer: _Layer,
    tokens: dict[str, Any],
    slots: Any,
    cu_seqlens: Any,
    max_tokens: int | None,
    parameters: dict[str, Any],
) -> Any:
    if not layer._scratch:
        rule = "scratch for a verify: `verify_rows` and `verify_tokens`"
        raise error("KDA-POOL-PARTS", operand="pool", got="none of it", rule=rule)
    N, T = len(slots), tokens["x_q"].shape[1]
    rows = {"ssm_state_indices": slots, "intermediate_state_indices": layer._every(N, 1)}
    out = kda_decode_mtp(
        **tokens,
        **rows,
        **parameters,
        **layer._memory,
        **layer._scratch,
        **layer._options,
        cu_seqlens=layer._every(N + 1, T // max(N, 1)) if cu_seqlens is None else cu_seqlens,
        max_tokens_per_request=max_tokens,
        null_index=0,
    )
    layer._verified = rows
    return out[0]


def _commit(layer: _Layer, accept_lens: Any) -> None:
    if not layer._verified:
        raise error("KDA-COMMIT-NO-VERIFY", operand="verify", got="no verify of this layer")
    flags = {name: value for name, value in layer._options.items() if name == "use_qk_l2norm_in_kernel"}
    arrays = {**layer._memory, **layer._scratch, **layer._verified}
    kda_commit(accept_lens=accept_lens, **arrays, **flags, null_index=0)


class KdaLayer(_Layer):
    """One layer of Kimi Delta Attention on one layer of a pool, K = V = 128.

    >>> pool = StatePool(8, num_value_heads=4, layers=2, activation_dtype="bfloat16", device="cpu")
    >>> layer = KdaLayer(w_q, w_k, w_v, A_log, dt_bias, pool, layer=1, lower_bound=-5.0)
    >>> out = layer.decode(q, k, v, g, beta, slots)

    Slots are those that the pool hands out, as an array beside the pool; a slot <= 0 is padding.
    """

    def __init__(
        self,
        w_q: Any,
        w_k: Any,
        w_v: Any,
        A_log: Any,
        dt_bias: Any,
        pool: StatePool,
        layer: int = 0,
        *,
        conv_biases: tuple[Any, Any, Any] | None = None,
        onorm_weight: Any = None,
        onorm_eps: float | None = None,
        **options: Any,
    ) -> None:
        """Take the weights as they are, without a copy; they are looked at when they are used.

        w_q, w_k, w_v: conv taps [H*128, 4] and [HV*128, 4]; conv_biases: of q, k and v. onorm_weight [128] with
        onorm_eps: the output norm. options: ``lower_bound``, ``scale``, ``use_qk_l2norm_in_kernel``,
        ``allow_neg_eigval`` of :func:`kda_cupy.kda_decode_step`, where dtypes are listed too. Raises OperandError
        (KDA-POOL-PARTS) for a pool without conv history.
        """
        super().__init__(pool, layer, _arrays_of(pool, layer), _norm_of(onorm_weight, onorm_eps))
        weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "A_log": A_log, "dt_bias": dt_bias}
        weights |= {f"conv_bias_{x}": bias for x, bias in zip("qkv", conv_biases or (), strict=False)}
        self._weights = {name: _adopted(name, weight) for name, weight in weights.items()}
        self._options = options

    def decode(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, slots: Any, *, gate: Any = None, out: Any = None
    ) -> Any:
        """Advance each row's sequence by one token, state and conv history in place.

        q, k: [B, H*128] or [B, H, 128], raw projections; v, g, gate: the same for HV heads; beta [B, HV]; slots [B].
        gate: of the output norm, where the layer has one. Returns ``out`` [B, HV, 128].
        """
        tokens = self._tokens(q, k, v, g, beta, gate)
        operands = {**tokens, **self._fixed(), "out": None if out is None else out[None]}
        made = kda_decode_step(**operands, ssm_state_indices=slots, null_index=0)
        return made[0] if out is None else out

    def verify(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        slots: Any,
        cu_seqlens: Any = None,
        *,
        gate: Any = None,
        max_tokens_per_request: int | None = None,
    ) -> Any:
        """Run the draft tokens of N requests; nothing is permanent before :meth:`commit`.

        As :meth:`decode`, with rows of T packed tokens and slots [N]. Request i has the tokens ``cu_seqlens[i]`` up to
        ``cu_seqlens[i + 1]`` ([N+1], with ``max_tokens_per_request``), by default T / N each. Scratch row i of the pool
        is request i's. Returns [T, HV, 128].
        """
        tokens = self._tokens(q, k, v, g, beta, gate)
        return _verify(self, tokens, slots, cu_seqlens, max_tokens_per_request, self._weights | self._norm)

    def commit(self, accept_lens: Any) -> None:
        """Make the first ``accept_lens[n]`` tokens of each request of the last :meth:`verify` permanent; 0 keeps none.

        accept_lens: [N], int32 or int64, bonus token included. State and conv history of this layer are written. For
        all layers of a pool in one launch there is ``kda_commit(**pool.operands(), ...)``.
        """
        _commit(self, accept_lens)

    def capture(self, batch: int) -> CapturedStep:
        """A :meth:`decode` of ``batch`` rows with buffers of its own: ``q, k, v, g, beta, slots`` and ``gate``.

        In the pool's activation dtype, [B, heads, 128] (beta [B, HV]). On a GPU it is a CUDA graph.
        """
        heads = {"q": self.H, "k": self.H, "v": self.HV, "g": self.HV} | (
            {"gate": self.HV} if self._norm else {}
        )
        inputs = {name: self._zeros(batch, n, DIM) for name, n in heads.items()}
        inputs |= {"beta": self._zeros(batch, self.HV), "slots": self._zeros(batch, dtype=np.int32)}
        out = self._zeros(batch, self.HV, DIM)
        tokens = self._tokens(*(inputs.get(name) for name in ("q", "k", "v", "g", "beta", "gate")))
        call = bind(
            kda_decode_step,
            **tokens,
            **self._fixed(),
            ssm_state_indices=inputs["slots"],
            out=out[None],
            null_index=0,
        )
        return self._captured(inputs, call, out)

    def _fixed(self) -> dict[str, Any]:
        """What no token changes."""
        return {**self._memory, **self._weights, **self._norm, **self._options}

    def _tokens(self, q: Any, k: Any, v: Any, g: Any, beta: Any, gate: Any) -> dict[str, Any]:
        """Operands with their leading axis of 1, as views."""
        heads = {"x_q": (q, self.H), "x_k": (k, self.H), "x_v": (v, self.HV), "g": (g, self.HV)}
        if gate is not None:
            heads["onorm_gate"] = (gate, self.HV)
        return {name: _split(x, n)[None] for name, (x, n) in heads.items()} | {"beta": beta[None]}


class GdnLayer(_Layer):
    """One layer of Gated DeltaNet (Qwen3-Next) on one layer of a pool, K = V = 128.

    q, k and v are columns of one projection and channels of one convolution; a gate per value head; the output norm
    has a SiLU gate. Otherwise as :class:`KdaLayer`.
    """

    def __init__(
        self,
        conv_weight: Any,
        A_log: Any,
        dt_bias: Any,
        pool: StatePool,
        layer: int = 0,
        *,
        conv_bias: Any = None,
        onorm_weight: Any = None,
        onorm_eps: float | None = None,
        **options: Any,
    ) -> None:
        """Take the weights as they are, without a copy; they are looked at when they are used.

        conv_weight: [C, 4] for C = 2*H*128 + HV*128 channels; conv_bias [C]. The rest as in :class:`KdaLayer`, and as
        listed in :func:`kda_cupy.gdn_decode_step`.
        """
        super().__init__(pool, layer, _arrays_of(pool, layer), _norm_of(onorm_weight, onorm_eps))
        weights = {"conv_weight": conv_weight, "conv_bias": conv_bias, "A_log": A_log, "dt_bias": dt_bias}
        self._weights = {name: _adopted(name, weight) for name, weight in weights.items()}
        self._options = options
        self._conv_state: Any = None if pool.conv is None else pool.conv[layer]

    def decode(self, mixed_qkv: Any, a: Any, b: Any, slots: Any, *, gate: Any = None, out: Any = None) -> Any:
        """Advance each row's sequence by one token, state and conv history in place.

        mixed_qkv: [B, C], raw projections of q, k and v; a, b [B, HV]; slots [B]; gate [B, HV*128] or [B, HV, 128], of
        the output norm, where the layer has one. Returns ``out`` [B, HV, 128].
        """
        operands = self._step_operands(mixed_qkv, a, b, slots, gate)
        made = gdn_decode_step(**operands, out=None if out is None else out[:, None])
        return made[:, 0] if out is None else out

    def verify(
        self,
        mixed_qkv: Any,
        a: Any,
        b: Any,
        slots: Any,
        cu_seqlens: Any = None,
        *,
        gate: Any = None,
        max_tokens_per_request: int | None = None,
    ) -> Any:
        """Run the draft tokens of N requests; nothing is permanent before :meth:`commit`.

        NumPy or CuPy arrays, T rows of packed tokens; slots, ``cu_seqlens`` and the scratch as in
        :meth:`KdaLayer.verify`. The gate of a head is repeated for its keys, and the norm is applied to the rounded
        output by the arrays' own library: one rounding more than in :meth:`decode`. Returns [T, HV, 128].
        """
        edges = np.cumsum([0, self.H * DIM, self.H * DIM, self.HV * DIM]).tolist()
        columns = {x: slice(edges[i], edges[i + 1]) for i, x in enumerate("qkv")}
        heads = {"q": self.H, "k": self.H, "v": self.HV}
        tokens = {f"x_{x}": _split(mixed_qkv[:, columns[x]], heads[x])[None] for x in columns}
        tokens |= {"g": self._module.repeat(a[..., None], DIM, axis=-1)[None], "beta": b[None]}
        weights = {f"w_{x}": self._weights["conv_weight"][columns[x]] for x in columns}
        if self._weights["conv_bias"] is not None:
            weights |= {f"conv_bias_{x}": self._weights["conv_bias"][columns[x]] for x in columns}
        weights |= {
            "A_log": self._weights["A_log"],
            "dt_bias": self._module.repeat(self._weights["dt_bias"], DIM),
        }
        out = _verify(self, tokens, slots, cu_seqlens, max_tokens_per_request, weights)
        return out if gate is None else self._normed(out, _split(gate, self.HV))

    def commit(self, accept_lens: Any) -> None:
        """Make the first ``accept_lens[n]`` tokens of each request of the last :meth:`verify` permanent.

        As :meth:`KdaLayer.commit`.
        """
        _commit(self, accept_lens)

    def _normed(self, o: Any, gate: Any) -> Any:
        o32, z = o.astype(np.float32), gate.astype(np.float32)
        mean = (o32 * o32).mean(-1, keepdims=True) + np.float32(self._norm["onorm_eps"])
        weight = self._norm["onorm_weight"].astype(np.float32)
        return (o32 / self._module.sqrt(mean) * weight * z / (1 + self._module.exp(-z))).astype(o.dtype)

    def capture(self, batch: int) -> CapturedStep:
        """A :meth:`decode` of ``batch`` rows with buffers of its own: ``mixed_qkv, a, b, slots`` and ``gate``.

        In the pool's activation dtype. On a GPU it is a CUDA graph.
        """
        channels = (2 * self.H + self.HV) * DIM
        inputs = {"mixed_qkv": self._zeros(batch, channels), "slots": self._zeros(batch, dtype=np.int32)}
        inputs |= {name: self._zeros(batch, self.HV) for name in "ab"}
        if self._norm:
            inputs["gate"] = self._zeros(batch, self.HV, DIM)
        out = self._zeros(batch, self.HV, DIM)
        operands = self._step_operands(
            *(inputs.get(name) for name in ("mixed_qkv", "a", "b", "slots", "gate"))
        )
        call = bind(gdn_decode_step, **operands, out=out[:, None])
        return self._captured(inputs, call, out)

    def _step_operands(self, mixed_qkv: Any, a: Any, b: Any, slots: Any, gate: Any) -> dict[str, Any]:
        return {
            "mixed_qkv": mixed_qkv,
            "a": a,
            "b": b,
            "conv_state": self._conv_state,
            "initial_state": self._memory["recurrent_state"],
            "ssm_state_indices": slots,
            "onorm_gate": None if gate is None else _split(gate, self.HV),
            "null_index": 0,
            **self._weights,
            **self._norm,
            **self._options,
        }


def _adopted(name: str, weight: Any) -> Any:
    """A NumPy or CuPy view, so that no call has to convert it again."""
    return None if weight is None else bridge.adopt(name, weight)


def _split(x: Any, heads: int) -> Any:
    """[rows, heads, 128] of [rows, heads * 128], as a view; what is split already comes back as it is."""
    return x if len(x.shape) == 3 else x.reshape(x.shape[0], heads, DIM)
