# SPDX-License-Identifier: Apache-2.0
"""Views of a record: a table for 80 columns, CSV, a plot."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kda_cupy.bench.cases import Case
from kda_cupy.bench.record import Record, Row, make_row

WIDTH: Final = 80


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
    "B": lambda row: str(row.B),
    "us": lambda row: three_digits(row.median_us),
    "p95": lambda row: three_digits(row.p95_us),
    "GB/s": lambda row: three_digits(row.gb_per_s),
    "RW us": lambda row: three_digits(row.yardstick_us),
    "ratio": _ratio,
    "host us\neager": lambda row: three_digits(row.host_eager_us),
    "\nbound": lambda row: three_digits(row.host_bound_us),
    "err out": lambda row: _error(row.error_out),
    "err state": lambda row: _error(row.error_state),
}


def _geometry(row: Row) -> str:
    return (
        f"{row.op} packed decode: H={row.H}, HV={row.HV}, K={row.K}, V={row.V}, {row.dtype}, {row.gate} gate"
    )


def _table(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 0, 0, 1)
    columns = {heading: [cell(row) for row in rows] for heading, cell in _COLUMNS.items()}
    shown = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for line in zip(*shown.values(), strict=True):
        table.add_row(*line)
    return table


def print_record(record: Record, file: IO[str]) -> None:
    """Print the tables, one a geometry, what is to be said of single rows, and how it was all measured."""
    console = Console(file=file, highlight=False)
    console.width = max(console.width, WIDTH)
    for title, group in groupby(record.rows, _geometry):
        rows = list(group)
        console.print(title, style="bold")
        console.print(_table(rows), "")
        notes = [f"B={row.B}: {row.status}: {row.note}" for row in rows if row.note]
        for line in [*notes, ""] if notes else []:
            console.print(line, markup=False)
    for line in caption(record):
        console.print(line, markup=False)


def caption(record: Record) -> list[str]:
    """What the numbers are: machine, method, meaning of the columns, versions."""
    protocol, environment = record.protocol, record.environment
    lines = []
    if protocol.backend == "cuda":
        state = (
            "warm: every launch works on the same slots, which L2 may hold"
            if protocol.l2 == "warm"
            else f"cold L2: {protocol.reuse_bytes / 1e6:.3g} MB or more of state move between two uses of a slot"
        )
        lines.append(f"{_gpu_name(record)}, {state}.")
    else:
        lines.append(f"NumPy on {environment.get('cpu')}: shows that it works, not how fast the kernels are.")
    lines.append(f"us: median of {protocol.repeats} samples a row ({protocol.timer}).")
    if any(row.yardstick_us for row in record.rows):
        lines.append("RW: reads, scales and writes the same state, nothing else. ratio: us / RW us.")
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


def plot_formats() -> set[str]:
    """Endings of file names that :func:`write_plot` can write. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    return {f".{each}" for each in Figure().canvas.get_supported_filetypes()}


def write_plot(record: Record, path: Path) -> None:
    """Draw time over batch, with the yardstick, and with the time that the bytes take at the yardstick's best speed."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    timed = [row for row in record.rows if row.median_us]
    batches = sorted({row.B for row in timed})
    axes.set_xticks(batches, [str(B) for B in batches])
    axes.set_xticks([], minor=True)
    speeds = [row.yardstick_bytes / row.yardstick_us for row in timed if row.yardstick_us]
    for number, (title, group) in enumerate(groupby(timed, _geometry)):
        rows = sorted(group, key=lambda row: row.B)
        B, color = [row.B for row in rows], f"C{number}"
        axes.plot(B, [row.median_us for row in rows], "o-", color=color, label=title)
        if speeds:  # the two line styles are explained once
            floor = [(row.bytes_moved or 0) / max(speeds) for row in rows]
            explained = "_" if number else ""  # matplotlib leaves out what begins with an underscore
            axes.plot(
                B,
                [row.yardstick_us for row in rows],
                "x--",
                color=color,
                label=f"{explained}RW: moves the state only",
            )
            axes.plot(
                B,
                floor,
                ":",
                color=color,
                label=f"{explained}all bytes at {max(speeds) / 1e6:.3g} TB/s, the best of RW",
            )
    axes.set_xlabel("rows B")
    axes.set_ylabel("time of a call (µs)")
    axes.set_title(caption(record)[0], fontsize="small", wrap=True)
    axes.grid(which="both", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    figure.savefig(path)
