# SPDX-License-Identifier: Apache-2.0
"""What went wrong while a kernel was compiled or loaded, told by pages of the catalogue.

CuPy, NVRTC, the driver and the disk each complain in words and types of their own, and none of them names the cure.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from kda_cupy import sources
from kda_cupy.config import KernelConfig
from kda_cupy.errors import error
from kda_cupy.gpu import compute_capability, cuda_version, mixed_wheels

_NEWER_GPU_NEEDED = re.compile(r"requires \.target sm_(\d+) or higher")
_UNKNOWN_ARCHITECTURE = (
    "--gpu-architecture",
    "NVRTC_ERROR_INVALID_OPTION",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",  # CuPy asks an old NVRTC for the newest GPU that it knows
)
_DRIVER_TOO_OLD = (
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "CUDA_ERROR_INVALID_SOURCE",
    "cudaErrorInsufficientDriver",
)
"""What a driver says to the machine code of a newer CUDA."""


def explain(cause: Exception, config: KernelConfig, on_what: Callable[[], str]) -> Exception:
    """Turn what CuPy, NVRTC or the disk raised into a page of the catalogue; anything else stays as it is.

    on_what: says for what and with what was compiled; asked only if the message needs it.
    """
    text, kind = str(cause), type(cause).__name__
    compiling = kind in ("CompileException", "NVRTCError", "CUDADriverError", "DynamicLibNotFoundError")
    if compiling and (mixed := mixed_wheels(f"`{first_error(text)}`")):
        return mixed
    if _is_about_temporary_files(cause):
        return error("KDA-COMPILER-TMPDIR", got=text)
    if isinstance(cause, OSError):
        return error("KDA-COMPILER-CACHE", got=text)
    if kind == "DynamicLibNotFoundError":
        return error("KDA-COMPILER-NVRTC", got=f"`{first_error(text)}`")
    if "CUDA headers" in text or "open source file" in text:
        first = first_error(text).partition(". ")[0]  # CuPy's advice names another package
        return error("KDA-COMPILER-HEADERS", got=f"`{first}` on {on_what()}")
    if old := _NEWER_GPU_NEEDED.search(text):
        needed = f"{old[1][:-1]}.{old[1][-1]}"
        return error("KDA-COMPILER-OLD-GPU", got=on_what(), variant=config.variant, needed=needed)
    if any(sign in text for sign in _UNKNOWN_ARCHITECTURE):
        return error("KDA-COMPILER-ARCH", got=on_what())
    if any(sign in text for sign in _DRIVER_TOO_OLD):
        return error("KDA-COMPILER-DRIVER", got=f"`{first_error(text)}` on {on_what()}")
    if compiling:
        first = first_error(text)
        made = error("KDA-COMPILER-COMPILE", got=f"`{first}` on {on_what()}", variant=config.variant)
        made.add_note(_listing(first, config.source))
        return made
    return cause


def _is_about_temporary_files(cause: Exception) -> bool:
    """CuPy writes a kernel's source to a temporary file, and hands its name, as UTF-8, to the compiler."""
    if isinstance(cause, UnicodeEncodeError):
        return True
    if not isinstance(cause, OSError):
        return False
    if "temporary directory" in str(cause):  # tempfile found no folder that it can write to
        return True
    parents = Path(str(cause.filename or "")).parents
    cache = os.environ.get("CUPY_CACHE_DIR")
    in_cache = bool(cache) and Path(str(cache)) in parents
    return not in_cache and tempfile.tempdir is not None and Path(str(tempfile.tempdir)) in parents[:2]


def first_error(log: str) -> str:
    """The first line that speaks of an error, else the first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


def _listing(first_error: str, source: str, around: int = 3) -> str:
    """The lines of the kernel file around ``name.cu(LINE): error``, numbered."""
    name, _, rest = first_error.partition("(")
    number = rest.partition(")")[0]
    if not number.isdigit() or not (sources.kernel_folder() / name).is_file():  # a header of CUDA's own
        return f"compiling kernels/{source}"
    lines = sources.read_kernel(name).splitlines()
    start = max(int(number) - around, 1)
    shown = lines[start - 1 : int(number) + around]
    return "\n".join(
        f"{'>' if i == int(number) else ' '} {i:4d}  {line}" for i, line in enumerate(shown, start)
    )


def machine(device: int) -> str:
    """Capability, NVRTC and driver: what decides whether a kernel can be compiled."""
    import cupy

    capability = compute_capability(device)
    try:
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception:  # the message is about something else, and must not be lost to this
        nvrtc = "that cannot be loaded"
    driver = cupy.cuda.runtime.driverGetVersion()
    return (
        f"compute capability {capability[:-1]}.{capability[-1]}, NVRTC {nvrtc}, "
        f"driver for CUDA {cuda_version(driver)}"
    )
