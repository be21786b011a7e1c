# SPDX-License-Identifier: Apache-2.0
"""The memory that states live in between tokens: who owns which slot, what a slot consists of, copies, files."""

from kda_cupy.pool.snapshot import Snapshot
from kda_cupy.pool.state_pool import StatePool

__all__ = ["Snapshot", "StatePool"]
