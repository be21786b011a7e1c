# SPDX-License-Identifier: Apache-2.0
"""The first call of a process, on good machines and on odd ones: it works, or it is one error that ends with the cure.

Every case is a process of its own, for what goes wrong here goes wrong once. Kernels compiled ahead come from the real
``kda-cupy warmup`` and must give the bits of those that CuPy compiles.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kda_cupy import cubins, warmup
from kda_cupy.bench.cases import PRESETS
from kda_cupy.catalogue import CATALOGUE
from kda_cupy.gpu import compute_capability

cupy = pytest.importorskip("cupy")

ROOT = Path(__file__).parents[2]
COLD_PROCESSES = 16
SCRIPT = r"""
import hashlib, json, site, sys, warnings

paths, hide_nvrtc = json.loads(sys.argv[1])
sys.path[:0] = paths
if hide_nvrtc:
    site.getsitepackages = lambda prefixes=None: []
    site.getusersitepackages = lambda: ""
    site.ENABLE_USER_SITE = False
import numpy as np

import kda_cupy
from kda_cupy import modules
from mtp_problems import commit_operands, make_mtp
from problems import make_problem, to

digest = hashlib.sha256()


def read(array):
    assert array.flags.c_contiguous  # or CuPy would compile a kernel of its own to copy it
    digest.update(array.get().tobytes())


told = {"error": "", "message": "", "ahead": [], "warnings": []}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    try:
        import kda_cupy.gpu

        cupy = kda_cupy.gpu.require_gpu()
        problem = to(make_problem("kda", B=3, H=2, HV=2, lower_bound=-5.0), cupy)
        out, state = kda_cupy.kda_packed_decode(**problem)
        for array in (out, *state):
            read(array)
        if "verify" in sys.argv:
            operands = to(make_mtp(2, 3, 1, 2), cupy)
            read(kda_cupy.kda_decode_mtp(**operands))
            accepted = to(commit_operands(make_mtp(2, 3, 1, 2), [2, 3]), cupy)
            kda_cupy.kda_commit(**accepted | {n: operands[n] for n in accepted if n in operands})
            for slot in operands["recurrent_state"]:
                read(slot)
        told["digest"] = digest.hexdigest()
        told["ahead"] = sorted(kernel.compiled_ahead for kernel in modules._kernels.values())
    except kda_cupy.KdaError as error:
        told["error"], told["message"] = error.code, str(error)
try:
    told["nvrtc"] = str(cupy.cuda.nvrtc.getVersion())
except Exception:
    told["nvrtc"] = ""
