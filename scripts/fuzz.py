# SPDX-License-Identifier: Apache-2.0
"""Play sequences of verify, commit, decode and pool copies against the float64 model until the time is up.

    python scripts/fuzz.py --minutes 30 --backend cuda

A game that fails is shrunk and printed as a script. Returns 1 if there was one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="number of the first game")
    parser.add_argument("--backend", choices=["numpy", "cuda"], default="numpy")
    chosen = parser.parse_args()
    library = importlib.import_module("cupy" if chosen.backend == "cuda" else "numpy")
    fuzz = importlib.import_module("sequence_fuzz").fuzz
    counts = fuzz(
        library, minutes=chosen.minutes, seed=chosen.seed, report=lambda text: print(text, flush=True)
    )
    games, findings, last = (counts.pop(name) for name in ("games", "findings", "last seed"))
    for kind, number in sorted(counts.items()):
        print(f"{kind:<16}{number:>9,} rounds")
    print(f"{games:,} games on {chosen.backend}, {chosen.seed} to {last}, {sum(counts.values()):,} rounds: "
          f"{findings} findings in {chosen.minutes:g} minutes")  # fmt: skip
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
