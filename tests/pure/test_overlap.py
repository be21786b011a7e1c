# SPDX-License-Identifier: Apache-2.0
"""What may share memory with what: the quick checks against a count of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_cupy.arrays import ArrayInfo, describe
from kda_cupy.checks import MOST_REMEMBERED, check_apart, check_elements_apart
from kda_cupy.errors import OperandError

BUFFER = np.zeros(400, np.float32)


@st.composite
def views(draw: Any) -> Any:
    """Any view of the buffer with strides that are not negative, broadcast and interleaved ones among them."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    strides = [draw(st.integers(0, 20)) for _ in shape]
    start = draw(st.integers(0, 120))
    return np.lib.stride_tricks.as_strided(BUFFER[start:], shape, [4 * stride for stride in strides])


def places(view: Any) -> list[int]:
    """Where in the buffer each element lies."""
    start = (describe(view)[1] - describe(BUFFER)[1]) // 4
    steps = [stride // 4 for stride in view.strides]
    return [start + sum(map(int.__mul__, index, steps)) for index in np.ndindex(view.shape)]


def refuses(check: Any, *arguments: Any) -> str:
    try:
        check(*arguments)
    except OperandError as error:
        return error.code
    return ""


@given(arrays=st.lists(views(), min_size=2, max_size=4), written=st.sets(st.integers(0, 3)))
def test_a_shared_byte_is_found_and_no_other(arrays: list[Any], written: set[int]) -> None:
    infos: dict[str, ArrayInfo | None] = {str(n): describe(array)[0] for n, array in enumerate(arrays)}
    pointers = tuple(describe(array)[1] for array in arrays)
    cells = [set(places(array)) for array in arrays]
    shared = any(
        cells[i] & cells[j] for i in range(len(arrays)) for j in range(i) if i in written or j in written
    )
    passed: set[tuple[int, ...]] = set()
    for _ in range(2):  # the second time from memory, if it passed
        found = refuses(check_apart, infos, pointers, {str(n) for n in written}, passed)
        assert found == ("KDA-ARRAY-OVERLAP" if shared else "")
    assert passed == (set() if shared else {pointers})


@given(array=views())
def test_no_folded_array_passes(array: Any) -> None:
    folded = len(places(array)) > len(set(places(array)))
    code = refuses(check_elements_apart, "x", describe(array)[0])
    assert code == "KDA-ARRAY-FOLDED" if folded else code in ("", "KDA-ARRAY-FOLDED")


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3), (3, 2, 1, 0)])
def test_no_order_of_axes_counts_as_folded(axes: tuple[int, ...]) -> None:
    check_elements_apart("x", describe(np.zeros((2, 3, 4, 5), np.float32).transpose(axes)[:, 1:])[0])


def test_what_is_remembered_is_bounded() -> None:
    array = describe(BUFFER)[0]
    passed: set[tuple[int, ...]] = set()
    for n in range(3 * MOST_REMEMBERED):
        check_apart({"a": array}, (n,), {"a"}, passed)
        assert len(passed) <= MOST_REMEMBERED
