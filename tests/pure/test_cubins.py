# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead: what is found, what is loaded, what is refused, and that the way out is to compile."""

import dataclasses
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
from fake_cupy import fake_cubin, machine

from kda_cupy import CompileError, cubins, modules, sources
from kda_cupy.config import CommitConfig, PackedDecodeConfig

CONFIG = PackedDecodeConfig(
    True, False, 128, 128, "bfloat16", "bfloat16", "bfloat16", "float32", "float32", True, 160
)
OTHER = CommitConfig("bfloat16", True, 1000)
CODE = fake_cubin("packed")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that the variable names."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setenv(cubins.VARIABLE, str(folder))
    return folder


def failing(cause):
    def fail():
        raise cause

    return fail


# Names


def test_a_stored_kernel_is_found_whole(place):
    path = cubins.store(CONFIG, "sm_90", CODE, place)
    assert cubins.find(CONFIG, "sm_90") == path
    assert path.read_bytes() == CODE
    named = cubins.parse(path)
    assert (named.entry, named.arch) == ("packed_decode", "sm_90")
    assert named.source == sources.digest("packed_decode.cu")
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in place.iterdir()] == [path.name]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PackedDecodeConfig)])
def test_every_field_of_a_configuration_counts(place, field):
    """A kernel for other dtypes, dims, gates or another parameter struct must never be taken for this one."""
    old = getattr(CONFIG, field)
    new = (not old) if isinstance(old, bool) else old + 4 if isinstance(old, int) else "float16"
    cubins.store(dataclasses.replace(CONFIG, **{field: new}), "sm_90", CODE, place)
    assert cubins.find(CONFIG, "sm_90") is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_9", "sm_900", "sm_100", "sm_90a"])
def test_kernels_of_other_architectures_are_not_found(place, arch):
    cubins.store(CONFIG, arch, CODE, place)
    assert cubins.find(CONFIG, "sm_90") is None


def test_kernels_of_other_sources_are_not_found(place, monkeypatch):
    """After an update of the package, headers included, everything is compiled anew."""
    cubins.store(CONFIG, "sm_90", CODE, place)
    read = sources.read_kernel
    with monkeypatch.context() as patch:
        patch.setattr(sources, "read_kernel", lambda name: read(name) + "// x" * (name == "gates.cuh"))
        sources.flatten.cache_clear()
        assert cubins.find(CONFIG, "sm_90") is None
    sources.flatten.cache_clear()
    assert cubins.find(CONFIG, "sm_90") is not None


def test_kernels_of_other_compiler_options_are_not_found(place, monkeypatch):
    cubins.store(CONFIG, "sm_90", CODE, place)
    monkeypatch.setattr(cubins, "OPTIONS", ("--std=c++20",))
    assert cubins.find(CONFIG, "sm_90") is None


def test_kernels_of_one_source_are_told_apart(place):
    configs = [
        CommitConfig(dtype, vector, 8) for vector in (True, False) for dtype in ("bfloat16", "float32")
    ]
    for config in configs:
        cubins.store(config, "sm_90", fake_cubin(config.variant), place)
    for config in configs:
        assert cubins.find(config, "sm_90").read_bytes() == fake_cubin(config.variant)


# Places


def test_the_folder_inside_the_package_is_looked_at_unless_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "PACKAGED", tmp_path / "inside")
    for unset in (
        lambda: monkeypatch.delenv(cubins.VARIABLE, raising=False),
        lambda: monkeypatch.setenv(cubins.VARIABLE, ""),
    ):
        unset()
        assert cubins.folder() == tmp_path / "inside"
    assert cubins.find(CONFIG, "sm_90") is None  # it need not be there
    path = cubins.store(CONFIG, "sm_90", CODE, cubins.folder())
    assert cubins.find(CONFIG, "sm_90") == path
    (tmp_path / "named").mkdir()
    monkeypatch.setenv(cubins.VARIABLE, str(tmp_path / "named"))
    assert cubins.find(CONFIG, "sm_90") is None


def test_a_named_folder_that_is_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(cubins.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.warns(
        RuntimeWarning, match=r"KDA_CUPY_CUBINS names .*nowhere, where there is no folder.*kda-cupy warmup"
    ):
        assert cubins.find(CONFIG, "sm_90") is None


# Damage


def damaged(path, how):
    code = path.read_bytes()
    match how:
        case "cut short":
            path.write_bytes(code[:-1])
        case "empty":
            path.write_bytes(b"")
        case "a bit turned":
            path.write_bytes(code[:-1] + bytes([code[-1] ^ 1]))
        case "zeros":
            path.write_bytes(bytes(len(code)))
        case "machine code of a CPU":
            path.write_bytes(code[:18] + (62).to_bytes(2, "little") + code[20:])
        case "text":
            path.write_text("#!/bin/sh\n")
        case "a folder":
            path.unlink()
            path.mkdir()


DAMAGES = ["cut short", "empty", "a bit turned", "zeros", "machine code of a CPU", "text", "a folder"]


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_files_are_told_and_passed_over(place, how):
    path = cubins.store(CONFIG, "sm_90", CODE, place)
    damaged(path, how)
    with pytest.warns(RuntimeWarning, match="is not used, for it .*; the kernel is compiled here") as caught:
        assert cubins.find(CONFIG, "sm_90") is None
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)


