# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench``: what to measure and on what, and where the record goes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from kda_cupy.bench import cases, figure, options, pages, render, suite
from kda_cupy.bench.cases import Case
from kda_cupy.bench.compare import THRESHOLD_PERCENT, compare, differences
from kda_cupy.bench.host import host
from kda_cupy.bench.options import Refused, examples
from kda_cupy.bench.record import Record
from kda_cupy.bench.run import Run
from kda_cupy.bench.timing import WORKLOADS


@click.group(
    short_help="Measure the operations on this machine.",
    epilog=examples(
        "kda-cupy bench decode --preset kimi-k3-tp8",
        "kda-cupy bench round --tokens 4,8 --accept 2",
        "kda-cupy bench suite --quick",
        "kda-cupy bench compare before.json after.json",
    ),
)
def bench() -> None:
    """Measure the operations on this machine.

    Each row is compared with float64 before it is timed. Times are medians over replays of a CUDA graph whose launches
    walk over a pool of states, so that L2 is cold, beside a kernel that does nothing but move the same state: RW reads
    and writes it, R reads it, SNAP reads it and stores t copies. Exit codes: 0; 1 if a row could not be timed; 2 for
    what could not be run; 130 after Ctrl-C, which keeps the rows measured so far.
    """


bench.add_command(host)


@bench.command(
    epilog=examples(
        "kda-cupy bench decode",
        "kda-cupy bench decode --preset kimi-k3-tp8 --batch 1,8,64 --json decode.json",
        "kda-cupy bench decode --heads 16 --value-heads 32 --op gdn --dtype float16",
        "kda-cupy bench decode --peer fla --peer examples/peer_in_plain_torch.py",
    )
)
@options.preset(list(cases.PRESETS))
@options.HEADS
@click.option("--head-dim", type=options.POSITIVE, help="K, a multiple of 4. [default: 128]")
@click.option("--value-head-dim", type=options.POSITIVE, help="V. [default: as --head-dim]")
@click.option("--op", type=click.Choice(cases.RULES), help="[default: as the preset, or kda]")
@options.KIND
@click.option(
    "--batch",
    "batches",
    metavar="B,B,...",
    type=options.BATCHES,
    help="Rows. [default: 1,8,32,64,256; NumPy: 1,2,4,8]",
)
@options.PEER
@options.RUN
def decode(
    *,
    presets: tuple[str, ...],
    heads: int | None,
    value_heads: int | None,
    head_dim: int | None,
    value_head_dim: int | None,
    op: str | None,
    gate: str | None,
    dtype: str,
    batches: tuple[int, ...] | None,
    **run: Any,
) -> None:
    """Time packed decode, one row a batch size."""
    changes: dict[str, Any] = {"dtype": dtype} | ({} if op is None else {"op": op})
    shapes = _shapes(presets, heads, value_heads, gate, changes, K=head_dim, V=value_head_dim)
    with Run(**run) as measured:
        shapes = measured.scaled(shapes, keep=heads is not None)
        batches = batches or (cases.SMALL_BATCHES if measured.on_numpy else cases.BATCHES)
        measured.measure([replace(shape, B=B) for shape in shapes for B in batches])


@bench.command(
    short_help="Time the verify of draft tokens.",
    epilog=examples(
        "kda-cupy bench step --preset kimi-k3-tp8 --preset qwen3-next",
        "kda-cupy bench step --no-norm --batch 1,8,64 --json step.json",
    ),
)
@options.preset(list(cases.PRESETS))
@options.HEADS
@click.option("--op", type=click.Choice(cases.RULES), help="[default: as the preset, or kda]")
@options.KIND
@click.option("--norm/--no-norm", default=True, show_default=True, help="With the fused output norm.")
@click.option(
    "--batch",
    "batches",
    metavar="B,B,...",
    type=options.BATCHES,
    help="Rows. [default: 1,8,32,64,256; NumPy: 1,2,4,8]",
)
@options.RUN
def step(
    *,
    presets: tuple[str, ...],
    heads: int | None,
    value_heads: int | None,
    op: str | None,
    gate: str | None,
    dtype: str,
    norm: bool,
    batches: tuple[int, ...] | None,
    **run: Any,
) -> None:
    """Time the whole decode step, and the chain that it replaces.

    The step is convolution, gates, norms, update and output norm in one launch; the chain is causal_conv1d_update
    and the packed decode one after the other, without an output norm.
    """
    changes: dict[str, Any] = {"dtype": dtype, "operation": "step", "norm": norm} | (
        {} if op is None else {"op": op}
    )
    shapes = _shapes(presets, heads, value_heads, gate, changes)
    with Run(**run) as measured:
        shapes = measured.scaled(shapes, keep=heads is not None)
        batches = batches or (cases.SMALL_BATCHES if measured.on_numpy else cases.BATCHES)
        measured.measure([replace(shape, B=B) for shape in shapes for B in batches])


