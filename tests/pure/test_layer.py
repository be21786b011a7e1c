# SPDX-License-Identifier: Apache-2.0
"""The contract of the layers on the NumPy backend."""

from types import ModuleType

import numpy
import pytest
from layer_contract import LayerContract


class TestOnNumpy(LayerContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy
