# SPDX-License-Identifier: Apache-2.0
"""What the probes say of broken machines, and what the doctor makes of it: every verdict, without a GPU."""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_cupy import fake_cubin

from kda_cupy.config import CommitConfig
from kda_cupy.doctor import Finding, diagnose, doctor
from kda_cupy.environment import (
    Cache,
    CompiledAhead,
    Environment,
    Gpu,
    Unavailable,
    attempt,
    collect,
    load_cupy,
    probe,
    probe_cache,
    probe_compiled_ahead,
    probe_driver,
    probe_gpus,
)
from kda_cupy.gpu import installed_wheels
from kda_cupy.warmup import fill

ROOT = Path(__file__).parents[2]

H200 = Gpu(
    0, "NVIDIA H200", "9.0", 132, 60 << 20, 140 << 30, 139 << 30, "0000:1B:00.0", Unavailable("no NVML")
)
T4 = replace(H200, index=1, name="Tesla T4", compute_capability="7.5", multiprocessors=40)
HEALTHY = Environment(
    kda_cupy="0.1.0",
    commit="e8f9a52",
    uncommitted_changes=False,
    python="3.12.3",
    platform="Linux-6.8",
    cpu="EPYC",
    cpu_count=16,
    numpy="2.5.2",
    ml_dtypes="0.6.0",
    cupy="14.2.0",
    cupy_wheels={"cupy-cuda13x": "14.2.0"},
    driver="13.0",
    driver_release="580.82.07",
    driver_gpus=1,
    runtime="13.2",
    nvrtc="13.5",
    nvrtc_architectures=[75, 80, 90, 100, 120],
    headers="/venv/nvidia/cu13/include",
    headers_version="13.5",
    gpus=[H200],
    cache=Cache("/home/me/.cupy/kernel_cache", True, True, 2_500_000),
    temporary_folder="/tmp",
    compiled_ahead=CompiledAhead("/kernels", True, True, {"sm_80": 3, "sm_90": 16}, 0, {}),
    variables={},
)

FROM_CUPY = ("cupy", "runtime", "nvrtc", "nvrtc_architectures", "gpus")
NO_DRIVER = Unavailable("libcuda.so.1 cannot be loaded")
NO_GPU = Unavailable("no CUDA-capable device is detected (CUDA error 100)")
MISMATCH = Unavailable("system has unsupported display driver / cuda driver combination (CUDA error 803)")
NO_CUPY = Unavailable("cupy is not installed")
NO_NVRTC = Unavailable('Failure finding "libnvrtc.so.13"')
BROKEN_CUPY = Unavailable("libnvrtc.so.12: cannot open shared object file: No such file or directory")
OLD_DRIVER = Unavailable(
    "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
)
READ_ONLY = Unavailable("/home/me: Read-only file system")
TO_CU12 = "pip uninstall -y cupy-cuda13x\npip install 'kda-cupy[cu12]'"
TOOLKIT = "pip install 'cuda-toolkit[cudart,nvrtc]==13.*'"

