# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, one per (configuration, device). The only place that makes a ``cupy.RawModule``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kda_cupy import sources
from kda_cupy.config import KernelConfig
from kda_cupy.errors import error

DEFAULT_SHARED_BYTES = 48 << 10
"""A kernel that wants more has to ask, on each device."""
OPTIONS = ("--std=c++17",)
"""Beside the configuration's macros. CuPy adds ``-arch`` for the device at hand and ``-ftz=true``."""


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


_kernels: dict[tuple[KernelConfig, int], Kernel] = {}
_lock = threading.Lock()


def get_kernel(config: KernelConfig, device: int) -> Kernel:
    """The kernel of a configuration on a device, compiled at the first call (or taken from CuPy's disk cache).

    Raises CompileError (KDA-COMPILER-NVRTC, -HEADERS, -ARCH, -CACHE or -COMPILE) with what to do.
    """
    key = (config, device)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _compile(config, device)
    return kernel


def _compile(config: KernelConfig, device: int) -> Kernel:
    import cupy

    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=sources.flatten(config.source), options=OPTIONS + config.defines())
        try:
            function = module.get_function(config.entry)
            registers, local_bytes = function.num_regs, function.local_size_bytes
            if config.shared_bytes > DEFAULT_SHARED_BYTES:
                function.max_dynamic_shared_size_bytes = config.shared_bytes
        except Exception as cause:
            explained = _explain(cause, config, device)
            if explained is cause:
                raise
            raise explained from cause
    digest = sources.digest(config.source)
    return Kernel(function, config.variant, registers, local_bytes, digest, config.shared_bytes)


def _explain(cause: Exception, config: KernelConfig, device: int) -> Exception:
    """Turn what CuPy, NVRTC or the disk raised into a page of the catalogue; anything else stays as it is."""
    text, kind = str(cause), type(cause).__name__
    if isinstance(cause, OSError):
        return error("KDA-COMPILER-CACHE", got=text)
    if kind == "DynamicLibNotFoundError":
        return error("KDA-COMPILER-NVRTC", got=f"`{_first_error(text)}`")
    if "CUDA headers" in text or "cannot open source file" in text:
        first = _first_error(text).partition(". ")[0]  # CuPy's advice names another package
        return error("KDA-COMPILER-HEADERS", got=f"`{first}` on {_machine(device)}")
    if "--gpu-architecture" in text or "NVRTC_ERROR_INVALID_OPTION" in text:
        return error("KDA-COMPILER-ARCH", got=_machine(device))
    if kind in ("CompileException", "NVRTCError", "CUDADriverError"):
        first = _first_error(text)
        made = error("KDA-COMPILER-COMPILE", got=f"`{first}` on {_machine(device)}", variant=config.variant)
        made.add_note(_listing(first, config.source))
        return made
    return cause


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

    capability = cupy.cuda.Device(device).compute_capability
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    driver = cupy.cuda.runtime.driverGetVersion()
    return (
        f"compute capability {capability[:-1]}.{capability[-1]}, NVRTC {nvrtc}, "
        f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    )
