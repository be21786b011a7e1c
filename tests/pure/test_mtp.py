# SPDX-License-Identifier: Apache-2.0
"""The contract of verify and commit on the NumPy backend."""

from types import ModuleType

import numpy
import pytest
from mtp_contract import PERSISTENT, MtpContract
from mtp_problems import commit_operands, make_mtp
from problems import same_bits, to

import kda_cupy


class TestOnNumpy(MtpContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy


@pytest.mark.parametrize("mode", ["rings", "snapshots"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_in_host_memory(mode: str, dtype: str, torch: ModuleType) -> None:
    problem = make_mtp(N=2, mode=mode, dtype=dtype)
    ours, theirs = to(problem, numpy), to(problem, torch)
    theirs["x_q"].requires_grad_()
    want, got = kda_cupy.kda_decode_mtp(**ours), kda_cupy.kda_decode_mtp(**theirs)
    assert isinstance(got, torch.Tensor) and same_bits(got, want)
    kda_cupy.kda_commit(**commit_operands(ours, [2, 1]))
    settled = kda_cupy.kda_commit(**{**commit_operands(theirs, []), "accept_lens": torch.tensor([2, 1])})
    assert settled is theirs["recurrent_state"]
    for name in PERSISTENT:
        assert same_bits(theirs[name], ours[name])
