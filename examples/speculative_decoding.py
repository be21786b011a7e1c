# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: verify a chain of drafts, commit what the model agrees with; the rest never happened.

python examples/speculative_decoding.py          # on the first GPU
python examples/speculative_decoding.py cpu      # on NumPy
"""

import sys

import numpy as np

import kda_cupy

H, D, VOCABULARY, DRAFTS, LENGTH = 2, 128, 50, 4, 40
device = "cpu" if sys.argv[1:] == ["cpu"] else 0
if device == "cpu":
    xp = np
else:
    import cupy as xp

rng = np.random.default_rng(0)
pool = kda_cupy.StatePool(
    2, H, activation_dtype="float32", verify_rows=1, verify_tokens=1 + DRAFTS, device=device
)
shapes = [*[(H * D, 4)] * 3, (H,), (H * D,), (VOCABULARY, 4 * H * D + H), (H * D, VOCABULARY)]
*weights, embedding, head = (xp.asarray(rng.standard_normal(each, dtype=np.float32)) for each in shapes)
layer = kda_cupy.KdaLayer(*weights, pool, lower_bound=-5.0)


def projections(tokens: list[int]) -> list:
    """q, k, v, gate and beta of some tokens: a language model of one layer."""
    return xp.split(embedding[xp.asarray(tokens)], [n * H * D for n in (1, 2, 3, 4)], axis=1)


def predictions(out: object) -> list[int]:
    """The most likely token after each of them."""
    return (out.reshape(len(out), H * D, 1) * head).sum(axis=1).argmax(axis=1).tolist()  # no cuBLAS needed


def new_sequence() -> object:
    """A slot, zeroed, as an array beside the pool."""
    return xp.asarray(pool.allocate(1))


plain, slot = [0], new_sequence()
while len(plain) < LENGTH:
    plain += predictions(layer.decode(*projections(plain[-1:]), slot))

text, slot, verifies = [0], new_sequence(), 0
while len(text) < LENGTH:
    drafts = plain[len(text) : len(text) + DRAFTS]  # a draft model that is right in three of four cases
    drafts = [token if rng.random() < 0.75 else int(rng.integers(VOCABULARY)) for token in drafts]
    wanted = predictions(layer.verify(*projections([text[-1], *drafts]), slot))
    agreed = next((n for n, draft in enumerate(drafts) if draft != wanted[n]), len(drafts))
    layer.commit(xp.asarray([1 + agreed], dtype=np.int32))  # the bonus token, and the drafts that were right
    text += wanted[: agreed + 1]
    verifies += 1
print(f"{len(text) - 1} tokens in {verifies} verifies, the same as one by one: {text[:LENGTH] == plain}")
