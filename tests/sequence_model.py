# SPDX-License-Identifier: Apache-2.0
"""Sequences that are decoded token by token, and an engine that verifies, commits and decodes the same tokens.

``SequenceModel`` is the truth: one token at a time, in float64, nothing to roll back. ``Engine`` holds the arrays of a
serving engine, each between guards, and calls the operations: eagerly, bound once, or as replays of CUDA graphs.
:func:`play` lets both live through the same rounds and compares them. sequence_fuzz.py makes up games without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from guarded import Buffer
from hypothesis import strategies as st
from mtp_problems import DIM, make_mtp, scratch, settle_tokens
from problems import np_dtype, same_bits, to_host

import kda_cupy
from kda_cupy.reference import truth
from kda_cupy.reference.truth import relative_error

OUTPUT_ERROR = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}
"""Of one row, which one large element may rule: float16 itself errs by up to 4.9e-4 of it, bfloat16 by 2e-3."""
STATE_ERROR = 1e-5
"""After all rounds of a game: at most some 60 tokens."""
SUM_ERROR = 2e-7
"""Of an output, relative to its terms: measured 1.5e-7 on outputs that do not cancel."""
HALF_STEP = {"float16": 2**-25}
"""Half the distance of numbers around zero: a new sequence's outputs can lie there."""
LETTERS = ("q", "k", "v")
EPS = 1e-5


class Tokens(NamedTuple):
    """Projections of some tokens of one sequence, in the activation dtype."""

    q: Any  # [t, H*128]
    k: Any
    v: Any  # [t, HV*128]
    g: Any  # [t, HV, 128]; GDN: the first of the 128 counts
    beta: Any  # [t, HV]
    gate: Any  # [t, HV, 128]: of the output norm


class SequenceModel:
    """One sequence. ``decode`` runs one token and keeps it; what was not accepted is simply never passed."""

    def __init__(
        self, weights: dict[str, Any], state: Any, histories: list[Any], per_key: bool = True
    ) -> None:
        self.weights, self.state, self.per_key = weights, np.asarray(state, np.float64), per_key
        self.histories = [np.asarray(history, np.float64) for history in histories]
        self.cancellation = 1.0
        """How much larger the terms of the last output were than the output: sums in fp32 err by their terms."""

    def copy(self) -> SequenceModel:
        histories = [each.copy() for each in self.histories]
        return SequenceModel(self.weights, self.state.copy(), histories, self.per_key)

    def forget(self) -> None:
        """What a slot is that has just been allocated."""
        self.state[...] = 0
        for history in self.histories:
            history[...] = 0

    def decode(self, tokens: Tokens, j: int) -> tuple[Any, list[Any]]:
        """Run token j. Returns its output [HV, 128], and its activations q, k, v as the packed decode takes them."""
        HV, _, K = self.state.shape
        acts = []
        for i, letter in enumerate(LETTERS):
            bias = self.weights.get(f"conv_bias_{letter}")
            act, self.histories[i] = truth.conv(
                self.histories[i],
                tokens[i][j].astype(np.float64),
                self.weights[f"w_{letter}"].astype(np.float64),
                0.0 if bias is None else bias.astype(np.float64),
                tokens.q.dtype,
            )
            acts.append(act)
        q, k, v = acts[0].reshape(-1, K), acts[1].reshape(-1, K), acts[2].reshape(HV, -1)
        keys = slice(None) if self.per_key else slice(0, 1)
        A_log = self.weights["A_log"]
        out, terms = np.zeros((HV, v.shape[1])), np.zeros((HV, v.shape[1]))
        for head in range(HV):
            key_head = head // (HV // len(k))
            token = truth.Token(
                q=truth.l2_normalized(q[key_head]) * K**-0.5,
                k=truth.l2_normalized(k[key_head]),
                v=v[head],
                g=truth.log_decay(
                    tokens.g[j, head, keys].astype(np.float64),
                    self.weights["dt_bias"].reshape(HV, K)[head, keys].astype(np.float64),
                    None if A_log is None else float(A_log[head]),
                    self.weights["lower_bound"],
                ),
                beta=float(truth.sigmoid(tokens.beta[j, head].astype(np.float64))),
            )
            self.state[head], out[head] = truth.step(self.state[head], token)
            terms[head] = np.abs(self.state[head]) @ np.abs(token.q)
        self.cancellation = float(np.linalg.norm(terms) / max(np.linalg.norm(out), 1e-30))
        return out, acts

    def normed(self, out: Any, tokens: Tokens, j: int, weight: Any) -> Any:
        """The output of token j behind the output norm."""
        gate = tokens.gate[j].astype(np.float64)
        weight = weight.astype(np.float64)
        return np.array([
            truth.output_norm(out[head], gate[head], weight, EPS, silu=not self.per_key)
            for head in range(len(out))
        ])  # fmt: skip


