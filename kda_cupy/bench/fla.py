# SPDX-License-Identifier: Apache-2.0
"""The public recurrent kernels of flash-linear-attention (``pip install fla-core torch triton``) as a peer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kda_cupy.bench.cases import Case

NAME: Final = "fla"
PACKAGES: Final = ("fla-core", "torch", "triton")
REMARK: Final = (
    "it knows no slots: its states are neighbours, and the new ones go to memory that it allocates"
)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU: for tests, much too slow for times."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def make(case: Case, unsupported: type[Exception]) -> Callable[[Any], tuple[Any, Any]]:
    """The kernel of a case, gates, norms and sigmoid inside, on states [V, K]. See :mod:`kda_cupy.bench.peers`."""
    kernel: Callable[..., tuple[Any, Any]]
    if case.op == "kda":
        from fla.ops.kda import fused_recurrent_kda

        kernel = partial(fused_recurrent_kda, lower_bound=case.lower_bound)
    elif case.lower_bound is not None:
        raise unsupported("its GDN kernel has no bounded gate")
    else:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        kernel = fused_recurrent_gated_delta_rule

    def step(x: Any) -> tuple[Any, Any]:
        return kernel(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.gate,
            beta=x.beta,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            initial_state=x.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )

    return step
