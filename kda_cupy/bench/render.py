# SPDX-License-Identifier: Apache-2.0
"""Views of a record as text: tables for 80 columns, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kda_cupy.bench.cases import Case
from kda_cupy.bench.compare import Change
from kda_cupy.bench.naming import grouped, names_of, series, title_of
from kda_cupy.bench.record import Record, Row, make_row

WIDTH: Final = 80
COMPACT_BATCHES: Final[tuple[int, ...]] = (1, 8, 64, 256)
"""Columns of a compact table, if there are more sizes than it has room for."""
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


def error_text(number: float | None) -> str:
    """Three significant digits with a short exponent; ``-`` for None."""
    return "-" if number is None else f"{number:.2e}".replace("e-0", "e-").replace("e+0", "e+")


def _ratio(row: Row) -> str:
    return three_digits(row.ratio) + "!" * row.is_slow


_ASCII: Final = str.maketrans({"─": "-", "±": "~"})
"""For a pipe or terminal that knows no more."""

#: Heading and cell of each column of the table; a column without any value is left out.
_COLUMNS: Final[dict[str, Callable[[Row], str]]] = {
    "form": lambda row: row.form or "-",
    "t": lambda row: str(row.t) if row.mode else "-",
    "n": lambda row: str(row.accept) if row.accept else "-",
    "B": lambda row: str(row.B),
    "by": lambda row: row.peer,
    "us": lambda row: three_digits(row.median_us),
    "p95": lambda row: three_digits(row.p95_us),
    "GB/s": lambda row: three_digits(row.gb_per_s),
    "{yardstick} us": lambda row: three_digits(row.yardstick_us),
    "ratio": _ratio,
    "host us\neager": lambda row: three_digits(row.host_eager_us),
    "\nbound": lambda row: three_digits(row.host_bound_us),
    "error\nout": lambda row: error_text(row.error_out),
    "\nstate": lambda row: error_text(row.error_state),
    "apart": lambda row: error_text(row.difference),
}


def _plain_table() -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 0, 0, 1)
    return table


def _table(rows: list[Row]) -> Table:
    table = _plain_table()
    columns = {heading: [cell(row) for row in rows] for heading, cell in _COLUMNS.items()}
    shown = {heading: cells for heading, cells in columns.items() if set(cells) - {"-", ""}}
    if "by" in shown:
        shown["by"] = [name or "ours" for name in shown["by"]]
        for heading in ("p95", "GB/s"):  # there is no room for all; the record has them
            shown.pop(heading, None)
    rows_are = "N" if rows[0].mode else "B"
    for heading in shown:
        name = rows_are if heading == "B" else heading.format(yardstick=rows[0].yardstick)
        side: Any = "left" if heading == "form" else "right"
        table.add_column(name, justify=side, no_wrap=True, vertical="bottom")
    for line in zip(*shown.values(), strict=True):
        table.add_row(*line)
    return table


@contextmanager
def _page(file: IO[str]) -> Iterator[Console]:
    """Print on it what goes to ``file``: at least 80 columns, bold on a terminal only, no blanks at ends of lines."""
    text = io.StringIO()
    console = Console(file=text, highlight=False, force_terminal=file.isatty())
    console.width = max(console.width, WIDTH)
    yield console
    lines = [f"{line.rstrip()}\n" for line in text.getvalue().splitlines()]
    try:
        "".join(lines).encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        lines = [line.translate(_ASCII).encode("ascii", "replace").decode() for line in lines]
    file.writelines(lines)


def print_record(record: Record, file: IO[str]) -> None:
    """Print the tables, one an operation and geometry, what is to be said of single rows, and how it was measured."""
    with _page(file) as console:
        for title, rows in grouped(record.rows, title_of).items():
            console.print(title, style="bold")
            console.print(_table(rows), "")
            notes = [f"{names_of(row)}: {row.status}: {row.note}" for row in rows if row.note]
            for line in [*notes, ""] if notes else []:
                console.print(line, markup=False)
        for line in caption(record):
            console.print(line, markup=False)


def print_compact(record: Record, file: IO[str]) -> None:
    """Print a table an operation: a line a geometry, a column a batch size, in each cell time and ratio."""
    with _page(file) as console:
        for table in compact(record.rows):
            console.print(table.title, style="bold")
            shown = _plain_table()
            for number, heading in enumerate(table.head):
                shown.add_column(heading, justify="right" if number > 1 else "left", no_wrap=True)
            for cells in table.lines:
                shown.add_row(*cells)
            console.print(shown, "")
        for row in record.rows:
            if row.note:
                console.print(f"{title_of(row)}, {names_of(row)}: {row.status}: {row.note}", markup=False)
        for line in caption(record):
            console.print(line, markup=False)


class Compact(NamedTuple):
    """A table that fits 80 columns."""

    title: str
    head: list[str]
    lines: list[list[str]]


def compact(rows: list[Row], most: int = len(COMPACT_BATCHES)) -> list[Compact]:
    """A table an operation; of many batch sizes, some from the smallest to the largest."""
    tables = []
    for operation, same in grouped(rows, lambda row: row.table).items():
        common, lines = series(same, "B")
        batches = sorted({row.B for row in same})
        shown = batches
        if len(batches) > most:
            places = np.linspace(0, len(batches) - 1, most).round().astype(int)
            common_ones = [B for B in COMPACT_BATCHES if B in batches]
            shown = common_ones if len(common_ones) == most else [batches[each] for each in places]
        axis = "N" if same[0].mode else "B"
        others = ",".join(str(B) for B in batches if B not in shown)
        left = f" ({axis}={others} in the record)" if others else ""
        cells = [
            [label or "all", line[0].yardstick if any(row.yardstick_us for row in line) else ""]
            + [_time_and_ratio({row.B: row for row in line}.get(B)) for B in shown]
            for label, line in lines.items()
        ]
        head = ["", "", *[f"{axis}={B}" for B in shown]]
        numbers = "us and ratio" if any(row.ratio for row in same) else "us"
        tables.append(Compact(f"{operation}, {numbers}: {common}{left}", head, cells))
    return tables


def _time_and_ratio(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.median_us is None:
        return row.status
    return three_digits(row.median_us) + (f" x{row.ratio:.2f}" if row.ratio else "")


def print_changes(changes: list[Change], file: IO[str], *, only_changed: bool = False) -> None:
    """Print a table an operation: a line a row of either record."""
    with _page(file) as console:
        shown = [change for change in changes if not (only_changed and change.verdict == "same")]
        by_identity = {change.row.identity: change for change in shown}
        for operation, rows in grouped([change.row for change in shown], lambda row: row.table).items():
            common, lines = series(rows, "B")
            console.print(f"{operation}: {common}", style="bold")
            table = _plain_table()
            headings = (
                "",
                "N" if rows[0].mode else "B",
                "A us",
                "B us",
                "A ratio",
                "B ratio",
                "change",
                "±",
                "",
            )
            for number, heading in enumerate(headings):
                side: Any = "left" if number in (0, len(headings) - 1) else "right"
                table.add_column(heading, justify=side, no_wrap=True)
            for label, line in lines.items():
                for row in line:
                    table.add_row(label or "all", str(row.B), *_changed(by_identity[row.identity]))
            console.print(table, "")


def _changed(change: Change) -> list[str]:
    rows = (change.before, change.after)
    times = [three_digits(row.median_us if row else None) for row in rows]
    ratios = [f"{row.ratio:.2f}" if row and row.ratio else "-" for row in rows]
    verdict = "" if change.verdict == "same" else change.verdict
    if change.percent is None or change.low is None or change.high is None:
        return [*times, *ratios, "-", "-", verdict]
    half = max(change.high - change.percent, change.percent - change.low)
    return [*times, *ratios, f"{change.percent:+.1f}%", f"{half:.1f}", verdict]


def caption(record: Record) -> list[str]:
    """What the numbers are: machine, method, meaning of the columns, kernels, versions."""
    lines = method(record)
    if any(row.peer for row in record.rows):
        lines.append("apart: the larger of the differences of output and state from kda_cupy's, relative.")
        peers = record.environment.get("peers")
        lines += [f"{name}: {words}." for name, words in (peers if isinstance(peers, dict) else {}).items()]
    kernels = {(row.variant, row.registers, row.source_digest) for row in record.rows if row.registers}
    for variant, registers, digest in sorted(kernels):
        lines.append(f"{variant}, {registers} registers, source {digest[:8]}.")
    names = ["kda_cupy", "python", "numpy"]
    names += ["cupy", "nvrtc", "driver"] * (record.protocol.backend == "cuda")
    lines.append(", ".join(f"{name} {record.environment.get(name)}" for name in names) + ".")
    if not record.complete:
        lines.append("Interrupted: the rows above are all that was measured.")
    return lines


def method(record: Record) -> list[str]:
    """Machine, method, meaning of the columns."""
    protocol = record.protocol
    lines = [machine_of(record)]
    lines.append(f"us: median of {protocol.repeats} samples a row ({protocol.timer}).")
    used = [
        name for name in YARDSTICKS if any(row.yardstick == name and row.yardstick_us for row in record.rows)
    ]
    for name in used:
        lines.append(f"{name}: {YARDSTICKS[name]}.")
    if used:
        lines.append(f"ratio: us / {used[0] if len(used) == 1 else 'yardstick'} us.")
    if any(row.operation == "round" for row in record.rows):
        lines.append(
            "round: all slots are verified, then the first of them is committed; its state is out of L2 by then."
        )
    layouts = {row.plain_windows for row in record.rows if row.mode}
    if False in layouts:
        lines.append("Conv windows slide over raw inputs [rows, t + 2, channels]: each is written once.")
    if True in layouts:
        lines.append("Plain windows [rows, t, 3, channels]: each raw input is written up to three times.")
    if any(row.operation == "chain" for row in record.rows):
        lines.append("chain: causal_conv1d_update, then the packed decode; never an output norm.")
    if any(row.form == "normed" for row in record.rows):
        lines.append("normed: the whole step fused into one launch, output norm included.")
    if any(row.accept for row in record.rows):
        lines.append("n: tokens of a request that the commit keeps.")
    if any(row.is_slow for row in record.rows):
        lines.append("!: less than half the speed of the yardstick. Something is wrong here.")
    return lines


def machine_of(record: Record) -> str:
    """Where it was measured, and in which state L2 was."""
    protocol = record.protocol
    if protocol.backend != "cuda":
        return f"{machine_name(record)}: shows that it works, not how fast the kernels are."
    state = (
        "warm: every launch works on the same slots, which L2 may hold"
        if protocol.l2 == "warm"
        else f"cold L2: {protocol.reuse_bytes / 1e6:.3g} MB or more of state move between two uses of a slot"
    )
    return f"{machine_name(record)}, {state}."


def machine_name(record: Record) -> str:
    """The GPU, or NumPy and the CPU."""
    if record.protocol.backend != "cuda":
        return f"NumPy on {record.environment.get('cpu')}"
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
