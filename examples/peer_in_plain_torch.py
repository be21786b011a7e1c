# SPDX-License-Identifier: Apache-2.0
"""Packed decode in plain torch, a few kernels a line, as a peer of the benchmark.

kda-cupy bench decode --peer examples/peer_in_plain_torch.py
"""

import torch
from torch.nn import functional

from kda_cupy.bench.cases import Case
from kda_cupy.bench.peers import Operands, Peer, Step


def make(case: Case) -> Step:
    """One token of every row, for a case's heads, dims and gate."""

    def normalized(x: torch.Tensor) -> torch.Tensor:
        x = x[:, 0].float()
        x = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(case.HV // case.H, dim=1)  # [B, HV, K]

    def step(x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        bias = x.dt_bias.view(x.gate.shape[2:])
        raw = x.gate[:, 0].float() + bias
        rate = x.A_log.exp().view(-1, *[1] * (bias.dim() - 1))
        if case.lower_bound is None:
            g = -rate * functional.softplus(raw)
        else:
            g = case.lower_bound * torch.sigmoid(rate * raw)
        decay = g.exp().reshape(len(g), case.HV, 1, -1)  # [B, HV, 1, K], or one for all keys
        q, k, v = normalized(x.q) * case.K**-0.5, normalized(x.k), x.v[:, 0].float()

        state = x.state.mul_(decay)  # [B, HV, V, K]
        u = x.beta[:, 0, :, None].float().sigmoid() * (v - (state * k.unsqueeze(2)).sum(-1))
        state.add_(u.unsqueeze(3) * k.unsqueeze(2))
        out = (state * q.unsqueeze(2)).sum(-1)
        return out[:, None].to(x.v.dtype), state

    return step


PEER = Peer("torch", make, remark="a kernel for every operator; the state is updated in place")
