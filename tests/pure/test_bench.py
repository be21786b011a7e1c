# SPDX-License-Identifier: Apache-2.0
"""The benchmark without a GPU: what it measures, how it counts, what it prints, and what it refuses."""

import csv
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from kda_cupy import gpu
from kda_cupy.bench import cases, command, decode, figure, judge, render, timing
from kda_cupy.bench.cases import PRESETS, Case
from kda_cupy.bench.judge import Verdict
from kda_cupy.bench.record import Protocol, Record, make_row, summarize
from kda_cupy.bench.workload import Memory, Rotation
from kda_cupy.errors import error

SMALL = Case("kda", H=1, HV=2, K=16, V=8, B=5)
SMALL_ARGUMENTS = [
    "--heads",
    "1",
    "--value-heads",
    "2",
    "--head-dim",
    "16",
    "--value-head-dim",
    "8",
    "--repeats",
    "9",
]


def rng():
    return np.random.default_rng(0)


def run(*arguments):
    return CliRunner().invoke(command.bench, [str(each) for each in arguments])


# Cases


def test_presets_are_the_published_geometries():
    assert all(case.problem == "" and case.K == case.V == 128 for case in PRESETS.values())
    k3, qwen = PRESETS["kimi-k3-tp8"], PRESETS["qwen3-next"]
    assert (k3.op, k3.H, k3.HV, k3.gate, k3.lower_bound) == ("kda", 12, 12, "bounded", -5.0)
    assert (qwen.op, qwen.H, qwen.HV, qwen.gate) == ("gdn", 16, 32, "softplus")
    assert PRESETS["kimi-linear-48b"].slot_bytes == 32 * 65536


@pytest.mark.parametrize(
    ("heads", "small"), [((32, 32), (4, 4)), ((16, 32), (2, 4)), ((1, 8), (1, 8)), ((3, 3), (3, 3))]
)
def test_small_cases_keep_the_value_heads_of_a_head(heads, small):
    case = Case("gdn", *heads).small()
    assert small == (case.H, case.HV)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_inputs_are_never_zero(op, monkeypatch):
    monkeypatch.setattr(cases, "_DISTINCT_ROWS", 3)  # more rows repeat these
    case = replace(SMALL, op=op)
    inputs = decode.make_inputs(case, 7, rng())
    gates = 2 * 16 if op == "kda" else 2
    assert [each.shape for each in inputs] == [(7, 2 * 16 + 2 * 8), (7, gates), (7, 2), (2,), (gates,)]
    assert [each.dtype.name for each in inputs] == ["bfloat16"] * 3 + ["float32"] * 2
    assert all(np.all(each != 0) for each in inputs)
    assert np.array_equal(inputs.a[:4], inputs.a[3:])
    assert not np.array_equal(inputs.a[0], inputs.a[1])


# Judgement


ON_HOST = Memory(np.asarray, np.array, np.zeros)


def judged(case, operation=None, monkeypatch=None):
    if operation:
        monkeypatch.setitem(decode.OPERATIONS, case.op, operation)
    state = cases.random_state(case, case.B + 3, rng())
    return decode.PackedDecode(case, ON_HOST, state, Rotation(1, 1, 0), rng()).judge()


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("B", [1, 2, 40])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_right_answers_pass(op, dtype, B, lower_bound):
    found = judged(replace(SMALL, op=op, dtype=dtype, B=B, lower_bound=lower_bound))
    assert found.complaint == ""
    assert 0 < found.error_state < 1e-6
    assert 0 < found.error_out < judge.OUT_BOUNDS[dtype]


def off_by_a_percent(*operands, out, **options):
    decode.kda_packed_decode(*operands, out=out, **options)
    out *= np.float32(1.01).astype(out.dtype)


def without_state(*operands, out, **options):
    decode.kda_packed_decode(*operands[:5], operands[5].copy(), operands[6], out=out, **options)


def without_padding(*operands, out, **options):
    decode.kda_packed_decode(*operands, out=out, **options)
    out[operands[6] == -1] = 1


def not_a_number(*operands, out, **options):
    out[...] = np.nan


