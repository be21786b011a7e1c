# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy warmup``: compile a model's kernels before the first request, with or without a GPU.

The files go to a folder that the runtime looks into before it compiles anything (see ``cubins.py``), and that can be
copied into an image: a machine with that folder needs no compiler and no time for one.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from kda_cupy import cubins, nvrtc, sources
from kda_cupy.bench.cases import PRESETS, Case
from kda_cupy.bench.options import Refused, examples
from kda_cupy.compile_errors import explain
from kda_cupy.config import (
    OPTIONS,
    CommitConfig,
    ConvUpdateConfig,
    KernelConfig,
    MtpVerifyConfig,
    PackedDecodeConfig,
    StepConfig,
)
from kda_cupy.dtypes import C_NAMES
from kda_cupy.errors import KdaError, error
from kda_cupy.exit_codes import INTERRUPTED
from kda_cupy.gpu import compute_capability, require_gpu
from kda_cupy.ops import conv_params, mtp_params, packed_decode, step_params
from kda_cupy.ops.mtp_checks import DIM, TAPS

OLDEST_BFLOAT16 = 80
"""Compute capability, without its point."""


def variants(case: Case) -> list[KernelConfig]:
    """Every kernel that serving a model is likely to ask for; whatever else it asks for is compiled when it does.

    case: heads, dims, gate and activation dtype (B plays no part: a batch size changes no machine code). Raw gates come
    in the dtype of the activations or in float32, parameters in float32 or in the dtype of the activations, and
    projections aligned. A new kernel of this package gets its lines here.
    """
    kda, bounded, act = case.op == "kda", case.lower_bound is not None, case.dtype
    either = tuple(dict.fromkeys((act, "float32")))
    found: list[KernelConfig] = [
        PackedDecodeConfig(
            kda, bounded, case.K, case.V, act, a=gates, b=gates, A_log=parameters, dt_bias=parameters, vector=True,
            params_bytes=packed_decode._PARAMS_BYTES,
        )
        for gates in either
        for parameters in either
    ]  # fmt: skip
    if case.K == case.V == DIM:  # what has a convolution in it knows no other size
        found += [
            StepConfig(
                kda, bounded, case.HV // case.H, act, conv_weight=weights, g=act, beta=act, A_log="float32",
                dt_bias="float32", onorm_weight=norm, vector=True, params_bytes=step_params.PARAMS_BYTES,
            )
            for weights in either
            for norm in either
        ]  # fmt: skip
        found += [
            ConvUpdateConfig(TAPS, True, act, weights, conv_params.THREADS, conv_params.PARAMS_BYTES)
            for weights in either
        ]
    if kda and case.K == case.V == DIM:  # nor is there a verify for GDN
        found += [
            MtpVerifyConfig(
                bounded, act, conv_weight=weights, g=act, beta=act, A_log="float32", dt_bias="float32",
                onorm_weight=norm, vector=True, params_bytes=mtp_params.VERIFY_PARAMS_BYTES,
            )
            for weights in either
            for norm in either
        ]  # fmt: skip
        found += [CommitConfig(dtype, True, mtp_params.COMMIT_PARAMS_BYTES) for dtype in either]
    return found


def compile_ahead(config: KernelConfig, arch: str) -> bytes:
    """Machine code of a kernel for an architecture such as ``"sm_90"``; needs NVRTC, and neither GPU nor driver.

    Raises CompileError with the page that says what is missing.
    """
    options = (*OPTIONS, *config.defines())
    try:
        return nvrtc.compile_cubin(sources.flatten(config.source), config.source, arch, options)
    except Exception as cause:
        explained = explain(cause, config, lambda: f"{arch}, NVRTC {nvrtc.version()}")
        if explained is cause:
            raise
        raise explained from cause


@dataclass(slots=True)
class Report:
    """What a warm-up did."""

    compiled: int = 0
    found: int = 0
    """Kernels that were there already, whole."""
    impossible: int = 0
    """Kernels that an architecture is too old for."""
    written_bytes: int = 0
    seconds: float = 0.0


def fill(
    place: Path, wanted: list[tuple[KernelConfig, str]], *, anew: bool = False, show: bool = False
) -> Report:
    """Write the kernels that a folder lacks; every one with ``anew``. What is damaged is replaced.

    wanted: configurations and the architectures to compile them for. Raises CompileError, or OSError from the disk; but
    what an architecture is too old for is counted and left out.
    """
    report, start = Report(), time.perf_counter()
    for number, (config, arch) in enumerate(wanted, 1):
        old = list(place.glob(f"{cubins.stem(config, arch)}.*.cubin"))
        good = [path for path in old if not cubins.damage(path)]
        if good and not anew:
            report.found += 1
            continue
        with _progress(f"[{number}/{len(wanted)}] {arch} {config.variant}", visible=show):
            try:
                code = compile_ahead(config, arch)
            except KdaError as refusal:
                if refusal.code != "KDA-COMPILER-OLD-GPU":
                    raise
                report.impossible += 1
                continue
        path = cubins.store(config, arch, code, place)
        for other in old:
            if other != path:
                other.unlink(missing_ok=True)
        report.compiled += 1
        report.written_bytes += len(code)
    report.seconds = time.perf_counter() - start
    return report


