# SPDX-License-Identifier: Apache-2.0
"""The benchmark on a GPU: the yardstick moves what it says it moves, and one small run goes from end to end."""

import numpy as np
import pytest
from click.testing import CliRunner
from problems import make_state, same_bits, to_library

from kda_cupy import sources
from kda_cupy.bench import command
from kda_cupy.bench.judge import OUT_BOUNDS, STATE_BOUND
from kda_cupy.bench.record import Record
from kda_cupy.bench.timing import MIN_LAUNCHES, REUSE_BYTES
from kda_cupy.bench.yardstick import read_write

P = 9


@pytest.mark.parametrize(("HV", "V", "K"), [(3, 128, 128), (2, 64, 64), (1, 60, 100), (2, 1, 4)])
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
