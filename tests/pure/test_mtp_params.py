# SPDX-License-Identifier: Apache-2.0
"""The parameter structs of verify, commit and decode step on the host are those of the kernels, field by field."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from kda_cupy import sources
from kda_cupy.ops import mtp_params, step_params

LETTERS = {"long long": "q", "int": "i", "float": "f"}
STRUCTS = {
    "mtp_verify.cu": (
        "MtpVerifyParams",
        (mtp_params.VerifyPointers, mtp_params.VerifyLayout),
        (mtp_params._VERIFY_POINTERS, mtp_params._VERIFY_LAYOUT),
    ),
    "commit.cu": (
        "CommitParams",
        (mtp_params.CommitPointers, mtp_params.CommitLayout),
        (mtp_params._COMMIT_POINTERS, mtp_params._COMMIT_LAYOUT),
    ),
    "decode_step.cu": (
        "DecodeStepParams",
        (step_params.StepPointers, step_params.StepLayout),
        (step_params._POINTERS, step_params._LAYOUT),
    ),
}


ALIASES = {
    "bias": "conv_bias",
    "window": "intermediate_conv",
    "windows": "intermediate_conv",
    "state": "recurrent_state",
    "snapshots": "intermediate_ssm",
    "slot_indices": "ssm_state_indices",
    "scratch_indices": "intermediate_state_indices",
}
"""Operands that a kernel may call by a shorter name."""


def names_of(field: str) -> list[str]:
    """``cs_slot_stride[3]`` is cs_q_slot_stride and its like for k and v."""
    name, array, _ = field.partition("[")
    name = ALIASES.get(name, name)
    if not array:
        return [name]
    parts = re.fullmatch(r"(conv_bias|intermediate_conv|[a-z]+)(\w*)", name)
    assert parts
    return [f"{parts[1]}_{letter}{parts[2]}" for letter in "qkv"]


@pytest.mark.parametrize("source", STRUCTS)
def test_structs_mirror_the_kernels(source: str) -> None:
    kernel_name, mirrors, layouts = STRUCTS[source]
    body = re.search(rf"struct {kernel_name} \{{(.*?)\}};", sources.read_kernel(source), re.DOTALL)
    assert body
    names, letters = [], ""
    for declaration in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        found = re.fullmatch(r"\s*(?:const )?(long long|\w+)\b(.*)", declaration, re.DOTALL)
        assert found, declaration
        for field in re.split(r",\s*", found[2]):
            expanded = names_of(field.strip(" *\n"))
            names += expanded
            letters += ("Q" if "*" in field else LETTERS[found[1]]) * len(expanded)
    assert names == [name for mirror in mirrors for name in mirror._fields]
    assert letters == "".join(map(letters_of, layouts))
    assert struct.calcsize(f"@{letters}0q") == sum(layout.size for layout in layouts)


def letters_of(layout: Any) -> str:
    return "".join(letter * int(count or 1) for count, letter in re.findall(r"(\d*)([Qqif])", layout.format))
