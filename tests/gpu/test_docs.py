# SPDX-License-Identifier: Apache-2.0
"""Blocks of the pages that need a GPU, and those for torch with torch's memory on it."""

from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import PAGES, needs_of, run_page

import kda_cupy


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "gpu" in needs_of(page)], ids=lambda page: page.name
)
def test_its_code_for_a_gpu_runs(page: Path) -> None:
    assert run_page(page, {"gpu"}) > run_page(page)
    kda_cupy.check_errors()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "torch" in needs_of(page)], ids=lambda page: page.name
)
def test_its_code_for_torch_runs(page: Path, torch: ModuleType) -> None:
    assert run_page(page, {"gpu", "torch"}) > 0
    kda_cupy.check_errors()
