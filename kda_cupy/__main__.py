# SPDX-License-Identifier: Apache-2.0
"""``python -m kda_cupy``: the command line without its script on the PATH."""

from kda_cupy.cli import main

main(prog_name="kda-cupy")
