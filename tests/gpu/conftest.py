# SPDX-License-Identifier: Apache-2.0
"""Under compute-sanitizer every array is an allocation of its own: in CuPy's pool a stray access would go unseen."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _without_memory_pool() -> Iterator[None]:
    if os.environ.get("KDA_CUPY_TEST_WITHOUT_POOL") == "1":
        import cupy

        cupy.cuda.set_allocator(None)
    yield