@bench.command(
    epilog=examples(
        "kda-cupy bench verify --preset kimi-k3-tp8 --tokens 1,2,4,8,16 --plot t.png",
        "kda-cupy bench verify --mode rings --mode snapshots --norm --batch 64",
    ),
)
@options.SPECULATION
@options.RUN
def verify(**arguments: Any) -> None:
    """Time the verify of draft tokens, kda_decode_mtp."""
    _speculation("verify", None, **arguments)


@bench.command(
    name="round",
    short_help="Time a verify and the commit behind it.",
    epilog=examples(
        "kda-cupy bench round --preset kimi-k3-tp8 --batch 1,8,64",
        "kda-cupy bench round --tokens 8 --accept 4 --mode snapshots --json -",
    ),
)
@options.SPECULATION
@click.option(
    "--accept",
    type=options.POSITIVE,
    help="Tokens that the commit keeps. [default: half of those verified]",
)
@options.RUN
def speculative_round(*, accept: int | None, **arguments: Any) -> None:
    """Time a speculative round: verify and commit, each apart and both in one graph.

    In the graph all slots are verified before the first is committed, as in a model whose layers commit together
    after the last one: what was read by the verify has left L2 by then.
    """
    _speculation("round", accept, **arguments)


@bench.command(
    name="suite",
    epilog=examples(
        "kda-cupy bench suite",
        "kda-cupy bench suite --quick --only decode --json - | jq .rows",
        "kda-cupy bench compare before.json kda-cupy-suite-20261201T040000.json",
    ),
)
@options.preset(list(cases.PRESETS), default=", ".join(suite.PRESETS_OF_SUITE))
@click.option(
    "--only",
    "groups",
    multiple=True,
    type=click.Choice([name for name in suite.GROUPS if name in WORKLOADS]),
    help="Some of the operations; may be repeated. A round brings its verify and its commit. [default: all]",
)
@click.option("--quick", is_flag=True, help="Two batch sizes instead of four to eight.")
@options.RUN
def run_suite(
    *,
    presets: tuple[str, ...],
    groups: tuple[str, ...],
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
    **run: Any,
) -> None:
    """Time all operations over the published geometries.

    Prints a table an operation, writes one record with all samples and draws a page of figures. Without --json and
    --plot they go to kda-cupy-suite-DATE.json and .png in the current folder. Ctrl-C keeps what was measured.
    """
    if json_path is None:
        json_path = Path(f"kda-cupy-suite-{datetime.now(UTC):%Y%m%dT%H%M%S}.json")
        options.refuse_unwritable(json_path)
        plot_path = plot_path or _picture_beside(json_path)
    with Run(**run, view=render.print_compact, json_path=json_path, page_path=plot_path) as measured:
        measured.measure(
            suite.suite_cases(
                presets or suite.PRESETS_OF_SUITE,
                groups or suite.GROUPS,
                quick=quick,
                small=measured.on_numpy,
            )
        )


def _picture_beside(path: Path) -> Path | None:
    try:
        figure.plot_formats()
    except ImportError as cause:
        click.echo(f"no figures: {cause}; pip install 'kda-cupy[plot]'", err=True)
        return None
    return path.with_suffix(".png")


def _speculation(
    operation: str,
    accept: int | None,
    *,
    presets: tuple[str, ...],
    heads: int | None,
    value_heads: int | None,
    gate: str | None,
    dtype: str,
    tokens: tuple[int, ...],
    modes: tuple[str, ...],
    norm: bool,
    plain_windows: bool,
    batches: tuple[int, ...] | None,
    **run: Any,
) -> None:
    if accept is not None and accept > min(tokens):
        raise click.UsageError(f"--accept {accept}: of {min(tokens)} tokens only {min(tokens)} can be kept")
    changes = {"dtype": dtype, "operation": operation, "norm": norm, "plain_windows": plain_windows}
    shapes = _shapes(presets, heads, value_heads, gate, changes)
    with Run(**run) as measured:
        shapes = measured.scaled(shapes, keep=heads is not None)
        batches = batches or (cases.SMALL_BATCHES[:2] if measured.on_numpy else cases.SPECULATION_BATCHES)
        measured.measure(
            [
                replace(shape, mode=mode, t=t, accept=kept(operation, t, accept), B=B)
                for shape in shapes
                for mode in dict.fromkeys(modes)
                for t in tokens
                for B in batches
            ]
        )


