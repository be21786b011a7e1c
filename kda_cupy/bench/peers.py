# SPDX-License-Identifier: Apache-2.0
"""Other implementations of packed decode, to be measured beside this one: ``kda-cupy bench decode --peer NAME``.

A peer is a name and a function; a file that holds one is used by its path, without being installed::

    # mine.py                                        kda-cupy bench decode --peer mine.py
    from kda_cupy.bench.peers import Operands, Peer

    def make(case):                                  # the shape: case.op, case.H, case.K, case.lower_bound, ...
        def step(x: Operands):                       # torch tensors, where the benchmark's backend has its arrays
            return my_kernel(x.q, x.k, x.v, x.gate, x.beta, x.A_log, x.dt_bias, x.state)
        return step                                  # which returns output and new state

    PEER = Peer("mine", make)

examples/peer_in_plain_torch.py is a whole one.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kda_cupy.bench import fla
from kda_cupy.bench.cases import Case


class Operands(NamedTuple):
    """Of one token of B sequences, as contiguous torch tensors. ``x``: the dtype of the activations."""

    q: Any
    """[B, 1, H, K], x: not normalised, not scaled"""
    k: Any
    """[B, 1, H, K], x: not normalised"""
    v: Any
    """[B, 1, HV, V], x"""
    gate: Any
    """[B, 1, HV, K] (KDA) or [B, 1, HV] (GDN), x: raw"""
    beta: Any
    """[B, 1, HV], x: raw logit"""
    A_log: Any
    """[HV], float32"""
    dt_bias: Any
    """[HV*K] (KDA) or [HV] (GDN), float32"""
    state: Any
    """[B, HV, V, K], float32: a view of the pool. It may be written in place."""


Step = Callable[[Operands], tuple[Any, Any]]
"""Returns output [B, 1, HV, V] and new state [B, HV, V, K]; the state may be that of the operands."""


class Unsupported(Exception):
    """A case that a peer does not know; its text becomes the note of the row."""


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    ``make(case)`` returns the step for a case, or raises Unsupported. It may import whatever it likes.
    """

    name: str
    make: Callable[[Case], Step]
    packages: tuple[str, ...] = ("torch",)
    """Distributions that it needs; their versions go into the record."""
    remark: str = ""
    """What a reader of its times has to know."""
    on_cpu: bool = True
    """Whether it works on tensors in host memory, for the NumPy backend."""

    def versions(self) -> dict[str, str]:
        """Of its packages; raises ImportError with the names of those that are not installed."""
        found, missing = {}, []
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                missing.append(package)
        if missing:
            are = "is" if len(missing) == 1 else "are"
            raise ImportError(
                f"{' and '.join(missing)} {are} not installed; pip install {' '.join(missing)}",
                name=missing[0],
            )
        return found


PEERS: Final[dict[str, Peer]] = {}
"""By name; :func:`register` adds to it."""


def register(peer: Peer) -> Peer:
    """Make a peer known by its name. Raises ValueError for a name that no table could show, or that is taken."""
    if not re.fullmatch(r"[\w-]{1,7}", peer.name):
        raise ValueError(f"{peer.name!r}: wanted a name of 1 to 7 letters, digits, - or _")
    if PEERS.setdefault(peer.name, peer) is not peer:
        raise ValueError(f"there is a peer {peer.name} already")
    return peer


def find(name: str) -> Peer:
    """Return the peer of that name, or the one that a Python file calls PEER.

    Raises LookupError for what is neither, and whatever the file raises.
    """
    if name in PEERS:
        return PEERS[name]
    path = Path(name)
    if path.suffix != ".py":
        raise LookupError(
            f"there is no peer {name}; known: {', '.join(PEERS)}, and any file.py with a PEER in it"
        )
    if not path.is_file():
        raise LookupError(f"there is no file {name}")
    peer = runpy.run_path(name).get("PEER")
    if not isinstance(peer, Peer):
        raise LookupError(f"{name} has no PEER = kda_cupy.bench.peers.Peer(...)")
    return peer if PEERS.get(peer.name) == peer else register(peer)


register(
    Peer(
        fla.NAME,
        lambda case: fla.make(case, Unsupported),
        packages=fla.PACKAGES,
        remark=fla.REMARK,
        on_cpu=fla.interpreted(),
    )
)
