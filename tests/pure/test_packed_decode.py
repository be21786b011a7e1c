# SPDX-License-Identifier: Apache-2.0
"""The contract of the packed decodes on the NumPy backend."""

from types import ModuleType

import numpy
import pytest
from packed_decode_contract import PackedDecodeContract


class TestOnNumpy(PackedDecodeContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy
