# SPDX-License-Identifier: Apache-2.0
"""README says what is true: its code runs as pasted, its output is what comes, its table is the newest record's."""

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from kda_cupy.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_prints_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue() == printed


def test_scripts_and_links_exist() -> None:
    for command in re.findall(r"^\./(\S+)", README, re.MULTILINE):
        assert (ROOT / command).is_file()
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_commands_exist() -> None:
    for words in re.findall(r"`kda-cupy ([a-z ]+)", README):
        result = CliRunner().invoke(main, [*words.split(), "--help"])
        assert result.exit_code == 0, words


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """scripts/write_readme_table.py"""
    spec = importlib.util.spec_from_file_location(
        "write_readme_table", ROOT / "scripts" / "write_readme_table.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_newest_records(module: ModuleType) -> None:
    if not list((ROOT / "benchmarks" / "results").glob("*.json")):
        pytest.fail("there is no record of a GPU run")
    assert all(module.START.format(marker) in README for marker in module.TABLES)
    assert module.with_tables(README) == README


def test_a_table_of_verify_commit_and_round(module: ModuleType) -> None:
    shape = {"op": "kda", "H": 12, "HV": 12, "K": 128, "t": 8, "mode": "rings", "yardstick_us": 2.0}
    rows = [
        shape
        | {"operation": operation, "B": B, "accept": accept, "median_us": us * B, "yardstick": yardstick}
        for operation, accept, us, yardstick in (
            ("round", 4, 5, "RW"),
            ("verify", 0, 3, "R"),
            ("decode", 0, 2, "RW"),
        )
        for B in (1, 8, 64, 256)
    ]
    rows += [
        shape | {"operation": "verify", "t": 16, "B": 64, "accept": 0, "median_us": 9.0, "yardstick": "R"}
    ]
    rows[-2] |= {"median_us": None, "status": "wrong"}  # a decode, in another table
    rows[0] |= {"median_us": None, "status": "skipped"}
    text = module.table({"gpu": "NVIDIA H200", "bench": {"rows": rows}}, "record.json", ("verify", "round"))
    assert text.splitlines()[2:] == [
        "| | | N=1 | N=8 | N=64 | N=256 |",
        "|---|---|---|---|---|---|",
        "| verify t=8, rings, H=12 | R | 3.00 (x1.50) | 24.0 (x12.00) | 192 (x96.00) | 768 (x384.00) |",
        "| round t=8 keeping 4, rings, H=12 | RW | skipped | 40.0 (x20.00) | 320 (x160.00) | 1280 (x640.00) |",
    ]


def test_the_record_was_made_from_these_kernels() -> None:
    """A kernel change owes a record: CI cannot run one."""
    from kda_cupy import sources

    newest = max((ROOT / "benchmarks" / "results").glob("*.json"))
    digests = json.loads(newest.read_text(encoding="utf-8"))["kernel_digests"]
    stale = {name for name in sources.kernel_names() if digests.get(name) != sources.digest(name)}
    assert not stale, (
        f"{sorted(stale)} changed after {newest.name}: run scripts/gpu_check.sh on a GPU and commit its record"
    )
