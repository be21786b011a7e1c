# SPDX-License-Identifier: Apache-2.0
"""The contract of the convolution on the NumPy backend, and its parameter struct."""

import re
import struct
from types import ModuleType

import numpy
import pytest
from conv_contract import ConvContract, make_conv, moved_to
from problems import same_bits

import kda_cupy
from kda_cupy import sources
from kda_cupy.ops import conv_params


class TestOnNumpy(ConvContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy


def test_torch_tensors_in_host_memory(torch: ModuleType) -> None:
    problem = make_conv(pieces=(64, 32), t=2)
    ours, theirs = moved_to(problem, numpy), moved_to(problem, torch)
    want, got = kda_cupy.causal_conv1d_update(**ours), kda_cupy.causal_conv1d_update(**theirs)
    assert isinstance(got, torch.Tensor) and same_bits(got, want)
    for mine, its in zip(theirs["conv_state"], ours["conv_state"], strict=True):
        assert same_bits(mine, its)


def test_the_struct_mirrors_the_kernel() -> None:
    """Names, order and types; an array of three here is a tuple there."""
    text = sources.read_kernel("causal_conv1d_update.cu")
    body = re.search(r"struct ConvUpdateParams \{(.*?)\};", text, re.DOTALL)
    assert body
    names, letters = [], ""
    for declaration in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        kind, fields = re.fullmatch(r"\s*(?:const )?(long long|\w+)\b(.*)", declaration, re.DOTALL).groups()
        for each in re.split(r",\s*", fields):
            name, array, _ = each.strip(" *\n").partition("[")
            names.append((name, bool(array)))
            letters += ("Q" if "*" in each else {"long long": "q", "int": "i"}[kind]) * (3 if array else 1)
    mirrors = (conv_params.ConvPointers, conv_params.ConvLayout)
    assert names == [
        (name, "tuple" in str(kind)) for mirror in mirrors for name, kind in mirror.__annotations__.items()
    ]
    layouts = (conv_params._POINTERS, conv_params._LAYOUT)
    assert letters == "".join(
        letter * int(count or 1)
        for layout in layouts
        for count, letter in re.findall(r"(\d*)([Qqi])", layout.format)
    )
    assert struct.calcsize(f"@{letters}0q") == conv_params.PARAMS_BYTES
