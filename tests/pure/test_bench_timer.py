# SPDX-License-Identifier: Apache-2.0
"""What the GPU timer does with a GPU, on one made of NumPy and a clock of our own: every launch takes what we say."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kda_cupy import launch
from kda_cupy.bench import challenge, decode, speculation, step, timing
from kda_cupy.bench.cases import Case, random_state
from kda_cupy.bench.challenge import Comparison
from kda_cupy.bench.judge import Verdict
from kda_cupy.bench.peers import Peer
from kda_cupy.modules import Kernel
from kda_cupy.pool import StatePool

US = {
    "verify": 3.0,
    "commit": 2.0,
    "packed_decode": 2.5,
    "step": 2.25,
    "conv": 1.0,
    "R": 1.5,
    "R wide": 1.25,
    "RW": 2.0,
    "SNAP": 4.0,
}
DECODE = Case("kda", H=1, HV=2, K=16, V=8, B=3)
ROUND = Case("kda", H=1, HV=1, B=2, operation="round", t=2, mode="rings", accept=1)


class Machine:
    """A GPU whose launches advance a clock, and do their work when they are first captured."""

    def __init__(self):
        self.now_us, self.capturing, self.history = 0.0, None, []

    def run(self, name, work=lambda: None):
        if self.capturing is None:
            self.now_us += US[name]
            work()
        else:
            self.capturing.append(name)
        self.history.append(name)

    def cupy(self):
        machine = self

        class Graph:
            def __init__(self, names):
                self.names = names

            def launch(self, stream):
                machine.history.append(("replay", self.names[0], len(self.names)))
                machine.now_us += sum(US[name] for name in self.names)

        class Stream:
            def __init__(self, non_blocking):
                assert non_blocking

            __enter__ = __exit__ = lambda self, *_: None

            def begin_capture(self):
                machine.capturing = []

            def end_capture(self):
                names, machine.capturing = machine.capturing, None
                return Graph(names)

            def record(self):
                return machine.now_us

            def synchronize(self):
                pass

        class Device:
            def __init__(self, number):
                self.id, self.mem_info = -1, (1 << 26, 1 << 27)  # the package knows -1 as the host

            __enter__ = __exit__ = lambda self, *_: None

            def synchronize(self):
                machine.history.append("device synchronized")

        runtime = SimpleNamespace(
            getDeviceCount=lambda: 1, getDeviceProperties=lambda number: {"l2CacheSize": 1000}
        )
        return SimpleNamespace(
            asarray=np.array, asnumpy=np.array, zeros=np.zeros,
            get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
            cuda=SimpleNamespace(
                runtime=runtime, Device=Device, Stream=Stream,
                get_elapsed_time=lambda start, end: (end - start) / 1e3,
            ),
        )  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    cupy = made.cupy()
    monkeypatch.setattr(timing, "require_gpu", lambda: cupy)
    monkeypatch.setattr(timing, "StatePool", lambda *sizes, device: StatePool(*sizes, device="cpu"))
    monkeypatch.setattr(timing, "REUSE_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "HOST_CALLS", 2)
    monkeypatch.setattr(timing, "HOST_SAMPLES", 5)

    def bind(operation, *operands, **options):
        call = launch.bind(operation, *operands, **options)
        names = {
            "kda_decode_mtp": "verify",
            "kda_commit": "commit",
            "kda_decode_step": "step",
            "gdn_decode_step": "step",
            "causal_conv1d_update": "conv",
        }
        name = names.get(operation.__name__, "packed_decode")
        kernel = Kernel(None, f"{name}[..]", 64, 0, "0123456789abcdef", 1024)
        return Bound(made, name, call, kernel)

    class Bound:
        def __init__(self, machine, name, call, kernel):
            self.machine, self.name, self.call, self.kernel = machine, name, call, kernel
            self.bytes_moved, self.variant, self.registers = call.bytes_moved, kernel.variant, 64

        def __call__(self):
            self.machine.run(self.name, self.call)

    def yardstick(name):
        return lambda *_: made.run(name)

    def state_yardsticks(moves, state, slots):
        forms = ("R", "R wide") if moves == "R" else (moves,)
        return [[yardstick(form) for _ in slots] for form in forms]

    for module in (decode, speculation, step):
        monkeypatch.setattr(module, "bind", bind)
        monkeypatch.setattr(module, "state_yardsticks", state_yardsticks)
    monkeypatch.setattr(speculation, "read_and_copy", lambda *_: yardstick("SNAP"))
    return made


def measure(case, **options):
    stages = []
    timer = timing.GpuTimer(repeats=9, pool_bytes=8 << 20, **options)
    return timer.measure(case, stages.append), stages, timer


def test_a_decode_beside_its_yardstick(machine):
    (row,), stages, timer = measure(DECODE)
    assert stages == ["making operands", "comparing with float64", "preparing launches", "timing"]
    assert row.status == "timed"
    assert row.median_us == pytest.approx(US["packed_decode"])
    assert (row.yardstick, row.yardstick_us) == ("RW", pytest.approx(US["RW"]))
    assert row.ratio == pytest.approx(1.25)
    assert row.yardstick_bytes == 2 * 3 * 2 * 8 * 16 * 4
    assert (row.registers, row.shared_bytes, row.source_digest) == (64, 1024, "0123456789abcdef")
    assert len(row.samples_us) == len(row.yardstick_samples_us) == 9
    assert row.reuse_bytes >= timer.protocol.reuse_bytes == 1 << 20
    assert row.launches >= 20


@pytest.mark.parametrize(("mode", "yardstick", "best"), [("rings", "R", 1.25), ("snapshots", "SNAP", 4.0)])
def test_a_round_apart_and_together(machine, mode, yardstick, best):
    rows, _, _ = measure(replace(ROUND, mode=mode))
    assert [row.operation for row in rows] == ["verify", "commit", "round"]
    assert [row.median_us for row in rows] == pytest.approx([3.0, 2.0, 5.0])
    assert [row.yardstick for row in rows] == [yardstick, "RW", "RW"]
    assert [row.yardstick_us for row in rows] == pytest.approx([best, 2.0, 2.0])  # the faster form of R
    assert rows[0].yardstick_bytes == 2 * 65536 * (1 if mode == "rings" else 3)
    assert rows[0].variant and rows[1].variant and not rows[2].variant
    assert all(row.host_bound_us > 0 and row.host_eager_us > 0 for row in rows)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_step_beside_its_chain(machine, op):
    fused, chain = measure(Case(op, H=1, HV=2, B=2, operation="step", norm=True))[0]
    assert (fused.form, chain.form) == ("normed", "chain")
    assert (fused.median_us, chain.median_us) == pytest.approx(
        (2.25, 1.0 + 2.5)
    )  # of one token, not of one launch
    assert (fused.ratio, chain.ratio) == pytest.approx((2.25 / 2, 3.5 / 2))
    assert fused.launches == chain.launches >= 20
    assert (fused.registers, chain.registers) == (64, 0)  # two kernels have no one number
    replays = [each[1:] for each in machine.history if isinstance(each, tuple)]
    n = fused.launches
    assert replays == [("step", n), ("conv", 2 * n), ("RW", n)] * 10


def test_graphs_are_replayed_in_turn_and_only_after_work_of_other_streams(machine):
    rows, _, _ = measure(ROUND)
    replays = [each for each in machine.history if isinstance(each, tuple)]
    launches = rows[0].launches
    turn = [
        ("replay", "verify", launches), ("replay", "commit", launches), ("replay", "verify", 2 * launches),
        ("replay", "R", launches), ("replay", "R wide", launches), ("replay", "RW", launches),
    ]  # fmt: skip
    assert replays == turn * 10  # a warm one, and nine that are timed
    assert "device synchronized" in machine.history[: machine.history.index(replays[0])]
    first = machine.history.index("verify")
    assert Counter(machine.history[first : machine.history.index(replays[0])])["verify"] >= launches + 2


def test_rings_are_full_before_they_are_committed(machine):
    """The first replay is the verify's: a commit of zeros would be faster than one of data."""
    measure(ROUND)
    order = [each[1] for each in machine.history if isinstance(each, tuple)]
    assert order[:2] == ["verify", "commit"]


