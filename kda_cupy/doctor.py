# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy doctor``: whether CUDA kernels run on this machine, and if not, what to do about it.

Each check is a function of an :class:`~kda_cupy.environment.Environment`, so every verdict can be had on any machine.
One cause is one fault: what cannot be told because of another fault is a note.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kda_cupy.environment import Environment, Gpu, Unavailable, attempt, load_cupy, probe

OLDEST_CUPY, OLDEST_NUMPY = "14.2", "2.1.2"
OLDEST_CAPABILITY = "8.0"
"""Ampere: the kernels round with ``cvt.rn.bf16.f32``."""
OLDEST_CUDA = 12
"""CuPy 14 has no wheel for older drivers."""
NO_DEVICE = "(CUDA error 100)"
BFLOAT16_ONE = 0x3F80

Status = Literal["ok", "note", "fault"]
Verdict = tuple[Status, str, str]
_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Every fault has a cure: steps, one a line, most of them commands to type."""

    name: str
    status: Status
    detail: str
    cure: str = ""


def diagnose(
    environment: Environment | None = None, run_kernel: Callable[[int], None] | None = None
) -> list[Finding]:
    """Judge this machine, or the one described.

    ``run_kernel(device)`` compiles and runs a kernel, or raises. It is the proof of the rest, so it is called (once a
    GPU) only if there is no fault; the default is :func:`run_small_kernel`.
    """
    found = probe() if environment is None else environment
    findings = [Finding(name, *check(found)) for name, check in CHECKS.items()]
    healthy = all(finding.status != "fault" for finding in findings)
    return [*findings, Finding("kernel", *_kernel(found, healthy, run_kernel or run_small_kernel))]


def _gpu(found: Environment) -> Verdict:
    if isinstance(found.driver, Unavailable):
        return "note", "none can be seen without a driver", ""
    if isinstance(found.driver_gpus, Unavailable) or not found.driver_gpus:
        why = str(found.driver_gpus or "the driver shows none")
        chosen = found.variables.get("CUDA_VISIBLE_DEVICES")
        if chosen is not None and why.endswith(NO_DEVICE):
            return "fault", f"{why}; CUDA_VISIBLE_DEVICES is {chosen!r}", "unset CUDA_VISIBLE_DEVICES"
        return "fault", why, "run nvidia-smi; if that shows a GPU, restart the machine or container"
    if isinstance(found.gpus, list) and found.gpus:
        kinds = Counter(map(_describe, found.gpus))
        return "ok", "\n".join(f"{count} x {kind}" for kind, count in kinds.items()), ""
    if isinstance(found.cupy, Unavailable) or _driver_is_too_old(found):
        return "ok", f"{found.driver_gpus}, by the driver's count", ""
    return "fault", f"CuPy cannot use it: {found.gpus}", "restart the machine or container"


def _describe(gpu: Gpu) -> str:
    memory, l2 = gpu.memory_bytes / 2**30, gpu.l2_bytes / 2**20
    return f"{gpu.name}: {gpu.multiprocessors} SMs, {memory:.0f} GiB, L2 {l2:.0f} MiB"


def _driver(found: Environment) -> Verdict:
    if isinstance(found.driver, Unavailable):
        cure = "install the NVIDIA driver\nor, for a container: docker run --gpus all ..."
        return "fault", f"none: {found.driver}. NumPy arrays need neither GPU nor driver", cure
    release = "" if isinstance(found.driver_release, Unavailable) else f" (release {found.driver_release})"
    detail = f"supports CUDA {found.driver}{release}"
    if not _driver_is_too_old(found):
        return "ok", detail, ""
    cure = "update the NVIDIA driver (580 or newer for CUDA 13)"
    if _numbers(found.driver)[0] >= OLDEST_CUDA:
        # CuPy loads the newest NVRTC that it finds, be it one that another package brought along.
        only_nvrtc = _numbers(found.runtime)[0] <= _numbers(found.driver)[0]
        other = f"pip uninstall -y nvidia-cuda-nvrtc\n{_toolkit(found)}" if only_nvrtc else _reinstall(found)
        cure += f"\nor, to suit this driver:\n{other}"
    return "fault", f"{detail}, but CuPy and NVRTC need CUDA {_cuda_needed(found)}", cure


def _capability(found: Environment) -> Verdict:
    if isinstance(found.gpus, Unavailable) or not found.gpus:
        return "note", "not checked, for want of a GPU that CuPy can use", ""
    capable = _capable(found)
    if not capable:
        have = ", ".join(sorted({gpu.compute_capability for gpu in found.gpus}))
        return "fault", f"{have}; the kernels need {OLDEST_CAPABILITY}", "use an Ampere or newer GPU"
    have = ", ".join(sorted({gpu.compute_capability for gpu in capable}))
    known = found.nvrtc_architectures
    if not isinstance(known, Unavailable) and any(_architecture(gpu) not in known for gpu in capable):
        return "fault", f"{have}; NVRTC {found.nvrtc} compiles for {known}", _toolkit(found, "--upgrade ")
    if len(capable) < len(found.gpus):
        usable = ",".join(str(gpu.index) for gpu in capable)
        return "note", f"only GPU {usable} has {OLDEST_CAPABILITY} or more", ""
    return "ok", have, ""


def _cupy(found: Environment) -> Verdict:
    wheels = ", ".join(f"{name} {version}" for name, version in found.cupy_wheels.items())
    if len(found.cupy_wheels) > 1:
        return "fault", f"{wheels}: they overwrite each other", _reinstall(found)
    if isinstance(found.cupy, Unavailable):
        detail = f"cannot be imported: {found.cupy}"
        if isinstance(found.cache.writable, Unavailable) and wheels:
            return "note", detail, "mend the kernel cache first"  # CuPy makes the folder when it is imported
        return "fault", detail, _reinstall(found)
    if _numbers(found.cupy) < _numbers(OLDEST_CUPY):
        wheel = next(iter(found.cupy_wheels), "cupy")
        cure = f"pip install --upgrade '{wheel}>={OLDEST_CUPY}'"
        return "fault", f"{found.cupy}, but {OLDEST_CUPY} is needed", cure
    return "ok", wheels or found.cupy, ""


def _through_cupy(found: Environment, value: str, complaint: str) -> Verdict:
    if not isinstance(value, Unavailable):
        return "ok", value, ""
    if isinstance(found.cupy, Unavailable) or len(found.cupy_wheels) > 1:
        return "note", "not checked, for want of a sound CuPy", ""
    return "fault", f"{complaint}: {value}", _toolkit(found)


def _headers(found: Environment) -> Verdict:
    status, detail, cure = _through_cupy(found, found.headers, "CuPy compiles nothing without them")
    version, nvrtc = found.headers_version, found.nvrtc
    if status != "ok" or isinstance(version, Unavailable) or isinstance(nvrtc, Unavailable):
        return status, detail, cure
    if _numbers(version)[0] != _numbers(nvrtc)[0]:
        # Nothing of ours includes them; CuPy's own kernels do, and may not compile.
        return "note", f"{detail}, of CUDA {version} beside NVRTC {nvrtc}; the kernels here include none", ""
    return "ok", f"{detail}, of CUDA {version}", ""


def _numpy(found: Environment) -> Verdict:
    if isinstance(found.numpy, Unavailable) or _numbers(found.numpy) < _numbers(OLDEST_NUMPY):
        detail = f"{found.numpy}, but CuPy has bfloat16 only with {OLDEST_NUMPY} or newer"
        return "fault", detail, f"pip install --upgrade 'numpy>={OLDEST_NUMPY}'"
    return "ok", found.numpy, ""


def _ml_dtypes(found: Environment) -> Verdict:
    if isinstance(found.ml_dtypes, Unavailable):
        return "fault", f"{found.ml_dtypes}, so there is no bfloat16", "pip install ml_dtypes"
    return "ok", found.ml_dtypes, ""


def _cache(found: Environment) -> Verdict:
    cache = found.cache
    if isinstance(cache.writable, Unavailable):
        detail = f"{cache.folder} cannot be written ({cache.writable}); any other folder will do"
        return "fault", detail, "export CUPY_CACHE_DIR=/tmp/cupy-$USER"
    size = f"{cache.size_bytes / 1e6:.1f} MB" if isinstance(cache.size_bytes, int) else str(cache.size_bytes)
    return "ok", f"{cache.folder}, {size if cache.exists else 'to be made at first use'}", ""


def _temporary(found: Environment) -> Verdict:
    if isinstance(found.temporary_folder, Unavailable):
        return "fault", f"{found.temporary_folder}; CuPy compiles through it", "export TMPDIR=/var/tmp"
    return "ok", found.temporary_folder, ""


def _compiled_ahead(found: Environment) -> Verdict:
    ahead = found.compiled_ahead
    if not ahead.exists:
        if ahead.named:
            detail = f"KDA_CUPY_CUBINS names {ahead.folder}, where there is no folder"
            return "fault", detail, "unset KDA_CUPY_CUBINS\nor make it: kda-cupy warmup --preset MODEL"
        return "ok", "none; kernels are compiled at first use", ""
    if ahead.damaged:
        name, why = next(iter(ahead.damaged.items()))
        more = f", and {len(ahead.damaged) - 1} more" if len(ahead.damaged) > 1 else ""
        detail = f"{Path(ahead.folder) / name} is not used, for {why}{more}"
        return "fault", detail, "kda-cupy warmup --preset MODEL\nor remove the file"
    listed = ", ".join(f"{count} for {arch}" for arch, count in sorted(ahead.kernels.items()))
    stale = f", {ahead.outdated} of another version of the sources" if ahead.outdated else ""
    detail = f"{ahead.folder}: {listed or 'none'}{stale}"
    here = {f"sm_{_architecture(gpu)}" for gpu in _capable(found)}
    if here and not here & ahead.kernels.keys():
        return "note", f"{detail}; none for a GPU of this machine", ""
    return "ok", detail, ""


CHECKS: dict[str, Callable[[Environment], Verdict]] = {
    "GPU": _gpu,
    "driver": _driver,
    "capability": _capability,
    "CuPy": _cupy,
    "CUDA runtime": lambda found: _through_cupy(found, found.runtime, "none"),
    "NVRTC": lambda found: _through_cupy(found, found.nvrtc, "cannot be loaded"),
    "CUDA headers": _headers,
    "NumPy": _numpy,
    "ml_dtypes": _ml_dtypes,
    "kernel cache": _cache,
    "TMPDIR": _temporary,
    "precompiled": _compiled_ahead,
}


def _kernel(found: Environment, healthy: bool, run_kernel: Callable[[int], None]) -> Verdict:
    if not healthy:
        return "note", "not tried; mend the faults first", ""
    for gpu in _capable(found):
        failure = attempt(partial(run_kernel, gpu.index))
        if isinstance(failure, Unavailable):
            cure = "if that does not tell you, report `kda-cupy doctor --json`"
            return "fault", f"GPU {gpu.index}: {failure}", cure
    return "ok", "a small one compiles, runs and is right", ""


def run_small_kernel(device: int) -> None:
    """Compile and run a kernel on a GPU; raise whatever comes in the way."""
    cupy = load_cupy()
    source = """extern "C" __global__ void kda_cupy_doctor(unsigned short* out) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*out) : "f"(1.0f));
    }"""
    with cupy.cuda.Device(device):
        out = cupy.empty(1, "uint16")
        cupy.RawKernel(source, "kda_cupy_doctor", ("--std=c++17",))((1,), (1,), (out,))
        one = out.get()
    if one[0] != BFLOAT16_ONE:
        raise ArithmeticError(f"1.0 became bfloat16 {one[0]:#06x}, not {BFLOAT16_ONE:#06x}")


def _capable(found: Environment) -> list[Gpu]:
    gpus = [] if isinstance(found.gpus, Unavailable) else found.gpus
    return [gpu for gpu in gpus if _numbers(gpu.compute_capability) >= _numbers(OLDEST_CAPABILITY)]


def _architecture(gpu: Gpu) -> int:
    return int(gpu.compute_capability.replace(".", ""))


def _numbers(version: str) -> tuple[int, ...]:
    """``"14.2.0rc1"`` as (14, 2, 0); (0,) if there is no number."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (0,)


