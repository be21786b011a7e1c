# SPDX-License-Identifier: Apache-2.0
"""The one gate that decides whether there is a GPU to work with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from kda_cupy.errors import KdaError, error

CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
"""Distributions that all install the package ``cupy``, over one another."""


def installed_wheels(version: Callable[[str], str] = importlib.metadata.version) -> dict[str, str]:
    """CuPy distributions that are installed, and their versions."""
    found = {}
    for name in CUPY_WHEELS:
        try:
            found[name] = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def mixed_wheels(symptom: str) -> KdaError | None:
    """The error for whatever fails while more than one CuPy is installed: that has to be mended first."""
    names = installed_wheels()
    if len(names) < 2:
        return None
    listed = " and ".join(f"{name} {version}" for name, version in names.items())
    return error("KDA-COMPILER-TWO-CUPY", got=f"{listed}, and {symptom}", wheels=" ".join(names))


def require_gpu() -> Any:
    """Return the ``cupy`` module, or raise NoGpuError with what is missing and what to install."""
    try:
        import cupy
    except OSError as cause:  # CuPy makes its cache folder when it is imported
        raise error("KDA-COMPILER-CACHE", got=str(cause)) from cause
    except Exception as cause:  # ImportError, or whatever its libraries raise when they do not load
        reason = cause.__cause__ or cause  # CuPy wraps the error that matters in a page of advice
        first = next(iter(str(reason).strip().splitlines()), "no reason given")
        got = f"{type(reason).__name__}: {first}"
        raise mixed_wheels(got) or error("KDA-COMPILER-NO-CUPY", got=got) from cause
    if not cupy.is_available():
        raise mixed_wheels("no GPU that it finds") or _why_no_gpu(cupy)
    return cupy


def _why_no_gpu(cupy: Any) -> KdaError:
    """CuPy finds nothing: because of the driver, or because there is nothing."""
    driver, ours = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    if 0 < driver // 1000 < ours // 1000:  # 0: no driver at all. Versions of one major number fit each other.
        got = f"a driver for CUDA {cuda_version(driver)} and CuPy {cupy.__version__} for CUDA {cuda_version(ours)}"
        return error("KDA-COMPILER-DRIVER", got=got)
    return error("KDA-COMPILER-NO-GPU", got=f"CuPy {cupy.__version__}, which finds none")


def cuda_version(number: int) -> str:
    """Spell a version out as CUDA counts it: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def compute_capability(device: int) -> str:
    """Of a GPU that is there: ``"90"`` for 9.0."""
    import cupy

    return str(cupy.cuda.Device(device).compute_capability)


def choose_backend(wanted: str = "auto") -> tuple[str, str]:
    """Return ``"cuda"`` or ``"numpy"``, and why, in words for the user.

    For commands only: in the library the arrays choose. ``"cuda"`` without a GPU raises NoGpuError.
    """
    if wanted == "numpy":
        return "numpy", "as asked"
    try:
        cupy = require_gpu()
    except KdaError as cause:
        if wanted == "cuda":
            raise
        return "numpy", str(cause).splitlines()[0]
    return "cuda", "as asked" if wanted == "cuda" else f"CuPy {cupy.__version__} finds a GPU"
