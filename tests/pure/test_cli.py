# SPDX-License-Identifier: Apache-2.0
"""The commands that live in cli.py, and that every command is there."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kda_cupy
from kda_cupy.cli import main

TRACES = sorted((Path(__file__).parents[1] / "data").glob("*.npz"))


def run(*arguments: object) -> object:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_help_names_every_command_and_fits_a_terminal() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("bench", "doctor", "errors", "replay"))
    assert max(map(len, result.output.splitlines())) <= 80


def test_version() -> None:
    assert kda_cupy.__version__ in run("--version").output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_replay_of_recorded_traces(dtype: str) -> None:
    assert TRACES
    result = run("replay", *TRACES, "--backend", "numpy", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert all(path.name in result.output for path in TRACES) and "too far" not in result.output


def test_replay_says_so_when_an_error_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_cupy.cli.CHAINED_BOUND", 1e-12)
    result = run("replay", TRACES[0], "--backend", "numpy")
    assert result.exit_code == 1 and "too far" in result.output


def test_replay_of_something_else(tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    other.write_bytes(b"no archive")
    result = run("replay", other, "--backend", "numpy")
    assert result.exit_code == 2 and "no .npz archive" in result.output and "Traceback" not in result.output


def test_replay_on_cuda_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    result = run("replay", TRACES[0], "--backend", "cuda")
    assert (
        result.exit_code == 2 and "KDA-COMPILER-NO-CUPY" in result.output and "Traceback" not in result.output
    )