def test_warm_launches_use_the_same_slots(machine):
    rows, _, timer = measure(ROUND, warm=True)
    assert timer.protocol.l2 == "warm"
    assert rows[0].launches == 20
    assert rows[0].reuse_bytes == ROUND.B * ROUND.slot_bytes
    assert rows[0].note == ""


def test_too_small_a_pool_is_said_in_the_row(machine, monkeypatch):
    monkeypatch.setattr(timing, "REUSE_BYTES", 1 << 26)
    (row,), _, _ = measure(DECODE)
    assert row.note.startswith("only 8.39 MB of state between two uses of a slot")


def test_what_does_not_fit_is_a_memory_error(machine):
    with pytest.raises(MemoryError, match="states of 65,536 bytes"):
        measure(replace(ROUND, B=2000))


def test_a_pool_is_kept_for_the_next_case(machine):
    timer = timing.GpuTimer(repeats=9, pool_bytes=4 << 20)
    quiet = lambda _: None  # noqa: E731
    timer.measure(ROUND, quiet)
    kept = timer._state
    timer.measure(replace(ROUND, B=1), quiet)
    assert timer._state is kept
    assert random_state(ROUND, 1, np.random.default_rng(0)).shape[1:] == kept.shape[1:]


def test_a_wrong_answer_is_not_timed(machine, monkeypatch):
    monkeypatch.setattr(speculation, "kda_commit", lambda **_: None)
    (row,), stages, _ = measure(ROUND)
    assert row.status == "wrong" and "error of state" in row.note
    assert "timing" not in stages


