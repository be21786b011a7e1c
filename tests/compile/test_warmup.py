# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead by the real NVRTC, without a GPU: on odd machines, and to the bit as CuPy compiles them."""

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kda_cupy import CompileError, KdaError, cubins, nvrtc, sources, warmup
from kda_cupy.bench.cases import PRESETS
from kda_cupy.compile_errors import explain
from kda_cupy.config import OPTIONS

try:
    nvrtc.version()
except nvrtc.DynamicLibNotFoundError as missing:
    pytest.skip(f"NVRTC cannot be loaded ({str(missing).splitlines()[0]})", allow_module_level=True)

ROOT = Path(__file__).parents[2]
MODEL = PRESETS["kimi-k3-tp8"]
SMALL = warmup.variants(replace(PRESETS["qwen3-next"], dtype="float32"))[0]
"""Compiles in no time, and for every architecture."""


def sections(elf):
    """What an ELF file consists of, by name."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    words = elf[headers[names][4] :]
    return {
        words[name : words.index(b"\0", name)].decode(): elf[offset : offset + length]
        for name, _, _, _, offset, length, *_ in headers
    }


def machine_code(elf, config):
    return sections(elf)[f".text.{config.entry}"]


@pytest.fixture
def poisoned_headers(tmp_path):
    """A toolkit whose every header is of another time."""
    include = tmp_path / "old toolkit" / "include"
    include.mkdir(parents=True)
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "vector_types.h", "cuda_runtime_api.h"):
        (include / name).write_text("#define CUDART_VERSION 9000\n#error from another time\n")
    return include


@pytest.fixture
def cupy_compile(monkeypatch):
    """CuPy's own way from source to machine code, on a machine without a GPU: ``(config, capability, *options)``."""
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="CuPy is not installed")
    # CuPy asks for the current GPU even when it is told the architecture.
    monkeypatch.setattr(
        compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{arch}", "cubin")
    )

    def compile_it(config, capability, *options, source=""):
        options = (*OPTIONS, "-ftz=true", *options, *config.defines())
        text = source or sources.flatten(config.source)
        return compiler.compile_using_nvrtc(text, options, capability, "kern.cu")[0]

    return compile_it


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("a GPU of long ago", "KDA-COMPILER-ARCH"),
        ("a GPU of the future", "KDA-COMPILER-ARCH"),
        ("a GPU that is too old for tensor cores", "KDA-COMPILER-OLD-GPU"),
        ("a folder whose name is no UTF-8", "KDA-COMPILER-TMPDIR"),
        ("no folder for temporary files", "KDA-COMPILER-TMPDIR"),
        ("a header that is missing", "KDA-COMPILER-HEADERS"),
        ("a broken source", "KDA-COMPILER-COMPILE"),
    ],
)
def test_what_cupy_really_raises_is_understood(cupy_compile, what, code, tmp_path, monkeypatch):
    """The pages are chosen by words of CuPy and NVRTC: these are the real ones."""
    commit = next(config for config in warmup.variants(MODEL) if config.entry == "commit")
    config, capability, source = SMALL, "90", ""
    match what:
        case "a GPU of long ago":
            capability = "20"
        case "a GPU of the future":
            capability = "999"
        case "a GPU that is too old for tensor cores":
            config, capability = replace(commit, activation="float32"), "75"
        case "a folder whose name is no UTF-8":
            folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
            Path(folder).mkdir()
            monkeypatch.setattr("tempfile.tempdir", folder)
        case "no folder for temporary files":
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        case "a header that is missing":
            source = "#include <cuda_something_else.h>\n"
        case "a broken source":
            source = "int x = nonsense;\n"
    with pytest.raises(Exception) as caught:
        cupy_compile(config, capability, source=source)
    told = explain(caught.value, config, lambda: "this machine")
    assert isinstance(told, KdaError), repr(caught.value)
    assert told.code == code, repr(caught.value)


@pytest.mark.parametrize("config", warmup.variants(MODEL)[::5], ids=lambda config: config.variant)
def test_machine_code_is_what_cupy_would_make(config, cupy_compile, poisoned_headers):
    """The same bits of every result, whether a kernel was compiled ahead or not. Old headers change nothing."""
    theirs = cupy_compile(config, "90", f"-I{poisoned_headers}")
    ours = warmup.compile_ahead(config, "sm_90")
    assert machine_code(ours, config) == machine_code(theirs, config)


@pytest.mark.parametrize("folder", ["\u9ec4 '$x\"", "a\nb", "a b;rm -rf"])
def test_temporary_folders_in_any_script_will_do(cupy_compile, folder, tmp_path, monkeypatch):
    """E16: CuPy puts the source there; nothing of the name reaches the machine code."""
    (tmp_path / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / folder))
    ours = warmup.compile_ahead(SMALL, "sm_90")
    assert machine_code(cupy_compile(SMALL, "90"), SMALL) == machine_code(ours, SMALL)