FAULTS = {
    "no driver": (
        {"driver": NO_DRIVER, "driver_gpus": NO_DRIVER, "gpus": OLD_DRIVER},
        Finding(
            "driver",
            "fault",
            "none: libcuda.so.1 cannot be loaded. NumPy arrays need neither GPU nor driver",
            "install the NVIDIA driver\nor, for a container: docker run --gpus all ...",
        ),
    ),
    "driver older than the toolkit": (
        {"driver": "12.4", "driver_release": "550.54", "gpus": OLD_DRIVER},
        Finding(
            "driver",
            "fault",
            "supports CUDA 12.4 (release 550.54), but CuPy and NVRTC need CUDA 13",
            f"update the NVIDIA driver (580 or newer for CUDA 13)\nor, to suit this driver:\n{TO_CU12}",
        ),
    ),
    "driver older than NVRTC alone": (
        {"driver": "12.4", "driver_release": Unavailable("no NVML"), "runtime": "12.9"}
        | {"cupy_wheels": {"cupy-cuda12x": "14.2.0"}},
        Finding(
            "driver",
            "fault",
            "supports CUDA 12.4, but CuPy and NVRTC need CUDA 13",
            "update the NVIDIA driver (580 or newer for CUDA 13)\nor, to suit this driver:\n"
            "pip uninstall -y nvidia-cuda-nvrtc\npip install 'cuda-toolkit[cudart,nvrtc]==12.*'",
        ),
    ),
    "driver too old for any CuPy 14": (
        {"driver": "11.8", "driver_release": Unavailable("no NVML"), "gpus": OLD_DRIVER},
        Finding(
            "driver",
            "fault",
            "supports CUDA 11.8, but CuPy and NVRTC need CUDA 13",
            "update the NVIDIA driver (580 or newer for CUDA 13)",
        ),
    ),
    "no GPU": (
        {
            "driver_gpus": NO_GPU,
            "gpus": OLD_DRIVER,
        },
        Finding(
            "GPU",
            "fault",
            "no CUDA-capable device is detected (CUDA error 100)",
            "run nvidia-smi; if that shows a GPU, restart the machine or container",
        ),
    ),
    "GPU hidden by a variable": (
        {"driver_gpus": NO_GPU, "gpus": OLD_DRIVER, "variables": {"CUDA_VISIBLE_DEVICES": "7"}},
        Finding(
            "GPU",
            "fault",
            "no CUDA-capable device is detected (CUDA error 100); CUDA_VISIBLE_DEVICES is '7'",
            "unset CUDA_VISIBLE_DEVICES",
        ),
    ),
    "driver and its kernel module disagree": (
        {"driver_gpus": MISMATCH, "gpus": OLD_DRIVER, "variables": {"CUDA_VISIBLE_DEVICES": "0"}},
        Finding(
            "GPU",
            "fault",
            "system has unsupported display driver / cuda driver combination (CUDA error 803)",
            "run nvidia-smi; if that shows a GPU, restart the machine or container",
        ),
    ),
    "GPU that CuPy cannot open": (
        {
            "gpus": Unavailable(
                "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"
            )
        },
        Finding(
            "GPU",
            "fault",
            "CuPy cannot use it: cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable",
            "restart the machine or container",
        ),
    ),
    "capability 7.5": (
        {"gpus": [T4]},
        Finding("capability", "fault", "7.5; the kernels need 8.0", "use an Ampere or newer GPU"),
    ),
    "GPU newer than NVRTC": (
        {
            "nvrtc": "12.6",
            "runtime": "12.9",
            "nvrtc_architectures": [80, 90],
            "gpus": [replace(H200, compute_capability="12.0")],
        },
        Finding(
            "capability",
            "fault",
            "12.0; NVRTC 12.6 compiles for [80, 90]",
            "pip install --upgrade 'cuda-toolkit[cudart,nvrtc]==12.*'",
        ),
    ),
    "no CuPy": (
        dict.fromkeys(FROM_CUPY, NO_CUPY) | {"cupy_wheels": {}},
        Finding("CuPy", "fault", "cannot be imported: cupy is not installed", "pip install 'kda-cupy[cu13]'"),
    ),
    "no CuPy, driver for CUDA 12": (
        dict.fromkeys(FROM_CUPY, NO_CUPY) | {"cupy_wheels": {}, "driver": "12.8"},
        Finding("CuPy", "fault", "cannot be imported: cupy is not installed", "pip install 'kda-cupy[cu12]'"),
    ),
    "CuPy that cannot be imported": (
        dict.fromkeys(FROM_CUPY, BROKEN_CUPY),
        Finding(
            "CuPy",
            "fault",
            f"cannot be imported: {BROKEN_CUPY}",
            "pip uninstall -y cupy-cuda13x\npip install 'kda-cupy[cu13]'",
        ),
    ),
    "two wheels": (
        {"cupy_wheels": {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}},
        Finding(
            "CuPy",
            "fault",
            "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0: they overwrite each other",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x\npip install 'kda-cupy[cu13]'",
        ),
    ),
    "two wheels and no NVRTC": (
        {"cupy_wheels": {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}}
        | {"nvrtc": NO_NVRTC, "nvrtc_architectures": NO_NVRTC, "runtime": "12.9"},
        Finding(
            "CuPy",
            "fault",
            "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0: they overwrite each other",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x\npip install 'kda-cupy[cu13]'",
        ),
    ),
    "CuPy 14.1": (
        {"cupy": "14.1.1", "cupy_wheels": {"cupy-cuda13x": "14.1.1"}},
        Finding("CuPy", "fault", "14.1.1, but 14.2 is needed", "pip install --upgrade 'cupy-cuda13x>=14.2'"),
    ),
    "no NVRTC": (
        {"nvrtc": NO_NVRTC, "nvrtc_architectures": NO_NVRTC},
        Finding("NVRTC", "fault", 'cannot be loaded: Failure finding "libnvrtc.so.13"', TOOLKIT),
    ),
    "no headers": (
        {"headers": Unavailable("not found")},
        Finding("CUDA headers", "fault", "CuPy compiles nothing without them: not found", TOOLKIT),
    ),
    "NumPy 2.0": (
        {"numpy": "2.0.2"},
        Finding(
            "NumPy",
            "fault",
            "2.0.2, but CuPy has bfloat16 only with 2.1.2 or newer",
            "pip install --upgrade 'numpy>=2.1.2'",
        ),
    ),
    "no ml_dtypes": (
        {"ml_dtypes": Unavailable("ml_dtypes is not installed")},
        Finding(
            "ml_dtypes",
            "fault",
            "ml_dtypes is not installed, so there is no bfloat16",
            "pip install ml_dtypes",
        ),
    ),
    "read-only cache": (
        dict.fromkeys(FROM_CUPY, READ_ONLY)
        | {"cache": Cache("/home/me/.cupy/kernel_cache", False, READ_ONLY, 0)},
        Finding(
            "kernel cache",
            "fault",
            f"/home/me/.cupy/kernel_cache cannot be written ({READ_ONLY}); any other folder will do",
            "export CUPY_CACHE_DIR=/tmp/cupy-$USER",
        ),
    ),
    "no folder for temporary files": (
        {"temporary_folder": Unavailable("'/tmp/\\udcff' has no spelling in UTF-8")},
        Finding(
            "TMPDIR",
            "fault",
            "'/tmp/\\udcff' has no spelling in UTF-8; CuPy compiles through it",
            "export TMPDIR=/var/tmp",
        ),
    ),
    "kernels compiled ahead are not where they should be": (
        {"compiled_ahead": CompiledAhead("/kernels", True, False, {}, 0, {})},
        Finding(
            "precompiled",
            "fault",
            "KDA_CUPY_CUBINS names /kernels, where there is no folder",
            "unset KDA_CUPY_CUBINS\nor make it: kda-cupy warmup --preset MODEL",
        ),
    ),
    "a damaged kernel": (
        {
            "compiled_ahead": CompiledAhead(
                "/kernels", True, True, {"sm_90": 3}, 0, {"a": "it is short", "b": "x"}
            )
        },
        Finding(
            "precompiled",
            "fault",
            "/kernels/a is not used, for it is short, and 1 more",
            "kda-cupy warmup --preset MODEL\nor remove the file",
        ),
    ),
}

