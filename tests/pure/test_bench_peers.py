# SPDX-License-Identifier: Apache-2.0
"""Peers of the benchmark: judged, compared, timed and shown like this package; a stranger's mistakes stay its own."""

import importlib.util
import io
import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from kda_cupy.bench import challenge, command, peers, render
from kda_cupy.bench.cases import Case, random_state
from kda_cupy.bench.challenge import APPROXIMATION, meet
from kda_cupy.bench.decode import OPERATIONS, PackedDecode
from kda_cupy.bench.judge import OUT_BOUNDS
from kda_cupy.bench.naming import series
from kda_cupy.bench.peers import Peer, Unsupported, find, register
from kda_cupy.bench.record import Protocol, Record, make_row, summarize
from kda_cupy.bench.workload import Memory, Rotation

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "peer_in_plain_torch.py"
ON_HOST = Memory(np.asarray, np.array, np.zeros)
SMALL = Case("kda", H=1, HV=2, K=16, V=8, B=3)
ARGUMENTS = ["--backend", "numpy", "--heads", "1", "--head-dim", "16", "--repeats", "9", "--batch", "2"]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def no_torch(monkeypatch):
    """Peers get NumPy arrays, so that nothing here needs torch."""

    class Nothing:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(no_grad=Nothing))
    monkeypatch.setattr(challenge, "as_tensor", lambda array: array)
    monkeypatch.setattr(challenge, "as_numpy", lambda array: np.array(array, np.float32))
    monkeypatch.setattr(challenge, "_on_current_stream", lambda call: call())


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", dict(peers.PEERS))
    return peers.PEERS


def packed(case, change_out=1.0, change_state=1.0):
    """A peer that is this package, but for a factor."""

    def step(x):
        B = len(x.q)
        rows = [each.reshape(B, -1) for each in (x.q, x.k, x.v)]
        state = x.state.copy()
        out, _ = OPERATIONS[case.op](
            np.concatenate(rows, axis=1), x.gate.reshape(B, -1), x.beta.reshape(B, -1), x.A_log, x.dt_bias, state,
            np.arange(B), lower_bound=case.lower_bound,
        )  # fmt: skip
        return out * np.float32(change_out).astype(out.dtype), state * np.float32(change_state)

    return step


def met(case, make):
    rng = np.random.default_rng(0)
    state = random_state(case, case.B + 2, rng)
    workload = PackedDecode(case, ON_HOST, state, Rotation(1, 1, 0), rng)
    return meet(Peer("peer", make), workload, rng)


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", list(OUT_BOUNDS))
def test_a_peer_that_is_right(op, lower_bound, dtype, no_torch):
    case = replace(SMALL, op=op, lower_bound=lower_bound, dtype=dtype)
    found = met(case, packed)
    row = found.row(median_us=1.0)
    assert (row.status, row.note, row.peer, row.difference) == ("timed", "", "peer", 0.0)
    assert 0 < row.error_out < OUT_BOUNDS[dtype] and 0 < row.error_state < 1e-6
    assert len(found.calls(4)) == 4


@pytest.mark.parametrize(
    ("out", "state", "what"), [(1.05, 1, "output"), (1, 1.001, "state"), (np.nan, 1, "output")]
)
def test_a_peer_that_is_wrong_is_not_timed(out, state, what, no_torch):
    found = met(SMALL, lambda case: packed(case, out, state))
    row = found.row()
    assert row.status == "wrong" and f"its {what} differs from kda_cupy's by" in row.note
    assert found.calls(4) == []
    json.dumps(row.difference, allow_nan=False)


def test_a_small_difference_is_shown(no_torch):
    row = met(replace(SMALL, dtype="float32"), lambda case: packed(case, 1 + 2e-5)).row()
    assert row.status == "timed"
    assert row.difference == pytest.approx(2e-5, rel=0.01) and row.difference < APPROXIMATION


def unsupported(case):
    raise Unsupported("it knows no such gate")


def broken(case):
    return lambda x: x.no_such_thing


@pytest.mark.parametrize(
    ("make", "note"),
    [(unsupported, "it knows no such gate"), (broken, "AttributeError: 'Operands' object has no")],
)
def test_what_a_peer_raises_is_a_note(make, note, no_torch):
    found = met(SMALL, make)
    assert found.calls(1) == [] and found.row().status == "skipped" and found.row().note.startswith(note)


# Finding them


def test_names_are_short_and_unique(registry):
    mine = register(Peer("mine", packed))
    assert find("mine") is mine and register(mine) is mine
    with pytest.raises(ValueError, match="there is a peer mine already"):
        register(Peer("mine", broken))
    for name in ("", "much-too-long", "a b"):
        with pytest.raises(ValueError, match="1 to 7 letters"):
            register(Peer(name, packed))


def test_a_file_is_a_peer(registry, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from kda_cupy.bench.peers import Peer\nPEER = Peer('mine', print, packages=())\n")
    assert find(str(path)) == registry["mine"] == find(str(path))
    path.write_text("PEER = 3\n")
    with pytest.raises(LookupError, match="has no PEER"):
        find(str(path))
    with pytest.raises(LookupError, match=r"there is no file .*none\.py"):
        find(str(tmp_path / "none.py"))
    with pytest.raises(LookupError, match="there is no peer flo; known: fla, mine"):
        find("flo")


def run(*arguments):
    return CliRunner().invoke(command.bench, ["decode", *map(str, arguments)])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "there is no file"),
        ("PEER = 3", "has no PEER"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "from kda_cupy.bench.peers import Peer\nPEER = Peer('x', print, packages=('no-such-a', 'no-such-b'))",
            "no-such-a and no-such-b are not installed; pip install no-such-a no-such-b",
        ),
    ],
)
def test_what_is_not_there_is_refused_in_one_line_before_anything_runs(source, words, registry, tmp_path):
    path = tmp_path / "mine.py"
    if source:
        path.write_text(source)
    result = run(*ARGUMENTS, "--peer", path)
    assert result.exit_code == 2 and words in result.output
    assert "backend" not in result.output and "Traceback" not in result.output


