# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, one per (configuration, device). The only place that makes a ``cupy.RawModule``.

A kernel comes from the folder of kernels compiled ahead if it is there (see ``cubins.py``), else from CuPy, which
compiles it or takes it from its own disk cache.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kda_cupy import cubins, sources
from kda_cupy.compile_errors import explain, first_error, machine
from kda_cupy.config import OPTIONS, KernelConfig
from kda_cupy.gpu import compute_capability

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
                cubins.warn_of(ahead, f"it cannot be loaded ({first_error(str(cause))})")
        try:
            source, options = sources.flatten(config.source), OPTIONS + config.defines()
            return _open(cupy.RawModule(code=source, options=options), config)
        except Exception as cause:
            explained = explain(cause, config, lambda: machine(device))
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
