# SPDX-License-Identifier: Apache-2.0
"""Print how far a state in fp32 drifts from float64 over many tokens, updated in place and deferred.

python scripts/drift.py --tokens 100000 --backend cuda
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    """Run both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--backend", choices=["numpy", "cuda"], default="numpy")
    chosen = parser.parse_args()
    library = importlib.import_module("cupy" if chosen.backend == "cuda" else "numpy")
    drift = importlib.import_module("drift_model")
    for way in drift.WAYS:
        for tokens, (state, output) in drift.drift(library, chosen.tokens, way).items():
            print(f"{way:<10} {tokens:>9,} tokens: state {state:.2e}, worst output {output:.2e}", flush=True)


if __name__ == "__main__":
    main()
