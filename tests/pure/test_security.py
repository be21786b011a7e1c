# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises: files are data, sizes are checked before memory is taken, and no name becomes code."""

import ast
import dataclasses
import io
import json
import os
import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import fake_cubin

from kda_cupy import CompileError, OperandError, StatePool, cubins, sources, warmup
from kda_cupy.bench.cases import PRESETS
from kda_cupy.bench.record import Record
from kda_cupy.config import (
    OPTIONS,
    CommitConfig,
    ConvUpdateConfig,
    MtpVerifyConfig,
    PackedDecodeConfig,
    StepConfig,
)
from kda_cupy.pool import tensor_file
from kda_cupy.trace import load_trace

PACKAGE = Path(cubins.__file__).parent
CONFIG = CommitConfig("bfloat16", True, 1000)
CODE = fake_cubin("commit")


def peak_bytes(call):
    """What a call that fails takes on its way, and what it raises."""
    tracemalloc.start()
    try:
        with pytest.raises((OperandError, ValueError)) as caught:
            call()
        return tracemalloc.get_traced_memory()[1], caught.value
    finally:
        tracemalloc.stop()


# ---- nothing that is read is run ----------------------------------------------------------------------------------


def test_the_package_uses_nothing_that_runs_data():
    """No pickle, no eval, no shell: np.load says so itself, and one subprocess has a fixed command without a shell.

    One place runs a file: `bench decode --peer FILE.py`, which is a program that its caller names.
    """
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "runpy"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {each.name for each in node.names} | {getattr(node, "module", None)}
                peers = {"runpy"} if path.relative_to(PACKAGE).as_posix() == "bench/peers.py" else set()
                assert not (banned - peers) & names, path
            if not isinstance(node, ast.Call):
                continue
            called, keywords = ast.unparse(node.func), {each.arg: each.value for each in node.keywords}
            assert called not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"), path
            assert "shell" not in keywords, path
            if called in ("np.load", "numpy.load"):
                assert ast.unparse(keywords["allow_pickle"]) == "False"


# ---- sizes before memory ------------------------------------------------------------------------------------------


def npz(members):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def header(shape, descr="<f4"):
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": descr, "fortran_order": False, "shape": shape})
    return made.getvalue()


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 62, 1 << 62), (300_000_000,)])
def test_a_trace_that_promises_more_than_it_holds_takes_no_memory(tmp_path, shape):
    path = tmp_path / "trace.npz"
    path.write_bytes(npz({"out.npy": header(shape) + bytes(1000)}))
    peak, error = peak_bytes(lambda: load_trace(path))
    assert peak < 5_000_000 and "cut or damaged" in str(error)


def test_a_trace_that_unpacks_to_a_thousand_times_its_size_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("kda_cupy.trace.MOST_BYTES", 1 << 20)
    path = tmp_path / "trace.npz"
    path.write_bytes(npz({"out.npy": header((5_000_000,)) + bytes(20_000_000)}))
    assert path.stat().st_size < 50_000
    peak, error = peak_bytes(lambda: load_trace(path))
    assert peak < 5_000_000 and "cut or damaged" in str(error)


def test_a_header_larger_than_any_for_this_pool_is_not_parsed(tmp_path):
    """Parsed JSON takes many times its text: 30 MB of empty lists would be two gigabytes."""
    text = b'{"__metadata__":{},"a":[' + b"[]," * 700_000 + b"[]]}"
    path = tmp_path / "states"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    pool = StatePool(2, 1, 4, 4, device="cpu")
    peak, error = peak_bytes(lambda: pool.load(path))
    assert peak < 1_000_000 and error.code == "KDA-POOL-FILE"
    assert pool.free_slots == 2


@pytest.mark.parametrize("capacity", [1, 100, 20_000])
def test_the_longest_header_that_a_pool_writes_is_one_that_it_reads(tmp_path, capacity):
    pool = StatePool(capacity, 1, 4, 1, device="cpu")
    pool.allocate(capacity)
    pool.save(tmp_path / "states")
    other = StatePool(capacity, 1, 4, 1, device="cpu")
    assert len(other.load(tmp_path / "states")) == capacity


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1 << 62, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 62]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True] * 4, "data_offsets": [0, 16]},
        {"dtype": "O", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
    ],
    ids=str,
)
def test_a_tensor_file_is_believed_nothing(tmp_path, entry):
    text = json.dumps({"state": entry}).encode()
    path = tmp_path / "states"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    pool = StatePool(2, 1, 4, 4, device="cpu")
    peak, error = peak_bytes(lambda: pool.load(path))
    assert peak < 1_000_000 and error.code == "KDA-POOL-FILE"
    assert pool.free_slots == 2 and not pool.state.any()


def test_the_limit_of_a_header_is_that_of_the_format():
    assert tensor_file.MAX_HEADER_BYTES == 100_000_000