def test_a_file_says_what_it_was_compiled_from(tmp_path):
    """Nothing of the moment or the machine is in it: equal names mean equal files."""
    first, second = (warmup.compile_ahead(SMALL, "sm_90") for _ in range(2))
    assert first == second
    assert cubins.store(SMALL, "sm_90", first, tmp_path) == cubins.store(SMALL, "sm_90", second, tmp_path)
    assert not cubins.damage(cubins.store(SMALL, "sm_90", first, tmp_path))


def test_every_known_architecture_can_be_compiled_for():
    for arch in nvrtc.architectures():
        assert SMALL.entry.encode() in warmup.compile_ahead(SMALL, arch)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_turing_gets_the_packed_decodes_and_is_told_about_the_rest(dtype, tmp_path):
    """E18: an old GPU either works or is refused by name."""
    if "sm_75" not in nvrtc.architectures():
        pytest.skip("this NVRTC does not know sm_75")
    listed = warmup.variants(replace(MODEL, dtype=dtype))
    decodes = [config for config in listed if config.entry == "packed_decode"]
    verify = next(config for config in listed if config.entry == "mtp_verify")
    report = warmup.fill(tmp_path, [(config, "sm_75") for config in (*decodes, verify)])
    assert (report.compiled, report.impossible) == (len(decodes), 1)
    with pytest.raises(CompileError) as caught:
        warmup.compile_ahead(verify, "sm_75")
    assert caught.value.code == "KDA-COMPILER-OLD-GPU"


@pytest.mark.parametrize("arch", ["sm_20", "sm_999"])
def test_older_and_newer_architectures_are_told(arch):
    with pytest.raises(CompileError) as caught:
        warmup.compile_ahead(SMALL, arch)
    assert caught.value.code == "KDA-COMPILER-ARCH"
    assert f"{arch}, NVRTC {nvrtc.version()}" in str(caught.value)


def test_a_broken_source_is_told_with_its_line(monkeypatch):
    read = sources.read_kernel
    with monkeypatch.context() as patch:
        patch.setattr(sources, "read_kernel", lambda name: read(name) + "int broken = nonsense;\n")
        sources.flatten.cache_clear()
        with pytest.raises(CompileError) as caught:
            warmup.compile_ahead(SMALL, "sm_90")
    sources.flatten.cache_clear()
    assert caught.value.code == "KDA-COMPILER-COMPILE"
    assert 'identifier "nonsense" is undefined' in str(caught.value)


# The command on odd machines


SMALLEST = "qwen3-next"
KERNELS = len(warmup.variants(PRESETS[SMALLEST]))


def start(into, **variables):
    """``kda-cupy warmup`` of the smallest model, in a process of its own."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name not in ("CUDA_PATH", "CUDA_HOME")}
    command = ["-m", "kda_cupy", "warmup", "--preset", SMALLEST, "--arch", "sm_90", "--into", str(into)]
    return subprocess.Popen(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": paths, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.decode()


def whole_set(folder):
    found = list(folder.iterdir())
    assert not any(map(cubins.damage, found))
    return {path.name for path in found}


def test_sixteen_processes_start_together(tmp_path):
    """Cold: no file there, and all of them compile the same."""
    processes = [start(tmp_path / "kernels") for _ in range(16)]
    for process in processes:
        assert f"{KERNELS} kernels for sm_90" in finish(process)
    assert len(whole_set(tmp_path / "kernels")) == KERNELS


@pytest.mark.parametrize(
    "oddity", ["home", "no home", "TMPDIR in another script", "TMPDIR that is no UTF-8", "old headers"]
)
def test_odd_machines(oddity, tmp_path, poisoned_headers):
    """Neither home folder nor TMPDIR nor toolkit is touched; the files are the same as anywhere."""
    odd = {
        "home": {"HOME": "/dev/null", "CUPY_CACHE_DIR": "/dev/null/cache"},
        "no home": {"HOME": ""},
        "TMPDIR in another script": {"TMPDIR": str(tmp_path / "\u9ec4 '$x\"")},
        "TMPDIR that is no UTF-8": {"TMPDIR": os.fsdecode(os.fsencode(tmp_path) + b"/\xff")},
        "old headers": {"CUDA_PATH": str(poisoned_headers.parent)},
    }[oddity]
    if "TMPDIR" in odd:
        Path(odd["TMPDIR"]).mkdir()
    finish(start(tmp_path / "here", **odd))
    warmup.fill(tmp_path / "usual", [(config, "sm_90") for config in warmup.variants(PRESETS["qwen3-next"])])
    assert whole_set(tmp_path / "here") == whole_set(tmp_path / "usual")