@dataclass
class Round:
    """What happens next, by sequence."""

    kind: str
    """verify; or one token of each sequence that takes part, by one of three ways: step (everything fused), pair (the
    convolution, then the packed decode), decode (the packed decode, and the model's convolution); or something with
    slots: fork (the first of ``order`` becomes the second), fresh (the first starts anew), keep (a snapshot of the
    first), back (the first becomes what was kept last), nan (the first is spoiled, decoded with the others, and
    starts anew)."""
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
    op: str = "kda"
    """Or "gdn", which has no verify: such rounds are steps."""
    way: str = "eager"
    """Or "bound" or "graph": operations are prepared once for each number of rows and tokens."""
    streams: int = 1
    """Rounds take turns on them (CUDA)."""
    index_dtype: str = "int32"
    parameter_dtype: str = "float32"
    """Of taps, A_log and dt_bias."""
    gate_dtype: str | None = None
    bias: bool = True
    A_log: bool = True
    onorm: bool = False
    ring_indices: bool = False
    channels_fastest: bool = True
    split: bool = True
    """The convolution of a pair takes q, k and v apart."""
    null_index: int = -1
    patience: int = 1
    """Rounds between two comparisons; on CUDA nothing waits in between."""


SEQUENCES, MOST, STEPS = 3, 5, 6
SLOTS = 8
POOL_KINDS = ("fork", "fresh", "keep", "back", "nan")


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


@dataclass
class Prepared:
    """An operation with buffers of its own."""

    run: Callable[[], Any]
    inputs: list[Buffer]
    out: Buffer | None


