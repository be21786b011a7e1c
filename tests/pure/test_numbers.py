# SPDX-License-Identifier: Apache-2.0
"""Numbers at the edges, on NumPy."""

from types import ModuleType

import numpy
import pytest
from numbers_contract import NumbersContract


class TestOnNumpy(NumbersContract):
    TOKENS = 200

    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy
