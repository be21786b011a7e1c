# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/decode.svg, README's picture, from the newest record: ``python scripts/draw_speed.py [FILE]``.

Written by hand and not by a plotting library, so that the same record gives the same bytes on every machine and a test
can say whether the picture is current.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from write_readme_table import BATCHES, cell_texts, lines_of, newest_record  # noqa: E402

PANEL_WIDTH, PANEL_HEIGHT = 250, 170
LEFT, TOP, GAP, BOTTOM = 62, 78, 38, 64
PANELS = 3
INK, FAINT, BLUE, ORANGE = "#1f2933", "#d6dbe1", "#1f6fb2", "#d9822b"


def picture(record: dict[str, Any], name: str) -> str:
    """An SVG: a panel a geometry, microseconds over rows, both logarithmic."""
    panels = list(lines_of(record, ("decode",)).items())[:PANELS]
    times = [row["median_us"] for _, rows in panels for row in rows.values() if row["median_us"]]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP)
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(_title(record))}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(_title(record))}</text>',
        f'<text x="{LEFT}" y="44" fill="#52606d">'
        "bf16 activations, fp32 state, L2 cold; the yardstick RW reads and writes the same states and does nothing else"
        "</text>",
    ]
    for number, (label, rows) in enumerate(panels):
        parts += _panel(LEFT + number * (PANEL_WIDTH + GAP), label, rows, (low, high), first=number == 0)
    y = height - 14
    parts += [
        f'<line x1="{LEFT}" x2="{LEFT + 28}" y1="{y - 4}" y2="{y - 4}" stroke="{BLUE}" stroke-width="2.5"/>',
        f'<text x="{LEFT + 36}" y="{y}">packed decode</text>',
        f'<line x1="{LEFT + 140}" x2="{LEFT + 168}" y1="{y - 4}" y2="{y - 4}" stroke="{ORANGE}" '
        'stroke-width="2.5" stroke-dasharray="6 4"/>',
        f'<text x="{LEFT + 176}" y="{y}">yardstick RW</text>',
        f'<text x="{width - GAP}" y="{y}" text-anchor="end" fill="#52606d">{escape(name)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(record: dict[str, Any]) -> str:
    return f"One token of decode on {record['gpu']}: time beside plain memory traffic"


def _panel(
    x0: int, label: str, rows: dict[int, dict[str, Any]], limits: tuple[float, float], *, first: bool
) -> Iterator[str]:
    batches = sorted(rows)
    low, high = limits

    def x(B: int) -> float:
        return x0 + PANEL_WIDTH * (math.log2(B) + 0.5) / (math.log2(batches[-1]) + 1)

    def y(us: float) -> float:
        return TOP + PANEL_HEIGHT * (1 - math.log(us / low) / math.log(high / low))

    yield f'<text x="{x0}" y="{TOP - 10}" font-weight="600">{escape(label)}</text>'
    tick = low
    while tick <= high:
        yield f'<line x1="{x0}" x2="{x0 + PANEL_WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{FAINT}"/>'
        if first:
            yield f'<text x="{x0 - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} us</text>'
        tick *= 10
    for field, color, dashes in (
        ("yardstick_us", ORANGE, ' stroke-dasharray="6 4"'),
        ("median_us", BLUE, ""),
    ):
        points = " ".join(f"{x(B):.1f},{y(rows[B][field]):.1f}" for B in batches if rows[B][field])
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"{dashes}/>'
    for B in batches:
        if not rows[B]["median_us"]:
            continue
        here = y(rows[B]["median_us"])
        yield f'<circle cx="{x(B):.1f}" cy="{here:.1f}" r="3" fill="{BLUE}"/>'
        if B in BATCHES:
            time, ratio = cell_texts(rows[B])
            above = here - (26 if batches[0] == B else 24)
            yield f'<text x="{x(B):.1f}" y="{above:.1f}" text-anchor="middle" font-size="11">{time}</text>'
            yield (
                f'<text x="{x(B):.1f}" y="{above + 12:.1f}" text-anchor="middle" font-size="10" '
                f'fill="#52606d">{ratio}</text>'
            )
            yield f'<text x="{x(B):.1f}" y="{TOP + PANEL_HEIGHT + 18}" text-anchor="middle">B={B}</text>'


if __name__ == "__main__":
    found = newest_record(("decode",))
    if found is None:
        raise SystemExit("there is no record with decode rows in benchmarks/results")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "figures" / "decode.svg"
    target.parent.mkdir(exist_ok=True)
    text = picture(json.loads(found.read_text(encoding="utf-8")), found.name)
    target.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {target}")
