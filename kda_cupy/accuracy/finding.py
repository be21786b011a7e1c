# SPDX-License-Identifier: Apache-2.0
"""What an examination found: errors, beside what they may be at most."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one operation on one case. Errors are ``norm(got - truth) / norm(truth)``; NaN passes nothing."""

    operation: str
    case: str
    """Geometry, gate, and what is special."""
    dtype: str
    """Of the activations."""
    error_out: float
    bound_out: float
    error_state: float
    """Of the recurrent state; of the conv history, where there is nothing else."""
    bound_state: float
    complaint: str = ""
    """What else is wrong, or why there are no errors."""

    @property
    def passed(self) -> bool:
        """True if nothing is wrong."""
        return (
            not self.complaint
            and self.error_out <= self.bound_out  # False for NaN
            and self.error_state <= self.bound_state
        )

    def as_json(self) -> dict[str, Any]:
        """All of it; JSON has no NaN, so that becomes None, which passes nothing either."""
        values = asdict(self) | {"passed": self.passed}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
