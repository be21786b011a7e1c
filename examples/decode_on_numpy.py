# SPDX-License-Identifier: Apache-2.0
"""A decode loop on NumPy, no GPU and nothing but this package: sequences come and go, each in a slot of a pool.

python examples/decode_on_numpy.py
"""

import numpy as np

import kda_cupy

H, D, LAYERS, STEPS = 4, 128, 2, 12
rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    """What weights and projections are in a real model: here, random numbers."""
    return rng.standard_normal(shape, dtype=np.float32)


pool = kda_cupy.StatePool(8, H, layers=LAYERS, activation_dtype="float32", device="cpu")
layers = [
    kda_cupy.KdaLayer(
        *(draw(H * D, 4) for _ in "qkv"),  # conv taps of q, k and v
        draw(H),  # A_log
        draw(H * D),  # dt_bias
        pool,
        number,
        lower_bound=-5.0,
        onorm_weight=np.ones(D, np.float32),
        onorm_eps=1e-5,
    )
    for number in range(LAYERS)
]
projections = [draw(H * D, 5 * H * D + H) * (H * D) ** -0.5 for _ in range(LAYERS)]

running = {name: pool.allocate() for name in ("ada", "bob")}
hidden = {name: draw(H * D) for name in running}
for step in range(STEPS):
    if step == 4:  # a sequence ends, and its slot is free for others
        pool.release(running.pop("bob"))
    if step == 6:
        running["cy"], hidden["cy"] = pool.allocate(), draw(H * D)
    x = np.stack([hidden[name] for name in running])
    slots = np.array(list(running.values()), np.int32)
    for layer, projection in zip(layers, projections, strict=True):
        q, k, v, g, gate, beta = np.split(x @ projection, np.arange(1, 6) * H * D, axis=1)
        x = x + layer.decode(q, k, v, g, beta, slots, gate=gate).reshape(x.shape)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True))  # any model has a norm here
    hidden |= dict(zip(running, x, strict=True))
    print(f"step {step:2}  " + "  ".join(f"{name} {hidden[name][0]:+.3f}" for name in running))
print(pool)
