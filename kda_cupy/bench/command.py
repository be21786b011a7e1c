# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench``: what to measure and on what, and where the record goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from kda_cupy import environment
from kda_cupy.bench import cases, figure, options, render
from kda_cupy.bench.cases import Case
from kda_cupy.bench.options import STDOUT, Refused
from kda_cupy.bench.record import Record, make_row
from kda_cupy.bench.timing import GpuTimer, HostTimer
from kda_cupy.errors import KdaError
from kda_cupy.gpu import choose_backend

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C ended."""


@click.group()
def bench() -> None:
    """Measure the operations on this machine.

    Each row is compared with float64 before it is timed. Times are medians over replays of a CUDA graph whose launches
    walk over a pool of states, so that L2 is cold, beside a kernel that does nothing but move the same state: RW reads
    and writes it, R reads it, SNAP reads it and stores t copies. Exit codes: 0; 1 if a row could not be timed; 2 for
    what could not be run; 130 after Ctrl-C, which keeps the rows measured so far.
    """


@bench.command()
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


@bench.command()
@options.SPECULATION
@options.RUN
def verify(**arguments: Any) -> None:
    r"""Time the verify of draft tokens, kda_decode_mtp.

    \b
    kda-cupy bench verify --preset kimi-k3-tp8 --tokens 1,2,4,8,16 --plot t.png
    kda-cupy bench verify --mode rings --mode snapshots --norm --batch 64
    """
    _speculation("verify", None, **arguments)


@bench.command(name="round")
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
    batches: tuple[int, ...] | None,
    **run: Any,
) -> None:
    if accept is not None and accept > min(tokens):
        raise click.UsageError(f"--accept {accept}: of {min(tokens)} tokens only {min(tokens)} can be kept")
    changes = {"dtype": dtype, "operation": operation, "norm": norm}
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


@bench.command()
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(record: Path) -> None:
    """Print the tables of a RECORD that ``--json`` wrote."""
    render.print_record(read_record(record), sys.stdout)


def read_record(path: Path) -> Record:
    """Refuse what is none."""
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as cause:
        raise Refused(f"{path}: {cause}") from None


@dataclass(frozen=True)
class Outputs:
    """Where a record goes besides the table."""

    json_path: Path | None = None
    csv_path: Path | None = None
    plot_path: Path | None = None

    @property
    def table(self) -> Any:
        """The stream for the table: stdout, unless the record has it for itself."""
        return sys.stderr if self.json_path == STDOUT else sys.stdout

    def write(self, record: Record) -> None:
        """Write what was asked for. Raises OSError."""
        if self.json_path == STDOUT:
            click.echo(record.to_json(), nl=False)
        elif self.json_path is not None:
            self.json_path.write_text(record.to_json(), encoding="utf-8")
        if self.csv_path is not None:
            with self.csv_path.open("w", newline="", encoding="utf-8") as file:
                render.write_csv(record.rows, file)
        if self.plot_path is not None:
            figure.write_plot(record, self.plot_path)


class Run:
    """One measurement from the choice of the backend to the files; Ctrl-C inside it ends it early.

    As a context manager, it turns refusals into one line, and prints and writes what there is when it is left.
    """

    def __init__(
        self, *, backend: str, device: int | None, repeats: int, warm: bool, **outputs: Path | None
    ) -> None:
        self._outputs = Outputs(**outputs)
        try:
            self._timer = _timer(backend, device, warm, repeats)
        except KdaError as refusal:
            raise Refused(f"{refusal.code}: {refusal}") from None
        self.on_numpy = isinstance(self._timer, HostTimer)
        self._wanted = self._done = 0
        self._record = Record(
            environment.collect([] if self.on_numpy else [device or 0]), self._timer.protocol
        )

    def scaled(self, shapes: list[Case], *, keep: bool) -> list[Case]:
        """Few heads for NumPy, unless they were asked for."""
        return [shape.small() for shape in shapes] if self.on_numpy and not keep else shapes

    def measure(self, wanted: list[Case]) -> None:
        """Append the rows of each case; what does not fit in memory is a row as well."""
        self._wanted = len(wanted)
        for self._done, case in enumerate(wanted):
            with _progress(f"[{self._done + 1}/{self._wanted}] {case}") as stage:
                try:
                    rows = self._timer.measure(case, stage)
                except MemoryError as cause:
                    rows = [make_row(case, status="skipped", note=f"not enough memory: {cause}")]
            self._record.rows += rows

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if isinstance(cause, KdaError):
            raise Refused(f"{cause.code}: {cause}") from None
        if isinstance(cause, KeyboardInterrupt):
            self._record.complete = False
            click.echo(f"interrupted: {self._done} of {self._wanted} cases measured", err=True)
        elif cause is not None:
            return
        record = self._record
        render.print_record(record, self._outputs.table)
        try:
            self._outputs.write(record)
        except OSError as failed:
            raise Refused(f"{failed}; the table above is all that is left of this run") from None
        if not record.complete:
            raise click.exceptions.Exit(INTERRUPTED)
        if any(row.status != "timed" for row in record.rows):
            raise click.exceptions.Exit(1)


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
