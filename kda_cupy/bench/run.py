# SPDX-License-Identifier: Apache-2.0
"""One run of the benchmark: from the choice of the backend to the files, whatever ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from kda_cupy import environment, sources
from kda_cupy.bench import figure, render
from kda_cupy.bench.cases import Case
from kda_cupy.bench.options import STDOUT, Refused
from kda_cupy.bench.peers import Peer
from kda_cupy.bench.record import Record, make_row
from kda_cupy.bench.timing import GpuTimer, HostTimer
from kda_cupy.errors import KdaError
from kda_cupy.exit_codes import INTERRUPTED, WRONG
from kda_cupy.gpu import choose_backend


@dataclass(frozen=True)
class Outputs:
    """Where a record goes besides the table."""

    json_path: Path | None = None
    csv_path: Path | None = None
    plot_path: Path | None = None

    page_path: Path | None = None

    @property
    def table(self) -> IO[str]:
        """The stream for the table: stdout, unless the record has it for itself."""
        return sys.stderr if self.json_path == STDOUT else sys.stdout

    def write(self, record: Record) -> None:
        """Write what was asked for, the record first, and say so. Raises OSError."""
        if self.json_path == STDOUT:
            click.echo(record.to_json(), nl=False)
        elif self.json_path is not None:
            self.json_path.write_text(record.to_json(), encoding="utf-8")
            _say_written(self.json_path, record)
        if self.csv_path is not None:
            with self.csv_path.open("w", newline="", encoding="utf-8") as file:
                render.write_csv(record.rows, file)
            _say_written(self.csv_path, record)
        for path, draw in ((self.plot_path, figure.write_plot), (self.page_path, figure.write_page)):
            if path is not None:
                draw(record, path)
                _say_written(path, record)


def _say_written(path: Path, record: Record) -> None:
    partly = "" if record.complete else ", with what was measured"
    click.echo(f"wrote {path}{partly}", err=True)


class Run:
    """One measurement from the choice of the backend to the files; Ctrl-C inside it ends it early.

    As a context manager, it prints and writes what there is when it is left, also when an error ends it, and turns
    refusals into one line.
    """

    def __init__(
        self,
        *,
        backend: str,
        device: int | None,
        repeats: int,
        warm: bool,
        peers: Sequence[Peer] = (),
        view: Callable[[Record, IO[str]], None] = render.print_record,
        **outputs: Path | None,
    ) -> None:
        self._outputs, self._view = Outputs(**outputs), view
        try:
            self._timer = _timer(backend, device, warm, repeats, peers)
        except KdaError as refusal:
            raise Refused(f"{refusal.code}: {refusal}") from None
        self.on_numpy = isinstance(self._timer, HostTimer)
        self._wanted = self._done = 0
        self._record = Record(
            environment.collect([] if self.on_numpy else [device or 0]) | _told_of(peers),
            self._timer.protocol,
            kernel_digests={name: sources.digest(name) for name in sources.kernel_names()},
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
        if isinstance(cause, (click.ClickException, click.exceptions.Exit)):
            return  # nothing has been measured yet
        record, interrupted = self._record, isinstance(cause, KeyboardInterrupt)
        if cause is not None:
            record.complete = False
            why = "interrupted" if interrupted else "stopped by an error"
            click.echo(f"{why}: {self._done} of {self._wanted} cases measured", err=True)
        if record.rows or cause is None or interrupted:
            self._show_and_write()
        if isinstance(cause, KdaError):
            raise Refused(f"{cause.code}: {cause}") from None
        if interrupted:
            raise click.exceptions.Exit(INTERRUPTED)
        if cause is None and any(row.status != "timed" for row in record.rows):
            raise click.exceptions.Exit(WRONG)

    def _show_and_write(self) -> None:
        self._view(self._record, self._outputs.table)
        try:
            self._outputs.write(self._record)
        except OSError as failed:
            raise Refused(f"{failed}; the table above is all that is left of this run") from None


def _timer(
    backend: str, device: int | None, warm: bool, repeats: int, peers: Sequence[Peer]
) -> GpuTimer | HostTimer:
    """Choose the backend; on stderr, say which it is and why. Asking for a certain GPU is asking for CUDA."""
    backend, why = choose_backend("cuda" if backend == "auto" and device is not None else backend)
    click.echo(f"backend: {'numpy, on small shapes' if backend == 'numpy' else 'cuda'} ({why})", err=True)
    if backend == "numpy":
        if device is not None or warm:
            raise click.UsageError("--device and --warm mean nothing on the NumPy backend")
        strangers = [peer.name for peer in peers if not peer.on_cpu]
        if strangers:
            raise Refused(f"--peer {strangers[0]} needs a GPU, and this is the NumPy backend")
        return HostTimer(repeats=repeats, peers=peers)
    try:
        return GpuTimer(device or 0, warm=warm, repeats=repeats, peers=peers)
    except ValueError as cause:
        raise click.BadParameter(str(cause), param_hint="--device") from None


def _told_of(peers: Sequence[Peer]) -> dict[str, Any]:
    """Versions and remarks, for the record."""
    if not peers:
        return {}
    versions = {peer.name: ", ".join(" ".join(each) for each in peer.versions().items()) for peer in peers}
    return {
        "peers": {
            peer.name: versions[peer.name] + (f"; {peer.remark}" if peer.remark else "") for peer in peers
        }
    }


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