NOTES = {
    "old headers beside a new NVRTC": (
        {"headers_version": "12.2"},
        "CUDA headers",
        "/venv/nvidia/cu13/include, of CUDA 12.2 beside NVRTC 13.5; the kernels here include none",
    ),
    "kernels compiled ahead for other GPUs": (
        {"compiled_ahead": CompiledAhead("/kernels", True, True, {"sm_80": 3, "sm_100": 4}, 2, {})},
        "precompiled",
        "/kernels: 4 for sm_100, 3 for sm_80, 2 of another version of the sources; none for a GPU of this machine",
    ),
}
"""Not as they should be, and yet kernels run."""


def by_name(findings):
    return {finding.name: finding for finding in findings}


def never_run(device):
    raise AssertionError(f"a kernel was tried on GPU {device} of a machine with a fault")


@pytest.mark.parametrize("case", FAULTS)
def test_one_cause_is_one_fault_with_its_cure(case):
    changes, fault = FAULTS[case]
    findings = diagnose(replace(HEALTHY, **changes), never_run)
    assert [finding for finding in findings if finding.status == "fault"] == [fault]
    assert by_name(findings)["kernel"] == Finding("kernel", "note", "not tried; mend the faults first")


@pytest.mark.parametrize("case", NOTES)
def test_what_is_odd_and_harmless_is_a_note(case):
    changes, name, detail = NOTES[case]
    tried = []
    findings = by_name(diagnose(replace(HEALTHY, **changes), tried.append))
    assert findings[name] == Finding(name, "note", detail)
    assert not any(finding.status == "fault" for finding in findings.values())
    assert tried == [0]


