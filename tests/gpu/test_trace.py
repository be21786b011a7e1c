# SPDX-License-Identifier: Apache-2.0
"""What flash-linear-attention answered, replayed on CUDA."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kda_cupy.cli import main

TRACES = sorted((Path(__file__).parents[1] / "data").glob("*.npz"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_recorded_traces(dtype: str) -> None:
    result = CliRunner().invoke(main, ["replay", *map(str, TRACES), "--backend", "cuda", "--dtype", dtype])
    assert result.exit_code == 0, result.output
    assert all(path.name in result.output for path in TRACES) and "too far" not in result.output
