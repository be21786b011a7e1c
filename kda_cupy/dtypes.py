# SPDX-License-Identifier: Apache-2.0
"""The element types that operands may have, and their names in the kernels.

bfloat16 comes from ``ml_dtypes``: NumPy has none, and CuPy uses the same one.
Types are compared as ``np.dtype`` objects. ``dtype.kind`` is ``'V'`` for bfloat16, so tests on the kind are wrong.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

FLOAT32: Final = np.dtype(np.float32)
FLOAT16: Final = np.dtype(np.float16)
BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
INT32: Final = np.dtype(np.int32)
INT64: Final = np.dtype(np.int64)

#: Types of projections, gates and outputs; every one of them becomes float32 inside a kernel.
FLOATS: Final = (BFLOAT16, FLOAT16, FLOAT32)
#: Types of index vectors.
INDICES: Final = (INT32, INT64)

#: What kernels/memory.cuh calls them.
C_NAMES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}


def by_name(name: str) -> np.dtype[np.generic]:
    """Return the dtype called ``name`` (``"bfloat16"``, ``"float16"`` or ``"float32"``); KeyError for any other."""
    return {dtype.name: dtype for dtype in FLOATS}[name]
