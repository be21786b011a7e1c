# SPDX-License-Identifier: Apache-2.0
"""Write docs/errors.md from the error catalogue: ``python scripts/write_error_docs.py [FILE]``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kda_cupy.error_pages import as_markdown  # noqa: E402

if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "errors.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(as_markdown(), encoding="utf-8", newline="\n")
    print(f"wrote {page}")