class Engine:
    """Pool, histories, scratch and weights in one library's arrays."""

    def __init__(self, game: Game, library: ModuleType) -> None:
        self.game, self.library = game, library
        self.rng = np.random.default_rng(game.seed)
        self.per_key = game.op == "kda"
        start = make_mtp(
            N=SEQUENCES,
            t=MOST,
            H=game.H,
            HV=game.HV,
            dtype=game.dtype,
            mode=game.mode,
            lower_bound=game.lower_bound,
            spare_steps=0,
            P=SLOTS,
            bias=game.bias,
            A_log=game.A_log,
            onorm=game.onorm,
            weight_dtype=game.parameter_dtype,
            parameter_dtype=game.parameter_dtype,
            channels_fastest=game.channels_fastest,
            seed=game.seed % 1000,
        )
        names = [f"{kind}_{letter}" for kind in ("w", "conv_bias") for letter in LETTERS]
        names += ["A_log", "dt_bias", "lower_bound"]
        self.weights = {name: start[name] for name in names if name in start}
        self.norm = {name: start[name] for name in ("onorm_weight", "onorm_eps") if name in start}
        self.kept: list[Buffer] = []
        """What nobody may write to."""
        self.owned: list[tuple[Buffer, Any]] = []
        """What operations may write to, guards and gaps apart."""
        self.widths = [len(start[f"w_{letter}"]) for letter in LETTERS]
        history = np.concatenate([start[f"cs_{letter}"] for letter in LETTERS], axis=1)
        if game.channels_fastest:
            history = np.ascontiguousarray(history.swapaxes(1, 2)).swapaxes(1, 2)
        self.start_history = history
        self.arrays: dict[str, Any] = {
            "recurrent_state": self.own(start["recurrent_state"]),
            "conv_state": self.own(history),
        }
        self.start = start
        self.pool = kda_cupy.StatePool.wrap(
            self.arrays["recurrent_state"], self.arrays["conv_state"], num_key_heads=game.H
        )
        self.slots = [int(slot) for slot in self.pool.allocate(SEQUENCES)]
        self.used = set(self.slots)
        parts = np.split(history, np.cumsum(self.widths)[:-1], axis=1)
        self.models = []
        for slot in self.slots:
            self.arrays["recurrent_state"][slot] = library.asarray(
                np.ascontiguousarray(start["recurrent_state"][slot])
            )
            self.arrays["conv_state"][slot] = library.asarray(np.ascontiguousarray(history[slot]))
            self.models.append(
                SequenceModel(
                    self.weights, start["recurrent_state"][slot], [each[slot] for each in parts], self.per_key
                )
            )
        first = 0
        for letter, width in zip(LETTERS, self.widths, strict=True):
            self.arrays[f"cs_{letter}"] = self.arrays["conv_state"][:, first : first + width]
            self.arrays[f"intermediate_conv_{letter}"] = self.own(start[f"intermediate_conv_{letter}"])
            first += width
        rows = len(start["intermediate_conv_q"])
        made = scratch(game.mode, rows=rows, slots=SLOTS, steps=MOST, H=game.H, HV=game.HV, dtype=game.dtype)
        self.arrays |= {name: self.own(value) for name, value in made.items()}
        self.moved_weights = {name: self.keep(value) for name, value in (self.weights | self.norm).items()}
        self.packed_weights: dict[str, Any] = {}
        """Of q, k and v side by side; of GDN's heads."""
        self.snapshot: tuple[Any, SequenceModel] | None = None
        self.prepared: dict[Any, Prepared] = {}
        self.pending: list[Callable[[], None]] = []
        self.played = 0
        self.streams = self._streams()
        self.copied = False
        """Whether the last round copied slots, so that the package orders what follows it."""

    def own(self, value: Any) -> Any:
        """Memory that operations write to."""
        buffer = Buffer(value, self.library)
        self.owned.append((buffer, buffer.array))
        return buffer.array

    def keep(self, value: Any) -> Any:
        """An array that only is read; scalars as they are."""
        if not isinstance(value, np.ndarray):
            return value
        self.kept.append(Buffer(value, self.library))
        return self.kept[-1].array

    def _streams(self) -> list[Any]:
        if self.library is np:
            return []
        self.library.cuda.Device().synchronize()
        return [self.library.cuda.Stream(non_blocking=True) for _ in range(self.game.streams)]

    @contextmanager
    def turn(self, now: Round) -> Iterator[None]:
        """The stream of a round. It waits for the round before, unless the package has promised that order."""
        if not self.streams:
            yield
            return
        stream = self.streams[self.played % len(self.streams)]
        by_package = self.game.way != "graph" and now.kind in ("fork", "fresh", "keep", "back")
        with stream:
            if not by_package and (not self.copied or now.kind in ("decode", "nan")):
                for other in self.streams:
                    stream.wait_event(other.record())
            self.copied = False
            yield
        self.copied &= self.game.way != "graph"

    def draw(self, sequence: int, t: int) -> Tokens:
        """Projections of t new tokens, none of whose activations lies between two numbers."""
        game, kind = self.game, np_dtype(self.game.dtype)
        gates = np_dtype(game.gate_dtype or game.dtype)
        parts = [self.rng.standard_normal((t, width)).astype(kind) for width in self.widths]
        others = [self.rng.standard_normal((t, game.HV, DIM)).astype(each) for each in (gates, kind)]
        beta = self.rng.standard_normal((t, game.HV)).astype(gates)
        if game.dtype != "float32":
            for letter, x, history in zip(LETTERS, parts, self.models[sequence].histories, strict=True):
                weights = self.weights[f"w_{letter}"], self.weights.get(f"conv_bias_{letter}")
                settle_tokens(x, history, *weights, self.rng)
        return Tokens(*parts, others[0], beta, others[1])

    def nothing(self, t: int) -> Tokens:
        """Tokens of a row of padding."""
        game, kind = self.game, np_dtype(self.game.dtype)
        gates = np_dtype(game.gate_dtype or game.dtype)
        shapes = [(t, width) for width in self.widths] + [(t, game.HV, DIM), (t, game.HV), (t, game.HV, DIM)]
        kinds = [kind] * 3 + [gates, gates, kind]
        return Tokens(*[np.full(shape, np.nan, each) for shape, each in zip(shapes, kinds, strict=True)])

    def call(
        self, operation: Any, inputs: dict[str, Any], fixed: dict[str, Any], out: tuple[int, ...] | None
    ) -> Any:
        """Launch an operation on inputs that are NumPy arrays (or tuples of them); ``fixed`` are the library's.

        Returns the output's buffer. What it holds is the next call's business too: read it in ``pending``.
        """
        flat = {(name, n): each for name, value in inputs.items() for n, each in enumerate(_as_tuple(value))}
        key = (operation, *((name, each.shape, each.dtype) for name, each in flat.items()))
        made = self.prepared.get(key)
        if made is None:
            buffers = {name: Buffer(each, self.library) for name, each in flat.items()}
            arrays = {
                name: tuple(buffers[name, n].array for n in range(len(value)))
                if isinstance(value, tuple)
                else buffers[name, 0].array
                for name, value in inputs.items()
            }
            given = Buffer(np.full(out, np.nan, np_dtype(self.game.dtype)), self.library) if out else None
            arrays |= {"out": given.array} if given else {}
            made = Prepared(self._prepare(operation, {**arrays, **fixed}), list(buffers.values()), given)
            if self.game.way != "eager":
                self.prepared[key] = made
        else:
            self.settle()  # the last call's contents are looked at before they go
            for buffer, value in zip(made.inputs, flat.values(), strict=True):
                buffer.write(value)
            if made.out:
                made.out.restore()
        made.run()

        def check() -> None:
            for buffer in made.inputs:
                assert not buffer.changed(buffer.now()), f"{operation.__name__} wrote to an input"
            if made.out:
                everywhere = np.ones(made.out.array.shape, bool)
                assert not made.out.changed(made.out.now(), made.out.array, everywhere), (
                    "a store beside `out`"
                )

        self.pending.append(check)
        return made.out

    def _prepare(self, operation: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
        if self.game.way == "eager":
            return lambda: operation(**arguments)
        bound = kda_cupy.bind(operation, **arguments)
        if self.game.way == "bound" or self.library is np:
            return bound
        stream = self.library.cuda.get_current_stream()
        stream.synchronize()
        stream.begin_capture()
        bound()
        graph = stream.end_capture()
        return lambda: graph.launch(self.library.cuda.get_current_stream())

    def settle(self) -> None:
        """Look at everything that has been computed and not looked at."""
        if self.streams:
            self.library.cuda.Device().synchronize()
        pending, self.pending = self.pending, []
        for check in pending:
            check()

    def play(self, now: Round) -> None:
        self.played += 1
        kind = "step" if now.kind == "verify" and not self.per_key else now.kind
        with self.turn(now):
            if kind in POOL_KINDS:
                self.move(now)
            elif kind == "verify":
                self.verify(now)
            else:
                self.decode(kind, now.order)
        if self.played % self.game.patience == 0:
            self.compare()

    def move(self, now: Round) -> None:
        """Something with slots."""
        order = [each for each in now.order if each >= 0]
        one, other = order[0], order[-1]
        self.copied = not (
            (now.kind == "back" and self.snapshot is None) or (now.kind == "fork" and one == other)
        )
        if now.kind == "keep":
            self.snapshot = (self.pool.snapshot(self.slots[one]), self.models[one].copy())
        elif now.kind == "back" and self.snapshot is not None:
            self.pool.restore(self.snapshot[0], self.slots[one])
            self.models[one] = self.snapshot[1].copy()
        elif now.kind == "fork" and one != other:
            self.pool.release(self.slots[one])
            self.slots[one] = int(self.pool.fork(self.slots[other]))
            self.models[one] = self.models[other].copy()
        elif now.kind in ("fresh", "nan"):
            if now.kind == "nan":
                for name in ("recurrent_state", "conv_state"):
                    here = self.arrays[name]
                    here[self.slots[one]] = self.library.asarray(np.full(here.shape[1:], np.nan, here.dtype))
                self.decode("step", order, spoiled=one)
            self.pool.release(self.slots[one])
            self.slots[one] = int(self.pool.allocate())
            self.models[one].forget()
        self.used |= set(self.slots)

    def slots_of(self, order: list[int]) -> Any:
        """Slot of each row; padding is -1, or 0 where that is padding too."""
        padding = -1 if self.game.null_index < 0 else 0
        return np.array([self.slots[each] if each >= 0 else padding for each in order], self.game.index_dtype)

    def options(self) -> dict[str, Any]:
        """What every operation on slots is told."""
        return {"null_index": self.game.null_index}

    def projections(self, packed: Tokens) -> dict[str, Any]:
        """What verify and step of KDA are given of the tokens."""
        heads = (self.game.H, self.game.H, self.game.HV)
        call = {
            f"x_{letter}": x.reshape(1, len(x), count, DIM)
            for letter, x, count in zip(LETTERS, packed, heads, strict=False)
        }
        call |= {"g": packed.g[None], "beta": packed.beta[None]}
        return call | ({"onorm_gate": packed.gate[None]} if self.game.onorm else {})

    def verify(self, now: Round) -> None:
        """Verify all rows, then commit what was accepted."""
        rows = [
            self.draw(each, now.lengths[each]) if each >= 0 else self.nothing(int(self.rng.integers(0, 3)))
            for each in now.order
        ]
        lengths = [len(row.q) for row in rows]
        spare = 0
        if self.game.way != "eager":  # as an engine has it: one size for all, and graphs that are used again
            spare = MOST * len(rows) - sum(lengths)
        packed = Tokens(
            *[
                np.concatenate([getattr(row, name) for row in (*rows, self.nothing(spare))])
                for name in Tokens._fields
            ]
        )
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(self.game.index_dtype)
        vectors = {
            "ssm_state_indices": self.slots_of(now.order),
            "intermediate_state_indices": np.arange(len(rows))[::-1].astype(self.game.index_dtype),
        }
        if self.game.ring_indices and self.game.mode == "rings":
            vectors["ring_indices"] = self.rng.permutation(SLOTS)[: len(rows)].astype(self.game.index_dtype)
        scratches = {name: each for name, each in self.arrays.items() if name != "conv_state"}
        out = self.call(
            kda_cupy.kda_decode_mtp,
            {**self.projections(packed), **vectors, "cu_seqlens": bounds},
            {**self.moved_weights, **scratches, **self.options(), "max_tokens_per_request": MOST},
            (1, len(packed.q), self.game.HV, DIM),
        )
        wanted, cancellation = np.zeros((len(packed.q), self.game.HV, DIM)), np.ones(len(packed.q))
        for row, (sequence, tokens) in enumerate(zip(now.order, rows, strict=True)):
            if sequence >= 0:
                trial = self.models[sequence].copy()
                for j in range(lengths[row]):
                    wanted[bounds[row] + j] = self.shown(trial, trial.decode(tokens, j)[0], tokens, j)
                    cancellation[bounds[row] + j] = trial.cancellation
                for j in range(now.accepted[sequence]):
                    self.models[sequence].decode(tokens, j)
        self.expect(out, wanted[None], cancellation)
        accepted = [now.accepted[each] if each >= 0 else 99 for each in now.order]
        self.call(
            kda_cupy.kda_commit,
            {**vectors, "accept_lens": np.array(accepted, self.game.index_dtype)},
            {**scratches, **self.options()},
            None,
        )

    def shown(self, model: SequenceModel, out: Any, tokens: Tokens, j: int) -> Any:
        """What a fused operation puts out."""
        return model.normed(out, tokens, j, self.norm["onorm_weight"]) if self.game.onorm else out

    def expect(self, out: Buffer, wanted: Any, cancellation: Any, spoiled: int | None = None) -> None:
        """Compare an output, row by row, when everything has been computed."""

        def check() -> None:
            got = to_host(out.array)
            rows, wanted_rows = got.reshape(-1, self.game.HV, DIM), wanted.reshape(-1, self.game.HV, DIM)
            for row, (mine, want) in enumerate(zip(rows, wanted_rows, strict=True)):
                if row == spoiled:
                    assert np.isnan(mine.astype(np.float64)).all()
                elif not want.any():
                    assert not mine.any(), f"row {row} is padding and not zero"
                else:
                    allowed = OUTPUT_ERROR[self.game.dtype] + SUM_ERROR * cancellation[row]
                    allowed += HALF_STEP.get(self.game.dtype, 0) * want.size**0.5 / np.linalg.norm(want)
                    assert relative_error(mine, want) < allowed, f"row {row}"

        self.pending.append(check)

    def decode(self, kind: str, order: list[int], spoiled: int | None = None) -> None:
        """One token of every row."""
        tokens = {each: self.draw(each, 1) for each in order if each >= 0}
        wanted = {each: self.models[each].decode(tokens[each], 0) for each in tokens}
        rows = [tokens[each] if each >= 0 else self.nothing(1) for each in order]
        packed = Tokens(*[np.concatenate([getattr(row, name) for row in rows]) for name in Tokens._fields])
        slots = self.slots_of(order)
        out = {"step": self.step, "pair": self.pair, "decode": self.packed}[kind](
            packed, slots, order, wanted
        )
        want, cancellation = np.zeros((len(order), self.game.HV, DIM)), np.ones(len(order))
        for row, each in enumerate(order):
            if each >= 0:
                shown, model = wanted[each][0], self.models[each]
                cancellation[row] = model.cancellation
                want[row] = self.shown(model, shown, tokens[each], 0) if kind == "step" else shown
        self.expect(out, want, cancellation, None if spoiled is None else order.index(spoiled))

    def step(self, packed: Tokens, slots: Any, *_: Any) -> Any:
        """Everything in one launch."""
        if not self.per_key:
            return self._gdn_step(packed, slots)
        persistent = ("recurrent_state", "cs_q", "cs_k", "cs_v")
        return self.call(
            kda_cupy.kda_decode_step,
            {**self.projections(packed), "ssm_state_indices": slots},
            {**self.moved_weights, **{name: self.arrays[name] for name in persistent}, **self.options()},
            (1, len(slots), self.game.HV, DIM),
        )

    def side_by_side(self, kind: str) -> Any:
        """Taps, or biases, of q, k and v in one array; None without biases."""
        if f"{kind}_q" not in self.weights:
            return None
        if kind not in self.packed_weights:
            packed = np.concatenate([self.weights[f"{kind}_{letter}"] for letter in LETTERS])
            self.packed_weights[kind] = self.keep(packed)
        return self.packed_weights[kind]

    def head_bias(self) -> Any:
        """dt_bias as the packed decode takes it."""
        if self.per_key:
            return self.moved_weights["dt_bias"]
        if "dt_bias" not in self.packed_weights:
            first = np.ascontiguousarray(self.weights["dt_bias"].reshape(self.game.HV, DIM)[:, 0])
            self.packed_weights["dt_bias"] = self.keep(first)
        return self.packed_weights["dt_bias"]

    def raw_gates(self, packed: Tokens) -> dict[str, Any]:
        """a and b of a packed decode."""
        a = packed.g.reshape(len(packed.g), -1) if self.per_key else packed.g[:, :, 0]
        return {"a": np.ascontiguousarray(a), "b": packed.beta}

    def _gdn_step(self, packed: Tokens, slots: Any) -> Any:
        inputs = {"mixed_qkv": np.concatenate(packed[:3], axis=1), **self.raw_gates(packed)}
        if self.game.onorm:
            inputs["onorm_gate"] = packed.gate
        fixed = {
            "conv_weight": self.side_by_side("w"),
            "conv_bias": self.side_by_side("conv_bias"),
            "conv_state": self.arrays["conv_state"],
            "A_log": self.moved_weights["A_log"],
            "dt_bias": self.head_bias(),
            "initial_state": self.arrays["recurrent_state"],
            "lower_bound": self.game.lower_bound,
            **{name: self.moved_weights[name] for name in self.norm},
            **self.options(),
        }
        out = (len(slots), 1, self.game.HV, DIM)
        return self.call(kda_cupy.gdn_decode_step, {**inputs, "ssm_state_indices": slots}, fixed, out)

    def pair(self, packed: Tokens, slots: Any, order: list[int], *_: Any) -> Any:
        """The convolution of q, k and v in one launch, then the packed decode."""
        if self.game.split:
            inputs: Any = tuple(packed[:3])
            fixed = {"conv_state": tuple(self.arrays[f"cs_{letter}"] for letter in LETTERS)}
            for name, kind in (("weight", "w"), ("bias", "conv_bias")):
                here = [self.moved_weights.get(f"{kind}_{letter}") for letter in LETTERS]
                fixed[name] = None if here[0] is None else tuple(here)
        else:
            inputs = np.concatenate(packed[:3], axis=1)
            fixed = {"conv_state": self.arrays["conv_state"], "weight": self.side_by_side("w")}
            fixed["bias"] = self.side_by_side("conv_bias")
        out = self.call(
            kda_cupy.causal_conv1d_update,
            {"x": inputs, "conv_state_indices": slots},
            {**fixed, "activation": "silu", **self.options()},
            (len(slots), sum(self.widths)),
        )
        return self.packed_decode(to_host(out.array).copy(), packed, slots)

    def packed(self, packed: Tokens, slots: Any, order: list[int], wanted: dict[int, Any]) -> Any:
        """The packed decode of the model's activations; the histories are the model's too."""
        kind = np_dtype(self.game.dtype)
        rows = np.full((len(order), sum(self.widths)), np.nan, kind)
        for row, each in enumerate(order):
            if each >= 0:
                rows[row] = np.concatenate(wanted[each][1]).astype(kind)
                history = np.concatenate(self.models[each].histories).astype(kind)
                self.arrays["conv_state"][self.slots[each]] = self.library.asarray(history)
        return self.packed_decode(rows, packed, slots)

    def packed_decode(self, rows: Any, packed: Tokens, slots: Any) -> Any:
        fixed = {
            "A_log": self.moved_weights["A_log"],
            "dt_bias": self.head_bias(),
            "initial_state": self.arrays["recurrent_state"],
            "lower_bound": self.game.lower_bound,
            **self.options(),
        }
        operation = kda_cupy.kda_packed_decode if self.per_key else kda_cupy.gdn_packed_decode
        inputs = {"mixed_qkv": rows, **self.raw_gates(packed), "ssm_state_indices": slots}
        return self.call(operation, inputs, fixed, (len(slots), 1, self.game.HV, DIM))

    def compare(self) -> None:
        """States within rounding, histories to the bit, nobody else's slot, no guard and no weight changed."""
        self.settle()
        states, history = (to_host(self.arrays[name]) for name in ("recurrent_state", "conv_state"))
        histories = np.split(history, np.cumsum(self.widths)[:-1], axis=1)
        for slot, model in zip(self.slots, self.models, strict=True):
            assert relative_error(states[slot], model.state) < STATE_ERROR
            for got, want in zip(histories, model.histories, strict=True):
                assert same_bits(got[slot], want.astype(got.dtype))
        idle = np.setdiff1d(np.arange(SLOTS), sorted(self.used))
        assert same_bits(states[idle], self.start["recurrent_state"][idle])
        assert same_bits(history[idle], self.start_history[idle])
        for buffer, array in self.owned:
            assert not buffer.changed(buffer.now(), array, np.ones(array.shape, bool)), (
                "a store beside an array"
            )
        for buffer in self.kept:
            assert not buffer.changed(buffer.now()), "a weight changed"


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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
