# SPDX-License-Identifier: Apache-2.0
"""Runs an example in an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
