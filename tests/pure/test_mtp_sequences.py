# SPDX-License-Identifier: Apache-2.0
"""Any mixture of verify, commit and single decode equals decoding the accepted tokens one by one."""

import numpy
import pytest
from hypothesis import given, settings
from sequence_fuzz import draw, program, shrink
from sequence_model import Game, Round, games, play, scripted


@pytest.mark.parametrize("mode", ["rings", "snapshots"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_of_everything(mode: str, dtype: str) -> None:
    play(scripted(mode, dtype), numpy)


@settings(max_examples=25, deadline=None)
@given(game=games())
def test_mixed_sequences_equal_sequential_decoding(game: Game) -> None:
    play(game, numpy)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_games(seed: int) -> None:
    """scripts/fuzz.py plays for as long as one likes; tests/gpu/test_sequences.py with graphs and streams."""
    play(draw(seed, numpy), numpy)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_bound_operations_and_pool_copies(op: str) -> None:
    rounds = [
        Round(kind, [3, 0, 2], [2, 0, 1], [1, -1, 0, 2])
        for kind in (
            "verify",
            "keep",
            "step",
            "fork",
            "verify",
            "nan",
            "pair",
            "back",
            "step",
            "fresh",
            "verify",
        )
    ]
    play(Game(op=op, way="bound", rounds=rounds, patience=3, onorm=True, split=False), numpy)


def test_a_failing_game_is_shrunk_to_a_program() -> None:
    """Of a game that fails whenever it verifies two sequences or more, one such round is left."""

    def fails(game: Game) -> bool:
        return any(each.kind == "verify" and len(each.order) > 1 for each in game.rounds)

    game = next(game for game in (draw(seed, numpy) for seed in range(100)) if fails(game))
    small = shrink(game, fails)
    assert len(small.rounds) == 1 and len(small.rounds[0].order) == 2 and not any(small.rounds[0].lengths)
    assert (small.H, small.HV, small.way, small.op) == (1, 1, "eager", "kda")
    text = program(small, numpy)
    scope: dict[str, object] = {}
    exec(compile(text.replace("play(", "game = ("), "program", "exec"), scope)
    assert scope["game"] == (small, numpy)
