# SPDX-License-Identifier: Apache-2.0
"""What ``KdaLayer`` and ``GdnLayer`` promise. tests/pure runs this on NumPy, tests/gpu on CUDA.

A layer adds nothing to the operations, so most of this compares bits with them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mtp_problems import DIM
from problems import Problem, same_bits, to_host, to_library
from step_problems import make_step

import kda_cupy
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

OPS = pytest.mark.parametrize("op", ["kda", "gdn"])
MODES = pytest.mark.parametrize("snapshots", [False, True])
#: What one rounding to bf16 does to such outputs, measured 1.65e-3.
ROUNDING = 1.7e-3
B, T, LAYERS = 3, 4, 2


class Engine:
    """A layer of each kind on a pool, and tokens for it."""

    def __init__(
        self, op: str, library: ModuleType, *, onorm: bool = True, group: int = 2, **sizes: Any
    ) -> None:
        self.op, self.library, self.H, self.HV = op, library, 2, 2 * group
        sizes = {"verify_rows": B, "verify_tokens": T, **sizes}
        self.pool = kda_cupy.StatePool(
            6,
            self.HV,
            layers=LAYERS,
            num_key_heads=self.H,
            activation_dtype="bfloat16",
            device="cpu" if library is np else 0,
            **sizes,
        )
        problem = make_step(op, B=B, H=self.H, HV=self.HV, onorm=onorm, lower_bound=-5.0)
        self.problem = problem
        moved = {
            name: self.to(value) if isinstance(value, np.ndarray) else value
            for name, value in problem.items()
        }
        norm = {"onorm_weight": moved["onorm_weight"], "onorm_eps": problem["onorm_eps"]} if onorm else {}
        common = {"lower_bound": -5.0, **norm}
        if op == "kda":
            weights = [moved[name] for name in ("w_q", "w_k", "w_v", "A_log", "dt_bias")]
            biases = tuple(moved[f"conv_bias_{x}"] for x in "qkv")
            self.layer: Any = kda_cupy.KdaLayer(*weights, self.pool, 1, conv_biases=biases, **common)
        else:
            weights = [moved[name] for name in ("conv_weight", "A_log", "dt_bias")]
            self.layer = kda_cupy.GdnLayer(*weights, self.pool, 1, conv_bias=moved["conv_bias"], **common)
        self.slots = self.to(self.pool.allocate(B))

    def to(self, value: Any) -> Any:
        return to_library(np.ascontiguousarray(value), self.library)

    def tokens(self, count: int, seed: int) -> Problem:
        """Arguments of ``decode`` and ``verify`` by name."""
        rng = np.random.default_rng(seed)
        kind = self.pool.conv.dtype

        def draw(*shape: int) -> Any:
            return self.to(rng.standard_normal(shape).astype(kind))

        if self.op == "kda":
            widths = {"q": self.H * DIM, "k": self.H * DIM, "v": self.HV * DIM, "g": self.HV * DIM}
            made = {name: draw(count, width) for name, width in widths.items()} | {
                "beta": draw(count, self.HV)
            }
        else:
            channels = (2 * self.H + self.HV) * DIM
            made = {"mixed_qkv": draw(count, channels), "a": draw(count, self.HV), "b": draw(count, self.HV)}
        return made | ({"gate": draw(count, self.HV, DIM)} if self.layer._norm else {})

    def operation(self, tokens: Problem) -> tuple[Any, Problem]:
        """The decode step and its operands, on copies of the pool's arrays."""
        arrays = {name: value.copy() for name, value in self.pool.operands(1).items()}
        moved = {
            name: self.to(value) if isinstance(value, np.ndarray) else value
            for name, value in self.problem.items()
        }
        count = len(tokens["gate"])
        if self.op == "kda":
            heads = {"q": self.H, "k": self.H, "v": self.HV}
            moved |= {f"x_{x}": tokens[x].reshape(1, count, n, DIM) for x, n in heads.items()}
            moved |= {"g": tokens["g"].reshape(1, count, self.HV, DIM), "beta": tokens["beta"][None]}
            moved |= {name: arrays[name] for name in ("recurrent_state", "cs_q", "cs_k", "cs_v")}
            moved |= {"onorm_gate": tokens["gate"][None]}
        else:
            moved |= {name: tokens[name] for name in ("mixed_qkv", "a", "b")}
            moved |= {"initial_state": arrays["recurrent_state"], "onorm_gate": tokens["gate"]}
            moved |= {"conv_state": self.pool.conv[1].copy()}
        return {"kda": kda_cupy.kda_decode_step, "gdn": kda_cupy.gdn_decode_step}[self.op], moved

    def memory(self) -> list[Any]:
        return [to_host(self.pool.state).copy(), to_host(self.pool.conv).copy()]