def test_nothing_compiled_ahead_is_no_fault():
    nothing = CompiledAhead("/site-packages/kda_cupy/cubins", False, False, {}, 0, {})
    finding = by_name(diagnose(replace(HEALTHY, compiled_ahead=nothing), lambda _: None))["precompiled"]
    assert finding == Finding("precompiled", "ok", "none; kernels are compiled at first use")


def test_healthy_machine():
    tried = []
    findings = diagnose(HEALTHY, tried.append)
    assert {finding.status for finding in findings} == {"ok"}
    assert not any(finding.cure for finding in findings)
    assert tried == [0]
    found = by_name(findings)
    assert found["GPU"].detail == "1 x NVIDIA H200: 132 SMs, 140 GiB, L2 60 MiB"
    assert (
        found["driver"].detail == "supports CUDA 13.0 (release 580.82.07)"
    )  # older than NVRTC 13.5, and good
    assert found["kernel cache"].detail == "/home/me/.cupy/kernel_cache, 2.5 MB"
    assert list(found) == [
        *("GPU", "driver", "capability", "CuPy", "CUDA runtime", "NVRTC", "CUDA headers"),
        *("NumPy", "ml_dtypes", "kernel cache", "TMPDIR", "precompiled", "kernel"),
    ]
    assert found["CUDA headers"].detail == "/venv/nvidia/cu13/include, of CUDA 13.5"
    assert found["precompiled"].detail == "/kernels: 3 for sm_80, 16 for sm_90"


@pytest.mark.parametrize("gpus", [[H200, T4], [replace(T4, index=0), replace(H200, index=1)]])
def test_old_gpu_beside_a_new_one_is_a_note_and_left_alone(gpus):
    tried = []
    findings = diagnose(replace(HEALTHY, gpus=gpus, driver_gpus=2), tried.append)
    usable = next(gpu.index for gpu in gpus if gpu.name == "NVIDIA H200")
    assert by_name(findings)["capability"].detail == f"only GPU {usable} has 8.0 or more"
    assert not any(finding.status == "fault" for finding in findings)
    assert tried == [usable]


def test_every_gpu_runs_the_kernel_and_the_one_that_fails_is_named():
    def fail_on_second(device):
        if device == 1:
            raise MemoryError("out of memory")

    gpus = [H200, replace(H200, index=1)]
    kernel = by_name(diagnose(replace(HEALTHY, gpus=gpus, driver_gpus=2), fail_on_second))["kernel"]
    assert (kernel.status, kernel.detail) == ("fault", "GPU 1: out of memory")
    assert kernel.cure


# The command


def run_doctor(monkeypatch, environment, *arguments):
    monkeypatch.setattr("kda_cupy.doctor.probe", lambda: environment)
    monkeypatch.setattr("kda_cupy.doctor.run_small_kernel", lambda device: None)
    return CliRunner(env={"COLUMNS": "80"}).invoke(doctor, arguments)


