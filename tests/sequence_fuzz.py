# SPDX-License-Identifier: Apache-2.0
"""Games without end for sequence_model.py, and what is left of one that fails once nothing can be left out.

>>> fuzz(numpy, minutes=10, seed=0)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np
from sequence_model import MOST, POOL_KINDS, SEQUENCES, Game, Round, play

import kda_cupy
from kda_cupy.errors import KdaError

PROGRAM = """\
import sys; sys.path[:0] = [".", "tests"]
import {library}
from sequence_model import Game, Round, play
play({game}, {library})
"""


def draw(seed: int, library: ModuleType) -> Game:
    """The game of a number. On CUDA a few combinations of dtypes only: each is kernels to compile."""
    rng = np.random.default_rng(seed)
    on_gpu = library is not np

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    H, dtype, bounded = one(1, 1, 2, 3), one("float32", "bfloat16", "float16"), bool(rng.integers(2))
    parameters = one("float32", "float32", dtype)
    return Game(
        op=one("kda", "kda", "kda", "gdn"),
        mode=one("rings", "snapshots"),
        dtype=dtype,
        H=H,
        HV=H * one(1, 2) if on_gpu else H * one(1, 2, 3),
        lower_bound=one(-5.0, -5.0, -0.5) if bounded else None,
        seed=int(rng.integers(2**31)),
        rounds=[_round(rng) for _ in range(int(rng.integers(1, 9)))],
        way=one("eager", "bound", "graph"),
        streams=one(1, 1, 2, 3),
        index_dtype=one("int32", "int64"),
        parameter_dtype=parameters,
        gate_dtype=one(None, "float32") if not on_gpu or parameters == "float32" else None,
        bias=bool(rng.integers(2)),
        A_log=not bounded or bool(rng.integers(4)),
        onorm=bool(rng.integers(2)) and parameters != "float16",
        ring_indices=bool(rng.integers(2)),
        channels_fastest=bool(rng.integers(4)),
        split=bool(rng.integers(2)),
        null_index=one(-1, 0),
        patience=one(1, 3, 9),
    )


def _round(rng: np.random.Generator) -> Round:
    kinds = ["verify"] * 5 + ["step"] * 4 + ["pair", "pair", "decode", *POOL_KINDS]
    lengths = rng.integers(0, MOST + 1, SEQUENCES).tolist()
    order = rng.permutation(SEQUENCES)[: rng.integers(1, SEQUENCES + 1)].tolist()
    for _ in range(int(rng.integers(3))):
        order.insert(int(rng.integers(len(order) + 1)), -1)
    accepted = [int(rng.integers(length + 1)) for length in lengths]
    return Round(str(rng.choice(kinds)), lengths, accepted, order)


def simpler(game: Game) -> Iterator[Game]:
    """Games that ask for a little less."""
    for n in range(len(game.rounds)):
        yield replace(game, rounds=game.rounds[:n] + game.rounds[n + 1 :])
    for each in fields(Game):
        if each.name not in ("seed", "rounds", "H", "HV") and getattr(game, each.name) != each.default:
            if each.name == "lower_bound" and game.lower_bound is None:
                continue
            yield replace(game, **{each.name: each.default})
    yield replace(game, H=1, HV=1)
    for n, now in enumerate(game.rounds):
        for less in _less(now):
            yield replace(game, rounds=[*game.rounds[:n], less, *game.rounds[n + 1 :]])


def _less(now: Round) -> Iterator[Round]:
    for row in range(len(now.order)):
        rest = now.order[:row] + now.order[row + 1 :]
        if any(each >= 0 for each in rest):
            yield replace(now, order=rest)
    for sequence in range(SEQUENCES):
        for name in ("accepted", "lengths"):
            numbers = list(getattr(now, name))
            numbers[sequence] -= 1
            if numbers[sequence] >= (0 if name == "accepted" else now.accepted[sequence]):
                yield replace(now, **{name: numbers})


def shrink(game: Game, fails: Callable[[Game], bool], tries: int = 300) -> Game:
    """A game that still fails and of which nothing can be left out, or what was reached after so many tries."""
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in simpler(game):
            tries -= 1
            if tries < 0:
                return game
            if candidate != game and fails(candidate):
                game, shrunk = candidate, True
                break
    return game


def failure(game: Game, library: ModuleType) -> str:
    """What goes wrong in a game, or an empty string."""
    try:
        play(game, library)
    except Exception as error:  # whatever it is, it is a finding
        _forget_errors()
        return f"{type(error).__name__}: {error}"
    return ""


def _forget_errors() -> None:
    with suppress(KdaError):
        kda_cupy.check_errors()


def program(game: Game, library: ModuleType) -> str:
    """A script that plays a game, to be pasted into a shell's ``python -`` at the top of the repository."""
    return PROGRAM.format(library=library.__name__, game=game)


def fuzz(
    library: ModuleType, *, minutes: float, seed: int = 0, report: Callable[[str], None] = print
) -> Counter[str]:
    """Play games until the time is up. Counts games, findings and rounds of each kind.

    report: told the program of each finding, shrunk. A broken CUDA context breaks everything behind it too: the first
    finding is the one to look at.
    """
    counts: Counter[str] = Counter(findings=0)
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        game = draw(seed, library)
        wrong = failure(game, library)
        counts["games"] += 1
        counts.update(f"{game.way} {each.kind}" for each in game.rounds)
        if wrong:
            counts["findings"] += 1
            small = shrink(game, lambda each: bool(failure(each, library)))
            report(f"game {seed}: {wrong}\n\n{program(small, library)}")
        seed += 1
    counts["last seed"] = seed - 1
    return counts