@pytest.mark.parametrize("code", [b"", b"#!/bin/sh\n", CODE[:18] + (62).to_bytes(2, "little") + CODE[20:]])
def test_a_right_digest_makes_no_machine_code(place, code):
    """A shell script, or the program of a CPU, under a name that fits it."""
    cubins.store(CONFIG, "sm_90", code, place)
    with pytest.warns(RuntimeWarning, match="it holds no machine code for an NVIDIA GPU"):
        assert cubins.find(CONFIG, "sm_90") is None


def test_a_whole_file_beside_a_damaged_one_is_used(place):
    bad, good = sorted(cubins.store(CONFIG, "sm_90", fake_cubin(text), place) for text in ("one", "two"))
    damaged(bad, "cut short")
    with pytest.warns(RuntimeWarning, match="cut short"):
        assert cubins.find(CONFIG, "sm_90") == good


@pytest.mark.parametrize(
    "name", ["packed_decode.cubin", "..cubin", "x.sm_90.zz.zz.zz.cubin", "evil.py", ".part"]
)
def test_what_is_not_named_by_us_is_none_of_ours(place, name):
    (place / name).write_bytes(CODE)
    assert cubins.parse(place / name) is None
    assert cubins.find(CONFIG, "sm_90") is None


# Writing


def test_a_failed_write_leaves_nothing(place, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        cubins.store(CONFIG, "sm_90", CODE, place)
    assert not list(place.iterdir())


def _store_often(place: str) -> None:
    for _ in range(25):
        cubins.store(CONFIG, "sm_90", CODE, Path(place))


def test_processes_that_write_one_folder_do_not_meet(place):
    """Whoever looks meanwhile finds nothing or a whole file, without a warning."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as workers:
        jobs = workers.map_async(_store_often, [str(place)] * 6)
        while not jobs.ready():
            found = cubins.find(CONFIG, "sm_90")
            assert found is None or not cubins.damage(found)
        jobs.get()
    assert [path.name for path in place.iterdir()] == [cubins.find(CONFIG, "sm_90").name]


# The runtime


def test_the_runtime_takes_what_is_there_and_compiles_the_rest(place):
    path = cubins.store(CONFIG, "sm_90", CODE, place)
    with machine() as cupy:
        kernel = modules.get_kernel(CONFIG, 0)
        other = modules.get_kernel(OTHER, 0)
        assert modules.get_kernel(CONFIG, 0) is kernel
    assert (kernel.compiled_ahead, other.compiled_ahead) == (path.name, "")
    assert [entry for entry in cupy.log if entry[0] in ("load", "compile")] == [
        ("load", 0, str(path)),
        ("compile", 0, "commit"),
    ]
    assert kernel.variant == CONFIG.variant
    assert kernel.source_digest == sources.digest("packed_decode.cu")


def test_each_gpu_takes_the_kernel_of_its_own_architecture(place):
    paths = {arch: cubins.store(CONFIG, arch, CODE, place) for arch in ("sm_80", "sm_90")}
    with machine(gpus=3, capability=("90", "80", "120")) as cupy:
        taken = [modules.get_kernel(CONFIG, device).compiled_ahead for device in (2, 1, 0)]
    assert taken == ["", paths["sm_80"].name, paths["sm_90"].name]
    assert [entry[:2] for entry in cupy.log] == [("compile", 2), ("load", 1), ("load", 0)]


def test_what_the_driver_refuses_is_compiled_with_one_warning(place):
    """Machine code of a newer CUDA than the driver's, say."""
    path = cubins.store(CONFIG, "sm_90", CODE, place)
    refusal = RuntimeError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
    with machine(fail_to_load=failing(refusal)) as cupy:
        with pytest.warns(RuntimeWarning, match="it cannot be loaded .CUDA_ERROR_INVALID_IMAGE") as caught:
            kernel = modules.get_kernel(CONFIG, 0)
        modules.get_kernel(CONFIG, 0)
    assert kernel.compiled_ahead == ""
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert [entry[0] for entry in cupy.log] == ["load", "compile"]


@pytest.mark.parametrize("how", DAMAGES)
def test_the_runtime_compiles_what_is_damaged(place, how):
    damaged(cubins.store(CONFIG, "sm_90", CODE, place), how)
    with machine() as cupy, pytest.warns(RuntimeWarning, match="the kernel is compiled here"):
        assert modules.get_kernel(CONFIG, 0).compiled_ahead == ""
    assert [entry[0] for entry in cupy.log] == ["compile"]


def test_kernels_compiled_ahead_need_no_compiler(place):
    """Nor a folder for temporary files, nor headers: whatever would stop CuPy from compiling is not asked for."""
    cubins.store(CONFIG, "sm_90", CODE, place)
    with machine(fail=failing(RuntimeError("Failed to find CUDA headers"))):
        assert modules.get_kernel(CONFIG, 0).compiled_ahead
        with pytest.raises(CompileError):
            modules.get_kernel(OTHER, 0)


def test_threads_that_start_together_load_once(place):
    cubins.store(CONFIG, "sm_90", CODE, place)
    start, kernels = threading.Barrier(8), []

    def work():
        start.wait()
        kernels.append(modules.get_kernel(CONFIG, 0))

    with machine() as cupy:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1
    assert [entry[0] for entry in cupy.log] == ["load"]
