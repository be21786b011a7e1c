# SPDX-License-Identifier: Apache-2.0
"""The one gate that decides whether there is a GPU to work with."""

from __future__ import annotations

from typing import Any

from kda_cupy.errors import KdaError, error


def require_gpu() -> Any:
    """Return the ``cupy`` module, or raise NoGpuError with what is missing and what to install."""
    try:
        import cupy
    except OSError as cause:  # CuPy makes its cache folder when it is imported
        raise error("KDA-COMPILER-CACHE", got=str(cause)) from cause
    except Exception as cause:  # ImportError, or whatever its libraries raise when they do not load
        reason = cause.__cause__ or cause  # CuPy wraps the error that matters in a page of advice
        first = next(iter(str(reason).strip().splitlines()), "no reason given")
        raise error("KDA-COMPILER-NO-CUPY", got=f"{type(reason).__name__}: {first}") from cause
    if not cupy.is_available():
        raise error("KDA-COMPILER-NO-GPU", got=f"CuPy {cupy.__version__}, which finds none")
    return cupy


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
