# SPDX-License-Identifier: Apache-2.0
"""Record what flash-linear-attention answers, as traces for ``kda_cupy.trace`` (files in tests/data/).

The layers of the public package draw their own weights, A_log and dt_bias and project random hidden states; its naive
recurrent references answer, in float32 (they cast to it whatever they are given). The same tokens then go through
the package's fused Triton kernels, gate, L2 norm and sigmoid inside, in Triton's interpreter: a trace is
written only if the two agree.

Runs on the CPU, in an environment of its own, on Linux with Python 3.11 or later:

    python -m venv fla
    fla/bin/pip install numpy torch==2.13.0 triton flash-linear-attention==0.6.0 fla-core==0.6.0
    fla/bin/python scripts/record_trace.py

A CPU build of torch is enough. It does not bring Triton, which fla imports, so Triton is named; stubs are not
needed. flash-linear-attention holds the layers, fla-core the operations. Nothing else of this project runs this
script: the recorded files are committed.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: fla's kernels run on the CPU

import numpy as np
import torch
from fla.layers import GatedDeltaNet, KimiDeltaAttention
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla.ops.gated_delta_rule.gate import naive_gdn_gate
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.kda import fused_recurrent_kda
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from torch.nn import functional

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
HIDDEN, PREFIX, TOKENS = 256, 64, 6
"""Width of the hidden states; tokens that make the initial state; tokens that are recorded."""
QUIET_TOKEN, QUIET = 2, 2.0**-10
"""This token of request 0 is so small that the eps of the L2 norm shows."""
AGREEMENT = 2e-6
"""Between fla's two float32 implementations, relative. Against float64 the naive ones are within 2.3e-7; the fused
kernels are 1.3e-6 away at worst, because outside CUDA they form softplus as log(1 + exp(x)), which loses digits.
"""


@dataclass(frozen=True)
class Case:
    """One file. H query/key heads, HV value heads, K and V their sizes, N requests."""

    name: str
    operation: str
    H: int
    HV: int
    K: int
    V: int
    N: int = 2
    lower_bound: float | None = None
    safe_gate: bool = False
    """fla's layer then starts from A_log = 0, else from log(uniform(1, 16))."""
    allow_neg_eigval: bool = False
    seed: int = 0


KDA, GDN = "kda_packed_decode", "gdn_packed_decode"
CASES = (
    Case("kda_softplus_64x32", KDA, H=1, HV=2, K=64, V=32, seed=1),
    Case("kda_bounded_64", KDA, H=2, HV=2, K=64, V=64, lower_bound=-5.0, seed=2),
    Case("kda_bounded_128", KDA, H=1, HV=1, K=128, V=128, lower_bound=-5.0, safe_gate=True, seed=3),
    Case("gdn_softplus_32x64", GDN, H=2, HV=4, K=32, V=64, seed=4),
    Case("gdn_negative_eigenvalues_32", GDN, H=1, HV=2, K=32, V=32, N=3, allow_neg_eigval=True, seed=5),
)


def make_layer(case: Case) -> torch.nn.Module:
    """The fla layer of a case, with fla's initialisation. No convolution: that is another operation."""
    layer = KimiDeltaAttention if case.operation == KDA else GatedDeltaNet
    gate = {"safe_gate": case.safe_gate, "lower_bound": case.lower_bound} if case.operation == KDA else {}
    return layer(
        hidden_size=HIDDEN,
        head_dim=case.K,
        expand_v=case.V / case.K,
        num_heads=case.H,
        num_v_heads=case.HV,
        use_short_conv=False,
        allow_neg_eigval=case.allow_neg_eigval,
        **gate,
    ).eval()


