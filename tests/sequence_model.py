# SPDX-License-Identifier: Apache-2.0
"""Sequences that are decoded token by token, and an engine that verifies, commits and decodes the same tokens.

``SequenceModel`` is the truth: one token at a time, in float64, nothing to roll back. ``Engine`` holds the arrays of a
serving engine and calls the operations. :func:`play` lets both live through the same rounds and compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from mtp_problems import DIM, make_mtp, scratch, settle_tokens
from problems import np_dtype, same_bits, to, to_host, to_library

import kda_cupy
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

OUTPUT_ERROR = {"float32": 1e-5, "bfloat16": 3e-3}
STATE_ERROR = 1e-5
"""After all rounds of a game: at most some 60 tokens."""
LETTERS = ("q", "k", "v")


class Tokens(NamedTuple):
    """Projections of some tokens of one sequence, in the activation dtype."""

    q: Any  # [t, H*128]
    k: Any
    v: Any  # [t, HV*128]
    g: Any  # [t, HV, 128]
    beta: Any  # [t, HV]


class SequenceModel:
    """One sequence. ``decode`` runs one token and keeps it; what was not accepted is simply never passed."""

    def __init__(self, weights: dict[str, Any], state: Any, histories: list[Any]) -> None:
        self.weights, self.state = weights, np.asarray(state, np.float64)
        self.histories = [np.asarray(history, np.float64) for history in histories]

    def copy(self) -> SequenceModel:
        return SequenceModel(self.weights, self.state.copy(), [each.copy() for each in self.histories])

    def decode(self, tokens: Tokens, j: int) -> tuple[Any, list[Any]]:
        """Run token j. Returns its output [HV, 128], and its activations q, k, v as the packed decode takes them."""
        HV, _, K = self.state.shape
        acts = []
        for i, letter in enumerate(LETTERS):
            act, self.histories[i] = truth.conv(
                self.histories[i],
                tokens[i][j].astype(np.float64),
                self.weights[f"w_{letter}"].astype(np.float64),
                self.weights[f"conv_bias_{letter}"].astype(np.float64),
                tokens.q.dtype,
            )
            acts.append(act)
        q, k, v = acts[0].reshape(-1, K), acts[1].reshape(-1, K), acts[2].reshape(HV, -1)
        out = np.zeros((HV, v.shape[1]))
        for head in range(HV):
            key_head = head // (HV // len(k))
            token = truth.Token(
                q=truth.l2_normalized(q[key_head]) * K**-0.5,
                k=truth.l2_normalized(k[key_head]),
                v=v[head],
                g=truth.log_decay(
                    tokens.g[j, head].astype(np.float64),
                    self.weights["dt_bias"].reshape(HV, K)[head],
                    float(self.weights["A_log"][head]),
                    self.weights["lower_bound"],
                ),
                beta=float(truth.sigmoid(tokens.beta[j, head].astype(np.float64))),
            )
            self.state[head], out[head] = truth.step(self.state[head], token)
        return out, acts


@dataclass
class Round:
    """What happens next, by sequence."""

    kind: str
    """verify; or one token of each sequence that takes part, by one of three ways: step (everything fused), pair (the
    convolution, then the packed decode), decode (the packed decode, and the model's convolution)."""
    lengths: list[int]
    """Tokens to verify; 0 takes part with nothing to do."""
    accepted: list[int]
    """At most ``lengths``."""
    order: list[int]
    """Sequences by row; -1 is padding."""


@dataclass
class Game:
    """A whole life of three sequences."""

    mode: str = "rings"
    dtype: str = "float32"
    H: int = 1
    HV: int = 2
    lower_bound: float | None = -5.0
    seed: int = 0
    rounds: list[Round] = field(default_factory=list)


SEQUENCES, MOST, STEPS = 3, 5, 6


@st.composite
def rounds(draw: Any) -> Round:
    lengths = [draw(st.integers(0, MOST)) for _ in range(SEQUENCES)]
    accepted = [draw(st.integers(0, length)) for length in lengths]
    taking_part = draw(st.permutations(range(SEQUENCES)))[: draw(st.integers(1, SEQUENCES))]
    order = list(taking_part)
    for _ in range(draw(st.integers(0, 2))):
        order.insert(draw(st.integers(0, len(order))), -1)
    return Round(
        draw(st.sampled_from(["verify", "verify", "step", "step", "pair", "decode"])),
        lengths,
        accepted,
        order,
    )


@st.composite
def games(draw: Any) -> Game:
    H = draw(st.sampled_from([1, 2]))
    return Game(
        mode=draw(st.sampled_from(["rings", "snapshots"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        H=H,
        HV=H * draw(st.sampled_from([1, 2])),
        lower_bound=draw(st.sampled_from([None, -5.0])),
        seed=draw(st.integers(0, 2**31)),
        rounds=draw(st.lists(rounds(), min_size=1, max_size=STEPS)),
    )


class Engine:
    """Pool, histories, scratch and weights in one library's arrays."""

    def __init__(self, game: Game, library: ModuleType) -> None:
        self.game, self.library = game, library
        self.rng = np.random.default_rng(game.seed)
        start = make_mtp(
            N=SEQUENCES,
            t=MOST,
            H=game.H,
            HV=game.HV,
            dtype=game.dtype,
            mode=game.mode,
            lower_bound=game.lower_bound,
            spare_steps=0,
            P=7,
            seed=game.seed % 1000,
        )
        self.slots = start["ssm_state_indices"].tolist()
        names = ["w", "conv_bias"]
        self.weights = {f"{name}_{letter}": start[f"{name}_{letter}"] for name in names for letter in LETTERS}
        self.weights |= {name: start[name] for name in ("A_log", "dt_bias", "lower_bound")}
        histories = [start[f"cs_{letter}"] for letter in LETTERS]
        self.models = [
            SequenceModel(self.weights, start["recurrent_state"][slot], [each[slot] for each in histories])
            for slot in self.slots
        ]
        self.start = start
        arrays = {name: start[name] for name in ("recurrent_state", "cs_q", "cs_k", "cs_v")}
        scratch_rows = len(start["intermediate_conv_q"])
        arrays |= {f"intermediate_conv_{letter}": start[f"intermediate_conv_{letter}"] for letter in LETTERS}
        arrays |= scratch(
            game.mode, rows=scratch_rows, slots=7, steps=MOST, H=game.H, HV=game.HV, dtype=game.dtype
        )
        self.arrays = to(arrays, library)
        self.moved_weights = to(self.weights, library)

    def draw(self, sequence: int, t: int) -> Tokens:
        """Projections of t new tokens, none of whose activations lies between two numbers."""
        game, kind = self.game, np_dtype(self.game.dtype)
        widths = (game.H * DIM, game.H * DIM, game.HV * DIM, game.HV * DIM, game.HV)
        parts = [self.rng.standard_normal((t, width)).astype(kind) for width in widths]
        if game.dtype != "float32":
            for letter, x, history in zip(LETTERS, parts, self.models[sequence].histories, strict=False):
                weights = self.weights[f"w_{letter}"], self.weights[f"conv_bias_{letter}"]
                settle_tokens(x, history, *weights, self.rng)
        return Tokens(*parts[:3], parts[3].reshape(t, game.HV, DIM), parts[4])

    def to(self, value: Any) -> Any:
        return to_library(np.ascontiguousarray(value), self.library)

    def play(self, now: Round) -> None:
        self.verify(now) if now.kind == "verify" else self.decode(now)

    def verify(self, now: Round) -> None:
        """Verify all rows, then commit what was accepted."""
        rows = [self.draw(each, now.lengths[each]) if each >= 0 else self.padding() for each in now.order]
        lengths = [len(row.q) for row in rows]
        packed = [np.concatenate([getattr(row, name) for row in rows]) for name in Tokens._fields]
        heads = (self.game.H, self.game.H, self.game.HV)
        call = {
            f"x_{letter}": self.to(x.reshape(1, len(x), count, DIM))
            for letter, x, count in zip(LETTERS, packed, heads, strict=False)
        }
        slots = self.to(np.array([self.slots[each] if each >= 0 else -1 for each in now.order], np.int32))
        scratch_rows = self.to(np.arange(len(rows), dtype=np.int32)[::-1])
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        out = kda_cupy.kda_decode_mtp(
            **call,
            g=self.to(packed[3][None]),
            beta=self.to(packed[4][None]),
            **self.moved_weights,
            **self.arrays,
            ssm_state_indices=slots,
            intermediate_state_indices=scratch_rows,
            cu_seqlens=self.to(bounds),
            max_tokens_per_request=MOST,
        )
        out = to_host(out)[0]
        for row, (sequence, tokens) in enumerate(zip(now.order, rows, strict=True)):
            got = out[bounds[row] : bounds[row + 1]]
            if sequence < 0:
                assert not got.any()
            elif len(got):
                trial = self.models[sequence].copy()
                want = np.array([trial.decode(tokens, j)[0] for j in range(len(got))])
                assert relative_error(got, want) < OUTPUT_ERROR[self.game.dtype]
                for j in range(now.accepted[sequence]):
                    self.models[sequence].decode(tokens, j)
        accepted = [now.accepted[each] if each >= 0 else 99 for each in now.order]
        kda_cupy.kda_commit(
            accept_lens=self.to(np.array(accepted, np.int32)),
            ssm_state_indices=slots,
            intermediate_state_indices=scratch_rows,
            **self.arrays,
        )

    def padding(self) -> Tokens:
        t = int(self.rng.integers(0, 3))
        game, kind = self.game, np_dtype(self.game.dtype)
        shapes = [(t, game.H * DIM)] * 2 + [(t, game.HV * DIM), (t, game.HV, DIM), (t, game.HV)]
        return Tokens(*[np.full(shape, np.nan, kind) for shape in shapes])

    def decode(self, now: Round) -> None:
        """One token of every row."""
        tokens = {each: self.draw(each, 1) for each in now.order if each >= 0}
        wanted = {each: self.models[each].decode(tokens[each], 0) for each in tokens}
        rows = [tokens[each] if each >= 0 else self.nothing() for each in now.order]
        packed = [np.concatenate([getattr(row, name) for row in rows]) for name in Tokens._fields]
        slots = self.to(np.array([self.slots[each] if each >= 0 else -1 for each in now.order], np.int32))
        out = {"step": self.step, "pair": self.pair, "decode": self.packed}[now.kind](
            packed, slots, now, wanted
        )
        for row, each in enumerate(now.order):
            if each < 0:
                assert not out[row].any()
            else:
                assert relative_error(out[row], wanted[each][0]) < OUTPUT_ERROR[self.game.dtype]

    def nothing(self) -> Tokens:
        """One token of a row of padding."""
        game, kind = self.game, np_dtype(self.game.dtype)
        widths = [(1, game.H * DIM)] * 2 + [(1, game.HV * DIM), (1, game.HV, DIM), (1, game.HV)]
        return Tokens(*[np.full(shape, np.nan, kind) for shape in widths])

    def step(self, packed: list[Any], slots: Any, *_: Any) -> Any:
        """Everything in one launch."""
        heads = (self.game.H, self.game.H, self.game.HV)
        persistent = ("recurrent_state", "cs_q", "cs_k", "cs_v")
        call = {
            f"x_{letter}": self.to(x.reshape(1, len(x), count, DIM))
            for letter, x, count in zip(LETTERS, packed, heads, strict=False)
        }
        out = kda_cupy.kda_decode_step(
            **call,
            g=self.to(packed[3][None]),
            beta=self.to(packed[4][None]),
            **self.moved_weights,
            **{name: self.arrays[name] for name in persistent},
            ssm_state_indices=slots,
        )
        return to_host(out)[0]

    def pair(self, packed: list[Any], slots: Any, *_: Any) -> Any:
        """The convolution of q, k and v in one launch, then the packed decode."""
        pieces = [
            tuple(self.arrays[f"cs_{letter}"] for letter in LETTERS),
            *(
                tuple(self.moved_weights[f"{name}_{letter}"] for letter in LETTERS)
                for name in ("w", "conv_bias")
            ),
        ]
        x = tuple(self.to(each) for each in packed[:3])
        rows = kda_cupy.causal_conv1d_update(x, *pieces, "silu", slots)
        return self.packed_decode(rows, packed, slots)

    def packed(self, packed: list[Any], slots: Any, now: Round, wanted: dict[int, Any]) -> Any:
        """The packed decode of the model's activations; the histories are the model's too."""
        kind, width = np_dtype(self.game.dtype), (2 * self.game.H + self.game.HV) * DIM
        rows = np.full((len(now.order), width), np.nan, kind)
        for row, each in enumerate(now.order):
            if each >= 0:
                rows[row] = np.concatenate(wanted[each][1]).astype(kind)
                for letter, history in zip(LETTERS, self.models[each].histories, strict=True):
                    self.arrays[f"cs_{letter}"][self.slots[each]] = self.to(history.astype(kind))
        return self.packed_decode(self.to(rows), packed, slots)

    def packed_decode(self, rows: Any, packed: list[Any], slots: Any) -> Any:
        out, _ = kda_cupy.kda_packed_decode(
            rows,
            self.to(packed[3].reshape(len(packed[3]), self.game.HV * DIM)),
            self.to(packed[4]),
            self.moved_weights["A_log"],
            self.moved_weights["dt_bias"],
            self.arrays["recurrent_state"],
            slots,
            lower_bound=self.game.lower_bound,
        )
        return to_host(out)[:, 0]

    def compare(self) -> None:
        """States within rounding, histories to the bit, and everybody else's slot as it was."""
        states = to_host(self.arrays["recurrent_state"])
        histories = [to_host(self.arrays[f"cs_{letter}"]) for letter in LETTERS]
        for slot, model in zip(self.slots, self.models, strict=True):
            assert relative_error(states[slot], model.state) < STATE_ERROR
            for got, want in zip(histories, model.histories, strict=True):
                assert same_bits(got[slot], want.astype(got.dtype))
        idle = np.setdiff1d(np.arange(len(states)), self.slots)
        assert same_bits(states[idle], self.start["recurrent_state"][idle])
        for letter, got in zip(LETTERS, histories, strict=True):
            assert same_bits(got[idle], self.start[f"cs_{letter}"][idle])


def play(game: Game, library: ModuleType) -> None:
    """Live through a game; raises where engine and model differ."""
    engine = Engine(game, library)
    for now in game.rounds:
        engine.play(now)
        engine.compare()
    kda_cupy.check_errors()


def scripted(mode: str, dtype: str) -> Game:
    """D3: verify 4, keep 3, one plain token, verify 4, keep 1; then keep nothing, and all of it."""
    script = [
        Round("verify", [4, 2, 5], [3, 0, 5], [2, -1, 0, 1]),
        Round("step", [1] * 3, [1] * 3, [0, 1]),
        Round("verify", [4, 4, 0], [1, 4, 0], [1, 0, 2, -1]),
        Round("verify", [3, 1, 5], [0, 1, 0], [0, 2, 1]),
        Round("decode", [1] * 3, [1] * 3, [-1, 2, 0]),
        Round("step", [1] * 3, [1] * 3, [2, -1, 0]),
        Round("pair", [1] * 3, [1] * 3, [1, 0, -1, 2]),
        Round("verify", [5, 5, 5], [5, 5, 5], [1, 2, 0]),
    ]
    return Game(mode=mode, dtype=dtype, rounds=script)
