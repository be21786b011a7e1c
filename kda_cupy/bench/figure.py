# SPDX-License-Identifier: Apache-2.0
"""Views of a record as pictures: a column of panels an operation, times over the batch above times over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kda_cupy.bench.record import Record, Row
from kda_cupy.bench.render import grouped, machine_of

#: What tells one line of a panel from another, in this order.
_FIELDS: Final = {
    "op": "{}", "H": "H={}", "HV": "HV={}", "K": "K={}", "V": "V={}", "mode": "{}", "t": "t={}", "accept": "n={}",
    "B": "N={}", "dtype": "{}", "gate": "{} gate", "norm": "",
}  # fmt: skip
_LINES: Final = 8
"""In a panel; more of them nobody can tell apart."""


def plot_formats() -> set[str]:
    """Endings of file names that :func:`write_plot` can write. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    return {f".{each}" for each in Figure().canvas.get_supported_filetypes()}


def write_plot(record: Record, path: Path) -> None:
    """Draw times over the batch and, where there are several, over tokens, each with its yardstick and its floor."""
    timed = [row for row in record.rows if row.median_us]
    draw_page(timed, machine_of(record), ["B", "t"]).savefig(path)


def draw_page(timed: list[Row], title: str, axes_names: list[str]) -> Any:
    """A figure: a column an operation, a line of panels each of the names that more than one value stands for."""
    from matplotlib.figure import Figure

    columns = grouped(timed, lambda row: row.operation) or {"nothing was timed": []}
    lines = [name for name in axes_names if name == "B" or len({getattr(row, name) for row in timed}) > 1]
    figure: Any = Figure(figsize=(max(7.0, 4.6 * len(columns)), 0.6 + 4.2 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), len(columns), squeeze=False)
    speed = best_speed(timed)
    for name, line in zip(lines, panels, strict=True):
        for rows, axes in zip(columns.values(), line, strict=True):
            if rows and (name == "B" or rows[0].mode):
                draw_times(axes, rows, name, speed)
            else:
                axes.set_axis_off()
    figure.suptitle(title, fontsize="medium")
    return figure


def best_speed(rows: list[Row]) -> float:
    """Bytes a microsecond of the fastest yardstick; 0 without any."""
    return max(
        (row.yardstick_bytes / row.yardstick_us for row in rows if row.yardstick_us and row.yardstick_bytes),
        default=0.0,
    )


def series(rows: list[Row], along: str) -> tuple[str, dict[str, list[Row]]]:
    """What all rows have in common, and the lines of a panel by what makes them different."""
    fields = [name for name in _FIELDS if name != along and not (along == "t" and name == "accept")]
    varying = [name for name in fields if len({getattr(row, name) for row in rows}) > 1]

    def words(row: Row, names: list[str]) -> str:
        shown = [(name, getattr(row, name)) for name in names]
        return ", ".join(
            ("output norm" if value else "no norm") if name == "norm" else _FIELDS[name].format(value)
            for name, value in shown
            if value or name in varying
        )

    common = [name for name in fields if name not in varying]
    lines = grouped(rows, lambda row: words(row, varying))
    return words(rows[0], common), {
        label: sorted(each, key=lambda row: getattr(row, along)) for label, each in lines.items()
    }


def draw_times(axes: Any, rows: list[Row], along: str, speed: float) -> None:
    """One panel: a solid line a geometry, dashed its yardstick, dotted its floor.

    The floor is the time that the bytes of an operation take at the best speed of any yardstick in the record.
    """
    common, lines = series(rows, along)
    prepare_axes(axes, rows, along, common)
    axes.set_yscale("log")
    axes.set_ylabel("time (µs)")
    for number, (label, line) in enumerate(list(lines.items())[:_LINES]):
        color, x = f"C{number}", [getattr(row, along) for row in line]
        axes.plot(x, [row.median_us for row in line], "o-", color=color, ms=4, label=label or "measured")
        measured = [row for row in line if row.yardstick_us]
        axes.plot([getattr(row, along) for row in measured], [row.yardstick_us for row in measured],
                  "--", color=color, alpha=0.7)  # fmt: skip
        if speed:
            axes.plot(x, [(row.bytes_moved or 0) / speed for row in line], ":", color=color)
    if speed:
        names = " and ".join(dict.fromkeys(row.yardstick for row in rows))
        axes.plot([], [], "--", color="gray", label=f"yardstick {names}")
        axes.plot([], [], ":", color="gray", label=f"floor: all bytes at {speed / 1e6:.3g} TB/s")
    finish_axes(axes, lines)


def prepare_axes(axes: Any, rows: list[Row], along: str, common: str) -> None:
    """Ticks where something was measured, and what the panel shows above it."""
    axes.set_xscale("log", base=2)
    ticks = sorted({getattr(row, along) for row in rows})
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set_xticks([], minor=True)
    requests = "requests N" if rows[0].mode else "rows B"
    axes.set_xlabel(requests if along == "B" else "tokens of a request t")
    axes.set_title(f"{rows[0].operation}\n{common}", fontsize="small", wrap=True)
    axes.grid(which="both", alpha=0.25)


def finish_axes(axes: Any, lines: dict[str, list[Row]]) -> None:
    """The legend, and how many lines had no room."""
    if len(lines) > _LINES:
        axes.plot([], [], " ", label=f"and {len(lines) - _LINES} more in the record")
    axes.legend(fontsize="x-small")
