# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: what pages link to outside docs/ (examples, kernels, records, tests) becomes part of the site.

In the repository ``../examples/x.py`` is where such a link leads; on the site the folder stands beside the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(\.\./((?:benchmarks|examples|kernels|scripts|tests)/[^)#\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to. mkdocs calls this once a build."""
    pages = [file.content_string for file in files.documentation_pages()]
    for target in sorted({found[1] for page in pages for found in LINK.finditer(page)}):
        if (ROOT / target).is_file():
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""Point links at them. mkdocs calls this once a page.

    A forge takes the backslash of ``\<``, which keeps a formula from turning into a tag; mkdocs would show it.
    """
    return LINK.sub(r"](\1)", markdown).replace("\\<", "&lt;")
