# SPDX-License-Identifier: Apache-2.0
"""Code blocks of Markdown pages, and how they are run.

The Python blocks of a page are one program, run from top to bottom. A ``text`` block right behind one is what it
prints. A block with a mark above it, ``<!-- needs: gpu -->`` or ``<!-- needs: torch -->``, is left out
unless that is there.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = {"errors.md", "api.md"}
"""Written from the package; their own tests run what is in them."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED),
]
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[a-z ,]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    needs: frozenset[str]
    printed: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            frozenset((found["needs"] or "").replace(",", " ").split()),
            found["printed"],
        )
        for found in FENCE.finditer(text)
    ]


def needs_of(page: Path) -> set[str]:
    return {need for block in blocks_of(page) if block.language == "python" for need in block.needs}


def run_page(page: Path, have: set[str] = frozenset()) -> int:
    """Run what can be run with what is there; gives the number of blocks."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for block in blocks_of(page):
        if block.language != "python" or not block.needs <= have:
            continue
        out = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
        if block.printed is not None:
            assert out.getvalue() == block.printed, f"{page.name}:{block.line}"
        ran += 1
    return ran
