# SPDX-License-Identifier: Apache-2.0
"""What the scripts make of benchmark records, and that records of earlier versions can still be read."""

import json
from pathlib import Path

from kda_cupy.bench.cases import Case
from kda_cupy.bench.record import Protocol, Record, make_row
from scripts import write_gpu_record, write_readme_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored(*operations, complete=True):
    record = Record({"cpu": "a CPU"}, Protocol("cuda", "graphs", "cold", 9), complete=complete)
    record.rows = [
        make_row(Case("kda", 1, 1, operation=operation), median_us=1.0) for operation in operations
    ]
    return json.loads(record.to_json())


def test_the_benchmark_in_a_record_of_a_gpu_check(tmp_path):
    path = tmp_path / "bench.json"
    assert write_gpu_record.benchmark(path) == {"rows": [], "complete": False}
    path.write_text(json.dumps(stored("decode", "verify", complete=False)))
    kept = write_gpu_record.benchmark(path)
    assert (kept["schema"], kept["schema_version"], kept["complete"]) == ("kda_cupy.bench", 2, False)
    assert [row["operation"] for row in kept["rows"]] == ["decode", "verify"]
    assert "environment" not in kept  # what of it is published stands beside it


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
