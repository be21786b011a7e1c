# SPDX-License-Identifier: Apache-2.0
"""Who may skip. A test of the GPU layer skips where there is no GPU, and fails there under KDA_CUPY_REQUIRE_GPU=1."""

import functools
import importlib
import os
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("long", max_examples=3_000, stateful_step_count=50)

# Shared test code whose asserts should show their values too; it has to be named before it is imported.
pytest.register_assert_rewrite(
    "conv_contract",
    "doc_blocks",
    "layer_contract",
    "mtp_contract",
    "mtp_problems",
    "numbers_contract",
    "packed_decode_contract",
    "problems",
    "run_example",
    "sequence_model",
    "step_contract",
    "step_problems",
)

LAYERS = ("gpu", "compile")
"""Folders under tests/ that mark their tests, so that none can forget to."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, default=0, help="how long tests/gpu/test_sequences.py plays games"
    )


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--minutes"))


@functools.cache
def missing_gpu() -> str | None:
    """Why tests of the GPU layer cannot run here, or None if they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    return None if cupy.is_available() else "CuPy finds no usable CUDA device"


def require_gpu() -> bool:
    return os.environ.get("KDA_CUPY_REQUIRE_GPU") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        layer = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if layer in LAYERS:
            item.add_marker(layer)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or (reason := missing_gpu()) is None:
        return
    if require_gpu():
        pytest.fail(f"KDA_CUPY_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords]
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} GPU {'test' if count == 1 else 'tests'} skipped: {reason}")


def _optional(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        pytest.skip(f"{package} is not installed; ./scripts/test.sh --with {package}")


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """The package, or a skip that says how to get it."""
    return _optional("torch")


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    """The package, or a skip that says how to get it."""
    return _optional("jax")