def test_a_peer_for_gpus_is_refused_on_numpy(registry, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from kda_cupy.bench.peers import Peer\nPEER = Peer('x', print, packages=(), on_cpu=False)"
    )
    result = run(*ARGUMENTS, "--peer", path)
    assert result.exit_code == 2 and "--peer x needs a GPU, and this is the NumPy backend" in result.output


# Table and record


def test_a_run_with_a_peer(registry, no_torch, monkeypatch):
    registry["mine"] = Peer("mine", packed, packages=("numpy",), remark="it is the same")
    result = run(*ARGUMENTS, "--peer", "mine", "--json", "-")
    assert result.exit_code == 0, result.output
    record = Record.from_json(result.stdout)
    assert [(row.peer, row.status) for row in record.rows] == [("", "timed"), ("mine", "timed")]
    assert all(len(row.samples_us) == 9 for row in record.rows)
    assert record.rows[0].identity != record.rows[1].identity
    assert record.environment["peers"] == {"mine": f"numpy {np.__version__}; it is the same"}
    table = [line.split()[:2] for line in result.stderr.splitlines() if line.startswith("2 ")]
    assert table == [["2", "ours"], ["2", "mine"]]
    assert f"mine: numpy {np.__version__}; it is the same." in result.stderr


def gpu_record():
    record = Record({"peers": {"fla": "fla-core 0.6.0"}}, Protocol("cuda", "graph", "cold", 9, 0, 1, 1))
    for peer, us in (("", 424_242.0), ("fla", 987_654.0)):
        row = make_row(
            Case("kda", 12, 12, B=1 << 20),
            peer=peer,
            difference=4.1e-3 if peer else None,
            error_out=1.66e-3,
            error_state=1.2e-7,
            yardstick_us=412_345.0,
            yardstick_bytes=1,
            bytes_moved=1_585_684 << 20,
            host_eager_us=129.84,
            host_bound_us=None if peer else 8.91,
            **summarize([us] * 3),
        )
        record.rows.append(row)
    return record


def test_the_table_fits_80_columns():
    file = io.StringIO()
    render.print_record(gpu_record(), file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in file.getvalue()
    assert any(" ours " in line and "424000" in line for line in lines)
    assert any(" fla " in line and "4.10e-3" in line for line in lines)
    assert not gpu_record().rows[1].is_slow  # "something is wrong here" is said of this package alone


def test_lines_of_compact_tables_and_figures_tell_peers_apart():
    _, lines = series(gpu_record().rows, "B")
    assert list(lines) == ["kda_cupy", "fla"]
    file = io.StringIO()
    render.print_compact(gpu_record(), file)
    assert {"kda_cupy", "fla"} <= {line.split()[0] for line in file.getvalue().splitlines() if line}


def test_records_without_peers_read_as_before():
    stored = json.loads(gpu_record().to_json())
    for row in stored["rows"]:
        del row["peer"], row["difference"]
    assert [row.peer for row in Record.from_json(json.dumps(stored)).rows] == ["", ""]


# The peers that come along


@needs_torch
@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", list(OUT_BOUNDS))
def test_the_example_in_plain_torch_is_right(op, lower_bound, dtype):
    peer = runpy.run_path(str(EXAMPLE))["PEER"]
    case = replace(SMALL, op=op, lower_bound=lower_bound, dtype=dtype, HV=4, H=2)
    rng = np.random.default_rng(0)
    workload = PackedDecode(case, ON_HOST, random_state(case, case.B + 2, rng), Rotation(1, 1, 0), rng)
    row = meet(peer, workload, rng).row()
    assert (row.status, row.note) == ("timed", "")
    assert row.error_out < OUT_BOUNDS[dtype] and row.error_state < 1e-6


@pytest.mark.parametrize(("op", "lower_bound"), [("kda", None), ("kda", -5.0), ("gdn", None)])
def test_fla_in_tritons_interpreter(op, lower_bound):
    """In a process of its own: Triton reads the variable once."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "triton", "fla")):
        pytest.skip("fla-core, torch and triton are not all installed")
    code = f"""
import numpy as np
from kda_cupy.bench.cases import Case, random_state
from kda_cupy.bench.challenge import meet
from kda_cupy.bench.decode import PackedDecode
from kda_cupy.bench.peers import find
from kda_cupy.bench.workload import Memory, Rotation
case = Case({op!r}, 1, 2, K=32, V=16, B=2, dtype="float32", lower_bound={lower_bound})
rng = np.random.default_rng(0)
workload = PackedDecode(
    case, Memory(np.asarray, np.array, np.zeros), random_state(case, 4, rng), Rotation(1, 1, 0), rng)
row = meet(find("fla"), workload, rng).row()
assert row.status == "timed", row.note
assert row.difference < 1e-5, row.difference
"""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_fla_says_what_it_does_not_know():
    make = peers.PEERS["fla"].make
    with pytest.raises(Unsupported, match="no bounded gate"):
        make(Case("gdn", 1, 1, lower_bound=-5.0))
