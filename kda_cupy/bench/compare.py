# SPDX-License-Identifier: Apache-2.0
"""What changed between two records, with their noise taken into account.

A row is compared by its time over that of its yardstick, if both records have it: the yardstick ran between the same
replays, so clocks, temperature and even another GPU of the same kind cancel. How sure the change is comes from
resampling: the samples of both rows are drawn again, with replacement, many times, and the middle 99 % of the changes
found are its interval. A change counts if that interval does not contain 0 and its size is above a threshold, which
stands for what no single run can see, such as where the memory of a run happens to lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kda_cupy.bench.record import Record, Row

THRESHOLD_PERCENT: Final = 5.0
CONFIDENCE: Final = 0.99
_DRAWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Change:
    """One row of both records, or of one of them."""

    row: Row
    """That names it."""
    before: Row | None
    after: Row | None
    verdict: str
    """``"slower"``, ``"faster"``, ``"same"``; ``"broken"`` and ``"mended"``; ``"only in A"``, ``"only in B"``,
    ``"no time"``."""
    percent: float | None = None
    """Of the time (over the yardstick's)."""
    low: float | None = None
    high: float | None = None
    """Where it lies, at :data:`CONFIDENCE`."""

    @property
    def is_regression(self) -> bool:
        """Slower, or no longer right."""
        return self.verdict in ("slower", "broken")


def compare(a: Record, b: Record, threshold_percent: float = THRESHOLD_PERCENT) -> list[Change]:
    """Rows in the order of ``b``, then those that only ``a`` has."""
    before = {row.identity: row for row in a.rows}
    changes = [_change(before.pop(row.identity, None), row, threshold_percent) for row in b.rows]
    return changes + [Change(row, row, None, "only in A") for row in before.values()]


def differences(a: Record, b: Record) -> list[str]:
    """What makes two records hard to compare, in words."""
    found = []
    for name in ("backend", "l2", "timer"):
        old, new = getattr(a.protocol, name), getattr(b.protocol, name)
        if old != new:
            found.append(f"{name}: {old} in A, {new} in B")
    return found


def uses_ratio(before: Row, after: Row) -> bool:
    """Whether both rows have samples of the same yardstick."""
    return bool(
        before.yardstick == after.yardstick and before.yardstick_samples_us and after.yardstick_samples_us
    )


def _change(before: Row | None, after: Row, threshold_percent: float) -> Change:
    if before is None:
        return Change(after, None, after, "only in B")
    if before.status == "timed" != after.status:
        return Change(after, before, after, "broken")
    if after.status == "timed" != before.status:
        return Change(after, before, after, "mended")
    if not before.samples_us or not after.samples_us:
        return Change(after, before, after, "no time")
    ratio = uses_ratio(before, after)
    rng = np.random.default_rng(0)
    old, new = _medians(before, ratio, rng), _medians(after, ratio, rng)
    change = 100 * (new / old - 1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(change[1:], [tail, 100 - tail])
    percent = float(change[0])
    verdict = "same"
    if abs(percent) > threshold_percent and (low > 0 or high < 0):
        verdict = "slower" if percent > 0 else "faster"
    return Change(after, before, after, verdict, percent, float(low), float(high))


def _medians(row: Row, ratio: bool, rng: np.random.Generator) -> Any:
    """The measured median (over the yardstick's), and behind it those of samples that were drawn again."""
    found = _with_draws(row.samples_us, rng)
    return found / _with_draws(row.yardstick_samples_us, rng) if ratio else found


def _with_draws(samples_us: tuple[float, ...], rng: np.random.Generator) -> Any:
    samples = np.asarray(samples_us)
    drawn = rng.choice(samples, (_DRAWS, samples.size))
    return np.concatenate([[np.median(samples)], np.median(drawn, axis=1)])
