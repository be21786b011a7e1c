# SPDX-License-Identifier: Apache-2.0
"""A seeded selection of spoiled calls on NumPy; scripts/spoil.py makes as many as one likes."""

import numpy as np
import pytest
from mtp_problems import commit_operands, make_mtp
from spoiled import OPERATIONS, VARIANTS, WAYS, base, judge, place, spoil
from step_problems import make_step

import kda_cupy
from kda_cupy import SlotError


def test_spoiled_calls_are_refused_and_change_nothing_or_are_right() -> None:
    counts = spoil(range(900), np)
    ends = {
        end: sum(n for (each, _), n in counts.items() if each == end)
        for end in ("refused", "right", "recorded")
    }
    assert ends["refused"] > 400 and ends["right"] > 150 and ends["recorded"] > 10  # none of them is idle
    assert len({way for _, way in counts}) == len(set(WAYS))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_spoiled_was_valid(operation: str) -> None:
    for variant in range(VARIANTS):
        call = place(operation, base(operation, variant, 0, "float32"), np)
        assert judge(call) == "right"


def test_bind_asks_for_the_arguments_that_the_call_asks_for() -> None:
    """Also for one that may be None: leaving it out is a slip, None a choice."""
    problem = make_step("kda", B=2, dtype="float32")
    del problem["A_log"]
    for call in (kda_cupy.kda_decode_step, lambda **p: kda_cupy.bind(kda_cupy.kda_decode_step, **p)):
        with pytest.raises(TypeError, match=r"kda_decode_step\(\) missing .*'A_log'"):
            call(**problem)
    operands = commit_operands(make_mtp(N=2), [1, 1])
    with pytest.raises(TypeError, match=r"kda_commit\(\) got an unexpected keyword argument 'accepted'"):
        kda_cupy.bind(kda_cupy.kda_commit, **operands, accepted=operands["accept_lens"])


@pytest.mark.parametrize(("start", "end"), [(-(2**63), 2), (2, -(2**63)), (-(2**63), 2**63 - 1)])
def test_a_length_that_is_no_int64_is_recorded(start: int, end: int) -> None:
    problem = make_mtp(N=1, t=2, dtype="float32", index_dtype="int64")
    problem["cu_seqlens"] = np.array([start, end])
    out = kda_cupy.kda_decode_mtp(**problem)
    assert not out.any()
    with pytest.raises(SlotError) as caught:
        kda_cupy.check_errors()
    assert caught.value.code == "KDA-VALUE-LENGTH-RANGE"