@pytest.mark.parametrize(("us", "samples"), [(2.5, 5), (1e5, timing.MIN_HOST_SAMPLES)])
def test_host_time_of_long_kernels_takes_fewer_calls(us, samples, machine, monkeypatch):
    monkeypatch.setitem(US, "packed_decode", us)
    measure(DECODE)
    replays = [place for place, each in enumerate(machine.history) if isinstance(each, tuple)]
    behind = machine.history[replays[-1] :]
    assert behind.count("packed_decode") == samples * timing.HOST_CALLS


def stand_in(machine, monkeypatch, call):
    """A peer that is right, and does that when it is called."""

    class Challenge:
        def __init__(self, peer, workload):
            pass

        def compare(self, rng):
            return Comparison(Verdict(1e-3, 1e-7), 2e-3)

        def call(self, group):
            call()

        def release(self):
            machine.history.append("released")

    monkeypatch.setattr(challenge, "Challenge", Challenge)
    monkeypatch.setattr(challenge, "_on_current_stream", lambda call: call())


def test_a_peer_takes_its_turn_and_is_all_there_before_it_is_captured(machine, monkeypatch):
    """What a peer allocates in its first call for a group of slots would be allocated during the capture."""
    monkeypatch.setitem(US, "peer", 6.0)

    stand_in(machine, monkeypatch, lambda: machine.run("peer"))
    ours, theirs = measure(DECODE, peers=[Peer("them", print)])[0]
    assert (ours.peer, theirs.peer, theirs.difference) == ("", "them", 2e-3)
    assert (ours.median_us, theirs.median_us) == (pytest.approx(2.5), pytest.approx(6.0))
    assert theirs.ratio == pytest.approx(3.0) and theirs.yardstick_us == ours.yardstick_us
    assert (theirs.launches, theirs.reuse_bytes) == (ours.launches, ours.reuse_bytes)
    assert theirs.host_bound_us is None and theirs.host_eager_us > 0
    replays = [each for each in machine.history if isinstance(each, tuple)]
    assert replays[2:3] == [("replay", "peer", ours.launches)] and len(replays) == 3 * 10
    first, graphs = machine.history.index("peer"), machine.history.index(replays[0])
    groups = ours.reuse_bytes // (DECODE.B * DECODE.slot_bytes)
    rehearsed = 2 * groups  # eager, and captured on a stream of its own
    assert machine.history[first:graphs].count("peer") == rehearsed + groups + ours.launches
    assert machine.history[-1] == "released"


def test_a_peer_that_cannot_be_captured_spoils_nothing(machine, monkeypatch):
    def allocate():
        if machine.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nlong advice")

    stand_in(machine, monkeypatch, allocate)
    ours, theirs = measure(DECODE, peers=[Peer("them", print)])[0]
    assert ours.median_us == pytest.approx(2.5) and ours.status == "timed"
    assert (theirs.peer, theirs.status) == ("them", "skipped")
    assert theirs.note == "RuntimeError: operation not permitted when stream is capturing"
    assert machine.history.count("released") == 1 and machine.capturing is None