told["warnings"] = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
print(json.dumps(told))
"""


def start(folder, *words, paths=(), hide_nvrtc=False, **variables):
    """The script in a process of its own, with an empty cache of CuPy's unless told otherwise."""
    places = [*map(str, paths), str(ROOT), str(ROOT / "tests")]
    dropped = ("CUPY_CACHE_DIR", "CUPY_CACHE_IN_MEMORY", cubins.VARIABLE)
    dropped += ("CUDA_PATH", "CUDA_HOME") if hide_nvrtc else ()
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    cache = {"CUPY_CACHE_DIR": str(folder / "cupy")}
    isolated = ["-I", "-S"] if hide_nvrtc else []
    return subprocess.Popen(
        [sys.executable, *isolated, "-c", SCRIPT, json.dumps([places, hide_nvrtc]), *words],
        env={name: value for name, value in (inherited | cache | variables).items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told_by(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def arch():
    return f"sm_{compute_capability(0)}"


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    """What the script says where CuPy compiles everything."""
    told = told_by(start(tmp_path_factory.mktemp("here"), "verify"))
    assert not told["error"], told
    assert set(told["ahead"]) == {""}
    return told


@pytest.fixture(scope="module")
def wanted():
    """The kernels of the script: packed decode, verify, commit."""
    fields = {"A_log": "float32", "conv_weight": "float32", "onorm_weight": "float32"}
    fields |= {"activation": "bfloat16", "a": "bfloat16"}
    listed = [
        config
        for config in warmup.variants(PRESETS["kimi-k3-tp8"])
        if config.entry in ("packed_decode", "mtp_verify", "commit")
        and all(getattr(config, name, value) == value for name, value in fields.items())
    ]
    assert [config.entry for config in listed] == ["packed_decode", "mtp_verify", "commit"]
    return listed


@pytest.fixture(scope="module")
def shipped(tmp_path_factory, arch):
    """A folder that ``kda-cupy warmup`` made."""
    folder = tmp_path_factory.mktemp("shipped") / "kernels"
    command = [sys.executable, "-m", "kda_cupy", "warmup", "--preset", "kimi-k3-tp8", "--into", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"kernels for {arch}" in done.stdout
    return folder


# Compiled ahead


def test_the_runtime_loads_what_was_compiled_ahead(tmp_path, shipped, compiled_here):
    """The same bits, and CuPy's own cache stays empty: nothing at all was compiled."""
    told = told_by(start(tmp_path, "verify", KDA_CUPY_CUBINS=str(shipped)))
    assert not told["error"], told
    assert told["digest"] == compiled_here["digest"]
    assert len(told["ahead"]) == len(compiled_here["ahead"])
    assert all((shipped / name).is_file() and name for name in told["ahead"])
    assert not told["warnings"]
    assert not list((tmp_path / "cupy").glob("*.cubin"))


def test_damaged_kernels_and_those_of_another_gpu_are_compiled_here(tmp_path, arch, wanted, compiled_here):
    """One warning each; the results are as ever."""
    other = "sm_120" if arch != "sm_120" else "sm_90"
    decode, verify, commit = wanted
    place = tmp_path / "kernels"
    cut = cubins.store(decode, arch, warmup.compile_ahead(decode, arch), place)
    cut.write_bytes(cut.read_bytes()[:-100])
    cubins.store(verify, arch, warmup.compile_ahead(verify, other), place)  # whole, and a lie
    good = cubins.store(commit, arch, warmup.compile_ahead(commit, arch), place)
    told = told_by(start(tmp_path, "verify", KDA_CUPY_CUBINS=str(place)))
    assert not told["error"], told
    assert told["digest"] == compiled_here["digest"]
    assert good.name in told["ahead"]
    cut_short, refused = sorted(told["warnings"], key=lambda words: "cannot be loaded" in words)
    assert "it was cut short or changed" in cut_short
    assert "it cannot be loaded" in refused


# Cold starts


def test_sixteen_processes_start_cold_together(tmp_path, compiled_here):
    """E11: one cache folder, empty. All of them work, and agree."""
    processes = [start(tmp_path, "verify") for _ in range(COLD_PROCESSES)]
    told = [told_by(process) for process in processes]
    assert {each["error"] for each in told} == {""}
    assert {each["digest"] for each in told} == {compiled_here["digest"]}
    assert len(list((tmp_path / "cupy").glob("*.cubin"))) >= len(compiled_here["ahead"])


# Odd machines


def one_error(told, *codes):
    assert told["error"] in codes, told
    assert told["message"].rstrip(".").endswith(CATALOGUE[told["error"]].cure.rstrip("."))


def test_homes_and_temporary_folders(tmp_path, compiled_here, shipped):
    """A home that cannot be written to is no matter where CUPY_CACHE_DIR is set, and one error where it is not."""
    script, bytes_ = tmp_path / "\u9ec4 '$x\"", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    script.mkdir()
    Path(bytes_).mkdir()
    names = (
        "read-only home",
        "no cache",
        "in memory",
        "another script",
        "no UTF-8",
        "no UTF-8, compiled ahead",
    )
    folders = {name: tmp_path / name for name in names}
    running = {
        "read-only home": start(folders["read-only home"], HOME="/dev/null"),
        "no cache": start(folders["no cache"], HOME="/dev/null", CUPY_CACHE_DIR=None),
        "in memory": start(folders["in memory"], CUPY_CACHE_IN_MEMORY="1"),
        "another script": start(folders["another script"], TMPDIR=str(script)),
        "no UTF-8": start(folders["no UTF-8"], TMPDIR=bytes_),
        "no UTF-8, compiled ahead": start(
            folders["no UTF-8, compiled ahead"], TMPDIR=bytes_, KDA_CUPY_CUBINS=str(shipped)
        ),
    }
    told = {name: told_by(process) for name, process in running.items()}
    one_error(told.pop("no cache"), "KDA-COMPILER-CACHE")
    one_error(told.pop("no UTF-8"), "KDA-COMPILER-TMPDIR")
    for name, each in told.items():
        assert not each["error"], (name, each)
    assert len({each["digest"] for each in told.values()}) == 1
    assert told["no UTF-8, compiled ahead"]["ahead"] != [""]


@pytest.fixture(scope="module")
def without_toolkit(tmp_path_factory):
    """The installed packages, without NVIDIA's libraries and headers: CuPy installed by itself."""
    folder = tmp_path_factory.mktemp("site")
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages") and place.is_dir():
            for entry in place.iterdir():
                link = folder / entry.name
                if (
                    not entry.name.startswith(("nvidia", "cuda_toolkit", "torch", "triton"))
                    and not link.exists()
                ):
                    link.symlink_to(entry)
    return folder


def test_without_a_toolkit(tmp_path, without_toolkit, shipped):
    """E1, E14: neither NVRTC nor headers nor CUDA_PATH. One error; with kernels compiled ahead, it works."""
    bare = start(tmp_path / "bare", paths=[without_toolkit], hide_nvrtc=True)
    ahead = start(tmp_path / "ahead", paths=[without_toolkit], hide_nvrtc=True, KDA_CUPY_CUBINS=str(shipped))
    bare, ahead = told_by(bare), told_by(ahead)
    assert not ahead["error"], ahead
    assert all(ahead["ahead"])
    if bare["nvrtc"] and not bare["error"]:
        pytest.skip("this system has a toolkit that cannot be hidden")
    one_error(bare, "KDA-COMPILER-NVRTC", "KDA-COMPILER-HEADERS")


def test_old_headers_beside_a_new_nvrtc(tmp_path, compiled_here):
    """E3: CUDA_PATH points at headers of another time; no kernel of ours includes one."""
    include = tmp_path / "toolkit" / "include"
    include.mkdir(parents=True)
    for name in ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h", "cuda_bf16.h", "vector_types.h"):
        (include / name).write_text("#define CUDART_VERSION 9000\n#error from another time\n")
    told = told_by(start(tmp_path, "verify", CUDA_PATH=str(tmp_path / "toolkit")))
    if told["error"]:  # CuPy itself may refuse such a toolkit
        one_error(told, "KDA-COMPILER-NVRTC", "KDA-COMPILER-HEADERS", "KDA-COMPILER-NO-CUPY")
    else:
        assert told["digest"] == compiled_here["digest"]
