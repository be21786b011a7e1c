# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench``: what to measure and on what, and where the record goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kda_cupy import environment
from kda_cupy.bench import cases, render
from kda_cupy.bench.cases import Case
from kda_cupy.bench.host import host
from kda_cupy.bench.record import Record, make_row
from kda_cupy.bench.timing import MIN_REPEATS, GpuTimer, HostTimer
from kda_cupy.dtypes import C_NAMES
from kda_cupy.errors import KdaError
from kda_cupy.gpu import choose_backend

STDOUT = Path("-")
MAX_BATCH = 1 << 20
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


class Refused(click.ClickException):
    """Ends the command with one sentence and exit code 2."""

    exit_code = 2


def _batches(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        batches = tuple(dict.fromkeys(int(each) for each in text.split(",")))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list such as 1,8,64", ctx, param) from None
    if not all(0 < B <= MAX_BATCH for B in batches):
        raise click.BadParameter(f"{text!r}: a batch has 1 to {MAX_BATCH:,} rows", ctx, param)
    return batches


def _output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse before the measurement what would fail after it."""
    if path == STDOUT and param.name != "json_path":
        raise click.BadParameter("only --json goes to stdout", ctx, param)
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}", ctx, param)
    return path


def _plot_output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is None:
        return None
    try:
        formats = render.plot_formats()
    except ImportError as cause:
        raise Refused(f"--plot needs matplotlib ({cause}); pip install 'kda-cupy[plot]'") from None
    if path.suffix not in formats:
        raise click.BadParameter(
            f"{path.name}: wanted a name that ends in {', '.join(sorted(formats))}", ctx, param
        )
    return _output(ctx, param, path)


FILE = click.Path(dir_okay=False, path_type=Path)
FILE_OR_STDOUT = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
POSITIVE = click.IntRange(min=1)


@click.group()
def bench() -> None:
    """Measure the operations on this machine."""


bench.add_command(host)


@bench.command()
@click.option(
    "--preset",
    "presets",
    multiple=True,
    type=click.Choice(list(cases.PRESETS)),
    help=f"Heads, dims, operation and gate of a model; may be repeated. [default: {cases.DEFAULT_PRESET}]",
)
@click.option("--heads", type=POSITIVE, help="H, query and key heads; instead of a preset.")
@click.option("--value-heads", type=POSITIVE, help="HV, a multiple of H. [default: as --heads]")
@click.option("--head-dim", type=POSITIVE, help="K, a multiple of 4. [default: 128]")
@click.option("--value-head-dim", type=POSITIVE, help="V. [default: as --head-dim]")
@click.option("--op", type=click.Choice(list(cases.OPERATIONS)), help="[default: as the preset, or kda]")
@click.option(
    "--gate", type=click.Choice(["softplus", "bounded"]), help="[default: as the preset, or softplus]"
)
@click.option(
    "--dtype",
    type=click.Choice(list(C_NAMES)),
    default="bfloat16",
    show_default=True,
    help="Of projections and output; the state is float32.",
)
@click.option(
    "--batch",
    "batches",
    metavar="B,B,...",
    callback=_batches,
    help="Rows. [default: 1,8,32,64,256; NumPy: 1,2,4,8]",
)
@click.option("--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto", show_default=True)
@click.option("--device", type=click.IntRange(min=0), help="Number of the GPU. [default: 0]")
@click.option(
    "--repeats", type=click.IntRange(min=MIN_REPEATS), default=21, show_default=True, help="Samples a row."
)
@click.option("--warm", is_flag=True, help="Use the same slots in every launch, so that L2 may hold them.")
@click.option(
    "--json", "json_path", type=FILE_OR_STDOUT, callback=_output, help="Write the record; - is stdout."
)
@click.option("--csv", "csv_path", type=FILE, callback=_output, help="Write the rows.")
@click.option(
    "--plot", "plot_path", type=FILE, callback=_plot_output, help="Draw time over batch (.png, .svg, .pdf)."
)
def decode(
    *,
    batches: tuple[int, ...] | None,
    backend: str,
    device: int | None,
    repeats: int,
    warm: bool,
    json_path: Path | None,
    csv_path: Path | None,
    plot_path: Path | None,
    **geometry: Any,
) -> None:
    """Time packed decode, one row a batch size, each compared with float64 first.

    Times are medians over replays of a CUDA graph whose launches walk over a pool of states, beside a kernel that does
    nothing but move the same state (RW). Exit code 1 if a row could not be timed.
    """
    shapes = _shapes(**geometry)
    try:
        timer = _timer(backend, device, warm, repeats)
    except KdaError as refusal:
        raise Refused(f"{refusal.code}: {refusal}") from None
    on_numpy = isinstance(timer, HostTimer)
    if on_numpy and geometry["heads"] is None:
        shapes = [shape.small() for shape in shapes]
    batches = batches or (cases.SMALL_BATCHES if on_numpy else cases.BATCHES)
    wanted = [replace(shape, B=B) for shape in shapes for B in batches]

    record = Record(environment.collect([] if on_numpy else [device or 0]), timer.protocol)
    try:
        _measure(timer, wanted, record)
    except KdaError as refusal:
        raise Refused(f"{refusal.code}: {refusal}") from None
    except KeyboardInterrupt:
        record.complete = False
        click.echo(f"interrupted: {len(record.rows)} of {len(wanted)} rows measured", err=True)
    render.print_record(record, sys.stderr if json_path == STDOUT else sys.stdout)
    try:
        _write(record, json_path, csv_path, plot_path)
    except OSError as cause:
        raise Refused(f"{cause}; the table above is all that is left of this run") from None
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)
    if any(row.status != "timed" for row in record.rows):
        raise click.exceptions.Exit(1)


def _write(record: Record, json_path: Path | None, csv_path: Path | None, plot_path: Path | None) -> None:
    if json_path == STDOUT:
        click.echo(record.to_json(), nl=False)
    elif json_path is not None:
        json_path.write_text(record.to_json(), encoding="utf-8")
    if csv_path is not None:
        with csv_path.open("w", newline="", encoding="utf-8") as file:
            render.write_csv(record.rows, file)
    if plot_path is not None:
        render.write_plot(record, plot_path)


@bench.command()
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(record: Path) -> None:
    """Print the table of a RECORD that ``--json`` wrote."""
    try:
        render.print_record(Record.from_json(record.read_text(encoding="utf-8")), sys.stdout)
    except ValueError as cause:
        raise Refused(f"{record}: {cause}") from None


def _shapes(
    presets: tuple[str, ...],
    heads: int | None,
    value_heads: int | None,
    head_dim: int | None,
    value_head_dim: int | None,
    op: str | None,
    gate: str | None,
    dtype: str,
) -> list[Case]:
    """The geometries asked for, with B = 1."""
    if heads is None:
        if value_heads or head_dim or value_head_dim:
            raise click.UsageError("--value-heads, --head-dim and --value-head-dim go with --heads")
        shapes = [cases.PRESETS[preset] for preset in presets or (cases.DEFAULT_PRESET,)]
    elif presets:
        raise click.UsageError("give --preset or --heads, not both")
    else:
        K = head_dim or 128
        shapes = [Case("kda", heads, value_heads or heads, K, value_head_dim or K)]
        if shapes[0].problem:
            raise click.UsageError(shapes[0].problem)
    changes: dict[str, Any] = {"dtype": dtype}
    if op is not None:
        changes["op"] = op
    if gate is not None:
        changes["lower_bound"] = cases.LOWER_BOUND if gate == "bounded" else None
    return [replace(shape, **changes) for shape in shapes]


def _timer(backend: str, device: int | None, warm: bool, repeats: int) -> GpuTimer | HostTimer:
    """Choose the backend; on stderr, say which it is and why. Asking for a certain GPU is asking for CUDA."""
    backend, why = choose_backend("cuda" if backend == "auto" and device is not None else backend)
    click.echo(f"backend: {'numpy, on small shapes' if backend == 'numpy' else 'cuda'} ({why})", err=True)
    if backend == "numpy":
        if device is not None or warm:
            raise click.UsageError("--device and --warm mean nothing on the NumPy backend")
        return HostTimer(repeats=repeats)
    try:
        return GpuTimer(device or 0, warm=warm, repeats=repeats)
    except ValueError as cause:
        raise click.BadParameter(str(cause), param_hint="--device") from None


def _measure(timer: GpuTimer | HostTimer, wanted: list[Case], record: Record) -> None:
    """Append a row a case; what does not fit in memory is a row as well."""
    for number, case in enumerate(wanted, 1):
        with _progress(f"[{number}/{len(wanted)}] {case.op} H={case.H} HV={case.HV} B={case.B}") as stage:
            try:
                row = timer.measure(case, stage)
            except MemoryError as cause:
                row = make_row(case, status="skipped", note=f"not enough memory: {cause}")
        record.rows.append(row)


@contextmanager
def _progress(what: str) -> Iterator[Any]:
    """A line on stderr, gone afterwards; only on a terminal. No thread draws it, for that would disturb host times."""
    visible = sys.stderr.isatty()

    def stage(doing: str) -> None:
        if visible:
            click.echo(f"\r{f'{what}: {doing}':<79.79}", err=True, nl=False)

    try:
        yield stage
    finally:
        if visible:
            click.echo(f"\r{'':79}\r", err=True, nl=False)
