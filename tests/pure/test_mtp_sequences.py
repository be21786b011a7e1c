# SPDX-License-Identifier: Apache-2.0
"""Any mixture of verify, commit and single decode equals decoding the accepted tokens one by one."""

import numpy
import pytest
from hypothesis import given, settings
from sequence_model import Game, games, play, scripted


@pytest.mark.parametrize("mode", ["rings", "snapshots"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_of_everything(mode: str, dtype: str) -> None:
    play(scripted(mode, dtype), numpy)


@settings(max_examples=25, deadline=None)
@given(game=games())
def test_mixed_sequences_equal_sequential_decoding(game: Game) -> None:
    play(game, numpy)
