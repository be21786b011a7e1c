# SPDX-License-Identifier: Apache-2.0
"""Numbers at the edges, on CUDA."""

from types import ModuleType

import pytest
from numbers_contract import NumbersContract

cupy = pytest.importorskip("cupy")


class TestOnCuda(NumbersContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return cupy
