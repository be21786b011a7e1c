# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench host`` on a GPU: every row is there, and the numbers stand in the order that they must."""

from dataclasses import replace

from click.testing import CliRunner

from kda_cupy.bench.cases import PRESETS
from kda_cupy.bench.host import measure_host
from kda_cupy.cli import main
from kda_cupy.guard import check_errors


def test_rows_of_every_operation_and_library():
    check_errors()
    rows = measure_host(replace(PRESETS["kimi-k3-tp16"], B=2), samples=3)
    check_errors()  # every slot and length of the benchmark is in range
    libraries = ["CuPy"]
    try:
        import torch

        libraries += ["torch"] * torch.cuda.is_available()
    except ImportError:
        pass
    operations = ["kda_packed_decode", "kda_decode_mtp", "kda_commit"]
    assert [(row.operation, row.arrays) for row in rows] == [
        (operation, library) for operation in operations for library in libraries
    ]
    for row in rows:
        assert 0 < row.bound_us < row.eager_us, row
        assert 0 <= row.bridge_us < row.eager_us, row
        if row.arrays == "torch":
            assert row.bridge_us > 1, "25 conversions do not come for nothing"


def test_the_command():
    result = CliRunner(env={"COLUMNS": "100"}).invoke(
        main, ["bench", "host", "--preset", "qwen3-next-tp4", "--repeats", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "gdn_packed_decode  CuPy" in result.output
