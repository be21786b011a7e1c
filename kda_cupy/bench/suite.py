# SPDX-License-Identifier: Apache-2.0
"""The cases of ``kda-cupy bench suite``: all operations over the published geometries."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kda_cupy.bench.cases import PRESETS, Case

PRESETS_OF_SUITE: Final = ("kimi-k3-tp8", "kimi-linear-48b", "qwen3-next")
GROUPS: Final = ("decode", "step", "verify", "round")
"""What can be asked for; a step brings its unfused chain along, a round its verify and its commit."""
DECODE_BATCHES: Final = (1, 2, 3, 4, 8, 32, 64, 256)
"""The small ones show a cliff between ways of launching, if there is one."""
BATCHES: Final = (1, 8, 64, 256)
ROUNDS: Final = (("rings", 4), ("rings", 8), ("snapshots", 8))
TOKENS: Final = (1, 2, 4, 8, 12, 16)
"""Of the verify over tokens, with rings."""
QUICK_BATCHES: Final = (1, 64)
SMALL_BATCHES: Final = (1, 2)


def suite_cases(
    presets: tuple[str, ...] = PRESETS_OF_SUITE,
    groups: tuple[str, ...] = GROUPS,
    *,
    quick: bool = False,
    small: bool = False,
) -> list[Case]:
    """What to measure, in the order of the groups.

    quick: two batch sizes instead of all. small: few heads and rows, for the NumPy backend.
    """
    few: tuple[int, ...] = SMALL_BATCHES if small else QUICK_BATCHES
    decode_batches, batches = (few, few) if quick or small else (DECODE_BATCHES, BATCHES)
    shapes = [PRESETS[name].small() if small else PRESETS[name] for name in dict.fromkeys(presets)]
    chained = [shape for shape in shapes if not replace(shape, operation="round").problem]
    found: list[Case] = []
    if "decode" in groups:
        found += [replace(shape, B=B) for shape in shapes for B in decode_batches]
    if "step" in groups:
        whole = [replace(shape, operation="step", norm=True) for shape in shapes]
        found += [replace(shape, B=B) for shape in whole if not shape.problem for B in batches]
    if "round" in groups:
        rounds = ROUNDS[1:] if quick or small else ROUNDS
        found += [
            replace(shape, operation="round", mode=mode, t=t, accept=t // 2, B=B)
            for shape in chained
            for mode, t in rounds
            for B in batches
        ]
    if "verify" in groups:
        B = batches[-1] if len(batches) < 3 else batches[-2]
        timed = {(case.t, case.mode, case.B) for case in found}
        found += [
            replace(shape, operation="verify", mode="rings", t=t, B=B)
            for shape in chained[:1]
            for t in TOKENS
            if (t, "rings", B) not in timed
        ]
    return found
