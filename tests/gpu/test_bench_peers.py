# SPDX-License-Identifier: Apache-2.0
"""Peers on a GPU: in the same graphs' turn, on the same memory."""

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from kda_cupy.bench import command
from kda_cupy.bench.record import Record

EXAMPLE = Path(__file__).parents[2] / "examples" / "peer_in_plain_torch.py"


def rows_of(peer, tmp_path, *arguments):
    path = tmp_path / "record.json"
    result = CliRunner().invoke(
        command.bench,
        ["decode", "--backend", "cuda", "--heads", "4", "--batch", "2,24", "--repeats", "9", "--json", str(path),
         "--peer", str(peer), *arguments],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return Record.from_json(path.read_text()).rows


def check(rows, name):
    assert [(row.B, row.peer) for row in rows] == [(2, ""), (2, name), (24, ""), (24, name)]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert ours.status == theirs.status == "timed", theirs.note
        assert theirs.difference < 1e-2 and theirs.error_state < 1e-4
        assert len(theirs.samples_us) == 9 and theirs.yardstick_us == ours.yardstick_us
        assert theirs.median_us > 0.8 * theirs.yardstick_us  # it moves the state as well


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_plain_torch(op, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    check(rows_of(EXAMPLE, tmp_path, "--op", op), "torch")


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_fla(op, tmp_path):
    if not all(importlib.util.find_spec(name) for name in ("torch", "triton", "fla")):
        pytest.skip("fla-core, torch and triton are not all installed")
    check(rows_of("fla", tmp_path, "--op", op), "fla")
