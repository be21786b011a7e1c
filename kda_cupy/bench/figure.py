# SPDX-License-Identifier: Apache-2.0
"""Views of a record as pictures: a column of panels an operation, and below them all of them under one roof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kda_cupy.bench.naming import grouped, series
from kda_cupy.bench.record import Record, Row
from kda_cupy.bench.render import machine_of

_LINES: Final = 8
"""In a panel; more of them nobody can tell apart."""
_MARKERS: Final = "osD^vP"

Draw = Callable[[Any, list[Row], str, float], None]


def plot_formats() -> set[str]:
    """Endings of file names that a figure can be written to. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    return {f".{each}" for each in Figure().canvas.get_supported_filetypes()}


def write_plot(record: Record, file: Any) -> None:
    """Draw times over the batch and, where there are several, over tokens, each with its yardstick and its floor."""
    _draw(record, [(draw_times, "B"), (draw_times, "t")], roof=False).savefig(file, format=_format_of(file))


def write_page(record: Record, file: Any, file_format: str | None = None) -> None:
    """Draw the whole page: times and ratios over the batch, times over tokens, and speed over bytes.

    file: a path, or a binary file with its format, such as ``"svg"``.
    """
    from matplotlib import rc_context

    panels: list[tuple[Draw, str]] = [(draw_times, "B"), (draw_ratios, "B"), (draw_times, "t")]
    kind = file_format or _format_of(file)
    with rc_context({"svg.hashsalt": "kda_cupy"}):  # the same record, the same file
        _draw(record, panels, roof=True).savefig(
            file, format=kind, metadata={"Date": None} if kind == "svg" else None
        )


def _format_of(file: Path) -> str:
    return file.suffix.removeprefix(".")


def _draw(record: Record, panels: list[tuple[Draw, str]], *, roof: bool) -> Any:
    """A figure: a column an operation, a line of panels for each that has something to show."""
    from matplotlib.figure import Figure

    timed = [row for row in record.rows if row.median_us]
    speed = best_speed(timed)
    columns = grouped(timed, lambda row: row.table)
    lines = [each for each in panels if any(_shows(rows, *each) for rows in columns.values())]
    roof = roof and speed > 0
    figure: Any = Figure(
        figsize=(max(7.0, 4.8 * len(columns)), 0.5 + 4.6 * (len(lines) + roof)), layout="constrained"
    )
    figure.suptitle(machine_of(record) if timed else "nothing was timed", fontsize="medium")
    grid = figure.add_gridspec(max(1, len(lines) + roof), max(1, len(columns)))
    for y, (draw, along) in enumerate(lines):
        for x, rows in enumerate(columns.values()):
            if _shows(rows, draw, along):
                draw(figure.add_subplot(grid[y, x]), rows, along, speed)
    if roof:
        draw_roof(figure.add_subplot(grid[len(lines), :]), columns, speed)
    return figure


def _shows(rows: list[Row], draw: Draw, along: str) -> bool:
    """Whether a panel would have anything on it."""
    if along == "t" and len({row.t for row in rows}) == 1:
        return False
    return draw is not draw_ratios or any(row.ratio for row in rows)


def best_speed(rows: list[Row]) -> float:
    """Bytes a microsecond of the fastest yardstick; 0 without any."""
    return max((row.yardstick_speed or 0.0 for row in rows), default=0.0)


def draw_times(axes: Any, rows: list[Row], along: str, speed: float) -> None:
    """One panel: a solid line a geometry, dashed its yardstick, dotted its floor.

    The floor is the time that the bytes of an operation take at the best speed of any yardstick in the record.
    """
    for line, x, color, label in _lines(axes, rows, along):
        axes.plot(x, [row.median_us for row in line], "o-", color=color, ms=4, label=label)
        if speed:
            axes.plot(x, [row.yardstick_us for row in line], "--", color=color, alpha=0.7)
            axes.plot(x, [(row.bytes_moved or 0) / speed for row in line], ":", color=color)
    if speed:
        names = " and ".join(dict.fromkeys(row.yardstick for row in rows))
        axes.plot([], [], "--", color="gray", label=f"yardstick {names}")
        axes.plot([], [], ":", color="gray", label=f"floor: all bytes at {speed / 1e6:.3g} TB/s")
    axes.set_yscale("log")
    _finish(axes, "time (µs)")


def draw_ratios(axes: Any, rows: list[Row], along: str, speed: float) -> None:
    """One panel: time over the yardstick's."""
    for line, x, color, label in _lines(axes, rows, along):
        axes.plot(x, [row.ratio for row in line], "o-", color=color, ms=4, label=label)
    axes.axhline(1, color="gray", ls="--", lw=1)
    axes.set_ylim(0, 1.1 * max(row.ratio or 1 for row in rows))
    names = " or ".join(dict.fromkeys(row.yardstick for row in rows))
    _finish(axes, f"ratio to {names}")


def draw_roof(axes: Any, columns: dict[str, list[Row]], speed: float) -> None:
    """One panel: bytes a second over the bytes of a call, of operations and yardsticks."""
    rows = [row for each in columns.values() for row in each]
    axes.axhline(speed / 1e6, color="gray", ls=":", label=f"best of the yardsticks: {speed / 1e6:.3g} TB/s")
    yardsticks = [(row.yardstick_bytes, row.yardstick_speed / 1e6) for row in rows if row.yardstick_speed]
    axes.plot(*zip(*yardsticks, strict=True), "x", color="gray", ms=5, label="yardsticks")
    for number, (operation, same) in enumerate(columns.items()):
        x = [row.bytes_moved for row in same if row.bytes_moved]
        y = [row.bytes_moved / row.median_us / 1e6 for row in same if row.bytes_moved and row.median_us]
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(x, y, marker, color=f"C{number}", ms=5, alpha=0.8, label=operation)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes that a call moves")
    axes.set_title("speed of memory", fontsize="small")
    axes.grid(which="both", alpha=0.25)
    axes.set_ylabel("TB/s")
    axes.legend(fontsize="x-small")


def _lines(axes: Any, rows: list[Row], along: str) -> list[tuple[list[Row], list[int], str, str]]:
    """Prepare a panel and return its lines: rows, where they stand, color and label.

    Single points are left out beside longer lines, and so are lines for which there is no room.
    """
    common, named = series(rows, along)
    longest = max(len(line) for line in named.values())
    named = {label: line for label, line in named.items() if len(line) > 1 or longest == 1}
    shown = list(named.items())[:_LINES]
    ticks = sorted({getattr(row, along) for _, line in shown for row in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set_xticks([], minor=True)
    requests = "requests N" if rows[0].mode else "rows B"
    axes.set_xlabel(requests if along == "B" else "tokens of a request t")
    axes.set_title(f"{rows[0].table}: {common}", fontsize="small", wrap=True)
    if len(named) > len(shown):
        axes.plot([], [], " ", label=f"and {len(named) - len(shown)} more in the record")
    return [
        (line, [getattr(row, along) for row in line], f"C{number}", label or "measured")
        for number, (label, line) in enumerate(shown)
    ]


def _finish(axes: Any, y: str) -> None:
    axes.set_ylabel(y)
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
