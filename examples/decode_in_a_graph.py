# SPDX-License-Identifier: Apache-2.0
"""A decode loop under a CUDA graph: one captured step for every batch up to its size, inputs overwritten in place.

python examples/decode_in_a_graph.py          # on the first GPU
python examples/decode_in_a_graph.py cpu      # the same loop on NumPy, without a graph
"""

import sys
import time

import numpy as np

import kda_cupy

H, D, BATCH, STEPS = 12, 128, 8, 200
device = "cpu" if sys.argv[1:] == ["cpu"] else 0
if device == "cpu":
    xp, wait = np, lambda: None
else:
    import cupy as xp

    wait = xp.cuda.Device(device).synchronize

rng = np.random.default_rng(0)


def draw(*shape: int, dtype: object = np.float32) -> object:
    """Random weights and projections beside the pool."""
    return xp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(dtype))


pool = kda_cupy.StatePool(64, H, activation_dtype="bfloat16", device=device)
weights = [*(draw(H * D, 4) for _ in "qkv"), draw(H), draw(H * D)]
norm = {"onorm_weight": draw(D), "onorm_eps": 1e-5}
layer = kda_cupy.KdaLayer(*weights, pool, lower_bound=-5.0, **norm)
step = layer.capture(BATCH)
print(step)

sequences = [pool.allocate() for _ in range(BATCH)]
fresh = {
    name: draw(*step.inputs[name].shape, dtype=pool.conv.dtype) for name in step.inputs if name != "slots"
}
for name, values in fresh.items():
    step.inputs[name][...] = values
wait()
start = time.perf_counter()
for token in range(STEPS):
    if token % 50 == 0:  # somebody finishes, and the batch shrinks: slot 0 is padding
        pool.release(sequences.pop())
        rows = np.zeros(BATCH, np.int32)
        rows[: len(sequences)] = sequences
        step.inputs["slots"][:] = xp.asarray(rows)
    step.inputs["q"][...] = fresh["q"]  # where a model would write its projections
    out = step()
wait()
took = (time.perf_counter() - start) / STEPS
kda_cupy.check_errors()
print(f"{len(sequences)} of {BATCH} rows live, {out.shape} a step, {1e6 * took:.0f} us a step")
