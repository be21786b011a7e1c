# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench host`` on a CuPy whose kernels do nothing: which rows there are, and what they time."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fake_cupy import machine

from kda_cupy.bench import host
from kda_cupy.bench.cases import PRESETS
from kda_cupy.cli import main

CASE = replace(PRESETS["kimi-k3-tp16"], B=2)


def run(*arguments):
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, ["bench", "host", *arguments])


@pytest.mark.parametrize(
    ("preset", "operations"),
    [
        ("kimi-k3-tp16", ["kda_packed_decode", "kda_decode_mtp", "kda_commit"]),
        ("qwen3-next-tp4", ["gdn_packed_decode"]),
    ],
)
def test_every_operation_that_knows_the_case_has_a_row(preset, operations):
    with machine():
        rows = host.measure_host(replace(PRESETS[preset], B=2), samples=1)
    assert [row.operation for row in rows if row.arrays == "CuPy"] == operations
    assert all(0 <= row.bridge_us < row.eager_us and row.bound_us < row.eager_us for row in rows)
    assert all(row.operands >= 8 for row in rows)


def test_calls_are_counted_and_land_on_the_device():
    with machine(gpus=2) as cupy:
        host.measure_host(CASE, device=1, samples=3)
        launched = [device for what, device, _ in cupy.log if what == "launch"]
    assert launched == [1] * (3 * 2 * (1 + 3 * host.CALLS))  # three operations, bound and eager


def test_the_bridge_is_timed_with_all_that_it_does(monkeypatch):
    """As for torch: arrays of another library are adopted, the written ones as such, and kept alive."""
    seen = []
    monkeypatch.setattr(host.bridge, "all_native", lambda arrays: False)
    monkeypatch.setattr(
        host.bridge, "adopt_all", lambda arrays, written: seen.append(("adopt", set(written)))
    )
    monkeypatch.setattr(host.bridge, "after_launch", lambda device, views: seen.append(("close", device)))
    host._cross({"x": object()}, frozenset(("out",)), 1)
    assert seen == [("adopt", {"out"}), ("close", 1)]


def test_the_command_prints_a_table_or_json():
    with machine():
        table, data = (
            run("--preset", "qwen3-next-tp4", "--repeats", "1"),
            run("--preset", "qwen3-next-tp4", "--json"),
        )
    assert table.exit_code == data.exit_code == 0, table.output
    assert "bridge us" in table.output
    assert "gdn_packed_decode  CuPy" in table.output
    assert "qwen3-next-tp4: H=4 HV=8 B=8 bfloat16; medians of 1 x 20 calls" in table.output
    (row,) = json.loads(data.stdout)
    assert row["operation"] == "gdn_packed_decode"
    assert row["eager_us"] > 0


@pytest.mark.parametrize(
    ("where", "arguments", "words"),
    [
        ({"cupy": False}, (), "KDA-COMPILER-NO-CUPY"),
        ({"gpus": 0}, (), "KDA-COMPILER-NO-GPU"),
        ({"gpus": 2}, ("--device", "2"), "there is no GPU 2; CuPy finds 2"),
    ],
)
def test_without_a_gpu_it_says_so(where, arguments, words):
    with machine(**where):
        result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
