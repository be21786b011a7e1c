# SPDX-License-Identifier: Apache-2.0
"""The contract of the layers on the NumPy backend, and their own messages, whole."""

from types import ModuleType

import numpy
import pytest
from layer_contract import B, Engine, LayerContract

import kda_cupy
from kda_cupy.error_pages import search


class TestOnNumpy(LayerContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return numpy


def told(code: str, operand: str, message: str, call: object, *arguments: object, **named: object) -> None:
    with pytest.raises(kda_cupy.OperandError) as caught:
        call(*arguments, **named)
    assert str(caught.value) == message
    assert (caught.value.code, caught.value.operand) == (code, operand)
    assert search(message)[0].code == code


def test_the_whole_message_of_a_pool_that_lacks_something() -> None:
    engine = Engine("kda", numpy, verify_rows=0, verify_tokens=0)
    weights = [engine.layer._weights[name] for name in ("w_q", "w_k", "w_v", "A_log", "dt_bias")]
    cure = "Pass activation_dtype, for a verify also verify_rows and verify_tokens, to kda_cupy.StatePool."
    states = kda_cupy.StatePool(2, 4, device="cpu")
    told(
        "KDA-POOL-PARTS",
        "pool",
        f"The pool of a layer needs a conv history: an `activation_dtype`. Got states alone. {cure}",
        kda_cupy.KdaLayer,
        *weights,
        states,
    )
    told(
        "KDA-POOL-PARTS",
        "pool",
        "The pool of a layer needs scratch for a verify: `verify_rows` and `verify_tokens`. Got none of it. "
        + cure,
        engine.layer.verify,
        **engine.tokens(B, 0),
        slots=engine.slots,
    )


def test_the_whole_message_of_a_commit_without_a_verify() -> None:
    told(
        "KDA-COMMIT-NO-VERIFY",
        "verify",
        "There is nothing to commit: a layer commits the tokens of its last `verify`. Got no verify of this layer. "
        "Call the layer's verify first, or kda_cupy.kda_commit with operands of your own.",
        Engine("gdn", numpy).layer.commit,
        numpy.zeros(B, numpy.int32),
    )
