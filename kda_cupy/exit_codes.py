# SPDX-License-Identifier: Apache-2.0
"""Exit codes of every command, in one place: the help shows this table, and so does docs/command_line.md."""

from __future__ import annotations

from typing import Final

RIGHT: Final = 0
WRONG: Final = 1
REFUSED: Final = 2
INTERRUPTED: Final = 130

MEANING: Final = {
    RIGHT: "everything is right",
    WRONG: "it ran, and something is not right: an error above its bound, a row not timed, a regression, a fault, "
    "nothing found",
    REFUSED: "it could not run: a wrong option, a file that cannot be read, no GPU",
    INTERRUPTED: "Ctrl-C; what was done by then is shown and kept",
}
