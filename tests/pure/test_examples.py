# SPDX-License-Identifier: Apache-2.0
"""The examples run as they are, in an interpreter of their own with warnings as errors; here without a GPU."""

import re
from types import ModuleType

import pytest
from run_example import EXAMPLES, run


def test_there_are_four_of_them_and_they_are_short() -> None:
    assert len(EXAMPLES) >= 4
    for path in EXAMPLES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 60 and path.name in lines[3], "the docstring says how it is run"


def test_numpy_alone() -> None:
    printed = run("decode_on_numpy.py").splitlines()
    assert "bob" in printed[3] and "bob" not in printed[4] and "cy" in printed[6]
    assert printed[-1].startswith("<StatePool 2 of 8 slots in use")


def test_a_step_without_a_graph() -> None:
    assert "4 of 8 rows live, (8, 12, 128) a step" in run("decode_in_a_graph.py", "cpu")


def test_speculation_gives_the_same_tokens() -> None:
    printed = run("speculative_decoding.py", "cpu")
    tokens, verifies = map(int, re.findall(r"(\d+) tokens in (\d+) verifies", printed)[0])
    assert printed.strip().endswith("True") and verifies < tokens / 2


def test_torch_tensors_in_host_memory(torch: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("runs on the GPU: see tests/gpu/test_examples.py")
    printed = run("torch_tensors.py")
    assert "on cpu" in printed and printed.strip().endswith("the others: 0.0")
