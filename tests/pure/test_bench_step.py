# SPDX-License-Identifier: Apache-2.0
"""The whole step in the benchmark, without a GPU: operands, judgement, bytes, rows, the command."""

import io
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from kda_cupy.bench import cases, figure, judge, naming, render, step, suite
from kda_cupy.bench.cases import Case
from kda_cupy.bench.judge import Verdict
from kda_cupy.bench.record import Protocol, Record, make_row
from kda_cupy.bench.workload import Memory, Rotation
from kda_cupy.cli import main

KDA = Case("kda", H=1, HV=2, B=4, operation="step", norm=True)
GDN = replace(KDA, op="gdn")


def workload(case, rotation=None, slots=9):
    rng = np.random.default_rng(0)
    state = cases.random_state(case, slots, rng)
    memory = Memory(np.asarray, np.array, np.zeros)
    return step.WholeStep(case, memory, state, rotation or Rotation(1, 1, 0), rng)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", list(judge.OUT_BOUNDS))
@pytest.mark.parametrize("case", [KDA, GDN, replace(KDA, lower_bound=-5.0)], ids=str)
def test_right_answers_pass(case, dtype, norm):
    found = workload(replace(case, dtype=dtype, norm=norm)).judge()
    assert found.complaint == ""
    assert 0 < found.error_state < judge.STATE_BOUND
    assert 0 < found.error_out < judge.OUT_BOUNDS[dtype]


def louder(**operands):
    step.kda_decode_step(**operands)
    operands["out"][:] *= np.float32(1.01).astype(operands["out"].dtype)


def history_left_alone(**operands):
    kept = operands["cs_v"].copy()
    step.kda_decode_step(**operands)
    operands["cs_v"][:] = kept


def every_row_written(**operands):
    step.kda_decode_step(**operands)
    operands["out"][operands["out"] == 0] = 1


@pytest.mark.parametrize(
    "fused, complaint",
    [
        (louder, "error of out is 0.0"),
        (history_left_alone, "wrong conv history"),
        (every_row_written, "the output of a padding row is not zero"),
    ],
)
def test_wrong_answers_do_not(fused, complaint, monkeypatch):
    monkeypatch.setitem(step.FUSED, "kda", fused)
    assert complaint in workload(KDA).judge().complaint


def test_a_chain_that_disagrees_is_seen(monkeypatch):
    def decode(*operands, **options):
        step.kda_packed_decode(*operands, **options)
        operands[5][:] *= np.float32(1 + 1e-6)

    monkeypatch.setitem(step.PACKED, "kda", decode)
    assert workload(KDA).judge().complaint == "the unfused chain leaves another state"


@pytest.mark.parametrize("case", [KDA, GDN], ids=str)
def test_a_step_is_two_rows(case):
    """The chain calls two operations a group of slots, on the same slots as the step."""
    made = workload(case, Rotation(2, 4, 0))
    fused, chain = made.parts()
    assert [part.case.operation for part in (fused, chain)] == ["step", "chain"]
    assert not chain.case.norm
    assert (len(fused.calls), len(chain.calls)) == (2, 4)
    assert chain.bytes_moved == chain.calls[0].bytes_moved + chain.calls[1].bytes_moved
    state = 2 * 128 * 128 * 4
    assert fused.bytes_moved > 4 * 2 * state
    before = made._state.copy()
    fused.bound()
    changed = [slot for slot in range(len(before)) if not np.array_equal(before[slot], made._state[slot])]
    assert len(changed) == case.B
    made._state[:] = before
    chain.bound()
    assert changed == [
        slot for slot in range(len(before)) if not np.array_equal(before[slot], made._state[slot])
    ]
    fused.eager()
    chain.eager()


def test_the_suite_has_steps_of_both_rules():
    found = suite.suite_cases(groups=("step",))
    assert {case.op for case in found} == {"kda", "gdn"}
    assert all(case.norm and case.operation == "step" and not case.problem for case in found)
    assert (
        replace(KDA, K=64).problem == "step is there for kda and gdn with K = V = 128; got kda, K=64, V=128"
    )


