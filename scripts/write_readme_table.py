# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README's "Speed" from the newest records in benchmarks/results, after scripts/gpu_check.sh."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kda_cupy.bench.render import three_digits

ROOT = Path(__file__).parents[1]
BATCHES = (1, 8, 64, 256)
START, END = (
    "<!-- {}: written from benchmarks/results by scripts/write_readme_table.py -->",
    "<!-- end of {} -->",
)
TABLES = {"table": ("decode", "step", "chain"), "second table": ("verify", "commit", "round")}
"""What stands between the markers of each name."""


def newest_record(operations: Iterable[str], folder: Path = ROOT / "benchmarks" / "results") -> Path | None:
    """The one with the latest date in its name that has rows of all these operations; None if there is none."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        found = {operation_of(row) for row in json.loads(path.read_text(encoding="utf-8"))["bench"]["rows"]}
        if found.issuperset(operations):
            return path
    return None


def operation_of(row: dict[str, Any]) -> str:
    """Records of the first version knew one."""
    return str(row.get("operation", "decode"))


def name_of(row: dict[str, Any]) -> str:
    """What a line of a table is about."""
    heads = f"H={row['H']}" + (f", HV={row['HV']}" if row["HV"] != row["H"] else "")
    one_token = {"decode": "packed decode", "step": "whole step", "chain": "convolution, then packed decode"}
    if operation_of(row) in one_token:
        norm = ", output norm" if row.get("norm") else ""
        return f"{row['op'].upper()} {heads}, {one_token[operation_of(row)]}{norm}"
    kept = f" keeping {row['accept']}" if row["accept"] else ""
    return f"{operation_of(row)} t={row['t']}{kept}, {row['mode']}, {heads}"


def table(record: dict[str, Any], name: str, operations: Iterable[str]) -> str:
    """Markdown: one line per operation and geometry, a column per batch size."""
    lines_by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for operation in operations:
        for row in record["bench"]["rows"]:
            if operation_of(row) == operation and not row.get("peer"):
                lines_by_name.setdefault(name_of(row), {})[row["B"]] = row
    axis = "B" if "decode" in operations else "N"
    yardsticks = list(
        dict.fromkeys(row.get("yardstick", "RW") for rows in lines_by_name.values() for row in rows.values())
    )
    several = len(yardsticks) > 1
    ratio = "ratio to the yardstick of the line" if several else f"ratio to {yardsticks[0]}"
    lines = [
        f"{record['gpu']}, bf16 activations, fp32 state, us ({ratio}); from [{name}](benchmarks/results/{name}):",
        "",
        "| | " + "| " * several + " | ".join(f"{axis}={B}" for B in BATCHES) + " |",
        "|---" * (len(BATCHES) + 1 + several) + "|",
    ]
    for shape, rows in lines_by_name.items():
        if not set(rows).issuperset(BATCHES):  # a sweep over something else
            continue
        cells = [cell(rows[B]) for B in BATCHES]
        which = [next(iter(rows.values())).get("yardstick", "RW")] if several else []
        lines.append(f"| {shape} | " + " | ".join([*which, *cells]) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    """Time and ratio, or why there is none."""
    if row["median_us"] is None:
        return str(row["status"])
    return f"{three_digits(row['median_us'])} (x{row['median_us'] / row['yardstick_us']:.2f})"


def with_tables(readme: str) -> str:
    """README with what is between the markers replaced, where there is a record for it."""
    for marker, operations in TABLES.items():
        path = newest_record(operations)
        start, end = START.format(marker), END.format(marker)
        if path is None or start not in readme:
            continue
        before, _, rest = readme.partition(start)
        _, _, after = rest.partition(end)
        text = table(json.loads(path.read_text(encoding="utf-8")), path.name, operations)
        readme = f"{before}{start}\n\n{text}\n\n{end}{after}"
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
