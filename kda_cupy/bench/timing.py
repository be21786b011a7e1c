# SPDX-License-Identifier: Apache-2.0
"""Takes the times. On a GPU: replays of a CUDA graph, beside the yardsticks; on NumPy: a clock around plain calls.

A kernel takes microseconds, so it is never timed alone. A graph of many launches walks over slots scattered
in a large pool; no slot comes back before several times the L2 cache has moved, as in a model, whose other layers
move more than that between two tokens. The graphs of operations and yardsticks are replayed in turn without a pause:
all see the same clocks, and the GPU never waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from kda_cupy.bench import yardstick
from kda_cupy.bench.cases import Case, random_state
from kda_cupy.bench.challenge import Met, meet
from kda_cupy.bench.decode import PackedDecode
from kda_cupy.bench.peers import Peer
from kda_cupy.bench.record import Protocol, Row, make_row, summarize
from kda_cupy.bench.speculation import Speculation
from kda_cupy.bench.step import WholeStep
from kda_cupy.bench.workload import Call, Make, Memory, Part, Rotation
from kda_cupy.gpu import require_gpu
from kda_cupy.guard import check_errors
from kda_cupy.pool import StatePool

WORKLOADS: Final[dict[str, Make]] = {
    "decode": PackedDecode,
    "step": WholeStep,
    "verify": Speculation,
    "round": Speculation,
}
"""By the operation of a case."""
POOL_BYTES: Final = 3 << 30
REUSE_BYTES: Final = 250_000_000
REUSE_L2: Final = 5
"""Times the size of the L2 cache, if that is more."""
MIN_LAUNCHES: Final = 20
MIN_REPEATS: Final = 9
EAGER_CALLS: Final = 2
HOST_CALLS: Final = 20
"""A sample of host time."""
HOST_SAMPLES: Final = 15
MIN_HOST_SAMPLES: Final = 3
HOST_BUDGET_US: Final = 100_000
"""Of GPU time, for the host time of a row."""

Stage = Callable[[str], None]


def plan_rotation(B: int, slot_bytes: int, slots: int, reuse_bytes: int) -> Rotation:
    """Rotate over so many groups that ``reuse_bytes`` of state move before one comes back, if the pool has them."""
    wanted = max(MIN_LAUNCHES, -(-reuse_bytes // (B * slot_bytes))) if reuse_bytes else 1
    groups = min(wanted, slots // B)
    return Rotation(groups, groups * -(-MIN_LAUNCHES // groups), reuse_bytes)


class Replayed(NamedTuple):
    """A graph to be: calls, and how often they do what a time is asked of."""

    calls: Sequence[Call]
    times: int
    eager: int = EAGER_CALLS
    """Of the calls, before they are captured."""


class GpuTimer:
    """Measures on one GPU. The only part of the benchmark that uses CuPy."""

    def __init__(
        self,
        device: int = 0,
        *,
        warm: bool = False,
        repeats: int,
        pool_bytes: int = POOL_BYTES,
        peers: Sequence[Peer] = (),
    ) -> None:
        """Raise NoGpuError without a GPU, and ValueError if there is no such device.

        warm: every launch works on the same slots, which may then be in L2. repeats: samples a row, at least 9.
        peers: measured beside packed decode.
        """
        self._peers = peers
        cupy = self._cupy = require_gpu()
        count = cupy.cuda.runtime.getDeviceCount()
        if not 0 <= device < count:
            raise ValueError(f"there is no GPU {device}; CuPy finds {count}, numbered from 0")
        self._device = cupy.cuda.Device(device)
        l2 = int(cupy.cuda.runtime.getDeviceProperties(device)["l2CacheSize"])
        self.protocol = Protocol(
            backend="cuda",
            timer="CUDA graph replays, by events",
            l2="warm" if warm else "cold",
            repeats=repeats,
            device=device,
            reuse_bytes=0 if warm else max(REUSE_BYTES, REUSE_L2 * l2),
            pool_bytes=pool_bytes,
        )
        self._state: Any = None

    def measure(self, case: Case, stage: Stage) -> list[Row]:
        """Judge, then time; a row for each part of the case. Raises MemoryError if state and operands do not fit."""
        with self._device:
            return self._measure(case, stage, np.random.default_rng(case.B))

    def _measure(self, case: Case, stage: Stage, rng: np.random.Generator) -> list[Row]:
        cupy = self._cupy
        stage("making operands")
        state = self._state_for(case, rng)
        rotation = plan_rotation(case.B, case.slot_bytes, len(state) - 1, self.protocol.reuse_bytes)
        memory = Memory(cupy.asarray, cupy.asnumpy, cupy.zeros)
        workload = WORKLOADS[case.operation](case, memory, state, rotation, rng)
        stage("comparing with float64")
        verdict = workload.judge()
        check_errors(self._device.id)
        if verdict.complaint:
            return [make_row(case, verdict)]

        stage("preparing launches")
        parts = workload.parts()
        forms = {name: workload.yardsticks(name) for name in dict.fromkeys(part.yardstick for part in parts)}
        again = rotation.launches // rotation.groups
        asked = [part.calls for part in parts] + [calls for each in forms.values() for calls in each]
        if self._peers:
            stage("preparing peers")
        challenges = [meet(peer, workload, rng) for peer in self._peers if isinstance(workload, PackedDecode)]
        for each in challenges:
            self._rehearse(each, rotation.groups)
        asked_of_peers = [each.calls(rotation.groups) for each in challenges]
        stage("timing")
        samples = self._replay(
            [Replayed([*calls] * again, rotation.launches) for calls in asked]
            # A peer may allocate: what it needs is there before the capture.
            + [
                Replayed(calls * again, rotation.launches, rotation.groups)
                for calls in asked_of_peers
                if calls
            ]
        )
        check_errors(self._device.id)
        of_peers = iter(samples[len(asked) :])
        yardsticks, rest = {}, samples[len(parts) : len(asked)]
        for name, alternatives in forms.items():
            yardsticks[name], rest = rest[: len(alternatives)], rest[len(alternatives) :]
        reuse_bytes = rotation.groups * case.B * case.slot_bytes
        short = reuse_bytes < self.protocol.reuse_bytes
        alike = {
            "note": f"only {reuse_bytes / 1e6:.3g} MB of state between two uses of a slot" if short else "",
            "launches": rotation.launches,
            "reuse_bytes": reuse_bytes,
        }
        rows = [
            make_row(
                part.case,
                verdict,
                **summarize(taken),
                **_yardstick(part, yardsticks[part.yardstick]),
                **_kernel(part),
                **alike,
                bytes_moved=part.bytes_moved,
                host_eager_us=self._host_us(part.eager, float(np.median(taken))),
                host_bound_us=self._host_us(part.bound, float(np.median(taken))),
            )
            for part, taken in zip(parts, samples[: len(parts)], strict=True)
        ]
        for met, calls in zip(challenges, asked_of_peers, strict=True):
            if not calls:
                rows.append(met.row())
                continue
            taken = next(of_peers)
            measured = {**summarize(taken), **_yardstick(parts[0], yardsticks[parts[0].yardstick]), **alike}
            host_us = self._host_us(met.eager, float(np.median(taken)))
            rows.append(met.row(**measured, bytes_moved=parts[0].bytes_moved, host_eager_us=host_us))
            met.release()
        return rows

    def _state_for(self, case: Case, rng: np.random.Generator) -> Any:
        """A pool [P, HV, V, K] of random data with at least B usable slots; kept for the next case if it will do."""
        shape = (case.HV, case.V, case.K)
        if self._state is not None and self._state.shape[1:] == shape and len(self._state) > case.B:
            return self._state
        self._state = None
        self._cupy.get_default_memory_pool().free_all_blocks()
        free, _ = self._device.mem_info
        fits = int(free * 0.9) // case.slot_bytes - 1  # the rest is for operands and outputs
        if fits < case.B:
            raise MemoryError(
                f"{case.B} states of {case.slot_bytes:,} bytes, and {free:,} bytes of GPU memory free"
            )
        wanted = max(case.B, -(-self.protocol.pool_bytes // case.slot_bytes))
        pool = StatePool(min(wanted, fits), case.HV, case.K, case.V, device=self._device.id)
        pool[0][:] = self._cupy.asarray(random_state(case, 1, rng))
        self._state = pool[0]
        return self._state

    def _replay(self, sequences: Sequence[Replayed]) -> list[list[float]]:
        """Times in microseconds: one graph a sequence, replayed in turn."""
        cupy = self._cupy
        stream = cupy.cuda.Stream(non_blocking=True)
        self._device.synchronize()  # such a stream does not wait for what was queued on the default one
        with stream:
            graphs = [_capture(stream, each.calls, each.eager) for each in sequences]
            for graph in graphs:
                graph.launch(stream)  # warm: uploads it, and raises the clocks
            marks = [stream.record()]
            for _ in range(self.protocol.repeats):
                for graph in graphs:
                    graph.launch(stream)
                    marks.append(stream.record())
            stream.synchronize()
        spans = [1e3 * cupy.cuda.get_elapsed_time(start, end) for start, end in pairwise(marks)]
        n = len(sequences)
        return [[span / each.times for span in spans[i::n]] for i, each in enumerate(sequences)]

    def _rehearse(self, met: Met, groups: int) -> None:
        """Capture a peer once on a stream of its own: what cannot be captured must not spoil the others' times."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        self._device.synchronize()
        calls = met.calls(groups)
        try:
            with stream:
                _capture(stream, calls, groups)
                stream.synchronize()
        except Exception as cause:  # whatever a stranger's code raises
            met.give_up(cause)
        else:
            met.release()  # memory of that stream is of no use to another

    def _host_us(self, call: Call, gpu_us: float) -> float:
        """Wall clock of a call that is not waited for; the queue is emptied before it fills up.

        gpu_us: what the GPU takes for one. Where that is long, a few samples have to do.
        """
        samples: list[float] = []
        for _ in range(max(MIN_HOST_SAMPLES, min(HOST_SAMPLES, int(HOST_BUDGET_US / (HOST_CALLS * gpu_us))))):
            self._device.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            samples.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        self._device.synchronize()
        return float(np.median(samples))


