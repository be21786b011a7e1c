# SPDX-License-Identifier: Apache-2.0
"""The examples that use a GPU, as they are."""

import re
from types import ModuleType

from run_example import run


def test_a_step_under_a_graph() -> None:
    printed = run("decode_in_a_graph.py")
    assert "decode_step[kda,bounded,HV/H=1,bfloat16]" in printed
    assert "4 of 8 rows live, (8, 12, 128) a step" in printed


def test_speculation_gives_the_same_tokens() -> None:
    printed = run("speculative_decoding.py")
    tokens, verifies = map(int, re.findall(r"(\d+) tokens in (\d+) verifies", printed)[0])
    assert printed.strip().endswith("True") and verifies < tokens / 2


def test_torch_tensors(torch: ModuleType) -> None:
    printed = run("torch_tensors.py")
    assert "on cuda:0" in printed and printed.strip().endswith("the others: 0.0")
