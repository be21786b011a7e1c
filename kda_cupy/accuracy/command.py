# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from kda_cupy import environment
from kda_cupy.accuracy.exams import exams
from kda_cupy.accuracy.report import Report
from kda_cupy.bench.options import FILE_OR_STDOUT, STDOUT, examples, output
from kda_cupy.bench.workload import Memory
from kda_cupy.dtypes import C_NAMES
from kda_cupy.exit_codes import INTERRUPTED, RIGHT, WRONG
from kda_cupy.gpu import choose_backend, require_gpu

DEFAULT_DTYPES: Final = ("bfloat16", "float32")


@click.command(
    short_help="See whether every operation is right here.",
    epilog=examples(
        "kda-cupy check                  # on the GPU, or on NumPy without one",
        "kda-cupy check --backend numpy  # anywhere",
        "kda-cupy check --dtype float16 --device 1",
        "kda-cupy check --json - | jq '.findings[] | select(.passed | not)'",
    ),
)
@click.option("--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto", show_default=True)
@click.option("--device", type=click.IntRange(min=0), help="Number of the GPU. [default: 0]")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(list(C_NAMES)),
    help=f"Of the activations; may be repeated. [default: {', '.join(DEFAULT_DTYPES)}]",
)
@click.option(
    "--json", "json_path", type=FILE_OR_STDOUT, callback=output, help="Write the findings; - is stdout."
)
def check(backend: str, device: int | None, dtypes: tuple[str, ...], json_path: Path | None) -> None:
    """See whether every operation is right on this machine, in less than a minute.

    Each is compared with a float64 reference that shares no code with it: packed decode, decode step, convolution,
    verify and commit; KDA and GDN; both gates; gates at their extremes; chains of 16 tokens; rows of padding. Errors
    are norm(got - truth) / norm(truth) of output and state, beside what rounding explains; NaN is above every bound.

    Exit code 1 if an error is above its bound. Ctrl-C shows what was examined by then, and ends with 130.
    """
    backend, why = choose_backend("cuda" if backend == "auto" and device is not None else backend)
    if backend == "numpy" and device is not None:
        raise click.UsageError("--device means nothing on the NumPy backend")
    click.echo(f"backend: {backend} ({why})", err=True)
    memory, place = _memory(backend, device or 0)
    wanted = exams(tuple(dict.fromkeys(dtypes)) or DEFAULT_DTYPES)
    report = Report(backend, environment.collect([] if backend == "numpy" else [device or 0]), len(wanted))
    interrupted = False
    try:
        for number, exam in enumerate(wanted):
            _progress(f"[{number + 1}/{len(wanted)}] {exam.operation} {exam.words} {exam.case.dtype}")
            report.findings.append(exam.take(memory, place))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _progress("")
    _show(report, json_path)
    if interrupted:
        click.echo(f"interrupted: {len(report.findings)} of {len(wanted)} examined", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    raise click.exceptions.Exit(WRONG if report.failed else RIGHT)


def _show(report: Report, json_path: Path | None) -> None:
    """The table on stdout, unless the record has it for itself."""
    text = "\n".join([*report.lines(), report.summary()]) if report.findings else report.summary()
    click.echo(text, err=json_path == STDOUT)
    if json_path == STDOUT:
        click.echo(report.to_json(), nl=False)
    elif json_path is not None:
        json_path.write_text(report.to_json(), encoding="utf-8")
        click.echo(f"wrote {json_path}{'' if report.complete else ', with what was examined'}", err=True)


def _memory(backend: str, device: int) -> tuple[Memory, int | str]:
    """How operands get to a backend and back, and what a pool there is told."""
    if backend == "numpy":
        return Memory(np.asarray, np.array, np.zeros), "cpu"
    cupy = require_gpu()
    count = cupy.cuda.runtime.getDeviceCount()
    if device >= count:
        raise click.BadParameter(f"there is no GPU {device}; CuPy finds {count}", param_hint="--device")
    cupy.cuda.Device(device).use()
    return Memory(cupy.asarray, cupy.asnumpy, cupy.zeros), device


def _progress(what: Any) -> None:
    """A line on stderr that the next one replaces; only on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r{what:<79.79}\r", err=True, nl=False)