def _capture(stream: Any, calls: Sequence[Call], eager: int) -> Any:
    for call in calls[:eager]:
        call()  # eager: what CUDA loads lazily is not loaded during a capture
    stream.begin_capture()
    try:
        for call in calls:
            call()
    finally:
        graph = stream.end_capture()
    return graph


def _yardstick(part: Part, forms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The fields of a row that its yardstick decides: the form with the smallest median."""
    samples = min(forms, key=lambda each: float(np.median(each)))
    case = part.case
    return {
        "yardstick": part.yardstick,
        "yardstick_us": float(np.median(samples)),
        "yardstick_samples_us": tuple(samples),
        "yardstick_bytes": yardstick.bytes_moved(part.yardstick, case.B, case.HV, case.V, case.K, case.t),
    }


def _kernel(part: Part) -> dict[str, Any]:
    """The fields of a row that its kernel decides; nothing for a row with several."""
    for call in part.kernels:
        if call.kernel is not None:
            return {
                "variant": call.variant,
                "registers": call.registers,
                "local_bytes": call.kernel.local_bytes,
                "shared_bytes": call.kernel.shared_bytes,
                "source_digest": call.kernel.source_digest,
            }
        return {"variant": call.variant}
    return {}


class HostTimer:
    """Measures the NumPy backend: enough to see that it works, no yardstick."""

    def __init__(self, *, repeats: int, peers: Sequence[Peer] = ()) -> None:
        self._peers = peers
        self.protocol = Protocol("numpy", "plain calls, by wall clock", l2="unknown", repeats=repeats)

    def measure(self, case: Case, stage: Stage) -> list[Row]:
        """Judge, then time; a row for each part of the case. Raises MemoryError if the state does not fit."""
        rng = np.random.default_rng(case.B)
        stage("making operands")
        state = StatePool(case.B + 1, case.HV, case.K, case.V, device="cpu")[0]
        state[:] = random_state(case, len(state), rng)
        memory = Memory(np.asarray, np.array, np.zeros)
        workload = WORKLOADS[case.operation](case, memory, state, Rotation(1, 1, 0), rng)
        stage("comparing with float64")
        verdict = workload.judge()
        check_errors(-1)
        if verdict.complaint:
            return [make_row(case, verdict)]
        stage("timing")
        parts = workload.parts()
        rows = [
            make_row(
                part.case,
                verdict,
                **summarize(self._samples(part.bound)),
                **_kernel(part),
                bytes_moved=part.bytes_moved,
            )
            for part in parts
        ]
        for peer in self._peers:
            if isinstance(workload, PackedDecode):
                met = meet(peer, workload, rng)
                timed = summarize(self._samples(met.eager)) if met.calls(1) else {}
                rows.append(met.row(**timed, bytes_moved=parts[0].bytes_moved))
        return rows

    def _samples(self, call: Call) -> list[float]:
        call()
        samples = []
        for _ in range(self.protocol.repeats):
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples
