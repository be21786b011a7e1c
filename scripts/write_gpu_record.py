# SPDX-License-Identifier: Apache-2.0
"""Put what scripts/gpu_check.sh produced into one record, and fail if anything in it failed.

python scripts/write_gpu_record.py WORK_FOLDER RECORD_FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kda_cupy import environment, sources

#: What of the environment others need to read the numbers; folders and variables of one machine are nobody's business.
PUBLISHED = ("python", "numpy", "ml_dtypes", "cupy", "driver", "driver_release", "runtime", "nvrtc")
PUBLISHED_OF_GPU = ("name", "compute_capability", "multiprocessors", "l2_bytes", "memory_bytes", "clocks_mhz")


def test_counts(log: str) -> dict[str, int]:
    """Numbers in the last lines of one or several runs of pytest: ``{"passed": 777, "skipped": 3}``.

    ``crashed`` counts runs that ended neither well nor with failed tests, and those without a last line.
    """
    runs = re.findall(r"^exit code (\d+)$", log, re.MULTILINE)
    lines = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s.*$", log, re.MULTILINE)
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update({word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)})
    counts["crashed"] = max(len(runs) - len(lines), 0) + sum(code not in ("0", "1") for code in runs)
    return {word: number for word, number in counts.items() if number}


def sanitizer_summary(path: Path) -> dict[str, Any]:
    """What compute-sanitizer concluded, what pytest ran under it, and whether both are clean."""
    log = path.read_text(errors="replace")
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", log)
    tests = re.findall(r"\d+ passed.*", log)
    clean = log.rstrip().endswith("exit code 0") and bool(summary) and bool(tests)
    return {"summary": summary[-1:], "tests": tests[-1:], "clean": clean}


def benchmark(path: Path) -> dict[str, Any]:
    """The record of the benchmark, its environment left out; no rows if it did not come to one."""
    if not path.exists():
        return {"rows": [], "complete": False}
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in stored.items() if name not in ("environment", "kernel_digests")}


def main(work: Path, folder: Path) -> int:
    """Write the record of WORK into FOLDER; 0 if everything in it is good."""
    found: dict[str, Any] = environment.collect()
    gpu = found["gpus"][0]
    bench = benchmark(work / "bench.json")
    record: dict[str, Any] = {
        "schema": "kda_cupy.gpu_check",
        "schema_version": 2,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu["name"],
        "kernel_digests": {name: sources.digest(name) for name in sources.kernel_names()},
        "tests": test_counts((work / "tests.log").read_text(errors="replace")),
        "sanitizer": {tool: sanitizer_summary(work / f"{tool}.log") for tool in ("memcheck", "racecheck")},
        "planted_error_found": "Invalid __global__ write"
        in (work / "planted.log").read_text(errors="replace"),
        "environment": {name: found[name] for name in PUBLISHED}
        | {"gpu": {name: gpu[name] for name in PUBLISHED_OF_GPU}},
        "bench": bench,
    }
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower())
    path = folder / f"{record['date'][:16].replace(':', '')}-{slug}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    clean = {tool: summary["clean"] for tool, summary in record["sanitizer"].items()}
    print(f"wrote {path}: {record['tests']}, sanitizer clean: {clean}")
    tests = record["tests"]
    passed = tests.get("passed") and not any(
        tests.get(word) for word in ("failed", "errors", "error", "crashed")
    )
    timed = bench["complete"] and all(row["status"] == "timed" for row in bench["rows"])
    return 0 if passed and timed and all(clean.values()) and record["planted_error_found"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
