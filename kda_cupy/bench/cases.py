# SPDX-License-Identifier: Apache-2.0
"""What is measured: geometries of published models as data, and random operands for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.checks import MAX_K
from kda_cupy.dtypes import by_name
from kda_cupy.ops.packed_decode import gdn_packed_decode, kda_packed_decode

OPERATIONS: Final[dict[str, Callable[..., Any]]] = {"kda": kda_packed_decode, "gdn": gdn_packed_decode}
LOWER_BOUND: Final = -5.0
"""Of the bounded gate, as Kimi-K3 has it."""
BATCHES: Final = (1, 8, 32, 64, 256)
SMALL_BATCHES: Final = (1, 2, 4, 8)
SMALL_HEADS: Final = 4
"""For the NumPy backend: enough to see that it works."""


@dataclass(frozen=True, slots=True)
class Case:
    """One packed decode: B rows, H query/key heads, HV value heads, state [HV, V, K] float32 per row."""

    op: str
    """``"kda"`` or ``"gdn"``."""
    H: int
    HV: int
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    lower_bound: float | None = None
    """None: the softplus gate."""
    B: int = 1

    @property
    def gate(self) -> str:
        """``"softplus"`` or ``"bounded"``."""
        return "softplus" if self.lower_bound is None else "bounded"

    @property
    def slot_bytes(self) -> int:
        """State of one row."""
        return self.HV * self.V * self.K * 4

    @property
    def problem(self) -> str:
        """Why no such case can be, or an empty string."""
        if self.HV % self.H:
            return f"{self.HV} value heads cannot be shared among {self.H} heads; take a multiple"
        if self.K % 4 or self.K > MAX_K:
            return f"head dim {self.K}: wanted a multiple of 4 up to {MAX_K}"
        return ""

    def small(self) -> Case:
        """The same with few heads, and as many value heads to a head as before."""
        if self.HV <= SMALL_HEADS:
            return self
        group = self.HV // self.H
        H = max(1, SMALL_HEADS // group)
        return replace(self, H=H, HV=H * group)


# Heads, head dims and gates as in the published configurations; -tpN is one GPU's share of N.
PRESETS: Final[dict[str, Case]] = {
    "kimi-linear-48b": Case("kda", H=32, HV=32),
    "kimi-linear-48b-tp4": Case("kda", H=8, HV=8),
    "kimi-k3": Case("kda", H=96, HV=96, lower_bound=LOWER_BOUND),
    "kimi-k3-tp8": Case("kda", H=12, HV=12, lower_bound=LOWER_BOUND),
    "kimi-k3-tp16": Case("kda", H=6, HV=6, lower_bound=LOWER_BOUND),
    "qwen3-next": Case("gdn", H=16, HV=32),
    "qwen3-next-tp4": Case("gdn", H=4, HV=8),
}
DEFAULT_PRESET: Final = "kimi-linear-48b"

_DISTINCT_ROWS = 4096
"""Random numbers are drawn for so many rows; larger batches repeat them."""


class Inputs(NamedTuple):
    """The operands in front of the state, as NumPy arrays."""

    mixed_qkv: Any
    """[B, 2*H*K + HV*V]"""
    a: Any
    """[B, HV*K] (KDA) or [B, HV] (GDN)"""
    b: Any
    """[B, HV]"""
    A_log: Any
    """[HV], float32"""
    dt_bias: Any
    """[HV*K] or [HV], float32"""

    def rows(self, selection: Any) -> Inputs:
        """Some of the rows: an index array or a slice."""
        return self._replace(mixed_qkv=self.mixed_qkv[selection], a=self.a[selection], b=self.b[selection])


def make_inputs(case: Case, rows: int, rng: np.random.Generator) -> Inputs:
    """Random operands, never zero: zeros move faster than data."""
    gates = case.HV * case.K if case.op == "kda" else case.HV

    def activations(width: int) -> Any:
        drawn = random_array(rng, (min(rows, _DISTINCT_ROWS), width)).astype(by_name(case.dtype))
        return np.resize(drawn, (rows, width))

    return Inputs(
        mixed_qkv=activations(2 * case.H * case.K + case.HV * case.V),
        a=activations(gates),
        b=activations(case.HV),
        A_log=rng.uniform(-2, 1, case.HV).astype(np.float32),
        dt_bias=random_array(rng, (gates,)) / 2,
    )


def random_state(case: Case, slots: int, rng: np.random.Generator) -> Any:
    """[slots, HV, V, K] float32: rows are values V, columns are keys K."""
    return random_array(rng, (slots, case.HV, case.V, case.K))


def random_array(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Draw float32 from a standard normal."""
    return rng.standard_normal(shape, dtype=np.float32)
