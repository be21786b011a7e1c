# SPDX-License-Identifier: Apache-2.0
"""What is measured: operations, geometries of published models as data, and random numbers for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kda_cupy.checks import MAX_K
from kda_cupy.dtypes import by_name
from kda_cupy.ops.mtp_checks import DIM, MAX_TOKENS

RULES: Final = ("kda", "gdn")
MODES: Final = ("rings", "snapshots")
"""How a verify leaves what a commit needs."""
LOWER_BOUND: Final = -5.0
"""Of the bounded gate, as Kimi-K3 has it."""
BATCHES: Final = (1, 8, 32, 64, 256)
SPECULATION_BATCHES: Final = (1, 8, 64, 256)
SMALL_BATCHES: Final = (1, 2, 4, 8)
SMALL_HEADS: Final = 4
"""For the NumPy backend: enough to see that it works."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on B rows: H query/key heads, HV value heads, state [HV, V, K] float32 per row.

    A row is a token (decode) or a request of t tokens (verify, commit, round).
    """

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
    operation: str = "decode"
    """``"decode"``; ``"step"`` or, unfused, ``"chain"``; ``"verify"``, ``"commit"`` or, both of these, ``"round"``."""
    t: int = 1
    """Tokens of a request."""
    mode: str = ""
    """One of :data:`MODES`; nothing for a decode."""
    accept: int = 0
    """Tokens that the commit keeps; 0 where there is none."""
    norm: bool = False
    """With the fused output norm."""
    plain_windows: bool = False
    """Conv windows of a verify that hold each raw input up to three times; else they slide and hold it once."""

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
        if self.operation == "decode":
            return ""
        steps = self.operation in ("step", "chain")
        if self.op not in (RULES if steps else RULES[:1]) or (self.K, self.V) != (DIM, DIM):
            rules = " and ".join(RULES if steps else RULES[:1])
            return f"{self.operation} is there for {rules} with K = V = {DIM}; got {self.op}, K={self.K}, V={self.V}"
        if not 1 <= self.t <= MAX_TOKENS:
            return f"{self.t} tokens a request; wanted 1 to {MAX_TOKENS}"
        if not 0 <= self.accept <= self.t:
            return f"{self.accept} of {self.t} tokens cannot be accepted"
        return ""

    def small(self) -> Case:
        """The same with few heads, and as many value heads to a head as before."""
        if self.HV <= SMALL_HEADS:
            return self
        group = self.HV // self.H
        H = max(1, SMALL_HEADS // group)
        return replace(self, H=H, HV=H * group)

    def __str__(self) -> str:
        mtp = f" t={self.t} {self.mode}" if self.mode else ""
        return f"{self.op} {self.operation} H={self.H} HV={self.HV}{mtp} B={self.B}"


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


def random_state(case: Case, slots: int, rng: np.random.Generator) -> Any:
    """[slots, HV, V, K] float32: rows are values V, columns are keys K."""
    return random_array(rng, (slots, case.HV, case.V, case.K))


def random_rows(rng: np.random.Generator, rows: int, width: int, dtype: str) -> Any:
    """[rows, width] of activations, never zero: zeros move faster than data."""
    drawn = random_array(rng, (min(rows, _DISTINCT_ROWS), width)).astype(by_name(dtype))
    return np.resize(drawn, (rows, width))


def random_array(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Draw float32 from a standard normal."""
    return rng.standard_normal(shape, dtype=np.float32)
