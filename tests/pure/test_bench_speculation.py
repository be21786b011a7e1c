# SPDX-License-Identifier: Apache-2.0
"""Verify, commit and round in the benchmark, without a GPU: operands, judgement, bytes, tables, commands."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from kda_cupy.bench import cases, command, figure, judge, render, speculation, timing
from kda_cupy.bench.cases import Case
from kda_cupy.bench.judge import Verdict
from kda_cupy.bench.record import Protocol, Record, make_row, summarize
from kda_cupy.bench.settle import settle
from kda_cupy.bench.speculation import Speculation
from kda_cupy.bench.workload import Memory, Rotation

ON_HOST = Memory(np.asarray, np.array, np.zeros)
ROUND = Case("kda", H=1, HV=2, B=4, operation="round", t=3, mode="rings", accept=2)
SMALL_ARGUMENTS = ["--heads", "1", "--backend", "numpy", "--repeats", "9"]


def rng():
    return np.random.default_rng(0)


def run(*arguments):
    return CliRunner().invoke(command.bench, [str(each) for each in arguments])


def workload(case, rotation=Rotation(1, 1, 0), slots=None):  # noqa: B008
    state = cases.random_state(case, slots or case.B + 3, rng())
    return Speculation(case, ON_HOST, state, rotation, rng())


# Operands


def test_clear_activations_stay_as_they_are():
    bfloat16 = cases.by_name("bfloat16")
    x = np.full((2, 4, 3), 2.0, bfloat16)  # SiLU(2) = 1.7616 lies well inside
    taps = np.array([[0, 0, 0, 1]] * 3, np.float32)
    settle(x, np.ones((2, 3, 3), bfloat16), taps, rng())
    assert np.array_equal(x, np.full_like(x, 2.0))


def test_an_activation_in_the_middle_is_drawn_again():
    bfloat16 = cases.by_name("bfloat16")
    taps = np.array([[0, 0, 1 / 256, 1.0]], np.float32)
    history = np.full((1, 3, 1), 32.0, bfloat16)
    x = np.full((1, 2, 1), 32.0, bfloat16)  # 32 + 32/256 lies between 32 and 32.25, and SiLU leaves it there
    settle(x, history, taps, rng())
    assert x[0, 0, 0] != 32.0
    stubborn = SimpleNamespace(standard_normal=lambda count: np.full(count, 32.0))
    with pytest.raises(RuntimeError, match="not clear after 200 draws"):
        settle(np.full((1, 2, 1), 32.0, bfloat16), history, taps, stubborn)


def test_operands_are_slices_of_one_projection():
    case = replace(ROUND, norm=True)
    operands = speculation.make_inputs(case, 4, rng()).operands(case)
    assert [operands[name].shape for name in ("x_q", "x_k", "x_v")] == [
        (1, 12, 1, 128),
        (1, 12, 1, 128),
        (1, 12, 2, 128),
    ]
    assert all(operands[name].base is not None for name in ("x_q", "x_k", "x_v"))
    assert operands["x_q"].strides[1] == 4 * 128 * 2
    assert operands["w_v"].shape == (256, 4)
    assert np.abs(operands["w_q"][:, 3]).min() >= 0.5
    assert operands["onorm_gate"].shape == (1, 12, 2, 128)


# Judgement


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("t", "accept", "norm"), [(1, 1, False), (3, 1, True), (8, 8, False)])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_right_answers_pass(mode, dtype, t, accept, norm, lower_bound):
    case = replace(ROUND, mode=mode, dtype=dtype, t=t, accept=accept, norm=norm, lower_bound=lower_bound)
    found = workload(case).judge()
    assert found.complaint == ""
    assert 0 < found.error_state < 1e-6
    assert 0 < found.error_out < judge.OUT_BOUNDS[dtype]


VERIFY, COMMIT = speculation.kda_decode_mtp, speculation.kda_commit


def off_by_a_percent(**operands):
    VERIFY(**operands)
    operands["out"][:] *= np.float32(1.01).astype(operands["out"].dtype)


def state_in_place(**operands):
    VERIFY(**operands)
    operands["recurrent_state"][:] += 1


def not_a_number(**operands):
    VERIFY(**operands)
    operands["out"][...] = np.nan


def bad_last_snapshot(**operands):
    VERIFY(**operands)
    operands["intermediate_ssm"][:, -1] *= np.float32(1.01)


def one_too_many(**operands):
    COMMIT(**operands | {"accept_lens": operands["accept_lens"] + 1})


def without_history(**operands):
    COMMIT(**operands | {name: operands[name].copy() for name in speculation.HISTORIES})


@pytest.mark.parametrize(
    ("name", "operation", "mode", "complaint"),
    [
        ("kda_decode_mtp", off_by_a_percent, "rings", "error of out is 0.01, above 1e-05"),
        ("kda_decode_mtp", not_a_number, "rings", "error of out is nan"),
        ("kda_decode_mtp", state_in_place, "rings", "the verify changed a state or history"),
        ("kda_decode_mtp", bad_last_snapshot, "snapshots", "error of state is"),
        ("kda_commit", one_too_many, "snapshots", "error of state is"),
        ("kda_commit", one_too_many, "rings", "error of state is"),
        ("kda_commit", without_history, "rings", "wrong conv history"),
    ],
)
def test_wrong_answers_do_not(name, operation, mode, complaint, monkeypatch):
    monkeypatch.setattr(speculation, name, operation)
    assert complaint in workload(replace(ROUND, dtype="float32", mode=mode)).judge().complaint


def test_output_of_padding_has_to_be_zero(monkeypatch):
    def everywhere(**operands):
        VERIFY(**operands)
        row = int(np.flatnonzero(operands["ssm_state_indices"] == -1)[0])
        operands["out"][0, row * ROUND.t] = 1

    monkeypatch.setattr(speculation, "kda_decode_mtp", everywhere)
    assert "padding" in workload(ROUND).judge().complaint


# Parts


@pytest.mark.parametrize(("mode", "yardstick"), [("rings", "R"), ("snapshots", "SNAP")])
def test_a_round_is_three_rows(mode, yardstick):
    case = replace(ROUND, mode=mode, norm=True)
    parts = workload(case).parts()
    assert [(each.case.operation, each.case.accept, each.yardstick) for each in parts] == [
        ("verify", 0, yardstick),
        ("commit", 2, "RW"),
        ("round", 2, "RW"),
    ]
    assert parts[2].bytes_moved == parts[0].bytes_moved + parts[1].bytes_moved
    (only,) = workload(replace(case, operation="verify", accept=0)).parts()
    assert only.bytes_moved == parts[0].bytes_moved


def test_bytes_follow_the_formulas():
    """Counted by hand: N=4, t=3, H=1, HV=2, bf16; C=512 channels."""
    state, C = 2 * 65536, 512
    token_in = C * 2 + 2 * 128 * 2 + 2 * 2  # projection, gate, beta
    ring = (2 + 1) * 128 * 2 + 2 * 128 * 4 + 2 * 4
    verify, commit, _ = workload(ROUND).parts()
    windows = (12 + 4 * 2) * C * 2  # they slide: each raw input once
    assert verify.bytes_moved == 4 * (state + 3 * C * 2) + windows + 12 * (token_in + 2 * 128 * 2 + ring)
    assert commit.bytes_moved == 4 * (2 * state + 2 * ring + 6 * C * 2)  # two tokens are kept
    verify, commit, _ = workload(replace(ROUND, mode="snapshots")).parts()
    assert verify.bytes_moved == 4 * (state + 3 * C * 2) + windows + 12 * (token_in + 2 * 128 * 2 + state)
    assert commit.bytes_moved == 4 * (2 * state + 6 * C * 2)


@pytest.mark.parametrize("mode", cases.MODES)
def test_plain_windows_are_right_and_cost_three_inputs_a_token(mode):
    case = replace(ROUND, mode=mode)
    plain, sliding = workload(replace(case, plain_windows=True)), workload(case)
    assert plain.judge().complaint == sliding.judge().complaint == ""
    for made, slides in ((plain, False), (sliding, True)):
        for name in speculation.WINDOWS:
            _, step, _, tap = made._scratch[name].strides
            assert (step == tap) == slides
    more = plain.parts()[0].bytes_moved - sliding.parts()[0].bytes_moved
    assert more == (3 * 12 - (12 + 2 * 4)) * 512 * 2  # 12 tokens of 4 requests, 512 channels, bf16


def test_plain_windows_are_named(tmp_path):
    path = tmp_path / "record.json"
    options = ["--tokens", 2, "--batch", 1, "--json", path]
    usual = run("verify", *SMALL_ARGUMENTS, *options)
    assert "Conv windows slide over raw inputs" in usual.stdout and "lain windows" not in usual.stdout
    other = run("verify", *SMALL_ARGUMENTS, *options, "--plain-windows")
    assert other.exit_code == 0, other.output
    assert "softplus gate, plain windows" in " ".join(other.stdout.split())
    assert "Plain windows [rows, t, 3, channels]" in other.stdout and "slide" not in other.stdout
    (row,) = Record.from_json(path.read_text()).rows
    assert row.plain_windows
    assert replace(row, plain_windows=False).identity != row.identity


@pytest.mark.parametrize("mode", cases.MODES)
def test_launches_walk_over_slots_and_scratch(mode):
    """Every group has its own slots; scratch rows come back as late as the bytes they take ask for."""
    case = replace(ROUND, mode=mode, B=2)
    written = 2 * 3 * (512 * 2 + (2 * 65536 if mode == "snapshots" else 0))
    made = workload(case, Rotation(6, 24, reuse_bytes=3 * written), slots=20)
    indices = made._indices
    slots = np.concatenate([each for each, _ in indices])
    assert len(indices) == 6
    assert sorted(set(slots.tolist())) == sorted(slots.tolist())
    assert slots.min() >= 1
    rows = [tuple(each.tolist()) for _, each in indices]
    assert len(set(rows)) == 3 and rows[:3] == rows[3:]
    assert len({row for group in set(rows) for row in group}) == 6
    verify, commit, whole = made.parts()
    assert len(verify.calls) == len(commit.calls) == 6
    assert list(whole.calls) == [*verify.calls, *commit.calls]


def test_scratch_never_rotates_further_than_the_slots():
    assert Rotation(5, 20, 1 << 30).scratch_groups(1) == 5
    assert Rotation(5, 20, 0).scratch_groups(100) == 1


# Views


@pytest.fixture
def record():
    """As an H200 could have made it."""
    environment = {
        "kda_cupy": "0.1.0", "cupy": "14.2.0", "numpy": "2.5.2", "python": "3.12.3", "nvrtc": "13.0", "driver": "13.0",
        "gpus": [{"index": 0, "name": "NVIDIA H200"}],
    }  # fmt: skip
    made = Record(environment, Protocol("cuda", "CUDA graph replays, by events", "cold", 9, 0, 314_572_800))
    shape = Case("kda", 12, 12, lower_bound=-5.0, mode="rings")
    for t in (4, 8):
        for B, read, move in ((1, 1.8, 2.15), (64, 13.2, 28.1), (256, 45.9, 104.0)):
            for operation, us, name, yardstick_us in (
                ("verify", read * (1 + t / 8), "R", read),
                ("commit", move * 1.1, "RW", move),
                ("round", read * (1 + t / 8) + move * 1.1, "RW", move),
            ):
                accept = 0 if operation == "verify" else t // 2
                made.rows.append(
                    make_row(
                        replace(shape, operation=operation, t=t, accept=accept, B=B),
                        Verdict(1.66e-3, 2.1e-7),
                        **summarize([us, us, us * 1.02]),
                        bytes_moved=round(786_432 * B * (2.3 if operation == "commit" else 1.28)),
                        yardstick=name,
                        yardstick_us=yardstick_us,
                        yardstick_bytes=786_432 * B * (2 if name == "RW" else 1),
                        host_eager_us=41.2,
                        host_bound_us=9.1,
                        variant=f"mtp_{operation}[bounded,t<=8,bfloat16]" if operation != "round" else "",
                        registers=0 if operation == "round" else 96,
                        source_digest="0123456789abcdef",
                    )
                )
    return made


TABLES = """\
kda verify with rings: H=12, HV=12, bfloat16, bounded gate
                                       host us           error