@pytest.mark.parametrize(
    ("operation", "complaint"),
    [
        (off_by_a_percent, "error of out is 0.01, above 2e-06"),
        (without_state, "error of state is"),
        (without_padding, "the output of a padding row is not zero"),
        (not_a_number, "error of out is nan, above 2e-06"),
    ],
)
def test_wrong_answers_do_not(operation, complaint, monkeypatch):
    assert complaint in judged(replace(SMALL, dtype="float32"), operation, monkeypatch).complaint


# Method


@pytest.mark.parametrize(
    ("B", "slot_bytes", "slots", "expected"),
    [
        (1, 786_432, 4096, (382, 382)),  # 12 heads: 300 MB take 382 launches of one row
        (256, 2 << 20, 1536, (6, 24)),  # 32 heads: a pool of 3 GiB holds six groups, each is used four times
        (1, 1 << 30, 3, (3, 21)),
        (700, 2 << 20, 1000, (1, 20)),  # one launch moves more than has to move
    ],
)
def test_rotation_moves_enough_state_between_two_uses(B, slot_bytes, slots, expected):
    groups, launches, _ = timing.plan_rotation(B, slot_bytes, slots, 300_000_000)
    assert (groups, launches) == expected
    assert groups * B <= slots
    assert groups * B * slot_bytes >= 300_000_000
    assert launches % groups == 0  # else the next replay meets slots that have just been used


def test_warm_launches_work_on_the_same_slots():
    assert timing.plan_rotation(8, 1 << 20, 4096, 0) == (1, 20, 0)


def test_statistics():
    found = summarize([4.0, 1.0, 2.0, 3.0, 10.0])
    assert found["median_us"] == 3
    assert found["min_us"] == 1
    assert found["p95_us"] == pytest.approx(
        4 + 0.8 * 6
    )  # four fifths of the way from the fourth to the fifth
    assert found["noise_percent"] == pytest.approx(100 * 10**0.5 / 4)  # variance (0 + 9 + 4 + 1 + 36) / 5
    assert found["samples_us"] == (4, 1, 2, 3, 10)


# Record and its views


@pytest.fixture
def record():
    """As an H200 would have made it."""
    environment = {
        "kda_cupy": "0.1.0", "cupy": "14.2.0", "numpy": "2.5.2", "python": "3.12.3", "nvrtc": "13.0", "driver": "13.0",
        "gpus": [{"index": 0, "name": "NVIDIA H200"}],
    }  # fmt: skip
    made = Record(
        environment, Protocol("cuda", "CUDA graph replays, by events", "cold", 9, 0, 300_000_000, 3 << 30)
    )
    for B, us, yardstick_us in ((1, 2.6, 2.15), (8, 10.0, 4.94), (1 << 20, 424_242.0, 412_345.0)):
        row = make_row(
            Case("kda", 12, 12, lower_bound=-5.0, B=B),
            Verdict(1.66e-3, 1.2e-7),
            **summarize([us, us, us * 1.02]),
            bytes_moved=1_585_684 * B,
            yardstick_us=yardstick_us,
            yardstick_samples_us=(yardstick_us,) * 3,
            yardstick_bytes=2 * 12 * 65536 * B,
            host_eager_us=29.84,
            host_bound_us=8.912,
            variant="packed_decode[kda,bounded,K128,V128,bfloat16]",
            registers=96,
            source_digest="0123456789abcdef",
        )
        made.rows.append(row)
    wrong = judge.verdict(Case("kda", 1, 1), float("nan"), 3e-2)
    made.rows.append(make_row(Case("kda", 12, 12, lower_bound=-5.0, B=64), wrong))
    return made