@pytest.mark.parametrize("case", FAULTS)
def test_report_fits_80_columns_and_shows_each_step_of_the_cure(case, monkeypatch):
    changes, fault = FAULTS[case]
    result = run_doctor(monkeypatch, replace(HEALTHY, **changes))
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "Faults: 1."
    shown = " ".join(" ".join(lines).split())
    for step in fault.cure.splitlines():
        assert f"-> {step}" in shown
        if step.startswith(("pip ", "export ")):  # a command can be copied in one piece
            assert any(line.strip() == f"-> {step}" for line in lines)


def test_report_of_a_healthy_machine(monkeypatch):
    result = run_doctor(monkeypatch, HEALTHY)
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "CUDA kernels run here."


@pytest.mark.parametrize(("changes", "code"), [({}, 0), (FAULTS["two wheels"][0], 1)])
def test_json_has_findings_and_environment(changes, code, monkeypatch):
    environment = replace(HEALTHY, **changes)
    result = run_doctor(monkeypatch, environment, "--json")
    assert result.exit_code == code
    report = json.loads(result.output)
    assert [Finding(**finding) for finding in report["findings"]] == diagnose(
        environment, lambda device: None
    )
    assert report["environment"]["gpus"][0]["name"] == "NVIDIA H200"
    assert report["environment"]["cupy_wheels"] == environment.cupy_wheels


COMMAND = [sys.executable, "-c", "from kda_cupy.doctor import doctor; doctor()"]


