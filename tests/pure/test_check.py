# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy check``: what it examines, that it notices what is wrong, and what its screens say."""

import json
import math
import sys
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from kda_cupy import gpu
from kda_cupy.accuracy import chain, conv, exams
from kda_cupy.accuracy.exams import VERIFY, Exam
from kda_cupy.accuracy.finding import Finding
from kda_cupy.accuracy.report import Report
from kda_cupy.bench import decode, speculation, step
from kda_cupy.bench.cases import Case
from kda_cupy.bench.workload import Memory
from kda_cupy.cli import main
from kda_cupy.errors import error

ON_HOST = Memory(np.asarray, np.array, np.zeros)
OPERATIONS = ("packed decode", "decode step", "conv", VERIFY)


def run(*arguments):
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def take_all(dtype="float32", operation=None):
    return [
        exam.take(ON_HOST, "cpu") for exam in exams.exams((dtype,)) if operation in (None, exam.operation)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_everything_is_right_on_numpy(dtype):
    findings = take_all(dtype)
    assert [each for each in findings if not each.passed] == []
    assert set(Counter(each.operation for each in findings)) == set(OPERATIONS)
    assert all(0 < each.error_out <= each.bound_out for each in findings)
    assert all(each.error_state > 0 or each.operation == "conv" for each in findings)


def test_every_rule_gate_and_mode_is_examined():
    made = exams.exams(("bfloat16",))
    for operation in ("packed decode", "decode step"):
        seen = {(exam.case.op, exam.case.gate) for exam in made if exam.operation == operation}
        assert seen == {(op, gate) for op in ("kda", "gdn") for gate in ("softplus", "bounded")}
    assert {exam.case.mode for exam in made if exam.operation == VERIFY} == {"rings", "snapshots"}
    assert {exam.case.norm for exam in made if exam.operation == "decode step"} == {True, False}
    assert max(exam.case.t for exam in made if exam.operation == VERIFY) == 16
    assert len({(exam.operation, exam.words) for exam in made}) == len(made)  # no row looks like another


def changed(operation, change):
    """The operation, and what it wrote changed afterwards."""

    def wrong(*operands, **options):
        result = operation(*operands, **options)
        change(operands, options, result)
        return result

    return wrong


def scale(array):
    array *= np.float32(1.01).astype(array.dtype)


DECODE_MISTAKES = {
    "output": lambda operands, options, result: scale(result[0]),
    "state": lambda operands, options, result: scale(operands[5]),
    "nan in the state": lambda operands, options, result: operands[5].fill(np.nan),
    "padding": lambda operands, options, result: result[0].__setitem__(np.asarray(operands[6]) < 0, 1),
}


@pytest.mark.parametrize("mistake", DECODE_MISTAKES)
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_wrong_packed_decode_fails(op, mistake, monkeypatch):
    wrong = changed(decode.OPERATIONS[op], DECODE_MISTAKES[mistake])
    monkeypatch.setitem(decode.OPERATIONS, op, wrong)
    failed = [each for each in take_all(operation="packed decode") if not each.passed]
    wanted = [exam for exam in exams.exams(("float32",)) if exam.operation == "packed decode"]
    assert [each.case for each in failed] == [exam.words for exam in wanted if exam.case.op == op]


STEP_MISTAKES = {
    "output": lambda operands, options, result: scale(options["out"]),
    "state": lambda operands, options, result: scale(
        options["recurrent_state"] if "recurrent_state" in options else options["initial_state"]
    ),
    "history": lambda operands, options, result: (
        options["cs_v"] if "cs_v" in options else options["conv_state"]
    ).__setitem__(..., 0),
    "padding": lambda operands, options, result: (
        options["out"]
        .reshape(len(options["ssm_state_indices"]), -1)
        .__setitem__(np.asarray(options["ssm_state_indices"]) < 0, 1)
    ),
}


@pytest.mark.parametrize("mistake", STEP_MISTAKES)
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_wrong_step_fails(op, mistake, monkeypatch):
    monkeypatch.setitem(step.FUSED, op, changed(step.FUSED[op], STEP_MISTAKES[mistake]))
    findings = take_all(operation="decode step")
    assert [each.passed for each in findings] == [not each.case.startswith(op) for each in findings]


CONV_MISTAKES = {
    "output": lambda operands, options, result: scale(options["out"]),
    "history": lambda operands, options, result: operands[1].__setitem__((..., -1), 0),
    "padding": lambda operands, options, result: options["out"].__setitem__(np.asarray(operands[5]) < 0, 1),
}


@pytest.mark.parametrize("mistake", CONV_MISTAKES)
def test_a_wrong_convolution_fails(mistake, monkeypatch):
    wrong = changed(conv.causal_conv1d_update, CONV_MISTAKES[mistake])
    monkeypatch.setattr(conv, "causal_conv1d_update", wrong)
    assert not any(each.passed for each in take_all(operation="conv"))


@pytest.mark.parametrize("name", ["kda_decode_mtp", "kda_commit"])
def test_a_wrong_verify_or_commit_fails(name, monkeypatch):
    what = "out" if name == "kda_decode_mtp" else "recurrent_state"
    wrong = changed(getattr(speculation, name), lambda operands, options, result: scale(options[what]))
    monkeypatch.setattr(speculation, name, wrong)
    assert not any(each.passed for each in take_all(operation=VERIFY))


def test_an_error_of_the_last_token_alone_fails(monkeypatch):
    calls = []

    def late(operands, options, result):
        calls.append(1)
        if len(calls) == 16:
            scale(result[0])

    monkeypatch.setitem(decode.OPERATIONS, "kda", changed(decode.OPERATIONS["kda"], late))
    exam = Exam("packed decode", Case("kda", 1, 1, dtype="float32", B=2, t=16), chain.examine)
    finding = exam.take(ON_HOST, "cpu")
    assert finding.error_out == pytest.approx(0.01, rel=0.01)
    assert finding.error_state < finding.bound_state and not finding.passed


# Screens


def test_the_screen_fits_80_columns_also_where_something_fails(monkeypatch):
    nan = lambda operands, options, result: result[0].fill(np.nan)  # noqa: E731
    monkeypatch.setitem(decode.OPERATIONS, "gdn", changed(decode.OPERATIONS["gdn"], nan))
    result = run("--backend", "numpy")
    assert result.exit_code == 1
    table = [line for line in result.stdout.splitlines() if line.startswith(OPERATIONS) and ":" not in line]
    assert len(table) == 2 * len(exams.exams(("float32",)))
    assert {line.split()[-1] for line in table} == {"ok", "FAIL"}
    assert max(map(len, table)) <= 80
    assert result.stdout.isascii()  # nothing that a pipe or an old terminal could cut
    assert "packed decode, gdn bounded H=2 HV=4, float32: error of out is nan, above 2e-06" in result.stdout
    assert result.stdout.splitlines()[-1] == "34 of 46 are within their bounds"


def test_everything_right_is_exit_code_0():
    result = run("--backend", "numpy", "--dtype", "float16")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "23 of 23 are within their bounds")
    assert (
        "3.8e-4" in result.stdout and "2.0e-6" in result.stdout
    )  # the bounds stand beside what was measured
    assert "backend: numpy (as asked)" in result.stderr


