# SPDX-License-Identifier: Apache-2.0
"""Views of a record as pages: Markdown, and HTML that needs no other file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from kda_cupy.bench import figure, render
from kda_cupy.bench.naming import grouped, names_of, title_of
from kda_cupy.bench.record import Record, Row

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; margin: 0.6rem 0; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #8885; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; overflow-x: auto; background: white; } figure svg { max-width: 100%; height: auto; }
div { overflow-x: auto; } .warning { border-left: 4px solid #d60; padding-left: 0.8rem; }
"""
_COMPACT_COLUMNS: Final = 16
"""Batch sizes of a table on a page: all that anybody measures."""


@dataclass(frozen=True)
class Heading:
    """Of a section (2) or a table (3)."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Lines:
    """Sentences, one a line."""

    lines: list[str]
    warning: bool = False


@dataclass(frozen=True)
class Grid:
    """A table."""

    head: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """Where the figures go."""


Block = Heading | Lines | Grid | Picture


#: Heading and cell of each column of a full table; a column without any value is left out.
_COLUMNS: Final[dict[str, Callable[[Row], str]]] = {
    "case": names_of,
    "median us": lambda row: render.three_digits(row.median_us),
    "p95": lambda row: render.three_digits(row.p95_us),
    "min": lambda row: render.three_digits(row.min_us),
    "noise %": lambda row: render.three_digits(row.noise_percent),
    "MB": lambda row: render.three_digits(row.bytes_moved / 1e6 if row.bytes_moved else None),
    "GB/s": lambda row: render.three_digits(row.gb_per_s),
    "yardstick us": lambda row: render.three_digits(row.yardstick_us),
    "ratio": lambda row: render.three_digits(row.ratio),
    "eager us": lambda row: render.three_digits(row.host_eager_us),
    "bound us": lambda row: render.three_digits(row.host_bound_us),
    "error of out": lambda row: render.error_text(row.error_out),
    "error of state": lambda row: render.error_text(row.error_state),
    "apart": lambda row: render.error_text(row.difference),
}


def markdown(record: Record, picture: str | None = None) -> str:
    """A page of a record. picture: path of the figures, if they were drawn."""
    text = [f"# {_title(record)}"]
    for block in _blocks(record):
        match block:
            case Heading(words, level):
                text.append(f"{'#' * level} {words}")
            case Lines(lines, warning):
                text.append("\n".join(f"> **{line}**" if warning else f"- {_plain(line)}" for line in lines))
            case Grid(head, lines):
                rule = "|:--" + "|--:" * (len(head) - 1) + "|"
                text.append("\n".join([_pipes(head), rule, *map(_pipes, lines)]))
            case Picture():
                if picture:
                    text.append(f"![Times, ratios and speed of memory]({picture})")
    return "\n\n".join(text) + "\n"


def html(record: Record) -> str:
    """The same as one page of HTML, figures inside; without matplotlib, it says so in their place."""
    title = escape(_title(record))
    body = [f"<h1>{title}</h1>"]
    for block in _blocks(record):
        match block:
            case Heading(words, level):
                body.append(f"<h{level}>{escape(words)}</h{level}>")
            case Lines(lines, warning):
                kind = ' class="warning"' if warning else ""
                body.append(f"<p{kind}>{'<br>'.join(map(escape, lines))}</p>")
            case Grid(head, lines):
                rows = [_html_row("th", head), *(_html_row("td", line) for line in lines)]
                body.append(f"<div><table>{''.join(rows)}</table></div>")
            case Picture():
                body.append(_inline_figures(record))
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        *body,
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _title(record: Record) -> str:
    ours = " ".join(filter(None, ("kda_cupy", record.environment.get("kda_cupy"))))
    return f"{ours} on {render.machine_name(record)}, {record.created[:10]}"


def _blocks(record: Record) -> Iterable[Block]:
    if not record.complete:
        yield Lines(["The run did not come to its end: these are the rows that were measured."], warning=True)
    yield Lines(render.method(record))
    yield Picture()
    yield Heading("Times")
    for table in render.compact(record.rows, most=_COMPACT_COLUMNS):
        yield Heading(table.title, 3)
        yield Grid(["", "yardstick", *table.head[2:]], table.lines)
    noted = [row for row in record.rows if row.note]
    if noted:
        yield Heading("Remarks")
        yield Lines([f"{title_of(row)}, {names_of(row)}: {row.status}: {row.note}" for row in noted])
    yield Heading("Every row")
    for title, rows in grouped(record.rows, title_of).items():
        yield Heading(title, 3)
        yield _full(rows)
    kernels = {row.variant: row for row in record.rows if row.registers}
    if kernels:
        yield Heading("Kernels")
        yield Grid(
            ["variant", "registers", "local bytes", "shared bytes", "source"],
            [
                [name, *map(str, (row.registers, row.local_bytes, row.shared_bytes)), row.source_digest]
                for name, row in sorted(kernels.items())
            ],
        )
    if record.kernel_digests:
        yield Heading("Digests of all sources", 3)
        yield Grid(["kernels/", "digest"], [list(each) for each in sorted(record.kernel_digests.items())])
    yield Heading("Environment")
    yield Grid(["", ""], [[name, value] for name, value in _flat(record.environment) if value])


def _full(rows: list[Row]) -> Grid:
    columns = {heading: [cell(row) for row in rows] for heading, cell in _COLUMNS.items()}
    shown = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    return Grid(list(shown), [list(line) for line in zip(*shown.values(), strict=True)])


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Names and values of nested dictionaries and lists. Folders and variables of one machine are nobody's business."""
    for name, value in values.items():
        if name in ("variables", "cache", "executable"):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, each in enumerate(value):
                yield from _flat(each, f"{prefix}{name.removesuffix('s')} {number} ")
        else:
            yield f"{prefix}{name}", str(value)


def _plain(line: str) -> str:
    """Text in which Markdown sees nothing but text."""
    for sign in "\\`*_<[":
        line = line.replace(sign, f"\\{sign}")
    return line


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


def _html_row(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"


def _inline_figures(record: Record) -> str:
    drawn = io.BytesIO()
    try:
        figure.write_page(record, drawn, "svg")
    except ImportError as cause:
        return f"<p>No figures: {escape(str(cause))}; pip install 'kda-cupy[plot]'.</p>"
    svg = drawn.getvalue().decode()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"
