# SPDX-License-Identifier: Apache-2.0
"""Write the table of README's "Speed" from the newest record in benchmarks/results. Run after scripts/gpu_check.sh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BATCHES = (1, 8, 64, 256)
START, END = (
    "<!-- table: written from benchmarks/results by scripts/write_readme_table.py -->",
    "<!-- end of table -->",
)


def newest_record(folder: Path = ROOT / "benchmarks" / "results") -> Path:
    """The record with the latest date in its name."""
    return max(folder.glob("*.json"))


def table(record: dict[str, Any], name: str) -> str:
    """Markdown: one line per geometry and operation, a column per batch size."""
    by_shape: dict[str, dict[int, dict[str, Any]]] = {}
    for row in record["bench"]["rows"]:
        heads = f"H={row['H']}" + (f", HV={row['HV']}" if row["HV"] != row["H"] else "")
        by_shape.setdefault(f"{row['op'].upper()} {heads}, K=V={row['K']}", {})[row["B"]] = row
    lines = [
        f"{record['gpu']}, bf16 activations, fp32 state, us (ratio to RW); from [{name}](benchmarks/results/{name}):",
        "",
        "| | " + " | ".join(f"B={B}" for B in BATCHES) + " |",
        "|---" * (len(BATCHES) + 1) + "|",
    ]
    for shape, rows in by_shape.items():
        cells = [
            f"{rows[B]['median_us']:.3g} (x{rows[B]['median_us'] / rows[B]['yardstick_us']:.2f})"
            for B in BATCHES
        ]
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(readme: str, text: str) -> str:
    """README with what is between the two markers replaced."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    path = newest_record()
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), table(json.loads(path.read_text()), path.name)))