TABLE = """\
kda packed decode: H=12, HV=12, K=128, V=128, bfloat16, bounded gate
                                              host us           error
      B      us     p95  GB/s   RW us  ratio    eager  bound      out    state
──────────────────────────────────────────────────────────────────────────────
      1    2.60    2.65   610    2.15   1.21     29.8   8.91  1.66e-3  1.20e-7
      8    10.0    10.2  1270    4.94  2.02!     29.8   8.91  1.66e-3  1.20e-7
1048576  424000  432000  3920  412000   1.03     29.8   8.91  1.66e-3  1.20e-7
     64       -       -     -       -      -        -      -        -  3.00e-2

B=64: wrong: error of out is nan, above 0.003; error of state is 0.03, above
2e-06

NVIDIA H200, cold L2: 300 MB or more of state move between two uses of a slot.
us: median of 9 samples a row (CUDA graph replays, by events).
RW: reads, scales and writes the same state, nothing else.
ratio: us / RW us.
!: less than half the speed of the yardstick. Something is wrong here.
packed_decode[kda,bounded,K128,V128,bfloat16], 96 registers, source 01234567.
kda_cupy 0.1.0, python 3.12.3, numpy 2.5.2, cupy 14.2.0, nvrtc 13.0, driver
13.0.
"""


def printed(record):
    file = io.StringIO()
    render.print_record(record, file)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_table_takes_eighty_columns_of_plain_text(record, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = printed(record)
    if columns != "200":  # there, long lines are not broken
        assert text == TABLE
    assert text.split("\n")[:8] == TABLE.split("\n")[:8]


def test_caption_tells_warm_and_interrupted_runs_apart(record):
    record.protocol = replace(record.protocol, l2="warm")
    record.complete = False
    lines = render.caption(record)
    assert lines[0] == "NVIDIA H200, warm: every launch works on the same slots, which L2 may hold."
    assert lines[-1] == "Interrupted: the rows above are all that was measured."


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0.012345, "0.0123"),
        (2.0, "2.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (1248, "1250"),
        (1e6, "1000000"),
    ],
)
def test_three_digits(number, text):
    assert render.three_digits(number) == text