def project(case: Case, layer: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """q, k [N, t, H, K], v [N, t, HV, V], raw gate a and raw beta b, as the layer's forward makes them of x.

    All are rounded to bfloat16, so that they are the same numbers as float32 and as bfloat16.
    """
    a = layer.f_proj(x).unflatten(-1, (case.HV, case.K)) if case.operation == KDA else layer.a_proj(x)
    projected = {
        "q": functional.silu(layer.q_proj(x)).unflatten(-1, (case.H, case.K)),
        "k": functional.silu(layer.k_proj(x)).unflatten(-1, (case.H, case.K)),
        "v": functional.silu(layer.v_proj(x)).unflatten(-1, (case.HV, case.V)),
        "a": a,
        "b": layer.b_proj(x),
    }
    return {name: value.bfloat16().float() for name, value in projected.items()}


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """What fla's kernels do to q and k. The package has no reference for it; the fused kernel is the witness."""
    return x / torch.sqrt(torch.sum(x * x, -1, keepdim=True) + 1e-6)


def naive(case: Case, layer: Any, tokens: dict[str, torch.Tensor], state: torch.Tensor | None) -> Any:
    """Outputs [N, t, HV, V] and final state of fla's naive gate and recurrence. States are fla's: [N, HV, K, V]."""
    q, k, v, a, b = tokens.values()
    q, k = l2_normalized(q), l2_normalized(k)
    beta = b.sigmoid() * (2.0 if case.allow_neg_eigval else 1.0)
    options = {"scale": case.K**-0.5, "initial_state": state, "output_final_state": True}
    if case.operation == KDA:
        if case.lower_bound is None:
            g = naive_kda_gate(a, layer.A_log, layer.dt_bias)
        else:
            g = naive_kda_lowerbound_gate(a, layer.A_log, layer.dt_bias, case.lower_bound)
        return naive_recurrent_kda(q=q, k=k, v=v, g=g, beta=beta, **options)
    g = naive_gdn_gate(a, layer.A_log, layer.dt_bias)
    # This reference knows one number of heads: value head hv gets q/k head hv // (HV // H).
    q, k = (x.repeat_interleave(case.HV // case.H, dim=2) for x in (q, k))
    return naive_recurrent_gated_delta_rule(q=q, k=k, v=v, beta=beta, g=g, **options)


def fused(case: Case, layer: Any, tokens: dict[str, torch.Tensor], state: torch.Tensor) -> Any:
    """Outputs and final state of fla's fused kernel, from the raw operands. States are [N, HV, V, K] here."""
    q, k, v, a, b = tokens.values()
    kernel = fused_recurrent_kda if case.operation == KDA else fused_recurrent_gated_delta_rule
    return kernel(
        q=q,
        k=k,
        v=v,
        g=a,
        beta=b,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        scale=case.K**-0.5,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=case.allow_neg_eigval,
        state_v_first=True,
        **({"lower_bound": case.lower_bound} if case.operation == KDA else {}),
    )


def relative(got: torch.Tensor, reference: torch.Tensor) -> float:
    """``norm(got - reference) / norm(reference)`` in float64."""
    return float((got.double() - reference.double()).norm() / reference.double().norm())


def token_first(x: torch.Tensor) -> torch.Tensor:
    """[N, t, ...] -> [t, N, features]."""
    return x.flatten(2).transpose(0, 1)


def functions(case: Case) -> list[str]:
    """Names of the fla functions that made the numbers of a case."""
    if case.operation == GDN:
        return [f"{f.__module__}.{f.__name__}" for f in (naive_gdn_gate, naive_recurrent_gated_delta_rule)]
    gate = naive_kda_gate if case.lower_bound is None else naive_kda_lowerbound_gate
    return [f"{f.__module__}.{f.__name__}" for f in (gate, naive_recurrent_kda)]


@torch.no_grad()
def record(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The arrays of a trace and its metadata. Raises RuntimeError if fla's two implementations disagree."""
    torch.manual_seed(case.seed)
    layer = make_layer(case)
    x = torch.randn(case.N, PREFIX + TOKENS, HIDDEN)
    x[0, PREFIX + QUIET_TOKEN] *= QUIET

    _, initial = naive(case, layer, project(case, layer, x[:, :PREFIX]), None)
    initial = (
        initial.bfloat16().float()
    )  # an input like any other; half of its bytes are then zero in the file
    tokens = project(case, layer, x[:, PREFIX:])
    out, final = naive(case, layer, tokens, initial)

    # fla's naive references keep [N, HV, K, V]; traces hold [N, HV, V, K].
    initial, final = initial.transpose(2, 3).contiguous(), final.transpose(2, 3).contiguous()
    fused_out, fused_final = fused(case, layer, tokens, initial)
    disagreement = {"output": relative(fused_out, out), "state": relative(fused_final, final)}
    if not max(disagreement.values()) < AGREEMENT:
        raise RuntimeError(f"{case.name}: naive and fused fla disagree: {disagreement}")

    arrays = {
        "mixed_qkv": torch.cat([token_first(tokens[name]) for name in "qkv"], dim=-1),
        "a": token_first(tokens["a"]),
        "b": token_first(tokens["b"]),
        "A_log": layer.A_log.detach(),
        "dt_bias": layer.dt_bias.detach(),
        "initial_state": initial,
        "out": out.transpose(0, 1),
        "final_state": final,
    }
    metadata = {
        "schema": "kda_cupy.trace",
        "schema_version": 1,
        "operation": case.operation,
        "tokens": TOKENS,
        "requests": case.N,
        "H": case.H,
        "HV": case.HV,
        "K": case.K,
        "V": case.V,
        "gate": "softplus" if case.lower_bound is None else "bounded",
        "lower_bound": case.lower_bound,
        "scale": case.K**-0.5,
        "use_qk_l2norm": True,
        "allow_neg_eigval": case.allow_neg_eigval,
        "layout": "[requests, HV, V, K]",
        "origin": {
            "functions": functions(case),
            "precision": "float32",
            "layer": f"{type(layer).__module__}.{type(layer).__name__}",
            "initialisation": "the layer's own: weights, A_log, dt_bias",
            "activations": "random hidden states through the layer's projections, rounded to bfloat16",
            "quiet_token": f"hidden state of request 0, token {QUIET_TOKEN} times 2**-10",
            "initial_state": f"state after {PREFIX} earlier tokens, rounded to bfloat16",
            "layout": "fla's [N, HV, K, V], last two axes transposed",
            "checked_against": f"{fused.__name__} kernel in Triton's interpreter",
            "disagreement": disagreement,
            "seed": case.seed,
            "fla-core": version("fla-core"),
            "flash-linear-attention": version("flash-linear-attention"),
            "torch": version("torch"),
            "triton": version("triton"),
            "python": platform.python_version(),
            "date": datetime.now(UTC).date().isoformat(),
        },
    }
    return arrays, metadata


def main() -> None:
    """Write every case to tests/data/."""
    DATA.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        arrays, metadata = record(case)
        stored = {name: array.numpy() for name, array in arrays.items()}
        text = np.frombuffer(json.dumps(metadata).encode(), np.uint8)
        path = DATA / f"{case.name}.npz"
        np.savez_compressed(path, metadata=text, **stored)
        disagreement = metadata["origin"]["disagreement"]
        print(
            f"{path.name}: {path.stat().st_size:,} bytes; naive and fused differ by "
            f"{disagreement['output']:.1e} (output), {disagreement['state']:.1e} (state)"
        )


if __name__ == "__main__":
    main()
