# SPDX-License-Identifier: Apache-2.0
"""A peer on the inputs of a packed decode: judged like it, compared with it, and called as often."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.bench.cases import Case, random_state
from kda_cupy.bench.decode import JUDGED_ROWS, OPERATIONS, Inputs, PackedDecode
from kda_cupy.bench.judge import OUT_BOUNDS, Verdict
from kda_cupy.bench.peers import Operands, Peer, Unsupported
from kda_cupy.bench.record import Row, make_row
from kda_cupy.bench.workload import Call
from kda_cupy.dtypes import BFLOAT16
from kda_cupy.reference import truth

APPROXIMATION: Final = 1e-4
"""That a peer may differ by besides the rounding of both outputs: fast exponentials are up to 1e-5 off, another gate,
order or epsilon 1e-2 and more. What it does differ by stands in its row."""


class Comparison(NamedTuple):
    """How far a peer is from the float64 truth, and from this package."""

    verdict: Verdict
    """Errors against float64; it complains of differences from this package alone."""
    difference: float
    """The larger of those of output and state, relative."""


class Challenge:
    """A peer with tensors that share the memory of a workload.

    Its rows use neighbouring slots, for peers may know no others.
    """

    def __init__(self, peer: Peer, workload: PackedDecode) -> None:
        """Raise Unsupported for a case that the peer does not know, and whatever it raises."""
        self._workload = workload
        case = self._case = workload.case
        self._step = peer.make(case)
        self._state = as_tensor(workload.state)
        self._tensors = _split(case, workload.inputs.rows(slice(case.B)), workload.memory.place)
        self._kept: dict[int, Any] = {}

    def compare(self, rng: np.random.Generator) -> Comparison:
        """Run the peer once, and this package's operation on the same inputs."""
        case, inputs, state = self._case, self._workload.inputs, self._workload.state
        place, fetch, _ = self._workload.memory
        rows = np.unique(np.linspace(0, case.B - 1, JUDGED_ROWS).astype(int))
        before = random_state(case, len(rows), rng)

        def fill() -> None:
            for row, values in zip(rows.tolist(), before, strict=True):
                state[1 + row] = place(values)

        fill()
        out, new_state = self.call(0)
        peer_out, peer_state = as_numpy(out)[rows], as_numpy(new_state)[rows]
        fill()
        slots = place(np.arange(1, case.B + 1, dtype=np.int32))
        operands = [place(each) for each in inputs.rows(slice(case.B))]
        our_out, _ = OPERATIONS[case.op](*operands, state, slots, lower_bound=case.lower_bound)
        ours = fetch(our_out)[rows], np.stack([fetch(state[1 + row]) for row in rows.tolist()])

        want = truth.packed_decode(
            *inputs.rows(rows), before, np.arange(len(rows)), lower_bound=case.lower_bound
        )
        theirs = peer_out.reshape(want[0].shape), peer_state
        apart = [truth.relative_error(got, our) for got, our in zip(theirs, ours, strict=True)]
        allowed = (2 * OUT_BOUNDS[case.dtype] + APPROXIMATION, APPROXIMATION)
        complaints = [
            f"its {name} differs from kda_cupy's by {each:.3g}, more than {bound:.3g}"
            for name, each, bound in zip(("output", "state"), apart, allowed, strict=True)
            if not each <= bound
        ]
        error_out, error_state = (
            truth.relative_error(got, right) for got, right in zip(theirs, want, strict=True)
        )
        difference = float(np.max(apart))
        return Comparison(Verdict(error_out, error_state, "; ".join(complaints)), difference)

    def call(self, group: int) -> tuple[Any, Any]:
        """One token of the rows whose slots are this group's."""
        import torch

        first, B = 1 + group * self._case.B, self._case.B
        with torch.no_grad():
            result = self._step(self._tensors._replace(state=self._state[first : first + B]))
        self._kept[group] = result  # so that each group's state goes elsewhere, and not to one place in L2
        return result

    def release(self) -> None:
        """Give the memory of its results back."""
        import torch

        self._kept.clear()
        if self._state.is_cuda:
            torch.cuda.empty_cache()


class Met:
    """A challenge whose results are known, or why there is none."""

    def __init__(self, peer: Peer, case: Case, challenge: Challenge | None, **found: Any) -> None:
        self._peer, self._case, self._challenge, self._found = peer, case, challenge, found

    def calls(self, groups: int) -> list[Call]:
        """One for each group of slots, on CuPy's current stream; none, if the peer is not to be timed."""
        if self._challenge is None:
            return []
        return [partial(_on_current_stream, partial(self._challenge.call, each)) for each in range(groups)]

    def eager(self) -> Any:
        """As a user calls it."""
        return self._challenge.call(0) if self._challenge else None

    def give_up(self, cause: Exception) -> None:
        """It is not to be timed, because of what it raised."""
        self.release()
        self._challenge, self._found = None, _failed(cause)

    def row(self, **measured: Any) -> Row:
        """Of the table; measured: the times."""
        return make_row(self._case, peer=self._peer.name, **measured | self._found)

    def release(self) -> None:
        """Give the memory of its results back."""
        if self._challenge:
            self._challenge.release()


def meet(peer: Peer, workload: PackedDecode, rng: np.random.Generator) -> Met:
    """Let a peer answer once. What it does not know, gets wrong or raises, is said in its row, and not timed."""
    case = workload.case
    try:
        challenge = Challenge(peer, workload)
        verdict, difference = challenge.compare(rng)
    except Unsupported as cause:
        return Met(peer, case, None, status="skipped", note=str(cause))
    except Exception as cause:  # whatever a stranger's code raises
        return Met(peer, case, None, **_failed(cause))
    found = {"difference": difference if np.isfinite(difference) else None}
    return Met(peer, case, None if verdict.complaint else challenge, verdict=verdict, **found)


def _failed(cause: Exception) -> dict[str, Any]:
    first = next(iter(str(cause).splitlines()), "")
    return {"status": "skipped", "note": f"{type(cause).__name__}: {first}"}


def _split(case: Case, inputs: Inputs, place: Callable[[Any], Any]) -> Operands:
    """Operands as peers know them; each contiguous, so that nothing has to be copied in a call."""
    B, (H, HV, K, V) = len(inputs.b), (case.H, case.HV, case.K, case.V)
    q, k, v = np.split(inputs.mixed_qkv, [H * K, 2 * H * K], axis=1)
    gate = inputs.a.reshape(B, 1, HV, K) if case.op == "kda" else inputs.a.reshape(B, 1, HV)
    arrays = (
        q.reshape(B, 1, H, K), k.reshape(B, 1, H, K), v.reshape(B, 1, HV, V), gate, inputs.b.reshape(B, 1, HV),
        inputs.A_log, inputs.dt_bias,
    )  # fmt: skip
    tensors = [as_tensor(place(np.ascontiguousarray(each))) for each in arrays]
    return Operands._make([*tensors, None])


def as_tensor(array: Any) -> Any:
    """A torch tensor on the memory of a NumPy or CuPy array; bfloat16 goes as bits, for NumPy hands it to nobody."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_numpy(tensor: Any) -> Any:
    """A copy as float32, which holds all that the half types do."""
    return tensor.detach().float().cpu().numpy().copy()


def _on_current_stream(call: Call) -> Any:
    """CuPy's becomes torch's for the time of a call."""
    import cupy
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
        return call()
