# SPDX-License-Identifier: Apache-2.0
"""Pages say what is true: their code runs, their commands exist, their links lead somewhere, what is written by a
script is what the script writes."""

import doctest
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import click
import ml_dtypes
import numpy as np
import pytest
from doc_blocks import GENERATED, PAGES, ROOT, blocks_of, needs_of, run_page

import kda_cupy
from kda_cupy.bench.options import Refused
from kda_cupy.cli import main

EVERY_PAGE = [
    *PAGES,
    *(ROOT / "docs" / name for name in sorted(GENERATED)),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]
KNOWN_NEEDS = {"gpu", "torch"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_code_runs_and_prints_what_it_says(page: Path) -> None:
    python = [block for block in blocks_of(page) if block.language == "python"]
    assert run_page(page) == sum(not block.needs for block in python)
    assert needs_of(page) <= KNOWN_NEEDS


@pytest.mark.parametrize("page", [page for page in PAGES if "torch" in needs_of(page)], ids=name_of)
def test_its_code_for_torch_runs(page: Path, torch: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("runs on the GPU: see tests/gpu/test_docs.py")
    assert run_page(page, {"torch"}) > 0


def test_no_block_is_in_a_language_that_no_test_looks_at() -> None:
    for page in PAGES:
        assert {block.language for block in blocks_of(page)} <= {"python", "text", "bash"}, page.name
        assert page.read_text(encoding="utf-8").count("```") == 2 * sum(
            1 + (block.printed is not None) for block in blocks_of(page)
        )


def commands() -> list[tuple[str, str]]:
    """Lines of all bash blocks, those that end with a backslash joined."""
    return [
        (block.page.name, line)
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "bash"
        for line in block.code.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_exists_and_takes_these_options(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    if words and words[0] == "eval":
        words = shlex.split(words[1].removeprefix("$(").removesuffix(")"))
    while words and re.match(r"(export$|[A-Z_]+=)", words[0]):
        words = words[1:]
    for word in ("|", ">", "<"):
        words = words[: words.index(word)] if word in words else words
    if not words:
        return
    program = words[0].removeprefix("./")
    if program == "kda-cupy":
        try:
            _parse(main, words[1:])
        except Refused as refusal:  # a peer whose package is not here was found by its name
            assert re.search("not installed|No module named", str(refusal))
    elif program in ("pip", "python"):
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        for extra in re.findall(r"\[(\w+)\]", line):
            assert extra in known["project"]["optional-dependencies"]
        for script in re.findall(r"\S+\.py", line):
            assert (ROOT / script).is_file(), script
    else:
        assert (ROOT / program).is_file(), f"{page}: no test knows the command {words[0]}"


def _parse(command: click.Command, words: list[str]) -> None:
    """Let click read a command line, and do nothing."""
    files = {"json": __file__, "html": __file__, "py": str(ROOT / "examples" / "peer_in_plain_torch.py")}
    stand_ins = [files.get(word.rpartition(".")[2], word) for word in words]
    context = command.make_context(command.name, stand_ins)
    while isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
        _, command, rest = command.resolve_command(context, rest)
        context = command.make_context(command.name, rest, parent=context)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_its_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        to = page if not path else page.parent / path
        assert to.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(to), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Ids of its headings, as the site and a forge make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def test_every_page_is_in_the_menu() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"([\w/]+\.md)$", config, re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


@pytest.mark.parametrize(
    ("script", "written"),
    [("write_api_docs.py", "docs/api.md"), ("draw_speed.py", "docs/figures/decode.svg")],
)
def test_what_a_script_writes_is_current(script: str, written: str, tmp_path: Path) -> None:
    target = tmp_path / Path(written).name
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), str(target)], check=True, stdout=subprocess.DEVNULL
    )
    assert target.read_bytes() == (ROOT / written).read_bytes(), f"run: python scripts/{script}"


def test_tables_of_the_page_on_performance_are_those_of_the_newest_records() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_readme_table.py"))
    pages = script["PAGES"]
    assert set(pages) == {"README.md", "docs/performance.md"}
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    markers = re.findall(r"^<!-- (.+): written from", text, re.MULTILINE)
    assert set(markers) == {*script["TABLES"], "machine", "every row", "peers"}
    assert script["with_tables"](text, pages["docs/performance.md"]) == text


def test_a_record_with_all_operations_has_a_table_for_each() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_readme_table.py"))
    row = {
        "op": "kda", "H": 12, "HV": 12, "K": 128, "V": 128, "B": 1, "t": 1, "mode": "", "accept": 0, "yardstick": "RW",
        "median_us": 3.0, "p95_us": 3.5, "noise_percent": 0.5, "yardstick_us": 2.0, "gb_per_s": 1000.4,
        "error_out": 1e-3, "error_state": None, "status": "timed",
    }  # fmt: skip
    verify = row | {"operation": "verify", "t": 8, "mode": "rings", "yardstick": "R"}
    rows = [row, verify, verify | {"median_us": None, "status": "skipped"}]
    head = (
        "| | rows | median us | p95 us | noise % | GB/s | yardstick | ratio | error, output | error, state |"
    )
    lines = script["every_row"]({"bench": {"rows": rows}}).splitlines()
    assert [line for line in lines if line.startswith("#")] == ["### decode", "### verify"]
    assert lines.count(head) == 2 and len(lines) == 2 * 5 + 1
    assert lines[-1] == "| verify t=8, rings, H=12 | 1 | 3.00 | 3.50 | 0.50 | 1000 | R | x1.50 | 1.0e-03 |  |"


def test_a_record_with_a_peer_has_a_table_of_it() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_readme_table.py"))
    ours = {"op": "kda", "H": 12, "HV": 12, "B": 1, "median_us": 3.0, "yardstick_us": 2.0, "status": "timed"}
    rows = [ours, ours | {"peer": "fla", "median_us": 6.0}]
    rows += [ours | {"B": 8, "peer": "fla", "median_us": None, "status": "wrong"}]
    lines = script["peer_table"]({"gpu": "G", "bench": {"rows": rows}}, "r.json", "../").splitlines()
    assert lines[4] == "| KDA H=12, packed decode | 1 | fla | 6.00 (x3.00) | 3.00 (x1.50) | x2.00 |"
    assert lines[5] == "| KDA H=12, packed decode | 8 | fla | wrong |  |  |"


def test_examples_in_docstrings_run() -> None:
    """All of ``>>>``, with what a reader has: weights and projections."""
    H, D = 4, 128
    bf16 = np.dtype(ml_dtypes.bfloat16)
    given: dict[str, object] = {name: getattr(kda_cupy, name) for name in kda_cupy.__all__}
    given |= {f"w_{x}": np.ones((H * D, 4), np.float32) for x in "qkv"}
    given |= {"A_log": np.zeros(H, np.float32), "dt_bias": np.zeros(H * D, np.float32)}
    given |= {x: np.ones((1, H * D), bf16) for x in ("q", "k", "v", "g")}
    given |= {"beta": np.ones((1, H), bf16), "slots": np.array([1])}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in kda_cupy.__all__:
        for test in finder.find(getattr(kda_cupy, name), name, globs=dict(given)):
            runner.run(test)
    assert runner.tries >= 5 and runner.failures == 0
