# SPDX-License-Identifier: Apache-2.0
"""``bench suite``, ``bench compare`` and ``report``: what is measured, what counts as a change, what pages show."""

import html.parser
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kda_cupy import cli, sources
from kda_cupy.bench import command, compare, figure, naming, pages, render, run, suite, timing
from kda_cupy.bench.cases import PRESETS, Case
from kda_cupy.bench.judge import Verdict
from kda_cupy.bench.record import Protocol, Record, make_row, summarize
from kda_cupy.errors import error

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ENVIRONMENT = {
    "kda_cupy": "0.1.0", "cupy": "14.2.0", "numpy": "2.5.2", "python": "3.12.3", "nvrtc": "13.0", "driver": "13.0",
    "variables": {"CUDA_HOME": "/home/somebody"}, "gpus": [{"index": 0, "name": "NVIDIA H200", "multiprocessors": 132}],
}  # fmt: skip
YARDSTICK = {"decode": "RW", "verify": "R", "commit": "RW", "round": "RW"}


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [str(each) for each in arguments])


def a_row(case, us, *, yardstick_us=10.0, noise=0.002, seed=0, count=15, **changes):
    rng = np.random.default_rng((seed, case.B, case.t))
    samples = us * (1 + noise * rng.standard_normal(count))
    yardsticks = yardstick_us * (1 + noise * rng.standard_normal(count))
    moves = YARDSTICK[case.operation]
    return make_row(
        case,
        Verdict(1.66e-3, 2.1e-7),
        **summarize(samples)
        | {
            "bytes_moved": int(us * 3.5e6),
            "yardstick": moves,
            "yardstick_us": float(np.median(yardsticks)),
            "yardstick_bytes": 2 * case.B * case.slot_bytes,
            "yardstick_samples_us": tuple(yardsticks.tolist()),
            "variant": f"{case.operation}[{case.gate}]",
            "registers": 96,
            "source_digest": "0123456789abcdef",
            "host_eager_us": 30.0,
            "host_bound_us": 8.0,
        }
        | changes,
    )


def a_record(*rows, **changes):
    protocol = Protocol("cuda", "CUDA graph replays, by events", "cold", 15, 0, 314_572_800)
    return replace(
        Record(
            ENVIRONMENT,
            protocol,
            list(rows),
            kernel_digests={"commit.cu": "0123"},
            created="2026-12-01T04:00:00",
        ),
        **changes,
    )


SIZES = (1, 2, 3, 8, 64, 256)
DECODE = replace(PRESETS["kimi-k3-tp8"], B=8)
VERIFY = replace(DECODE, operation="verify", mode="rings", t=8)


