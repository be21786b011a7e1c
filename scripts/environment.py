# SPDX-License-Identifier: Apache-2.0
"""Make .venv beside the sources and install the project into it, unless that is done already.

Runs on any Python >= 3.11 with nothing but the standard library. All that it says goes to stderr, so that the
output of the command that comes after it stays clean.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kda-cupy.json"
"""What is installed and what it was made from. Written last, so that half an installation leaves none."""

PIP_FLOOR = "pip>=25.1"
"""The first that knows ``--group``; Python 3.11 brings 23."""
CUPY = {"extra:cu12", "extra:cu13"}
"""Two CuPy wheels in one environment break each other: to change it, .venv is made anew."""
OLDEST_CUDA, CUDA_13 = 12000, 13000
"""As the driver counts: 12040 is CUDA 12.4."""


def driver_cuda_version() -> int | None:
    """CUDA version that the NVIDIA driver supports, or None without a driver.

    Asks the library that CuPy will load itself: where that is missing, ``nvidia-smi`` in PATH is no help.
    """
    version = ctypes.c_int()
    for name in ("libcuda.so.1", "libcuda.so"):
        try:
            status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
        if status == 0 and version.value > 0:
            return version.value
    return None


def choose_cupy(version: int | None, fallback: str | None = None) -> tuple[str | None, str]:
    """Pick the extra that brings the CuPy wheel for a driver.

    Returns its name and the reason for it. Without a usable driver that is ``fallback``.
    """
    if version is None:
        return fallback, "no NVIDIA driver here"
    driver = f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}"
    if version < OLDEST_CUDA:
        return fallback, f"{driver}, too old for CuPy 14: update it to 12.0 or newer to use the GPU"
    return ("cu13" if version >= CUDA_13 else "cu12"), driver


def complete(asked: set[str], cupy: str | None) -> set[str]:
    """Add the chosen CuPy to what was asked for; ``group:compile`` needs the compiler of the same CUDA."""
    names = asked - {"group:compile"}
    if cupy is not None:
        names.add(f"extra:{cupy}")
        if "group:compile" in asked:
            names.add(f"group:compile-{cupy}")
    return names


def fingerprint() -> str:
    """Changes when an installation is out of date: other metadata, or the folder was moved."""
    return hashlib.sha256(bytes(ROOT) + b"\0" + (ROOT / "pyproject.toml").read_bytes()).hexdigest()


def read_stamp() -> tuple[str, set[str]]:
    """Fingerprint and names of the last installation; an empty one if there was none."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
        return stamp["fingerprint"], set(stamp["names"])
    except (OSError, ValueError, KeyError):
        return "", set()


def usable() -> bool:
    """Whether .venv has a Python that runs: it may have been removed or upgraded under our feet."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([PYTHON, "-c", check], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def install(names: set[str]) -> None:
    """Install the project, editable, with the extras and dependency groups in ``names``."""
    extras = ",".join(sorted(name.removeprefix("extra:") for name in names if name.startswith("extra:")))
    groups = sorted(name.removeprefix("group:") for name in names if name.startswith("group:"))
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    group_options = [option for group in groups for option in ("--group", group)]
    subprocess.run([*pip, PIP_FLOOR], check=True, cwd=ROOT, stdout=sys.stderr)
    project = f".[{extras}]" if extras else "."
    subprocess.run([*pip, "--editable", project, *group_options], check=True, cwd=ROOT, stdout=sys.stderr)


def say(text: str) -> None:
    """Print a line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Bring .venv to what the command line asks for; gives the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="extra:NAME|group:NAME")
    parser.add_argument("--cupy-always", action="store_true", help="install CuPy without a driver too")
    arguments = parser.parse_args()

    # CuPy has wheels for Linux (and Windows) only.
    fallback = "cu13" if arguments.cupy_always and sys.platform == "linux" else None
    cupy, reason = choose_cupy(driver_cuda_version(), fallback)
    names = complete(set(arguments.names), cupy)

    made_from, held = read_stamp()
    if not usable() or (CUPY & names and CUPY & held - names):
        say(f"Making .venv with Python {sys.version_info.major}.{sys.version_info.minor}")
        venv.create(VENV, clear=True, with_pip=True)
        made_from, held = "", set()
    if made_from != fingerprint():
        # A group that was renamed must not come back, but a CuPy that is there must not be forgotten.
        held &= CUPY
    elif names <= held:
        return 0
    names |= held
    STAMP.unlink(missing_ok=True)
    what = ", ".join(name.partition(":")[2] for name in sorted(names)) or "without CuPy"
    say(f"Installing kda-cupy ({what}) into .venv: {reason}. The first time takes some minutes ...")
    start = time.monotonic()
    try:
        install(names)
    except subprocess.CalledProcessError as error:
        say(
            "The installation failed; what pip said stands above. It needs a package index once, "
            "and follows pip's own settings for one."
        )
        return error.returncode or 1
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "names": sorted(names)}), encoding="utf-8")
    say(f"Installed in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
