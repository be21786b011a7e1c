# SPDX-License-Identifier: Apache-2.0
"""Options that the benchmark's commands share, and what is refused before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kda_cupy.bench import cases, figure
from kda_cupy.bench.peers import PEERS, Peer, find
from kda_cupy.bench.timing import MIN_REPEATS
from kda_cupy.dtypes import C_NAMES
from kda_cupy.exit_codes import REFUSED
from kda_cupy.ops.mtp_checks import MAX_TOKENS

Function = TypeVar("Function", bound=Callable[..., Any])

STDOUT: Final = Path("-")
MAX_BATCH: Final = 1 << 20
FILE: Final = click.Path(dir_okay=False, path_type=Path)
FILE_OR_STDOUT: Final = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
POSITIVE: Final = click.IntRange(min=1)


class Refused(click.ClickException):
    """Ends the command with one sentence and exit code 2."""

    exit_code = REFUSED


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A list such as ``1,8,64``, each once, within limits."""

    name = "numbers"

    def __init__(self, largest: int, what: str) -> None:
        self._largest, self._what = largest, what

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse it; a tuple (a default) is left as it is."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(each) for each in value.split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list such as 1,8,64", param, ctx)
        if not all(0 < each <= self._largest for each in numbers):
            self.fail(f"{value!r}: {self._what.format(self._largest)}", param, ctx)
        return numbers


BATCHES: Final = Numbers(MAX_BATCH, "a batch has 1 to {:,} rows")
TOKENS: Final = Numbers(MAX_TOKENS, "a request has 1 to {} tokens")


def output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse before the measurement what would fail after it."""
    if path == STDOUT and param.name != "json_path":
        raise click.BadParameter("only --json goes to stdout", ctx, param)
    if path is not None and path != STDOUT:
        refuse_unwritable(path, ctx, param)
    return path


def refuse_unwritable(
    path: Path, ctx: click.Context | None = None, param: click.Parameter | None = None
) -> None:
    """Raise BadParameter for a file that could not be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}", ctx, param)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written to", ctx, param)


def plot_output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """The same for a picture."""
    if path is None:
        return None
    try:
        formats = figure.plot_formats()
    except ImportError as cause:
        raise Refused(f"--plot needs matplotlib ({cause}); pip install 'kda-cupy[plot]'") from None
    if path.suffix not in formats:
        raise click.BadParameter(
            f"{path.name}: wanted a name that ends in {', '.join(sorted(formats))}", ctx, param
        )
    return output(ctx, param, path)


def examples(*lines: str) -> str:
    """An epilog that shows commands as they are typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def together(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Several options as one decorator, shown in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def preset(names: list[str], default: str = cases.DEFAULT_PRESET) -> Callable[[Any], Any]:
    """``--preset``, of those names."""
    return click.option(
        "--preset",
        "presets",
        multiple=True,
        type=click.Choice(names),
        metavar="NAME",
        help=f"A model's heads, dims, operation and gate: {', '.join(names)}; may be repeated. "
        f"[default: {default}]",
    )


def peers_named(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[Peer, ...]:
    """Find them, and refuse before the measurement what is not there."""
    found = []
    for name in dict.fromkeys(names):
        try:
            peer = find(name)
        except LookupError as cause:
            raise click.BadParameter(str(cause.args[0]), ctx, param) from None
        except Exception as cause:  # of the file, whatever it does
            raise Refused(f"--peer {name}: {type(cause).__name__}: {cause}") from None
        try:
            peer.versions()
        except ImportError as cause:
            raise Refused(f"--peer {name}: {cause}") from None
        found.append(peer)
    return tuple(found)


PEER: Final = click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME",
    callback=peers_named,
    help=f"Measure another implementation too: {', '.join(PEERS)}, or a file.py with a PEER in it; may be "
    "repeated.",
)
HEADS: Final = together(
    click.option("--heads", type=POSITIVE, help="H, query and key heads; instead of a preset."),
    click.option("--value-heads", type=POSITIVE, help="HV, a multiple of H. [default: as --heads]"),
)
KIND: Final = together(
    click.option(
        "--gate", type=click.Choice(["softplus", "bounded"]), help="[default: as the preset, or softplus]"
    ),
    click.option(
        "--dtype",
        type=click.Choice(list(C_NAMES)),
        default="bfloat16",
        show_default=True,
        help="Of projections and output; the state is float32.",
    ),
)
RUN: Final = together(
    click.option(
        "--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto", show_default=True
    ),
    click.option("--device", type=click.IntRange(min=0), help="Number of the GPU. [default: 0]"),
    click.option(
        "--repeats",
        type=click.IntRange(min=MIN_REPEATS),
        default=21,
        show_default=True,
        help="Samples a row.",
    ),
    click.option(
        "--warm", is_flag=True, help="Use the same slots in every launch, so that L2 may hold them."
    ),
    click.option(
        "--json", "json_path", type=FILE_OR_STDOUT, callback=output, help="Write the record; - is stdout."
    ),
    click.option("--csv", "csv_path", type=FILE, callback=output, help="Write the rows."),
    click.option(
        "--plot", "plot_path", type=FILE, callback=plot_output, help="Draw times (.png, .svg, .pdf)."
    ),
)
SPECULATION: Final = together(
    preset([name for name, case in cases.PRESETS.items() if case.op == "kda"]),
    HEADS,
    KIND,
    click.option(
        "--tokens",
        metavar="T,T,...",
        type=TOKENS,
        default=(4, 8),
        help="Of a request, the bonus token among them. [default: 4,8]",
    ),
    click.option(
        "--mode",
        "modes",
        multiple=True,
        type=click.Choice(list(cases.MODES)),
        default=("rings",),
        show_default=True,
        help="What the verify leaves for the commit; may be repeated.",
    ),
    click.option("--norm", is_flag=True, help="With the fused output norm."),
    click.option(
        "--plain-windows",
        is_flag=True,
        help="Conv windows [rows, t, 3, channels], instead of windows that slide over raw inputs.",
    ),
    click.option(
        "--batch",
        "batches",
        metavar="N,N,...",
        type=BATCHES,
        help="Requests. [default: 1,8,64,256; NumPy: 1,2]",
    ),
)
