# SPDX-License-Identifier: Apache-2.0
"""The one gate that decides whether there is a GPU to work with."""

from __future__ import annotations

from typing import Any

from kda_cupy.errors import error


def require_gpu() -> Any:
    """Return the ``cupy`` module, or raise NoGpuError with what is missing and what to install."""
    try:
        import cupy
    except ImportError as cause:
        raise error("KDA-COMPILER-NO-CUPY", got=str(cause)) from cause
    if not cupy.is_available():
        raise error("KDA-COMPILER-NO-GPU", got=f"CuPy {cupy.__version__}, which finds none")
    return cupy


def gpu_is_available() -> bool:
    """True if :func:`require_gpu` would not raise."""
    try:
        require_gpu()
    except Exception:  # a broken CuPy raises whatever its libraries raise; for this question it is simply no
        return False
    return True