def run_here(*arguments, path=ROOT, **variables):
    paths = os.pathsep.join([str(path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_whole_command_on_this_machine():
    plain, data = run_here(), run_here("--json")
    assert plain.stderr == data.stderr == ""
    assert "\x1b" not in plain.stdout
    report = json.loads(data.stdout)
    faulty = any(finding["status"] == "fault" for finding in report["findings"])
    assert plain.returncode == data.returncode == faulty


def test_whole_command_with_cupy_that_misses_its_libraries(tmp_path):
    package = tmp_path / "cupy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "try:\n    raise ImportError('libnvrtc.so.13: cannot open shared object file')\n"
        "except ImportError as error:\n    raise ImportError('=====\\nFailed to import CuPy.') from error\n"
    )
    result = run_here("--json", path=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    cupy = next(finding for finding in json.loads(result.stdout)["findings"] if finding["name"] == "CuPy")
    assert cupy["detail"] == "cannot be imported: libnvrtc.so.13: cannot open shared object file"


def test_whole_command_with_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    result = run_here("--json", CUPY_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert (result.returncode, result.stderr) == (1, "")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["kernel cache"]["status"] == "fault"
    if importlib.util.find_spec("cupy"):
        assert findings["CuPy"]["status"] == "note"
        assert findings["CuPy"]["detail"].startswith("cannot be imported: [Errno ")


def test_whole_command_with_two_wheels(tmp_path):
    """E14: what pip leaves behind when cupy-cuda13x is installed over cupy-cuda12x."""
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        metadata = tmp_path / f"{name.replace('-', '_')}-14.2.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    result = run_here("--json", path=tmp_path)
    assert result.returncode == 1
    cupy = next(finding for finding in json.loads(result.stdout)["findings"] if finding["name"] == "CuPy")
    assert cupy["status"] == "fault"
    assert cupy["detail"] == "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0: they overwrite each other"
    code = "import warnings; warnings.simplefilter('ignore'); from kda_cupy.gpu import require_gpu; require_gpu()"
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    failed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    last = failed.stderr.strip().splitlines()[-1]
    assert "More than one CuPy wheel is installed" in last
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x, and install one" in last


WITHOUT_TOOLKIT = """
import site, sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
site.getsitepackages = lambda prefixes=None: []
site.getusersitepackages = lambda: ""
site.ENABLE_USER_SITE = False
from kda_cupy.doctor import doctor
doctor()
"""


def test_whole_command_without_a_toolkit(tmp_path):
    """E1: CuPy installed by itself, CUDA_PATH not set."""
    if not importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is not installed")
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages") and place.is_dir():
            for entry in place.iterdir():
                link = tmp_path / entry.name
                if not entry.name.startswith(("nvidia", "cuda_toolkit", "torch")) and not link.exists():
                    link.symlink_to(entry)
    dropped = ("CUDA_PATH", "CUDA_HOME", "LD_LIBRARY_PATH")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", WITHOUT_TOOLKIT, str(tmp_path), str(ROOT), "--json"],
        env={name: value for name, value in os.environ.items() if name not in dropped},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    if findings["NVRTC"]["status"] == "ok":
        pytest.skip("this system has a toolkit that cannot be hidden")
    assert findings["CuPy"]["status"] == "ok"
    assert findings["NVRTC"]["status"] == "fault"
    assert findings["NVRTC"]["detail"].startswith("cannot be loaded: Failure finding")
    assert findings["NVRTC"]["cure"].startswith("pip install 'cuda-toolkit[cudart,nvrtc]==1")


def test_importing_needs_no_cupy():
    code = "import sys, kda_cupy.doctor, kda_cupy.environment; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# The probes


def test_everything_can_be_asked_here_and_is_json():
    collected = collect()
    assert json.loads(json.dumps(collected)).keys() == collected.keys()
    assert collected["numpy"] == importlib.metadata.version("numpy")


def test_commit_is_that_of_the_clone():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone, or no git here")
    run = subprocess.run(
        [git, "log", "-1", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = probe()
    if run.returncode:
        assert found.commit == run.stderr.strip().splitlines()[0]
    else:
        assert found.commit == run.stdout.strip()
        assert found.uncommitted_changes in (True, False)


def test_outside_a_clone_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("kda_cupy.environment.CHECKOUT", tmp_path)
    found = probe()
    assert isinstance(found.commit, Unavailable)
    assert found.commit == found.uncommitted_changes == "not a clone"


def test_without_cupy_the_rest_is_still_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = probe()
    for fact in (getattr(found, name) for name in FROM_CUPY):
        assert isinstance(fact, Unavailable)
        assert fact == "cupy is not installed"
    assert not isinstance(found.numpy, Unavailable)


def test_missing_nvrtc_and_driver_leave_the_rest_of_cupy(monkeypatch):
    def missing():
        raise RuntimeError('Failure finding "libnvrtc.so"\n  listdir("/lib"):')

    cupy = ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(runtimeGetVersion=lambda: 13020, getDeviceCount=missing),
        nvrtc=SimpleNamespace(getVersion=missing, getSupportedArchs=missing),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    found = probe()
    assert (found.cupy, found.runtime) == ("14.2.0", "13.2")
    for fact in (found.nvrtc, found.nvrtc_architectures, found.gpus):
        assert isinstance(fact, Unavailable)
        assert fact == 'Failure finding "libnvrtc.so"'


def test_missing_headers_are_found_missing(monkeypatch):
    pathfinder = SimpleNamespace(find_nvidia_header_directory=lambda name: None)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
    found = probe()
    assert isinstance(found.headers, Unavailable)
    assert found.headers == "not found"


def test_importing_cupy_hides_its_warning_of_two_wheels(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("import warnings\nwarnings.warn('multiple CuPy packages')\n")
    monkeypatch.setitem(sys.modules, "cupy", None)  # so that what is there now comes back afterwards
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_cupy().__file__ == str(tmp_path / "cupy.py")  # warnings are errors in these tests


def test_wheels_are_counted_by_distribution():
    installed = {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0", "numpy": "2.5.2"}

    def version(name):
        try:
            return installed[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    assert installed_wheels(version) == {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"}
    installed.clear()
    assert installed_wheels(version) == {}


class Driver:
    """Answers as libcuda does, through pointers."""

    def __init__(self, version=13000, gpus=1, init=0):
        self.version, self.gpus, self.init = version, gpus, init

    def cuDriverGetVersion(self, out):
        out._obj.value = self.version
        return 0

    def cuInit(self, flags):
        return self.init

    def cuDeviceGetCount(self, out):
        out._obj.value = self.gpus
        return 0

    def cuGetErrorString(self, status, out):
        out._obj.value = b"no CUDA-capable device is detected"
        return 0


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "answer"),
    [
        (lambda name: Driver(13000, gpus=8), ("13.0", 8)),
        (
            lambda name: Driver(12040, init=100),
            ("12.4", "no CUDA-capable device is detected (CUDA error 100)"),
        ),
        (lambda name: object(), ("libcuda.so.1 cannot be loaded",) * 2),
        (no_library, ("libcuda.so.1 cannot be loaded",) * 2),
    ],
)
def test_driver_answers_without_cupy(load, answer, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    found = probe_driver(load)
    assert found == answer
    assert [isinstance(fact, Unavailable) for fact in found] == [
        "loaded" in str(answer[0]),
        isinstance(answer[1], str),
    ]


def test_driver_library_is_the_real_one_by_default():
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
    except OSError:
        assert isinstance(probe_driver()[0], Unavailable)
    else:
        assert not isinstance(probe_driver()[0], Unavailable)


def test_gpus_are_asked_one_by_one_and_a_busy_one_still_has_a_name():
    class Device:
        def __init__(self, index):
            self.index, self.pci_bus_id = index, f"0000:0{index}:00.0"

        @property
        def mem_info(self):
            if self.index == 1:
                raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
            return 5, 10

    properties = {"name": b"NVIDIA A100", "major": 8, "minor": 0, "multiProcessorCount": 108}
    properties |= {"l2CacheSize": 40 << 20, "totalGlobalMem": 10}
    runtime = SimpleNamespace(getDeviceCount=lambda: 3, getDeviceProperties=lambda index: properties)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=Device))
    gpus = probe_gpus(cupy)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert (gpus[0].name, gpus[0].compute_capability, gpus[0].free_bytes) == ("NVIDIA A100", "8.0", 5)
    assert isinstance(gpus[1].free_bytes, Unavailable)
    assert gpus[1].free_bytes == "cudaErrorMemoryAllocation: out of memory"
    assert [gpu.index for gpu in probe_gpus(cupy, [2])] == [2]


def test_cache_folder_is_measured(tmp_path):
    (tmp_path / "a.cubin").write_bytes(bytes(1000))
    assert probe_cache({"CUPY_CACHE_DIR": str(tmp_path)}) == Cache(str(tmp_path), True, True, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["a.cubin"]  # trying left nothing behind


def test_cache_folder_that_does_not_exist_yet_is_not_made(tmp_path):
    folder = tmp_path / "deep" / "cache"
    assert probe_cache({"CUPY_CACHE_DIR": str(folder)}) == Cache(str(folder), False, True, 0)
    assert not list(tmp_path.iterdir())


def test_cache_folder_by_default_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert Path(probe_cache({}).folder) == tmp_path / ".cupy" / "kernel_cache"


@pytest.mark.parametrize("kind", ["read-only file system", "permissions", "a file in the way", "empty name"])
def test_cache_folder_that_cannot_be_written_says_why(kind, tmp_path, monkeypatch):
    folder = str(tmp_path / "cache")
    match kind:
        case "read-only file system":

            def refuse(dir):
                raise OSError(30, "Read-only file system", str(dir))

            monkeypatch.setattr("tempfile.TemporaryFile", refuse)
            why = f"{tmp_path}: Read-only file system"
        case "permissions":
            if os.name != "posix" or os.geteuid() == 0:
                pytest.skip("permission bits do not bind this user")
            tmp_path.chmod(0o500)
            why = f"{tmp_path}: Permission denied"
        case "a file in the way":
            (tmp_path / "cache").touch()
            why = f"{folder}: Not a directory"
        case "empty name":
            folder, why = "", "CUPY_CACHE_DIR is set, but empty"
    cache = probe_cache({"CUPY_CACHE_DIR": folder})
    assert not cache.exists
    assert isinstance(cache.writable, Unavailable)
    assert cache.writable == why


def test_temporary_folder_is_tried(tmp_path, monkeypatch):
    """Names in any script are fine; bytes that are no UTF-8 are not, for CuPy hands the name on as UTF-8."""
    for name, spelled in (("\u9ec4 '$x\"", True), (os.fsdecode(b"\xff"), False)):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        found = probe().temporary_folder
        assert isinstance(found, Unavailable) is not spelled
        assert found == (str(folder) if spelled else f"{str(folder)!r} has no spelling in UTF-8")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert probe().temporary_folder == f"{tmp_path / 'file'}: Not a directory"


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        ("#define CUDART_VERSION  12020\n", "12.2"),
        ("  #define CUDART_VERSION 1\n", Unavailable("cuda_runtime_api.h does not say")),
        (None, Unavailable("[Errno 2] No such file or directory")),
    ],
)
def test_headers_say_what_they_are_of(lines, version, tmp_path, monkeypatch):
    pathfinder = SimpleNamespace(find_nvidia_header_directory=lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
    if lines is not None:
        (tmp_path / "cuda_runtime_api.h").write_text(f"// before\n{lines}")
    found = probe().headers_version
    assert found.startswith(version)
    assert type(found) is type(version)


def test_kernels_compiled_ahead_are_counted(tmp_path, monkeypatch):
    monkeypatch.delenv("KDA_CUPY_CUBINS", raising=False)
    assert not probe_compiled_ahead().named
    monkeypatch.setenv("KDA_CUPY_CUBINS", str(tmp_path / "kernels"))
    assert probe_compiled_ahead() == CompiledAhead(str(tmp_path / "kernels"), True, False, {}, 0, {})
    configs = [CommitConfig(dtype, True, 1000) for dtype in ("bfloat16", "float16", "float32")]
    monkeypatch.setattr("kda_cupy.warmup.compile_ahead", lambda config, arch: fake_cubin(config.variant))
    fill(tmp_path / "kernels", [(config, arch) for config in configs for arch in ("sm_80", "sm_90")])
    (tmp_path / "kernels" / "README").write_text("none of ours")
    whole = {"sm_80": 3, "sm_90": 3}
    assert probe_compiled_ahead() == CompiledAhead(str(tmp_path / "kernels"), True, True, whole, 0, {})
    first, *_ = sorted((tmp_path / "kernels").glob("*.cubin"))
    first.write_bytes(first.read_bytes()[:-1])
    (tmp_path / "kernels" / "other.cubin").touch()
    found = probe_compiled_ahead()
    assert found.kernels == {"sm_80": 2, "sm_90": 3}
    assert found.damaged == {
        first.name: "it was cut short or changed",
        "other.cubin": "its name is not one that kda-cupy gives",
    }
    with monkeypatch.context() as patch:  # no probe raises, whatever is missing from an installation
        patch.setattr("kda_cupy.sources.kernel_names", lambda: [].index(0))
        assert (probe_compiled_ahead().outdated, probe_compiled_ahead().kernels) == (5, {})
    monkeypatch.setattr("kda_cupy.sources.digest", lambda name: "0" * 16)
    assert (probe_compiled_ahead().outdated, probe_compiled_ahead().kernels) == (5, {})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'pynvml'", name="pynvml"), "pynvml is not installed"),
        (importlib.metadata.PackageNotFoundError("cupy"), "cupy is not installed"),
        (RuntimeError("first line\nsecond line"), "first line"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_failed_probe_is_its_reason(error, reason):
    def fail():
        raise error

    answer = attempt(fail)
    assert isinstance(answer, Unavailable)
    assert answer == reason
    assert attempt(lambda: 3) == 3


def test_only_variables_that_matter_are_collected(monkeypatch):
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUPY_CACHE_IN_MEMORY",
        "KDA_CUPY_REQUIRE_GPU",
        "API_TOKEN",
        "MY_CUDA_PATH",
    ):
        monkeypatch.setenv(name, "1")
    variables = probe().variables
    assert {"CUDA_VISIBLE_DEVICES", "CUPY_CACHE_IN_MEMORY", "KDA_CUPY_REQUIRE_GPU"} <= variables.keys()
    assert not {"API_TOKEN", "MY_CUDA_PATH"} & variables.keys()
