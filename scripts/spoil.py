# SPDX-License-Identifier: Apache-2.0
"""Make spoiled calls and print how many came to which end; fails if one was neither refused nor right.

    python scripts/spoil.py --calls 100000
    python scripts/spoil.py --calls 20000 --backend cuda

Each number is a call: what was printed as ``spoil(1234)`` comes again with ``--seed 1234 --calls 1``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

ENDS = ("refused", "right", "recorded", "undefined", "finding")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first call")
    parser.add_argument("--backend", choices=["numpy", "cuda"], default="numpy")
    chosen = parser.parse_args()
    library = importlib.import_module("cupy" if chosen.backend == "cuda" else "numpy")
    spoil = importlib.import_module("spoiled").spoil

    started, counts, number = time.perf_counter(), Counter(), chosen.seed
    while (made := sum(n for (end, _), n in counts.items() if end != "undefined")) < chosen.calls:
        batch = min(500, chosen.calls - made)
        counts += spoil(range(number, number + batch), library, print)
        number += batch
    print(f"\n{'':<12}" + "".join(f"{end:>11}" for end in ENDS))
    for way in sorted({way for _, way in counts}):
        print(f"{way:<12}" + "".join(f"{counts[end, way]:>11,}" for end in ENDS))
    totals = [sum(n for (each, _), n in counts.items() if each == end) for end in ENDS]
    print(f"{'all':<12}" + "".join(f"{total:>11,}" for total in totals))
    seconds = time.perf_counter() - started
    print(f"{made:,} calls on {chosen.backend}, numbers {chosen.seed} to {number - 1}, {seconds:.0f} s")
    return 1 if totals[-1] else 0


if __name__ == "__main__":
    sys.exit(main())