@contextmanager
def _progress(what: str, *, visible: bool) -> Iterator[None]:
    """A line on stderr, gone afterwards."""
    if visible:
        click.echo(f"\r{what:<79.79}", err=True, nl=False)
    try:
        yield
    finally:
        if visible:
            click.echo(f"\r{'':79}\r", err=True, nl=False)


def _arches(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"sm_\d{2,3}", name):
            wanted = "sm_ and a compute capability without its point, such as sm_90"
            raise click.BadParameter(f"{name!r}: wanted {wanted}", ctx, param)
    return names


@click.command(
    short_help="Compile a model's kernels ahead.",
    epilog=examples(
        "kda-cupy warmup --preset kimi-k3-tp8 --arch sm_90 --into kernels",
        "kda-cupy warmup --preset qwen3-next --dtype float16  # for the GPU here",
    ),
)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    required=True,
    type=click.Choice(list(PRESETS)),
    metavar="NAME",
    help=f"The model: {', '.join(PRESETS)}; may be repeated.",
)
@click.option(
    "--arch",
    "arches",
    multiple=True,
    callback=_arches,
    metavar="sm_NN",
    help="GPU to compile for; may be repeated. [default: the GPUs of this machine]",
)
@click.option(
    "--dtype",
    type=click.Choice(list(C_NAMES)),
    default="bfloat16",
    show_default=True,
    help="Of the activations; the state is float32.",
)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder for the files. [default: ${cubins.VARIABLE}, or a folder inside the package]",
)
@click.option("--force", is_flag=True, help="Compile anew what is there already.")
def warmup(
    presets: tuple[str, ...], arches: tuple[str, ...], dtype: str, into: Path | None, force: bool
) -> None:
    """Compile the kernels of a model ahead, into a folder that can be shipped.

    Needs NVRTC, and a GPU only if no --arch is given. The runtime takes kernels from the folder that KDA_CUPY_CUBINS
    names, or from the one inside the package; what it does not find there is compiled at first use.
    """
    arches = tuple(dict.fromkeys(arches or _arches_here()))
    _check_arches(arches, dtype)
    place = (into or cubins.folder()).absolute()
    kernels = dict.fromkeys(
        config for preset in presets for config in variants(replace(PRESETS[preset], dtype=dtype))
    )
    wanted = [(config, arch) for arch in arches for config in kernels]
    try:
        report = fill(place, wanted, anew=force, show=sys.stderr.isatty())
    except OSError as cause:
        raise Refused(f"{cause}; --into names another folder") from None
    except KeyboardInterrupt:
        click.echo(
            f"interrupted: what was compiled by then is kept in {place}; the same command goes on from there",
            err=True,
        )
        raise click.exceptions.Exit(INTERRUPTED) from None
    click.echo(
        f"{report.compiled + report.found} kernels for {', '.join(arches)} in {place}\n"
        f"{report.compiled} compiled by NVRTC {nvrtc.version()} in {report.seconds:.1f} s "
        f"({report.written_bytes / 1e6:.2f} MB), {report.found} there already"
    )
    if report.impossible:
        click.echo(f"{report.impossible} more need a newer GPU")
    if place != cubins.folder().absolute():
        click.echo(f"to use them: export {cubins.VARIABLE}={place}")


def _arches_here() -> list[str]:
    try:
        count = require_gpu().cuda.runtime.getDeviceCount()
    except KdaError as cause:
        raise click.UsageError(
            f"there is no GPU here to compile for ({cause.code}); name one, such as --arch sm_90"
        ) from None
    return [f"sm_{compute_capability(device)}" for device in range(count)]


def _check_arches(arches: tuple[str, ...], dtype: str) -> None:
    """Before anything is compiled: known to NVRTC, and able to do the dtype."""
    try:
        known = nvrtc.architectures()
    except nvrtc.DynamicLibNotFoundError as cause:
        raise error("KDA-COMPILER-NVRTC", got=f"`{str(cause).splitlines()[0]}`") from None
    for arch in arches:
        if arch not in known:
            got = f"{arch}; NVRTC {nvrtc.version()} compiles for {', '.join(known)}"
            raise error("KDA-COMPILER-ARCH", got=got)
        if dtype == "bfloat16" and int(arch.removeprefix("sm_")) < OLDEST_BFLOAT16:
            raise click.UsageError(f"{arch} has no bfloat16; give --dtype float16 or float32")
