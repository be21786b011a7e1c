# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy``: the commands come together here. Each lives beside what it shows; only the short ones live here."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import kda_cupy
from kda_cupy import dtypes, trace
from kda_cupy.accuracy.command import check
from kda_cupy.bench.command import bench, report
from kda_cupy.bench.judge import CHAINED_BOUND, OUT_BOUNDS
from kda_cupy.bench.options import Refused, examples
from kda_cupy.completion import completion
from kda_cupy.doctor import doctor
from kda_cupy.error_pages import errors
from kda_cupy.errors import KdaError
from kda_cupy.exit_codes import INTERRUPTED, MEANING, WRONG
from kda_cupy.gpu import choose_backend
from kda_cupy.warmup import warmup


class _Commands(click.Group):
    """Shows an error of the catalogue as one line, with its code, and exit code 2; Ctrl-C is no error."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a pipe may know fewer letters than a message has
        try:
            return super().invoke(ctx)
        except KdaError as refusal:
            raise Refused(f"{refusal.code}: {refusal}") from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


def _help_footer() -> str:
    """Where to begin, and what the exit codes of all commands mean."""
    begin = examples(
        "kda-cupy doctor                  # what is here, and what is missing",
        "kda-cupy check                   # is every operation right on this machine?",
        "kda-cupy bench decode            # and fast?",
        "kda-cupy errors KDA-STATE-LAYOUT # what a refusal means",
    )
    codes = [
        textwrap.fill(f"{code:>5}  {words}", 78, subsequent_indent=" " * 7) for code, words in MEANING.items()
    ]
    return begin + "\n\n\b\nExit codes of every command:\n" + "\n".join(codes)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_help_footer(),
)
@click.version_option(kda_cupy.__version__, prog_name="kda-cupy")
def main() -> None:
    """Decode kernels for Kimi Delta Attention and Gated DeltaNet, on CuPy."""


@main.command(
    short_help="Compare with recorded tokens of another implementation.",
    epilog=examples(
        "kda-cupy replay tests/data/*.npz", "kda-cupy replay trace.npz --backend numpy --dtype bfloat16"
    ),
)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(list(dtypes.C_NAMES)), default="float32", show_default=True)
def replay(files: tuple[Path, ...], backend: str, dtype: str) -> None:
    """Run recorded tokens of another implementation and print how near ours comes.

    FILES were made by scripts/record_trace.py (tests/data/ has some). Exit code 1 if an error is above the contract's.
    """
    backend, why = choose_backend(backend)
    click.echo(f"backend: {backend} ({why})", err=True)
    place, fetch = _to_and_from(backend)
    failed = False
    click.echo(f"{'file':<34} {'made by':<17} {'output':>9} {'state':>9}")
    for file in files:
        try:
            recorded = trace.load_trace(file)
        except ValueError as cause:
            raise Refused(str(cause)) from None
        operation = getattr(kda_cupy, recorded.operation)
        report = trace.replay(
            recorded, operation, activations=dtypes.by_name(dtype), place=place, fetch=fetch
        )
        good = report.within(max(OUT_BOUNDS[dtype], CHAINED_BOUND), CHAINED_BOUND)
        failed |= not good
        origin = f"fla-core {recorded.metadata['origin'].get('fla-core', '?')}"
        errors_text = f"{report.output_error:9.1e} {report.state_error:9.1e}"
        click.echo(f"{file.name:<34} {origin:<17} {errors_text}{'' if good else '  too far'}")
    if failed:
        raise click.exceptions.Exit(WRONG)


def _to_and_from(backend: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How NumPy arrays get to a backend and back."""
    if backend == "numpy":
        return np.asarray, np.asarray
    import cupy

    return cupy.asarray, cupy.asnumpy


for command in (bench, check, completion, doctor, errors, report, warmup):
    main.add_command(command)
