# SPDX-License-Identifier: Apache-2.0
"""NVRTC without CuPy: compiles for a GPU that need not be there, on a machine that needs no driver.

CuPy compiles for the GPU at hand and for no other. This is for ``kda-cupy warmup``: the same library, found the
same way (cuda.pathfinder, which CuPy and cuda-core both bring), given the same options.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

FROM_CUPY: Final = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy adds to our options; a kernel compiled ahead has the same bits as one that CuPy compiles."""
_NAMES: Final = ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")
"""Asked of the system where cuda.pathfinder is not installed."""


class NVRTCError(Exception):
    """What NVRTC said, in its own words."""


class DynamicLibNotFoundError(RuntimeError):
    """There is no NVRTC. Named as that of cuda.pathfinder."""


@cache
def _library() -> Any:
    try:
        from cuda import pathfinder
    except ImportError:
        for name in _NAMES:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
        raise DynamicLibNotFoundError(f"none of {', '.join(_NAMES)}") from None
    try:
        return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except (OSError, RuntimeError) as cause:  # its own DynamicLibNotFoundError is a RuntimeError
        raise DynamicLibNotFoundError(str(cause)) from cause


def _ask(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status:
        words = _library().nvrtcGetErrorString
        words.restype = ctypes.c_char_p
        raise NVRTCError(f"{words(status).decode()} ({function})")


def version() -> str:
    """Such as ``"13.5"``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _ask("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def architectures() -> list[str]:
    """What this NVRTC compiles for: ``["sm_75", "sm_80", ...]``."""
    count = ctypes.c_int()
    _ask("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    _ask("nvrtcGetSupportedArchs", numbers)
    return [f"sm_{number}" for number in numbers]


def compile_cubin(source: str, name: str, arch: str, options: Sequence[str]) -> bytes:
    """Machine code of a CUDA source for an architecture such as ``"sm_90"``.

    Raises NVRTCError with the compiler's log, DynamicLibNotFoundError without NVRTC.
    """
    program = ctypes.c_void_p()
    text, title = source.encode(), name.encode()
    _ask("nvrtcCreateProgram", ctypes.byref(program), text, title, 0, None, None)
    try:
        encoded = [option.encode() for option in (f"-arch={arch}", *options, *FROM_CUPY)]
        listed = (ctypes.c_char_p * len(encoded))(*encoded)
        try:
            _ask("nvrtcCompileProgram", program, len(encoded), listed)
        except NVRTCError as cause:
            log = _bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            raise NVRTCError(log or str(cause)) from None
        return _bytes(program, "CUBIN")
    finally:
        _ask("nvrtcDestroyProgram", ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _ask(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _ask(f"nvrtcGet{what}", program, buffer)
    return buffer.raw
