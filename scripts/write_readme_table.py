# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README and docs/performance.md, and README's picture, from the newest records.

``python scripts/write_readme_table.py``, after ``scripts/gpu_check.sh`` has put a record into benchmarks/results.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kda_cupy.bench.render import three_digits  # noqa: E402

BATCHES = (1, 8, 64, 256)
START, END = (
    "<!-- {}: written from benchmarks/results by scripts/write_readme_table.py -->",
    "<!-- end of {} -->",
)
TABLES = {"table": ("decode", "step", "chain"), "second table": ("verify", "commit", "round")}
"""What stands between the markers of each name."""
PAGES = {"README.md": "", "docs/performance.md": "../"}
"""Pages with markers, and how each gets to the top folder."""


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


def lines_of(record: dict[str, Any], operations: Iterable[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Rows by what their line is about and by batch size; sweeps over something else are left out."""
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for operation in operations:
        for row in record["bench"]["rows"]:
            if operation_of(row) == operation and not row.get("peer"):
                lines.setdefault(name_of(row), {})[row["B"]] = row
    return {name: rows for name, rows in lines.items() if set(rows).issuperset(BATCHES)}


def table(record: dict[str, Any], name: str, operations: Iterable[str], top: str = "") -> str:
    """Markdown: one line per operation and geometry, a column per batch size.

    top: the way from the page to the top folder.
    """
    lines_by_name = lines_of(record, operations)
    axis = "B" if "decode" in operations else "N"
    yardsticks = list(
        dict.fromkeys(row.get("yardstick", "RW") for rows in lines_by_name.values() for row in rows.values())
    )
    several = len(yardsticks) > 1
    ratio = "ratio to the yardstick of the line" if several else f"ratio to {', '.join(yardsticks)}"
    source = f"[{name}]({top}benchmarks/results/{name})"
    lines = [
        f"{record['gpu']}, bf16 activations, fp32 state, us ({ratio}); from {source}:",
        "",
        "| | " + "| " * several + " | ".join(f"{axis}={B}" for B in BATCHES) + " |",
        "|---" * (len(BATCHES) + 1 + several) + "|",
    ]
    for shape, rows in lines_by_name.items():
        cells = [cell(rows[B]) for B in BATCHES]
        which = [next(iter(rows.values())).get("yardstick", "RW")] if several else []
        lines.append(f"| {shape} | " + " | ".join([*which, *cells]) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    """Time and ratio, or why there is none."""
    if row["median_us"] is None:
        return str(row["status"])
    return "{} ({})".format(*cell_texts(row))


def cell_texts(row: dict[str, Any]) -> tuple[str, str]:
    """Time and ratio of a row that was timed."""
    return three_digits(row["median_us"]), f"x{row['median_us'] / row['yardstick_us']:.2f}"


def machine(record: dict[str, Any]) -> str:
    """Where a record was made and with what, as a Markdown list."""
    found, gpu, bench = record["environment"], record["environment"]["gpu"], record["bench"]["protocol"]
    clocks = ", ".join(f"{name} {value} MHz" for name, value in (gpu.get("clocks_mhz") or {}).items())
    facts = [
        f"GPU: {gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['multiprocessors']} SMs, "
        f"{gpu['l2_bytes'] / 2**20:.0f} MiB L2, {gpu['memory_bytes'] / 2**30:.0f} GiB",
        *([f"Clocks: {clocks}"] if clocks else []),
        f"Driver {found['driver_release']} (CUDA {found['driver']}), NVRTC {found['nvrtc']}, "
        f"CuPy {found['cupy']}, NumPy {found['numpy']}, Python {found['python']}",
        f"Timer: {bench['timer']}; L2 {bench['l2']}; {bench['repeats']} samples a row; "
        f"{bench['reuse_bytes'] / 2**20:.0f} MiB pass between two uses of a slot",
        f"Date: {record['date']}",
    ]
    return "\n".join(f"* {fact}" for fact in facts)


def every_row(record: dict[str, Any]) -> str:
    """All rows that were timed: the full tables, one an operation."""
    tables: dict[str, list[str]] = {}
    for row in record["bench"]["rows"]:
        if row["median_us"] is None:
            continue
        head = "| | rows | median us | p95 us | noise % | GB/s | yardstick | ratio | error, output | error, state |"
        lines = tables.setdefault(operation_of(row), [head, "|---" * 10 + "|"])
        peer = f", {row['peer']}" if row.get("peer") else ""
        cells = [
            name_of(row) + peer, str(row["B"]), three_digits(row["median_us"]), three_digits(row["p95_us"]),
            f"{row['noise_percent']:.2f}", f"{row['gb_per_s']:.0f}", row.get("yardstick", "RW"),
            cell_texts(row)[1], *(_error(row[field]) for field in ("error_out", "error_state")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n\n".join(f"### {name}\n\n" + "\n".join(lines) for name, lines in tables.items())


def peers(top: str = "") -> str:
    """The newest record with peers in it: each beside this package's row, or that there is none."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"), reverse=True):
        record = json.loads(path.read_text(encoding="utf-8"))
        if any(row.get("peer") for row in record["bench"]["rows"]):
            return peer_table(record, path.name, top)
    return "No record holds a peer so far."


def peer_table(record: dict[str, Any], name: str, top: str = "") -> str:
    """Markdown: a line a row of a peer; its time over this package's in the last column."""
    rows = record["bench"]["rows"]
    ours = {(name_of(row), row["B"]): row for row in rows if not row.get("peer")}
    lines = [
        f"{record['gpu']}, us (ratio to RW); from [{name}]({top}benchmarks/results/{name}):",
        "",
        "| | rows | peer | peer's time | this package's | peer / this package |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        if not row.get("peer"):
            continue
        own = ours.get((name_of(row), row["B"]))
        both = own is not None and own["median_us"] is not None and row["median_us"] is not None
        times = f"x{row['median_us'] / own['median_us']:.2f}" if both and own else ""
        mine = cell(own) if own else ""
        lines.append(f"| {name_of(row)} | {row['B']} | {row['peer']} | {cell(row)} | {mine} | {times} |")
    return "\n".join(lines)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def parts(top: str = "") -> dict[str, str]:
    """What belongs between the markers of each name, as far as there are records for it."""
    made: dict[str, str] = {}
    for marker, operations in TABLES.items():
        if path := newest_record(operations):
            made[marker] = table(json.loads(path.read_text(encoding="utf-8")), path.name, operations, top)
    if path := newest_record(("decode",)):
        record = json.loads(path.read_text(encoding="utf-8"))
        made |= {"machine": machine(record), "every row": every_row(record), "peers": peers(top)}
    return made


def with_tables(text: str, top: str = "") -> str:
    """A page with what is between its markers replaced, where there is a record for it."""
    for marker, part in parts(top).items():
        start, end = START.format(marker), END.format(marker)
        if start not in text:
            continue
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page, top in PAGES.items():
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8"), top), encoding="utf-8")
    runpy.run_path(str(ROOT / "scripts" / "draw_speed.py"), run_name="__main__")