def test_json_has_stdout_for_itself():
    result = run("--backend", "numpy", "--dtype", "float32", "--json", "-")
    stored = json.loads(result.stdout)
    assert stored["schema"] == "kda_cupy.check" and stored["passed"] and stored["complete"]
    assert {each["operation"] for each in stored["findings"]} == set(OPERATIONS)
    assert all(each["error_state"] <= each["bound_state"] for each in stored["findings"])
    assert "within their bounds" in result.stderr


def test_json_of_nan_passes_nothing():
    finding = Finding("conv", "H=1", "float32", math.nan, 1.0, 0.0, 0.0)
    assert not finding.passed and finding.as_json()["error_out"] is None
    stored = json.loads(Report("numpy", {}, 1, [finding]).to_json())
    assert not stored["passed"] and stored["complete"]


def test_ctrl_c_shows_what_was_examined(monkeypatch, tmp_path):
    real, calls = Exam.take, []

    def take(self, *place):
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *place)

    monkeypatch.setattr(Exam, "take", take)
    path = tmp_path / "check.json"
    result = run("--backend", "numpy", "--json", path)
    assert result.exit_code == 130
    assert result.stdout.splitlines()[-1] == "3 of 3 are within their bounds; 43 were not examined"
    assert "interrupted: 3 of 46 examined" in result.stderr and "with what was examined" in result.stderr
    stored = json.loads(path.read_text())
    assert len(stored["findings"]) == 3 and not stored["passed"] and not stored["complete"]


def test_what_cannot_run_is_a_finding_and_the_others_are_examined(monkeypatch):
    def refuse(*_, **__):
        raise error("KDA-COMPILER-NO-GPU", got="none at all")

    monkeypatch.setitem(step.FUSED, "gdn", refuse)
    result = run("--backend", "numpy", "--dtype", "float32")
    assert result.exit_code == 1
    assert "decode step, gdn softplus H=2 HV=4, float32: KDA-COMPILER-NO-GPU: " in result.stdout
    assert result.stdout.splitlines()[-1] == "21 of 23 are within their bounds"


def test_without_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(gpu, "installed_wheels", lambda: {})
    result = run("--backend", "cuda")
    assert (result.exit_code, result.stdout) == (2, "") and "KDA-COMPILER-NO-CUPY" in result.stderr
    result = run("--backend", "numpy", "--device", 0)
    assert result.exit_code == 2 and "--device means nothing on the NumPy backend" in result.stderr