t    N    us   p95  GB/s  R us  ratio    eager  bound      out    state
───────────────────────────────────────────────────────────────────────
4    1  2.70  2.75   373  1.80   1.50     41.2   9.10  1.66e-3  2.10e-7
4   64  19.8  20.2  3250  13.2   1.50     41.2   9.10  1.66e-3  2.10e-7
4  256  68.8  70.1  3740  45.9   1.50     41.2   9.10  1.66e-3  2.10e-7
8    1  3.60  3.66   280  1.80   2.00     41.2   9.10  1.66e-3  2.10e-7
8   64  26.4  26.9  2440  13.2   2.00     41.2   9.10  1.66e-3  2.10e-7
8  256  91.8  93.5  2810  45.9   2.00     41.2   9.10  1.66e-3  2.10e-7

kda commit with rings: H=12, HV=12, bfloat16, bounded gate
                                           host us           error
t  n    N    us   p95  GB/s  RW us  ratio    eager  bound      out    state
───────────────────────────────────────────────────────────────────────────
4  2    1  2.37  2.41   765   2.15   1.10     41.2   9.10  1.66e-3  2.10e-7
"""
CAPTION = """\
NVIDIA H200, cold L2: 315 MB or more of state move between two uses of a slot.
us: median of 9 samples a row (CUDA graph replays, by events).
RW: reads, scales and writes the same state, nothing else.
R: reads the same state, nothing else.
ratio: us / yardstick us.
round: all slots are verified, then the first of them is committed; its state is
out of L2 by then.
Conv windows slide over raw inputs [rows, t + 2, channels]: each is written
once.
n: tokens of a request that the commit keeps.
"""


@pytest.mark.parametrize("columns", ["40", "80"])
def test_tables_take_eighty_columns_of_plain_text(record, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    render.print_record(record, file)
    lines = [line.rstrip() for line in file.getvalue().split("\n")]
    assert "\n".join(lines).startswith(TABLES)
    assert CAPTION in "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "mtp_verify[bounded,t<=8,bfloat16], 96 registers, source 01234567." in lines


def test_json_brings_everything_back(record):
    assert Record.from_json(record.to_json()) == record


def test_plot_shows_time_over_requests_and_over_tokens(record, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    figure.write_plot(record, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for text in ("requests N", "tokens of a request t", "floor: all bytes at 4.39 TB/s", "N=256", "t=8 n=4"):
        assert text in drawn


# Commands


def test_verify_on_numpy(tmp_path):
    path = tmp_path / "record.json"
    result = run("verify", *SMALL_ARGUMENTS, "--value-heads", 2, "--tokens", "1,3", "--batch", "2",
                 "--mode", "rings", "--mode", "snapshots", "--norm", "--gate", "bounded", "--json", path)  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = Record.from_json(path.read_text()).rows
    assert [
        (row.operation, row.mode, row.t, row.accept, row.norm, row.B, row.HV, row.gate) for row in rows
    ] == [("verify", mode, t, 0, True, 2, 2, "bounded") for mode in ("rings", "snapshots") for t in (1, 3)]
    assert all(len(row.samples_us) == 9 and row.variant == "numpy" for row in rows)
    assert "kda verify with snapshots: H=1, HV=2, bfloat16, bounded gate, output norm" in result.stdout


@pytest.mark.parametrize(("options", "kept"), [([], {1: 1, 4: 2}), (["--accept", "1"], {1: 1, 4: 1})])
def test_round_on_numpy(options, kept, tmp_path):
    path = tmp_path / "record.json"
    result = run("round", *SMALL_ARGUMENTS, "--tokens", "4,1", *options, "--json", path, "--batch", "1")
    assert result.exit_code == 0, result.output
    rows = Record.from_json(path.read_text()).rows
    assert [(row.operation, row.t, row.accept) for row in rows] == [
        row for t in (4, 1) for row in (("verify", t, 0), ("commit", t, kept[t]), ("round", t, kept[t]))
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "a request has 1 to 16 tokens"),
        (["--tokens", "17"], "a request has 1 to 16 tokens"),
        (["--tokens", "eight"], "is not a list such as 1,8,64"),
        (["--tokens", "4,8", "--accept", "5"], "of 4 tokens only 4 can be kept"),
        (["--mode", "replay"], "snapshots"),
        (["--preset", "qwen3-next"], "kimi-linear-48b"),
        (["--heads", "2", "--value-heads", "3"], "3 value heads cannot be shared among 2 heads"),
        (["--head-dim", "64"], "No such option"),
        (["--batch", "0"], "a batch has 1 to 1,048,576 rows"),
    ],
)
def test_usage_errors(arguments, message):
    result = run("round", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_only_what_exists_makes_a_case():
    assert replace(ROUND, K=64).problem.startswith("round is there for kda with K = V = 128; got kda, K=64")
    assert replace(ROUND, op="gdn").problem
    assert replace(ROUND, t=17).problem == "17 tokens a request; wanted 1 to 16"
    assert replace(ROUND, accept=4).problem == "4 of 3 tokens cannot be accepted"
    assert replace(ROUND).problem == ""


def test_a_wrong_round_is_one_row(monkeypatch):
    monkeypatch.setattr(speculation, "kda_decode_mtp", not_a_number)
    result = run("round", *SMALL_ARGUMENTS, "--tokens", "2", "--batch", "1")
    assert result.exit_code == 1
    assert "t=2, n=1, N=1: wrong: error of out is nan, above 0.003" in " ".join(result.stdout.split())


def test_interrupted_between_two_cases_keeps_the_first(monkeypatch, tmp_path):
    measure = timing.HostTimer.measure

    def interrupted(self, case, stage):
        if case.B == 2:
            raise KeyboardInterrupt
        return measure(self, case, stage)

    monkeypatch.setattr(timing.HostTimer, "measure", interrupted)
    path = tmp_path / "record.json"
    result = run("round", *SMALL_ARGUMENTS, "--tokens", "2", "--batch", "1,2,3", "--json", path)
    assert result.exit_code == 130
    assert "interrupted: 1 of 3 cases measured" in result.stderr
    record = Record.from_json(path.read_text())
    assert [row.operation for row in record.rows] == ["verify", "commit", "round"]
    assert not record.complete
