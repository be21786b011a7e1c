# SPDX-License-Identifier: Apache-2.0
"""The contract of the layers on CUDA, and torch tensors in and out."""

from types import ModuleType

import numpy as np
import pytest
from layer_contract import OPS, B, Engine, LayerContract
from problems import same_bits, to_library

cupy = pytest.importorskip("cupy")


class TestOnCuda(LayerContract):
    @pytest.fixture
    def library(self) -> ModuleType:
        return cupy


@OPS
def test_torch_tensors_in_and_out(op: str, torch: ModuleType) -> None:
    theirs, ours = Engine(op, cupy), Engine(op, cupy)
    tokens = ours.tokens(B, 0)
    moved = {name: to_library(value.get(), torch, "cuda") for name, value in tokens.items()}
    slots = to_library(ours.slots.get(), torch, "cuda")
    got, want = theirs.layer.decode(**moved, slots=slots), ours.layer.decode(**tokens, slots=ours.slots)
    assert isinstance(got, torch.Tensor) and same_bits(got, want)
    assert same_bits(theirs.pool.state, ours.pool.state)


@OPS
def test_a_captured_step_allocates_nothing(op: str) -> None:
    """G4."""
    engine = Engine(op, cupy)
    step = engine.layer.capture(B)
    step.inputs["slots"][:] = engine.slots
    seen = []

    class Hook(cupy.cuda.memory_hook.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **size: object) -> None:
            seen.append(size)

    with Hook():
        step()
    cupy.cuda.Device().synchronize()
    assert not seen and np.isfinite(step.out.get().astype(np.float32)).all()


def test_a_slot_is_zeroed_behind_the_replays_that_use_it() -> None:
    """A21: replays on a stream of their own, slots given back and taken again on another."""
    engine = Engine("kda", cupy)
    step = engine.layer.capture(B)
    for name, value in engine.tokens(B, 0).items():
        step.inputs[name][...] = value.reshape(step.inputs[name].shape)
    step.inputs["slots"][:] = engine.slots
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    used = engine.slots.get()
    for _ in range(5):
        with stream:
            for _ in range(100):
                step()
        engine.pool.release(used)
        assert sorted(engine.pool.allocate(B)) == sorted(used)
        cupy.cuda.Device().synchronize()
        assert not engine.pool.state[:, used].any() and not engine.pool.conv[:, used].any()
