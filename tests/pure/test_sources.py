# SPDX-License-Identifier: Apache-2.0
"""One text per kernel, and line numbers that are those of the files."""

import re

import pytest

from kda_cupy import sources


@pytest.mark.parametrize("name", sources.kernel_names())
def test_every_line_keeps_its_file_and_number(name: str) -> None:
    """What the compiler reports as ``gates.cuh(12)`` is line 12 of gates.cuh."""
    file, number, seen = "", 0, 0
    for line in sources.flatten(name).split("\n"):
        directive = re.fullmatch(r'#line (\d+) "([\w.]+)"', line)
        if directive:
            number, file = int(directive[1]), directive[2]
            continue
        if line.strip():
            assert line == sources.read_kernel(file).split("\n")[number - 1], (file, number)
            seen += 1
        number += 1
    assert seen > 10


def test_headers_are_pasted_once_and_folders_are_found() -> None:
    text = sources.flatten("packed_decode.cu")
    assert text.count("struct bf16 {") == 1 and "#include" not in text and "#pragma once" not in text
    assert (sources.kernel_folder() / "packed_decode.cu").is_file()


def test_digest_follows_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed header is a changed kernel: for the record, and for CuPy's disk cache."""
    before = sources.digest("packed_decode.cu")
    read = sources.read_kernel
    monkeypatch.setattr(
        sources, "read_kernel", lambda name: read(name) + ("\n// x" if name == "gates.cuh" else "")
    )
    sources.flatten.cache_clear()
    try:
        assert sources.digest("packed_decode.cu") != before
    finally:
        sources.flatten.cache_clear()