# ---- kernels compiled ahead ---------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that the variable names."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setenv(cubins.VARIABLE, str(folder))
    return folder


def test_a_folder_that_everybody_may_write_to_is_not_used(place):
    cubins.store(CONFIG, "sm_90", CODE, place)
    place.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"every user of this machine may write to it.*chmod o-w"):
        assert cubins.find(CONFIG, "sm_90") is None
    place.chmod(0o775)
    assert cubins.find(CONFIG, "sm_90") is not None


def test_a_kernel_that_everybody_may_write_to_is_not_used(place):
    cubins.store(CONFIG, "sm_90", CODE, place).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="every user of this machine may write to it"):
        assert cubins.find(CONFIG, "sm_90") is None


def test_a_pipe_or_a_huge_file_in_the_place_of_a_kernel_is_not_waited_for(place):
    path = cubins.store(CONFIG, "sm_90", CODE, place)
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(RuntimeWarning, match="no file of a kernel's size"):
        assert cubins.find(CONFIG, "sm_90") is None
    path.unlink()
    with path.open("wb") as file:
        file.truncate(cubins.MOST_BYTES + 1)
    with pytest.warns(RuntimeWarning, match="no file of a kernel's size"):
        assert cubins.find(CONFIG, "sm_90") is None


@pytest.mark.parametrize(
    "arch", ["../../sm_90", "sm_90 -I/", "sm_90\n", "sm_90;ls", "", "compute_90", "sm_9999"]
)
def test_no_architecture_is_a_path_or_an_option(arch):
    from click.testing import CliRunner

    ran = CliRunner().invoke(warmup.warmup, ["--preset", next(iter(PRESETS)), "--arch", arch])
    assert ran.exit_code == 2 and "wanted sm_" in ran.output


# ---- what reaches the compiler --------------------------------------------------------------------------------------


CONFIGS = (
    PackedDecodeConfig(True, True, 128, 128, *["bfloat16"] * 5, vector=True, params_bytes=160),
    StepConfig(True, True, 2, *["bfloat16"] * 7, vector=True, params_bytes=160),
    MtpVerifyConfig(True, *["bfloat16"] * 7, vector=True, params_bytes=160),
    ConvUpdateConfig(4, True, "bfloat16", "bfloat16", 256, 160),
    CONFIG,
)
DEFINE = re.compile(r"-DKDA_[A-Z0-9_]+=[A-Za-z0-9_]+")


def test_options_are_macros_with_words_and_numbers_for_values():
    assert OPTIONS == ("--std=c++17",)
    for preset in PRESETS.values():
        for config in [*CONFIGS, *warmup.variants(preset)]:
            for define in config.defines():
                assert DEFINE.fullmatch(define), define


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.entry)
def test_no_dtype_name_becomes_code(config):
    names = [each.name for each in dataclasses.fields(config) if getattr(config, each.name) == "bfloat16"]
    assert names
    for name in names:
        for hostile in (
            "float -include /etc/passwd",
            "float)\n#include <x>",
            "float;",
            "",
            "Float32",
            "int8",
        ):
            with pytest.raises(KeyError):
                dataclasses.replace(config, **{name: hostile}).defines()


def test_only_files_of_the_package_are_pasted_into_a_source():
    for name in sources.kernel_names():
        text = sources.flatten(name)
        assert not re.search(r"^\s*#\s*include\b", text, re.MULTILINE)
        assert sources.read_kernel(name).count("\n") < text.count("\n")


def test_compilation_errors_do_not_run_what_they_show():
    """A message with braces in it is no format string."""
    from kda_cupy.errors import error

    shown = error("KDA-STATE-DTYPE", operand="{0.__class__}", got="{operand.__init__.__globals__}")
    assert "{operand.__init__.__globals__}" in str(shown) and "function" not in str(shown)
    assert issubclass(CompileError, RuntimeError)


# ---- what is written ------------------------------------------------------------------------------------------------


def test_a_page_of_a_record_shows_text_and_runs_nothing():
    from kda_cupy.bench import pages

    record = Record.from_json(
        sorted(Path("benchmarks/results").glob("*.json"))[-1].read_text(encoding="utf-8")
    )
    record.environment["cpu"] = "<script>alert(1)</script>"
    assert "<script" not in pages.html(record)


def test_a_new_file_of_states_follows_the_umask_and_an_old_one_keeps_its_mode(tmp_path):
    pool = StatePool(2, 1, 4, 4, device="cpu")
    old = os.umask(0o077)
    try:
        pool.save(tmp_path / "states", [])
    finally:
        os.umask(old)
    assert (tmp_path / "states").stat().st_mode & 0o777 == 0o600
    pool.save(tmp_path / "states", [])
    assert (tmp_path / "states").stat().st_mode & 0o777 == 0o600