def test_json_brings_everything_back(record, tmp_path):
    text = record.to_json()
    assert Record.from_json(text) == record
    stored = json.loads(text)
    assert (stored["schema"], stored["schema_version"]) == ("kda_cupy.bench", 2)
    assert stored["rows"][0]["ratio"] == pytest.approx(2.6 / 2.15)
    assert stored["rows"][-1]["error_out"] is None  # JSON has no NaN; the note has it
    (tmp_path / "record.json").write_text(text)
    shown = run("show", tmp_path / "record.json")
    assert [line.rstrip() for line in shown.stdout.split("\n")] == TABLE.split("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a benchmark record"),
        ("[1]", "not a benchmark record"),
        (
            '{"schema": "kda_cupy.trace", "schema_version": 1}',
            "a record of kda_cupy.trace 1; this version reads",
        ),
        (
            '{"schema": "kda_cupy.bench", "schema_version": 1, "rows": [{"op": "kda"}]}',
            "a damaged benchmark record",
        ),
    ],
)
def test_other_files_are_no_records(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Record.from_json(text)
    (tmp_path / "other").write_text(text)
    assert run("show", tmp_path / "other").exit_code == 2


def test_csv_has_a_line_a_row(record):
    file = io.StringIO()
    render.write_csv(record.rows, file)
    lines = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [line["B"] for line in lines] == ["1", "8", "1048576", "64"]
    assert float(lines[0]["ratio"]) == pytest.approx(2.6 / 2.15)
    assert lines[-1]["note"].startswith("error of out is nan, above 0.003")
    assert lines[-1]["median_us"] == ""


def test_plot_is_drawn(record, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    figure.write_plot(record, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for text in (
        "rows B",
        "yardstick RW",
        "decode: kda H=12 bfloat16 bounded gate",
        "floor: all bytes at 4 TB/s",
    ):
        assert text in drawn


# Command


@pytest.fixture
def no_gpu(monkeypatch):
    def refuse():
        raise error("KDA-COMPILER-NO-GPU", got="a machine without one")

    monkeypatch.setattr(gpu, "require_gpu", refuse)
    monkeypatch.setattr(timing, "require_gpu", refuse)


def test_without_gpu_it_says_so_and_runs_on_numpy(no_gpu, tmp_path):
    result = run("decode", "--batch", "1,2", "--repeats", 9, "--json", tmp_path / "record.json")
    assert result.exit_code == 0
    line, written = result.stderr.splitlines()
    assert written == f"wrote {tmp_path / 'record.json'}"
    assert line.startswith("backend: numpy, on small shapes (")
    assert "a machine without one" in line
    record = Record.from_json((tmp_path / "record.json").read_text())
    assert [(row.B, row.HV, row.status, len(row.samples_us)) for row in record.rows] == [
        (1, 4, "timed", 9),
        (2, 4, "timed", 9),
    ]
    assert record.rows[1].bytes_moved == 2 * record.rows[0].bytes_moved
    assert "NumPy on" in result.stdout


@pytest.mark.parametrize("arguments", [["--backend", "cuda"], ["--device", "0"]])
def test_a_gpu_asked_for_and_missing_is_an_error(no_gpu, arguments):
    result = run("decode", *arguments)
    assert result.exit_code == 2
    assert "KDA-COMPILER-NO-GPU" in result.stderr
    assert result.stdout == ""


def test_unknown_gpu(monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    cupy = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(gpu, "require_gpu", lambda: cupy)
    monkeypatch.setattr(timing, "require_gpu", lambda: cupy)
    result = run("decode", "--device", 3)
    assert result.exit_code == 2
    assert "there is no GPU 3; CuPy finds 1, numbered from 0" in result.stderr


def test_json_on_stdout_stands_alone(tmp_path):
    result = run("decode", "--backend", "numpy", *SMALL_ARGUMENTS, "--op", "gdn", "--gate", "bounded",
                 "--batch", "3", "--json", "-", "--csv", tmp_path / "rows.csv")  # fmt: skip
    assert result.exit_code == 0
    (row,) = Record.from_json(result.stdout).rows
    assert (row.op, row.gate, row.H, row.HV, row.K, row.V, row.B) == ("gdn", "bounded", 1, 2, 16, 8, 3)
    assert "gdn packed decode: H=1, HV=2" in result.stderr
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "a batch has 1 to 1,048,576 rows"),
        (["--batch", "1,-8"], "a batch has 1 to 1,048,576 rows"),
        (["--batch", "1,many"], "is not a list such as 1,8,64"),
        (["--heads", "3", "--value-heads", "4"], "4 value heads cannot be shared among 3 heads"),
        (["--heads", "0"], "--heads"),
        (["--heads", "2", "--head-dim", "6"], "wanted a multiple of 4 up to 512"),
        (["--heads", "2", "--preset", "kimi-k3"], "not both"),
        (["--head-dim", "64"], "go with --heads"),
        (["--preset", "gpt-2"], "kimi-linear-48b"),
        (["--repeats", "8"], "--repeats"),
        (["--backend", "numpy", "--warm"], "mean nothing on the NumPy backend"),
        (["--json", "no/such/folder/record.json"], "there is no folder"),
        (["--csv", "-"], "only --json goes to stdout"),
        (["--plot", "plot.xyz"], "--plot"),
    ],
)
def test_usage_errors(arguments, message):
    result = run("decode", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_interrupted_run_keeps_what_it_has(monkeypatch, tmp_path):
    measure = timing.HostTimer.measure

    def interrupted(self, case, stage):
        if case.B == 2:
            raise KeyboardInterrupt
        return measure(self, case, stage)

    monkeypatch.setattr(timing.HostTimer, "measure", interrupted)
    result = run(
        "decode",
        "--backend",
        "numpy",
        *SMALL_ARGUMENTS,
        "--batch",
        "1,2,3",
        "--json",
        tmp_path / "record.json",
    )
    assert result.exit_code == 130
    assert "interrupted: 1 of 3 cases measured" in result.stderr
    record = Record.from_json((tmp_path / "record.json").read_text())
    assert [row.B for row in record.rows] == [1]
    assert not record.complete


def test_rows_that_could_not_be_timed_are_shown_and_end_in_exit_code_1(monkeypatch):
    def measure(self, case, stage):
        if case.B == 1:
            raise MemoryError("1 state too many")
        return [make_row(case, judge.verdict(case, 0.5, 1e-7))]

    monkeypatch.setattr(timing.HostTimer, "measure", measure)
    result = run("decode", "--backend", "numpy", *SMALL_ARGUMENTS, "--batch", "1,2")
    assert result.exit_code == 1
    assert "B=1: skipped: not enough memory: 1 state too many" in result.stdout
    assert "B=2: wrong: error of out is 0.5, above 0.003" in result.stdout
