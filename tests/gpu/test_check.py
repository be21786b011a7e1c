# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy check`` on a GPU."""

import json

import pytest
from click.testing import CliRunner

from kda_cupy.cli import main


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_this_gpu_is_right(dtype):
    result = CliRunner().invoke(main, ["check", "--backend", "cuda", "--dtype", dtype, "--json", "-"])
    assert result.exit_code == 0, result.stderr
    stored = json.loads(result.stdout)
    assert stored["passed"] and stored["backend"] == "cuda"
    assert all(each["error_out"] > 0 for each in stored["findings"])
