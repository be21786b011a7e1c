# SPDX-License-Identifier: Apache-2.0
"""torch tensors in and out, on a pool that is torch's own memory: nothing is copied, both see every update.

python examples/torch_tensors.py              # on torch's first GPU, or in host memory without one
"""

import torch

import kda_cupy

H, HV, D, P, B = 2, 4, 128, 9, 3
channels = (2 * H + HV) * D
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random weights and projections."""
    return torch.randn(*shape, device=device).to(dtype)


# An engine's own cache: states [P, HV, V, K] and conv histories [P, channels, 3].
states = torch.zeros(P, HV, D, D, device=device)
histories = torch.zeros(P, channels, 3, device=device, dtype=torch.bfloat16)
pool = kda_cupy.StatePool.wrap(states, histories, num_key_heads=H)
layer = kda_cupy.GdnLayer(draw(channels, 4), draw(HV), draw(HV), pool, onorm_weight=draw(D), onorm_eps=1e-6)

slots = torch.from_numpy(pool.allocate(B)).to(device)
for token in range(4):
    projection = draw(
        B, channels + 2 * HV, dtype=torch.bfloat16
    )  # q, k, v and both gates of one matrix product
    mixed_qkv, a, b = projection.split(
        [channels, HV, HV], dim=1
    )  # views: their strides are taken as they are
    out = layer.decode(mixed_qkv, a, b, slots, gate=draw(B, HV, D, dtype=torch.bfloat16))
    print(
        f"token {token}: {tuple(out.shape)} {out.dtype} on {out.device}, mean {out.float().abs().mean():.3f}"
    )

# torch sees what the kernel wrote, and the layer would see what torch writes.
used = states[slots.long()].abs().sum(dim=(1, 2, 3))
unused = states.abs().sum() - used.sum()
print(f"states in use: {used.tolist()}, the others: {unused.item():.1f}")
assert isinstance(out, torch.Tensor) and (used > 0).all() and abs(unused.item()) < 1e-3 * used.sum().item()