class LayerContract:
    """Subclasses say where to run by a fixture ``library`` (numpy or cupy)."""

    @pytest.fixture(autouse=True)
    def _no_errors_left_behind(self, library: ModuleType) -> Any:
        self.library = library
        kda_cupy.check_errors()
        yield
        kda_cupy.check_errors()

    @OPS
    @pytest.mark.parametrize("group", [1, 2])
    def test_decode_is_the_operation_on_its_layer(self, op: str, group: int) -> None:
        engine = Engine(op, self.library, group=group)
        for token in range(4):
            tokens = engine.tokens(B, token)
            operation, operands = engine.operation(tokens)
            want = operation(**{**operands, "ssm_state_indices": engine.slots})
            got = engine.layer.decode(**tokens, slots=engine.slots)
            assert got.shape == (B, engine.HV, DIM)
            assert same_bits(got, want[0] if op == "kda" else want[:, 0])
            state = operands["recurrent_state" if op == "kda" else "initial_state"]
            assert same_bits(engine.pool.state[1], state)
        assert not to_host(engine.pool.state[0]).any() and not to_host(engine.pool.conv[0]).any()

    @OPS
    def test_out_is_written_and_returned(self, op: str) -> None:
        first, second = Engine(op, self.library), Engine(op, self.library)
        tokens = first.tokens(B, 0)
        want = first.layer.decode(**tokens, slots=first.slots)
        out = first.to(np.full(want.shape, np.nan, to_host(want).dtype))
        assert second.layer.decode(**tokens, slots=second.slots, out=out) is out and same_bits(out, want)

    @OPS
    @MODES
    @pytest.mark.parametrize("onorm", [False, True])
    def test_verify_and_commit_equal_decoding_what_was_accepted(
        self, op: str, snapshots: bool, onorm: bool
    ) -> None:
        """D9: state and conv history both roll back."""
        speculative = Engine(op, self.library, onorm=onorm, snapshots=snapshots)
        plain = Engine(op, self.library, onorm=onorm, snapshots=snapshots)
        for number, accept in enumerate(([4, 0, 2], [1, 4, 3], [0, 0, 0])):
            tokens = speculative.tokens(B * T, 10 + number)
            before = speculative.memory()
            got = to_host(speculative.layer.verify(**tokens, slots=speculative.slots))
            assert all(same_bits(mine, its) for mine, its in zip(before, speculative.memory(), strict=True))
            speculative.layer.commit(speculative.to(np.array(accept, np.int32)))
            for j in range(T):
                rows = [row for row in range(B) if accept[row] > j]
                if rows:
                    at = np.array([row * T + j for row in rows])
                    now = {name: plain.to(to_host(value)[at]) for name, value in tokens.items()}
                    slots = plain.to(to_host(plain.slots)[rows])
                    want = to_host(plain.layer.decode(**now, slots=slots))
                    roundings = (
                        3 if op == "gdn" and onorm else 2
                    )  # a verify of GDN rounds before its norm, too
                    assert relative_error(got[at], want) < roundings * ROUNDING
            mine, its = speculative.memory(), plain.memory()
            assert relative_error(mine[0], its[0]) < 1e-5 or not its[0].any()
            assert same_bits(mine[1], its[1])

    @OPS
    def test_ragged_requests(self, op: str) -> None:
        ragged, dense = Engine(op, self.library), Engine(op, self.library)
        tokens = ragged.tokens(B * T, 3)
        lengths = np.array([2, 0, 4])
        rows = np.concatenate([row * T + np.arange(length) for row, length in enumerate(lengths)])
        some = {name: ragged.to(to_host(value)[rows]) for name, value in tokens.items()}
        bounds = ragged.to(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        got = ragged.layer.verify(**some, slots=ragged.slots, cu_seqlens=bounds, max_tokens_per_request=T)
        want = dense.layer.verify(**tokens, slots=dense.slots)
        assert same_bits(got, to_host(want)[rows])
        accept = ragged.to(np.array([2, 0, 1], np.int32))
        for engine in (ragged, dense):
            engine.layer.commit(accept)
        assert all(same_bits(mine, its) for mine, its in zip(ragged.memory(), dense.memory(), strict=True))

    @OPS
    def test_a_captured_step_follows_its_buffers(self, op: str) -> None:
        """D5: nothing of the capture stays but the addresses; padding rows touch nothing."""
        captured, eager = Engine(op, self.library), Engine(op, self.library)
        step = captured.layer.capture(B + 1)
        before = captured.memory()
        assert not to_host(step()).any()  # all slots are padding
        assert all(same_bits(mine, its) for mine, its in zip(before, captured.memory(), strict=True))
        for token in range(3):
            tokens = eager.tokens(B, token)
            rows = [0, 1, 3]
            step.inputs["slots"][:] = 0
            for number, row in enumerate(rows):
                for name, value in tokens.items():
                    step.inputs[name][row] = value[number].reshape(step.inputs[name].shape[1:])
                step.inputs["slots"][row] = captured.slots[number]
            out = to_host(step())
            want = eager.layer.decode(**tokens, slots=eager.slots)
            assert same_bits(out[rows], want) and not out[2].any()
            assert all(
                same_bits(mine, its) for mine, its in zip(captured.memory(), eager.memory(), strict=True)
            )
        assert f"{B + 1} rows" in repr(step)

    @OPS
    def test_a_slot_that_comes_back_begins_anew(self, op: str) -> None:
        """A13: neither the state nor the history of a former tenant is left."""
        engine = Engine(op, self.library)
        tokens = engine.tokens(B, 0)
        want = to_host(engine.layer.decode(**tokens, slots=engine.slots)).copy()
        engine.layer.decode(**engine.tokens(B, 1), slots=engine.slots)
        used = to_host(engine.slots).tolist()
        engine.pool.release(used)
        engine.slots = engine.to(engine.pool.allocate(B))
        assert same_bits(engine.layer.decode(**tokens, slots=engine.slots), want)

    @OPS
    def test_slot_0_is_padding(self, op: str) -> None:
        engine = Engine(op, self.library)
        slots = engine.to(np.array([0, to_host(engine.slots)[0], -1], np.int32))
        out = to_host(engine.layer.decode(**engine.tokens(B, 0), slots=slots))
        assert out[1].any() and not out[[0, 2]].any()
        assert not to_host(engine.pool.state[:, 0]).any()

    def test_what_a_layer_refuses(self) -> None:
        engine = Engine("kda", self.library)
        with pytest.raises(kda_cupy.OperandError, match="last `verify`"):
            engine.layer.commit(engine.to(np.zeros(B, np.int32)))
        with pytest.raises(kda_cupy.OperandError, match="onorm_gate"):
            engine.layer.decode(**{**engine.tokens(B, 0), "gate": None}, slots=engine.slots)
        plain = Engine("gdn", self.library, verify_rows=0, verify_tokens=0)
        with pytest.raises(kda_cupy.OperandError, match="`verify_rows` and `verify_tokens`"):
            plain.layer.verify(**plain.tokens(B, 0), slots=plain.slots)
        weights = [engine.layer._weights[name] for name in ("w_q", "w_k", "w_v", "A_log", "dt_bias")]
        states = kda_cupy.StatePool(2, 4, device="cpu" if self.library is np else 0)
        with pytest.raises(kda_cupy.OperandError, match="needs a conv history"):
            kda_cupy.KdaLayer(*weights, states)
        with pytest.raises(TypeError, match="speed"):
            kda_cupy.KdaLayer(*weights, engine.pool, speed=2).decode(
                **engine.tokens(B, 0), slots=engine.slots
            )

    def test_weights_against_float64(self) -> None:
        """The first token of a fresh slot: state zero, history zero."""
        engine = Engine("kda", self.library)
        tokens = engine.tokens(B, 0)
        got = to_host(engine.layer.decode(**tokens, slots=engine.slots))
        _, operands = engine.operation(tokens)
        host = {
            name: to_host(value) if hasattr(value, "shape") else value for name, value in operands.items()
        }
        for name in ("recurrent_state", "cs_q", "cs_k", "cs_v"):
            host[name] = np.zeros_like(host[name])
        host["ssm_state_indices"] = to_host(engine.slots)
        for row, want in enumerate(truth.kda_decode_step(host)):
            assert relative_error(got[row], want.out[0]) < 4 * ROUNDING  # activations are not settled here