def kept(operation: str, t: int, accept: int | None = None) -> int:
    """Tokens that the commit keeps: half of them, if nobody says."""
    return 0 if operation == "verify" else accept or max(1, t // 2)


def _shapes(
    presets: tuple[str, ...],
    heads: int | None,
    value_heads: int | None,
    gate: str | None,
    changes: dict[str, Any],
    K: int | None = None,
    V: int | None = None,
) -> list[Case]:
    """The geometries asked for, with B = 1."""
    if gate is not None:
        changes = changes | {"lower_bound": cases.LOWER_BOUND if gate == "bounded" else None}
    if heads is None:
        if value_heads or K or V:
            raise click.UsageError("--value-heads, --head-dim and --value-head-dim go with --heads")
        shapes = [cases.PRESETS[preset] for preset in dict.fromkeys(presets) or (cases.DEFAULT_PRESET,)]
    elif presets:
        raise click.UsageError("give --preset or --heads, not both")
    else:
        shapes = [Case("kda", heads, value_heads or heads, K or 128, V or K or 128)]
    shapes = [replace(shape, **changes) for shape in shapes]
    if heads is not None and shapes[0].problem:
        raise click.UsageError(shapes[0].problem)
    return shapes


RECORD: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@bench.command(
    epilog=examples("kda-cupy bench show record.json", "kda-cupy bench show record.json --compact | less")
)
@click.argument("record", type=RECORD)
@click.option("--compact", is_flag=True, help="One table an operation instead of one a geometry.")
def show(record: Path, compact: bool) -> None:
    """Print the tables of a RECORD that --json wrote."""
    view = render.print_compact if compact else render.print_record
    view(read_record(record), sys.stdout)


@bench.command(
    name="compare",
    short_help="Show what changed between two records.",
    epilog=examples(
        "kda-cupy bench suite --json before.json   # then change something",
        "kda-cupy bench suite --json after.json",
        "kda-cupy bench compare before.json after.json --changed",
    ),
)
@click.argument("a", type=RECORD)
@click.argument("b", type=RECORD)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0),
    default=THRESHOLD_PERCENT,
    show_default=True,
    help="Percent; smaller changes are called the same.",
)
@click.option("--changed", is_flag=True, help="Show only what changed.")
def compare_records(a: Path, b: Path, threshold: float, changed: bool) -> None:
    """Show what changed from record A to record B; exit code 1 if a row became slower, or wrong.

    Times are compared over those of their yardsticks, which ran between the same replays. ± is where 99 % of the
    changes lie when samples are drawn again from those measured: a change smaller than that is noise.
    """
    old, new = read_record(a), read_record(b)
    against = differences(old, new)
    if against:
        raise Refused(f"these records were not taken in the same way: {'; '.join(against)}")
    changes = compare(old, new, threshold)
    render.print_changes(changes, sys.stdout, only_changed=changed)
    counts = Counter(change.verdict for change in changes)
    click.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) or "no rows")
    for name, path, record in (("A", a, old), ("B", b, new)):
        ended = "" if record.complete else ", did not come to its end"
        click.echo(f"{name}: {path}, {render.machine_name(record)}, {record.created[:16]}{ended}")
    if any(change.is_regression for change in changes):
        raise click.exceptions.Exit(1)


@click.command(
    name="report",
    epilog=examples(
        "kda-cupy report kda-cupy-suite-20261201T040000.json | less",
        "kda-cupy report record.json --html report.html",
        "kda-cupy report record.json --markdown report.md --plot report.png",
    ),
)
@click.argument("record", type=RECORD)
@click.option(
    "--markdown", type=options.FILE, callback=options.output, help="Write it there instead of to stdout."
)
@click.option(
    "--html", type=options.FILE, callback=options.output, help="Write one page with everything in it."
)
@click.option(
    "--plot",
    "plot_path",
    type=options.FILE,
    callback=options.plot_output,
    help="Draw the figures (.png, .svg, .pdf); the Markdown shows them.",
)
def report(record: Path, markdown: Path | None, html: Path | None, plot_path: Path | None) -> None:
    """Make a page of a RECORD: Markdown, or HTML that stands alone.

    Takes what kda-cupy bench ... --json and scripts/gpu_check.sh write. Without an option the Markdown goes to
    stdout. HTML has its figures inside, if matplotlib is there to draw them.
    """
    found = read_record(record)
    if plot_path is not None:
        figure.write_page(found, plot_path)
    if markdown is not None:
        picture = None if plot_path is None else os.path.relpath(plot_path, markdown.parent)
        markdown.write_text(pages.markdown(found, picture), encoding="utf-8")
    if html is not None:
        html.write_text(pages.html(found), encoding="utf-8")
    if markdown is html is None:
        click.echo(pages.markdown(found, None if plot_path is None else str(plot_path)), nl=False)


def read_record(path: Path) -> Record:
    """Refuse what is none."""
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as cause:
        raise Refused(f"{path}: {cause}") from None
