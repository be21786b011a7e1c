# SPDX-License-Identifier: Apache-2.0
"""Whole lives of sequences on CUDA: eager, bound and as graphs, on one stream or several, between guards.

``pytest tests/gpu/test_sequences.py --minutes 30`` plays until the time is up; without it, a short selection is played.
A failure is shrunk to a script that can be pasted.
"""

import pytest
from sequence_fuzz import draw, fuzz
from sequence_model import Game, Round, play
from spoiled import spoil

cupy = pytest.importorskip("cupy")

ROUNDS = [
    Round("verify", [4, 2, 5], [3, 0, 5], [2, -1, 0, 1]),
    Round("step", [1] * 3, [1] * 3, [0, 1, 2]),
    Round("fork", [1] * 3, [1] * 3, [0, 2]),
    Round("verify", [4, 4, 0], [1, 4, 0], [1, 0, 2, -1]),
    Round("keep", [1] * 3, [1] * 3, [1]),
    Round("step", [1] * 3, [1] * 3, [2, 1, 0]),
    Round("verify", [3, 1, 5], [0, 1, 5], [1, -1, 2, 0]),
    Round("back", [1] * 3, [1] * 3, [2]),
    Round("step", [1] * 3, [1] * 3, [1, 2, 0]),
    Round("nan", [1] * 3, [1] * 3, [1, 2, 0]),
    Round("pair", [1] * 3, [1] * 3, [0, -1, 1, 2]),
    Round("fresh", [1] * 3, [1] * 3, [0]),
    Round("verify", [5, 5, 5], [5, 2, 4], [0, 2, 1, -1]),
]


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("way", ["eager", "bound", "graph"])
@pytest.mark.parametrize("mode", ["rings", "snapshots"])
def test_rounds_of_everything(mode: str, way: str, streams: int) -> None:
    play(Game(mode=mode, way=way, streams=streams, rounds=ROUNDS, patience=4), cupy)


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_rounds_of_gdn(way: str) -> None:
    play(Game(op="gdn", way=way, streams=2, rounds=ROUNDS, patience=4, onorm=True), cupy)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_games(seed: int) -> None:
    play(draw(seed, cupy), cupy)


def test_games_until_the_time_is_up(minutes: float) -> None:
    if not minutes:
        pytest.skip("--minutes N plays for so long")
    findings: list[str] = []
    fuzz(cupy, minutes=minutes, seed=1000, report=findings.append)
    assert not findings, findings[0]


def test_spoiled_calls_change_nothing_or_are_right() -> None:
    """scripts/spoil.py --backend cuda makes more of them."""
    findings: list[str] = []
    counts = spoil(range(200), cupy, findings.append, variants=3)
    assert not findings, findings[0]
    assert sum(counts[key] for key in counts if key[0] == "refused") > 80
