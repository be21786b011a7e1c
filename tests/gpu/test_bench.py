# SPDX-License-Identifier: Apache-2.0
"""The benchmark on a GPU: the yardsticks move what they say they move, and small runs go from end to end."""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from problems import make_state, same_bits, to_library

from kda_cupy import sources
from kda_cupy.bench import cases, command
from kda_cupy.bench.judge import CHAINED_BOUND, OUT_BOUNDS, STATE_BOUND
from kda_cupy.bench.record import Record
from kda_cupy.bench.timing import MIN_LAUNCHES, MIN_REPEATS, REUSE_BYTES, GpuTimer
from kda_cupy.bench.yardstick import NARROW, WIDE, read, read_and_copy, read_write

P = 9


SIZES = pytest.mark.parametrize(("HV", "V", "K"), [(3, 128, 128), (2, 64, 64), (1, 60, 100), (2, 1, 4)])


@SIZES
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_yardstick_scales_the_named_slots_and_nothing_else(HV, V, K, index_dtype):
    import cupy

    expected = make_state(np.random.default_rng(0), P, HV, V, K, slot_padding=12)
    state = to_library(expected, cupy)
    with_gaps = ((P - 1) * expected.strides[0] // 4 + HV * V * K,), (4,)
    indices = cupy.asarray(np.array([7, 99, -1, 99, P, 99, 2, 99], index_dtype))[::2]
    for factor in (-1.0, 3.0):
        read_write(state, indices, factor)()
        expected[[7, 2]] *= np.float32(factor)
        got, wanted = (
            xp.lib.stride_tricks.as_strided(x, *with_gaps) for xp, x in ((cupy, state), (np, expected))
        )
        assert same_bits(got, wanted)


@SIZES
@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=["narrow", "wide"])
def test_reads_leave_nothing_out(HV, V, K, shape):
    """One element that is not zero, wherever it lies, is the sum of its lane: R finds it, and writes nothing else."""
    import cupy

    elements = HV * V * K
    state = cupy.zeros((P, HV, V, K), np.float32)
    sink = cupy.zeros(1, np.float32)
    indices = cupy.asarray(np.array([7, -1, P, 2], np.int32))
    look = read(state, indices, sink, shape=shape, wanted=5.0)
    rng = np.random.default_rng(0)
    places = np.unique([0, 3, elements - 1, elements // 2, *rng.integers(0, elements, 40)])
    for slot in (7, 2):
        for place in places.tolist():
            flat = state[slot].reshape(-1)
            flat[place] = 5.0
            sink[:] = 0
            look()
            assert sink.get() == 5, (slot, place)
            flat[place] = 0
    sink[:] = 0
    state[[0, 1, 3, 4, 5, 6, 8]] = 5.0  # nobody names these
    before = state.copy()
    look()
    assert sink.get() == 0
    assert same_bits(state.get(), before.get())


@SIZES
def test_copies_are_scaled_once_more_each(HV, V, K):
    import cupy

    values = make_state(np.random.default_rng(0), P, HV, V, K, slot_padding=12)
    state = to_library(values, cupy)
    copies = cupy.full((6, 4, HV, V, K), 7.0, np.float32)
    slots = cupy.asarray(np.array([7, 2, -1, 5, P], np.int32))
    rows = cupy.asarray(np.array([3, 99, 1, 99, 0, 99, 6, 99, 2, 99], np.int64))[::2]  # 6 is past the end
    read_and_copy(state, slots, copies[:, :3], rows, 2.0)()
    expected = np.full(copies.shape, np.float32(7))
    for slot, row in ((7, 3), (2, 1)):
        for step in range(3):
            expected[row, step] = values[slot] * np.float32(2 ** (step + 1))
    assert same_bits(copies.get(), expected)
    assert same_bits(state.get(), np.asarray(values))


RUNS = {
    "cold": ((), REUSE_BYTES),
    "gdn": (("--op", "gdn", "--dtype", "float32"), REUSE_BYTES),
    "warm": (("--warm",), 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_from_end_to_end(name, tmp_path):
    options, reuse_bytes = RUNS[name]
    path = tmp_path / "record.json"
    arguments = ["--heads", "4", "--batch", "1,24", "--repeats", "9", "--json", str(path), *options]
    result = CliRunner().invoke(
        command.bench, ["decode", "--backend", "cuda", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    record = Record.from_json(path.read_text())
    assert record.complete
    assert record.protocol.backend == "cuda"
    assert record.protocol.l2 == ("warm" if name == "warm" else "cold")
    assert record.protocol.reuse_bytes >= reuse_bytes
    assert [row.B for row in record.rows] == [1, 24]
    for row in record.rows:
        assert row.status == "timed"
        assert row.note == ""
        assert 0 < row.error_out < OUT_BOUNDS[row.dtype]
        assert 0 < row.error_state < STATE_BOUND
        assert len(row.samples_us) == len(row.yardstick_samples_us) == 9
        assert 0 < row.min_us <= row.median_us <= row.p95_us
        assert row.launches >= MIN_LAUNCHES
        assert row.reuse_bytes >= record.protocol.reuse_bytes
        assert (
            row.ratio > 0.8
        )  # the operation does all that the yardstick does: far below 1, something is not counted
        assert row.host_bound_us > 0
        assert row.host_eager_us > row.host_bound_us
        assert row.registers > 0
        assert row.source_digest == sources.digest("packed_decode.cu")
    assert f"{record.rows[0].error_out:.2e}".replace("e-0", "e-") in result.stdout


SPECULATION = {
    "rings": ("--tokens", "4", "--accept", "2"),
    "snapshots": ("--mode", "snapshots", "--tokens", "3", "--gate", "bounded", "--norm", "--plain-windows"),
    "warm": ("--warm", "--tokens", "8", "--dtype", "float32", "--mode", "snapshots"),
}
#: A verify with rings writes little beside reading the state, and one with snapshots all that SNAP writes.
LEAST_RATIO = {"verify": 0.9, "commit": 0.8, "round": 1.0}


@pytest.mark.parametrize("name", SPECULATION)
def test_a_round_from_end_to_end(name, tmp_path):
    path = tmp_path / "record.json"
    arguments = [
        "--heads",
        "4",
        "--value-heads",
        "8",
        "--batch",
        "1,24",
        "--repeats",
        "9",
        "--json",
        str(path),
    ]
    result = CliRunner().invoke(
        command.bench, ["round", "--backend", "cuda", *arguments, *SPECULATION[name]], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    record = Record.from_json(path.read_text())
    assert [(row.operation, row.B) for row in record.rows] == [
        (operation, B) for B in (1, 24) for operation in ("verify", "commit", "round")
    ]
    for verify, commit, whole in zip(*[iter(record.rows)] * 3, strict=True):
        assert verify.yardstick == ("R" if name == "rings" else "SNAP")
        assert (commit.yardstick, whole.yardstick) == ("RW", "RW")
        assert whole.bytes_moved == verify.bytes_moved + commit.bytes_moved
        if name != "warm":  # cold, the two parts know nothing of each other
            assert 0.7 < whole.median_us / (verify.median_us + commit.median_us) < 1.3
        assert verify.source_digest == sources.digest("mtp_verify.cu")
        assert commit.source_digest == sources.digest("commit.cu")
    for row in record.rows:
        assert (row.status, row.note) == ("timed", "")
        assert 0 < row.error_out < max(OUT_BOUNDS[row.dtype], CHAINED_BOUND)
        assert 0 < row.error_state < CHAINED_BOUND
        assert len(row.samples_us) == len(row.yardstick_samples_us) == 9
        assert row.reuse_bytes >= record.protocol.reuse_bytes
        assert row.host_eager_us > row.host_bound_us > 0
        assert row.local_bytes == 0
        if name != "warm":
            assert row.ratio > LEAST_RATIO[row.operation]


def test_the_suite_from_end_to_end(tmp_path):
    path = tmp_path / "record.json"
    options = [
        "--quick",
        "--only",
        "decode",
        "--preset",
        "kimi-k3-tp8",
        "--repeats",
        "9",
        "--json",
        str(path),
    ]
    done = CliRunner().invoke(command.bench, ["suite", "--backend", "cuda", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    record = Record.from_json(path.read_text())
    assert record.kernel_digests == {name: sources.digest(name) for name in sources.kernel_names()}
    assert [(row.operation, row.B, row.local_bytes) for row in record.rows] == [
        ("decode", 1, 0),
        ("decode", 64, 0),
    ]
    assert "decode, us and ratio: kda H=12 bfloat16 bounded gate" in done.stdout
    same = CliRunner().invoke(command.bench, ["compare", str(path), str(path)], catch_exceptions=False)
    assert (same.exit_code, "2 same" in same.stdout) == (0, True)


@pytest.mark.parametrize("preset", ["kimi-k3-tp8", "qwen3-next"])
def test_whole_steps_are_timed_beside_their_chain(preset):
    timer = GpuTimer(0, warm=False, repeats=MIN_REPEATS)
    case = replace(cases.PRESETS[preset], operation="step", B=8, norm=True)
    fused, chain = timer.measure(case, lambda stage: None)
    assert [row.operation for row in (fused, chain)] == ["step", "chain"]
    assert all(row.status == "timed" and row.median_us > row.yardstick_us * 0.9 for row in (fused, chain))
    assert fused.registers > 0