def test_command_on_numpy():
    arguments = ["bench", "step", "--backend", "numpy", "--preset", "qwen3-next", "--batch", "1,2"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    title = "gdn step: H=2, HV=4, K=128, V=128, bfloat16, softplus gate"
    assert done.stdout.splitlines().count(title) == 1
    assert [
        line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("normed ", "chain "))
    ] == [[form, B] for B in "12" for form in ("normed", "chain")]
    assert "chain: causal_conv1d_update, then the packed decode; never an output norm." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def rows_of(*cases_):
    return [make_row(each, median_us=3.0, yardstick_us=2.0, bytes_moved=1000) for each in cases_]


def test_step_and_chain_share_the_compact_table_and_its_lines_tell_them_apart():
    rows = [
        row
        for B in (1, 64)
        for row in rows_of(replace(KDA, B=B), replace(KDA, B=B, operation="chain", norm=False))
    ]
    (table,) = render.compact(rows)
    assert table.title == "step, us and ratio: kda H=1 HV=2 bfloat16 softplus gate"
    assert [line[0] for line in table.lines] == ["normed", "chain"]
    assert naming.names_of(rows[1]) == "chain, B=1"
    assert len({row.identity for row in rows}) == 4
    (plain,) = render.compact(rows_of(replace(KDA, norm=False), replace(KDA, operation="chain", norm=False)))
    assert [line[0] for line in plain.lines] == ["fused", "chain"]


def test_a_plot_has_one_column_with_a_line_for_each(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'kda-cupy[plot]'")
    rows = rows_of(KDA, replace(KDA, operation="chain", norm=False))
    figure.write_plot(Record({}, Protocol("cuda", "", "cold", 9), rows), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count("rows B") == 1 and "normed" in drawn and "chain" in drawn


@pytest.mark.parametrize("case", [KDA, GDN], ids=str)
def test_bytes_follow_the_formulas(case):
    """Counted by hand: B=4, H=1, HV=2, bf16; C=512 channels."""
    raw = ((256 if case.op == "kda" else 2) + 2) * 2 + 4  # gate, beta, slot
    state, out = 2 * 2 * 65536, 256 * 2
    fused, chain = workload(case).parts()
    assert fused.bytes_moved == 4 * (state + 7 * 512 * 2 + raw + 2 * out)
    # Without the norm's gate; what the convolution writes, the decode reads.
    assert chain.bytes_moved == fused.bytes_moved - 4 * out + 4 * 2 * 512 * 2


@pytest.mark.parametrize("case", [KDA, GDN], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_the_output_of_the_chain_is_judged_too(case, norm, monkeypatch):
    packed = step.PACKED[case.op]

    def louder(*operands, **options):
        packed(*operands, **options)
        options["out"][:] *= np.float32(1.01)

    def everywhere(*operands, **options):
        packed(*operands, **options)
        options["out"][options["out"] == 0] = 1

    case = replace(case, dtype="float32", norm=norm)
    monkeypatch.setitem(step.PACKED, case.op, louder)
    assert workload(case).judge().complaint == "error of out is 0.01, above 2e-06"
    monkeypatch.setitem(step.PACKED, case.op, everywhere)
    assert workload(case).judge().complaint == "the output of a padding row is not zero"


def test_a_table_of_gpu_times_loses_no_digit():
    rows = [
        make_row(replace(KDA, B=256), Verdict(1.66e-3, 8.75e-8), median_us=118.0, p95_us=118.0, bytes_moved=421_000_000,
                 yardstick_us=104.0, host_eager_us=124.0, host_bound_us=18.3),
    ]  # fmt: skip
    file = io.StringIO()
    render.print_record(Record({"gpus": []}, Protocol("cuda", "", "cold", 9), rows), file)
    assert "8.75e-8" in file.getvalue() and "\u2026" not in file.getvalue()