@pytest.fixture
def whole():
    """All operations, two geometries, several sizes."""
    rows = []
    for name in ("kimi-k3-tp8", "qwen3-next"):
        rows += [
            a_row(replace(PRESETS[name], B=B), 2.2 * B, yardstick_us=2.0 * B, noise=0)
            for B in (1, 2, 3, 8, 64, 256)
        ]
    for t in (4, 8):
        for B in (1, 64):
            case = replace(VERIFY, t=t, B=B)
            rows += [
                a_row(replace(case, operation=operation, accept=n), us * B, yardstick_us=2.0 * B, noise=0)
                for operation, n, us in (("verify", 0, 3.0), ("commit", t // 2, 2.3), ("round", t // 2, 5.3))
            ]
    return a_record(*rows)


# What is measured


def test_suite_covers_every_operation_and_geometry():
    cases = suite.suite_cases()
    assert all(case.problem == "" for case in cases)
    assert len(set(cases)) == len(cases)
    seen = {(case.operation, case.H, case.mode, case.t, case.B) for case in cases}
    assert {("decode", H, "", 1, B) for H in (12, 32, 16) for B in (1, 8, 64, 256)} <= seen
    for mode, t in (("rings", 4), ("rings", 8), ("snapshots", 8)):
        assert {("round", H, mode, t, B) for H in (12, 32) for B in (1, 8, 64, 256)} <= seen
    assert not any(case.operation == "round" and case.op == "gdn" for case in cases)
    over_tokens = {case.t for case in cases if case.B == 64 and case.H == 12 and case.mode == "rings"}
    assert over_tokens == set(suite.TOKENS)
    assert all(case.accept == case.t // 2 for case in cases if case.operation == "round")


def test_parts_of_the_suite():
    assert {case.operation for case in suite.suite_cases(groups=("decode",))} == {"decode"}
    assert {case.H for case in suite.suite_cases(presets=("kimi-k3-tp16",))} == {6}
    quick = suite.suite_cases(quick=True)
    assert {case.B for case in quick} == {1, 64}
    assert len(quick) < len(suite.suite_cases()) / 2
    assert {case.HV for case in suite.suite_cases(small=True)} == {4}
    only_verify = suite.suite_cases(groups=("verify",))
    assert {case.t for case in only_verify} == set(suite.TOKENS)


def test_suite_on_numpy(tmp_path):
    path = tmp_path / "record.json"
    result = invoke(
        "bench", "suite", "--backend", "numpy", "--repeats", 9, "--preset", "kimi-k3-tp8", "--json", path
    )
    assert result.exit_code == 0, result.output
    record = Record.from_json(path.read_text())
    assert {row.operation for row in record.rows} == {"decode", "step", "chain", "verify", "commit", "round"}
    assert record.kernel_digests == {name: sources.digest(name) for name in sources.kernel_names()}
    assert f"wrote {path}" in result.stderr
    assert "decode, us: kda H=4 bfloat16 bounded gate" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_suite_writes_record_and_figures_without_being_asked(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    monkeypatch.chdir(tmp_path)
    result = invoke("bench", "suite", "--backend", "numpy", "--repeats", 9, "--only", "decode", "--quick")
    assert result.exit_code == 0, result.output
    picture, record = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert re.fullmatch(r"kda-cupy-suite-\d{8}T\d{6}\.json", record.name)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stem == record.stem


def test_suite_on_stdout_is_the_record_alone():
    result = invoke("bench", "suite", "--backend", "numpy", "--repeats", 9, "--only", "decode", "--json", "-")
    assert result.exit_code == 0
    assert Record.from_json(result.stdout).complete
    assert "decode, us" in result.stderr


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("cause", "code", "why"),
    [
        (KeyboardInterrupt(), 130, "interrupted: 2 of"),
        (error("KDA-COMPILER-NO-GPU", got="it fell off the bus"), 2, "stopped by an error: 2 of"),
        (Stop("launch failure"), 1, "stopped by an error: 2 of"),
    ],
)
def test_what_was_measured_is_kept_whatever_ends_the_run(cause, code, why, monkeypatch, tmp_path):
    measure, done = timing.HostTimer.measure, []

    def until_the_third(self, case, stage):
        if len(done) == 2:
            raise cause
        done.append(case)
        return measure(self, case, stage)

    monkeypatch.setattr(timing.HostTimer, "measure", until_the_third)
    path = tmp_path / "record.json"
    result = invoke("bench", "suite", "--backend", "numpy", "--repeats", 9, "--json", path)
    assert result.exit_code == code
    assert why in result.stderr
    assert f"wrote {path}, with what was measured" in result.stderr
    record = Record.from_json(path.read_text())
    assert not record.complete and len(record.rows) == 2
    assert "Interrupted: the rows above are all that was measured." in result.stdout
    assert invoke("report", path).stdout.splitlines()[2].startswith("> **The run did not come to its end")


def test_files_that_cannot_be_written_are_refused_first(monkeypatch, tmp_path):
    monkeypatch.setattr(run.Run, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = invoke("bench", "suite", "--backend", "numpy", "--json", tmp_path / "record.json")
    assert result.exit_code == 2 and "cannot be written to" in result.stderr
    monkeypatch.chdir(tmp_path)
    result = invoke("bench", "suite", "--backend", "numpy")
    assert result.exit_code == 2 and "cannot be written to" in result.stderr


# What counts as a change


def verdict_of(before, after, threshold=5.0):
    (change,) = compare.compare(a_record(before), a_record(after), threshold)
    return change


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "same"), (1.03, "same"), (1.08, "slower"), (0.9, "faster")]
)
def test_changes_above_the_threshold(factor, verdict):
    change = verdict_of(a_row(DECODE, 10.0), a_row(DECODE, 10.0 * factor, seed=1))
    assert change.verdict == verdict
    assert change.percent == pytest.approx(100 * (factor - 1), abs=0.5)
    assert change.low <= change.percent <= change.high
    assert change.is_regression == (verdict == "slower")


def test_noise_is_no_change():
    """Samples so far apart that the medians of equal kernels differ by 8 %: only more of them could tell."""
    before = a_row(DECODE, 10.0, noise=0.3, count=9)
    after = a_row(DECODE, 10.8, noise=0.3, seed=3, count=9)
    change = verdict_of(before, after)
    assert abs(change.percent) > 5
    assert change.low < 0 < change.high
    assert change.verdict == "same"


def test_a_slower_machine_is_no_slower_kernel():
    before, after = a_row(DECODE, 10.0), a_row(DECODE, 20.0, yardstick_us=20.0, seed=1)
    assert verdict_of(before, after).verdict == "same"
    alone = [replace(row, yardstick_samples_us=()) for row in (before, after)]
    assert verdict_of(*alone).verdict == "slower"  # without yardsticks there is nothing to tell them apart


def test_a_wrong_answer_is_a_regression_and_a_right_one_is_not():
    good = a_row(DECODE, 10.0)
    bad = replace(good, status="wrong", median_us=None, samples_us=(), note="error of out is nan")
    assert verdict_of(good, bad).verdict == "broken" and verdict_of(good, bad).is_regression
    assert verdict_of(bad, good).verdict == "mended" and not verdict_of(bad, good).is_regression
    assert verdict_of(bad, bad).verdict == "no time"


def test_rows_of_one_record_alone():
    other = replace(DECODE, B=9)
    found = compare.compare(a_record(a_row(DECODE, 1.0)), a_record(a_row(other, 1.0)))
    assert [(change.row.B, change.verdict) for change in found] == [(9, "only in B"), (8, "only in A")]
    assert not any(change.is_regression for change in found)


@pytest.mark.parametrize("field", [*Case.__slots__])
def test_every_field_of_a_case_tells_rows_apart(field):
    other = {"op": "gdn", "lower_bound": None, "mode": "snapshots", "operation": "round", "dtype": "float16",
             "norm": True}  # fmt: skip
    case = replace(VERIFY, **{field: other.get(field, 3)})
    assert make_row(case).identity != make_row(VERIFY).identity


COMPARED = """\
decode: kda H=12 bfloat16 bounded gate
     B  A us  B us  A ratio  B ratio  change    ±
────────────────────────────────────────────────────────────
all  8  10.0  11.0     1.00     1.10  +10.0%  0.0  slower
all  9  10.0     -     1.00        -       -    -  only in A

1 slower, 1 only in A
"""


def test_compare_shows_changes_and_fails_on_a_regression(tmp_path):
    for name, record in (
        ("a", a_record(a_row(DECODE, 10.0, noise=0), a_row(replace(DECODE, B=9), 10.0, noise=0))),
        ("b", a_record(a_row(DECODE, 11.0, noise=0), complete=False)),
    ):
        (tmp_path / name).write_text(record.to_json())
    a, b = tmp_path / "a", tmp_path / "b"
    result = invoke("bench", "compare", a, b)
    assert result.exit_code == 1
    assert result.stdout.startswith(COMPARED)
    assert f"\nB: {b}, NVIDIA H200, 2026-12-01T04:00, did not come to its end\n" in result.stdout
    assert invoke("bench", "compare", a, b, "--threshold", 20).exit_code == 0
    same = invoke("bench", "compare", a, a, "--changed")
    assert same.exit_code == 0 and same.stdout.startswith("2 same\nA: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"l2": "warm"}, "l2: cold in A, warm in B"), ({"backend": "numpy"}, "backend: cuda in A, numpy in B")],
)
def test_records_taken_in_two_ways_are_not_compared(changes, words, tmp_path):
    a = a_record(a_row(DECODE, 10.0))
    b = replace(a, protocol=replace(a.protocol, **changes))
    (tmp_path / "a").write_text(a.to_json())
    (tmp_path / "b").write_text(b.to_json())
    result = invoke("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2
    assert words in result.stderr and result.stdout == ""


def test_wrong_arguments_of_compare_and_report(tmp_path):
    (tmp_path / "text").write_text("text")
    (tmp_path / "good").write_text(a_record().to_json())
    for arguments in (
        ("bench", "compare", tmp_path / "text", tmp_path / "good"),
        ("bench", "compare", tmp_path / "good", tmp_path / "none"),
        ("bench", "compare", tmp_path / "good"),
        ("bench", "compare", tmp_path / "good", tmp_path / "good", "--threshold", "-1"),
        ("report", tmp_path / "text"),
        ("report", tmp_path),
        ("report", tmp_path / "good", "--html", tmp_path / "no" / "folder"),
        ("report", tmp_path / "good", "--plot", tmp_path / "picture.xyz"),
        ("bench", "suite", "--only", "encode"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stdout == "" and "Traceback" not in result.stderr


# Names


def test_lines_are_named_by_what_differs():
    rows = [make_row(replace(PRESETS[name], B=B)) for name in ("kimi-k3-tp8", "qwen3-next") for B in (8, 1)]
    common, lines = naming.series(rows, "B")
    assert common == "bfloat16"
    assert {label: [row.B for row in line] for label, line in lines.items()} == {
        "kda H=12": [1, 8], "gdn H=16 HV=32": [1, 8],
    }  # fmt: skip
    rows = [
        make_row(replace(VERIFY, t=t, accept=t // 2, operation="commit", norm=norm))
        for t in (8, 4)
        for norm in (1, 0)
    ]
    common, lines = naming.series(rows, "B")
    assert common == "kda H=12 rings bfloat16 bounded gate"
    assert list(lines) == [
        f"t={t} n={t // 2} {norm}" for norm in ("with output norm", "no norm") for t in (4, 8)
    ]
    common, lines = naming.series([row for row in rows if not row.norm], "t")
    assert [row.t for row in lines[""]] == [4, 8]


def test_no_two_rows_of_a_line_stand_at_the_same_place(whole):
    for _, rows in naming.grouped(whole.rows, lambda row: row.operation).items():
        for along in ("B", "t"):
            for line in naming.series(rows, along)[1].values():
                assert len({getattr(row, along) for row in line}) == len(line)


# Pages


COMPACT = """\
decode, us and ratio: bfloat16 (B=2,3 in the record)
                           B=1         B=8       B=64      B=256
────────────────────────────────────────────────────────────────
kda H=12        RW  2.20 x1.10  17.6 x1.10  141 x1.10  563 x1.10
gdn H=16 HV=32  RW  2.20 x1.10  17.6 x1.10  141 x1.10  563 x1.10

verify, us and ratio: kda H=12 rings bfloat16 bounded gate
               N=1       N=64
─────────────────────────────
t=4  R  3.00 x1.50  192 x1.50
t=8  R  3.00 x1.50      wrong
"""


def test_compact_tables(whole, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    whole.rows = [
        replace(row, median_us=None, status="wrong")
        if (row.operation, row.t, row.B) == ("verify", 8, 64)
        else row
        for row in whole.rows
    ]
    file = io.StringIO()
    render.print_compact(whole, file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    assert file.getvalue().startswith(COMPACT)


def test_markdown_has_every_number(whole):
    text = pages.markdown(whole, "figures.png")
    assert text.startswith("# kda_cupy 0.1.0 on NVIDIA H200, 2026-12-01\n")
    assert "![Times, ratios and speed of memory](figures.png)" in text
    for row in whole.rows:
        assert f"| {naming.names_of(row)} | {render.three_digits(row.median_us)} |" in text
    assert "| decode\\[bounded] | 96 | 0 | 0 | 0123456789abcdef |" in text
    assert "| gpu 0 multiprocessors | 132 |" in text
    assert "/home/somebody" not in text
    for block in re.findall(
        r"(?:^\|.*\|\n)+", text, re.MULTILINE
    ):  # as many cells in each line as in its head
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


class Tags(html.parser.HTMLParser):
    """Counts tags, and sees that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href") and tag != "use"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]


def test_html_stands_alone(whole):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    whole.rows.append(replace(whole.rows[0], B=9, status="wrong", note="<script>alert(1)</script>"))
    text = pages.html(whole)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert {"svg", "table", "figure", "h1"} <= set(tags.seen) and "script" not in tags.seen
    assert not [link for link in tags.links if link and not link.startswith("#")]
    assert pages.html(whole) == text  # the same record, the same file


def test_html_without_matplotlib_says_so(whole, monkeypatch):
    def missing(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(figure, "write_page", missing)
    assert "No figures: No module named &#x27;matplotlib&#x27;" in pages.html(whole)


def test_figures_show_times_ratios_tokens_and_the_roof(whole, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    figure.write_page(whole, tmp_path / "page.svg")
    drawn = (tmp_path / "page.svg").read_text()
    for text in ("time (µs)", "ratio to RW", "ratio to R", "tokens of a request t", "bytes that a call moves",
                 "floor: all bytes at", "best of the yardsticks", "t=8 n=4", "gdn H=16 HV=32"):  # fmt: skip
        assert text in drawn, text


@pytest.mark.parametrize("rows", [0, 1])
def test_figures_of_next_to_nothing(rows, whole, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    whole.rows = whole.rows[:rows]
    figure.write_page(whole, tmp_path / "page.png")
    figure.write_plot(whole, tmp_path / "plot.png")
    assert pages.html(whole) and pages.markdown(whole)


def test_report_writes_what_it_is_asked_for(whole, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    (tmp_path / "record.json").write_text(whole.to_json())
    (tmp_path / "figures").mkdir()
    result = invoke("report", tmp_path / "record.json", "--html", tmp_path / "page.html",
                    "--markdown", tmp_path / "page.md", "--plot", tmp_path / "figures" / "page.png")  # fmt: skip
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "(figures/page.png)" in (tmp_path / "page.md").read_text(encoding="utf-8")
    assert invoke("report", tmp_path / "record.json").stdout == pages.markdown(whole)


def test_records_of_a_gpu_check_are_read():
    """Those of both versions, and what they were made from stands beside the rows."""
    for path in RESULTS.glob("*.json"):
        record = command.read_record(path)
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert len(record.rows) == len(stored["bench"]["rows"])
        assert render.machine_name(record) == stored["gpu"]
        assert record.kernel_digests == stored["kernel_digests"]
        assert stored["gpu"] in pages.markdown(record)
