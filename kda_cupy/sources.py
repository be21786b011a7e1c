# SPDX-License-Identifier: Apache-2.0
"""Finds the CUDA sources and makes one text of each.

CuPy's disk cache is keyed by the source text and its own headers; it does not see what is behind an ``-I`` option.
So our headers are pasted into the text, each once, and ``#line`` keeps file and line in the compiler's messages.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

PACKAGED = Path(__file__).parent / "kernels"
"""Where a wheel has them."""
CHECKOUT = Path(__file__).parents[1] / "kernels"
"""Where a clone or an editable install has them."""

_OWN_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once$", re.MULTILINE)


def kernel_folder() -> Path:
    """The folder with the ``.cu`` files: inside the installed package, else beside it in a clone."""
    for folder in (PACKAGED, CHECKOUT):
        if (folder / "packed_decode.cu").is_file():
            return folder
    raise FileNotFoundError(
        f"the CUDA sources are neither in {PACKAGED} nor in {CHECKOUT}; reinstall kda-cupy (they belong to the wheel)"
    )


def read_kernel(name: str) -> str:
    """Text of ``kernels/<name>``."""
    return (kernel_folder() / name).read_text(encoding="utf-8")


def _paste(name: str, pasted: set[str]) -> str:
    if name in pasted:
        return ""
    pasted.add(name)
    text = _PRAGMA_ONCE.sub("", read_kernel(name))
    pieces, line, end = [f'#line 1 "{name}"\n'], 1, 0
    for include in _OWN_INCLUDE.finditer(text):
        pieces.append(text[end : include.start()])
        line += text.count("\n", end, include.start())
        pieces.append(f'{_paste(include[1], pasted)}\n#line {line + 1} "{name}"')
        end = include.end()
    return "".join(pieces) + text[end:]


@cache
def flatten(name: str) -> str:
    """Text of ``kernels/<name>`` with our own headers pasted in, each at its first mention."""
    return _paste(name, set())


def digest(name: str) -> str:
    """SHA-256 of the flattened text, 16 hex digits: names a kernel in benchmark records."""
    return hashlib.sha256(flatten(name).encode()).hexdigest()[:16]


def kernel_names() -> tuple[str, ...]:
    """Names of all ``.cu`` files, sorted."""
    return tuple(sorted(path.name for path in kernel_folder().glob("*.cu")))