def _cuda_needed(found: Environment) -> int:
    """Major version: a driver loads compiled kernels of any minor version of its own."""
    versions = [version for version in (found.runtime, found.nvrtc) if not isinstance(version, Unavailable)]
    return max([OLDEST_CUDA, *(_numbers(version)[0] for version in versions)])


def _driver_is_too_old(found: Environment) -> bool:
    return not isinstance(found.driver, Unavailable) and _numbers(found.driver)[0] < _cuda_needed(found)


def _reinstall(found: Environment) -> str:
    """Install the one CuPy wheel that suits the driver."""
    suits = "cu12" if not isinstance(found.driver, Unavailable) and _numbers(found.driver) < (13,) else "cu13"
    remove = f"pip uninstall -y {' '.join(found.cupy_wheels)}\n" if found.cupy_wheels else ""
    return f"{remove}pip install 'kda-cupy[{suits}]'"


def _toolkit(found: Environment, option: str = "") -> str:
    """Install NVRTC and headers of CuPy's own CUDA version."""
    return f"pip install {option}'cuda-toolkit[cudart,nvrtc]=={_numbers(found.runtime)[0] or 13}.*'"


def render_doctor(findings: list[Finding]) -> Table:
    """A table for people: status, what was looked at, what was found, and under it the steps of the cure."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        style = _STYLES[finding.status]
        text = Text(finding.detail)
        for step in finding.cure.splitlines():
            text.append(f"\n-> {step}", style="bold")
        table.add_row(Text(finding.status, style), Text(finding.name), text)
    return table


@click.command(
    short_help="Find what is wrong with GPU, driver, CUDA or CuPy.",
    epilog="\b\nExamples:\n  kda-cupy doctor\n  kda-cupy doctor --json | jq '.findings[].status'",
)
@click.option("--json", "as_json", is_flag=True, help="Print findings and all that was asked, as JSON.")
def doctor(as_json: bool) -> None:
    """Check GPU, driver, CUDA, NVRTC and CuPy, and say how to mend what is wrong.

    Exit code 1 if there is a fault.
    """
    environment = probe()
    findings = diagnose(environment)
    faults = sum(finding.status == "fault" for finding in findings)
    if as_json:
        report = {"findings": [asdict(finding) for finding in findings], "environment": asdict(environment)}
        click.echo(json.dumps(report, indent=2))
    else:
        console = Console()
        console.print(render_doctor(findings))
        console.print(f"\nFaults: {faults}." if faults else "\nCUDA kernels run here.")
    raise click.exceptions.Exit(1 if faults else 0)
