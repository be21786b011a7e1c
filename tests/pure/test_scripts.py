# SPDX-License-Identifier: Apache-2.0
"""What the scripts decide: which Python, which CuPy, and whether there is anything to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import environment

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash")


@pytest.mark.parametrize(
    ("version", "fallback", "extra", "reason"),
    [
        (13000, None, "cu13", "the NVIDIA driver supports CUDA 13.0"),
        (13010, "cu13", "cu13", "the NVIDIA driver supports CUDA 13.1"),
        (12080, None, "cu12", "the NVIDIA driver supports CUDA 12.8"),
        (12000, "cu13", "cu12", "the NVIDIA driver supports CUDA 12.0"),
        (None, None, None, "no NVIDIA driver here"),
        (None, "cu13", "cu13", "no NVIDIA driver here"),
        (
            11080,
            None,
            None,
            "the NVIDIA driver supports CUDA 11.8, too old for CuPy 14: update it to 12.0 or newer to use the GPU",
        ),
    ],
)
def test_cupy_follows_the_driver(version, fallback, extra, reason):
    assert environment.choose_cupy(version, fallback) == (extra, reason)


def test_compiler_for_tests_is_of_the_same_cuda_as_cupy():
    asked = {"group:test", "group:compile"}
    assert environment.complete(asked, "cu12") == {"group:test", "group:compile-cu12", "extra:cu12"}
    assert environment.complete(asked, None) == {"group:test"}


@pytest.fixture
def installs(tmp_path, monkeypatch):
    """A project folder of its own; gives a function that runs main and returns what that installed and remade."""
    root = tmp_path / "project"
    (root / ".venv").mkdir(parents=True)
    (root / "pyproject.toml").write_text("one")
    log = []
    monkeypatch.setattr(environment, "ROOT", root)
    monkeypatch.setattr(environment, "VENV", root / ".venv")
    monkeypatch.setattr(environment, "STAMP", root / ".venv" / "stamp.json")
    monkeypatch.setattr(environment, "usable", lambda: True)
    monkeypatch.setattr(environment, "install", lambda names: log.append(sorted(names)))
    monkeypatch.setattr(environment.venv, "create", lambda *_, **__: log.append("new .venv"))

    def run(*arguments, cuda=None):
        log.clear()
        monkeypatch.setattr(sys, "argv", ["environment.py", *arguments])
        monkeypatch.setattr(environment, "driver_cuda_version", lambda: cuda)
        assert environment.main() == 0
        return list(log)

    run.root = root
    return run


def test_nothing_is_installed_twice(installs):
    assert installs("group:test", cuda=13000) == [["extra:cu13", "group:test"]]
    assert installs("group:test", cuda=13000) == []
    assert installs(cuda=13000) == []


def test_a_further_group_keeps_what_is_there(installs):
    installs("group:test")
    assert installs("group:torch") == [["group:test", "group:torch"]]


def test_changed_metadata_install_anew(installs):
    installs("group:old", cuda=12080)
    (installs.root / "pyproject.toml").write_text("two")
    assert installs("group:new") == [["extra:cu12", "group:new"]]
    assert installs(cuda=13000) == ["new .venv", ["extra:cu13"]]


def test_a_moved_folder_installs_anew(installs, monkeypatch):
    installs("group:test")
    moved = installs.root.rename(installs.root.with_name("elsewhere"))
    monkeypatch.setattr(environment, "ROOT", moved)
    monkeypatch.setattr(environment, "STAMP", moved / ".venv" / "stamp.json")
    assert installs("group:test") == [["group:test"]]


def test_another_cuda_makes_a_new_environment(installs):
    installs("group:test", cuda=12080)
    assert installs(cuda=13000) == ["new .venv", ["extra:cu13"]]


def test_losing_the_driver_keeps_the_environment(installs):
    installs("group:test", cuda=12080)
    assert installs("group:test") == []


def test_half_an_installation_is_repeated(installs, monkeypatch, capsys):
    def broken(names):
        raise subprocess.CalledProcessError(3, "pip")

    installs("group:test")
    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", broken)
        patch.setattr(sys, "argv", ["environment.py", "group:torch"])
        assert environment.main() == 3
    assert "The installation failed; what pip said stands above." in capsys.readouterr().err
    assert installs("group:torch") == [["group:torch"]]


def find_python(commands, tmp_path):
    """Run find_python where PATH holds nothing but ``commands``, a dictionary of names and shell lines."""
    here = tmp_path / "a folder with spaces"
    shutil.copytree(ROOT / "scripts", here / "scripts")
    (here / "bin").mkdir()
    for name, line in commands.items():
        (here / "bin" / name).write_text(f"#!{BASH}\n{line}\n")
        (here / "bin" / name).chmod(0o755)
    script = 'set -euo pipefail; source scripts/environment.sh; [ "$ROOT" = "$PWD" ]; find_python'
    return subprocess.run(
        [BASH, "-c", script],
        cwd=here,
        env={"PATH": str(here / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_first_python_that_is_new_enough_is_taken(tmp_path):
    found = find_python({"python3": "exit 1", "python3.12": "echo good", "python3.11": "echo good"}, tmp_path)
    assert (found.stdout, found.returncode) == ("python3.12\n", 0)


def test_no_python_is_said_in_one_line(tmp_path):
    found = find_python({"python3": "echo 'not installed here' >&2; exit 127"}, tmp_path)
    assert found.returncode == 1
    assert found.stderr == (
        "Python 3.11 or newer is needed and none is in PATH. Install one, or name it: PYTHON=/path/to/python3\n"
    )


def test_missing_venv_module_is_said_in_one_line(tmp_path):
    found = find_python({"python3": "echo 'no venv'"}, tmp_path)
    assert found.returncode == 1
    assert found.stderr == (
        "python3 is new enough but has no venv module. On Debian and Ubuntu: apt-get install python3-venv\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with", "torch,tensorflow"], "--with tensorflow: only torch and jax are known\n"),
        (["--with"], "--with needs a value: torch, jax or torch,jax\n"),
    ],
)
def test_unknown_packages_are_refused_before_anything_is_made(arguments, message, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    done = subprocess.run(
        [BASH, tmp_path / "scripts" / "test.sh", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, message)
    assert not (tmp_path / ".venv").exists()


@pytest.fixture
def gpu_layer(tmp_path):
    """Run a one-test GPU layer under our conftest.py on what looks like a machine without a GPU."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "gpu" / "test_one.py").write_text("def test_one():\n    pass\n")

    def run(**variables):
        environment = {name: value for name, value in os.environ.items() if name != "KDA_CUPY_REQUIRE_GPU"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={**environment, "CUDA_VISIBLE_DEVICES": "", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_skipped_gpu_tests_are_counted(gpu_layer):
    done = gpu_layer()
    assert done.returncode == 0
    assert "\n1 GPU test skipped: CuPy " in done.stdout
    assert "1 skipped" in done.stdout.splitlines()[-1]


def test_gpu_tests_fail_where_a_gpu_is_required(gpu_layer):
    done = gpu_layer(KDA_CUPY_REQUIRE_GPU="1")
    assert done.returncode == 1
    assert "KDA_CUPY_REQUIRE_GPU=1, but CuPy " in done.stdout
    assert "1 error" in done.stdout.splitlines()[-1]
