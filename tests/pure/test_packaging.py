# SPDX-License-Identifier: Apache-2.0
"""The package as people get it: from a wheel, from an editable install, from a clone."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import click
import ml_dtypes
import numpy
import pytest
import rich

ROOT = Path(__file__).parents[2]
KERNELS = sorted(path.name for path in (ROOT / "kernels").iterdir())


def run(*command, cwd, **environment):
    """Run a command as if there were neither a GPU nor a PYTHONPATH, and give its output."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind, root, into):
    """Build a distribution with the hook that pip calls, without a network."""
    pytest.importorskip("hatchling", reason="hatchling is not installed; ./scripts/test.sh brings it")
    hook = f"import sys, hatchling.build as hooks; print(hooks.build_{kind}(sys.argv[1]))"
    return into / run(sys.executable, "-c", hook, into, cwd=root).split()[-1]


def install(wheel, into):
    """Install a wheel in a new virtual environment that borrows our dependencies; gives its Python."""
    pytest.importorskip("pip", reason="pip is not installed")
    venv.create(into, symlinks=True)
    python = into / "bin" / "python"
    # The dependencies become visible after pip ran: it would find the kda_cupy that lies beside them.
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=into,
    )
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(into)}))
    homes = {Path(package.__file__).parents[1] for package in (click, ml_dtypes, numpy, rich)}
    (site / "dependencies.pth").write_text("\n".join(map(str, homes)), encoding="utf-8")
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of an environment that has the wheel."""
    return install(wheel, tmp_path_factory.mktemp("a folder with spaces"))


def names(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_has_kernels_types_and_licence_and_nothing_else(wheel):
    content = names(wheel)
    assert {f"kda_cupy/kernels/{name}" for name in KERNELS} <= content
    assert "kda_cupy/py.typed" in content
    assert {name.split("/")[0] for name in content} == {"kda_cupy", "kda_cupy-0.1.0.dist-info"}
    assert "kda_cupy-0.1.0.dist-info/licenses/LICENSE" in content
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kda_cupy").rglob("*.py")}
    assert {name for name in content if name.endswith(".py")} == sources


def test_sdist_is_enough_to_test_and_to_build_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert {"kda_cupy", "kernels", "scripts", "tests", "pyproject.toml", "LICENSE"} <= {
        p.name for p in root.iterdir()
    }
    assert not list(root.rglob("pyvenv.cfg"))
    assert names(build("wheel", root, tmp_path)) == names(wheel)


def test_metadata_names_the_exact_cupy_wheels(wheel):
    requires = metadata(wheel).get_all("Requires-Dist")
    cupy = sorted(line for line in requires if "cupy" in line)
    assert cupy == ["cupy-cuda12x>=14.2; extra == 'cu12'", "cupy-cuda13x>=14.2; extra == 'cu13'"]
    toolkit = sorted(line for line in requires if "cuda-toolkit" in line)
    assert toolkit == [
        "cuda-toolkit[cudart,nvrtc]==12.*; extra == 'cu12'",
        "cuda-toolkit[cudart,nvrtc]==13.*; extra == 'cu13'",
    ]
    hard = {re.split(r"[^\w-]", line)[0] for line in requires if "extra ==" not in line}
    assert hard == {"click", "ml-dtypes", "numpy", "rich"}
    assert metadata(wheel)["Requires-Python"] == ">=3.11"


def test_no_text_of_ours_tells_to_install_another_cupy():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *(ROOT / "kda_cupy").rglob("*.py")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    advice = " ".join(line for line in lines if "install" in line)
    assert set(re.findall(r"cupy-cuda\w*", advice)) <= {"cupy-cuda12x", "cupy-cuda13x"}
    assert not re.findall(r"pip install ['\"]?cupy\b(?!-)", advice)  # that one compiles CuPy from source


def test_benchmark_runs_from_the_wheel(installed, tmp_path):
    command = installed.with_name("kda-cupy")
    record = tmp_path / "record.json"
    run(
        command,
        "bench",
        "decode",
        "--backend",
        "numpy",
        "--heads",
        2,
        "--head-dim",
        64,
        "--batch",
        "1,2",
        "--json",
        record,
        cwd=tmp_path,
    )
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    assert [(row["B"], row["status"]) for row in rows] == [(1, "timed"), (2, "timed")]


FIND_KERNELS = """
import kda_cupy, sys
from kda_cupy import sources
assert "__shfl_xor_sync" in sources.flatten("packed_decode.cu")
print(sources.kernel_folder())
"""


def test_kernels_are_found_in_the_wheel(installed, tmp_path):
    folder = Path(run(installed, "-c", FIND_KERNELS, cwd=tmp_path).strip())
    assert folder.is_relative_to(installed.parents[1])
    assert sorted(path.name for path in folder.iterdir()) == KERNELS


def test_kernels_are_found_in_an_editable_install(tmp_path):
    python = install(build("editable", ROOT, tmp_path), tmp_path / "venv")
    assert Path(run(python, "-c", FIND_KERNELS, cwd=tmp_path).strip()) == ROOT / "kernels"


def test_kernels_are_found_in_a_clone_that_is_not_installed(tmp_path):
    found = run(sys.executable, "-c", FIND_KERNELS, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert Path(found.strip()) == ROOT / "kernels"


@pytest.mark.parametrize(
    "use", ["import kda_cupy", "from kda_cupy.cli import main; main(['--help'], standalone_mode=False)"]
)
def test_import_and_help_load_nothing_heavy(use, tmp_path):
    show = f"{use}\nimport sys; print('loaded:', *{{name.split('.')[0] for name in sys.modules}})"
    loaded = set(
        run(sys.executable, "-c", show, cwd=tmp_path, PYTHONPATH=str(ROOT)).rpartition("loaded:")[2].split()
    )
    assert "kda_cupy" in loaded
    assert not loaded & {"cupy", "cupyx", "cupy_backends", "cuda", "torch", "jax", "matplotlib"}
