# SPDX-License-Identifier: Apache-2.0
"""The contract of the whole decode steps on the NumPy backend."""

from types import ModuleType

import numpy
import pytest
from problems import same_bits, to
from step_contract import OPERATIONS, StepContract
from step_problems import histories_of, make_step, state_of


class TestOnNumpy(StepContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_in_host_memory(op: str, dtype: str, torch: ModuleType) -> None:
    problem = make_step(op, B=2, dtype=dtype, onorm=True)
    ours, theirs = to(problem, numpy), to(problem, torch)
    theirs["x_q" if op == "kda" else "mixed_qkv"].requires_grad_()
    want, got = OPERATIONS[op](**ours), OPERATIONS[op](**theirs)
    assert isinstance(got, torch.Tensor) and same_bits(got, want)
    assert same_bits(state_of(theirs), state_of(ours))
    for mine, its in zip(histories_of(theirs), histories_of(ours), strict=True):
        assert same_bits(mine, its)
