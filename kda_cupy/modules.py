# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, one per (configuration, device). The only place that makes a ``cupy.RawModule``.

A kernel comes from the folder of kernels compiled ahead if it is there (see ``cubins.py``), else from CuPy, which
compiles it or takes it from its own disk cache.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_cupy import cubins, sources
from kda_cupy.config import OPTIONS, KernelConfig
from kda_cupy.errors import error
from kda_cupy.gpu import compute_capability, cuda_version, mixed_wheels

DEFAULT_SHARED_BYTES = 48 << 10
"""A kernel that wants more has to ask, on each device."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel on one device."""

    function: Any
    """cupy.RawKernel: ``function(grid, block, args)`` launches on the current stream of the current device."""
    variant: str
    registers: int
    """Per thread."""
    local_bytes: int
    """Per thread; anything but 0 is a spill, and a bug of ours."""
    source_digest: str
    shared_bytes: int
    """Dynamic shared memory of a block."""
    compiled_ahead: str = ""
    """Name of the file it came from; empty if CuPy compiled it or had it in its cache."""


_kernels: dict[tuple[KernelConfig, int], Kernel] = {}
_lock = threading.Lock()


def get_kernel(config: KernelConfig, device: int) -> Kernel:
    """The kernel of a configuration on a device, loaded or compiled at the first call.

    Raises CompileError (KDA-COMPILER-NVRTC, -HEADERS, -ARCH, -OLD-GPU, -CACHE, -TMPDIR or -COMPILE) or NoGpuError
    (-DRIVER, -TWO-CUPY) with what to do.
    """
    key = (config, device)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _make(config, device)
    return kernel


def _make(config: KernelConfig, device: int) -> Kernel:
    import cupy

    with cupy.cuda.Device(device):
        ahead = cubins.find(config, f"sm_{compute_capability(device)}")
        if ahead is not None:
            try:
                return _open(cupy.RawModule(path=str(ahead)), config, ahead.name)
            except Exception as cause:  # of a newer CUDA than the driver's, perhaps: compiling is the way out
                cubins.warn_of(ahead, f"it cannot be loaded ({_first_error(str(cause))})")
        try:
            source, options = sources.flatten(config.source), OPTIONS + config.defines()
            return _open(cupy.RawModule(code=source, options=options), config)
        except Exception as cause:
            explained = explain(cause, config, lambda: _machine(device))
            if explained is cause:
                raise
            raise explained from cause


def _open(module: Any, config: KernelConfig, compiled_ahead: str = "") -> Kernel:
    """Take the kernel out of a module of the current device; CuPy loads or compiles it only now."""
    function = module.get_function(config.entry)
    registers, local_bytes = function.num_regs, function.local_size_bytes
    if config.shared_bytes > DEFAULT_SHARED_BYTES:
        function.max_dynamic_shared_size_bytes = config.shared_bytes
    digest = sources.digest(config.source)
    return Kernel(
        function, config.variant, registers, local_bytes, digest, config.shared_bytes, compiled_ahead
    )


def explain(cause: Exception, config: KernelConfig, machine: Callable[[], str]) -> Exception:
    """Turn what CuPy, NVRTC or the disk raised into a page of the catalogue; anything else stays as it is.

    machine: says for what and with what was compiled; asked only if the message needs it.
    """
    text, kind = str(cause), type(cause).__name__
    compiling = kind in ("CompileException", "NVRTCError", "CUDADriverError", "DynamicLibNotFoundError")
    if compiling and (mixed := mixed_wheels(f"`{_first_error(text)}`")):
        return mixed
    if _is_about_temporary_files(cause):
        return error("KDA-COMPILER-TMPDIR", got=text)
    if isinstance(cause, OSError):
        return error("KDA-COMPILER-CACHE", got=text)
    if kind == "DynamicLibNotFoundError":
        return error("KDA-COMPILER-NVRTC", got=f"`{_first_error(text)}`")
    if "CUDA headers" in text or "open source file" in text:
        first = _first_error(text).partition(". ")[0]  # CuPy's advice names another package
        return error("KDA-COMPILER-HEADERS", got=f"`{first}` on {machine()}")
    if old := _NEWER_GPU_NEEDED.search(text):
        needed = f"{old[1][:-1]}.{old[1][-1]}"
        return error("KDA-COMPILER-OLD-GPU", got=machine(), variant=config.variant, needed=needed)
    if any(sign in text for sign in _UNKNOWN_ARCHITECTURE):
        return error("KDA-COMPILER-ARCH", got=machine())
    if any(sign in text for sign in _DRIVER_TOO_OLD):
        return error("KDA-COMPILER-DRIVER", got=f"`{_first_error(text)}` on {machine()}")
    if compiling:
        first = _first_error(text)
        made = error("KDA-COMPILER-COMPILE", got=f"`{first}` on {machine()}", variant=config.variant)
        made.add_note(_listing(first, config.source))
        return made
    return cause


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


def _first_error(log: str) -> str:
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


def _machine(device: int) -> str:
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
