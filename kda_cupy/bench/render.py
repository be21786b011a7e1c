# SPDX-License-Identifier: Apache-2.0
"""Views of a record as text: tables for 80 columns, CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from typing import IO, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kda_cupy.bench.cases import Case
from kda_cupy.bench.record import Record, Row, make_row

WIDTH: Final = 80
YARDSTICKS: Final = {
    "RW": "reads, scales and writes the same state, nothing else",
    "R": "reads the same state, nothing else",
    "SNAP": "reads the same state and stores t scaled copies of it",
}


def three_digits(number: float | None) -> str:
    """Three significant digits without an exponent; ``-`` for None."""
    if number is None:
        return "-"
    rounded = float(f"{number:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}"


def _error(number: float | None) -> str:
    return "-" if number is None else f"{number:.2e}".replace("e-0", "e-").replace("e+0", "e+")


def _ratio(row: Row) -> str:
    return three_digits(row.ratio) + "!" * row.is_slow


#: Heading and cell of each column of the table; a column without any value is left out.
_COLUMNS: Final[dict[str, Callable[[Row], str]]] = {
    "t": lambda row: str(row.t) if row.mode else "-",
    "n": lambda row: str(row.accept) if row.accept else "-",
    "B": lambda row: str(row.B),
    "us": lambda row: three_digits(row.median_us),
    "p95": lambda row: three_digits(row.p95_us),
    "GB/s": lambda row: three_digits(row.gb_per_s),
    "{yardstick} us": lambda row: three_digits(row.yardstick_us),
    "ratio": _ratio,
    "host us\neager": lambda row: three_digits(row.host_eager_us),
    "\nbound": lambda row: three_digits(row.host_bound_us),
    "error\nout": lambda row: _error(row.error_out),
    "\nstate": lambda row: _error(row.error_state),
}


def title_of(row: Row) -> str:
    """Operation and geometry: what the rows of one table have in common."""
    work = "packed decode" if row.operation == "decode" else f"{row.operation} with {row.mode}"
    heads = f"{row.op} {work}: H={row.H}, HV={row.HV}, "
    dims = f"K={row.K}, V={row.V}, " if row.operation == "decode" else ""
    norm = ", output norm" if row.norm else ""
    return f"{heads}{dims}{row.dtype}, {row.gate} gate{norm}"


def grouped(rows: Iterable[Row], key: Callable[[Row], Any] = title_of) -> dict[Any, list[Row]]:
    """Rows that belong together, in the order in which each group appears first."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def names_of(row: Row) -> str:
    """What tells a row from the others of its table."""
    t = f"t={row.t}, " if row.mode else ""
    keep = f"n={row.accept}, " if row.accept else ""
    return f"{t}{keep}{'N' if row.mode else 'B'}={row.B}"


def _table(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 0, 0, 1)
    columns = {heading: [cell(row) for row in rows] for heading, cell in _COLUMNS.items()}
    shown = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    rows_are = "N" if rows[0].mode else "B"
    for heading in shown:
        name = rows_are if heading == "B" else heading.format(yardstick=rows[0].yardstick)
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for line in zip(*shown.values(), strict=True):
        table.add_row(*line)
    return table


def print_record(record: Record, file: IO[str]) -> None:
    """Print the tables, one an operation and geometry, what is to be said of single rows, and how it was measured."""
    console = Console(file=file, highlight=False)
    console.width = max(console.width, WIDTH)
    for title, rows in grouped(record.rows).items():
        console.print(title, style="bold")
        console.print(_table(rows), "")
        notes = [f"{names_of(row)}: {row.status}: {row.note}" for row in rows if row.note]
        for line in [*notes, ""] if notes else []:
            console.print(line, markup=False)
    for line in caption(record):
        console.print(line, markup=False)


def caption(record: Record) -> list[str]:
    """What the numbers are: machine, method, meaning of the columns, versions."""
    protocol, environment = record.protocol, record.environment
    lines = [machine_of(record)]
    lines.append(f"us: median of {protocol.repeats} samples a row ({protocol.timer}).")
    used = [
        name for name in YARDSTICKS if any(row.yardstick == name and row.yardstick_us for row in record.rows)
    ]
    for name in used:
        ratio = f" ratio: us / {used[0] if len(used) == 1 else 'that'} us." if name == used[-1] else ""
        lines.append(f"{name}: {YARDSTICKS[name]}.{ratio}")
    if any(row.operation == "round" for row in record.rows):
        lines.append(
            "round: all slots are verified, then the first of them is committed; its state is out of L2 by then."
        )
    if any(row.accept for row in record.rows):
        lines.append("n: tokens of a request that the commit keeps.")
    if any(row.is_slow for row in record.rows):
        lines.append("!: less than half the speed of the yardstick. Something is wrong here.")
    kernels = {(row.variant, row.registers, row.source_digest) for row in record.rows if row.registers}
    for variant, registers, digest in sorted(kernels):
        lines.append(f"{variant}, {registers} registers, source {digest[:8]}.")
    names = ["kda_cupy", "python", "numpy"] + ["cupy", "nvrtc", "driver"] * (protocol.backend == "cuda")
    lines.append(", ".join(f"{name} {environment.get(name)}" for name in names) + ".")
    if not record.complete:
        lines.append("Interrupted: the rows above are all that was measured.")
    return lines


def machine_of(record: Record) -> str:
    """Where it was measured, and in which state L2 was."""
    protocol, environment = record.protocol, record.environment
    if protocol.backend != "cuda":
        return f"NumPy on {environment.get('cpu')}: shows that it works, not how fast the kernels are."
    state = (
        "warm: every launch works on the same slots, which L2 may hold"
        if protocol.l2 == "warm"
        else f"cold L2: {protocol.reuse_bytes / 1e6:.3g} MB or more of state move between two uses of a slot"
    )
    return f"{_gpu_name(record)}, {state}."


def _gpu_name(record: Record) -> str:
    gpus = record.environment.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else []:
        if gpu["index"] == record.protocol.device:
            return str(gpu["name"])
    return f"GPU {record.protocol.device}"


def write_csv(rows: Iterable[Row], file: IO[str]) -> None:
    """One line a row, all fields but the raw samples. ``file`` is opened with ``newline=""``."""
    names = list(make_row(Case("kda", 1, 1)).flat())
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.flat() for row in rows)
