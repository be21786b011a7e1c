# SPDX-License-Identifier: Apache-2.0
"""What the scripts make of benchmark records, and that records of earlier versions can still be read."""

import json
from pathlib import Path

import pytest

from kda_cupy.bench.cases import Case
from kda_cupy.bench.record import Protocol, Record, make_row
from scripts import write_gpu_record, write_readme_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored(*operations, repeats=9, complete=True):
    record = Record({"cpu": "a CPU"}, Protocol("cuda", "graphs", "cold", repeats), complete=complete)
    record.rows = [
        make_row(Case("kda", 1, 1, operation=operation), median_us=1.0) for operation in operations
    ]
    return json.loads(record.to_json())


def test_records_are_merged_in_order():
    whole = write_gpu_record.merged([stored("decode"), stored("verify", "commit")])
    assert [row["operation"] for row in whole["rows"]] == ["decode", "verify", "commit"]
    assert (whole["schema"], whole["complete"]) == ("kda_cupy.bench", True)
    assert "environment" not in whole
    assert not write_gpu_record.merged([stored("decode"), stored("verify", complete=False)])["complete"]
    assert write_gpu_record.merged([]) == {"rows": [], "complete": False}


def test_records_of_two_methods_are_not_merged():
    with pytest.raises(ValueError, match="differ in protocol"):
        write_gpu_record.merged([stored("decode"), stored("verify", repeats=15)])


def test_newest_record_that_has_the_operations(tmp_path):
    for day, operations in (("01", ("verify", "commit", "round")), ("02", ("decode",)), ("03", ("verify",))):
        (tmp_path / f"2026-12-{day}.json").write_text(json.dumps({"bench": stored(*operations)}))
    newest = write_readme_table.newest_record
    assert newest(("decode",), tmp_path).name == "2026-12-02.json"
    assert newest(("verify",), tmp_path).name == "2026-12-03.json"
    assert newest(("verify", "commit", "round"), tmp_path).name == "2026-12-01.json"
    assert newest(("step",), tmp_path) is None


def test_a_record_of_the_first_version_is_read():
    bench = json.loads((RESULTS / "2026-12-01T0310-nvidia-h200.json").read_text())["bench"]
    assert bench["schema_version"] == 1
    rows = Record.from_json(json.dumps(bench | {"environment": {}})).rows
    assert len(rows) == len(bench["rows"])
    assert {(row.operation, row.yardstick, row.t, row.mode) for row in rows} == {("decode", "RW", 1, "")}
    assert rows[0].yardstick_bytes == 2 * rows[0].B * rows[0].HV * 128 * 128 * 4
    assert rows[0].ratio == bench["rows"][0]["ratio"]
